"""Keys, locks, sealed files, and models that run and train with locked weights."""

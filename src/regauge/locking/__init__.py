"""Keys, locks, sealed files, and models that run and train while their weights stay locked."""

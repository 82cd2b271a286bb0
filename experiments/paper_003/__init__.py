"""Paper 003: matching and merging pairs of independently trained models."""

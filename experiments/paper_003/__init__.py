"""Rotation symmetry (Zhang et al.): matching and merging independently trained models."""

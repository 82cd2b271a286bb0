"""Attacks on locked checkpoints."""

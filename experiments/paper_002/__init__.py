"""Masked jigsaw puzzles (Liu et al.): accuracy, robustness, positions, gradient leakage."""

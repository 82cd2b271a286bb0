"""Permutation equivariance (Xu et al.): permuted models, split learning, locked fine-tuning."""

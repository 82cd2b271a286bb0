"""Datasets, tokenizers, tasks and the training loop."""

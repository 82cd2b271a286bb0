"""Checkpoints on disk: readers, writers, conversion, adapters, element files and spec files."""

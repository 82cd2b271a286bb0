"""Bytes on disk: read, plan, write and convert checkpoints; element files, spec files and
adapters.
"""

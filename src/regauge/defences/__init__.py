"""Defences of split and federated learning: transforms of what a client sends."""

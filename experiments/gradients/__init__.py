"""Gradient leakage: the cost of defences, and attacks on pre-trained models."""

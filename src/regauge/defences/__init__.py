"""Defences of split and federated training: what a client does to data before they leave it."""

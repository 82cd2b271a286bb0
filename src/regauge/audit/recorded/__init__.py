"""Audit of a recorded federated run: attack the updates that the server received."""

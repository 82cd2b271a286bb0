"""The audit of a recorded federated run: attack the contributions that the server received."""

"""Paper 000: permutation of rows and columns, split learning, locked fine-tuning."""

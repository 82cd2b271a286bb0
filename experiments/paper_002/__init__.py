"""Paper 002: masked jigsaw puzzles, and what gradients leak with and without them."""

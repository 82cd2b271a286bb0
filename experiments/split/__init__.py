"""Split learning: equality with local training, leakage and defences."""

"""Federated learning: FedAvg with defences, and fusion of independent clients."""

"""The server of split learning: sessions, execution, training, checkpoints and quotas."""

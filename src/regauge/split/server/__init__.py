"""The server of split learning: sessions, passes through the backbone, training, checkpoints,
quotas.
"""

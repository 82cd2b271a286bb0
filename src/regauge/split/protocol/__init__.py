"""The wire format of split learning: frames, messages, channels and certificates."""

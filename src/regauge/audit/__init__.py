"""Audits: run every attack on the user's own case and score it against the truth."""

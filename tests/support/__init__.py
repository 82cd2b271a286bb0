"""Builders and helpers that tests share."""

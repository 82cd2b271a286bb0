"""Checking the theorems on what runs."""

"""Measured numbers with their baseline and control: findings, metrics and the HTML report."""

"""Benchmarks: side by side with a yardstick, in one run, as ratios. `python -m benchmarks
[NAME...]`.
"""

"""Long adversarial runs: `python -m soak` fuzzes files and frames, sends memory bombs and floods,
kills processes, and prints one table of counts.
"""

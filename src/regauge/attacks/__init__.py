"""Attacks: each is a function of a view, which holds exactly what one adversary has.

Nothing that the package imports leads to keys, locks or the ground truth
(`tests/project/test_imports.py`). Guesses are scored elsewhere (`regauge.audit`).
"""

from __future__ import annotations

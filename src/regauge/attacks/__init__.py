"""Attacks: each is a function of a view, which holds exactly what one adversary has.

The package imports the core and the matcher, and never keys, locks or the ground truth. Guesses are
scored elsewhere (`regauge.audit`).
"""

from __future__ import annotations

"""Attacks: what an adversary can do to what regauge protects. Each is a function of a view, which
holds what that adversary has and nothing else.

Here are the core and the matcher, and never keys, locks or the truth: whether a guess was right is
judged elsewhere (`regauge.audit.lock`).
"""

from __future__ import annotations

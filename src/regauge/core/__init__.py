"""The algebra: axes strings, groups, specs, elements and their action. No I/O, no models, no torch
at import.
"""

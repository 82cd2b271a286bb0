"""The algebra: axes strings, groups, specs, elements and their action on tensors. No I/O, no
models, no torch at import.
"""

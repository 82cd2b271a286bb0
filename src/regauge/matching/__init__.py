"""Matching: the element that aligns one model with another.

    regauge.match("A", "B").save("A-aligned")   # models: paths, hub ids, modules, state dicts

    found = match_states(spec, a, b)            # the element that moves a closest to b
    aligned = apply(found.element, a)           # the same function as a, in b's basis

One algorithm over the spec serves every family. Read `search` first: its `match_states` is the
whole loop.

    api, barrier_report
                     `match`, `compare` and `barrier` of what users hold
    presets          published methods by name
    pairs, live_pair two models checked against each other, and run
    paired           the search on a pair: with folded norms, or as stored where that is simpler
    search           the loop: first pass, sweeps
    preparation      both states checked, spaces and their groups selected, worker processes
    blocks, costs    tensors cut by their axes, and the pairs of blocks that are compared
    solver           one space given all others, by the closed form of its group's `fit`
    closed_forms     formulas beyond one group: basis-free cosines of heads, two-level assignment,
                     and those of rotation symmetry (arXiv:2502.00264)
    report           findings, tables and text of a match and of a comparison
    saved_parts      finished parts, so that an interrupted search repeats none
    result           the element with distances before, after and at every step
    activations      inputs and recorded activations, for matching by function
    refine, tangents learned steps on the group, towards a low loss between the models
    many             more than two models
    compare, barriers, connectivity, invariants, fingerprint
                     what two models have in common, measured
"""

from __future__ import annotations

from regauge.errors import MatchError
from regauge.matching.costs import SharedRows
from regauge.matching.preparation import layers_of
from regauge.matching.result import Match
from regauge.matching.search import match_states

__all__ = ["Match", "MatchError", "SharedRows", "layers_of", "match_states"]

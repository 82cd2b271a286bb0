"""The paper's own columns as an element: one permutation P on both sides of every projection, Z P
and P^-1 W P.
"""

from __future__ import annotations

import numpy as np

from regauge.core.action import act
from regauge.core.element import Element
from regauge.core.groups import Permutation
from regauge.core.members import Member, Monomial
from regauge.core.rng import Stream, seed_key
from regauge.core.spec import Spec


def head_columns(spec: Spec, seed: int) -> tuple[Element | None, str]:
    """The head-restricted permutation of the paper, or None and why the model has none.

    P must map heads to heads, since it also stands on the joined head axis of every layer; the
    stream's own permutations need no such restriction. Where the inside of a head allows no
    permutation (rotary positions), whole heads alone change places.
    """
    insides = {
        name: space.over
        for name, space in spec.spaces.items()
        if space.over is not None and space.over.startswith("head.")
    }
    sizes = {(spec.spaces[over].size, spec.spaces[name].size) for name, over in insides.items()}
    if "stream" not in spec.spaces or not sizes:
        return (
            None,
            (
                "the paper's columns need one stream and plain heads; grouped queries, stages and "
                "towers are beyond it"
            ),
        )
    heads, width = next(iter(sizes))
    if len(sizes) > 1 or heads * width != spec.spaces["stream"].size:
        return (
            None,
            (
                "the heads of a layer are together not as wide as the stream, so that no "
                "permutation can stand on both sides of a projection"
            ),
        )
    draw = Stream(seed_key(seed), "verify/heads")
    members: dict[str, Member] = dict.fromkeys(
        insides.values(), Monomial(draw.permutation(heads)[None])
    )
    free = all(
        isinstance(spec.spaces[name].group.within("permutation"), Permutation) for name in insides
    )
    if free:
        members |= dict.fromkeys(
            insides, Monomial(np.stack([draw.permutation(width) for _ in range(heads)]))
        )
    name, over = next(iter(insides.items()))
    joined = act(Element(spec, members), np.arange(heads * width), f"({over} {name})")
    remark = "" if free else "only whole heads change places: their insides allow no permutation"
    return Element(spec, {**members, "stream": Monomial(joined[None])}), remark

"""The column permutation of Xu et al. (arXiv:2304.07735) as an element: one permutation P on both
sides of every projection, Z P and P^-1 W P.
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
    """Return the paper's head-restricted permutation, or None and the reason.

    P must map heads to heads, because it also acts on the joined head axis of every layer; the
    stream's own permutations need no such restriction. If the inside of a head allows no
    permutation (rotary positions), only whole heads are permuted.
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
    stream = Stream(seed_key(seed), "verify/heads")
    members: dict[str, Member] = dict.fromkeys(
        insides.values(), Monomial(stream.permutation(heads)[None])
    )
    is_free = all(
        isinstance(spec.spaces[name].group.within("permutation"), Permutation) for name in insides
    )
    if is_free:
        members |= dict.fromkeys(
            insides, Monomial(np.stack([stream.permutation(width) for _ in range(heads)]))
        )
    name, over = next(iter(insides.items()))
    joined = act(Element(spec, members), np.arange(heads * width), f"({over} {name})")
    remark = "" if is_free else "only whole heads change places: their insides allow no permutation"
    return Element(spec, {**members, "stream": Monomial(joined[None])}), remark

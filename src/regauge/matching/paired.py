"""The search on a pair of models: by weights or by activations, with folded norms or as stored.

Weights find a planted or fine-tuned copy exactly. Between models that were trained apart,
activations give a smaller barrier; where a model can record some without data, they decide there.

Folded norms allow every rotation of the stream, and rotations align independently trained models
better than permutations do. For models with a common ancestor, moved or fine-tuned, the rotation is
a permutation up to noise. Then the norms stay as they are: the stream is permuted, nothing is
rounded, and tied heads stay tied. The stream is solved before the layers and shows which case it
is, so that the layers of such a copy are never compared in a rotated basis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.core.element import Element
from regauge.core.fit import make_summed_pair
from regauge.core.groups import Kind
from regauge.core.members import Member
from regauge.core.progress import Progress
from regauge.core.spec import Spec
from regauge.errors import RegaugeError
from regauge.matching.pairs import Pair
from regauge.matching.preparation import select_groups
from regauge.matching.result import Match
from regauge.matching.search import MAX_RELATED, match_states, solve_shared

if TYPE_CHECKING:
    from regauge.checkpoints.resume import StateStore
    from regauge.core.action import State
    from regauge.matching.activations import Activations

# The mean overlap of a rotation with the nearest permutation (1 if it is one) above which it is
# that permutation, up to noise. Between independently trained models it is near 0.2.
MIN_OVERLAP = 0.8


# Returns a number for each element, lower for a better alignment.
Judge = Callable[[Sequence[Element]], Sequence[float]]


def match_by_activations(
    spec: Spec,
    a: State,
    b: State,
    activations: tuple[Activations, Activations],
    judge: Judge | None,
    others: Sequence[Match] = (),
    **options: Any,
) -> Match:
    """Match by activations, and choose between the first pass and what sweeps make of it.

    The sweeps minimize the distance of the weights. Copies of one model need them; between models
    that were trained independently they may help or harm, as `judge` finds.

    Args:
        spec: the spec of both models.
        a: the state that moves.
        b: the state that stays.
        activations: the activations of both on the same inputs.
        judge: judges elements by how well the two mix; None trusts the sweeps.
        others: other matches of the two, to choose from as well.
        options: further options of `match_states`.
    """
    swept = match_states(spec, a, b, activations=activations, **options)
    if judge is None or swept.first is None or swept.relative_distance <= MAX_RELATED:
        return swept
    first = replace(swept.with_element(swept.first, spec, a, b), steps=swept.steps[:1])
    choices = [first, swept, *others]
    scores = [math.inf if math.isnan(x) else x for x in judge([m.element for m in choices])]
    return choices[scores.index(min(scores))]


def match_apart(
    spec: Spec,
    a: State,
    b: State,
    record: Callable[[], tuple[tuple[Activations, Activations], Judge | None]],
    *,
    shared: Mapping[str, Any] | None = None,
    store: StateStore | None = None,
    **options: Any,
) -> Match:
    """Match by weights; models that this leaves apart also by their activations, if they can be
    recorded.

    Args:
        spec: the spec of both models.
        a: the state that moves.
        b: the state that stays.
        record: records the activations of both on the same inputs, and returns what judges
            elements on them.
        shared: the start of the match by weights, as options of `match_states`.
        store: where finished parts are saved.
        options: further options of `match_states`.
    """
    shared = shared or {}
    found = match_states(spec, a, b, store=store, sweep_unrelated=False, **shared, **options)
    if found.relative_distance <= MAX_RELATED:
        return found
    nested = store.nested("activations") if store else None
    try:
        activations, judge = record()
    except RegaugeError as error:  # activations were not requested
        swept = match_states(spec, a, b, store=store, **shared, **options)
        note = f"matched by the weights: {str(error).splitlines()[0]}"
        return replace(swept, notes=(*swept.notes, note))
    return match_by_activations(spec, a, b, activations, judge, [found], store=nested, **options)


def match_pair(
    pair: Pair,
    *,
    record: Callable[[], tuple[tuple[Activations, Activations], Judge | None]] | None = None,
    only_apart: bool = False,
    within: Kind = "full",
    store: StateStore | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> tuple[Pair, Match]:
    """Find the element that moves A closest to B.

    Args:
        pair: the two models.
        record: records the activations of both on the same inputs, and returns what judges
            elements on them; None matches by the weights.
        only_apart: match by activations only models that weights leave apart.
        within: the kind that every group is restricted to.
        store: where finished parts are saved.
        progress: the progress callback.
        options: further options of `match_states`.

    Returns:
        The pair as it was compared in the end, and the match.
    """
    search: Callable[..., Match] = match_states
    if options.get("start") is None:
        options.pop("start", None)
    if pair.is_folded and (record is None or only_apart) and "start" not in options:
        # The stream alone shows whether one is a permuted copy of the other.
        known = _solve_shared(pair, within, store, options)
        if known is not None:
            plain = pair.unfolded()
            shared: dict[str, Any] = {"start": known[0], "known_spaces": known[1]}
            start = permuted_start(plain.spec, known[0], within)
            if start is not None:
                permuted = match_states(
                    plain.spec,
                    *plain.states,
                    rows=pair.rows,
                    within=within,
                    store=store.nested("permuted stream") if store else None,
                    progress=progress,
                    sweep_unrelated=record is None,
                    **{**options, **shared, "start": start},
                )
                if record is None or permuted.relative_distance <= MAX_RELATED:
                    return plain, permuted
            search = partial(match_states, **shared)
            if record is not None:
                search = partial(match_apart, record=record, shared=shared)
        elif record is not None:
            search = partial(match_apart, record=record)
    elif record is not None and only_apart:
        search = partial(match_apart, record=record)
    elif record is not None:
        activations, judge = record()
        search = partial(match_by_activations, activations=activations, judge=judge)
    found = search(
        pair.spec,
        *pair.states,
        rows=pair.rows,
        within=within,
        store=store,
        progress=progress,
        **options,
    )
    if not pair.is_folded:
        return pair, found
    plain = pair.unfolded()
    start = permuted_start(plain.spec, found.element, within)
    if start is None:
        return pair, found
    a, b = plain.states
    again = match_states(
        plain.spec,
        a,
        b,
        rows=pair.rows,
        within=within,
        store=store.nested("permuted") if store else None,
        progress=progress,
        **{**options, "start": start},
    )
    return plain, replace(again, order=found.order, notes=found.notes, by=found.by)


def _solve_shared(
    pair: Pair, within: Kind, store: StateStore | None, options: Mapping[str, Any]
) -> tuple[Element, list[str]] | None:
    """Solve the spaces before the layers, if those are all that folding lets rotate."""
    plain, names = pair.unfolded().spec.spaces, ("workers", "sweeps", "nearest")
    options = {name: value for name, value in options.items() if name not in names}
    try:
        g, order = solve_shared(
            pair.spec, *pair.states, rows=pair.rows, within=within, store=store, **options
        )
    except np.linalg.LinAlgError:  # values that are not finite, which the search reports
        return None
    groups = select_groups(pair.spec, options.get("spaces"), options.get("layers"), within)
    rotated = {s for s, group in groups.items() if group != plain[s].group.within(within)}
    return (g, order) if rotated and rotated <= set(order) else None


def permuted_start(spec: Spec, g: Element, within: Kind = "full") -> Element | None:
    """Return an element found with folded norms as one of the model as stored.

    None if it rotates a space that may only be permuted there, by more than noise.

    Args:
        spec: the spec of the model, not folded.
        g: the element.
        within: the kind that every group is restricted to.
    """
    members: dict[str, Member] = {}
    for name, member in g.members.items():
        group = spec.spaces[name].group.within(within)
        if group == g.spec.spaces[name].group.within(within):
            members[name] = member
            continue
        matrix = member.matrix()
        members[name] = group.fit(plain=make_summed_pair(matrix))
        if _overlap(members[name], matrix) < MIN_OVERLAP:
            return None
    return Element(spec, members)


def _overlap(permutation: Member, matrix: Any) -> float:
    """Return the mean of the entries that a (signed) permutation selects."""
    return float((permutation.matrix() * matrix).sum(2).mean())

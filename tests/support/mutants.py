"""Deliberate faults of the core, each as a patch of live objects: `MUTANTS[name].install()` breaks
one thing in this process. Patches name objects, not source text, so that they survive renames and
rewritten functions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from regauge.core import (
    action,
    axes,
    check,
    element,
    fit,
    fold,
    groups,
    live,
    members,
    steps,
    uniform,
)
from regauge.core.element import Element
from regauge.core.members import Dense, Monomial, Planes
from regauge.core.rng import Stream
from regauge.core.steps import Chain, Gather, RotatePlanes

ACTION, AXES, FOLD, GROUPS, RNG, SPEC = (
    f"core/test_{name}.py" for name in ("action", "axes", "fold", "groups", "rng", "spec")
)


@dataclass(frozen=True)
class Mutant:
    """One fault, and the test file that must notice it."""

    install: Callable[[], None]
    tests: str


MUTANTS: dict[str, Mutant] = {}


def mutant(name: str, tests: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(install: Callable[[], None]) -> Callable[[], None]:
        MUTANTS[name] = Mutant(install, tests)
        return install

    return register


def swap(original: Callable[..., Any], fault: Callable[..., Any]) -> None:
    """Replace a function in every module of regauge that has imported it."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "regauge":
            for key, value in list(vars(module).items()):
                if value is original:
                    setattr(module, key, fault)


def redefine(cls: type, method: Callable[..., Any], fault: Callable[..., Any]) -> None:
    """Replace a method of a class."""
    assert getattr(cls, method.__name__) is method
    setattr(cls, method.__name__, fault)


# -- steps along one axis


@mutant("gather in the wrong direction", GROUPS)
def _gather_in_the_wrong_direction() -> None:
    call = Gather.__call__
    redefine(Gather, call, lambda s, x, dim: call(Gather(np.argsort(s.index), s.scale), x, dim))


@mutant("fused gathers in the wrong order", ACTION)
def _fused_gathers_in_the_wrong_order() -> None:
    fuse = steps._fuse
    swap(fuse, lambda a, b: replace(fuse(a, b), index=b.index[a.index]))


@mutant("a turn in the wrong direction", GROUPS)
def _a_turn_in_the_wrong_direction() -> None:
    call = RotatePlanes.__call__
    redefine(RotatePlanes, call, lambda s, x, dim: call(replace(s, factor=s.factor.conj()), x, dim))


@mutant("products acted on from the outside in", ACTION)
def _products_acted_on_from_the_outside_in() -> None:
    then = Chain.then
    redefine(Chain, then, lambda self, later: then(later, self))


# -- the action on tensors


@mutant("a bracket's star forgotten", ACTION)
def _a_bracket_star_forgotten() -> None:
    leaf_chain = action._leaf
    swap(leaf_chain, lambda g, leaf, n, at, star: leaf_chain(g, leaf, n, at, False))


@mutant("every star forgotten", ACTION)
def _every_star_forgotten() -> None:
    leaf_chain = action._leaf
    swap(leaf_chain, lambda g, leaf, n, at, star: leaf_chain(g, leaf, n, at, leaf.star))


@mutant("a barred axis scaled", ACTION)
def _a_barred_axis_scaled() -> None:
    leaf_chain = action._leaf

    def without_bar(g: Element, leaf: axes.Leaf, n: int, at: Any, star: bool) -> Chain:
        plain = replace(leaf, bar=False, star=star) if leaf.bar else leaf
        return leaf_chain(g, plain, n, at, star)

    swap(leaf_chain, without_bar)


@mutant("every head gets the first head's member", ACTION)
def _every_head_gets_the_first_head_member() -> None:
    leaf_chain = action._leaf
    swap(
        leaf_chain,
        lambda g, leaf, n, at, star: leaf_chain(g, leaf, n, dict.fromkeys(at, 0), star),
    )


@mutant("the last axis skipped", ACTION)
def _the_last_axis_skipped() -> None:
    compute = action._compute
    swap(compute, lambda x, chains: compute(x, chains[:-1]))


@mutant("parents on another axis not permuted", ACTION)
def _parents_on_another_axis_not_permuted() -> None:
    act_by_place = action._act_by_place

    def in_place(g: Element, x: Any, terms: Any, dim: int, at: Any) -> Any:
        others = {name: m for name, m in g.members.items() if name != terms[dim].space}
        return act_by_place(Element(g.spec, others), x, terms, dim, at)

    swap(act_by_place, in_place)


@mutant("experts that do not change places", ACTION)
def _experts_that_do_not_change_places() -> None:
    transforms = action.tensor_transforms
    swap(
        transforms,
        lambda g, part=None: (replace(t, source=t.name) for t in transforms(g, part)),
    )


@mutant("the part ignored", ACTION)
def _the_part_ignored() -> None:
    transforms = action.tensor_transforms
    swap(transforms, lambda g, part=None: transforms(g))


@mutant("float32 weights rounded twice", ACTION)
def _float32_weights_rounded_twice() -> None:
    move_weight = action._move_weight

    def in_float32(g: Element, name: str, text: str, at: Any, w: Any) -> Any:
        if isinstance(w, torch.Tensor) and w.dtype == torch.float32:
            return action.act(g, w, text, at=at)
        return move_weight(g, name, text, at, w)

    swap(move_weight, in_float32)


@mutant("negated views moved by their bits", ACTION)
def _negated_views_moved_by_their_bits() -> None:
    torch.Tensor.resolve_neg = lambda self: self  # type: ignore[method-assign]


# -- live modules and their optimizers


@mutant("second moments that follow signs", ACTION)
def _second_moments_that_follow_signs() -> None:
    live._FIRST_MOMENTS |= live._SECOND_MOMENTS


@mutant("optimizer state left behind", ACTION)
def _optimizer_state_left_behind() -> None:
    transform_states = live._transform_optimizer_states
    swap(transform_states, lambda *args: transform_states(*args)[:0])


@mutant("modules moved before they are checked", ACTION)
def _modules_moved_before_they_are_checked() -> None:
    live.check = lambda spec, state: []  # type: ignore[assignment]


# -- elements


@mutant("composition in the wrong order", ACTION)
def _composition_in_the_wrong_order() -> None:
    matmul = Element.__matmul__
    redefine(Element, matmul, lambda self, other: matmul(other, self))


@mutant("members that travel the wrong way", ACTION)
def _members_that_travel_the_wrong_way() -> None:
    swap(element._argsort, lambda index: index)


@mutant("members that do not travel in the inverse", ACTION)
def _members_that_do_not_travel_in_the_inverse() -> None:
    redefine(
        Element,
        Element.__invert__,
        lambda self: Element(self.spec, {n: m.inverse() for n, m in self.members.items()}),
    )


@mutant("elements of other sizes let through", ACTION)
def _elements_of_other_sizes_let_through() -> None:
    redefine(Element, Element._is_foreign, lambda self, name: False)


@mutant("elements outside the group let through", ACTION)
def _elements_outside_the_group_let_through() -> None:
    faults = Element.faults
    redefine(Element, faults, lambda self: [f for f in faults(self) if self._is_foreign(f.name)])


# -- members and groups


@mutant("an inverse scale at the wrong place", GROUPS)
def _an_inverse_scale_at_the_wrong_place() -> None:
    inverse = Monomial.inverse
    redefine(
        Monomial,
        inverse,
        lambda self: replace(inverse(self), scale=None if self.scale is None else 1 / self.scale),
    )


@mutant("a missing dual", GROUPS)
def _a_missing_dual() -> None:
    redefine(Monomial, Monomial.dual, lambda self: self)


@mutant("a dual without its transpose", GROUPS)
def _a_dual_without_its_transpose() -> None:
    redefine(Dense, Dense.dual, lambda self: self.inverse())


@mutant("a turn's dual not conjugated", GROUPS)
def _a_turn_dual_not_conjugated() -> None:
    redefine(Planes, Planes.dual, lambda self: self.inverse())


@mutant("scales composed at the wrong place", GROUPS)
def _scales_composed_at_the_wrong_place() -> None:
    after = Monomial.after

    def unmoved(self: Monomial, other: Any) -> Any:
        if not isinstance(other, Monomial) or other.scale is None:
            return after(self, other)
        index = Monomial(other.index)
        return Monomial(
            after(self, index).index,  # type: ignore[union-attr]
            other.scale if self.scale is None else self.scale * other.scale,
        )

    redefine(Monomial, after, unmoved)


@mutant("QR without the sign fix", GROUPS)
def _qr_without_the_sign_fix() -> None:
    swap(
        uniform.haar,
        lambda size, stream: np.linalg.qr(stream.normals(size * size).reshape(size, size))[0],
    )


@mutant("the all-ones vector not preserved", GROUPS)
def _the_all_ones_vector_not_preserved() -> None:
    lift = uniform.lift
    swap(lift, lambda r: lift(r) - 2 / (len(r) + 1))


@mutant("a signed fit without signs", GROUPS)
def _a_signed_fit_without_signs() -> None:
    fit_signed = fit.fit_signed
    swap(fit_signed, lambda *sides: replace(m := fit_signed(*sides), scale=np.abs(m.scale)))


@mutant("a rotation that is fitted transposed", GROUPS)
def _a_rotation_that_is_fitted_transposed() -> None:
    correlation = fit.correlation

    def transposed(*pairs: Any, total: Any = None) -> Any:
        turned = [p if p is None or isinstance(p, fit.SummedPair) else p[::-1] for p in pairs]
        return correlation(*turned, total=total)

    swap(correlation, transposed)


@mutant("any scale let through", GROUPS)
def _any_scale_let_through() -> None:
    swap(members.stretch_ratio, lambda factors: factors.max(1) / factors.min(1))


@mutant("fits that stretch without a limit", GROUPS)
def _fits_that_stretch_without_a_limit() -> None:
    swap(fit._clip_factors, lambda factors: factors)


@mutant("anything passes as orthogonal", GROUPS)
def _anything_passes_as_orthogonal() -> None:
    fault = groups.Orthogonal.fault
    redefine(
        groups.Orthogonal,
        fault,
        lambda self, member: fault(self, member) if isinstance(member, Monomial) else None,
    )


# -- random streams


def _shuffle(stream: Stream, n: int, *, cyclic: bool) -> Any:
    """Fisher-Yates without the rejection of biased words, or Sattolo's algorithm."""
    order = list(range(n))
    for i, word in zip(range(n - 1, 0, -1), stream.words(max(0, n - 1)).tolist(), strict=True):
        j = word % (i if cyclic else i + 1)
        order[i], order[j] = order[j], order[i]
    return np.array(order, dtype=np.int64)


@mutant("biased words not rejected", RNG)
def _biased_words_not_rejected() -> None:
    redefine(Stream, Stream.permutation, lambda self, n: _shuffle(self, n, cyclic=False))


@mutant("Sattolo's cycles for Fisher-Yates", RNG)
def _sattolo_cycles_for_fisher_yates() -> None:
    redefine(Stream, Stream.permutation, lambda self, n: _shuffle(self, n, cyclic=True))


@mutant("labels that do not separate", RNG)
def _labels_that_do_not_separate() -> None:
    init = Stream.__init__
    redefine(Stream, init, lambda self, key, label: init(self, key, ""))


@mutant("normals with a wrong radius", RNG)
def _normals_with_a_wrong_radius() -> None:
    normals = Stream.normals
    redefine(Stream, normals, lambda self, n: normals(self, n) / np.sqrt(2))


# -- the notation of axes


@mutant("duals that stop at sums", AXES)
def _duals_that_stop_at_sums() -> None:
    flip = axes._flip
    swap(flip, lambda term: term if isinstance(term, axes.Sum) else flip(term))


@mutant("a star that does not reach the factors", AXES)
def _a_star_that_does_not_reach_the_factors() -> None:
    leaves = axes.leaves
    swap(
        leaves,
        lambda term, star=False: leaves(
            replace(term, star=False) if isinstance(term, axes.Product) else term, star
        ),
    )


# -- checks of specs and states


@mutant("ties to a stream that is not orthogonal", SPEC)
def _ties_to_a_stream_that_is_not_orthogonal() -> None:
    swap(check._signature, check._leaf_places)


@mutant("surplus names let through", SPEC)
def _surplus_names_let_through() -> None:
    check_names = check._check_names
    swap(
        check_names,
        lambda spec, state: (f for f in check_names(spec, state) if f.name not in state),
    )


@mutant("wrong sizes let through", SPEC)
def _wrong_sizes_let_through() -> None:
    fits = check._fits
    swap(fits, lambda term, n, sizes: isinstance(term, axes.Leaf) or fits(term, n, sizes))


@mutant("folded gains not held to their value", SPEC)
def _folded_gains_not_held_to_their_value() -> None:
    swap(check.check_fixed, lambda spec, state: [])


# -- folding


@mutant("a norm's bias multiplied by its gain", FOLD)
def _a_norm_bias_multiplied_by_its_gain() -> None:
    fold_norm = fold.NormEdits.fold

    def inverted(self: Any, norm: Any) -> None:
        fold_norm(self, norm)
        if norm.bias is not None and norm.bias not in self.values:
            change = self.edits[norm.bias].pop()
            by = {**change.keywords, "by": 1 / change.keywords["by"]}
            self.edits[norm.bias].append(partial(change.func, **by))

    redefine(fold.NormEdits, fold_norm, inverted)


@mutant("a gain that is stored as its distance from one taken the other way", FOLD)
def _a_gain_that_is_stored_as_its_distance_from_one_taken_the_other_way() -> None:
    fold_norm = fold.NormEdits.fold

    def subtracted(self: Any, norm: Any) -> None:
        fold_norm(self, replace(norm, neutral=2 - norm.neutral))
        self.values[norm.gain] = partial(self._make_constant, norm.gain, norm.neutral)

    redefine(fold.NormEdits, fold_norm, subtracted)


@mutant("float32 folded in float32", FOLD)
def _float32_folded_in_float32() -> None:
    swap(fold.to_work_dtype, lambda x: x.to(torch.float32))


@mutant("a norm's bias lost", FOLD)
def _a_norm_bias_lost() -> None:
    redefine(fold.NormEdits, fold.NormEdits._shifted, lambda self, a, **more: a)


@mutant("a norm's bias taken up by the first expert alone", FOLD)
def _a_norm_bias_taken_up_by_the_first_expert_alone() -> None:
    bias_name = fold._bias_name
    swap(bias_name, lambda bias, entry: bias_name(bias, entry._replace(place=0)))


@mutant("rotations allowed beside a gain that stays", FOLD)
def _rotations_allowed_beside_a_gain_that_stays() -> None:
    folded_spec = fold.folded_spec

    def everywhere(spec: Any) -> Any:
        new = folded_spec(spec)
        spaces = {
            name: space if space.folded is None else replace(space, group=space.folded, folded=None)
            for name, space in new.spaces.items()
        }
        return replace(new, spaces=spaces)

    swap(folded_spec, everywhere)

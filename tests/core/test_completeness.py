"""Completeness: a spec misses no continuous symmetry.

At a generic point the kernel of d outputs / d parameters is the tangent space of everything that
leaves the function alone. Its dimension must be the dimension of the spec's group plus the flat
directions that are not a change of basis, which are named here one by one.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from regauge.core.action import apply
from regauge.core.element import Element
from regauge.core.fold import folded_spec
from regauge.core.groups import (
    GeneralLinear,
    Group,
    Orthogonal,
    OrthogonalFixingOnes,
    Rotary,
    Scaling,
)
from regauge.core.members import Dense, Member, Monomial, Planes
from regauge.core.spec import Spec
from regauge.core.uniform import ones_complement
from regauge.models.families import spec_from
from support.jacobians import CASES, group_dimension, jacobian, nullity
from support.picos import config_of


def generators(group: Group, n: int) -> list[np.ndarray]:
    """A basis of the group's tangent space at the identity, as matrices."""
    unit = [[np.outer(np.eye(n)[i], np.eye(n)[j]) for j in range(n)] for i in range(n)]
    match group:
        case GeneralLinear():
            return [unit[i][j] for i in range(n) for j in range(n)]
        case OrthogonalFixingOnes():
            b = ones_complement(n)
            return [b @ g @ b.T for g in generators(Orthogonal(), n - 1)]
        case Orthogonal():
            return [unit[i][j] - unit[j][i] for i in range(n) for j in range(i)]
        case Rotary(unit=False):
            planes = [np.eye(n // 2)[j][None] for j in range(n // 2)]
            return [Planes(c * p, group.layout).matrix()[0] for p in planes for c in (1 + 0j, 1j)]
        case Scaling():
            return [unit[i][i] for i in range(n)]
    return []


def step(group: Group, x: np.ndarray, t: float) -> Member:
    m = np.eye(len(x)) + t * x
    if isinstance(group, Scaling):
        return Monomial(np.arange(len(x))[None], np.diag(m)[None])
    return Dense(m[None])


def tangents(spec: Spec, model: torch.nn.Module) -> torch.Tensor:
    """The tangent space of the spec's orbit, by central differences along every generator of every
    space.
    """
    state = {k: v.detach() for k, v in model.named_parameters()}
    rows, t = [], 1e-4
    for name, space in spec.spaces.items():
        for x in generators(space.group, space.size):
            for k in range(spec.count(name)):
                ends = []
                for s in (t, -t):
                    one = step(space.group, x, s)
                    eye = space.group.identity(space.size, spec.count(name))
                    if isinstance(one, Dense):
                        values = eye.matrix().copy()
                        values[k] = one.values[0]
                        member: Member = Dense(values)
                    else:
                        assert isinstance(one, Monomial)
                        scale = np.ones((spec.count(name), space.size))
                        scale[k] = one.scale[0]  # type: ignore[index]
                        member = Monomial(
                            np.tile(np.arange(space.size), (spec.count(name), 1)), scale
                        )
                    ends.append(apply(Element(spec, {name: member}), state, force=True))
                rows.append(
                    torch.cat([((ends[0][n] - ends[1][n]) / (2 * t)).reshape(-1) for n in state])
                )
    return torch.stack(rows) if rows else torch.zeros(0, sum(v.numel() for v in state.values()))


@cache
def measured(case: str) -> tuple[torch.nn.Module, dict[str, int], bool, torch.Tensor]:
    """The model of a case, its flat directions, whether it folds, and its Jacobian."""
    model, inputs, extras, folds = CASES[case]()
    return model, extras, folds, jacobian(model, inputs)


@pytest.mark.parametrize("case", CASES)
def test_the_spec_misses_no_continuous_symmetry(case: str) -> None:
    model, extras, folds, j = measured(case)
    spec = spec_from(config_of(model), model.state_dict())
    # After folding, the stream may turn; on the unfolded model the same directions are turns with
    # the gains carried along.
    spec = folded_spec(spec) if folds else spec
    flat = nullity(j)
    assert j.shape[0] >= j.shape[1] - flat + 100, "more outputs are needed"
    assert flat == group_dimension(spec) + sum(extras.values())


@pytest.mark.parametrize("case", ["gpt2 tied", "llama grouped queries", "llama tied"])
def test_the_spec_claims_only_true_symmetries_and_counts_them_right(case: str) -> None:
    """Without folding: every generator lies in the kernel, and they are independent."""
    model, _, _, j = measured(case)
    spec = spec_from(config_of(model), model.state_dict())
    t = tangents(spec, model)
    assert float((j @ t.T).abs().max()) < 1e-5 * float(j.abs().max())
    assert int(torch.linalg.matrix_rank(t, atol=1e-6)) == len(t) == group_dimension(spec)


def test_a_spec_that_misses_a_symmetry_is_caught() -> None:
    from dataclasses import replace

    model, extras, _, j = measured("llama tied")
    spec = spec_from(config_of(model), model.state_dict())
    poorer = replace(
        spec,
        spaces={
            n: replace(s, group=Orthogonal()) if n.startswith("vo") else s
            for n, s in spec.spaces.items()
        },
    )
    assert nullity(j) != group_dimension(poorer) + sum(extras.values())

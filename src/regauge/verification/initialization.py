"""Training from scratch: a fresh initialization has the same distribution in every basis, so that
nothing needs to be transformed before training.

A permutation preserves the distribution of a tensor whose entries are identically distributed along
the permuted axes. The test uses fresh models of the same class and config: at each index of each
such axis, the mean and the mean square of the entries are compared with those of the whole tensor,
in standard errors. The control is the same test on a copy whose scale grows with the index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from regauge.core import axes as ax
from regauge.core.spec import Spec, stored_tensors
from regauge.results.findings import Finding
from regauge.verification.checks import Case

LIMIT = 7.0  # standard errors; the largest of a million normal numbers is about five
ENOUGH = 256  # entries behind each mean


def fresh_initialization(c: Case) -> list[Finding]:
    """Check that fresh weights have the same distribution at every index of the permuted axes."""
    statement = (
        "Freshly initialized weights have the same distribution in every basis: training from "
        "scratch needs no transform first."
    )
    model, source = c.subject.model, "permutation equivariance, Cor 4.6"
    tensors, deviations, control = _permuted_tensors(c.subject.spec), {"": 0.0}, 0.0
    try:
        states = _fresh_tensors(model, tensors, c.seed)
    except (TypeError, ValueError, AttributeError):
        return [
            Finding(
                "column/scratch",
                statement,
                None,
                sentence="the class cannot be built from its config alone",
                source=source,
            )
        ]
    for name, dims in tensors.items():
        if name not in states[0]:
            continue
        samples = torch.stack([state[name] for state in states]).double()
        for dim in dims:
            flat = samples.movedim(dim + 1, 0).flatten(1)
            deviations[name] = max(deviations.get(name, 0.0), _max_deviation(flat))
            control = max(
                control,
                _max_deviation(
                    flat * torch.linspace(0.5, 1.5, len(flat), dtype=torch.float64)[:, None]
                ),
            )
    worst_name = max(deviations, key=deviations.__getitem__)
    holds = deviations[worst_name] <= LIMIT
    sentence = (
        f"no channel of {len(deviations) - 1} tensors strays by more than "
        f"{deviations[worst_name]:.1f} standard errors in {len(states)} fresh models"
    )
    if not holds:
        sentence = (
            f"a channel of {worst_name} strays by {deviations[worst_name]:.1f} standard errors: "
            "its distribution depends on its place"
        )
    where = "" if holds else worst_name
    return [
        Finding(
            "column/scratch",
            statement,
            holds,
            deviations[worst_name],
            LIMIT,
            control,
            sentence,
            source,
            "z-score",
            where,
        )
    ]


def _fresh_tensors(
    model: Any, tensors: Mapping[str, Any], seed: int
) -> list[dict[str, torch.Tensor]]:
    """Return the random tensors of as many fresh models as give enough entries at each index."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first = _random_tensors(type(model)(model.config), tensors)
        fewest = min((t.numel() // max(t.shape) for t in first.values()), default=ENOUGH)
        return [
            first,
            *(
                _random_tensors(type(model)(model.config), tensors)
                for _ in range(min(64, math.ceil(ENOUGH / fewest)) - 1)
            ),
        ]


def _permuted_tensors(spec: Spec) -> dict[str, list[int]]:
    """Return the backbone's tensors and the axes that a column permutation acts on."""
    axes_by_name = {}
    for name, entry in stored_tensors(spec).items():
        if spec.parts.get(entry.pattern) == "backbone":
            dims = [
                i
                for i, term in enumerate(ax.parse(entry.axes).terms)
                if ax.spaces(str(ax.Axes((term,))))
            ]
            if dims:
                axes_by_name[name] = dims
    return axes_by_name


def _random_tensors(model: torch.nn.Module, names: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors that are random and not constant."""
    return {
        n: t
        for n, t in model.state_dict().items()
        if n in names and bool((t != t.flatten()[0]).any())
    }


def _max_deviation(flat: torch.Tensor) -> float:
    """Return the largest deviation of a row's mean or mean square from that of all rows, in
    standard errors.
    """
    n, largest = flat.shape[1], 0.0
    for values in (flat, flat.square()):
        error = values.std() / math.sqrt(n)
        largest = max(largest, float((values.mean(1) - values.mean()).abs().max() / error))
    return largest

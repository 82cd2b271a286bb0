"""From scratch: a fresh initialisation has the same law in every description, so that nothing needs
to be moved before training starts.

A permutation keeps the law of a tensor whose entries are drawn alike at every index of the axes
that it moves. Tested on fresh models of the same class and config: at each index of each such axis
the mean and the mean square of the entries are compared with those of the whole tensor, in standard
errors. The control is the same test on a copy whose scale grows with the index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from regauge.core import axes as ax
from regauge.core.spec import Spec, stored
from regauge.results.findings import Finding
from regauge.verification.checks import Case

LIMIT = 7.0  # standard errors; the largest of a million normal numbers is at five
ENOUGH = 256  # entries behind each mean


def scratch(c: Case) -> list[Finding]:
    statement = (
        "Fresh weights have the same law in every description: training from scratch "
        "needs no move first."
    )
    model, source = c.subject.model, "000 Cor 4.6"
    tensors, worst, control = _moved_tensors(c.subject.spec), {"": 0.0}, 0.0
    try:
        fresh = _fresh(model, tensors, c.seed)
    except (TypeError, ValueError, AttributeError):
        return [
            Finding(
                "column/scratch",
                statement,
                None,
                sentence="the class cannot be made anew from its config alone",
                source=source,
            )
        ]
    for name, dims in tensors.items():
        if name not in fresh[0]:
            continue
        draws = torch.stack([state[name] for state in fresh]).double()
        for dim in dims:
            flat = draws.movedim(dim + 1, 0).flatten(1)
            worst[name] = max(worst.get(name, 0.0), _stray(flat))
            control = max(
                control,
                _stray(flat * torch.linspace(0.5, 1.5, len(flat), dtype=torch.float64)[:, None]),
            )
    furthest = max(worst, key=worst.__getitem__)
    holds = worst[furthest] <= LIMIT
    sentence = (
        f"no channel of {len(worst) - 1} tensors strays by more than "
        f"{worst[furthest]:.1f} standard errors in {len(fresh)} fresh models"
    )
    if not holds:
        sentence = (
            f"a channel of {furthest} strays by {worst[furthest]:.1f} standard errors: "
            "its law depends on its place"
        )
    where = "" if holds else furthest
    return [
        Finding(
            "column/scratch",
            statement,
            holds,
            worst[furthest],
            LIMIT,
            control,
            sentence,
            source,
            "z-score",
            where,
        )
    ]


def _fresh(model: Any, tensors: Mapping[str, Any], seed: int) -> list[dict[str, torch.Tensor]]:
    """The drawn tensors of fresh models: of one, or of as many as it takes to have enough entries
    at each index.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        first = _drawn(type(model)(model.config), tensors)
        fewest = min((t.numel() // max(t.shape) for t in first.values()), default=ENOUGH)
        return [
            first,
            *(
                _drawn(type(model)(model.config), tensors)
                for _ in range(min(64, math.ceil(ENOUGH / fewest)) - 1)
            ),
        ]


def _moved_tensors(spec: Spec) -> dict[str, list[int]]:
    """The backbone's tensors, and which of their axes a column permutation moves."""
    out = {}
    for name, entry in stored(spec).items():
        if spec.parts.get(entry.pattern) == "backbone":
            dims = [
                i
                for i, term in enumerate(ax.parse(entry.axes).terms)
                if ax.spaces(str(ax.Axes((term,))))
            ]
            if dims:
                out[name] = dims
    return out


def _drawn(model: torch.nn.Module, names: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that are drawn and not constant."""
    return {
        n: t
        for n, t in model.state_dict().items()
        if n in names and bool((t != t.flatten()[0]).any())
    }


def _stray(flat: torch.Tensor) -> float:
    """How far the mean or the mean square of any row is from that of all rows, in standard
    errors.
    """
    n, out = flat.shape[1], 0.0
    for values in (flat, flat.square()):
        error = values.std() / math.sqrt(n)
        out = max(out, float((values.mean(1) - values.mean()).abs().max() / error))
    return out

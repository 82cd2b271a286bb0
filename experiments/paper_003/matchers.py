"""Ways to match two models, for Figures 3 to 6 of the rotation-symmetry paper and the benchmark of
Theus et al.

A way is a literal: the matcher (`by`, one of `FINDERS`) and its options. Adding one is one line.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from regauge.core.action import State
from regauge.core.element import Element, identity
from regauge.core.groups import Permutation, Scaling
from regauge.core.members import Member, Monomial, Soft
from regauge.core.rng import Floats
from regauge.core.spec import Spec
from regauge.data.tasks import Examples
from regauge.matching import match_states
from regauge.matching.activations import generate_text, record, sample_noise
from regauge.matching.costs import Costs
from regauge.matching.refine import refine
from regauge.merging.transport import transport_map

Tensor = torch.Tensor
How = Mapping[str, Any]

# The matcher of the rotation-symmetry paper: rotations within heads, one factor per head, and the
# order of neurons; biases as stored. The parts are independent, so that sweeps do not help.
PAPER: dict[str, Any] = {
    "by": "match",
    "spaces": ["qk", "vo", "ffn"],
    "within": "orthogonal",
    "rescale": True,
    "whole": True,
    "sweeps": 0,
}
HEADS = ["head", "kv", "rep"]
WAYS: dict[str, dict[str, Any]] = {
    "none": {"by": "none"},
    "folded": {"by": "none", "fold": True},
    "paper": PAPER,
    "without rescaling": {**PAPER, "rescale": False},
    "without FFN": {**PAPER, "spaces": ["qk", "vo"]},
    "without attention": {**PAPER, "spaces": ["ffn"]},
    "with heads": {**PAPER, "spaces": [*HEADS, *PAPER["spaces"]]},
    "with stream": {
        "by": "match",
        "within": "orthogonal",
        "rescale": True,
        "whole": True,
        "nearest": True,
    },
    "neurons": {"by": "match", "within": "permutation", "spaces": ["ffn"]},
    "permutations": {"by": "match", "within": "permutation", "nearest": True},
    "transport": {"by": "transport"},
    "soft transport": {"by": "transport", "soft": 0.05},
    "ours": {"by": "match", "fold": True, "nearest": True},
    "seen": {"by": "seen", "fold": True, "texts": 64, "sweeps": 10, "nearest": False},
    "refined": {"by": "refine", "fold": True, "texts": 256, "sweeps": 10, "steps": 200},
    "refined longer": {"by": "refine", "fold": True, "texts": 4096, "sweeps": 10, "steps": 1200},
    "drawn": {"by": "seen", "fold": True, "texts": 64, "sweeps": 10, "noise": True},
    "default": {"by": "default", "fold": True},
    "default refined": {"by": "default", "fold": True, "samples": 128, "steps": 300},
}
SAID = {
    "none": "unmatched",
    "folded": "norms folded, unmatched",
    "paper": "paper's matcher (rotations, rescaling, FFN)",
    "without rescaling": "paper's matcher without rescaling",
    "without FFN": "paper's matcher without FFN (attention only)",
    "without attention": "paper's matcher without attention (FFN only)",
    "with heads": "paper's matcher + order of heads",
    "with stream": "paper's matcher + order of heads + stream",
    "neurons": "Git Re-Basin, FFN only (as in the paper)",
    "permutations": "Git Re-Basin, all permutations",
    "transport": "OT-Fusion, FFN, exact transport",
    "soft transport": "OT-Fusion, FFN, Sinkhorn (not a symmetry)",
    "ours": "regauge, by weights",
    "seen": "regauge, by activations, then weights",
    "refined": "regauge, refined in 200 gradient steps",
    "refined longer": "regauge, refined in 1,200 gradient steps",
    "drawn": "regauge, by activations on noise, then weights",
    "default": "regauge match, by default",
    "default refined": "regauge match --refine, 300 steps, without data",
}


@dataclass(frozen=True)
class Request:
    """What a finder is given. `examples` are of the training data, and opened only where they are
    asked for.
    """

    spec: Spec
    a: State
    b: State
    how: How
    module: torch.nn.Module
    examples: Callable[[], Examples]


@dataclass(frozen=True)
class Found:
    element: Element
    soft: bool = False
    notes: Sequence[str] = ()


def _not_moved(r: Request) -> Found:
    return Found(identity(r.spec))


def _by_match(r: Request) -> Found:
    given = {k: v for k, v in r.how.items() if k not in ("by", "fold")}
    if (
        "spaces" in given
    ):  # a family without heads that move, or without grouped queries, has no such space
        roots = {s.split(".")[0] for s in r.spec.spaces}
        given["spaces"] = [s for s in given["spaces"] if s in roots]
    found = match_states(r.spec, r.a, r.b, **given)
    return Found(found.element, notes=found.notes)


def _by_seen(r: Request) -> Found:
    """By what the two do: language models on text that they write themselves, others on training
    data without labels, or on noise.
    """
    return Found(_seen(r, _inputs(r)))


def _by_refine(r: Request) -> Found:
    """The same, and then learned steps on the group, towards what the ends predict on such
    inputs.
    """
    inputs = _inputs(r)
    g, steps = _seen(r, inputs[: min(8, max(1, len(inputs) // 4))]), int(r.how["steps"])
    refined = refine(
        r.spec,
        r.a,
        r.b,
        g,
        r.module,
        inputs,
        steps=steps,
        held_out=min(0.1, 8 / len(inputs)),
        eval_every=max(1, steps // 10),
    )
    said = (
        f"divergence from the ends {refined.initial_loss:.4f} before learning, {refined.loss:.4f} "
        f"after {refined.best_step} steps"
    )
    return Found(refined.g, notes=(said,))


def _by_default(r: Request) -> Found:
    """As users match: by the defaults of `regauge.match`, and with `steps` refined on text that
    both generate, or on noise.
    """
    import regauge

    a, b = _modules(r)
    steps = r.how.get("steps")
    if steps is None:
        found = regauge.match(a, b)
    else:
        options = regauge.MatchOptions(refine_steps=steps, samples=r.how["samples"])
        generates = getattr(r.module, "can_generate", lambda: False)()
        found = regauge.match(a, b, refine="self" if generates else "noise", options=options)
    return Found(found.element.to(r.spec), notes=found.match.notes)


def _modules(r: Request) -> list[torch.nn.Module]:
    """Both ends as modules."""
    ends = []
    for state in (r.a, r.b):
        ends.append(copy.deepcopy(r.module).eval())
        ends[-1].load_state_dict(dict(state))
    return ends


def _seen(r: Request, inputs: Sequence[Mapping[str, Tensor]]) -> Element:
    seen = record(r.module, r.a, r.spec, inputs), record(r.module, r.b, r.spec, inputs)
    return match_states(
        r.spec,
        r.a,
        r.b,
        activations=seen,
        sweeps=int(r.how["sweeps"]),
        nearest=bool(r.how.get("nearest", True)),
    ).element


def _inputs(r: Request, batch: int = 8) -> list[dict[str, Tensor]]:
    count = int(r.how["texts"])
    if getattr(r.module, "can_generate", lambda: False)():
        return generate_text(_modules(r), count=count, batch_size=batch)
    if r.how.get("noise"):
        return sample_noise(r.module, count=4 * count, batch_size=4 * batch)
    examples = r.examples()
    rows = np.random.default_rng(0).permutation(len(examples))[
        : 4 * count
    ]  # a picture has fewer tokens than a text
    return [
        examples.batch(np.sort(rows[i : i + 4 * batch]))[0] for i in range(0, len(rows), 4 * batch)
    ]


def _by_transport(r: Request) -> Found:
    """OT-Fusion's matching of neurons (Singh and Jaggi 2020): transport between the two layers'
    neurons with uniform marginals, by the Euclidean distance of their incoming weights and biases.
    Exact transport ends in a vertex, which is a permutation. With `soft`, Sinkhorn's plan at that
    share of the mean cost, used as a barycentric map: it mixes neurons, and the moved model is
    another function.
    """
    members: dict[str, Member] = {}
    costs = Costs(r.spec, r.a, r.b)
    for space in r.spec.spaces:
        if space.split(".")[0] == "ffn" and isinstance(
            r.spec.spaces[space].group, Permutation | Scaling
        ):
            found = transport_map(*_incoming(costs, space), r.how.get("soft"))
            members[space] = (
                Soft(found[None]) if r.how.get("soft") else Monomial(found.argmax(1)[None])
            )
    return Found(Element(r.spec, members), bool(r.how.get("soft")))


def _incoming(costs: Costs, space: str) -> tuple[Floats, Floats]:
    """What each neuron reads, in b and in a: rows of weights and biases."""
    rows: list[tuple[Floats, Floats]] = []
    for y, x in costs.iter_block_pairs(space, identity(costs.spec), lambda block: True):
        place = y.axes_of(space)[0]
        leaf = y.dims[place]
        if leaf is not None and not leaf.star:
            rows.append((y.unfold(place), x.unfold(place)))
    there, here = (
        np.concatenate([np.asarray(pair[i], np.float64) for pair in rows], 1) for i in (0, 1)
    )
    return there, here


FINDERS: dict[str, Callable[[Request], Found]] = {
    "none": _not_moved,
    "match": _by_match,
    "transport": _by_transport,
    "seen": _by_seen,
    "refine": _by_refine,
    "default": _by_default,
}
READ = frozenset(
    {"seen", "refine"}
)  # the finders that look at data, where models do not write their own


def describe(how: How) -> str:
    """A way in words."""
    name = next((SAID[name] for name, way in WAYS.items() if way == how), str(how["by"]))
    return f"layers {how['layers']}" if "layers" in how else name

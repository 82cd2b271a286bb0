"""The matcher of the rotation-symmetry paper as plain numpy, layer by layer and head by head: the
reference for distances and times.

Model 1 is matched to model 2. For each head M = Q1 Q2^T + K1 K2^T = U S V^T (rows are a head's
coordinates, its slice of the bias one more column), R = U V^T, and Q1, K1 become R^T Q1, R^T K1;
the same for V and O; then the factor of the quartic; then an assignment of neurons. Absolute
positions only, as in the paper: with rotary positions its rotations are not a symmetry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from regauge.core.rng import Floats


@dataclass
class Layer:
    """Heads [H, d_h, d + 1] with their biases, o [H, d_h, d]; neurons up [f, d + 1] and down [f,
    d].
    """

    q: Floats
    k: Floats
    v: Floats
    o: Floats
    up: Floats
    down: Floats

    def parts(self) -> tuple[Floats, ...]:
        return self.q, self.k, self.v, self.o, self.up, self.down


NAMES = {
    "vit": (
        "vit.layers.{}.attention.{}_proj",
        ("q", "k", "v", "o"),
        ("vit.layers.{}.mlp.fc1", "vit.layers.{}.mlp.fc2"),
    ),
    "bert": (
        "bert.encoder.layer.{}.attention.{}",
        ("self.query", "self.key", "self.value", "output.dense"),
        ("bert.encoder.layer.{}.intermediate.dense", "bert.encoder.layer.{}.output.dense"),
    ),
}


def read(
    state: Mapping[str, Any], family: str, heads: int, dtype: Any = np.float64
) -> list[Layer] | None:
    """The layers of a state, or None for a family that the formulas do not fit, or whose names are
    not known here.
    """
    arrays = {
        name: t.detach().double().numpy().astype(dtype, copy=False)
        for name, t in state.items()
        if t.is_floating_point()
    }
    if family == "gpt2":
        return _read_gpt2(arrays, heads)
    if family not in NAMES:
        return None
    pattern, parts, (up, down) = NAMES[family]
    layers = []
    for i in range(_count(arrays, pattern.format("{}", parts[0]) + ".weight")):
        q, k, v = (_heads(_with_bias(arrays, pattern.format(i, p)), heads) for p in parts[:3])
        o = _heads(arrays[pattern.format(i, parts[3]) + ".weight"].T, heads)
        layers.append(
            Layer(
                q, k, v, o, _with_bias(arrays, up.format(i)), arrays[down.format(i) + ".weight"].T
            )
        )
    return layers or None


def _read_gpt2(arrays: Mapping[str, Floats], heads: int) -> list[Layer]:
    layers = []
    for i in range(_count(arrays, "transformer.h.{}.attn.c_attn.weight")):
        at = f"transformer.h.{i}."
        fused = np.concatenate(
            [arrays[at + "attn.c_attn.weight"].T, arrays[at + "attn.c_attn.bias"][:, None]], 1
        )
        q, k, v = (_heads(part, heads) for part in np.split(fused, 3))
        up = np.concatenate(
            [arrays[at + "mlp.c_fc.weight"].T, arrays[at + "mlp.c_fc.bias"][:, None]], 1
        )
        layers.append(
            Layer(
                q,
                k,
                v,
                _heads(arrays[at + "attn.c_proj.weight"], heads),
                up,
                arrays[at + "mlp.c_proj.weight"],
            )
        )
    return layers


def matched(one: Layer, two: Layer, *, rescale: bool = True) -> Layer:
    """One layer of model 1, moved next to that of model 2."""
    q, k, v, o = (x.copy() for x in (one.q, one.k, one.v, one.o))
    for h in range(len(q)):
        q[h], k[h] = _rotated(one.q[h], one.k[h], two.q[h], two.k[h], rescale)
        v[h], o[h] = _rotated(one.v[h], one.o[h], two.v[h], two.o[h], rescale)
    _, places = linear_sum_assignment(two.up @ one.up.T + two.down @ one.down.T, maximize=True)
    return Layer(q, k, v, o, one.up[places], one.down[places])


def _rotated(
    q1: Floats, k1: Floats, q2: Floats, k2: Floats, rescale: bool
) -> tuple[Floats, Floats]:
    u, _, vt = np.linalg.svd(q1 @ q2.T + k1 @ k2.T)
    r = u @ vt
    q1, k1 = r.T @ q1, r.T @ k1
    if not rescale:
        return q1, k1
    roots = np.roots([(q1**2).sum(), -(q1 * q2).sum(), 0.0, (k1 * k2).sum(), -(k1**2).sum()])
    real = [float(z.real) for z in roots if abs(z.imag) < 1e-9 * abs(z) and abs(z) > 1e-12] or [1.0]
    a = min(real, key=lambda z: ((z * q1 - q2) ** 2).sum() + ((k1 / z - k2) ** 2).sum())
    return a * q1, k1 / a


def squared(one: Layer, two: Layer) -> float:
    """The squared distance of two layers, in what the paper's matcher moves."""
    return float(sum(((x - y) ** 2).sum() for x, y in zip(one.parts(), two.parts(), strict=True)))


def _count(names: Iterable[str], pattern: str) -> int:
    """How many layers have a tensor of this name, the number of the layer left open."""
    written = re.compile(re.escape(pattern.format("@")).replace("@", r"\d+"))
    return sum(written.fullmatch(name) is not None for name in names)


def _with_bias(arrays: Mapping[str, Floats], name: str) -> Floats:
    return np.concatenate([arrays[name + ".weight"], arrays[name + ".bias"][:, None]], 1)


def _heads(rows: Floats, heads: int) -> Floats:
    return rows.reshape(heads, len(rows) // heads, -1)

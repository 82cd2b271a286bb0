"""Defences of federated training: what a client does to its model, its batch or its update before
the server sees anything.

    no-positions, mjp          on the model that both sides have
    rows, dropout              in the client's passes: tokens change places after the position
    embedding; the model's own dropout
    batch, steps, clients      how many samples, local steps and aggregated clients one update is
    made of
    freeze, withhold           tensors that are not trained, or trained and not sent
    clip, private, noise       on the update; `private` on each sample's gradient, with an epsilon
    prune, round               on the update: few of its numbers, or few bits of each

A combination is a text, "mjp=0.5+withhold=embedding+noise=0.1"; "none" is none. They act in the
order above, whatever order they are named in. None of them is a proof but `private`: `regauge audit
gradients` says what they buy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch

from regauge.defences.accountant import gaussian_epsilon
from regauge.defences.parser import NONE, DefenceError, parse_combination, require
from regauge.defences.split import KeyedRandom
from regauge.errors import RegaugeError
from regauge.jigsaw.layers import unwrap_model
from regauge.jigsaw.masks import check_ratio
from regauge.jigsaw.positions import find_positions

Tensor = torch.Tensor
PARTS = ("positions", "patches", "embedding", "first", "head", "matrices")


@dataclass(frozen=True)
class NoPositions:
    """The table of positions is zero and not trained (002's "w/o PEs"). With `sent` its gradient is
    in the update all the same, as an attack that takes the model for an ordinary one would have it.
    """

    sent: bool = False
    stage: ClassVar[int] = 0


@dataclass(frozen=True)
class Mjp:
    """Masked jigsaw puzzles: `ratio` of the patches are shuffled; with `unknown` they share one
    embedding, with `localize` the others are regressed. Without `shuffle` the model is one of MJP,
    and this update is made of the images as they are (002, Tab. 5 a).
    """

    ratio: float
    unknown: bool = True
    shuffle: bool = True
    localize: bool = True
    stage: ClassVar[int] = 0

    def __post_init__(self) -> None:
        require(
            check_ratio(self.ratio) > 0,
            "a puzzle of nothing is none",
            "give a ratio between 0 and 1",
        )


@dataclass(frozen=True)
class Rows:
    """Tokens change places where they enter the backbone, and go back where they leave it: a fresh
    permutation in every pass.
    """

    stage: ClassVar[int] = 1


@dataclass(frozen=True)
class Dropout:
    """The client's passes have the dropout that the model's config names. Without this they have
    none, as most attacks assume.
    """

    stage: ClassVar[int] = 1


@dataclass(frozen=True)
class Batch:
    """An update is of the mean loss of so many samples."""

    size: float
    stage: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _require_positive_integer(self.size, "samples")


@dataclass(frozen=True)
class Steps:
    """An update is the change of the weights after so many local steps of SGD at `rate`, all on the
    same batch, or with `fresh` each on its own.
    """

    count: float
    rate: float = 0.01
    fresh: bool = False
    stage: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _require_positive_integer(self.count, "steps")
        require(0 < self.rate < math.inf, f"{self.rate} is no rate", "give a positive number")


@dataclass(frozen=True)
class Clients:
    """The server sees the mean of so many clients' updates and no single one: secure aggregation,
    taken at its word.
    """

    count: float
    stage: ClassVar[int] = 2

    def __post_init__(self) -> None:
        _require_positive_integer(self.count, "clients")


class Withhold:
    """Parts of the update that are not sent: positions, patches, embedding (both, and first
    tokens), first (the first block), head, matrices (all that is no bias and no gain). They may be
    trained where they are, as each client's own.
    """

    stage: ClassVar[int] = 3

    def __init__(self, *what: str) -> None:
        require(
            bool(what) and all(w in PARTS for w in what),
            f"{', '.join(map(str, what)) or 'nothing'} cannot be withheld",
            f"parts: {', '.join(PARTS)}",
        )
        self.parts = tuple(what)

    def apply_to_update(
        self, tensors: Mapping[str, Tensor], model: torch.nn.Module, draw: KeyedRandom
    ) -> dict[str, Tensor]:
        gone = {name for part in self.parts for name in part_parameters(model, part)}
        return {name: t for name, t in tensors.items() if name not in gone}


class Freeze(Withhold):
    """The same parts, not trained by anyone: nothing of them is in the update."""


@dataclass(frozen=True)
class Clip:
    """The whole update has at most this norm."""

    norm: float
    stage: ClassVar[int] = 4

    def __post_init__(self) -> None:
        require(
            0 < self.norm < math.inf,
            f"a norm of {self.norm} clips all or nothing",
            "give a positive number",
        )

    def apply_to_update(
        self, tensors: Mapping[str, Tensor], model: torch.nn.Module, draw: KeyedRandom
    ) -> dict[str, Tensor]:
        return clip_global_norm(tensors, self.norm)


@dataclass(frozen=True)
class Private:
    """Differentially private gradients (DP-SGD): each sample's is clipped to `norm`, their sum gets
    Gaussian noise of `multiplier` times `norm`.
    """

    multiplier: float
    norm: float = 1.0
    stage: ClassVar[int] = 4

    def __post_init__(self) -> None:
        for value in (self.multiplier, self.norm):
            require(
                0 < value < math.inf,
                f"{value} is no noise multiplier or norm",
                "both are positive numbers",
            )

    def apply_to_update(
        self,
        tensors: Mapping[str, Tensor],
        model: torch.nn.Module,
        draw: KeyedRandom,
        count: int = 1,
    ) -> dict[str, Tensor]:
        """Noise on a mean of `count` clipped gradients."""
        size = self.multiplier * self.norm / count
        return {name: t + size * draw.normal(f"private/{name}", t) for name, t in tensors.items()}

    def epsilon(self, releases: int = 1, delta: float = 1e-5) -> float:
        """Of a sample that was in so many updates, next to a training without it, for whoever sees
        all of them; no sampling is assumed to hide it.
        """
        return gaussian_epsilon(self.multiplier, releases, delta, "ADD_OR_REMOVE_ONE")


@dataclass(frozen=True)
class Noise:
    """Gaussian noise on the update, of `scale` times each tensor's own root mean square; on one
    part alone where one is named.
    """

    scale: float
    part: str | None = None
    stage: ClassVar[int] = 5

    def __post_init__(self) -> None:
        require(
            0 < self.scale < math.inf,
            f"noise of {self.scale} is none",
            "give a positive number: 0.1 is a tenth of a tensor's own size",
        )
        require(
            self.part is None or self.part in PARTS,
            f'there is no part "{self.part}"',
            f"parts: {', '.join(PARTS)}",
        )

    def apply_to_update(
        self, tensors: Mapping[str, Tensor], model: torch.nn.Module, draw: KeyedRandom
    ) -> dict[str, Tensor]:
        at = set(tensors) if self.part is None else part_parameters(model, self.part)
        return {
            n: t + self.scale * t.square().mean().sqrt() * draw.normal(f"noise/{n}", t)
            if n in at
            else t
            for n, t in tensors.items()
        }


@dataclass(frozen=True)
class Prune:
    """Nothing of each tensor but its largest numbers: a `share` of them is zero."""

    share: float
    stage: ClassVar[int] = 6

    def __post_init__(self) -> None:
        require(
            0 < self.share < 1, f"a share of {self.share} is not in (0, 1)", "0.9 keeps a tenth"
        )

    def apply_to_update(
        self, tensors: Mapping[str, Tensor], model: torch.nn.Module, draw: KeyedRandom
    ) -> dict[str, Tensor]:
        return {name: self._prune(t) for name, t in tensors.items()}

    def _prune(self, t: Tensor) -> Tensor:
        kept = max(1, round((1 - self.share) * t.numel()))
        least = t.abs().flatten().topk(kept).values[-1]
        return torch.where(t.abs() >= least, t, torch.zeros_like(t))


@dataclass(frozen=True)
class Round:
    """Every number is the nearest of 2 ** `bits` - 1 even steps between its tensor's largest, up
    and down, zero among them.
    """

    bits: float
    stage: ClassVar[int] = 6

    def __post_init__(self) -> None:
        require(
            2 <= self.bits <= 16 and self.bits == int(self.bits),
            f"{self.bits} bits cannot be",
            "give a whole number from 2 to 16",
        )

    def apply_to_update(
        self, tensors: Mapping[str, Tensor], model: torch.nn.Module, draw: KeyedRandom
    ) -> dict[str, Tensor]:
        most = 2 ** (int(self.bits) - 1) - 1

        def near(t: Tensor) -> Tensor:
            step = t.abs().max().clamp(min=1e-30) / most
            found: Tensor = (t / step).round() * step
            return found

        return {name: near(t) for name, t in tensors.items()}


DEFENCES: Mapping[str, type] = {
    "no-positions": NoPositions,
    "mjp": Mjp,
    "rows": Rows,
    "dropout": Dropout,
    "batch": Batch,
    "steps": Steps,
    "clients": Clients,
    "freeze": Freeze,
    "withhold": Withhold,
    "clip": Clip,
    "private": Private,
    "noise": Noise,
    "prune": Prune,
    "round": Round,
}


@dataclass(frozen=True)
class Plan:
    """A combination, read: what is done to the model, to the passes and to the update, and what one
    update is made of.
    """

    text: str
    model: NoPositions | Mjp | None = None
    rows: bool = False
    batch: int = 1
    steps: Steps | None = None
    clients: int = 1
    update_defences: tuple[Any, ...] = ()
    dropout: bool = False

    @property
    def samples(self) -> int:
        """How many samples of one client an update is made of."""
        return self.batch * (
            int(self.steps.count) if self.steps is not None and self.steps.fresh else 1
        )

    @property
    def private(self) -> Private | None:
        return next((d for d in self.update_defences if isinstance(d, Private)), None)

    @property
    def withheld(self) -> tuple[str, ...]:
        """The parts that are not sent: those that nobody trains are among them."""
        return tuple(w for d in self.update_defences if isinstance(d, Withhold) for w in d.parts)

    @property
    def frozen(self) -> tuple[str, ...]:
        """The parts that nobody trains."""
        return tuple(w for d in self.update_defences if isinstance(d, Freeze) for w in d.parts)


def parse_plan(combination: str, batch: int = 1, steps: int = 1, lr: float = 0.01) -> Plan:
    """Read a combination. `batch` and `steps` are what it does not say itself."""
    texts = [] if combination == NONE else [combination]
    made = parse_combination(texts, DEFENCES, repeatable=Noise)
    changed = [d for d in made if isinstance(d, NoPositions | Mjp)]
    require(
        len(changed) < 2,
        "MJP needs the positions that no-positions takes away",
        "choose one of the two",
    )

    def one(kind: type) -> Any:
        return next((d for d in made if isinstance(d, kind)), None)

    size, clients = one(Batch), one(Clients)
    local = one(Steps) or (Steps(steps, lr) if steps > 1 else None)
    require(
        local is None or one(Private) is None,
        "private is for gradients of one batch, not for the change after local steps",
        "leave out steps",
    )
    leaving = tuple(d for d in made if hasattr(d, "apply_to_update"))
    return Plan(
        combination,
        changed[0] if changed else None,
        one(Rows) is not None,
        int(size.size) if size else batch,
        local,
        int(clients.count) if clients else 1,
        leaving,
        one(Dropout) is not None,
    )


_PARAMETERS_CACHE: WeakKeyDictionary[torch.nn.Module, dict[str, set[str]]] = (
    WeakKeyDictionary()
)  # a client asks in every step


def part_parameters(model: torch.nn.Module, part: str) -> set[str]:
    """The parameters of a part of a model, by the family's cut and, of models that no family knows,
    by their patch embedding.
    """
    known = _PARAMETERS_CACHE.setdefault(model, {})
    if part not in known:
        known[part] = _find_part_parameters(model, part)
    return known[part]


def _find_position_table(inner: torch.nn.Module) -> str | None:
    """The table of an image model's positions, if it is one and has one."""
    try:
        return find_positions(inner).table
    except RegaugeError:
        return None


def _find_part_parameters(model: torch.nn.Module, part: str) -> set[str]:
    from regauge.models.cut import cut
    from regauge.models.resolve import spec_of

    if part == "matrices":
        return {name for name, p in model.named_parameters() if p.ndim > 1}
    inner, lead = unwrap_model(model)
    own = [name for name, _ in model.named_parameters()]
    beside = {
        n for n in own if lead and not n.startswith(lead)
    }  # the wrapper's: the unknown embedding, the regression
    if part in ("positions", "patches"):
        if part == "positions":
            tables = (
                [lead + table]
                if (table := _find_position_table(inner))
                else [n for n in own if n.endswith(("position_embeddings.weight", "wpe.weight"))]
            )
            found = {*tables[:1]}
        else:
            at = next((n for n, m in inner.named_modules() if isinstance(m, torch.nn.Conv2d)), None)
            found = set() if at is None else {n for n in own if n.startswith(f"{lead}{at}.")}
        if not found:
            raise DefenceError(
                f"a {type(inner).__name__} has no {part} of its own to withhold or freeze",
                hint="embedding is all before the blocks",
            )
        return found | (beside if part == "positions" else set())
    try:
        if part == "first":
            return {
                n
                for n in own
                for b in cut(inner).boundaries
                if n.startswith(f"{lead}{b.blocks}.0.")
            }
        parts = spec_of(inner).parts
    except RegaugeError as error:
        raise DefenceError(
            f'no family says what the part "{part}" of a {type(inner).__name__} is', hint=str(error)
        ) from error
    wanted = {"embedding": "embed", "head": "head"}[part]
    return {lead + n for n, where in parts.items() if where == wanted} & set(own) | (
        beside if part == "embedding" else set()
    )


def clip_global_norm(tensors: Mapping[str, Tensor], norm: float) -> dict[str, Tensor]:
    """Tensors, scaled down together to a norm."""
    length = math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))
    factor = min(1.0, norm / max(length, 1e-300))
    return {name: t * factor for name, t in tensors.items()}


def _require_positive_integer(value: float, what: str) -> None:
    require(
        1 <= value < math.inf and value == int(value),
        f"{value:g} {what} cannot be",
        "give a whole number from 1",
    )

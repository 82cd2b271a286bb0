"""Defences of federated learning: changes of a client's model, batch or update before it is sent.

    no-positions, mjp          on the model, which client and server share
    rows, dropout              in the client's passes: tokens are permuted after the position
                               embedding; the dropout of the model's config
    batch, steps, clients      the samples, local steps and aggregated clients of one update
    freeze, withhold           parts that are not trained, or trained and not sent
    clip, private, noise       on the update; `private` on each sample's gradient, with an epsilon
    prune, round               on the update: few of its numbers, or few bits of each

A combination is a text, "mjp=0.5+withhold=embedding+noise=0.1", or "none". Defences act in the
order above, in whatever order they are given. Only `private` is a proof: `regauge audit gradients`
measures what the others protect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch

from regauge.defences.accountant import gaussian_epsilon
from regauge.defences.parser import (
    NONE,
    parse_combination,
    require,
    require_integer,
    require_positive,
)
from regauge.defences.split import KeyedRandom
from regauge.errors import DefenceError, RegaugeError
from regauge.jigsaw.layers import unwrap_model
from regauge.jigsaw.masks import check_ratio
from regauge.jigsaw.positions import find_positions

Tensor = torch.Tensor
PARTS = ("positions", "patches", "embedding", "first", "head", "matrices")


@dataclass(frozen=True)
class NoPositions:
    """A table of positions that is zero and not trained (masked jigsaw's "w/o PEs").

    With `sent` its gradient is part of the update all the same, as an attack on an ordinary model
    expects it.
    """

    sent: bool = False
    stage: ClassVar[int] = 0


@dataclass(frozen=True)
class Mjp:
    """Masked jigsaw puzzles, in which `ratio` of the patches are shuffled.

    With `unknown` the shuffled patches share one position embedding; with `localize` the positions
    of the others are regressed. Without `shuffle` the model is trained by MJP, but this update is
    computed on unshuffled images (masked jigsaw, Tab. 5 a).
    """

    ratio: float
    unknown: bool = True
    shuffle: bool = True
    localize: bool = True
    stage: ClassVar[int] = 0

    def __post_init__(self) -> None:
        require(
            check_ratio(self.ratio) > 0,
            f"the ratio of mjp must be > 0, got {self.ratio:g}",
            "give a ratio between 0 and 1",
        )


@dataclass(frozen=True)
class Rows:
    """A fresh permutation of the tokens in every pass, from the backbone's input to its output."""

    stage: ClassVar[int] = 1


@dataclass(frozen=True)
class Dropout:
    """The dropout of the model's config in the client's passes.

    Without this defence dropout is off, as most attacks assume.
    """

    stage: ClassVar[int] = 1


@dataclass(frozen=True)
class Batch:
    """The number of samples in the mean loss of one update."""

    size: float
    stage: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require_integer("the number of samples", self.size, 1)


@dataclass(frozen=True)
class Steps:
    """An update of `count` local SGD steps at the learning rate `lr`.

    All steps are on the same batch, or with `fresh` each on its own batch.
    """

    count: float
    lr: float = 0.01
    fresh: bool = False
    stage: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require_integer("the number of steps", self.count, 1)
        require_positive("the learning rate", self.lr, "steps=5,lr=0.1")


@dataclass(frozen=True)
class Clients:
    """Ideal secure aggregation: the server gets only the mean of `count` clients' updates."""

    count: float
    stage: ClassVar[int] = 2

    def __post_init__(self) -> None:
        require_integer("the number of clients", self.count, 1)


class Withhold:
    """Parts of the update that are not sent; each client may train its own copy of them.

    The parts are positions, patches, embedding (both of these, and the first tokens), first (the
    first block), head, and matrices (all parameters except biases and gains).
    """

    stage: ClassVar[int] = 3

    def __init__(self, *parts: str) -> None:
        require(
            bool(parts) and all(part in PARTS for part in parts),
            f"withheld parts must be known parts, got {', '.join(map(str, parts)) or 'none'}",
            f"parts: {', '.join(PARTS)}",
        )
        self.parts = tuple(parts)

    def apply_to_update(
        self, tensors: Mapping[str, Tensor], model: torch.nn.Module, rng: KeyedRandom
    ) -> dict[str, Tensor]:
        """Return the tensors that are sent."""
        withheld = {name for part in self.parts for name in part_parameters(model, part)}
        return {name: t for name, t in tensors.items() if name not in withheld}


class Freeze(Withhold):
    """Parts as in `Withhold` that are not trained at all, so that the update lacks them."""


@dataclass(frozen=True)
class Clip:
    """A bound on the norm of the whole update."""

    norm: float
    stage: ClassVar[int] = 4

    def __post_init__(self) -> None:
        require_positive("the norm", self.norm, "the update is scaled down to it")

    def apply_to_update(
        self, tensors: Mapping[str, Tensor], model: torch.nn.Module, rng: KeyedRandom
    ) -> dict[str, Tensor]:
        """Return the clipped update."""
        return clip_global_norm(tensors, self.norm)


@dataclass(frozen=True)
class Private:
    """Differentially private gradients (DP-SGD).

    The gradient of each sample is clipped to `norm`, and Gaussian noise of `multiplier` times
    `norm` is added to their sum.
    """

    multiplier: float
    norm: float = 1.0
    stage: ClassVar[int] = 4

    def __post_init__(self) -> None:
        for value in (self.multiplier, self.norm):
            require_positive("the noise multiplier and the norm", value, "private=1.0,norm=8")

    def apply_to_update(
        self,
        tensors: Mapping[str, Tensor],
        model: torch.nn.Module,
        rng: KeyedRandom,
        count: int = 1,
    ) -> dict[str, Tensor]:
        """Add noise to a mean of `count` clipped gradients."""
        size = self.multiplier * self.norm / count
        return {name: t + size * rng.normal(f"private/{name}", t) for name, t in tensors.items()}

    def epsilon(self, releases: int = 1, delta: float = 1e-5) -> float:
        """Compute the epsilon of a sample that took part in some updates.

        The guarantee compares training with and without the sample, against an adversary that
        observes every update. No amplification by sampling is assumed.

        Args:
            releases: The number of updates that the sample took part in.
            delta: The probability with which the guarantee may fail.
        """
        return gaussian_epsilon(self.multiplier, releases, delta, "ADD_OR_REMOVE_ONE")


@dataclass(frozen=True)
class Noise:
    """Gaussian noise on the update, or only on one `part` of it.

    Its standard deviation is `scale` times the root mean square of each tensor.
    """

    scale: float
    part: str | None = None
    stage: ClassVar[int] = 5

    def __post_init__(self) -> None:
        require_positive("noise", self.scale, "0.1 is a tenth of a tensor's root mean square")
        require(
            self.part is None or self.part in PARTS,
            f'unknown part "{self.part}"',
            f"parts: {', '.join(PARTS)}",
        )

    def apply_to_update(
        self, tensors: Mapping[str, Tensor], model: torch.nn.Module, rng: KeyedRandom
    ) -> dict[str, Tensor]:
        """Return the update with noise."""
        noisy = set(tensors) if self.part is None else part_parameters(model, self.part)
        return {
            name: t + self.scale * t.square().mean().sqrt() * rng.normal(f"noise/{name}", t)
            if name in noisy
            else t
            for name, t in tensors.items()
        }


@dataclass(frozen=True)
class Prune:
    """An update in which a `share` of each tensor, its smallest numbers, is set to zero."""

    share: float
    stage: ClassVar[int] = 6

    def __post_init__(self) -> None:
        require(
            0 < self.share < 1,
            f"the pruned share must be in (0, 1), got {self.share:g}",
            "0.9 keeps the largest tenth",
        )

    def apply_to_update(
        self, tensors: Mapping[str, Tensor], model: torch.nn.Module, rng: KeyedRandom
    ) -> dict[str, Tensor]:
        """Return the pruned update."""
        return {name: self._prune(t) for name, t in tensors.items()}

    def _prune(self, t: Tensor) -> Tensor:
        count = max(1, round((1 - self.share) * t.numel()))
        threshold = t.abs().flatten().topk(count).values[-1]
        return torch.where(t.abs() >= threshold, t, torch.zeros_like(t))


@dataclass(frozen=True)
class Round:
    """Quantization of each tensor to 2 ** `bits` - 1 uniform levels around zero.

    The outermost levels are plus and minus the tensor's largest absolute value.
    """

    bits: float
    stage: ClassVar[int] = 6

    def __post_init__(self) -> None:
        require_integer("the bits of round", self.bits, 2, 16)

    def apply_to_update(
        self, tensors: Mapping[str, Tensor], model: torch.nn.Module, rng: KeyedRandom
    ) -> dict[str, Tensor]:
        """Return the quantized update."""
        levels = 2 ** (int(self.bits) - 1) - 1  # on either side of zero

        def quantize(t: Tensor) -> Tensor:
            step = t.abs().max().clamp(min=1e-30) / levels
            quantized: Tensor = (t / step).round() * step
            return quantized

        return {name: quantize(t) for name, t in tensors.items()}


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
    """A parsed combination: the defences on the model, the passes and the update.

    Attributes:
        text: The combination.
        model: The defence on the model, if there is one.
        rows: Whether tokens are permuted in each pass.
        batch: Samples of one local step.
        steps: Local steps, or None for a single gradient.
        clients: Clients whose updates are averaged.
        update_defences: The defences on the update, in the order in which they act.
        dropout: Whether the client's passes have dropout.
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
        """The number of one client's samples in an update."""
        batches = int(self.steps.count) if self.steps is not None and self.steps.fresh else 1
        return self.batch * batches

    @property
    def private(self) -> Private | None:
        """The differentially private defence, if there is one."""
        return next((d for d in self.update_defences if isinstance(d, Private)), None)

    @property
    def withheld(self) -> tuple[str, ...]:
        """The parts that are not sent, frozen ones included."""
        withholding = [d for d in self.update_defences if isinstance(d, Withhold)]
        return tuple(part for defence in withholding for part in defence.parts)

    @property
    def frozen(self) -> tuple[str, ...]:
        """The parts that are not trained."""
        freezing = [d for d in self.update_defences if isinstance(d, Freeze)]
        return tuple(part for defence in freezing for part in defence.parts)


def parse_plan(combination: str, batch: int = 1, steps: int = 1, lr: float = 0.01) -> Plan:
    """Parse a combination.

    Args:
        combination: Defences of this module, joined by "+", or "none".
        batch: Samples of one step, unless the combination sets them.
        steps: Local steps, unless the combination sets them.
        lr: The learning rate of these steps.

    Raises:
        DefenceError: A defence is invalid, or does not combine with the others.
    """
    texts = [] if combination == NONE else [combination]
    defences = parse_combination(texts, DEFENCES, repeatable=Noise)
    on_model = [d for d in defences if isinstance(d, NoPositions | Mjp)]
    require(
        len(on_model) < 2,
        "mjp needs the position embeddings that no-positions removes",
        "choose one of the two",
    )

    def first(kind: type) -> Any:
        return next((d for d in defences if isinstance(d, kind)), None)

    size, clients = first(Batch), first(Clients)
    local_steps = first(Steps) or (Steps(steps, lr) if steps > 1 else None)
    require(
        local_steps is None or first(Private) is None,
        "private applies to gradients of one batch, not to the change after local steps",
        "leave out steps",
    )
    return Plan(
        combination,
        on_model[0] if on_model else None,
        first(Rows) is not None,
        int(size.size) if size else batch,
        local_steps,
        int(clients.count) if clients else 1,
        tuple(d for d in defences if hasattr(d, "apply_to_update")),
        first(Dropout) is not None,
    )


# a client looks its parts up in every step
_PARAMETERS_CACHE: WeakKeyDictionary[torch.nn.Module, dict[str, set[str]]] = WeakKeyDictionary()


def part_parameters(model: torch.nn.Module, part: str) -> set[str]:
    """Return the names of the parameters of a part of a model.

    They follow from the family's cut; in models without a family, patches are found by the patch
    embedding.

    Raises:
        DefenceError: The model has no such part, or no family defines it.
    """
    by_part = _PARAMETERS_CACHE.setdefault(model, {})
    if part not in by_part:
        by_part[part] = _find_part_parameters(model, part)
    return by_part[part]


def _find_position_table(inner: torch.nn.Module) -> str | None:
    """Find the position table of an image model, if it has one."""
    try:
        return find_positions(inner).table
    except RegaugeError:
        return None


def _find_part_parameters(model: torch.nn.Module, part: str) -> set[str]:
    from regauge.models.cut import cut
    from regauge.models.resolve import spec_of

    if part == "matrices":
        return {name for name, p in model.named_parameters() if p.ndim > 1}
    inner, prefix = unwrap_model(model)
    names = [name for name, _ in model.named_parameters()]
    # parameters of the wrapper: the unknown embedding, the regression
    wrapper_names = {name for name in names if prefix and not name.startswith(prefix)}
    if part == "positions":
        table = _find_position_table(inner)
        lookups = ("position_embeddings.weight", "wpe.weight")
        tables = [prefix + table] if table else [n for n in names if n.endswith(lookups)]
        return _require_part({*tables[:1]}, part, inner) | wrapper_names
    if part == "patches":
        modules = inner.named_modules()
        patches = next((n for n, m in modules if isinstance(m, torch.nn.Conv2d)), None)
        beginning = f"{prefix}{patches}."
        parameters = set() if patches is None else {n for n in names if n.startswith(beginning)}
        return _require_part(parameters, part, inner)
    try:
        if part == "first":
            blocks = [f"{prefix}{boundary.blocks}.0." for boundary in cut(inner).boundaries]
            return {name for name in names for block in blocks if name.startswith(block)}
        parts = spec_of(inner).parts
    except RegaugeError as error:
        raise DefenceError(
            f'no family defines the part "{part}" of a {type(inner).__name__}', hint=str(error)
        ) from error
    spec_part = {"embedding": "embed", "head": "head"}[part]
    in_part = {prefix + name for name, its_part in parts.items() if its_part == spec_part}
    return in_part & set(names) | (wrapper_names if part == "embedding" else set())


def _require_part(names: set[str], part: str, model: torch.nn.Module) -> set[str]:
    require(
        bool(names),
        f"{type(model).__name__} has no separate {part} to withhold or freeze",
        "embedding is everything before the blocks",
    )
    return names


def clip_global_norm(tensors: Mapping[str, Tensor], norm: float) -> dict[str, Tensor]:
    """Scale tensors down together to a norm."""
    total = math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))
    factor = min(1.0, norm / max(total, 1e-300))
    return {name: t * factor for name, t in tensors.items()}

"""The engine of every audit: attacks on a case under combinations of defences.

The undefended case comes first: its scores are the upper bound of the others, those of a guess are
their baseline. Each domain supplies its cases, its table of attacks, and what it scores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from regauge.attacks.updates import Threat
from regauge.core.names import items_of
from regauge.core.progress import Progress
from regauge.data.tasks import Examples
from regauge.defences.parser import NONE
from regauge.errors import AttackNameError, UpdateError
from regauge.results.findings import Results, apply_threshold

Tensor = torch.Tensor
CAVEAT = "These are the attacks that were tried. A stronger attack may recover more."


@dataclass(frozen=True)
class Attack:
    """An attack of a table.

    Attributes:
        name: The id.
        title: The title in tables.
        about: A one-line description.
        run: The attack; each domain states its arguments.
        kind: What it recovers.
        view: The view that it gets, where a domain has several.
        threat: What it is granted besides an update and its model.
        fits: Whether it applies to a combination of defences.
        is_ordered: Whether it recovers the order of the samples. If not, the best assignment is
            scored.
        is_slow: Whether it optimises: run on few updates, and only if requested.
        learn: Fit the attack once for all updates of a combination.
    """

    name: str
    title: str
    about: str
    run: Callable[..., Any]
    kind: Literal["images", "patches", "mask", "labels", "texts"] = "images"
    view: Literal["", "paired", "placed", "public", "repeated"] = ""
    threat: Threat = field(default_factory=Threat)
    fits: Callable[[str], bool] = lambda combination: True
    is_ordered: bool = True
    is_slow: bool = False
    learn: Callable[..., Any] | None = None


@dataclass(frozen=True, eq=False)
class Attempt:
    """The output of one attack, or the reason why it does not apply.

    Attributes:
        output: What it recovered; None if it does not apply.
        seconds: The run time.
        facts: Facts of the run, such as the rank of a system or the losses of a training.
        reason: Why it does not apply.
    """

    output: Any
    seconds: float
    facts: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


def attempt(run: Callable[[], tuple[Any, Mapping[str, Any]]]) -> Attempt:
    """Run an attack, and leave the global random state as it was.

    If the view lacks what the attack needs, the attempt has a reason and no output: withholding is
    a defence, not an error.

    Args:
        run: Returns what is recovered, and facts of the run.
    """
    started = time.monotonic()
    try:
        with torch.random.fork_rng(devices=[]):
            output, facts = run()
    except UpdateError as error:
        return Attempt(None, time.monotonic() - started, reason=str(error))
    output = output.detach() if isinstance(output, Tensor) else output
    return Attempt(output, time.monotonic() - started, facts)


class Steps:
    """A counter of the steps of an audit, for its progress callback."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.done, self.progress = total, 0, progress

    def __call__(self, message: str) -> None:
        """Report that a step begins."""
        if self.progress:
            self.progress(self.done, self.total, message)
        self.done += 1

    def finish(self) -> None:
        """Report that all steps are done."""
        if self.progress:
            self.progress(self.total, self.total, "")


def with_undefended(combinations: Sequence[str]) -> list[str]:
    """Return the combinations without duplicates; "none", the upper bound, comes first."""
    return list(dict.fromkeys((NONE, *combinations)))


def apply_verdicts(results: Results, fail_above: float | None) -> Results:
    """Judge the findings on defended cases by a threshold, see `apply_threshold`."""
    return replace(
        results,
        findings=tuple(
            f if f"/{NONE}/" in f.id else apply_threshold(f, fail_above) for f in results.findings
        ),
    )


def resolve_attacks(
    names: Sequence[str] | None, table: Sequence[Attack], default: Sequence[Attack], subject: str
) -> tuple[Attack, ...]:
    """Return the attacks of a table by name, in the order of the table.

    Args:
        names: The names; "all" stands for all of them; None or empty for the defaults.
        table: All attacks.
        default: The defaults.
        subject: What is attacked, for the error message.

    Raises:
        AttackNameError: A name is not in the table.
    """
    names = None if names is None else items_of(names)
    available = [a.name for a in table]
    unknown = [n for n in names or () if n not in (*available, "all")]
    if unknown:
        raise AttackNameError(
            f'unknown attack "{unknown[0]}" on {subject}',
            hint=f"use {', '.join(dict.fromkeys(available))}; or all",
        )
    return tuple(a for a in table if "all" in names or a.name in names) if names else tuple(default)


def titles_of(attacks: Sequence[Attack]) -> dict[str, str]:
    """Return the title of each attack by its name."""
    return {a.name: a.title for a in attacks}


def pixel_values(examples: Examples) -> Tensor:
    """Return all images of some examples as the model reads them."""
    return examples.batch(np.arange(len(examples)))[0]["pixel_values"]


def denormalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Convert normalized images to pixels in 0..1."""
    shift, scale = (
        torch.tensor(list(v), dtype=images.dtype).view(1, -1, 1, 1) for v in (mean, std)
    )
    return images * scale + shift


def to_pixels(case: Any, images: Examples | Tensor) -> Tensor:
    """Return images of a case, or of examples, as pixels in 0..1."""
    tensor = images if isinstance(images, Tensor) else pixel_values(images)
    return denormalize(tensor.float().cpu(), case.mean, case.std).clamp(0, 1)

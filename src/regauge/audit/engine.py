"""The engine of every audit: attacks on a case under combinations of defences, step by step.

The undefended case comes first: its scores are the upper bound of the others, those of a guess are
their baseline. Each domain supplies its cases, its table of attacks, and what it scores. `Steps`
runs the steps: it reports progress, estimates the time left, and saves what is finished.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from regauge.attacks.updates import Threat
from regauge.audit.scores import AttackScores, Row
from regauge.checkpoints.resume import Outcome, StateStore
from regauge.core.names import items_of
from regauge.core.progress import Progress
from regauge.defences.parser import NONE
from regauge.errors import AttackNameError, UpdateError
from regauge.results.findings import Results, apply_threshold
from regauge.results.progress import format_seconds

if TYPE_CHECKING:
    from regauge.data.tasks import Examples

Tensor = torch.Tensor
REPORT_INTERVAL = 10.0  # seconds between two reports within a step
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
        is_slow: Whether it optimizes: run on few updates, and only if requested.
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
    """The steps of an audit: counted, timed, and saved, so that an interrupted audit resumes.

    Args:
        kinds: The kind of each step, in order. The time left is estimated from the finished steps
            of the same kind.
        progress: Progress callback, in steps; called within long steps too.
        store: The saved steps of an interrupted run; None: nothing is saved.
    """

    def __init__(
        self,
        kinds: Sequence[str] = (),
        progress: Progress | None = None,
        store: StateStore | None = None,
    ) -> None:
        self.kinds, self.progress, self.store = list(kinds), progress, store
        self.done = 0
        self.seconds: dict[str, list[float]] = {}

    def run(
        self,
        key: str,
        message: str,
        compute: Callable[[Progress], tuple[Any, Mapping[str, Tensor]]],
    ) -> Outcome:
        """Return the saved outcome of a step, or compute and save it.

        The global random state is left as it was, so that later steps do not depend on whether
        this one was computed.

        Args:
            key: Identifies the step.
            message: Describes the step in progress messages.
            compute: Returns JSON values and tensors; gets a progress callback for the step.
        """
        saved = self.store.load(key) if self.store else None
        if saved is None:
            self._report(message, 0.0, 0.0)
            started = reported = time.monotonic()

            def within(done: int, total: int, label: str) -> None:
                nonlocal reported
                now = time.monotonic()
                if now - reported >= REPORT_INTERVAL and 0 < done < total:
                    reported = now
                    text = f"{message}, {done}/{total}{f' {label}' if label else ''}"
                    self._report(text, now - started, done / total)

            with torch.random.fork_rng(devices=[]):
                values, tensors = compute(within)
            text = json.dumps(values)  # which, unlike the canonical JSON of a store, holds nan
            if self.done < len(self.kinds):
                elapsed = time.monotonic() - started
                self.seconds.setdefault(self.kinds[self.done], []).append(elapsed)
            saved = Outcome({"json": text}, tensors)
            if self.store:
                self.store.save(key, saved.values, tensors)
        self.done += 1
        return replace(saved, values=json.loads(saved.values["json"]))

    def skip(self) -> None:
        """Count a step that does not apply."""
        self.done += 1

    def finish(self) -> None:
        """Report that all steps are done."""
        if self.progress:
            self.progress(len(self.kinds), len(self.kinds), "")

    def estimate(self, elapsed: float = 0.0, share: float = 0.0) -> float | None:
        """Estimate the seconds that are left; None without a measurement.

        Args:
            elapsed: The seconds of the current step so far.
            share: The share of the current step that is done.
        """
        known = {kind: statistics.fmean(times) for kind, times in self.seconds.items()}
        current = elapsed / share if share else None
        if current is not None and self.done < len(self.kinds):
            known[self.kinds[self.done]] = current
        if not known:
            return None
        usual = statistics.fmean(known.values())
        left = sum(known.get(kind, usual) for kind in self.kinds[self.done :])
        return max(0.0, left - elapsed)

    def _report(self, message: str, elapsed: float, share: float) -> None:
        if self.progress:
            left = self.estimate(elapsed, share)
            about = "" if left is None or left < 30 else f", about {format_seconds(left)} left"
            self.progress(self.done, len(self.kinds), message + about)


@dataclass(frozen=True, eq=False)
class Measured:
    """The result of one attack under one combination, in one of three forms.

    Attributes:
        scores: The scores of reconstructed images or texts.
        share: For each update, the AUC or the share of what else the attack recovers.
        guess: The share of a guess.
        count: The number of units behind the shares, such as labels; 0 if unknown.
        reason: Why the attack does not apply.
    """

    scores: AttackScores | None = None
    share: Sequence[float] = ()
    guess: float | None = None
    count: int = 0
    reason: str = ""


def attack_row(
    steps: Steps,
    key: str,
    combination: str,
    attacks: Sequence[Attack],
    run: Callable[[Attack, Progress], Measured],
) -> Row:
    """Run every attack on one combination, each as a step, and return their scores.

    Of several attacks that recover the same kind of share, the best counts.

    Args:
        steps: The steps of the audit.
        key: Identifies the combination among the steps.
        combination: The combination.
        attacks: The attacks; those that do not fit the combination are skipped.
        run: Runs and scores one attack.
    """
    by_attack: dict[str, AttackScores] = {}
    best: dict[str, Measured] = {}
    reasons: dict[str, str] = {}
    for attack in attacks:
        if not attack.fits(combination):
            steps.skip()
            continue

        def compute(within: Progress, attack: Attack = attack) -> tuple[Any, dict[str, Tensor]]:
            return _to_plain(run(attack, within))

        saved = steps.run(f"{key}/{attack.name}", f"{combination}: {attack.title}", compute)
        measured = _from_plain(saved)
        if measured.reason:
            reasons[attack.name] = measured.reason
        if measured.scores is not None:
            by_attack[attack.name] = measured.scores
        if measured.share:
            rival = best.get(attack.kind)
            if rival is None or statistics.fmean(measured.share) > statistics.fmean(rival.share):
                best[attack.kind] = measured
    return Row(
        combination,
        by_attack,
        shares={kind: list(m.share) for kind, m in best.items()},
        guesses={kind: m.guess for kind, m in best.items() if m.guess is not None},
        counts={kind: m.count for kind, m in best.items() if m.count},
        reasons=reasons,
    )


def _to_plain(measured: Measured) -> tuple[dict[str, Any], dict[str, Tensor]]:
    values = {name: getattr(measured, name) for name in ("share", "guess", "count", "reason")}
    scores = measured.scores
    if scores is None:
        return values, {}
    plain = {f.name: getattr(scores, f.name) for f in fields(scores) if f.name != "images"}
    tensors = {} if scores.images is None else {"images": scores.images}
    return {**values, "scores": plain}, tensors


def _from_plain(saved: Outcome) -> Measured:
    values = dict(saved.values)
    scores = values.pop("scores", None)
    if scores is not None:
        scores = AttackScores(**scores, images=saved.tensors.get("images"))
    return Measured(scores=scores, **values)


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
    chosen = resolve_names(names, [a.name for a in table], subject)
    return tuple(default) if chosen is None else select_attacks(chosen, table)


def resolve_names(
    names: Sequence[str] | None, available: Sequence[str], subject: str
) -> list[str] | None:
    """Return the names of available attacks in their order; None without names.

    Raises:
        AttackNameError: An attack is not available.
    """
    if not names:
        return None
    names = items_of(names)
    unknown = [n for n in names if n not in (*available, "all")]
    if unknown:
        raise AttackNameError(
            f'unknown attack "{unknown[0]}" on {subject}',
            hint=f"use {', '.join(dict.fromkeys(available))}; or all",
        )
    return [n for n in available if "all" in names or n in names]


def select_attacks(names: Sequence[str], table: Sequence[Attack]) -> tuple[Attack, ...]:
    """Return the attacks of a table with these names, in its order."""
    return tuple(a for a in table if a.name in names)


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

"""Two models on the command line: opened, described by one spec, and checked against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from regauge.checkpoints.transform import TransformSource, prepare_source
from regauge.cli.model import open_model, require_fit

if TYPE_CHECKING:
    from regauge.checkpoints.reader import Checkpoint
    from regauge.core.spec import Spec
    from regauge.matching import SharedRows


@dataclass(frozen=True)
class Pair:
    """Two models of one architecture. `rows` are the tokens that both have, if their vocabularies
    differ.
    """

    a: TransformSource
    b: TransformSource
    rows: dict[str, SharedRows]

    @property
    def spec(self) -> Spec:
        """The spec of both."""
        return self.a.state_spec


def open_pair(
    a: str,
    b: str,
    spec: Path | None,
    *,
    fold: bool = False,
    fix: Sequence[str] = (),
    shared_tokens: bool = False,
) -> Pair:
    """Open two models and check that they fit each other.

    Args:
        a: the first model: a folder, file or hub id.
        b: the second.
        spec: a spec file for both.
        fold: fold the norms of both.
        fix: names of gauges to fix.
        shared_tokens: match by the shared tokens of two different vocabularies.

    Raises:
        MatchError: if their families, sizes or groups differ.
    """
    from regauge.matching import MatchError

    models = [open_model(source, spec) for source in (a, b)]
    for checkpoint, model_spec in models:
        require_fit(checkpoint, model_spec)
    (checkpoint_a, spec_a), (checkpoint_b, spec_b) = models
    if spec_a.family != spec_b.family:
        raise MatchError(
            f"models must be of one family, got {spec_a.family} ({a}) and {spec_b.family} ({b})",
            hint="regauge inspect shows the family of a model",
        )
    rows = _shared_rows(checkpoint_a, checkpoint_b, spec_a, shared_tokens)
    differences = _find_differences(checkpoint_a, checkpoint_b, spec_a, spec_b, set(rows))
    if differences:
        listing = "\n".join(f"  {line}" for line in differences[:10]) + (
            f"\n  ... and {len(differences) - 10} more" if len(differences) > 10 else ""
        )
        raise MatchError(
            f"{a} and {b} have different shapes\n{listing}",
            hint="matching requires equal depth and width; if only the vocabularies differ, pass "
            "--shared-tokens",
        )
    return Pair(
        _prepare(checkpoint_a, spec_a, fold, fix), _prepare(checkpoint_b, spec_b, fold, fix), rows
    )


def _prepare(checkpoint: Checkpoint, spec: Spec, fold: bool, fix: Sequence[str]) -> TransformSource:
    """Fold the norms and fix gauges."""
    from regauge.matching.gauges import fix_lazily

    source = prepare_source(checkpoint, spec, fold)
    return (
        source.with_state(fix_lazily(source.state_spec, source.state, fix), fix) if fix else source
    )


def _find_differences(
    checkpoint_a: Checkpoint, checkpoint_b: Checkpoint, spec_a: Spec, spec_b: Spec, rows: set[str]
) -> list[str]:
    """Describe every difference in spaces and shapes, the most general first."""
    differences = []
    for name in spec_a.spaces.keys() | spec_b.spaces.keys():
        x, y = spec_a.spaces.get(name), spec_b.spaces.get(name)
        if x is None or y is None:
            differences.append(f'only one of them has the space "{name}"')
        elif x.size != y.size:
            differences.append(
                f'the space "{name}" has size {x.size} in one and {y.size} in the other'
            )
        elif x.group != y.group:
            differences.append(
                f'the space "{name}" has the group {x.group} in one and {y.group} in the other'
            )
    for name in checkpoint_a.entries:
        if (
            name in checkpoint_b.entries
            and name not in rows
            and tuple(checkpoint_a.entries[name].shape) != tuple(checkpoint_b.entries[name].shape)
        ):
            differences.append(
                f'"{name}" is {list(checkpoint_a.entries[name].shape)} in one and '
                f"{list(checkpoint_b.entries[name].shape)} in the other"
            )
    return sorted(differences, key=lambda line: (len(line.split('"')[1].split(".")), line))


def _shared_rows(
    checkpoint_a: Checkpoint, checkpoint_b: Checkpoint, spec: Spec, shared_tokens: bool
) -> dict[str, SharedRows]:
    """Return, for every table with a row per token, the rows that the two models have in common."""
    if not shared_tokens:
        return {}
    from regauge.checkpoints.vocabulary import read_vocabulary
    from regauge.matching import SharedRows

    tokens_a, tokens_b = (
        read_vocabulary(side.path, "--shared-tokens needs both")
        for side in (checkpoint_a, checkpoint_b)
    )
    common = sorted(tokens_a.keys() & tokens_b.keys(), key=lambda token: tokens_b[token])
    shared = SharedRows(tuple(tokens_a[t] for t in common), tuple(tokens_b[t] for t in common))
    min_rows = min(max(tokens_a.values()), max(tokens_b.values())) + 1
    tables = [
        name
        for name, text in spec.tensors.items()
        if text.startswith("_") and name in checkpoint_a.entries and name in checkpoint_b.entries
    ]
    return {
        name: shared
        for name in tables
        if min(c.entries[name].shape[0] for c in (checkpoint_a, checkpoint_b)) >= min_rows
    }


def parse_layers(text: str | None) -> list[int] | None:
    """Parse layers and ranges: 3, 0-5, 0,2,7-9."""
    if text is None:
        return None
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise typer.BadParameter(
                f"layers must be numbers or ranges, as in 0-5,11, got {part!r}"
            )
        layers += range(int(first), int(last or first) + 1)
    return layers


def parse_weights(pairs: Sequence[str] | None) -> dict[str, float]:
    """Parse NAME=NUMBER weights."""
    weights = {}
    for text in pairs or ():
        name, _, number = text.rpartition("=")
        try:
            weights[name] = float(number)
        except ValueError:
            weights[name] = -1.0
        if not name or not 0 <= weights[name] < float("inf"):
            raise typer.BadParameter(
                f"must be NAME=NUMBER with a number >= 0, got {text!r}",
                param_hint="--weight",
            )
    return weights


def parse_names(text: str | None) -> list[str] | None:
    """Split a comma-separated list of names; None stays None."""
    return None if text is None else [s.strip() for s in text.split(",") if s.strip()]

"""Two models on the command line: opened, described by one spec, and refused by name where they do
not fit each other.
"""

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
    """Two models of one architecture. `rows` are the tokens that both have, where their
    vocabularies differ.
    """

    a: TransformSource
    b: TransformSource
    rows: dict[str, SharedRows]

    @property
    def spec(self) -> Spec:
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
    """Open two models and hold them against each other."""
    from regauge.matching import MatchError

    opened = [open_model(source, spec) for source in (a, b)]
    for checkpoint, described in opened:
        require_fit(checkpoint, described)
    (one, here), (other, there) = opened
    if here.family != there.family:
        raise MatchError(
            f"{a} is a {here.family} and {b} a {there.family}",
            hint="models are matched within one family",
        )
    rows = _shared_rows(one, other, here, shared_tokens)
    differences = _find_differences(one, other, here, there, set(rows))
    if differences:
        shown = "\n".join(f"  {line}" for line in differences[:10]) + (
            f"\n  ... and {len(differences) - 10} more" if len(differences) > 10 else ""
        )
        raise MatchError(
            f"{a} and {b} have different shapes\n{shown}",
            hint="matching needs one depth and one width; where only the vocabularies differ, "
            "--shared-tokens matches by the tokens of both",
        )
    return Pair(_prepare(one, here, fold, fix), _prepare(other, there, fold, fix), rows)


def _prepare(checkpoint: Checkpoint, spec: Spec, fold: bool, fix: Sequence[str]) -> TransformSource:
    """Fold the norms and fix gauges, as asked."""
    from regauge.matching.gauges import fix_lazily

    source = prepare_source(checkpoint, spec, fold)
    return (
        source.with_state(fix_lazily(source.state_spec, source.state, fix), fix) if fix else source
    )


def _find_differences(
    one: Checkpoint, other: Checkpoint, here: Spec, there: Spec, rows: set[str]
) -> list[str]:
    out = []
    for name in here.spaces.keys() | there.spaces.keys():
        x, y = here.spaces.get(name), there.spaces.get(name)
        if x is None or y is None:
            out.append(f'only one of them has the space "{name}"')
        elif x.size != y.size:
            out.append(f'the space "{name}" has size {x.size} in one and {y.size} in the other')
        elif x.group != y.group:
            out.append(
                f'the space "{name}" has the group {x.group} in one and {y.group} in the other'
            )
    for name in one.entries:
        if (
            name in other.entries
            and name not in rows
            and tuple(one.entries[name].shape) != tuple(other.entries[name].shape)
        ):
            out.append(
                f'"{name}" is {list(one.entries[name].shape)} in one and '
                f"{list(other.entries[name].shape)} in the other"
            )
    return sorted(out, key=lambda line: (len(line.split('"')[1].split(".")), line))


def _shared_rows(
    one: Checkpoint, other: Checkpoint, spec: Spec, shared_tokens: bool
) -> dict[str, SharedRows]:
    """Where asked: for every table with a row per token, which rows the two have in common."""
    if not shared_tokens:
        return {}
    from regauge.checkpoints.vocabulary import read_vocabulary
    from regauge.matching import SharedRows

    here, there = (
        read_vocabulary(side.path, "--shared-tokens needs both") for side in (one, other)
    )
    common = sorted(here.keys() & there.keys(), key=lambda token: there[token])
    shared = SharedRows(tuple(here[t] for t in common), tuple(there[t] for t in common))
    enough = min(max(here.values()), max(there.values())) + 1
    tables = [
        name
        for name, text in spec.tensors.items()
        if text.startswith("_") and name in one.entries and name in other.entries
    ]
    return {
        name: shared
        for name in tables
        if min(c.entries[name].shape[0] for c in (one, other)) >= enough
    }


def parse_layers(text: str | None) -> list[int] | None:
    """Layers as people write them: 3, 0-5, 0,2,7-9."""
    if text is None:
        return None
    out: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise typer.BadParameter(f"layers are numbers and ranges, as in 0-5,11: not {part!r}")
        out += range(int(first), int(last or first) + 1)
    return out


def parse_weights(given: Sequence[str] | None) -> dict[str, float]:
    """NAME=NUMBER, ... as a mapping."""
    out = {}
    for text in given or ():
        name, _, number = text.rpartition("=")
        try:
            out[name] = float(number)
        except ValueError:
            out[name] = -1.0
        if not name or not 0 <= out[name] < float("inf"):
            raise typer.BadParameter(
                f"{text!r} is not NAME=NUMBER, with a number that is not negative",
                param_hint="--weight",
            )
    return out


def parse_names(text: str | None) -> list[str] | None:
    return None if text is None else [s.strip() for s in text.split(",") if s.strip()]

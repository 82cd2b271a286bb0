"""Two models described by one spec and checked against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regauge.checkpoints.reader import Checkpoint
from regauge.checkpoints.transform import TransformSource, prepare_source
from regauge.core.spec import Spec
from regauge.errors import MatchError
from regauge.matching.costs import SharedRows
from regauge.models.sources import require_fit, resolve

if TYPE_CHECKING:
    import torch

    from regauge.models.discovery import Discovery
    from regauge.models.sources import Source


@dataclass(frozen=True)
class Pair:
    """Two models of one architecture.

    Attributes:
        a: the first model.
        b: the second.
        rows: the rows of tables that both have, if their vocabularies differ.
        modules: the live modules, where the sources were modules.
        discoveries: how specs were discovered, for models that no family describes.
    """

    a: TransformSource
    b: TransformSource
    rows: dict[str, SharedRows]
    modules: tuple[torch.nn.Module | None, torch.nn.Module | None] = (None, None)
    discoveries: tuple[Discovery, ...] = ()

    @property
    def spec(self) -> Spec:
        """The spec of both."""
        return self.a.state_spec


def open_pair(
    a: Source,
    b: Source,
    spec: Spec | str | Path | None = None,
    *,
    fold: bool = False,
    fix: Sequence[str] = (),
    shared_tokens: bool = False,
) -> Pair:
    """Open two models and check that they fit each other.

    Args:
        a: the first model, as `regauge.models.sources.resolve` takes it.
        b: the second.
        spec: a spec or spec file for both.
        fold: fold the norms of both.
        fix: names of gauges to fix.
        shared_tokens: match by the shared tokens of two different vocabularies.

    Raises:
        MatchError: if their families, sizes or groups differ.
    """
    first, second = resolve(a, spec), resolve(b, spec)
    for model in (first, second):
        require_fit(model.checkpoint, model.spec)
    (checkpoint_a, spec_a), (checkpoint_b, spec_b) = (
        (model.checkpoint, model.spec) for model in (first, second)
    )
    if spec_a.family != spec_b.family:
        raise MatchError(
            f"models must be of one family, got {spec_a.family} "
            f"({checkpoint_a.path}) and {spec_b.family} ({checkpoint_b.path})",
            hint="regauge inspect shows the family of a model",
        )
    rows = _shared_rows(checkpoint_a, checkpoint_b, spec_a, shared_tokens)
    differences = _find_differences(checkpoint_a, checkpoint_b, spec_a, spec_b, set(rows))
    if differences:
        listing = "\n".join(f"  {line}" for line in differences[:10]) + (
            f"\n  ... and {len(differences) - 10} more" if len(differences) > 10 else ""
        )
        raise MatchError(
            f"{checkpoint_a.path} and {checkpoint_b.path} have different shapes\n{listing}",
            hint="matching requires equal depth and width; if only the vocabularies differ, pass "
            "--shared-tokens",
        )
    return Pair(
        _prepare(checkpoint_a, spec_a, fold, fix),
        _prepare(checkpoint_b, spec_b, fold, fix),
        rows,
        (first.module, second.module),
        tuple(m.discovery for m in (first, second) if m.discovery is not None),
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

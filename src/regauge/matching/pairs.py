"""Two models described by one spec and checked against each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regauge.checkpoints.reader import Checkpoint, LazyState
from regauge.checkpoints.transform import TransformSource, prepare_source
from regauge.core.element import match_spaces
from regauge.core.fold import folded_spec
from regauge.core.groups import Kind
from regauge.core.spec import Spec
from regauge.errors import Hint, MatchError, SpecError
from regauge.matching.costs import SharedRows
from regauge.models.sources import require_fit, resolve

if TYPE_CHECKING:
    import torch

    from regauge.models.discovery import Discovery
    from regauge.models.sources import Source

Stream = Literal["auto", "permutation"]
STREAMS: tuple[Stream, ...] = ("auto", "permutation")


@dataclass(frozen=True)
class Pair:
    """Two models of one architecture.

    Attributes:
        a: the first model, as it is compared: with its norms folded into the weights if that
            allows rotations of the stream.
        b: the second, likewise.
        rows: the rows of tables that both have, if their vocabularies differ.
        modules: the live modules, where the sources were modules.
        discoveries: how specs were discovered, for models that no family describes.
        notes: remarks on the preparation.
    """

    a: TransformSource
    b: TransformSource
    rows: dict[str, SharedRows]
    modules: tuple[torch.nn.Module | None, torch.nn.Module | None] = (None, None)
    discoveries: tuple[Discovery, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def spec(self) -> Spec:
        """The spec of both, as they are compared."""
        return self.a.state_spec

    @property
    def is_folded(self) -> bool:
        """Whether both are compared with folded norms."""
        return self.a.is_folded

    @cached_property
    def states(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The tensors of both, as they are compared: in float32 unless they are stored in more."""
        if not self.is_folded:
            return self.a.state, self.b.state
        first, second = (
            LazyState(list(side.state), partial(_read_folded, side), side.checkpoint.entries)
            for side in (self.a, self.b)
        )
        return first, second

    @cached_property
    def output(self) -> tuple[TransformSource, list[str]]:
        """A as it is written once an element has moved it: with the norms of B if they were folded.
        And remarks on gains of B that A could not take over.
        """
        return self.a.with_norms_of(self.b) if self.is_folded else (self.a, [])

    def unfolded(self) -> Pair:
        """Return the pair with norms as stored."""
        return replace(self, a=self.a.unfolded(), b=self.b.unfolded())


def _read_folded(side: TransformSource, name: str) -> Any:
    """Return a folded tensor, which is computed in more digits than it is compared in."""
    value, entry = side.state[name], side.checkpoint.entries.get(name)
    is_single = entry is None or entry.dtype != "F64"
    return value.float() if is_single and value.dtype.is_floating_point else value


def allows_rotations(
    spec: Spec, within: Kind = "full", spaces: Iterable[str] | None = None
) -> bool:
    """Return whether folding norms enlarges the group of one of these spaces.

    Args:
        spec: the spec of the model.
        within: the kind that every group is restricted to.
        spaces: the spaces that take part; all by default.
    """
    names = set(spec.spaces) if spaces is None else match_spaces(spec, spaces)
    folded = folded_spec(spec).spaces
    return any(folded[n].group.within(within) != spec.spaces[n].group.within(within) for n in names)


def prepare_pair(
    a: tuple[Checkpoint, Spec],
    b: tuple[Checkpoint, Spec],
    *,
    stream: Stream = "auto",
    within: Kind = "full",
    spaces: Iterable[str] | None = None,
) -> Pair:
    """Return two models that fit each other as a pair, with folded norms if that allows rotations.

    Args:
        a: the first model and its spec.
        b: the second.
        stream: "permutation" compares norms as stored.
        within: the kind that every group is restricted to.
        spaces: the spaces that take part; all by default.
    """
    notes: list[str] = []
    untie = a[1].ties.keys() ^ b[1].ties.keys()  # tied in one of them
    if stream == "auto" and allows_rotations(a[1], within, spaces):
        try:
            return Pair(prepare_source(*a, True, untie), prepare_source(*b, True, untie), {})
        except SpecError as error:  # a norm that cannot be folded
            notes.append(f"the stream is matched by permutations only: {error}")
    first, second = (prepare_source(*side, False, untie) for side in (a, b))
    return Pair(first, second, {}, notes=tuple(notes))


def open_pair(
    a: Source,
    b: Source,
    spec: Spec | str | Path | None = None,
    *,
    stream: Stream = "auto",
    within: Kind = "full",
    spaces: Iterable[str] | None = None,
    shared_tokens: bool = False,
) -> Pair:
    """Open two models and check that they fit each other.

    Args:
        a: the first model, as `regauge.models.sources.resolve` takes it.
        b: the second.
        spec: a spec or spec file for both.
        stream: "auto" folds norms if that allows rotations of the stream; "permutation" does not.
        within: the kind that every group is restricted to.
        spaces: the spaces that take part; all by default.
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
            hint="pass two models of one family",
        )
    rows = _shared_rows(checkpoint_a, checkpoint_b, spec_a, shared_tokens)
    differences = _find_differences(checkpoint_a, checkpoint_b, spec_a, spec_b, set(rows))
    if differences:
        listing = "\n".join(f"  {line}" for line in differences[:10]) + (
            f"\n  ... and {len(differences) - 10} more" if len(differences) > 10 else ""
        )
        raise MatchError(
            f"{checkpoint_a.path} and {checkpoint_b.path} have different shapes\n{listing}",
            hint=Hint(
                "matching requires equal depth and width; if only the vocabularies "
                "differ, pass shared_tokens=True",
                cli="matching requires equal depth and width; if only the "
                "vocabularies differ, pass --shared-tokens",
            ),
        )
    pair = prepare_pair(
        (checkpoint_a, spec_a), (checkpoint_b, spec_b), stream=stream, within=within, spaces=spaces
    )
    return replace(
        pair,
        rows=rows,
        modules=(first.module, second.module),
        discoveries=tuple(m.discovery for m in (first, second) if m.discovery is not None),
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
    rows = {
        name: shared
        for name in tables
        if min(c.entries[name].shape[0] for c in (checkpoint_a, checkpoint_b)) >= min_rows
    }
    return rows | {alias: shared for alias, target in spec.ties.items() if target in rows}

"""Views: exactly what one adversary has. An attack is given a view, and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from regauge.core.action import State
from regauge.core.groups import Kind
from regauge.core.spec import Spec

if TYPE_CHECKING:
    import torch

    from regauge.data.tasks import Examples


@dataclass(frozen=True, eq=False)
class Locked:
    """Who holds a locked file: the architecture, every tensor (embedding and head as they were, the
    backbone moved), and the kind of the lock, which its record states.
    """

    spec: Spec
    state: State
    kind: Kind = "full"


@dataclass(frozen=True, eq=False, kw_only=True)
class WithBase(Locked):
    """... and has the public model that the locked one was tuned from, or believes so."""

    base: State


@dataclass(frozen=True, eq=False, kw_only=True)
class WithCandidates(Locked):
    """... and has public models that it may descend from, by name."""

    candidates: Mapping[str, State]


@dataclass(frozen=True, eq=False, kw_only=True)
class WithLabels(Locked):
    """... and has some labelled examples of the model's task, and the model's class: `model` holds
    the locked weights, and is not changed.
    """

    model: torch.nn.Module
    examples: Examples


@dataclass(frozen=True, eq=False)
class KnownInputs:
    """Who sees features that a key has moved, and knows the same features unmoved: of the inputs
    that it sent itself, through the public embedding. Both are [tokens, channels], row by row.
    """

    plain: torch.Tensor
    moved: torch.Tensor
    kind: Kind = "permutation"


@dataclass(frozen=True, eq=False)
class SeenFeatures:
    """Who sees moved features only, batch after batch under one key, and has other data that went
    through the public embedding.
    """

    moved: torch.Tensor
    others: torch.Tensor
    kind: Kind = "permutation"


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Who sees the hidden states of one text, [tokens, channels], moved by an unknown element, and
    has the open language model that made them: `layer` of its hidden states, 0 being what enters
    the first block. Rows that are `shuffled` come in no order.
    """

    moved: torch.Tensor
    model: torch.nn.Module
    layer: int
    kind: Kind = "permutation"
    shuffled: bool = False


@dataclass(frozen=True, eq=False)
class EmbeddedText:
    """A server that sees one text as it enters the backbone, [tokens, channels], or several of one
    length, and has the open model whose embedding made it. Columns were moved by an unknown element
    of a kind, or by none; rows that are `shuffled` come in no order.
    """

    moved: torch.Tensor
    model: torch.nn.Module
    kind: Kind | None = None
    shuffled: bool = True


@dataclass(frozen=True, eq=False)
class PairedTexts:
    """A server that sees texts of one length, [texts, tokens, channels], and has texts of its own
    with what a client like this one makes of them, in order (`features` of `ids`), and an open
    `table` of tokens. Rows that are `shuffled` come in no order.
    """

    seen: torch.Tensor
    features: torch.Tensor
    ids: torch.Tensor
    table: torch.Tensor
    shuffled: bool = True


@dataclass(frozen=True, eq=False)
class Served:
    """What a server of split learning sees of one pass: the stream as it comes, whatever the client
    did to it, the other tensors that cross with it, and in training the gradient of the loss by the
    output. No times: those are another channel. The output is its own: whoever has the weights can
    compute it.
    """

    stream: torch.Tensor
    others: Mapping[str, torch.Tensor]
    slope: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class KnownStreams:
    """A server that knows some of the samples that it was sent: `moved` as they came, rows in any
    order and columns moved by one element of a kind, and `plain`, what the public embedding makes
    of them. Both are [samples, tokens, channels].
    """

    plain: torch.Tensor
    moved: torch.Tensor
    kind: Kind = "permutation"


@dataclass(frozen=True, eq=False)
class SentSlopes:
    """A server that keeps the gradients which it was sent, [samples, channels] (each sample's added
    up over its tokens: `labels.slopes_of`). By the number of the sample it may know some labels:
    `known`, one each, or `many`, all of a sample's zeros and ones.
    """

    slopes: torch.Tensor
    known: Mapping[int, int] = field(default_factory=dict)
    many: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PairedImages:
    """A server that sees features `seen`, and has images of its own with the features that a client
    like this one makes of them, defended likewise (in order where an attack says so). Features are
    [samples, tokens, channels]; `patch` is the side of a patch.
    """

    seen: torch.Tensor
    features: torch.Tensor
    images: torch.Tensor
    patch: int


@dataclass(frozen=True, eq=False)
class PublicPatches:
    """A server that sees features `seen`, knows the client's patch embedding (`weight` [d, c, p,
    p], `bias` [d], `positions` [tokens, d], the `first` token with its position if there is one),
    and has other images of the kind. `tolerance` is the size of the noise that it expects in a
    token.
    """

    seen: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    positions: torch.Tensor
    images: torch.Tensor
    patch: int
    first: torch.Tensor | None = None
    tolerance: float = 1e-3


def part_of(spec: Spec, part: str) -> Spec:
    """The spec of one part alone, and the spaces that live in it."""
    from regauge.core import axes as ax

    tensors = {name: text for name, text in spec.tensors.items() if spec.parts.get(name) == part}
    spaces = set().union(*(ax.spaces(text) for text in tensors.values())) if tensors else set()
    parents = {space.over for name, space in spec.spaces.items() if name in spaces}
    return replace(
        spec,
        spaces={name: space for name, space in spec.spaces.items() if name in spaces | parents},
        tensors=tensors,
        parts=dict.fromkeys(tensors, part),
        ties={a: b for a, b in spec.ties.items() if a in tensors and b in tensors},
        norms=tuple(n for n in spec.norms if n.gain in tensors),
        scales=tuple(s for s in spec.scales if s.gain in tensors),
        fixed={name: value for name, value in spec.fixed.items() if name in tensors},
        outputs={},
    )


def only(state: State, names: Sequence[str] | Mapping[str, object]) -> dict[str, torch.Tensor]:
    """The tensors of these names."""
    return {name: state[name] for name in names if name in state}

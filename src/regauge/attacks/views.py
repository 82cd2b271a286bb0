"""Views: exactly what one adversary has. An attack takes a view and nothing else."""

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
class LockedFile:
    """An adversary who holds a locked file.

    It has the architecture, every tensor (embedding and head in plain, the backbone transformed)
    and the kind of the lock, which is stated in the lock's record.
    """

    spec: Spec
    state: State
    kind: Kind = "full"


@dataclass(frozen=True, eq=False, kw_only=True)
class LockedFileWithBase(LockedFile):
    """A locked file, and the public model that the adversary takes for its base."""

    base: State


@dataclass(frozen=True, eq=False, kw_only=True)
class LockedFileWithCandidates(LockedFile):
    """A locked file, and public models, by name, from which it may descend."""

    candidates: Mapping[str, State]


@dataclass(frozen=True, eq=False, kw_only=True)
class LockedFileWithLabels(LockedFile):
    """A locked file, labelled examples of its task, and the model's class.

    `model` holds the locked weights and is not modified.
    """

    model: torch.nn.Module
    examples: Examples


@dataclass(frozen=True, eq=False)
class KnownInputs:
    """Features under a key next to the same features in plain.

    The adversary sent these inputs itself, so that the public embedding gives the plain features.
    Both tensors are [tokens, channels], row by row.
    """

    plain: torch.Tensor
    moved: torch.Tensor
    kind: Kind = "permutation"


@dataclass(frozen=True, eq=False)
class ObservedFeatures:
    """Features under a key only, batch after batch under one key.

    `others` are the features of other data through the public embedding.
    """

    moved: torch.Tensor
    others: torch.Tensor
    kind: Kind = "permutation"


@dataclass(frozen=True, eq=False)
class HiddenStates:
    """Hidden states of one text under an unknown element, and the open language model behind them.

    `moved` is [tokens, channels]. `layer` indexes the model's hidden states; 0 is the input of the
    first block. If `shuffled`, the rows come in random order.
    """

    moved: torch.Tensor
    model: torch.nn.Module
    layer: int
    kind: Kind = "permutation"
    shuffled: bool = False


@dataclass(frozen=True, eq=False)
class EmbeddedText:
    """The input of the backbone for one text or several of one length, and the open model's
    embedding.

    `moved` is [tokens, channels] or [texts, tokens, channels]. Its columns are transformed by an
    unknown element of `kind`, or not at all if `kind` is None. If `shuffled`, the rows come in
    random order.
    """

    moved: torch.Tensor
    model: torch.nn.Module
    kind: Kind | None = None
    shuffled: bool = True


@dataclass(frozen=True, eq=False)
class PairedTexts:
    """Observed texts, and pairs of the adversary's own texts with their features.

    `observed` is [texts, tokens, channels], all texts of one length. `features` are what a client
    like this one makes of `ids`, in order. `table` is an open table of tokens. If `shuffled`, the
    observed rows come in random order.
    """

    observed: torch.Tensor
    features: torch.Tensor
    ids: torch.Tensor
    table: torch.Tensor
    shuffled: bool = True


@dataclass(frozen=True, eq=False)
class ServerPass:
    """One pass as a split-learning server receives it.

    It holds the stream after the client's defences, the other tensors sent with it, and in training
    the gradient of the loss with respect to the output. Timing is a separate channel and not part
    of the view. The output is not part of it either: it follows from the server's own weights.
    """

    stream: torch.Tensor
    others: Mapping[str, torch.Tensor]
    grad: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class KnownStreams:
    """Streams of samples that the server knows.

    `moved` is the stream as received, rows in any order and columns transformed by one element of
    `kind`; `plain` is the output of the public embedding for the same samples. Both are [samples,
    tokens, channels].
    """

    plain: torch.Tensor
    moved: torch.Tensor
    kind: Kind = "permutation"


@dataclass(frozen=True, eq=False)
class SentGradients:
    """Gradients that a split-learning server has received, [samples, channels].

    Each row is summed over the sample's tokens (`labels.sample_grads`). Labels that the server
    knows are given by sample number: `known_labels` for one label each, `known_label_sets` for all
    of a sample's zeros and ones.
    """

    grads: torch.Tensor
    known_labels: Mapping[int, int] = field(default_factory=dict)
    known_label_sets: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class PairedImages:
    """Observed features, and pairs of the adversary's own images with their features.

    The pairs come from a client like this one with the same defences, in order if the attack
    requires it. Features are [samples, tokens, channels]; `patch` is the side of a patch in pixels.
    """

    observed: torch.Tensor
    features: torch.Tensor
    images: torch.Tensor
    patch: int


@dataclass(frozen=True, eq=False)
class PublicPatches:
    """Observed features, the client's patch embedding, and other images of the same kind.

    `weight` is [d, c, p, p], `bias` [d], `positions` [tokens, d]; `first` is the first token with
    its position, if the model has one. `tolerance` is the expected size of the noise in a token.
    """

    observed: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    positions: torch.Tensor
    images: torch.Tensor
    patch: int
    first: torch.Tensor | None = None
    tolerance: float = 1e-3


def part_spec(spec: Spec, part: str) -> Spec:
    """Return the spec of one part alone, with the spaces that occur in it."""
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


def select_tensors(
    state: State, names: Sequence[str] | Mapping[str, object]
) -> dict[str, torch.Tensor]:
    """Return the tensors with these names."""
    return {name: state[name] for name in names if name in state}

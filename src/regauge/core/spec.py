"""The spec: what a model's tensors are, as data. Spaces with size and group, tensors with axes
strings, and where the model is cut.

A tensor name may hold a space in braces, "experts.{expert.0}.w1.weight" with axes "expert.0 |ffn.0|
stream*": the checkpoint stores one tensor per index, and the spec reads them as the stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from regauge.core import axes as ax
from regauge.core.groups import Group
from regauge.core.patterns import compile_pattern

PARTS = ("embed", "backbone", "head")
STACK = re.compile(r"\{([^{}]+)\}")
# tensors in one stack: they are listed one by one, and a mistaken size must not take forever
MAX_STACK = 10_000


class Shaped(Protocol):
    """Anything with a shape: a tensor, or the header entry of one. Its dtype is looked at if it has
    one.
    """

    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Space:
    """A space: its size, the largest group that commutes with everything that touches it, and why
    it is not larger.

    `over` names a parent: one member per index of it. `folded` is the group after `fold_norms`,
    where that is larger. `constant` says what becomes of a vector that is added at every token:
    "unseen" if on the dual side it changes nothing (keys under a softmax), "passed" if on the plain
    side it arrives at the readers as it is (values, whose weights sum to one), and nothing if
    neither is known.
    """

    size: int
    group: Group
    over: str | None = None
    folded: Group | None = None
    why: str = ""
    constant: str = ""


@dataclass(frozen=True)
class Norm:
    """A norm that can be folded: its gain (and bias), and the (weight, bias) of every layer that
    reads it.

    `neutral` is the stored value that means no gain: 1, or 0 where the model adds one to it.
    `padded`: zeros are put in between norm and readers (Swin fills up its windows, a convolution
    its edges), so only the gain may go into the readers; the bias must stay before the padding.
    """

    gain: str
    bias: str | None
    readers: tuple[tuple[str, str | None], ...]
    neutral: float = 1.0
    padded: bool = False


@dataclass(frozen=True)
class Scale:
    """A gain on the writer side of a residual branch (LayerScale): folds backwards into the
    (weight, bias) of its writers.
    """

    gain: str
    writers: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Spec:
    """The symmetry of one model.

    `ties` maps a name to the tensor it repeats; `untied` holds the factor that a repeated tensor
    takes when it becomes its own (1 if absent), and `untied_config` what config.json says then
    besides "tie_word_embeddings": false. `outputs` gives the axes of what callers see: a space
    there is *visible*. `fixed` holds tensors that must be constant (folded gains). `buffers` are
    patterns of names that checkpoints may carry and that nothing moves. `config` is what
    config.json must say for this state.
    """

    family: str
    spaces: Mapping[str, Space]
    tensors: Mapping[str, str]
    parts: Mapping[str, str] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)
    untied: Mapping[str, float] = field(default_factory=dict)
    untied_config: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    norms: tuple[Norm, ...] = ()
    scales: tuple[Scale, ...] = ()
    fixed: Mapping[str, float] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: space.size for name, space in self.spaces.items()}

    @property
    def visible(self) -> frozenset[str]:
        """The spaces that callers see at the outputs: moving them changes what the model
        returns.
        """
        return frozenset().union(*(ax.spaces(a) for a in self.outputs.values()))

    def count(self, name: str) -> int:
        """How many members an element has in this space: one, or one per index of the parent."""
        over = self.spaces[name].over
        return 1 if over is None else self.spaces[over].size

    def children(self, name: str) -> list[str]:
        return [s for s, space in self.spaces.items() if space.over == name]

    def is_buffer(self, name: str) -> bool:
        return any(compile_pattern(pattern).matches(name) for pattern in self.buffers)


class StoredTensor(NamedTuple):
    """One tensor as it is stored: its pattern in the spec, the axes it has, and its place in the
    stack if it is one of a stack.
    """

    pattern: str
    axes: str
    parent: str | None = None
    place: int = 0


def stored_tensors(spec: Spec) -> dict[str, StoredTensor]:
    """Every tensor name that a state of this spec has, stacks unrolled."""
    return dict(iter_stored_tensors(spec))


def iter_stored_tensors(spec: Spec) -> Iterator[tuple[str, StoredTensor]]:
    for pattern, text in spec.tensors.items():
        found = STACK.search(pattern)
        if not found:
            yield pattern, StoredTensor(pattern, text)
            continue
        parent = found.group(1)
        terms = ax.parse(text).terms
        rest = str(ax.Axes(terms[1:]))
        for i in range(spec.spaces[parent].size):
            yield (
                pattern[: found.start()] + str(i) + pattern[found.end() :],
                StoredTensor(pattern, rest, parent, i),
            )

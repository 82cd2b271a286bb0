"""Specs: the symmetry of a model as data. Spaces with sizes and groups, tensors with axes strings,
and the parts at which the model is cut.

A tensor name may contain a space in braces, "experts.{expert.0}.w1.weight" with axes "expert.0
|ffn.0| stream*": the checkpoint stores one tensor per index, and the spec treats them as a stack.
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
# Tensors in one stack. They are listed one by one, so a wrong size must not take forever.
MAX_STACK = 10_000


class Shaped(Protocol):
    """Anything with a shape: a tensor, or its entry in a file header. A dtype is checked if
    present.
    """

    @property
    def shape(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Space:
    """A space that axes are indexed by.

    Args:
        size: Its dimension.
        group: The largest group that commutes with all operations on the space.
        over: The parent space, if the group has one member per index of a parent.
        folded: The group after `fold_norms`, if larger.
        why: The reason why the group is not larger.
        constant: The effect of a vector that is added at every token: "unseen" if it has none on
            the dual side (keys under a softmax), "passed" if on the plain side it reaches the
            readers unchanged (values, whose attention weights sum to one), "" if unknown.

    Example:
        >>> from regauge.core.groups import Permutation
        >>> regauge.Space(8, Permutation(), why="ReLU").size
        8
    """

    size: int
    group: Group
    over: str | None = None
    folded: Group | None = None
    why: str = ""
    constant: str = ""


@dataclass(frozen=True)
class Norm:
    """A norm that can be folded.

    Args:
        gain: The tensor of its gain.
        bias: The tensor of its bias, if it has one.
        readers: The (weight, bias) of every layer that reads the norm.
        neutral: The stored value that means a gain of one: 1, or 0 if the model adds one to it.
        padded: Whether zeros are inserted between norm and readers (Swin pads its windows, a
            convolution its edges). Then only the gain is folded; the bias must stay before the
            padding.
    """

    gain: str
    bias: str | None
    readers: tuple[tuple[str, str | None], ...]
    neutral: float = 1.0
    padded: bool = False


@dataclass(frozen=True)
class Scale:
    """A gain at the end of a residual branch (LayerScale), which folds back into the (weight, bias)
    of its writers.
    """

    gain: str
    writers: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Spec:
    """The symmetry of one model.

    Args:
        family: The name of the model family.
        spaces: The spaces by name.
        tensors: The axes string of every tensor.
        parts: The part of every tensor: embed, backbone or head.
        ties: From a tensor's name to the name of the tensor it repeats.
        untied: The factor of a repeated tensor when it is stored separately (1 if absent).
        untied_config: Entries of config.json when a tie is removed, besides "tie_word_embeddings":
            false.
        outputs: The axes of the model's outputs. Spaces in them are *visible*.
        norms: The norms that can be folded.
        scales: The LayerScales that can be folded.
        fixed: Tensors that must be constant (folded gains), with their values.
        buffers: Patterns of names that checkpoints may contain and that nothing transforms.
        notes: Remarks for readers.
        config: Entries that config.json must have for this state.

    Example:
        >>> from regauge.core.groups import Permutation
        >>> spaces = {"ffn": regauge.Space(8, Permutation())}
        >>> spec = regauge.Spec("mlp", spaces, {"up.weight": "ffn _", "down.weight": "_ ffn*"})
        >>> g = regauge.element(spec, 0)
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
        """The size of every space."""
        return {name: space.size for name, space in self.spaces.items()}

    @property
    def visible(self) -> frozenset[str]:
        """The spaces of the outputs: transforming them changes what the model returns."""
        return frozenset().union(*(ax.spaces(a) for a in self.outputs.values()))

    def count(self, name: str) -> int:
        """Return how many members an element has in a space: one, or one per index of its
        parent.
        """
        over = self.spaces[name].over
        return 1 if over is None else self.spaces[over].size

    def children(self, name: str) -> list[str]:
        """List the spaces that lie over a space."""
        return [s for s, space in self.spaces.items() if space.over == name]

    def is_buffer(self, name: str) -> bool:
        """Return whether a tensor name matches a pattern of `buffers`."""
        return any(compile_pattern(pattern).matches(name) for pattern in self.buffers)

    def __repr__(self) -> str:
        return f"<spec of {self.family}: {len(self.spaces)} spaces, {len(self.tensors)} tensors>"


class StoredTensor(NamedTuple):
    """One tensor as stored: its pattern in the spec, its axes, and if it is part of a stack, the
    space of the stack and its place there.
    """

    pattern: str
    axes: str
    parent: str | None = None
    place: int = 0


def stored_tensors(spec: Spec) -> dict[str, StoredTensor]:
    """Return the tensors in a state of this spec by name, stacks unrolled."""
    return dict(iter_stored_tensors(spec))


def iter_stored_tensors(spec: Spec) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the items of `stored_tensors` one by one."""
    for pattern, text in spec.tensors.items():
        braces = STACK.search(pattern)
        if not braces:
            yield pattern, StoredTensor(pattern, text)
            continue
        parent = braces.group(1)
        terms = ax.parse(text).terms
        rest = str(ax.Axes(terms[1:]))
        for i in range(spec.spaces[parent].size):
            yield (
                pattern[: braces.start()] + str(i) + pattern[braces.end() :],
                StoredTensor(pattern, rest, parent, i),
            )

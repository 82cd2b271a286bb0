"""What a family is: the spec of its models, from a config and the tensor names at hand, and where
they are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from regauge.core.spec import Spec
from regauge.models.families.pieces import Config, Names


@dataclass(frozen=True)
class Boundary:
    """Where the stream enters the backbone and leaves it: the blocks that are the backbone, the
    axes of what they are given, and of what they return.

    `blocks` is the path of a list of modules that are called in order, or of one module. `enter`
    names arguments of a block's forward, the stream first; those not named cross as they are.
    `returns` names the places of the tuple that a block returns, the stream first; a place named
    after an argument goes to the next block (T5's position bias), others are "". Without it, blocks
    return the stream alone.

    The token axes of a causal mask are "token _+token*": the keys are whatever a cache holds, and
    then the tokens themselves. `source` are the tokens that cross-attention reads. `implicit` names
    arguments that the blocks make from the order of their rows where they are given none (a causal
    mask, a position bias): rows move only with them. It says how to make one from the first block
    and what crosses, where a family can.
    """

    name: str
    blocks: str
    enter: Mapping[str, str]
    leave: str
    returns: tuple[str, ...] = ()
    implicit: Mapping[str, Callable[[Any, Mapping[str, Any]], Any] | None] = field(
        default_factory=dict
    )

    @property
    def stream(self) -> str:
        """The argument that is the stream."""
        return next(iter(self.enter))


@dataclass(frozen=True)
class Family:
    """A model family. `spec` describes, `boundaries` cuts; both read the config and the tensor
    names at hand.

    timm's config.json has no model_type: `architectures` are the beginnings of the names that it
    has instead.
    """

    name: str
    model_types: tuple[str, ...]
    spec: Callable[[Config, Names], Spec]
    boundaries: Callable[[Config, Names], tuple[Boundary, ...]]
    architectures: tuple[str, ...] = ()

"""What a family is: the spec of its models, from a config and the tensor names at hand, and where they are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from regauge.families.pieces import Config, Names
from regauge.spec import Spec


@dataclass(frozen=True)
class Boundary:
    """Where the stream enters the backbone and leaves it: the blocks that are the backbone, the axes of what they are given, and of what they return.

    `blocks` is the path of a list of modules that are called in order, or of one module. `enter` names arguments of a block's forward; those not named cross as
    they are. `carry` names results (by place in the tuple that a block returns) that the next block is given as arguments.
    """

    name: str
    blocks: str
    enter: Mapping[str, str]
    leave: str
    carry: Mapping[int, str] | None = None


@dataclass(frozen=True)
class Family:
    """A model family. `spec` describes, `boundaries` cuts, `prefixes` are what full models put before the base model's names."""

    name: str
    model_types: tuple[str, ...]
    spec: Callable[[Config, Names], Spec]
    boundaries: Callable[[Config, str], tuple[Boundary, ...]]
    prefixes: tuple[str, ...] = ()

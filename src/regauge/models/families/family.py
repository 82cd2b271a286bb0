"""The description of a model family: the spec of its models, from a config and the tensor names,
and where they are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from regauge.core.spec import Spec
from regauge.models.families.pieces import Config, Names


@dataclass(frozen=True)
class Boundary:
    """The boundary of a backbone: its blocks, and the axes of their inputs and outputs.

    The token axes of a causal mask are "token _+token*": the keys are the contents of a cache,
    followed by the tokens themselves. `source` denotes the tokens that cross-attention reads.

    Attributes:
        name: the name of the boundary, "" for the only one of a model.
        blocks: the path of a list of modules that are called in order, or of one module.
        enter: axes by argument of a block's forward, the stream first; arguments without an entry
            cross unchanged.
        leave: the axes of the stream that the last block returns.
        returns: names for the items of the tuple that a block returns, the stream first. An item
            named after an argument is passed to the next block (T5's position bias), others are
            "". Empty if blocks return the stream alone.
        implicit: arguments that the blocks compute from the order of their rows if not passed (a
            causal mask, a position bias): rows can be permuted only if these are explicit. The
            value is a function that computes one from the first block and the inputs, or None.
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
        """Return the name of the stream's argument."""
        return next(iter(self.enter))


@dataclass(frozen=True)
class Family:
    """A model family.

    timm's config.json has no model_type: `architectures` are prefixes of the names that it has
    instead.

    Attributes:
        name: the name of the family.
        model_types: the model types that it describes.
        spec: builds a spec from a config and tensor names.
        boundaries: returns the boundaries for a config and tensor names.
        architectures: prefixes of timm's architecture names.
    """

    name: str
    model_types: tuple[str, ...]
    spec: Callable[[Config, Names], Spec]
    boundaries: Callable[[Config, Names], tuple[Boundary, ...]]
    architectures: tuple[str, ...] = ()

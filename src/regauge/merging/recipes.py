"""Recipes: what is merged, how, and what a parameter is for each tensor.
`regauge.merging.recipe_yaml` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regauge.errors import RegaugeError
from regauge.merging.methods import REQUIRED


class RecipeError(RegaugeError):
    """A recipe that cannot be followed. The message has the file and the line."""


@dataclass(frozen=True)
class Condition:
    """A value for the tensors whose names have `filter` in them; None stands for all."""

    filter: str | None
    value: Any


@dataclass(frozen=True)
class Setting:
    """What a recipe says a parameter is: a number, a tuple of numbers along the layers, or
    conditions of which the first that fits counts.
    """

    value: Any
    line: int

    def evaluate(self, name: str, t: float) -> Any:
        """The value for a tensor of this name, t of the way from the first layer (0) to the last
        (1); None if no condition fits.
        """
        return _evaluate(self.value, name, t)


Settings = Mapping[str, Setting]


@dataclass(frozen=True)
class DataConfig:
    """The data that models are looked at on: where they come from, how many examples, and how a
    model reads them. With `labels` a Fisher information is the empirical one, of the data's own
    labels.
    """

    uri: str
    samples: int = 256
    fields: tuple[tuple[str, str], ...] = ()
    split: str = "test"
    tokenizer: str | None = None
    length: int | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    labels: bool = False


@dataclass(frozen=True)
class Source:
    """One model of a slice, with its layers (from, to, the last one not included; None: all of
    them), and the data that are its own.
    """

    model: str
    layers: tuple[int, int] | None
    parameters: Settings
    line: int
    data: DataConfig | None = None


@dataclass(frozen=True)
class Slice:
    sources: tuple[Source, ...]
    base: str | None
    parameters: Settings
    line: int


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokens the output has: those of the base, of a model, or the union of all; and what its
    tables are padded to.
    """

    source: str
    pad_multiple: int | None
    line: int


@dataclass(frozen=True)
class AlignConfig:
    """How models are moved next to the base, or to the model `to`, before they are merged: the
    options of the matcher.
    """

    to: str | None = None
    fold: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A merge. With `models:` there is one slice of whole models; `text` is the recipe as it was
    written.
    """

    method: str
    slices: tuple[Slice, ...]
    is_sliced: bool
    base: str | None
    parameters: Settings
    dtype: str | None
    out_dtype: str | None
    tokens: TokenizerConfig | None
    align: AlignConfig | None
    text: str
    origin: str
    notes: tuple[str, ...] = ()
    data: DataConfig | None = None

    def data_for(self, model: str) -> DataConfig | None:
        """The data that a model is looked at on: its own, or those of all."""
        own = next(
            (s.data for part in self.slices for s in part.sources if s.model == model and s.data),
            None,
        )
        return own or self.data

    @property
    def models(self) -> tuple[str, ...]:
        """Every model, each once, the base first if there is one."""
        named = [s.model for part in self.slices for s in part.sources]
        return tuple(
            dict.fromkeys(
                [
                    *([self.base] if self.base else []),
                    *(p.base for p in self.slices if p.base),
                    *named,
                ]
            )
        )

    def resolve_parameter(
        self, name: str, part: Slice, source: Source | None, tensor: str, t: float, default: Any
    ) -> Any:
        """A parameter's value: the source's own, else the slice's, else the recipe's, else the
        default. Needed ones are refused by name.
        """
        for settings in ([source.parameters] if source else []) + [
            part.parameters,
            self.parameters,
        ]:
            found = settings[name].evaluate(tensor, t) if name in settings else None
            if found is not None:
                return found
        if default is REQUIRED:
            of = f"the model {source.model}" if source else "the merge"
            raise RecipeError(
                f"{self.origin}, line {(source or part).line}: {self.method} needs the parameter "
                f'"{name}" of {of}, for "{tensor}"',
                hint=f"write {name}: under parameters:",
            )
        return default


def _evaluate(value: Any, name: str, t: float) -> Any:
    if not isinstance(value, tuple):
        return value
    if isinstance(value[0], Condition):
        fits = next((c for c in value if c.filter is None or c.filter in name), None)
        return None if fits is None else _evaluate(fits.value, name, t)
    if isinstance(value[0], bool):
        return value[int(t * (len(value) - 1))]
    scaled = t * (len(value) - 1)
    low = int(scaled)
    high, share = min(len(value) - 1, low + 1), scaled - low
    return (1 - share) * value[low] + share * value[high]

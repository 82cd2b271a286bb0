"""Recipes: the models and method of a merge, and the value of each parameter for every tensor.

`regauge.merging.recipe_yaml` parses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regauge.data.sources import DataSource
from regauge.errors import RecipeError
from regauge.matching.live_pair import REFINE_STEPS
from regauge.matching.pairs import Stream
from regauge.merging.methods import REQUIRED


@dataclass(frozen=True)
class Condition:
    """A value for the tensors with `filter` in their names; None stands for all."""

    filter: str | None
    value: Any


@dataclass(frozen=True)
class Setting:
    """The value of a parameter in a recipe.

    It is a number, a tuple of numbers along the layers, or conditions, of which the first that fits
    counts.
    """

    value: Any
    line: int

    def evaluate(self, name: str, t: float) -> Any:
        """Return the value for a tensor; None if no condition fits.

        Args:
            name: the tensor's name.
            t: the position along the layers, from 0 (first) to 1 (last).
        """
        return _evaluate(self.value, name, t)


Settings = Mapping[str, Setting]


@dataclass(frozen=True)
class Source:
    """One model of a slice.

    Attributes:
        model: its path or hub id.
        layers: the first layer, and the one after the last; None for all.
        parameters: its parameters.
        line: its line in the recipe.
        data: its own data, if any.
    """

    model: str
    layers: tuple[int, int] | None
    parameters: Settings
    line: int
    data: DataSource | None = None


@dataclass(frozen=True)
class Slice:
    """A range of layers of the output, and the models that it is made of."""

    sources: tuple[Source, ...]
    base: str | None
    parameters: Settings
    line: int


@dataclass(frozen=True)
class TokenizerConfig:
    """The tokens of the output: "base", "union" or those of a model.

    Tables are padded to a multiple of `pad_multiple` rows.
    """

    source: str
    pad_multiple: int | None
    line: int


@dataclass(frozen=True)
class AlignConfig:
    """The alignment of models with the base, or with the model `to`, before the merge.

    With `stream` "permutation" the residual stream is permuted and not rotated. `refine` names the
    data on which elements are refined, or "self" or "noise" as in `match`; `refine_steps` are the
    steps. `options` are further options of `match`.
    """

    to: str | None = None
    stream: Stream = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    refine: DataSource | None = None
    refine_steps: int = REFINE_STEPS


@dataclass(frozen=True)
class Recipe:
    """A merge. With `models:` there is one slice of whole models.

    `text` is the recipe as written, `origin` its file.
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
    data: DataSource | None = None
    chat_template: str | None = None

    def data_for(self, model: str) -> DataSource | None:
        """Return the data of a model: its own, or those of all."""
        own_data = next(
            (s.data for part in self.slices for s in part.sources if s.model == model and s.data),
            None,
        )
        return own_data or self.data

    @property
    def models(self) -> tuple[str, ...]:
        """Every model once, the base first if there is one."""
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
        """Return the value of a parameter: the source's, else the slice's, the recipe's, or the
        default.

        Raises:
            RecipeError: if it is required and missing.
        """
        for settings in ([source.parameters] if source else []) + [
            part.parameters,
            self.parameters,
        ]:
            value = settings[name].evaluate(tensor, t) if name in settings else None
            if value is not None:
                return value
        if default is REQUIRED:
            owner = f"the model {source.model}" if source else "the merge"
            raise RecipeError(
                f"{self.origin}, line {(source or part).line}: {self.method} needs the parameter "
                f'"{name}" of {owner}, for "{tensor}"',
                hint=f"write {name}: under parameters:",
            )
        return default


def _evaluate(value: Any, name: str, t: float) -> Any:
    """Evaluate a value, list or conditions for a tensor."""
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

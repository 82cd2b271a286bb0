"""Masked Jigsaw Puzzle training as a wrapper around a model of images.

In training a share of an image's patches is shuffled and carries one shared, learnable, unknown
position embedding in place of its own; the other embeddings are asked where they belong. In
evaluation the wrapped model is the plain one. None of the model's code is copied: its table of
positions is swapped for the length of one call.

    wrapped = MaskedJigsaw(model, ratio=0.1)
    out = wrapped(pixel_values, labels)              # out.loss is all of it; out.logits, and
    out.extra, which out.loss holds already
    model = wrapped.unwrap()                         # the plain model, trained

As in the reference, a pass is shuffled with probability 0.5, and none of the first `warmup` passes
is (there: 20 of 300 epochs).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.func import functional_call

from regauge.jigsaw.localizer import Localizer
from regauge.jigsaw.masks import (
    Grid,
    JigsawError,
    Puzzle,
    check_probability,
    check_ratio,
    check_size,
    sample_puzzle,
    sample_scramble,
)
from regauge.jigsaw.positions import find_positions, interpolate_positions
from regauge.jigsaw.variants import Variant, resolve_variant

Tensor = torch.Tensor
Weight = float | Callable[[int], float]
LAMBDA = 0.01


class Output(dict[str, Any]):
    """What a forward gives, by key or by attribute: logits, with labels the loss, in training the
    extra loss; and what else the model gives. What is not there reads as None.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


class MaskedJigsaw(torch.nn.Module):
    """A model of images in training with masked jigsaw puzzles.

    `variant` is a letter of the paper's Table 2 or a `Variant`; by default J, or E (the shuffle
    alone) where the model has no absolute positions, and then a warning says so. `ratio` is the
    share of patches. `per` draws one puzzle for a "batch", as the reference does, or one for each
    "sample". `weight` is the lambda of the regression, or a function of the pass
    (`reference_weight`). `schedule` says which part of the ratio a pass has (`ramp`, `until`).
    Draws depend on `seed`, the process's rank and the number of the pass alone. `table`, `patch`
    and `grid` are read off the model where they are not given.
    """

    accepts_loss_kwargs = (
        False  # what transformers' Trainer asks: its losses are means over the batch
    )
    # and what else it asks, of the model itself
    FORWARDED = (
        "config",
        "main_input_name",
        "is_gradient_checkpointing",
        "gradient_checkpointing_enable",
        "gradient_checkpointing_disable",
    )

    def __init__(
        self,
        model: torch.nn.Module,
        ratio: float = 0.1,
        *,
        variant: str | Variant | None = None,
        per: Literal["batch", "sample"] = "batch",
        probability: float = 0.5,
        warmup: int = 0,
        weight: Weight = LAMBDA,
        schedule: Callable[[int], float] | None = None,
        seed: int = 0,
        table: str | None = None,
        patch: int | Sequence[int] | None = None,
        grid: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if isinstance(model, MaskedJigsaw):
            raise JigsawError("this model is wrapped already", hint="unwrap it first")
        if per not in ("batch", "sample"):
            raise JigsawError(f'puzzles are drawn per "batch" or per "sample", not per "{per}"')
        check_probability(probability)
        if warmup < 0:
            raise JigsawError(f"a warm-up of {warmup} passes is none", hint="0 or more")
        if not callable(weight) and not 0 <= weight < math.inf:
            raise JigsawError(
                f"a weight of {weight:g} is not 0 or more, and finite",
                hint=f"{LAMBDA} in the paper",
            )
        self.ratio, self.per, self.probability, self.warmup = (
            check_ratio(ratio),
            per,
            probability,
            warmup,
        )
        self.weight, self.schedule, self.seed = weight, schedule, seed
        self.layout = find_positions(model, table=table, patch=patch, grid=grid)
        self.variant = self._resolve_variant(variant)
        self.passes = 0
        self.model = model
        self.unknown: torch.nn.Parameter | None = None
        self.index: torch.nn.Parameter | None = None
        self.localizer: Localizer | None = None
        if self.layout.table is not None:
            self._add_parameters(model.get_parameter(self.layout.table))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in self.FORWARDED and "model" in self.__dict__.get("_modules", {}):
                return getattr(self.model, name)
            raise

    def _resolve_variant(self, given: str | Variant | None) -> Variant:
        if self.layout.table is not None:
            return resolve_variant("J" if given is None else given)
        if given is None:
            warnings.warn(self.layout.note, stacklevel=3)
            return resolve_variant("E")
        found = resolve_variant(given)
        if found.unknown or found.index or found.localize or not found.positions:
            raise JigsawError(self.layout.note, hint="variant A, C or E")
        return found

    def _add_parameters(self, table: torch.nn.Parameter) -> None:
        """Add what the variant learns beside the model's own, in its dtype and on its device."""
        assert self.layout.grid is not None
        like: dict[str, Any] = {"dtype": table.dtype, "device": table.device}
        patches = table.detach()[:, self.layout.prefix :]
        if self.variant.unknown and self.ratio > 0:
            self.unknown = torch.nn.Parameter(
                patches.mean((0, 1)).clone()
            )  # where a place is in the mean; the reference starts from N(0, 1)
        if self.variant.index:
            self.index = torch.nn.Parameter(torch.zeros_like(table))
        if self.variant.localize is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                self.localizer = Localizer(self.variant.localize, table.shape[-1], self.layout.grid)
            self.localizer.to(**like)
            self.localizer.targets = self.localizer.targets.float()
        if not self.variant.positions:
            with torch.no_grad():
                table.zero_()
            table.requires_grad_(False)

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        *,
        puzzle: Puzzle | None = None,
        **more: Any,
    ) -> Output:
        """Images [batch, channels, height, width], and what else the model takes. A `puzzle` is put
        to them in evaluation too.
        """
        size = (int(pixel_values.shape[-2]), int(pixel_values.shape[-1]))
        stretches = self.layout.interpolates or more.get("interpolate_pos_encoding")
        # A table that fits is taken as it is, but for shapes that are not square: these a model
        # would stretch once more.
        fits = (self.variant.unknown or self.variant.index) and not (
            stretches and size[0] == size[1]
        )
        grid = check_size(size, self.layout.patch, self.layout.grid if fits else None)
        drawn, weight = (
            self._next_puzzle(len(pixel_values), grid, pixel_values)
            if puzzle is None and self.training
            else (puzzle, None)
        )
        if drawn is not None and drawn.grid != grid:
            raise JigsawError(
                f"the puzzle is of {drawn.grid[0]} x {drawn.grid[1]} patches, the images of "
                f"{grid[0]} x {grid[1]}"
            )
        drawn = drawn if drawn is None else drawn.to(pixel_values.device)
        mask = (
            torch.zeros(1, grid[0] * grid[1], dtype=torch.bool, device=pixel_values.device)
            if drawn is None
            else drawn.mask
        )
        pixels = pixel_values if drawn is None else drawn.apply(pixel_values)
        positions = (
            self.positions(mask, grid)
            if self.training or drawn is not None or self.index is not None
            else None
        )
        extra = (
            None
            if not self.training
            else torch.zeros((), device=mask.device)
            if weight is None
            else weight * self.regression(mask)
        )
        return self._run_model(pixels, labels, positions, extra, more)

    def positions(self, mask: Tensor, grid: Grid | None = None) -> Tensor | None:
        """The table as the model sees it under masks [rows, cells], of a grid that may be another
        than its own; None where it sees its own.
        """
        if self.unknown is None and self.index is None:
            return None
        assert self.layout.table is not None
        table: Tensor = self.model.get_parameter(self.layout.table)
        own: Tensor | None = self.index
        if grid is not None and grid != self.layout.grid:
            table = interpolate_positions(table, self.layout, grid)
            own = None if own is None else interpolate_positions(own, self.layout, grid)
        if self.unknown is not None:
            whole = torch.nn.functional.pad(
                mask, (self.layout.prefix, 0)
            )  # the tokens before the patches keep their own
            table = torch.where(whole[..., None], self.unknown.to(table.dtype), table)
        return table if own is None else table + own

    def grid_of(self, pixels: Tensor) -> Grid:
        """The patches of images [..., height, width], down and across."""
        return int(pixels.shape[-2]) // self.layout.patch[0], int(
            pixels.shape[-1]
        ) // self.layout.patch[1]

    def weight_at(self, number: int) -> float:
        """The lambda of a pass."""
        return float(self.weight(number)) if callable(self.weight) else float(self.weight)

    def puzzle_at(self, number: int, count: int, grid: Grid) -> Puzzle | None:
        """The puzzle of a pass over `count` images, if it has one: by the seed, the process's rank
        and the number alone.
        """
        seeds = [self.seed, distributed_rank(), number]
        ratio = (
            self.ratio if self.schedule is None else check_ratio(self.ratio * self.schedule(number))
        )
        shuffles = self.variant.shuffle is not None and ratio > 0 and number >= self.warmup
        if not shuffles or np.random.default_rng([*seeds, 0]).random() >= self.probability:
            return None
        if self.variant.shuffle == "pixels":
            return sample_scramble(grid, self.layout.patch, [*seeds, 1])
        return sample_puzzle(1 if self.per == "batch" else count, grid, ratio, [*seeds, 1])

    def regression(self, mask: Tensor, table: Tensor | None = None) -> Tensor:
        """The loss of reading places off the positions that a mask [rows, cells] leaves, without
        its lambda; 0 where the variant has none. `table` [cells, width] stands in for the model's
        own.
        """
        if self.localizer is None:
            return torch.zeros((), device=mask.device)
        if table is None:
            assert self.layout.table is not None
            table = self.model.get_parameter(self.layout.table)[0, self.layout.prefix :]
        kept = ~mask if self.variant.unknown else torch.ones_like(mask)
        if kept.shape[1] != len(
            table
        ):  # on a grid of another size no row of the table is one of its cells: all are asked
            kept = torch.ones(1, len(table), dtype=torch.bool, device=mask.device)
        loss: Tensor = self.localizer(table, kept)
        return loss

    def unwrap(self) -> torch.nn.Module:
        """The plain model. It computes what the wrapped one computes without a puzzle; the unknown
        embedding and the regression stay behind.
        """
        if self.index is not None:
            assert self.layout.table is not None
            with torch.no_grad():
                self.model.get_parameter(self.layout.table).add_(self.index)
                self.index.zero_()
        return self.model

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.passes)

    def set_extra_state(self, state: Tensor) -> None:
        self.passes = int(state)

    def extra_repr(self) -> str:
        return (
            f"{self.variant.name}, ratio={self.ratio:g}, per {self.per}, "
            f"probability={self.probability:g}, warmup={self.warmup}"
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _next_puzzle(
        self, count: int, grid: Grid, like: Tensor
    ) -> tuple[Puzzle | None, Tensor | None]:
        """The puzzle of this pass, if it has one, and the weight of the regression, if there is
        one.
        """
        number, self.passes = self.passes, self.passes + 1
        weight = (
            None
            if self.localizer is None
            else torch.tensor(self.weight_at(number), device=like.device)
        )
        return self.puzzle_at(number, count, grid), weight

    def _run_model(
        self,
        pixels: Tensor,
        labels: Tensor | None,
        positions: Tensor | None,
        extra: Tensor | None,
        more: dict[str, Any],
    ) -> Output:
        own = (
            getattr(self.model, "config", None) is not None
            and labels is not None
            and not labels.is_floating_point()
        )
        given = {**more, "labels": labels} if own else more
        if positions is None:
            found = self.model(pixels, **given)
        else:
            found = functional_call(
                self.model, {str(self.layout.table): positions}, (pixels,), given
            )
        out = (
            Output(logits=found)
            if isinstance(found, Tensor)
            else Output({k: v for k, v in found.items() if v is not None})
        )
        if labels is not None and "loss" not in out:
            out["loss"] = torch.nn.functional.cross_entropy(
                out["logits"], labels
            )  # classes, or shares of them, as mixing gives
        if extra is not None:
            out["extra"] = extra
            if labels is not None:
                out["loss"] = out["loss"] + extra
        return out


def reference_weight(
    warmup: int, total: int, peak: float = LAMBDA, end: float = LAMBDA / 2
) -> Callable[[int], float]:
    """The lambda of the reference's code: up from 0 over the warm-up, then down to half along a
    cosine. The paper's text has it constant.
    """

    def weight(step: int) -> float:
        if step < warmup:
            return peak * step / warmup
        along = min(1.0, (step - warmup) / max(1, total - warmup))
        return end + (peak - end) * 0.5 * (1 + float(np.cos(np.pi * along)))

    return weight


def ramp(total: int) -> Callable[[int], float]:
    """A schedule of the ratio: from nothing to all of it, in a straight line over `total`
    passes.
    """
    return lambda step: min(1.0, step / max(1, total))


def stop_after(total: int, share: float) -> Callable[[int], float]:
    """A schedule of the ratio: all of it in this share of `total` passes, and then nothing, so that
    a training ends on images as they are.
    """
    return lambda step: float(step < share * total)


def distributed_rank() -> int:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if there else 0


def wrap(model: torch.nn.Module, given: Mapping[str, Any], total: int, seed: int) -> MaskedJigsaw:
    """Wrap a model by plain JSON options: those of `MaskedJigsaw`, with `warmup` as a share of the
    `total` steps.

    Also understood: `schedule: "reference"` (of lambda), and `ramp: true` or `until: share` (of the
    ratio).
    """
    options = dict(given)
    warmup = round(options.pop("warmup", 0.0) * total)
    named = options.pop("schedule", None)
    if named not in (None, "reference"):
        raise JigsawError(f'there is no schedule "{named}"', hint='"reference", or none')
    if named is not None:
        options["weight"] = reference_weight(
            warmup, total, options.get("weight", LAMBDA), options.get("weight", LAMBDA) / 2
        )
    rises, ends = options.pop("ramp", False), options.pop("until", None)
    of_ratio = ramp(total) if rises else stop_after(total, ends) if ends is not None else None
    return MaskedJigsaw(
        model, options.pop("ratio"), warmup=warmup, schedule=of_ratio, seed=seed, **options
    )

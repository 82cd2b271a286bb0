"""Masked Jigsaw Puzzle training as a wrapper around an image model.

In training a share of an image's patches is shuffled, and these patches get one shared, learnable,
unknown position embedding. The positions of the other patches are regressed from their embeddings.
In evaluation the wrapped model is the plain one. None of the model's code is copied: its position
table is replaced during one call.

    wrapped = MaskedJigsaw(model, ratio=0.1)
    out = wrapped(pixel_values, labels)      # out.logits; out.loss, which includes out.extra
    model = wrapped.unwrap()                 # the plain model, trained

As in the reference, a pass is shuffled with probability 0.5, but never one of the first `warmup`
passes (20 of 300 epochs in the reference).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch.func import functional_call

from regauge.errors import JigsawError
from regauge.jigsaw.localizer import Localizer
from regauge.jigsaw.masks import (
    Grid,
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
    """The output of a forward pass, by key or by attribute; a missing entry is None.

    It holds the outputs of the model: `logits`, `loss` if labels are given, and in training the
    `extra` loss of the regression.

    Example:
        >>> output = regauge.jigsaw.Output(logits=torch.zeros(2, 5))
        >>> output.logits.shape, output.loss
        (torch.Size([2, 5]), None)
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


class MaskedJigsaw(torch.nn.Module):
    """An image model in training with masked jigsaw puzzles.

    Random numbers depend only on `seed`, the rank of the process and the number of the pass.

    Args:
        model: The image model.
        ratio: The share of patches to shuffle.
        variant: A letter of the paper's Table 2 or a `Variant`. By default J, or with a warning E
            (the shuffle alone) for a model without absolute positions.
        per: Whether there is one puzzle for a "batch", as in the reference, or for each "sample".
        probability: The share of passes that are shuffled.
        warmup: The number of first passes without a shuffle.
        weight: The lambda of the regression, or a function of the pass (`reference_weight`).
        schedule: The share of `ratio` as a function of the pass (`ramp`, `stop_after`).
        seed: The random seed.
        table: The name of the position table; found in the model by default.
        patch: The patch size in pixels; found in the model by default.
        grid: Rows and columns of patches; found in the model by default.

    Raises:
        JigsawError: An option is invalid, or the variant needs positions that the model lacks.

    Example:
        >>> inputs, labels = images.batch(range(8))
        >>> wrapped = regauge.MaskedJigsaw(vit, ratio=0.3, probability=1.0)
        >>> wrapped(**inputs, labels=labels).loss.backward()
        >>> vit = wrapped.unwrap()
    """

    accepts_loss_kwargs = False  # for transformers' Trainer: losses are means over the batch
    # attributes that the Trainer reads from the model itself
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
            raise JigsawError("the model is wrapped already", hint="unwrap it first")
        if per not in ("batch", "sample"):
            raise JigsawError(f'per must be "batch" or "sample", got "{per}"')
        check_probability(probability)
        if warmup < 0:
            raise JigsawError(f"warmup must be >= 0, got {warmup}")
        if not callable(weight) and not 0 <= weight < math.inf:
            raise JigsawError(
                f"the weight must be >= 0 and finite, got {weight:g}",
                hint=f"it is {LAMBDA} in the paper",
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

    def _resolve_variant(self, variant: str | Variant | None) -> Variant:
        if self.layout.table is not None:
            return resolve_variant("J" if variant is None else variant)
        if variant is None:
            warnings.warn(self.layout.note, stacklevel=3)
            return resolve_variant("E")
        resolved = resolve_variant(variant)
        if resolved.unknown or resolved.index or resolved.localize or not resolved.positions:
            raise JigsawError(self.layout.note, hint="use variant A, C or E")
        return resolved

    def _add_parameters(self, table: torch.nn.Parameter) -> None:
        """Add the variant's parameters, in the dtype and on the device of the position table."""
        assert self.layout.grid is not None
        like: dict[str, Any] = {"dtype": table.dtype, "device": table.device}
        patches = table.detach()[:, self.layout.prefix :]
        if self.variant.unknown and self.ratio > 0:
            # initialized with the mean position; the reference samples from N(0, 1)
            self.unknown = torch.nn.Parameter(patches.mean((0, 1)).clone())
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
        **kwargs: Any,
    ) -> Output:
        """Run the model on shuffled images.

        Args:
            pixel_values: Images [batch, channels, height, width].
            labels: Classes, or shares of classes as mixing gives them.
            puzzle: The puzzle; by default sampled in training, and none in evaluation.
            kwargs: Further arguments of the model.

        Raises:
            JigsawError: The image size or the puzzle does not fit the model.
        """
        size = (int(pixel_values.shape[-2]), int(pixel_values.shape[-1]))
        interpolates = self.layout.interpolates or kwargs.get("interpolate_pos_encoding")
        # A table of the right size is used unchanged, except for images that are not square: the
        # model would interpolate it once more.
        must_fit = (self.variant.unknown or self.variant.index) and not (
            interpolates and size[0] == size[1]
        )
        grid = check_size(size, self.layout.patch, self.layout.grid if must_fit else None)
        weight: Tensor | None = None
        if puzzle is None and self.training:
            puzzle, weight = self._next_puzzle(len(pixel_values), grid, pixel_values)
        if puzzle is not None and puzzle.grid != grid:
            raise JigsawError(
                f"the puzzle must have the images' {grid[0]} x {grid[1]} patches, got "
                f"{puzzle.grid[0]} x {puzzle.grid[1]}"
            )
        puzzle = puzzle if puzzle is None else puzzle.to(pixel_values.device)
        mask = (
            torch.zeros(1, grid[0] * grid[1], dtype=torch.bool, device=pixel_values.device)
            if puzzle is None
            else puzzle.mask
        )
        pixels = pixel_values if puzzle is None else puzzle.apply(pixel_values)
        positions = (
            self.positions(mask, grid)
            if self.training or puzzle is not None or self.index is not None
            else None
        )
        extra = (
            None
            if not self.training
            else torch.zeros((), device=mask.device)
            if weight is None
            else weight * self.regression(mask)
        )
        return self._run_model(pixels, labels, positions, extra, kwargs)

    def positions(self, mask: Tensor, grid: Grid | None = None) -> Tensor | None:
        """Return the position table under masks [rows, cells], or None if it is the model's own.

        Args:
            mask: Whether a cell is shuffled, one row for the batch or one per image.
            grid: The grid of the images, if it is not the table's.
        """
        if self.unknown is None and self.index is None:
            return None
        assert self.layout.table is not None
        table: Tensor = self.model.get_parameter(self.layout.table)
        index: Tensor | None = self.index
        if grid is not None and grid != self.layout.grid:
            table = interpolate_positions(table, self.layout, grid)
            index = None if index is None else interpolate_positions(index, self.layout, grid)
        if self.unknown is not None:
            # the tokens before the patches keep their positions
            padded = torch.nn.functional.pad(mask, (self.layout.prefix, 0))
            table = torch.where(padded[..., None], self.unknown.to(table.dtype), table)
        return table if index is None else table + index

    def grid_of(self, pixels: Tensor) -> Grid:
        """Return the rows and columns of patches of images [..., height, width]."""
        height, width = (int(side) for side in pixels.shape[-2:])
        return height // self.layout.patch[0], width // self.layout.patch[1]

    def weight_at(self, number: int) -> float:
        """Return the lambda of a pass."""
        return float(self.weight(number)) if callable(self.weight) else float(self.weight)

    def puzzle_at(self, number: int, count: int, grid: Grid) -> Puzzle | None:
        """Sample the puzzle of a pass over `count` images, or return None for one without a puzzle.

        It depends only on the seed, the rank of the process and the number of the pass.
        """
        seeds = [self.seed, distributed_rank(), number]
        ratio = (
            self.ratio if self.schedule is None else check_ratio(self.ratio * self.schedule(number))
        )
        may_shuffle = self.variant.shuffle is not None and ratio > 0 and number >= self.warmup
        if not may_shuffle or np.random.default_rng([*seeds, 0]).random() >= self.probability:
            return None
        if self.variant.shuffle == "pixels":
            return sample_scramble(grid, self.layout.patch, [*seeds, 1])
        return sample_puzzle(1 if self.per == "batch" else count, grid, ratio, [*seeds, 1])

    def regression(self, mask: Tensor, table: Tensor | None = None) -> Tensor:
        """Compute the regression loss of the unmasked positions, without its lambda.

        Args:
            mask: Whether a cell is shuffled [rows, cells].
            table: Position embeddings [cells, width]; by default the model's.

        Returns:
            The loss, or 0 if the variant has no regression.
        """
        if self.localizer is None:
            return torch.zeros((), device=mask.device)
        if table is None:
            assert self.layout.table is not None
            table = self.model.get_parameter(self.layout.table)[0, self.layout.prefix :]
        unmasked = ~mask if self.variant.unknown else torch.ones_like(mask)
        if unmasked.shape[1] != len(table):
            # on a grid of another size no row of the table is a cell: all rows are regressed
            unmasked = torch.ones(1, len(table), dtype=torch.bool, device=mask.device)
        loss: Tensor = self.localizer(table, unmasked)
        return loss

    def unwrap(self) -> torch.nn.Module:
        """Return the plain model, without the unknown embedding and the regression.

        It computes the same function as the wrapped model without a puzzle.
        """
        if self.index is not None:
            assert self.layout.table is not None
            with torch.no_grad():
                self.model.get_parameter(self.layout.table).add_(self.index)
                self.index.zero_()
        return self.model

    def get_extra_state(self) -> Tensor:
        """Return the number of passes, for `state_dict`."""
        return torch.tensor(self.passes)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the number of passes."""
        self.passes = int(state)

    def extra_repr(self) -> str:
        """Return the options, for `repr`."""
        return (
            f"{self.variant.name}, ratio={self.ratio:g}, per {self.per}, "
            f"probability={self.probability:g}, warmup={self.warmup}"
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _next_puzzle(
        self, count: int, grid: Grid, like: Tensor
    ) -> tuple[Puzzle | None, Tensor | None]:
        """Count this pass; return its puzzle, or None, and its lambda, or None."""
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
        kwargs: dict[str, Any],
    ) -> Output:
        """Run the model with other positions, and add the extra loss."""
        has_own_loss = (
            getattr(self.model, "config", None) is not None
            and labels is not None
            and not labels.is_floating_point()
        )
        arguments = {**kwargs, "labels": labels} if has_own_loss else kwargs
        if positions is None:
            output = self.model(pixels, **arguments)
        else:
            output = functional_call(
                self.model, {str(self.layout.table): positions}, (pixels,), arguments
            )
        out = (
            Output(logits=output)
            if isinstance(output, Tensor)
            else Output({k: v for k, v in output.items() if v is not None})
        )
        if labels is not None and "loss" not in out:
            out["loss"] = torch.nn.functional.cross_entropy(out["logits"], labels)
        if extra is not None:
            out["extra"] = extra
            if labels is not None:
                out["loss"] = out["loss"] + extra
        return out


def reference_weight(
    warmup: int, total: int, peak: float = LAMBDA, end: float = LAMBDA / 2
) -> Callable[[int], float]:
    """Return the lambda schedule of the reference's code; the paper's text has it constant.

    Args:
        warmup: The passes in which lambda rises from 0 to `peak`.
        total: All passes; after the warmup lambda falls along a cosine.
        peak: The largest lambda.
        end: The lambda of the last pass.

    Returns:
        The function from a pass to its lambda.

    Example:
        >>> weight = regauge.jigsaw.reference_weight(warmup=10, total=100)
        >>> weight(0), weight(10), weight(100)
        (0.0, 0.01, 0.005)
    """

    def weight(step: int) -> float:
        if step < warmup:
            return peak * step / warmup
        progress = min(1.0, (step - warmup) / max(1, total - warmup))
        return end + (peak - end) * 0.5 * (1 + float(np.cos(np.pi * progress)))

    return weight


def ramp(total: int) -> Callable[[int], float]:
    """Return a schedule of the ratio that rises linearly from 0 to 1 over `total` passes."""
    return lambda step: min(1.0, step / max(1, total))


def stop_after(total: int, share: float) -> Callable[[int], float]:
    """Return a schedule of the ratio that is 1 in the first `share` of `total` passes, then 0.

    The training then ends on unshuffled images.
    """
    return lambda step: float(step < share * total)


def distributed_rank() -> int:
    """Return the rank of this process, or 0 without torch.distributed."""
    is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if is_distributed else 0


def wrap(model: torch.nn.Module, options: Mapping[str, Any], total: int, seed: int) -> MaskedJigsaw:
    """Wrap a model by plain JSON options.

    Args:
        model: The image model.
        options: Options of `MaskedJigsaw`, with `warmup` as a share of `total`. Also understood:
            `schedule: "reference"` (of lambda), `ramp: true` or `until: share` (of the ratio), and
            `mlp: "mlp3"` (the regression of variants that have an MLP).
        total: The number of steps.
        seed: The random seed.

    Raises:
        JigsawError: An option is invalid.
    """
    remaining = dict(options)
    mlp = remaining.pop("mlp", None)
    if mlp is not None:
        variant = resolve_variant(remaining["variant"])
        if variant.localize == "mlp":
            remaining["variant"] = replace(variant, localize=mlp)
    warmup = round(remaining.pop("warmup", 0.0) * total)
    weight_schedule = remaining.pop("schedule", None)
    if weight_schedule not in (None, "reference"):
        raise JigsawError(
            f'the schedule must be "reference", got "{weight_schedule}"', hint="or leave it out"
        )
    if weight_schedule is not None:
        peak = remaining.get("weight", LAMBDA)
        remaining["weight"] = reference_weight(warmup, total, peak, peak / 2)
    rises, end = remaining.pop("ramp", False), remaining.pop("until", None)
    schedule = ramp(total) if rises else stop_after(total, end) if end is not None else None
    return MaskedJigsaw(
        model, remaining.pop("ratio"), warmup=warmup, schedule=schedule, seed=seed, **remaining
    )

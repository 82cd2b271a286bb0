"""`extract_lora`: the difference of a fine-tuned model from its base as a LoRA adapter.

The difference of each linear layer is approximated by its truncated singular value decomposition,
which of all matrices of that rank is the nearest one (Eckart and Young, 1936):

    W' - W = U diag(s) V^T,   B = U_r sqrt(s_r),   A = sqrt(s_r) V_r^T

The squared error is the sum of the squared singular values that are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from regauge.checkpoints.files import staged_folder, wrap_write_errors
from regauge.checkpoints.plan import check_new, check_target
from regauge.core.progress import Progress
from regauge.core.threads import within_threads
from regauge.errors import Hint, MergeError
from regauge.merging.basis import Verdict, check_basis
from regauge.merging.engine import open_model
from regauge.merging.layout import Model
from regauge.merging.lora_layers import (
    Layers,
    adapter_config,
    find_layers,
    module_prefix,
    savable_module,
    tied_name,
)
from regauge.models.sources import require_unlocked
from regauge.results.findings import Claim, Results, Table
from regauge.results.views import ResultView

if TYPE_CHECKING:
    from regauge.core.spec import Spec
    from regauge.models.sources import Source

RANK = 16
FULL_SVD_SIZE = 1024  # up to this smaller side, all singular values are computed
_OVERSAMPLING, _ITERATIONS, _SEED = 16, 4, 0  # of the randomized decomposition of larger ones
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoraLayer:
    """The approximation of one layer's difference.

    Attributes:
        name: the module.
        rank: the rank.
        size: the Frobenius norm of the difference.
        error: the relative Frobenius error of the approximation.
        energy: the share of the difference's squared norm that it keeps.
    """

    name: str
    rank: int
    size: float
    error: float
    energy: float


@dataclass(frozen=True)
class OtherTensor:
    """A tensor that differs and is not approximated.

    Attributes:
        name: the tensor.
        size: the Frobenius norm of its difference.
        is_saved: whether the adapter holds it as it is.
        reason: why it is not approximated, or why it is lost.
    """

    name: str
    size: float
    is_saved: bool
    reason: str


@dataclass(frozen=True, eq=False)
class LoraExtraction(ResultView):
    """A LoRA adapter that was extracted, with the error of each layer.

    Attributes:
        model: the fine-tuned model.
        base: its base.
        verdict: whether they share a basis.
        layers: the layers that differ, with their errors.
        others: the other tensors that differ.
        tensors: the tensors of the adapter, by PEFT's names.
        config: the content of adapter_config.json.
        norm: the Frobenius norm of the fine-tuned model's weights.
    """

    model: Model
    base: Model
    verdict: Verdict
    layers: tuple[LoraLayer, ...]
    others: tuple[OtherTensor, ...]
    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    norm: float

    @property
    def lost(self) -> tuple[OtherTensor, ...]:
        """The tensors whose differences are not in the adapter."""
        return tuple(other for other in self.others if not other.is_saved)

    @property
    def error(self) -> float:
        """The relative Frobenius error of the whole difference, lost tensors included."""
        return self._residual / self._size

    @property
    def weight_error(self) -> float:
        """The relative Frobenius error of the fine-tuned model's weights, lost tensors included."""
        return self._residual / self.norm

    @property
    def _size(self) -> float:
        """The Frobenius norm of the whole difference."""
        return math.hypot(*(x.size for x in self.layers), *(x.size for x in self.others))

    @property
    def _residual(self) -> float:
        left_out = (layer.size * layer.error for layer in self.layers)
        return math.hypot(*left_out, *(other.size for other in self.lost))

    @property
    def results(self) -> Results:
        """The tables of layers and of other tensors, and the conclusion."""
        layers = Table(
            "Layers",
            ("layer", "rank", "size of the difference", "relative error", "energy kept"),
            tuple((x.name, x.rank, x.size, x.error, x.energy) for x in self.layers),
        )
        others = Table(
            "Other tensors that differ",
            ("tensor", "size of the difference", "in the adapter", "reason"),
            tuple((x.name, x.size, "yes" if x.is_saved else "no", x.reason) for x in self.others),
        )
        kept = 1 - self.error**2
        sentence = f"relative error of the fine-tuned weights: {self.weight_error:.2g}"
        if self.lost:
            sentence += f"; the differences of {len(self.lost)} tensors are not in the adapter"
        claim = Claim(
            f"{len(self.layers)} layers as a LoRA adapter of rank {self.config['r']}",
            "none",
            f"{100 * kept:.4g} %",
            "of the squared difference is kept",
            sentence,
        )
        tables = (layers, others) if self.others else (layers,)
        title = f"LoRA adapter of {self.model.key} over {self.base.key}"
        return Results(title, (), tables, (), self._facts(), (), claim)

    def _facts(self) -> dict[str, Any]:
        """Return the extraction as plain data, without its tensors."""
        return {
            "command": "extract-lora",
            "model": self.model.key,
            "base": self.base.key,
            "rank": self.config["r"],
            "error": self.error,
            "energy": 1 - self.error**2,
            "weight_error": self.weight_error,
            "basis": self.verdict.to_dict(),
            "layers": [vars(layer) for layer in self.layers],
            "others": [vars(other) for other in self.others],
        }

    def save(self, out: str | Path) -> None:
        """Write adapter_config.json and adapter_model.safetensors to a new folder.

        Args:
            out: the folder. It appears when it is complete.

        Raises:
            CheckpointError: it exists, overlaps an input, or cannot be written.
        """
        from safetensors.torch import save_file

        folder = Path(out)
        _check_out(folder, self.model, self.base)
        mode = self.model.checkpoint.mode & self.base.checkpoint.mode
        tensors = {name: t.contiguous() for name, t in self.tensors.items()}
        with wrap_write_errors(folder), staged_folder(folder, mode) as partial:
            save_file(tensors, partial / "adapter_model.safetensors", {"format": "pt"})
            text = json.dumps(dict(self.config), indent=2, ensure_ascii=False) + "\n"
            (partial / "adapter_config.json").write_text(text, encoding="utf-8")

    def __str__(self) -> str:
        ranks = sorted({layer.rank for layer in self.layers})
        span = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        lines = [
            (
                f"{len(self.layers)} layers differ; rank {span} keeps "
                f"{100 * (1 - self.error**2):.4g} % of the squared difference of all tensors "
                f"(relative error {self.error:.3g})"
            ),
            f"relative error of the fine-tuned weights: {self.weight_error:.3g}",
        ]
        worst = sorted(self.layers, key=lambda layer: -layer.error)[:3]
        lines += [
            f"  largest error: {x.name}, rank {x.rank}, {x.error:.3g} (energy kept {x.energy:.4f})"
            for x in worst
        ]
        saved = len(self.others) - len(self.lost)
        if saved:
            lines.append(f"{saved} other tensors differ and are saved as they are")
        if self.lost:
            size = math.hypot(*(x.size for x in self.lost))
            lines.append(
                f"not in the adapter: {len(self.lost)} other tensors that differ "
                f"({100 * (size / self._size) ** 2:.3g} % of the squared difference)"
            )
            lines += [f"  {x.name}: {x.reason}" for x in self.lost[:5]]
            if len(self.lost) > 5:
                lines.append(f"  and {len(self.lost) - 5} more; to_dict() and --json list all")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<LoRA adapter of {len(self.layers)} layers, energy kept {1 - self.error**2:.4f}>"


@within_threads
def extract_lora(
    model: Source,
    base: Source,
    *,
    rank: int | None = None,
    energy: float | None = None,
    target: Sequence[str] | None = None,
    save_modules: bool = False,
    spec: Spec | None = None,
    force: bool = False,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> LoraExtraction:
    """Extract the difference of a fine-tuned model from its base as a LoRA adapter.

    Tensors are read and decomposed one by one, in float32; the factors stay in memory.

    Args:
        model: the fine-tuned model: a path, hub id, checkpoint, module or state dict.
        base: the model that it was fine-tuned from.
        rank: the largest rank of a layer. Default: 16, or without a limit if `energy` is passed.
        energy: choose for each layer the smallest rank that keeps this share of its squared
            difference, such as 0.95.
        target: suffixes of the names of layers: ["q_proj", "v_proj"]. Default: all linear layers.
        save_modules: also save norms, embeddings and biases that differ, where PEFT can hold them.
        spec: the spec of both models; by default that of their family.
        force: extract even if the models do not share a basis.
        out: the folder that `save` will write, which is checked first.
        progress: called with the layers done and their number.

    Returns:
        The adapter with its errors, and `save(folder)`.

    Raises:
        MergeError: the models do not fit each other, do not differ, or share no basis; or an
            argument is out of range.
        LockError: one of the models is locked.
        CheckpointError: the output exists, or a model cannot be read.

    Example:
        >>> tuned = {n: t + 0.01 * torch.randn_like(t) for n, t in model.state_dict().items()}
        >>> spec = regauge.spec_of(model)
        >>> result = regauge.extract_lora(tuned, model, rank=4, spec=spec, save_modules=True)
        >>> result.save("adapter")
    """
    _check_arguments(rank, energy, target)
    tuned, origin = (
        open_model(str(x) if isinstance(x, str | Path) else name, x, spec)
        for name, x in (("the model", model), ("the base", base))
    )
    for each in (tuned, origin):
        require_unlocked(each.checkpoint)
    if out is not None:
        _check_out(Path(out), tuned, origin)
    _require_same_shapes(tuned, origin)
    layers = find_layers(origin, target)
    verdict = check_basis(tuned, origin, compare_if_unclear=not force)
    if not verdict.shared and not force:
        relation = "does not share" if verdict.shared is False else "may not share"
        raise MergeError(
            f"{tuned.key} {relation} a basis with {origin.key}: their difference has no low rank"
            f"\n  {verdict.words}",
            hint=Hint(
                "match first: regauge.match(model, base); force=True extracts it anyway",
                cli="match first: regauge match MODEL BASE -o NEAR; --force extracts it anyway",
            ),
        )
    limit = rank if rank is not None else (RANK if energy is None else None)
    return _extract(tuned, origin, verdict, layers, limit, energy, save_modules, progress)


def _check_arguments(rank: int | None, energy: float | None, target: Sequence[str] | None) -> None:
    if rank is not None and rank < 1:
        raise MergeError(f"rank must be >= 1, got {rank}")
    if energy is not None and not 0 < energy <= 1:
        raise MergeError(f"energy must be above 0 and at most 1, got {energy}")
    if isinstance(target, str) or (target is not None and not all(target)) or target == []:
        raise MergeError(
            f"target must be a list of suffixes of layers, got {target!r}",
            hint='pass ["q_proj", "v_proj"]',
        )


def _check_out(out: Path, *models: Model) -> None:
    """Raise if an output exists or overlaps a model."""
    for model in models:
        for path in model.checkpoint.sources:
            check_target(out, path)
    check_new(out)


def _require_same_shapes(model: Model, base: Model) -> None:
    """Raise unless the tensors that both models have agree in shape, and there are any."""
    shared = [name for name in base.state if name in model.state]
    if not shared:
        raise MergeError(
            f"{model.key} must have the tensors of {base.key}, got none of them",
            hint="pass a model and the base that it was fine-tuned from",
        )
    differing = [name for name in shared if model.shapes[name] != base.shapes[name]]
    if differing:
        name = differing[0]
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise MergeError(
            f'"{name}" of {model.key} must have the shape of {base.key}, '
            f"{list(base.shapes[name])}, got {list(model.shapes[name])}{more}",
            hint="pass a model and the base that it was fine-tuned from",
        )


def _extract(
    model: Model,
    base: Model,
    verdict: Verdict,
    layers: Layers,
    limit: int | None,
    energy: float | None,
    save_modules: bool,
    progress: Progress | None,
) -> LoraExtraction:
    targets = set(layers.names)
    found: list[LoraLayer] = []
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    differing: dict[str, float] = {}
    squared_norm, done = 0.0, 0
    missing: list[OtherTensor] = []
    counted: set[tuple[str, str]] = set()
    for name in dict.fromkeys([*base.state, *model.state]):
        module = name.removesuffix(".weight")
        own, origin = model.stored_name(name), base.stored_name(name)  # those of tied tensors
        place = tied_name(model, name), tied_name(base, name)
        if place in counted or base.is_buffer(name) or model.is_buffer(name):
            continue
        counted.add(place)
        if own is None or origin is None:
            side = "fine-tuned model" if own is None else "base"
            reason = f"the {side} has no such tensor"
            size = 0.0 if own is None else float(model.state[own].double().norm())
            missing.append(OtherTensor(name, size, False, reason))
            continue
        tuned = model.state[own].float()
        squared_norm += float(tuned.double().square().sum())
        delta = tuned - base.state[origin].float()
        size = float(delta.double().norm())
        if not math.isfinite(size):
            raise MergeError(
                f'"{name}" must be finite in both models, got NaN or Inf',
                hint="fetch the models again, or train again with a lower learning rate",
            )
        if name.endswith(".weight") and module in targets:
            if progress is not None:
                progress(done, len(targets), name)
            done += 1
            if size:
                b, a, kept = decompose(delta.T if layers.is_transposed else delta, limit, energy)
                factors[module] = b, a
                left_out = delta - ((b @ a).T if layers.is_transposed else b @ a)
                error = float(left_out.double().norm()) / size
                found.append(LoraLayer(module, len(a), size, error, kept))
        elif size:
            differing[name] = size
    if not factors:
        raise MergeError(
            f"{model.key} must differ from {base.key} in the targeted linear layers, got equal "
            "weights",
            hint="check that the models are not swapped for copies of one another",
        )
    others, modules, has_bias = _sort_others(model, base, differing, layers, factors, save_modules)
    config = adapter_config(
        base,
        {name: len(a) for name, (_, a) in factors.items()},
        is_transposed=layers.is_transposed,
        modules_to_save=modules,
        has_bias=has_bias,
    )
    tensors = _adapter_tensors(model, base, factors, modules, has_bias)
    norm = math.sqrt(squared_norm)
    return LoraExtraction(
        model, base, verdict, tuple(found), (*others, *missing), tensors, config, norm
    )


def decompose(
    delta: torch.Tensor, limit: int | None, energy: float | None
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return the factors B and A of the best approximation of a matrix, and the energy they keep.

    Args:
        delta: the matrix, [out, in].
        limit: the largest rank, if it is limited.
        energy: the share of the squared norm to keep with the smallest rank.
    """
    size, total = min(delta.shape), float(delta.double().square().sum())
    limit = size if limit is None else min(limit, size)
    count = min(size, limit if energy is None else min(limit, 64))
    while True:
        u, s, v = _leading_triplets(delta, count)
        kept = s.double().square().cumsum(0) / total
        if energy is None:
            rank = min(limit, len(s))
            break
        # rounding of float32: the shares of all values may sum to a little less than 1
        enough = (kept >= energy - 1e-6).nonzero()
        if len(enough) or len(s) >= limit:
            rank = min(int(enough[0]) + 1 if len(enough) else len(s), limit)
            break
        count = min(count * 2, limit)
    root = s[:rank].sqrt()
    share = min(float(kept[rank - 1]), 1.0)
    return u[:, :rank] * root, root[:, None] * v[:, :rank].T, share


def _leading_triplets(
    delta: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return at least `count` leading singular triplets, in descending order."""
    size = min(delta.shape)
    if size <= FULL_SVD_SIZE or count + _OVERSAMPLING > size // 2:
        u, s, vh = torch.linalg.svd(delta, full_matrices=False)
        return u, s, vh.T
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        q = count + _OVERSAMPLING
        u, s, v = torch.svd_lowrank(delta, q=q, niter=_ITERATIONS)
    return u[:, :count], s[:count], v[:, :count]


def _sort_others(
    model: Model,
    base: Model,
    differing: Mapping[str, float],
    layers: Layers,
    factors: Mapping[str, Any],
    save_modules: bool,
) -> tuple[list[OtherTensor], list[str], bool]:
    """Sort the other tensors that differ into saved and lost ones.

    Returns:
        The tensors, the modules to save, and whether the biases of all layers are saved.
    """
    biases = {f"{name}.bias" for name in factors}
    can_hold_biases = all(name in base.state and name in model.state for name in biases)
    others, modules, has_bias = [], [], False
    for name, size in differing.items():
        module = name.rpartition(".")[0]
        if name in biases and can_hold_biases:
            reason, is_saved = "the bias of a LoRA layer", save_modules
            has_bias = has_bias or save_modules
        elif name in biases:
            reason, is_saved = (
                "not all LoRA layers have a bias, as PEFT's lora_bias requires",
                False,
            )
        else:
            reason = savable_module(base, name, factors)
            is_saved = save_modules and not reason
            if not reason:
                reason = layers.others.get(module, "not a linear layer")
        if is_saved and name not in biases and module not in modules:
            modules.append(module)
        others.append(OtherTensor(name, size, is_saved, reason))
    return others, modules, has_bias


def _adapter_tensors(
    model: Model,
    base: Model,
    factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    modules: Sequence[str],
    has_bias: bool,
) -> dict[str, torch.Tensor]:
    """Return the tensors of the adapter, by PEFT's names."""
    prefix = _PREFIX + module_prefix(base)
    tensors: dict[str, torch.Tensor] = {}
    for name, (b, a) in factors.items():
        tensors[f"{prefix}{name}.lora_A.weight"] = a.contiguous()
        tensors[f"{prefix}{name}.lora_B.weight"] = b.contiguous()
        if has_bias:
            bias = f"{name}.bias"
            change = model.state[bias].float() - base.state[bias].float()
            tensors[f"{prefix}{name}.lora_B.bias"] = change
    for module in modules:
        for name in (f"{module}.weight", f"{module}.bias"):
            if name in model.state:
                tensors[prefix + name] = model.state[name].float()
    return tensors

"""Loading of a checkpoint as a live module: the class that its config names, of transformers or
timm, in a chosen dtype.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import logging
import tempfile
import warnings
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regauge.checkpoints.reader import INDEX, WEIGHTS, Checkpoint, open_checkpoint
from regauge.errors import (
    CheckpointError,
    Hint,
    RegaugeError,
    RegaugeWarning,
    UnknownModelError,
    need,
)
from regauge.models.families import check_counts
from regauge.models.trust import code_disabled, library_class, without_code

if TYPE_CHECKING:
    import torch

    from regauge.models.sources import Source

_HINTS = {
    "mismatched_keys": "use the config.json that belongs to the weights",
    "missing_keys": "download the weights again if some are lost, or name their class in "
    'config.json ("architectures")',
    "unexpected_keys": 'name the class that has these weights in config.json ("architectures"), '
    "and check its number of layers",
}
# Smallest limit on the counts of a config: a part of a split model may have fewer tensors than the
# config has layers.
_MIN_COUNT_LIMIT = 500
DTYPES = ("float64", "float32", "bfloat16", "float16")
Part = Literal["edges", "backbone"]


def load_model(source: Source, dtype: str | None = None) -> torch.nn.Module:
    """Load the model of a checkpoint, in evaluation mode. No code of the checkpoint is run.

    A live module is returned as it is, converted if a dtype is named.

    Args:
        source: a folder, a .safetensors file with its config beside it, a hub id, or an open
            checkpoint.
        dtype: "float64", "float32", "bfloat16" or "float16"; by default that of the stored weights.

    Returns:
        The model.

    Raises:
        CheckpointError: the config and the weights contradict each other, or the dtype is unknown.
        UnknownModelError: the config is missing, or names no class of transformers or timm.

    Example:
        >>> model = regauge.load_model("model", "float64")
        >>> model.dtype
        torch.float64
    """
    import torch

    from regauge.models.sources import open_source

    if isinstance(source, torch.nn.Module):
        return source if dtype is None else source.to(_require_dtype(dtype))
    checkpoint, _ = open_source(source)
    require_numel(
        load_empty(checkpoint), sum(e.numel for e in checkpoint.entries.values()), checkpoint.path
    )
    model, report = _load(checkpoint, dtype)
    _require_complete(checkpoint, type(model).__name__, report)
    return model


def require_numel(module: torch.nn.Module, stored: int, where: object) -> None:
    """Raise if a module is much larger than the checkpoint it is built for.

    Its memory would be allocated before the mismatch is found. Tied weights and the head of a task
    may be missing from a checkpoint.

    Args:
        module: the module, as its config describes it.
        stored: the number of parameters in the checkpoint.
        where: the checkpoint, for error messages.

    Raises:
        CheckpointError: the module is too large.
    """
    described = sum(p.numel() for p in module.parameters())
    if described > 4 * stored + 10_000_000:
        raise CheckpointError(
            f"the config of {where} describes a {type(module).__name__} of {described:,} "
            f"parameters, but the checkpoint has {stored:,}",
            hint="config.json contradicts the weights; use the one that belongs to them",
        )


def reinitialize(
    model: torch.nn.Module, seed: int, *, reset_modules: bool = False
) -> torch.nn.Module:
    """Build a model of the same class and config with newly initialized weights.

    The global random state is unchanged. Supports classes of transformers.

    Args:
        model: the model to copy.
        seed: the random seed of the initialization.
        reset_modules: copy other models and call `reset_parameters` of their modules.

    Raises:
        UnknownModelError: the model has no config.
    """
    import torch

    config = getattr(model, "config", None)
    has_config = config is not None and hasattr(model, "post_init")
    if not (has_config or reset_modules):
        raise UnknownModelError(
            f"{type(model).__name__} has no config to be reinitialized from",
            hint="initialize its weights with the library that defines it, and save them",
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if has_config:
            built: torch.nn.Module = type(model)(copy.deepcopy(config))
            return built
        new = copy.deepcopy(model)
        for module in new.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
    return new


def load_empty(source: str | Path | Checkpoint) -> torch.nn.Module:
    """Build the module of a checkpoint without weights, on the meta device: enough to know its
    inputs before anything large is loaded.
    """
    import torch

    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    config = _config_of(checkpoint)
    check_counts(config, max(_MIN_COUNT_LIMIT, len(checkpoint)))
    with torch.device("meta"):
        if _is_timm(config):
            return _build_timm_for(checkpoint, config)
        model_class = _class_of(checkpoint, config)
        with _as_checkpoint_error(checkpoint, model_class.__name__):
            model: torch.nn.Module = model_class(
                model_class.config_class.from_dict(without_code(config, checkpoint.path))
            )
            return model.eval()


def load_part(
    source: str | Path | Checkpoint, part: Part, dtype: str | None = None, device: str = "cpu"
) -> torch.nn.Module:
    """Load only the edges (embedding and head) or only the backbone of a model.

    The rest is on the meta device and need not be in the checkpoint; if it is, it is read and freed
    at once.

    Args:
        source: a checkpoint, as in `load_model`.
        part: "edges" or "backbone".
        dtype: as in `load_model`.
        device: the device of the part.
    """
    from regauge.models.cut import cut

    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    model, report = _load(checkpoint, dtype)
    boundaries = cut(model, checkpoint.config).boundaries
    paths = tuple(f"{b.blocks}." for b in boundaries)
    missing = {
        name
        for name in report.get("missing_keys") or ()
        if name.startswith(paths) == (part == "backbone")
    }
    _require_complete(checkpoint, type(model).__name__, {**report, "missing_keys": missing})
    blocks = [model.get_submodule(b.blocks) for b in boundaries]
    if part == "edges":
        for block in blocks:
            block.to("meta")
    else:
        _move_to_meta(model, {id(block) for block in blocks})
    _move_to_device(model, device)
    return model


def _move_to_meta(module: torch.nn.Module, excluded: set[int]) -> None:
    """Move a module to the meta device, except some submodules."""
    import torch

    registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for table in registries:
        for name, tensor in table.items():
            if tensor is not None:
                empty = tensor.detach().to("meta")
                table[name] = (
                    torch.nn.Parameter(empty, tensor.requires_grad)
                    if isinstance(tensor, torch.nn.Parameter)
                    else empty
                )
    for child in module.children():
        if id(child) not in excluded:
            _move_to_meta(child, excluded)


def _move_to_device(model: torch.nn.Module, device: str) -> None:
    """Move everything that is not on the meta device."""
    if device != "cpu":
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)


def _load(checkpoint: Checkpoint, dtype: str | None) -> tuple[torch.nn.Module, Any]:
    """Load the model, and report the keys in which its class and checkpoint differ."""
    config = _config_of(checkpoint)
    check_counts(config, max(_MIN_COUNT_LIMIT, len(checkpoint)))
    if dtype is not None:
        _require_dtype(dtype)
    return (_load_timm if _is_timm(config) else _load_transformers)(checkpoint, config, dtype)


def _require_dtype(name: str) -> torch.dtype:
    """Return the dtype of torch with a name."""
    import torch

    if name not in DTYPES:
        raise CheckpointError(
            f'dtype must be one of {", ".join(DTYPES)}, got "{name}"',
            hint="omit it for the dtype of the stored weights",
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _config_of(checkpoint: Checkpoint) -> Any:
    if checkpoint.config is None:
        raise UnknownModelError(
            f"{checkpoint.path} has no config.json, so no class can be built for it",
            hint="put config.json beside it; for a custom module use "
            "regauge.verify(module, spec=..., boundaries=...) in Python",
        )
    return checkpoint.config


def _is_timm(config: Any) -> bool:
    return "model_type" not in config and "architecture" in config


def _class_of(checkpoint: Checkpoint, config: Any) -> Any:
    """Return the class of transformers that a config names."""
    model_class = library_class(config, checkpoint.path)
    expected, name = model_class.config_class.model_type, model_class.__name__
    # built from the config of another class, a class falls back to its default sizes
    if expected != config.get("model_type"):
        raise UnknownModelError(
            f"the config of {checkpoint.path} names the class {name} and the model_type "
            f'"{config.get("model_type")}", which must be "{expected}"',
            hint="compare config.json with the original",
        )
    return model_class


@contextlib.contextmanager
def _as_checkpoint_error(checkpoint: Checkpoint, name: str) -> Iterator[None]:
    """Convert any exception of a class into a CheckpointError of one line."""
    try:
        with quiet(), code_disabled():
            yield
    except RegaugeError:
        raise
    except Exception as error:  # model classes raise exceptions of any type
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{checkpoint.path} cannot be loaded as a {name}: {message}",
            hint=Hint(
                "regauge.check(spec, state) lists mismatches of weights and config",
                cli="regauge inspect lists mismatches of weights and config",
            ),
        ) from error


def _load_transformers(
    checkpoint: Checkpoint, config: Any, dtype: str | None
) -> tuple[torch.nn.Module, Any]:
    """Load a model of transformers."""
    import torch

    model_class = _class_of(checkpoint, config)
    with (
        _as_checkpoint_error(checkpoint, model_class.__name__),
        _sanitized_folder(checkpoint, config) as folder,
    ):
        torch_dtype = "auto" if dtype is None else getattr(torch, dtype)
        options = {
            "local_files_only": True,
            "use_safetensors": True,
            "trust_remote_code": False,
            "output_loading_info": True,
        }
        load = partial(
            model_class.from_pretrained,
            folder,
            dtype=torch_dtype,
            ignore_mismatched_sizes=True,  # mismatches are reported by _require_complete
            **options,
        )
        model, report = load()
        for option in _optional_parts(model_class) if report["missing_keys"] else ():
            smaller_model, smaller_report = load(**{option: False})
            absent = set(report["missing_keys"]) - set(smaller_report["missing_keys"])
            if absent and not smaller_report["unexpected_keys"]:
                model, report = smaller_model, smaller_report
                message = (
                    f'{checkpoint.path} has no "{min(absent)}"{_and_more(absent)}: the '
                    f"{model_class.__name__} is built without this optional part"
                )
                warnings.warn(f"{message} ({option}=False)", RegaugeWarning, stacklevel=2)
    model.name_or_path = model.config.name_or_path = str(checkpoint.path)
    return model.eval(), report


def _optional_parts(model_class: Any) -> list[str]:
    """Return the options with which a class is built without a part, such as BertModel's
    `add_pooling_layer`: sentence encoders lack that one.
    """
    parameters = inspect.signature(model_class.__init__).parameters.values()
    return [p.name for p in parameters if p.name.startswith("add_") and p.default is True]


def _and_more(items: Collection[Any]) -> str:
    """Return the number of further items as text."""
    return f" and {len(items) - 1} more" if len(items) > 1 else ""


def _require_complete(checkpoint: Checkpoint, name: Any, report: Any) -> None:
    """Raise if weights are missing, unexpected or of another shape.

    transformers would initialize missing weights at random and ignore unexpected ones: neither is
    the model of the checkpoint.
    """
    for key, problem in (
        ("mismatched_keys", "has a different shape for"),
        ("missing_keys", "has no"),
        ("unexpected_keys", "has an unexpected tensor"),
    ):
        names = sorted(report.get(key) or (), key=str)
        if not names:
            continue
        first, others = names[0], _and_more(names)
        if isinstance(first, tuple):  # a name, its size in the file, and that in the class
            first, stored, expected = first
            others = f": {list(stored)}, expected {list(expected)}{others}"
        raise CheckpointError(
            f'as a {name}, {checkpoint.path} {problem} "{first}"{others}', hint=_HINTS[key]
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the log messages and progress bars of transformers."""
    from transformers.utils import logging as library_logging

    level, bars = library_logging.get_verbosity(), library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity(logging.ERROR)
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        library_logging.set_verbosity(level)
        if bars:
            library_logging.enable_progress_bar()


@contextlib.contextmanager
def _sanitized_folder(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Iterator[Path]:
    """Create the folder that the library loads from.

    It holds links to the weights, the config without custom code, and nothing else that lies beside
    the weights (Python files, adapters, pickles). Tensors that are not read as stored (a model with
    its adapter) are written there.
    """
    with tempfile.TemporaryDirectory(prefix="regauge-") as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(without_code(config, checkpoint.path)))
        if not checkpoint.as_stored:
            from safetensors.torch import save_file

            save_file(
                {name: checkpoint[name].contiguous().clone() for name in checkpoint},
                folder / WEIGHTS,
                {"format": "pt"},
            )
        elif checkpoint.index is None:
            (folder / WEIGHTS).symlink_to(next(iter(checkpoint.files.values())).path.resolve())
        else:
            (folder / INDEX).write_text(json.dumps(checkpoint.index))
            for name, shard in checkpoint.files.items():
                (folder / name).symlink_to(shard.path.resolve())
        generation = checkpoint.path / "generation_config.json"
        if checkpoint.is_folder and generation.is_file():
            (folder / generation.name).symlink_to(generation.resolve())
        yield folder


def _load_timm(
    checkpoint: Checkpoint, config: Any, dtype: str | None
) -> tuple[torch.nn.Module, Any]:
    """Load a model of timm."""
    import torch

    model = _build_timm_for(checkpoint, config)
    with _as_timm_error(checkpoint, config):
        result = model.load_state_dict(dict(checkpoint), strict=False)
    stored_dtype = next(t.dtype for t in checkpoint.values() if t.is_floating_point())
    report = {"missing_keys": result.missing_keys, "unexpected_keys": result.unexpected_keys}
    return model.to(stored_dtype if dtype is None else getattr(torch, dtype)), report


def _build_timm_for(checkpoint: Checkpoint, config: Any) -> torch.nn.Module:
    with _as_timm_error(checkpoint, config):
        return build_timm(config, checkpoint.path)


def build_timm(config: Mapping[str, Any], where: object = "the model") -> torch.nn.Module:
    """Build the timm module that a config describes, with newly initialized weights.

    Exceptions of timm are not converted.

    Args:
        config: the contents of config.json.
        where: the checkpoint, for error messages.
    """
    need("timm", "timm")
    import timm

    config = without_code(config, where)
    arguments = dict(config.get("model_args") or {})
    if config.get("num_classes") is not None:
        arguments.setdefault("num_classes", config["num_classes"])
    model: torch.nn.Module = timm.create_model(
        config["architecture"], pretrained=False, **arguments
    )
    return model.eval()


@contextlib.contextmanager
def _as_timm_error(checkpoint: Checkpoint, config: Any) -> Iterator[None]:
    """Convert exceptions of timm into a CheckpointError."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        lines = str(error).strip().splitlines()
        raise CheckpointError(
            f"{checkpoint.path} cannot be loaded as a {config['architecture']}: "
            f"{' '.join(lines[:2])}",
            hint="use the config.json that belongs to the weights",
        ) from error

"""From a checkpoint to a live module: the class that its config names, of the transformers library or timm, with its weights in a chosen dtype."""

from __future__ import annotations

import contextlib
import copy
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regauge.checkpoint import INDEX, WEIGHTS, Checkpoint, open_checkpoint
from regauge.errors import CheckpointError, UnknownModelError, need

if TYPE_CHECKING:
    import torch

DTYPES = ("float64", "float32", "bfloat16", "float16")
Part = Literal["edges", "backbone"]


def load_model(source: str | Path | Checkpoint, dtype: str | None = None) -> torch.nn.Module:
    """The model of a checkpoint (a folder, a .safetensors file with its config beside it, a hub id), in evaluation mode.

    `dtype` is that of the stored weights unless given. No code of the checkpoint is run.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    model, report = _loaded(checkpoint, dtype)
    _require_whole(checkpoint, type(model).__name__, report)
    return model


def drawn_anew(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Another model of this one's class and config, with weights drawn from a seed, as before any training. The process's own random numbers stay as
    they are. For classes of the transformers library."""
    import torch

    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "post_init"):
        raise UnknownModelError(
            f"{type(model).__name__} has no config to be made anew from", hint="draw its weights with the library that made it, and save them"
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        new: torch.nn.Module = type(model)(copy.deepcopy(config))
    return new


def load_empty(source: str | Path | Checkpoint) -> torch.nn.Module:
    """The module of a checkpoint without its weights, on torch's meta device: enough to know what it reads, before anything large is loaded."""
    import torch

    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    config = _config_of(checkpoint)
    with torch.device("meta"):
        if _is_timm(config):
            return _made_by_timm(checkpoint, config)
        kind = _class_of(checkpoint, config)
        with _loading(checkpoint, kind.__name__):
            model: torch.nn.Module = kind(kind.config_class.from_dict(dict(config)))
            return model.eval()


def load_part(source: str | Path | Checkpoint, part: Part, dtype: str | None = None, device: str = "cpu") -> torch.nn.Module:
    """A model of which only the edges (embedding and head) or only the backbone is there: the rest is on torch's meta device, and need not be in the
    checkpoint. What is in it is read and let go at once."""
    from regauge.cutting import cut

    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    model, report = _loaded(checkpoint, dtype)
    where = cut(model, checkpoint.config)
    paths = tuple(f"{b.blocks}." for b in where.boundaries)
    wanted = {name for name in report.get("missing_keys") or () if name.startswith(paths) == (part == "backbone")}
    _require_whole(checkpoint, type(model).__name__, {**report, "missing_keys": wanted})
    blocks = [model.get_submodule(b.blocks) for b in where.boundaries]
    if part == "edges":
        for block in blocks:
            block.to("meta")
    else:
        _empty(model, {id(block) for block in blocks})
    _move(model, device)
    return model


def _empty(module: torch.nn.Module, kept: set[int]) -> None:
    """Put a module on the meta device, but for some parts of it."""
    import torch

    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for held in tables:
        for name, t in held.items():
            if t is not None:
                empty = t.detach().to("meta")
                held[name] = torch.nn.Parameter(empty, t.requires_grad) if isinstance(t, torch.nn.Parameter) else empty
    for child in module.children():
        if id(child) not in kept:
            _empty(child, kept)


def _move(model: torch.nn.Module, device: str) -> None:
    """`to(device)` for what is not on the meta device."""
    if device != "cpu":
        for t in (*model.parameters(), *model.buffers()):
            if not t.is_meta:
                t.data = t.data.to(device)


def _loaded(checkpoint: Checkpoint, dtype: str | None) -> tuple[torch.nn.Module, Any]:
    """The model, and what its class and its checkpoint do not have in common."""
    config = _config_of(checkpoint)
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f'there is no dtype "{dtype}" here', hint=f"choose from {', '.join(DTYPES)}")
    return (_of_timm if _is_timm(config) else _of_transformers)(checkpoint, config, dtype)


def _config_of(checkpoint: Checkpoint) -> Any:
    if checkpoint.config is None:
        raise UnknownModelError(
            f"{checkpoint.path} has no config.json, so that no class can be built for it",
            hint="put config.json beside it; for a module of your own use regauge.verify(module, spec=..., boundaries=...) in Python",
        )
    return checkpoint.config


def _is_timm(config: Any) -> bool:
    return "model_type" not in config and "architecture" in config


def _class_of(checkpoint: Checkpoint, config: Any) -> Any:
    """The class of the transformers library that a config names."""
    need("transformers", "models")
    import transformers

    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    if kind is None:
        why = f"names the class {name}, which the transformers library does not have" if name else 'names no class ("architectures")'
        raise UnknownModelError(f"the config of {checkpoint.path} {why}", hint="regauge loads classes of the transformers library and timm only")
    expected = getattr(getattr(kind, "config_class", None), "model_type", None)
    if expected is not None and expected != config.get("model_type"):  # built from a config that is not its own, a class takes sizes of its own
        raise UnknownModelError(
            f'the config of {checkpoint.path} names the class {name} and the model_type "{config.get("model_type")}", which is not that of the class',
            hint=f'the model_type of a {name} is "{expected}"',
        )
    return kind


@contextlib.contextmanager
def _loading(checkpoint: Checkpoint, name: str) -> Iterator[None]:
    """Whatever a class runs into is told as the checkpoint's fault, in one line."""
    try:
        with quiet():
            yield
    except (OSError, ValueError, RuntimeError, TypeError, KeyError, AttributeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{checkpoint.path} cannot be loaded as a {name}: {first}", hint="regauge inspect shows what does not fit") from error


def _of_transformers(checkpoint: Checkpoint, config: Any, dtype: str | None) -> tuple[torch.nn.Module, Any]:
    import torch

    kind = _class_of(checkpoint, config)
    with _loading(checkpoint, kind.__name__), _folder(checkpoint) as folder:
        chosen = "auto" if dtype is None else getattr(torch, dtype)
        how = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
        model, report = kind.from_pretrained(folder, dtype=chosen, ignore_mismatched_sizes=True, **how)  # told below, by name
    return model.eval(), report


def _require_whole(checkpoint: Checkpoint, name: Any, report: Any) -> None:
    """Weights that are missing would be drawn at random, and those left over be ignored: neither is the model that was given."""
    for key, what in (("mismatched_keys", "has another size for"), ("missing_keys", "has no"), ("unexpected_keys", "has, and the class has not,")):
        found = sorted(report.get(key) or (), key=str)
        if not found:
            continue
        first, more = found[0], f" and {len(found) - 1} more" if len(found) > 1 else ""
        if isinstance(first, tuple):  # a name, its size in the file, and that in the class
            first, has, wants = first
            more = f", {list(has)} and not {list(wants)}{more}"
        hint = "config.json contradicts the weights" if key == "mismatched_keys" else '"architectures" in config.json names the class'
        raise CheckpointError(f'as a {name}, {checkpoint.path} {what} "{first}"{more}', hint=hint)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the transformers library's own talk and bars: progress is told by whoever loads a model."""
    from transformers.utils import logging as talk

    level, bars = talk.get_verbosity(), talk.is_progress_bar_enabled()
    talk.set_verbosity(logging.ERROR)
    talk.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        talk.set_verbosity(level)
        if bars:
            talk.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _folder(checkpoint: Checkpoint) -> Iterator[Path]:
    """The folder that the library loads from: links to the files that were read, and nothing else. Whatever lies beside them (an adapter, code,
    weights in other formats) would be loaded without being asked for. What is not stored as it is read (a model with its adapter) is written."""
    with tempfile.TemporaryDirectory(prefix="regauge-") as temporary:
        folder = Path(temporary)
        if checkpoint.as_stored and checkpoint.is_folder:
            for name, shard in checkpoint.files.items():
                (folder / (WEIGHTS if checkpoint.index is None else name)).symlink_to(shard.path.resolve())
            for name in (INDEX, "generation_config.json") if checkpoint.index is not None else ("generation_config.json",):
                if (checkpoint.path / name).is_file():
                    (folder / name).symlink_to((checkpoint.path / name).resolve())
        elif checkpoint.as_stored:
            (folder / WEIGHTS).symlink_to(checkpoint.path.resolve())
        else:
            from safetensors.torch import save_file

            save_file({name: checkpoint[name].contiguous().clone() for name in checkpoint}, folder / WEIGHTS, {"format": "pt"})
        if checkpoint.config_path is not None:
            (folder / "config.json").symlink_to(checkpoint.config_path.resolve())
        yield folder


def _of_timm(checkpoint: Checkpoint, config: Any, dtype: str | None) -> tuple[torch.nn.Module, Any]:
    import torch

    model = _made_by_timm(checkpoint, config)
    with _of_these_weights(checkpoint, config):
        found = model.load_state_dict(dict(checkpoint), strict=False)
    stored = next(t.dtype for t in checkpoint.values() if t.is_floating_point())
    report = {"missing_keys": found.missing_keys, "unexpected_keys": found.unexpected_keys}
    return model.to(stored if dtype is None else getattr(torch, dtype)), report


def _made_by_timm(checkpoint: Checkpoint, config: Any) -> torch.nn.Module:
    with _of_these_weights(checkpoint, config):
        return build_timm(config)


def build_timm(config: Mapping[str, Any]) -> torch.nn.Module:
    """The module of timm that a config describes, with weights of its own making. Whatever timm runs into is raised as it is."""
    need("timm", "timm")
    import timm

    arguments = dict(config.get("model_args") or {})
    if config.get("num_classes") is not None:
        arguments.setdefault("num_classes", config["num_classes"])
    model: torch.nn.Module = timm.create_model(config["architecture"], pretrained=False, **arguments)
    return model.eval()


@contextlib.contextmanager
def _of_these_weights(checkpoint: Checkpoint, config: Any) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        first = str(error).strip().splitlines()
        raise CheckpointError(
            f"{checkpoint.path} cannot be loaded as a {config['architecture']}: {' '.join(first[:2])}", hint="is config.json of these weights?"
        ) from error

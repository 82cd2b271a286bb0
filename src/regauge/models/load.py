"""From a checkpoint to a live module: the class that its config names, of the transformers library
or timm, with its weights in a chosen dtype.
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
from regauge.errors import CheckpointError, RegaugeError, RegaugeWarning, UnknownModelError, need
from regauge.models.families import check_counts
from regauge.models.trust import code_disabled, library_class, without_code

if TYPE_CHECKING:
    import torch

_HINTS = {
    "mismatched_keys": "config.json contradicts the weights",
    "missing_keys": "fetch the weights again if some are lost, or name the class that they are "
    'of in config.json ("architectures")',
    "unexpected_keys": 'name the class that has these weights in config.json ("architectures"), '
    "and check its number of layers",
}
# that a config may speak of where the checkpoint has fewer tensors: a part of a split model has no
# layers
_MIN_COUNT_LIMIT = 500
DTYPES = ("float64", "float32", "bfloat16", "float16")
Part = Literal["edges", "backbone"]


def load_model(source: str | Path | Checkpoint, dtype: str | None = None) -> torch.nn.Module:
    """The model of a checkpoint (a folder, a .safetensors file with its config beside it, a hub
    id), in evaluation mode.

    `dtype` is that of the stored weights unless given. No code of the checkpoint is run.
    """
    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    require_numel(
        load_empty(checkpoint), sum(e.numel for e in checkpoint.entries.values()), checkpoint.path
    )
    model, report = _load(checkpoint, dtype)
    _require_complete(checkpoint, type(model).__name__, report)
    return model


def require_numel(module: torch.nn.Module, stored: int, where: object) -> None:
    """Raise if a module, as its config describes it, is much larger than the checkpoint it is for:
    its memory would be allocated first, and the misfit be found afterwards. A checkpoint leaves out
    what is tied and what a task's head adds.
    """
    described = sum(p.numel() for p in module.parameters())
    if described > 4 * stored + 10_000_000:
        raise CheckpointError(
            f"the config of {where} describes a {type(module).__name__} of {described:,} "
            f"parameters, and the weights are {stored:,}",
            hint="config.json contradicts the weights: is it theirs?",
        )


def reinitialize(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Another model of this one's class and config, with weights drawn from a seed, as before any
    training. The process's own random numbers stay as they are. For classes of the transformers
    library.
    """
    import torch

    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "post_init"):
        raise UnknownModelError(
            f"{type(model).__name__} has no config to be made anew from",
            hint="draw its weights with the library that made it, and save them",
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        new: torch.nn.Module = type(model)(copy.deepcopy(config))
    return new


def load_empty(source: str | Path | Checkpoint) -> torch.nn.Module:
    """The module of a checkpoint without its weights, on torch's meta device: enough to know what
    it reads, before anything large is loaded.
    """
    import torch

    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    config = _config_of(checkpoint)
    check_counts(config, max(_MIN_COUNT_LIMIT, len(checkpoint)))
    with torch.device("meta"):
        if _is_timm(config):
            return _build_timm_for(checkpoint, config)
        kind = _class_of(checkpoint, config)
        with _as_checkpoint_error(checkpoint, kind.__name__):
            model: torch.nn.Module = kind(
                kind.config_class.from_dict(without_code(config, checkpoint.path))
            )
            return model.eval()


def load_part(
    source: str | Path | Checkpoint, part: Part, dtype: str | None = None, device: str = "cpu"
) -> torch.nn.Module:
    """A model of which only the edges (embedding and head) or only the backbone is there: the rest
    is on torch's meta device, and need not be in the checkpoint. What is in it is read and let go
    at once.
    """
    from regauge.models.cut import cut

    checkpoint = source if isinstance(source, Checkpoint) else open_checkpoint(source)
    model, report = _load(checkpoint, dtype)
    where = cut(model, checkpoint.config)
    paths = tuple(f"{b.blocks}." for b in where.boundaries)
    wanted = {
        name
        for name in report.get("missing_keys") or ()
        if name.startswith(paths) == (part == "backbone")
    }
    _require_complete(checkpoint, type(model).__name__, {**report, "missing_keys": wanted})
    blocks = [model.get_submodule(b.blocks) for b in where.boundaries]
    if part == "edges":
        for block in blocks:
            block.to("meta")
    else:
        _move_to_meta(model, {id(block) for block in blocks})
    _move_to_device(model, device)
    return model


def _move_to_meta(module: torch.nn.Module, kept: set[int]) -> None:
    """Put a module on the meta device, but for some parts of it."""
    import torch

    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for held in tables:
        for name, t in held.items():
            if t is not None:
                empty = t.detach().to("meta")
                held[name] = (
                    torch.nn.Parameter(empty, t.requires_grad)
                    if isinstance(t, torch.nn.Parameter)
                    else empty
                )
    for child in module.children():
        if id(child) not in kept:
            _move_to_meta(child, kept)


def _move_to_device(model: torch.nn.Module, device: str) -> None:
    """`to(device)` for what is not on the meta device."""
    if device != "cpu":
        for t in (*model.parameters(), *model.buffers()):
            if not t.is_meta:
                t.data = t.data.to(device)


def _load(checkpoint: Checkpoint, dtype: str | None) -> tuple[torch.nn.Module, Any]:
    """The model, and what its class and its checkpoint do not have in common."""
    config = _config_of(checkpoint)
    check_counts(config, max(_MIN_COUNT_LIMIT, len(checkpoint)))
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(
            f'there is no dtype "{dtype}" here', hint=f"choose from {', '.join(DTYPES)}"
        )
    return (_load_timm if _is_timm(config) else _load_transformers)(checkpoint, config, dtype)


def _config_of(checkpoint: Checkpoint) -> Any:
    if checkpoint.config is None:
        raise UnknownModelError(
            f"{checkpoint.path} has no config.json, so that no class can be built for it",
            hint="put config.json beside it; for a module of your own use "
            "regauge.verify(module, spec=..., boundaries=...) in Python",
        )
    return checkpoint.config


def _is_timm(config: Any) -> bool:
    return "model_type" not in config and "architecture" in config


def _class_of(checkpoint: Checkpoint, config: Any) -> Any:
    """The class of the transformers library that a config names."""
    kind = library_class(config, checkpoint.path)
    expected, name = kind.config_class.model_type, kind.__name__
    if expected != config.get(
        "model_type"
    ):  # built from a config that is not its own, a class takes sizes of its own
        raise UnknownModelError(
            f"the config of {checkpoint.path} names the class {name} and the model_type "
            f'"{config.get("model_type")}", which is not that of the class',
            hint=f'the model_type of a {name} is "{expected}"',
        )
    return kind


@contextlib.contextmanager
def _as_checkpoint_error(checkpoint: Checkpoint, name: str) -> Iterator[None]:
    """Whatever a class runs into is told as the checkpoint's fault, in one line."""
    try:
        with quiet(), code_disabled():
            yield
    except RegaugeError:
        raise
    except Exception as error:  # a class raises whatever its layers run into
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{checkpoint.path} cannot be loaded as a {name}: {first}",
            hint="regauge inspect shows what does not fit",
        ) from error


def _load_transformers(
    checkpoint: Checkpoint, config: Any, dtype: str | None
) -> tuple[torch.nn.Module, Any]:
    import torch

    kind = _class_of(checkpoint, config)
    with (
        _as_checkpoint_error(checkpoint, kind.__name__),
        _sanitized_folder(checkpoint, config) as folder,
    ):
        chosen = "auto" if dtype is None else getattr(torch, dtype)
        how = {
            "local_files_only": True,
            "use_safetensors": True,
            "trust_remote_code": False,
            "output_loading_info": True,
        }
        load = partial(
            kind.from_pretrained, folder, dtype=chosen, ignore_mismatched_sizes=True, **how
        )  # faults are reported by _require_whole
        model, report = load()
        for switch in _optional_parts(kind) if report["missing_keys"] else ():
            smaller, less = load(**{switch: False})
            absent = set(report["missing_keys"]) - set(less["missing_keys"])
            if absent and not less["unexpected_keys"]:
                model, report = smaller, less
                text = (
                    f'{checkpoint.path} has no "{min(absent)}"{_and_more(absent)}: the '
                    f"{kind.__name__} is built without this optional part"
                )
                warnings.warn(f"{text} ({switch}=False)", RegaugeWarning, stacklevel=2)
    model.name_or_path = model.config.name_or_path = str(checkpoint.path)
    return model.eval(), report


def _optional_parts(kind: Any) -> list[str]:
    """Return the switches with which a class is built without a part, such as BertModel's
    `add_pooling_layer`: sentence encoders lack that one.
    """
    parameters = inspect.signature(kind.__init__).parameters.values()
    return [p.name for p in parameters if p.name.startswith("add_") and p.default is True]


def _and_more(found: Collection[Any]) -> str:
    return f" and {len(found) - 1} more" if len(found) > 1 else ""


def _require_complete(checkpoint: Checkpoint, name: Any, report: Any) -> None:
    """Weights that are missing would be drawn at random, and those left over be ignored: neither is
    the model that was given.
    """
    for key, what in (
        ("mismatched_keys", "has another size for"),
        ("missing_keys", "has no"),
        ("unexpected_keys", "has, and the class has not,"),
    ):
        found = sorted(report.get(key) or (), key=str)
        if not found:
            continue
        first, more = found[0], _and_more(found)
        if isinstance(first, tuple):  # a name, its size in the file, and that in the class
            first, has, wants = first
            more = f", {list(has)} and not {list(wants)}{more}"
        raise CheckpointError(
            f'as a {name}, {checkpoint.path} {what} "{first}"{more}', hint=_HINTS[key]
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the transformers library's own talk and bars: progress is told by whoever loads a
    model.
    """
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
def _sanitized_folder(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Iterator[Path]:
    """Make the folder that the library loads from: links to the weights, the config without custom
    code, and nothing else that lies beside the weights (Python files, adapters, pickles). Tensors
    that are not stored as they are read (a model with its adapter) are written there.
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
    import torch

    model = _build_timm_for(checkpoint, config)
    with _as_timm_error(checkpoint, config):
        found = model.load_state_dict(dict(checkpoint), strict=False)
    stored = next(t.dtype for t in checkpoint.values() if t.is_floating_point())
    report = {"missing_keys": found.missing_keys, "unexpected_keys": found.unexpected_keys}
    return model.to(stored if dtype is None else getattr(torch, dtype)), report


def _build_timm_for(checkpoint: Checkpoint, config: Any) -> torch.nn.Module:
    with _as_timm_error(checkpoint, config):
        return build_timm(config, checkpoint.path)


def build_timm(config: Mapping[str, Any], where: object = "the model") -> torch.nn.Module:
    """The module of timm that a config describes, with weights of its own making. Whatever timm
    runs into is raised as it is.
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
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        first = str(error).strip().splitlines()
        raise CheckpointError(
            f"{checkpoint.path} cannot be loaded as a {config['architecture']}: "
            f"{' '.join(first[:2])}",
            hint="is config.json of these weights?",
        ) from error

"""A wrapped model on disk: the plain checkpoint of its library, and a folder `jigsaw` with the
learned parameters of the wrapper.

Any library loads the plain model. The folder holds one safetensors file: the unknown embedding and
the regression, with the settings in its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from regauge.checkpoints.files import OWNER, copy_file, staged_folder
from regauge.checkpoints.plan import check_new, existing_files, model_mode
from regauge.checkpoints.reader import Checkpoint
from regauge.errors import JigsawError
from regauge.jigsaw.variants import Variant
from regauge.jigsaw.wrapper import LAMBDA, MaskedJigsaw
from regauge.models.load import load_model, quiet
from regauge.models.sources import open_source

if TYPE_CHECKING:
    from regauge.models.sources import Source

FOLDER, FILE, VERSION = "jigsaw", "learned.safetensors", "1"
COPIED = ("preprocessor_config.json", "config.json")


def save_wrapped(wrapped: MaskedJigsaw, out: Path, source: Path | None = None) -> None:
    """Write a wrapped model to a new folder, atomically.

    Args:
        wrapped: The model, which is unwrapped in place.
        out: The new folder.
        source: The folder or file of the original model; its image preprocessing is copied.
    """
    check_new(out)
    folder = source if source is None or source.is_dir() else source.parent
    copied = existing_files(folder, COPIED) if folder is not None else []
    with staged_folder(out, model_mode(source, copied)) as partial:
        write_wrapped(wrapped, partial, copied)


def write_wrapped(wrapped: MaskedJigsaw, folder: Path, copied: Iterable[Path] = ()) -> None:
    """Write a wrapped model into an existing, staged folder."""
    for path in copied:
        copy_file(path, folder / path.name, OWNER)
    model = wrapped.unwrap()
    if hasattr(model, "save_pretrained"):
        with quiet():
            model.save_pretrained(folder)  # type: ignore[operator]
    else:
        save_file(
            {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()},
            folder / "model.safetensors",
        )
    (folder / FOLDER).mkdir()
    settings = json.dumps(settings_of(wrapped))
    metadata = {"regauge": "jigsaw", "version": VERSION, "settings": settings}
    save_file(_learned(wrapped), folder / FOLDER / FILE, metadata)


def load_wrapped(source: Source, **overrides: Any) -> MaskedJigsaw:
    """Load the wrapped model of a folder; a plain model is wrapped as variant A.

    Args:
        source: The folder of the model, a hub id, a checkpoint or a live module. A wrapped module
            is returned as it is.
        overrides: Settings of `MaskedJigsaw` that replace the saved ones.

    Raises:
        JigsawError: The folder `jigsaw` is damaged, or of an unsupported version.
    """
    if isinstance(source, MaskedJigsaw):
        return source.eval()
    checkpoint, module = open_source(source)
    model = load_model(checkpoint) if module is None else module
    path = checkpoint.path / FOLDER / FILE
    if not path.is_file():
        return MaskedJigsaw(model, 0.0, **{"variant": "A", **overrides}).eval()
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # the handle is not a mapping
            learned = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("regauge") != "jigsaw":
            raise ValueError("its metadata lack regauge's settings")
        if metadata["version"] != VERSION:
            raise JigsawError(
                f"{path} has version {metadata['version']}; this regauge reads {VERSION}",
                hint="install a newer regauge",
            )
        settings = json.loads(metadata["settings"])
        wrapped = MaskedJigsaw(
            model,
            settings.pop("ratio"),
            **{**settings, "variant": Variant(**settings["variant"]), **overrides},
        )
        wrapped.load_state_dict(
            {**{f"model.{k}": v for k, v in model.state_dict().items()}, **learned}
        )
    except JigsawError:
        raise
    except Exception as error:  # safetensors, json and torch raise errors of their own
        raise JigsawError(
            f"{path} cannot be read: {(str(error) or type(error).__name__).splitlines()[0]}",
            hint="train again, or remove it",
        ) from error
    return wrapped.eval()


def load_together(
    sources: Iterable[Source], patch: int | None = None
) -> dict[str, tuple[MaskedJigsaw, Path | None]]:
    """Load models to compare, by path or class, each with the folder that it comes from.

    Models without a patch size get the smallest one of the others, so that all of them are
    evaluated on the same puzzles.

    Args:
        sources: The models.
        patch: The patch size of all models.
    """
    models: dict[str, tuple[MaskedJigsaw, Path | None]] = {}
    for source in sources:
        wrapped = load_wrapped(source, **({} if patch is None else {"patch": patch}))
        name = type(wrapped.model).__name__
        if isinstance(source, str | Path):
            name = str(source)
        elif name in models:
            name = f"{name} {len(models) + 1}"
        models[name] = wrapped, folder_of(source)
    patches = {model.layout.patch for model, _ in models.values() if not model.layout.assumed}
    for model, _ in models.values():
        if patches and model.layout.assumed:
            model.layout = replace(model.layout, patch=min(patches), assumed=False)
    return models


def folder_of(source: Source) -> Path | None:
    """Return the folder of a model on disk, which may define its preprocessing; else None."""
    if not isinstance(source, str | Path | Checkpoint):
        return None
    checkpoint, _ = open_source(source)
    return checkpoint.path if checkpoint.is_folder else checkpoint.path.parent


def rewrap_plain(wrapped: MaskedJigsaw) -> MaskedJigsaw:
    """Unwrap a model and wrap it as variant A, to evaluate the plain model on the same puzzles.

    Without the unknown embedding it gets no information on the patches that were shuffled.
    """
    layout = wrapped.layout
    return MaskedJigsaw(
        wrapped.unwrap(), 0.0, variant="A", table=layout.table, patch=layout.patch, grid=layout.grid
    ).eval()


def settings_of(wrapped: MaskedJigsaw) -> dict[str, Any]:
    """Return the arguments of `MaskedJigsaw` as plain JSON, without schedules of a training."""
    weight = LAMBDA if callable(wrapped.weight) else wrapped.weight
    options = {
        name: getattr(wrapped, name) for name in ("ratio", "per", "probability", "warmup", "seed")
    }
    layout = {
        "table": wrapped.layout.table,
        "patch": list(wrapped.layout.patch),
        "grid": wrapped.layout.grid,
    }
    return {**options, "weight": weight, "variant": asdict(wrapped.variant), **layout}


def _learned(wrapped: MaskedJigsaw) -> dict[str, torch.Tensor]:
    """Return the parameters of the wrapper, without the model's."""
    return {
        k: v.detach().cpu().contiguous()
        for k, v in wrapped.state_dict().items()
        if not k.startswith("model.")
    }

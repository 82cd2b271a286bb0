"""A wrapped model on disk: the plain checkpoint, as its library writes it, and beside it what the
puzzles learned, in the folder `jigsaw`.

Whoever knows nothing of puzzles loads the plain model. What lies beside it is one safetensors file:
the unknown embedding, the regression, and the settings in its metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from regauge.checkpoints.files import OWNER, copy_file, staged_folder
from regauge.checkpoints.plan import check_new, existing_files, model_mode
from regauge.jigsaw.masks import JigsawError
from regauge.jigsaw.variants import Variant
from regauge.jigsaw.wrapper import LAMBDA, MaskedJigsaw
from regauge.models.load import load_model, quiet

FOLDER, FILE, VERSION = "jigsaw", "learned.safetensors", "1"
COPIED = ("preprocessor_config.json", "config.json")


def save_wrapped(wrapped: MaskedJigsaw, out: Path, source: Path | None = None) -> None:
    """Write a wrapped model to a new folder, all of it or nothing. `source` is the model that it
    came from, a folder or a file: what describes its images is copied.
    """
    check_new(out)
    folder = source if source is None or source.is_dir() else source.parent
    copied = existing_files(folder, COPIED) if folder is not None else []
    with staged_folder(out, model_mode(source, copied)) as partial:
        write_wrapped(wrapped, partial, copied)


def write_wrapped(wrapped: MaskedJigsaw, folder: Path, copied: Iterable[Path] = ()) -> None:
    """Write a wrapped model into a folder that is staged already."""
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
    about = {"regauge": "jigsaw", "version": VERSION, "settings": json.dumps(settings_of(wrapped))}
    save_file(_learned(wrapped), folder / FOLDER / FILE, about)


def load_wrapped(folder: Path | str, **instead: Any) -> MaskedJigsaw:
    """The wrapped model of a folder; of one without puzzles the plain model, wrapped as variant A.
    `instead` replaces settings.
    """
    model = load_model(folder)
    path = Path(folder) / FOLDER / FILE
    if not path.is_file():
        return MaskedJigsaw(model, 0.0, **{"variant": "A", **instead}).eval()
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            # the handle is no mapping
            learned = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about.get("regauge") != "jigsaw":
            raise ValueError("it has no settings of regauge")
        if about["version"] != VERSION:
            raise JigsawError(
                f"{path} has version {about['version']}; this regauge reads {VERSION}",
                hint="install a newer regauge",
            )
        settings = json.loads(about["settings"])
        wrapped = MaskedJigsaw(
            model,
            settings.pop("ratio"),
            **{**settings, "variant": Variant(**settings["variant"]), **instead},
        )
        wrapped.load_state_dict(
            {**{f"model.{k}": v for k, v in model.state_dict().items()}, **learned}
        )
    except JigsawError:
        raise
    except (
        Exception
    ) as error:  # safetensors, json and torch each have errors of their own for what does not fit
        raise JigsawError(
            f"{path} cannot be read: {(str(error) or type(error).__name__).splitlines()[0]}",
            hint="train again, or remove it",
        ) from error
    return wrapped.eval()


def load_together(folders: Iterable[str], patch: int | None = None) -> dict[str, MaskedJigsaw]:
    """Models to be compared, by folder. Those that say nothing of patches have the (smallest) patch
    of the others: their puzzles are the same.
    """
    found = {
        folder: load_wrapped(folder, **({} if patch is None else {"patch": patch}))
        for folder in folders
    }
    known = {one.layout.patch for one in found.values() if not one.layout.assumed}
    for one in found.values():
        if known and one.layout.assumed:
            one.layout = replace(one.layout, patch=min(known), assumed=False)
    return found


def rewrap_plain(wrapped: MaskedJigsaw) -> MaskedJigsaw:
    """The plain model of a wrapped one, which nobody tells where patches were shuffled, for the
    same puzzles: wrapped as variant A. It unwraps.
    """
    place = wrapped.layout
    return MaskedJigsaw(
        wrapped.unwrap(), 0.0, variant="A", table=place.table, patch=place.patch, grid=place.grid
    ).eval()


def settings_of(wrapped: MaskedJigsaw) -> dict[str, Any]:
    """What `MaskedJigsaw` was given, as plain JSON; schedules are of a training and end with it."""
    weight = LAMBDA if callable(wrapped.weight) else wrapped.weight
    kept = {
        name: getattr(wrapped, name) for name in ("ratio", "per", "probability", "warmup", "seed")
    }
    where = {
        "table": wrapped.layout.table,
        "patch": list(wrapped.layout.patch),
        "grid": wrapped.layout.grid,
    }
    return {**kept, "weight": weight, "variant": asdict(wrapped.variant), **where}


def _learned(wrapped: MaskedJigsaw) -> dict[str, torch.Tensor]:
    return {
        k: v.detach().cpu().contiguous()
        for k, v in wrapped.state_dict().items()
        if not k.startswith("model.")
    }

"""Parts of a model as checkpoint folders: a client's embedding and head, or a server's backbone.

A part is an ordinary checkpoint folder with config.json, which holds the tensors of one part only;
its `split.json` names the part. `join` makes a complete checkpoint of two parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regauge.checkpoints.files import OWNER, copy_file, make_folder, staged_folder, write_bytes
from regauge.checkpoints.plan import check_new, copies_mode, other_files
from regauge.checkpoints.reader import WEIGHTS, Checkpoint, open_checkpoint
from regauge.errors import CheckpointError
from regauge.locking.lock import record_of
from regauge.models.cut import cut
from regauge.models.load import Part, load_part, quiet
from regauge.split.protocol.messages import describe_model

Tensor = torch.Tensor
PART_FILE = "split.json"
VERSION = 1
_DESCRIPTIONS = {
    "edges": "The embedding and the head of a model, trained by a client of split learning. The "
    "backbone is on the server.",
    "backbone": "The backbone of a model, trained by a server of split learning. Embedding and "
    "head are on the clients.",
}


def write_part(
    out: Path,
    model: torch.nn.Module,
    source: Checkpoint,
    part: Part,
    state: Mapping[str, Tensor] | None = None,
    extra_fields: Mapping[str, Any] | None = None,
) -> None:
    """Write one part of a model to a new folder, atomically.

    Args:
        out: Folder to create.
        model: The model; its class and config are written with the weights.
        source: Checkpoint that the model was loaded from.
        part: "edges" (embedding and head) or "backbone".
        state: Weights to write instead of the model's own.
        extra_fields: Further fields of `split.json`.

    Raises:
        CheckpointError: `out` exists already.

    Example:
        >>> from pathlib import Path
        >>> checkpoint = regauge.open_checkpoint("model")
        >>> regauge.split.write_part(Path("edges"), model, checkpoint, "edges")
    """
    model_cut = cut(model, source.config)
    prefixes = tuple(f"{b.blocks}." for b in model_cut.boundaries)
    tensors = {
        n: t
        for n, t in (state or model.state_dict()).items()
        if n.startswith(prefixes) == (part == "backbone")
    }
    fields = {
        "regauge": "split part",
        "version": VERSION,
        "part": part,
        "what": _DESCRIPTIONS[part],
        "class": type(model).__name__,
    }
    fields |= {
        "digest": describe_model(model_cut, source.config)["digest"],
        "join": "regauge split join EDGES BACKBONE -o OUT",
        **(extra_fields or {}),
    }
    _write_folder(
        out, model, source, source.mode, tensors, fields, copy_other_files=part == "edges"
    )


@dataclass(frozen=True)
class JoinedModel:
    """A complete checkpoint that `join` wrote.

    Attributes:
        path: Its folder.
        key: Id of the key that it is locked with, or "".
    """

    path: Path
    key: str


def join(
    edges: str | Path, backbone: str | Path, out: str | Path, dtype: str | None = None
) -> JoinedModel:
    """Join embedding and head with a backbone to a complete checkpoint.

    Parts of a locked model give a locked model.

    Args:
        edges: Part folder, or complete checkpoint, that embedding and head are taken from.
        backbone: Part folder, or complete checkpoint, that the backbone is taken from.
        out: Folder to create.
        dtype: Dtype of the written weights; by default the stored one.

    Returns:
        The folder, and the id of the key that the model is locked with.

    Raises:
        CheckpointError: The two belong to different models or locks, or `out` exists already.

    Example:
        >>> joined = regauge.split.join("model", "model", "whole")
    """
    out = Path(out)
    check_new(out)
    sources = [open_checkpoint(s) for s in (edges, backbone)]
    records = [record_of(s) for s in sources]
    if records[0] != records[1]:
        keys = " and ".join("not locked" if r is None else f"key {r.key}" for r in records)
        raise CheckpointError(
            f"{edges} and {backbone} must have the same lock, got {keys}",
            hint="join parts of one locked model",
        )
    models = [
        load_part(s, part, dtype)  # type: ignore[arg-type]
        for s, part in zip(sources, ("edges", "backbone"), strict=True)
    ]
    cuts = [cut(m, s.config) for m, s in zip(models, sources, strict=True)]
    descriptions = [describe_model(c, s.config) for c, s in zip(cuts, sources, strict=True)]
    for field in descriptions[0]:
        if descriptions[0][field] != descriptions[1][field]:
            raise CheckpointError(
                f"{edges} and {backbone} must have the same {field}, got "
                f"{descriptions[0][field]} and {descriptions[1][field]}",
                hint="join parts of one model",
            )
    if type(models[0]) is not type(models[1]):
        raise CheckpointError(
            f"{edges} and {backbone} must be parts of one class, got "
            f"{type(models[0]).__name__} and {type(models[1]).__name__}",
            hint="join parts of one model",
        )
    state = {n: t for m in models for n, t in m.state_dict().items() if not t.is_meta}
    _write_folder(
        out,
        models[0],
        sources[0],
        sources[0].mode & sources[1].mode,
        state,
        None,
        copy_other_files=True,
    )
    return JoinedModel(out, "" if records[0] is None else records[0].key)


def _write_folder(
    out: Path,
    model: Any,
    source: Checkpoint,
    mode: int,
    state: Mapping[str, Tensor],
    fields: Mapping[str, Any] | None,
    *,
    copy_other_files: bool,
) -> None:
    """Write weights, config and `split.json`, if given, to a new folder."""
    check_new(out)
    tensors = {n: t.detach().cpu() for n, t in state.items()}
    others = (
        other_files(source.path, {PART_FILE, *source.files})[0]
        if copy_other_files and source.is_folder
        else {}
    )
    with staged_folder(out, mode & copies_mode(others)) as partial:
        if hasattr(model, "save_pretrained"):
            with quiet():
                model.save_pretrained(partial, state_dict=tensors)
        else:
            from safetensors.torch import save_file

            save_file(
                {n: t.contiguous().clone() for n, t in tensors.items()},
                partial / WEIGHTS,
                {"format": "pt"},
            )
            if source.config_path is not None:
                copy_file(source.config_path, partial / "config.json", OWNER)
        for name, path in others.items():
            if not (partial / name).exists():
                make_folder((partial / name).parent)
                copy_file(path, partial / name, OWNER)
        if fields is not None:
            write_bytes(partial / PART_FILE, json.dumps(fields, indent=2).encode() + b"\n")

"""Parts of a model as folders: the client's embedding and head, the server's backbone, and the
whole that they make.

A part is an ordinary checkpoint folder, with config.json, that has the tensors of one part only;
`split.json` in it says which.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
    "backbone is with the server.",
    "backbone": "The backbone of a model, trained by a server of split learning. Embedding and "
    "head are with the clients.",
}


def write_part(
    out: Path,
    model: torch.nn.Module,
    source: Checkpoint,
    part: Part,
    state: Mapping[str, Tensor] | None = None,
    extra_fields: Mapping[str, Any] | None = None,
) -> None:
    """Write one part of a model into a new folder, whole or not at all. `state` is for weights that
    are not the model's own.
    """
    where = cut(model, source.config)
    paths = tuple(f"{b.blocks}." for b in where.boundaries)
    chosen = {
        n: t
        for n, t in (state or model.state_dict()).items()
        if n.startswith(paths) == (part == "backbone")
    }
    about = {
        "regauge": "split part",
        "version": VERSION,
        "part": part,
        "what": _DESCRIPTIONS[part],
        "class": type(model).__name__,
    }
    about |= {
        "digest": describe_model(where, source.config)["digest"],
        "join": "regauge split join EDGES BACKBONE -o OUT",
        **(extra_fields or {}),
    }
    _write_folder(out, model, source, source.mode, chosen, about, copy_other_files=part == "edges")


def join(edges: str | Path, backbone: str | Path, out: Path, dtype: str | None = None) -> str:
    """A whole model of an embedding and a head, and a backbone, each from a part's folder or a
    whole model's. Returns the id of the key that it is locked with, if it is.
    """
    check_new(out)
    sources = [open_checkpoint(s) for s in (edges, backbone)]
    records = [record_of(s) for s in sources]
    if records[0] != records[1]:
        keys = " and ".join("not at all" if r is None else f"by the key {r.key}" for r in records)
        raise CheckpointError(
            f"{edges} and {backbone} are locked differently: {keys}",
            hint="join parts of one locked model",
        )
    models = [
        load_part(s, part, dtype)  # type: ignore[arg-type]
        for s, part in zip(sources, ("edges", "backbone"), strict=True)
    ]
    cuts = [cut(m, s.config) for m, s in zip(models, sources, strict=True)]
    about = [describe_model(c, s.config) for c, s in zip(cuts, sources, strict=True)]
    for what in about[0]:
        if about[0][what] != about[1][what]:
            raise CheckpointError(
                f"the {what} of {edges} is {about[0][what]}, that of {backbone} {about[1][what]}",
                hint="join parts of one model",
            )
    if type(models[0]) is not type(models[1]):
        raise CheckpointError(
            f"{edges} is of a {type(models[0]).__name__}, {backbone} of a "
            f"{type(models[1]).__name__}",
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
    return "" if records[0] is None else records[0].key


def _write_folder(
    out: Path,
    model: Any,
    source: Checkpoint,
    mode: int,
    state: Mapping[str, Tensor],
    about: Mapping[str, Any] | None,
    *,
    copy_other_files: bool,
) -> None:
    check_new(out)
    plain = {n: t.detach().cpu() for n, t in state.items()}
    others = (
        other_files(source.path, {PART_FILE, *source.files})[0]
        if copy_other_files and source.is_folder
        else {}
    )
    with staged_folder(out, mode & copies_mode(others)) as partial:
        if hasattr(model, "save_pretrained"):
            with quiet():
                model.save_pretrained(partial, state_dict=plain)
        else:
            from safetensors.torch import save_file

            save_file(
                {n: t.contiguous().clone() for n, t in plain.items()},
                partial / WEIGHTS,
                {"format": "pt"},
            )
            if source.config_path is not None:
                copy_file(source.config_path, partial / "config.json", OWNER)
        for name, path in others.items():
            if not (partial / name).exists():
                make_folder((partial / name).parent)
                copy_file(path, partial / name, OWNER)
        if about is not None:
            write_bytes(partial / PART_FILE, json.dumps(about, indent=2).encode() + b"\n")

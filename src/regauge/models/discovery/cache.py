"""What was discovered, kept: by the class of a model, its config and inputs, the libraries that
trace it, and these rules themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regauge.checkpoints.documents import load_json
from regauge.checkpoints.files import write_bytes
from regauge.checkpoints.spec_files import dump_spec, parse_spec
from regauge.core.spec import Spec
from regauge.errors import RegaugeError
from regauge.models.discovery.explain import Reason
from regauge.models.discovery.graph import SourceLocation
from regauge.models.families.family import Boundary

VERSION = 2
# What a config says of where a model comes from, and nothing of what it computes.
_IGNORED_KEYS = ("regauge_lock", "_name_or_path", "dtype", "torch_dtype", "transformers_version")


@dataclass(frozen=True)
class Discovery:
    """What was found: the spec, the largest error of its verification (and of that with norms
    folded), why each space has the group it has, why the other axes of parameters have none, what
    it was verified on, and where the model can be cut (nowhere, if no list of blocks hands a stream
    on).
    """

    spec: Spec
    error: float
    folded_error: float | None
    reasons: Mapping[str, Sequence[Reason]]
    frozen: Mapping[str, Sequence[Reason]]
    verified_on: str
    dropped: tuple[str, ...] = ()
    boundaries: tuple[Boundary, ...] = ()


def default_folder() -> Path:
    from regauge.checkpoints.environment import default_cache

    return default_cache().parent / "discovered"


def cache_key(module: torch.nn.Module, inputs: Mapping[str, Any]) -> str | None:
    """What a discovery is known by; None for a module without a config, which its class alone does
    not describe.
    """
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    from regauge.checkpoints.environment import versions

    shapes = {
        k: [list(v.shape), str(v.dtype)] for k, v in inputs.items() if isinstance(v, torch.Tensor)
    }
    others = sorted((k, repr(v)) for k, v in inputs.items() if not isinstance(v, torch.Tensor))
    kernels = str(getattr(config, "_attn_implementation", ""))
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    said = {k: v for k, v in config.to_dict().items() if k not in _IGNORED_KEYS}
    text = json.dumps(
        [VERSION, kind, said, kernels, shapes, others, versions(), _rules_hash()],
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _rules_hash() -> str:
    """These rules, as a hash: other rules find other things."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load(folder: Path, key: str) -> Discovery | None:
    """What was kept under a key, or None if nothing was, or nothing that can be read."""
    try:
        kept = load_json((folder / f"{key}.json").read_text(encoding="utf-8"))
        told = [
            {n: [_reason_from_list(r) for r in rs] for n, rs in kept[part].items()}
            for part in ("reasons", "frozen")
        ]
        spec = parse_spec(kept["spec"], str(folder / key))
        cuts = tuple(Boundary(**{**b, "returns": tuple(b["returns"])}) for b in kept["boundaries"])
        return Discovery(
            spec,
            kept["error"],
            kept["folded_error"],
            told[0],
            told[1],
            kept["verified_on"],
            tuple(kept["dropped"]),
            cuts,
        )
    except (OSError, ValueError, KeyError, TypeError, RegaugeError):
        return None


def save(folder: Path, key: str, found: Discovery) -> None:
    """Keep a discovery. A folder that cannot be written to is no error: it will be discovered
    again.
    """
    parts = {
        name: {n: [_reason_to_list(r) for r in rs] for n, rs in told.items()}
        for name, told in (("reasons", found.reasons), ("frozen", found.frozen))
    }
    more: dict[str, Any] = {
        "error": found.error,
        "folded_error": found.folded_error,
        "verified_on": found.verified_on,
        "dropped": list(found.dropped),
    }
    more["boundaries"] = [
        {k: getattr(b, k) for k in ("name", "blocks", "enter", "leave", "returns")}
        for b in found.boundaries
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(
            folder / f"{key}.json",
            json.dumps(
                {"version": VERSION, "spec": dump_spec(found.spec), **parts, **more}
            ).encode(),
        )
    except (OSError, RegaugeError):
        return


def _reason_to_list(reason: Reason) -> list[Any]:
    return [
        reason.operator_name,
        reason.kind,
        reason.effect,
        reason.preserves,
        [[p.file, p.line, p.code, p.module] for p in reason.locations],
    ]


def _reason_from_list(kept: Sequence[Any]) -> Reason:
    name, kind, does, keeps, places = kept
    return Reason(name, kind, does, keeps, tuple(SourceLocation(*p) for p in places))

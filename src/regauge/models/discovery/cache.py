"""Cached discoveries, by class, config and inputs of a model, the versions of the libraries that
trace it, and the source of the rules.
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
# Fields of a config that describe the origin of a model and do not affect its function.
_IGNORED_KEYS = ("regauge_lock", "_name_or_path", "dtype", "torch_dtype", "transformers_version")


@dataclass(frozen=True)
class Discovery:
    """The result of discovery.

    Attributes:
        spec: the verified spec.
        error: the largest error of the verification.
        folded_error: the same with norms folded; None if nothing can be folded.
        reasons: for each space, the operators that exclude a larger group.
        frozen: for each axis of a parameter on which nothing acts, the reasons.
        verified_on: the module that was used for verification.
        dropped: inferred symmetries that did not hold.
        boundaries: where the model can be cut; empty if no list of blocks passes a stream on.
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
    """Return the folder of discoveries in the user's cache."""
    from regauge.checkpoints.environment import default_cache

    return default_cache().parent / "discovered"


def cache_key(module: torch.nn.Module, inputs: Mapping[str, Any]) -> str | None:
    """Return the cache key of a discovery; None for a module without a config, which its class
    alone does not determine.
    """
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return None
    from regauge.checkpoints.environment import versions

    shapes = {
        k: [list(v.shape), str(v.dtype)] for k, v in inputs.items() if isinstance(v, torch.Tensor)
    }
    scalars = sorted((k, repr(v)) for k, v in inputs.items() if not isinstance(v, torch.Tensor))
    kernels = str(getattr(config, "_attn_implementation", ""))
    class_name = f"{type(module).__module__}.{type(module).__qualname__}"
    fields = {k: v for k, v in config.to_dict().items() if k not in _IGNORED_KEYS}
    text = json.dumps(
        [VERSION, class_name, fields, kernels, shapes, scalars, versions(), _rules_hash()],
        sort_keys=True,
        default=str,
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _rules_hash() -> str:
    """Return a hash of the source of discovery: a change of the rules invalidates the cache."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load(folder: Path, key: str) -> Discovery | None:
    """Load a discovery; None if it is missing or unreadable."""
    try:
        document = load_json((folder / f"{key}.json").read_text(encoding="utf-8"))
        explanations = [
            {n: [_reason_from_list(r) for r in rs] for n, rs in document[part].items()}
            for part in ("reasons", "frozen")
        ]
        spec = parse_spec(document["spec"], str(folder / key))
        boundaries = tuple(
            Boundary(**{**b, "returns": tuple(b["returns"])}) for b in document["boundaries"]
        )
        return Discovery(
            spec,
            document["error"],
            document["folded_error"],
            explanations[0],
            explanations[1],
            document["verified_on"],
            tuple(document["dropped"]),
            boundaries,
        )
    except (OSError, ValueError, KeyError, TypeError, RegaugeError):
        return None


def save(folder: Path, key: str, discovery: Discovery) -> None:
    """Save a discovery. Errors of the file system are ignored: discovery can be repeated."""
    explanations = {
        name: {n: [_reason_to_list(r) for r in rs] for n, rs in by_name.items()}
        for name, by_name in (("reasons", discovery.reasons), ("frozen", discovery.frozen))
    }
    fields: dict[str, Any] = {
        "error": discovery.error,
        "folded_error": discovery.folded_error,
        "verified_on": discovery.verified_on,
        "dropped": list(discovery.dropped),
    }
    fields["boundaries"] = [
        {k: getattr(b, k) for k in ("name", "blocks", "enter", "leave", "returns")}
        for b in discovery.boundaries
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_bytes(
            folder / f"{key}.json",
            json.dumps(
                {"version": VERSION, "spec": dump_spec(discovery.spec), **explanations, **fields}
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


def _reason_from_list(values: Sequence[Any]) -> Reason:
    name, kind, effect, preserves, locations = values
    return Reason(name, kind, effect, preserves, tuple(SourceLocation(*p) for p in locations))

"""Elements as files, and as the plain arrays that are in them: docs/formats.md says what they
hold.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from regauge.core.element import Element
from regauge.core.members import Dense, Member, Monomial, Planes
from regauge.core.spec import Spec
from regauge.errors import ElementError

VERSION = 1


def save_element(g: Element, path: Path | str, *, new: bool = False) -> None:
    """Write an element as a safetensors file, members as arrays. It appears whole or not at all,
    for its owner only: who has it can undo it.

    One that its model does not allow is refused: it could not be loaded again.
    """
    from safetensors.numpy import save

    from regauge.checkpoints.files import write_bytes

    g.require()
    arrays, kinds = arrays_of(g)
    metadata = {
        "regauge": "element",
        "version": str(VERSION),
        "family": g.spec.family,
        "members": json.dumps(kinds),
    }
    write_bytes(
        Path(path),
        save({k: np.ascontiguousarray(v) for k, v in arrays.items()}, metadata),
        mode=0o600,
        new=new,
    )


def arrays_of(g: Element) -> tuple[dict[str, Any], dict[str, str]]:
    """An element as plain arrays, and the kind of each member: what `element_of` makes one of
    again.
    """
    arrays: dict[str, Any] = {}
    kinds: dict[str, str] = {}
    for name, member in g.members.items():
        match member:
            case Monomial():
                kinds[name] = "monomial"
                arrays[f"{name}:index"] = member.index
                if member.scale is not None:
                    arrays[f"{name}:scale"] = np.asarray(member.scale, np.float64)
            case Dense():
                kinds[name] = "dense"
                arrays[f"{name}:matrix"] = np.ascontiguousarray(
                    member.values, np.float64
                )  # a fit of float32 models has float32 members
            case Planes():
                kinds[name] = f"planes-{member.layout}"
                arrays[f"{name}:factor"] = np.stack(
                    [member.factor.real, member.factor.imag], axis=-1
                ).astype(np.float64)
    return arrays, kinds


def element_of(
    spec: Spec,
    arrays: Mapping[str, Any],
    kinds: Mapping[str, str],
    where: Path | str = "the element",
) -> Element:
    """An element of a model, out of its arrays. Whether the model allows it is not looked at."""
    return Element(spec, {name: _member(where, name, kind, arrays) for name, kind in kinds.items()})


def load_element(path: Path | str, spec: Spec) -> Element:
    """Read an element for a model. One that was made for another model is refused."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ElementError(
            f"{path} cannot be read as an element: {error}",
            hint="regauge move --random --save-element FILE writes one",
        ) from error
    if metadata.get("regauge") != "element":
        raise ElementError(
            f"{path} is not an element", hint="regauge move --random --save-element FILE writes one"
        )
    try:
        version = int(metadata["version"])
        if version > VERSION:
            raise ElementError(
                f"{path} has format version {version}; this regauge reads up to {VERSION}",
                hint="upgrade regauge",
            )
        g = element_of(spec, arrays, json.loads(metadata["members"]), path)
        if version < 1:
            raise ValueError(f"its version is {version}")
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ElementError(f"{path} is damaged: {error}", hint="restore it from a copy") from error
    g.require()
    return g


def _member(path: Path | str, name: str, kind: str, arrays: Mapping[str, Any]) -> Member:
    """One member out of its arrays, whose shapes and dtypes must be those that it was written
    with.
    """

    def array(key: str, ndim: int, dtype: str) -> Any:
        found = arrays[f"{name}:{key}"]
        if found.ndim != ndim or found.dtype != dtype or 0 in found.shape:
            raise ValueError(f'"{name}:{key}" is {found.dtype} {list(found.shape)}')
        return found

    match kind:
        case "monomial":
            index = array("index", 2, "int64")
            scale = array("scale", 2, "float64") if f"{name}:scale" in arrays else None
            if scale is not None and scale.shape != index.shape:
                raise ValueError(
                    f'"{name}:scale" has shape {list(scale.shape)}, its index {list(index.shape)}'
                )
            return Monomial(index, scale)
        case "dense":
            values = array("matrix", 3, "float64")
            if values.shape[1] != values.shape[2]:
                raise ValueError(f'"{name}:matrix" has shape {list(values.shape)}')
            return Dense(values)
        case "planes-half" | "planes-interleaved":
            factor = array("factor", 3, "float64")
            if factor.shape[2] != 2:
                raise ValueError(f'"{name}:factor" has shape {list(factor.shape)}')
            return Planes(
                factor[..., 0] + 1j * factor[..., 1],
                "half" if kind.endswith("half") else "interleaved",
            )
        case _:
            raise ElementError(
                f'{path} has a member of unknown kind "{kind}" on "{name}"', hint="upgrade regauge"
            )

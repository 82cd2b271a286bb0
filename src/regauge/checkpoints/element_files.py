"""Element files, and the arrays that represent an element (docs/formats-keys.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from regauge.core.element import Element
from regauge.core.members import Dense, Member, Monomial, Planes
from regauge.core.spec import Spec
from regauge.errors import ElementError, Hint

VERSION = 1


def save_element(g: Element, path: Path | str, *, new: bool = False) -> None:
    """Write an element as a safetensors file, atomically and readable by the owner only.

    The file is a secret: its holder can undo the transform.

    Args:
        g: The element.
        path: The file.
        new: Raise if the file exists instead of replacing it.

    Raises:
        ElementError: The model does not allow the element; it could not be loaded again.

    Example:
        >>> spec = regauge.spec_of(model)
        >>> regauge.save_element(regauge.element(spec, 0), "secret.element")
        >>> g = regauge.load_element("secret.element", spec)
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
    """Return the arrays of an element and the kind of each member, the inverse of `element_of`."""
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
                # A fit of float32 models has float32 members.
                arrays[f"{name}:matrix"] = np.ascontiguousarray(member.values, np.float64)
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
    """Build an element from its arrays, without checking that the model allows it.

    Args:
        spec: The spec of the model.
        arrays: The arrays of all members, by "name:key".
        kinds: The kind of each member.
        where: The name of the element in errors.
    """
    return Element(spec, {name: _member(where, name, kind, arrays) for name, kind in kinds.items()})


def load_element(path: Path | str, spec: Spec) -> Element:
    """Read an element file.

    Args:
        path: The file.
        spec: The spec of the model that the element belongs to.

    Returns:
        The element.

    Raises:
        ElementError: The file is damaged, has a newer format, or belongs to another model.

    Example:
        >>> spec = regauge.spec_of(model)
        >>> regauge.save_element(regauge.element(spec, 0), "secret.element")
        >>> g = regauge.load_element("secret.element", spec)
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ElementError(
            f"{path} cannot be read as an element: {error}",
            hint=Hint(
                "regauge.save_element writes one",
                cli="regauge move MODEL --random -o OUT --save-element FILE writes one",
            ),
        ) from error
    if metadata.get("regauge") != "element":
        raise ElementError(
            f"{path} is not an element",
            hint=Hint(
                "regauge.save_element writes one",
                cli="regauge move MODEL --random -o OUT --save-element FILE writes one",
            ),
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
            raise ValueError(f"version must be >= 1, got {version}")
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ElementError(f"{path} is damaged: {error}", hint="restore it from a copy") from error
    g.require()
    return g


def _member(path: Path | str, name: str, kind: str, arrays: Mapping[str, Any]) -> Member:
    """Build one member from its arrays, after checking their shapes and dtypes."""

    def array(key: str, ndim: int, dtype: str) -> Any:
        value = arrays[f"{name}:{key}"]
        if value.ndim != ndim or value.dtype != dtype or 0 in value.shape:
            raise ValueError(
                f'"{name}:{key}" must be {dtype} with {ndim} axes, got {value.dtype} '
                f"{list(value.shape)}"
            )
        return value

    match kind:
        case "monomial":
            index = array("index", 2, "int64")
            scale = array("scale", 2, "float64") if f"{name}:scale" in arrays else None
            if scale is not None and scale.shape != index.shape:
                raise ValueError(
                    f'"{name}:scale" must have the shape of its index, {list(index.shape)}, got '
                    f"{list(scale.shape)}"
                )
            return Monomial(index, scale)
        case "dense":
            values = array("matrix", 3, "float64")
            if values.shape[1] != values.shape[2]:
                raise ValueError(f'"{name}:matrix" must be square, got {list(values.shape)}')
            return Dense(values)
        case "planes-half" | "planes-interleaved":
            factor = array("factor", 3, "float64")
            if factor.shape[2] != 2:
                raise ValueError(
                    f'"{name}:factor" must have 2 as its last size, got {list(factor.shape)}'
                )
            return Planes(
                factor[..., 0] + 1j * factor[..., 1],
                "half" if kind.endswith("half") else "interleaved",
            )
        case _:
            raise ElementError(
                f'{path} has a member of unknown kind "{kind}" on "{name}"', hint="upgrade regauge"
            )

"""Spec files: the symmetry of a custom module in TOML. `docs/formats.md` describes the format.

`{i}` in names and axes runs over `repeat = { i = 6 }`; any other name in braces is a stack, as in
`regauge.core.spec`. One error lists every fault of a file, unknown fields included.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regauge.checkpoints.documents import SPEC_BYTES, is_flat, read_document
from regauge.core import axes as ax
from regauge.core.check import Fault, check_spec
from regauge.core.groups import GROUPS
from regauge.core.patterns import compile_pattern
from regauge.core.spec import PARTS, Norm, Scale, Space, Spec
from regauge.errors import AxesError, CheckpointError, PatternError, SpecError

VERSION = 1
_HINT = "docs/formats.md describes spec files"
_MAX_NAMES_PER_LINE, _MAX_NAMES = 100_000, 400_000  # after expansion, per line and per file

_FIELDS = (
    *(
        "regauge",
        "family",
        "repeat",
        "spaces",
        "tensors",
        "outputs",
        "ties",
        "untied",
        "untied_config",
    ),
    *("norms", "scales", "fixed", "buffers", "notes", "config"),
)
Pairs = tuple[tuple[str, str | None], ...]
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def load_spec(path: Path | str) -> Spec:
    """Read a spec file.

    Args:
        path: The file.

    Returns:
        The spec.

    Raises:
        SpecError: Lists every fault with its key; a bad axes string is shown with the position.

    Example:
        >>> from pathlib import Path
        >>> from regauge.checkpoints.spec_files import dump_spec
        >>> _ = Path("gpt2.spec").write_text(dump_spec(regauge.spec_of(model)))
        >>> regauge.load_spec("gpt2.spec").family
        'gpt2'
    """
    try:
        text = read_document(Path(path), SPEC_BYTES, SpecError).decode("utf-8")
    except (CheckpointError, UnicodeDecodeError) as error:
        raise SpecError(
            f"{path} cannot be read: {error}", hint="a spec file is TOML text in UTF-8"
        ) from error
    return parse_spec(text, str(path))


def parse_spec(text: str, where: str = "spec file") -> Spec:
    """Parse the text of a spec file.

    Args:
        text: The text.
        where: The name of the file in errors.

    Raises:
        SpecError: Lists every fault with its key.
    """
    if len(text) > SPEC_BYTES:
        raise SpecError(
            f"{where} must have at most {SPEC_BYTES:,} characters, got {len(text):,}", hint=_HINT
        )
    try:
        file = tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # TOMLDecodeError, or a number with thousands of digits
        raise SpecError(f"{where} is not TOML: {error}", hint=_HINT) from error
    version = file.get("regauge")
    if type(version) is not int:
        raise SpecError(
            f"{where} has no format version",
            hint=f"a spec file starts with: regauge = {VERSION}",
        )
    if version > VERSION:
        raise SpecError(
            f"{where} has format version {version}; this regauge reads up to {VERSION}",
            hint="upgrade regauge",
        )
    reader = _Reader(file)
    spec = reader.spec()
    faults = [
        *reader.faults,
        *(f for f in check_spec(spec, complete=not reader.faults) if f.name not in reader.faulty),
    ]
    if faults:
        lines = [
            line
            for fault in faults[:20]
            for line in f"  {fault}".replace("\n", "\n    ").splitlines()
        ]
        omitted = [f"  ... and {len(faults) - 20} more"] if len(faults) > 20 else []
        raise SpecError("\n".join([f"{where} is not a spec", *lines, *omitted]), hint=_HINT)
    return spec


class _Reader:
    """One pass over a parsed file.

    Attributes:
        file: The parsed TOML.
        faults: The faults so far.
        faulty: The names in `faults`, so that none is reported twice.
        repeat: The repeat variables.
        names: The number of names so far, after expansion.
    """

    def __init__(self, file: Mapping[str, Any]) -> None:
        self.file = file
        self.faults: list[Fault] = []
        self.faulty: set[str] = set()
        self.repeat: dict[str, int] = {}
        self.names = 0

    def fault(self, name: str, text: str) -> None:
        """Record a fault."""
        self.faults.append(Fault(name, text))
        self.faulty.add(name)

    def spec(self) -> Spec:
        """Read all fields; the spec is usable only if no fault was recorded."""
        self.check_fields("", self.file, _FIELDS)
        for variable, n in self.table("repeat").items():
            if type(n) is int and 0 < n <= 10_000 and variable.isidentifier():
                self.repeat[variable] = n
            else:
                self.fault(
                    "repeat",
                    f"repeat.{variable} must be an integer from 1 to 10000, got {_abbreviate(n)}",
                )
        family = self.file.get("family")
        if not isinstance(family, str) or not family:
            self.fault("family", 'the file has no "family": a name for this kind of model')
        spaces = dict(self.spaces())
        tensors, parts = self.tensors()
        return Spec(
            family=str(family),
            spaces=spaces,
            tensors=tensors,
            parts=parts,
            ties=dict(self.strings("ties")),
            untied=dict(self.numbers("untied")),
            untied_config=self.json_table("untied_config"),
            outputs=dict(self.axes("outputs", self.table("outputs"))),
            norms=tuple(self.norms()),
            scales=tuple(self.scales()),
            fixed=dict(self.numbers("fixed")),
            buffers=self.patterns(),
            notes=tuple(self.string_list("notes", self.file.get("notes", []))),
            config=self.json_table("config"),
        )

    def check_fields(self, key: str, table: Mapping[str, Any], fields: tuple[str, ...]) -> None:
        """Record a fault for each unknown field; `key` is the prefix in messages."""
        for field in table:
            if field not in fields:
                self.fault(field, f'unknown field "{key}{field}"; fields are {", ".join(fields)}')

    def table(self, key: str) -> dict[str, Any]:
        """Return a table of the file, empty if it is absent."""
        value = self.file.get(key, {})
        if isinstance(value, dict):
            return value
        self.fault(key, f"{key} must be a table, got {_abbreviate(value)}")
        return {}

    def json_table(self, key: str) -> dict[str, Any]:
        """Return a table of JSON values: config.json cannot hold TOML's dates and infinities."""
        table = self.table(key)
        for name, value in table.items():
            try:
                if not is_flat(value):
                    raise ValueError
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                self.fault(
                    key, f'{key}."{name}" is {_abbreviate(value)}, which config.json cannot hold'
                )
        return table

    def expand(self, *texts: str) -> Iterator[tuple[str, ...]]:
        """Yield the texts once for each combination of the repeat variables in the first one."""
        used = [v for v in self.repeat if "{" + v + "}" in texts[0]]
        count = math.prod(self.repeat[v] for v in used) * len(texts)
        if count > _MAX_NAMES_PER_LINE * 2:  # a tensor and its axes, a space and its parent
            self.fault(
                texts[0], f'"{texts[0]}" must expand to at most {_MAX_NAMES_PER_LINE:,} names'
            )
            return
        self.names += count
        if self.names > _MAX_NAMES:
            if "repeat" not in self.faulty:
                self.fault(
                    "repeat",
                    f"the file must expand to at most {_MAX_NAMES:,} names",
                )
            return
        for values in itertools.product(*(range(self.repeat[v]) for v in used)):
            expanded = list(texts)
            for variable, value in zip(used, values, strict=True):
                expanded = [t.replace("{" + variable + "}", str(value)) for t in expanded]
            yield tuple(expanded)

    def spaces(self) -> Iterator[tuple[str, Space]]:
        """Yield the spaces by name."""
        for key, value in self.table("spaces").items():
            if not isinstance(value, dict):
                self.fault(
                    key,
                    f'spaces."{key}" must be a table such as {{ size = 8, group = "permutation" }}',
                )
                continue
            self.check_fields(
                f'spaces."{key}".', value, ("size", "group", "over", "folded", "why", "constant")
            )
            size, over, why, constant = (
                value.get("size"),
                value.get("over"),
                value.get("why", ""),
                value.get("constant", ""),
            )
            if type(size) is not int or size < 1:
                self.fault(
                    key, f'spaces."{key}" must have an integer size >= 1, got {_abbreviate(size)}'
                )
                continue
            if not isinstance(why, str) or not isinstance(over, str | None):
                self.fault(key, f'spaces."{key}": why and over must be strings')
                continue
            if constant not in ("", "unseen", "passed"):
                self.fault(
                    key,
                    f'constant of spaces."{key}" must be "unseen" or "passed", got '
                    f"{_abbreviate(constant)}",
                )
                continue
            group, folded = (
                self.group(key, field, value.get(field)) for field in ("group", "folded")
            )
            if group is None:
                continue
            for name, parent in self.expand(key, over or ""):
                yield name, Space(size, group, parent or None, folded, why, constant)

    def group(self, key: str, field: str, name: Any) -> Any:
        """Return the group of a field; None if it is absent or unknown."""
        if name is None and field == "folded":
            return None
        if not isinstance(name, str) or name not in GROUPS:
            self.fault(
                key,
                f'{field} of spaces."{key}" must be one of {", ".join(GROUPS)}, got '
                f"{_abbreviate(name)}",
            )
            return None
        return GROUPS[name]

    def axes(self, key: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield names and axes strings of a table, expanded and checked."""
        for pattern, text in table.items():
            if not isinstance(text, str):
                self.fault(
                    pattern, f'{key}."{pattern}" must be an axes string, got {_abbreviate(text)}'
                )
                continue
            for name, axes in self.expand(pattern, text):
                try:
                    ax.parse(axes)
                except AxesError as error:
                    self.fault(name, f'{key}."{pattern}": {error}')
                    self.faulty.add(f"output {name}")
                    break
                yield name, axes

    def tensors(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the axes and the part of each tensor."""
        tensors: dict[str, str] = {}
        parts: dict[str, str] = {}
        for part, table in self.table("tensors").items():
            if part not in PARTS or not isinstance(table, dict):
                self.fault(
                    part,
                    f'tensors."{part}" is not the table of a part; parts are '
                    f"{', '.join(f'[tensors.{p}]' for p in PARTS)}",
                )
                continue
            for name, text in self.axes(f"tensors.{part}", table):
                if name in tensors:
                    self.fault(name, f'"{name}" is described twice')
                tensors[name], parts[name] = text, part
        return tensors, parts

    def strings(self, key: str) -> Iterator[tuple[str, str]]:
        """Yield the expanded entries of a table of tensor names."""
        for name, value in self.table(key).items():
            if isinstance(value, str):
                yield from ((a, b) for a, b in self.expand(name, value))
            else:
                self.fault(name, f'{key}."{name}" must be a tensor name, got {_abbreviate(value)}')

    def numbers(self, key: str) -> Iterator[tuple[str, float]]:
        """Yield the expanded entries of a table of numbers."""
        for name, value in self.table(key).items():
            if _is_number(value):
                yield from ((expanded, float(value)) for (expanded,) in self.expand(name))
            else:
                self.fault(
                    name, f'{key}."{name}" must be a finite number, got {_abbreviate(value)}'
                )

    def string_list(self, key: str, value: Any) -> list[str]:
        """Return a list of strings; `key` names it in messages."""
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return value
        self.fault(key, f"{key} must be a list of strings")
        return []

    def patterns(self) -> tuple[str, ...]:
        """Return the valid patterns of buffers."""
        valid = []
        for pattern in self.string_list("buffers", self.file.get("buffers", [])):
            try:
                compile_pattern(pattern)
                valid.append(pattern)
            except PatternError as error:
                self.fault("buffers", f"buffers: {error}")
        return tuple(valid)

    def norms(self) -> Iterator[Norm]:
        """Yield the expanded norms."""
        for i, entry in enumerate(
            self.entries("norms", ("gain", "bias", "readers", "neutral", "padded"))
        ):
            gain, bias, neutral, padded = (
                entry.get("gain"),
                entry.get("bias"),
                entry.get("neutral", 1.0),
                entry.get("padded", False),
            )
            readers = self.pairs(entry.get("readers"))
            types_match = (
                isinstance(bias, str | None) and _is_number(neutral) and isinstance(padded, bool)
            )
            if not isinstance(gain, str) or not types_match or readers is None:
                self.fault(
                    f"norms[{i}]",
                    f'norms[{i}] needs gain = "name", readers = [["weight", "bias"], ...], and '
                    "may have bias, neutral and padded",
                )
                continue
            yield from (
                Norm(g, b, r, float(neutral), padded)
                for g, b, r in self.expand_pairs(gain, bias, readers)
            )

    def scales(self) -> Iterator[Scale]:
        """Yield the expanded scales."""
        for i, entry in enumerate(self.entries("scales", ("gain", "writers"))):
            gain, writers = entry.get("gain"), self.pairs(entry.get("writers"))
            if not isinstance(gain, str) or writers is None:
                self.fault(
                    f"scales[{i}]",
                    f'scales[{i}] needs gain = "name" and writers = [["weight", "bias"], ...]',
                )
                continue
            yield from (Scale(g, w) for g, _, w in self.expand_pairs(gain, None, writers))

    def entries(self, key: str, fields: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return a list of tables with these fields."""
        value = self.file.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            self.fault(key, f"{key} must be a list of tables, [[{key}]]")
            return []
        for i, entry in enumerate(value):
            self.check_fields(f"{key}[{i}].", entry, fields)
        return value

    def pairs(self, value: Any) -> list[tuple[str, str]] | None:
        """Return pairs of [weight, bias] or [weight], "" for an absent bias; None if invalid."""
        is_valid = isinstance(value, list) and all(
            isinstance(p, list) and len(p) in (1, 2) and all(isinstance(n, str) and n for n in p)
            for p in value
        )
        return [(p[0], p[1] if len(p) == 2 else "") for p in value] if is_valid else None

    def expand_pairs(
        self, gain: str, bias: str | None, pairs: list[tuple[str, str]]
    ) -> Iterator[tuple[str, str | None, Pairs]]:
        """Yield gain, bias and pairs with the repeat variables expanded."""
        for gain_name, bias_name, *names in self.expand(
            gain, bias or "", *(n for pair in pairs for n in pair)
        ):
            yield (
                gain_name,
                bias_name or None,
                tuple((w, b or None) for w, b in zip(names[0::2], names[1::2], strict=True)),
            )


def _abbreviate(value: Any) -> str:
    """Format a value for an error in at most 83 characters, whatever its size and depth."""
    try:
        text = repr(value) if isinstance(value, str) else str(value)
    except (RecursionError, ValueError):  # nested too deep, or a number with thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def dump_spec(spec: Spec) -> str:
    """Return a spec as the text of a spec file, with all repeats expanded.

    Parsing the text returns an equal spec.

    Raises:
        SpecError: A tensor has no part, or the config holds a value that TOML cannot represent.
    """
    unassigned = [name for name in spec.tensors if name not in spec.parts]
    if unassigned:
        raise SpecError(
            f'"{unassigned[0]}" has no part; a spec file lists tensors by part',
            hint=f"parts are {', '.join(PARTS)}",
        )
    lines = [f"regauge = {VERSION}", f"family = {_format_string(spec.family)}"]
    for key, strings in (("buffers", spec.buffers), ("notes", spec.notes)):
        if strings:
            lines += [f"{key} = [", *(f"    {_format_string(v)}," for v in strings), "]"]
    lines += [
        "",
        "[spaces]",
        *(f"{_format_key(name)} = {_format_space(space)}" for name, space in spec.spaces.items()),
    ]
    for part in PARTS:
        lines += ["", f"[tensors.{part}]"]
        lines += [
            f"{_format_key(n)} = {_format_string(text)}"
            for n, text in spec.tensors.items()
            if spec.parts.get(n) == part
        ]
    for key in ("outputs", "ties", "untied", "untied_config", "fixed", "config"):
        table: Mapping[str, Any] = getattr(spec, key)
        if table:
            lines += [
                "",
                f"[{key}]",
                *(f"{_format_key(n)} = {_format_value(v)}" for n, v in table.items()),
            ]
    for norm in spec.norms:
        lines += ["", "[[norms]]", f"gain = {_format_string(norm.gain)}"]
        lines += [f"bias = {_format_string(norm.bias)}"] if norm.bias is not None else []
        lines += [f"readers = {_format_pairs(norm.readers)}"]
        lines += [f"neutral = {norm.neutral!r}"] if norm.neutral != 1.0 else []
        lines += ["padded = true"] if norm.padded else []
    for scale in spec.scales:
        lines += [
            "",
            "[[scales]]",
            f"gain = {_format_string(scale.gain)}",
            f"writers = {_format_pairs(scale.writers)}",
        ]
    return "\n".join(lines) + "\n"


def _format_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _format_key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _format_string(name)


def _format_space(space: Space) -> str:
    fields = {"size": str(space.size), "group": _format_string(str(space.group))}
    if space.over is not None:
        fields["over"] = _format_string(space.over)
    if space.folded is not None:
        fields["folded"] = _format_string(str(space.folded))
    if space.why:
        fields["why"] = _format_string(space.why)
    if space.constant:
        fields["constant"] = _format_string(space.constant)
    return "{ " + ", ".join(f"{k} = {v}" for k, v in fields.items()) + " }"


def _format_pairs(pairs: Pairs) -> str:
    return (
        "["
        + ", ".join(
            "[" + ", ".join(_format_string(n) for n in pair if n is not None) + "]"
            for pair in pairs
        )
        + "]"
    )


def _format_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return _format_string(value)
        case list() | tuple():
            return "[" + ", ".join(map(_format_value, value)) + "]"
        case Mapping():
            return (
                "{ "
                + ", ".join(f"{_format_key(k)} = {_format_value(v)}" for k, v in value.items())
                + " }"
            )
    raise SpecError(f"a spec file cannot hold {value!r}")

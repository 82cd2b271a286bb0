"""Spec files: the symmetry of a module of one's own, written down in TOML. `docs/formats.md`
describes the format.

`{i}` in names and axes runs over `repeat = { i = 6 }`; any other name in braces is a stack, as in
`regauge.core.spec`. Unknown fields are refused by name, and every fault of a file is reported at
once.
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
_MAX_NAMES_PER_LINE, _MAX_NAMES = (
    100_000,
    400_000,
)  # names that one line and a whole file may stand for

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
    """Read a spec file. One error lists every fault, each with its key; a bad axes string is shown
    with the place.
    """
    try:
        text = read_document(Path(path), SPEC_BYTES, SpecError).decode("utf-8")
    except (CheckpointError, UnicodeDecodeError) as error:
        raise SpecError(
            f"{path} cannot be read: {error}", hint="a spec file is TOML text in UTF-8"
        ) from error
    return parse_spec(text, str(path))


def parse_spec(text: str, where: str = "spec file") -> Spec:
    """Read the text of a spec file; `where` names it in errors."""
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
            f"{where} does not say its format version",
            hint=f"a spec file begins with: regauge = {VERSION}",
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
        more = [f"  ... and {len(faults) - 20} more"] if len(faults) > 20 else []
        raise SpecError("\n".join([f"{where} is not a spec", *lines, *more]), hint=_HINT)
    return spec


class _Reader:
    """One pass over a parsed file. What is wrong is gathered in `faults`; the names concerned in
    `blamed`, so that nothing is said twice.
    """

    def __init__(self, file: Mapping[str, Any]) -> None:
        self.file = file
        self.faults: list[Fault] = []
        self.faulty: set[str] = set()
        self.repeat: dict[str, int] = {}
        self.names = 0

    def fault(self, name: str, text: str) -> None:
        self.faults.append(Fault(name, text))
        self.faulty.add(name)

    def spec(self) -> Spec:
        self.check_fields("", self.file, _FIELDS)
        for variable, n in self.table("repeat").items():
            if type(n) is int and 0 < n <= 10_000 and variable.isidentifier():
                self.repeat[variable] = n
            else:
                self.fault(
                    "repeat",
                    f"repeat.{variable} is {_abbreviate(n)}, not a number of times (1 to 10000)",
                )
        family = self.file.get("family")
        if not isinstance(family, str) or not family:
            self.fault(
                "family", 'the file does not say its "family": a name for this kind of model'
            )
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
        for field in table:
            if field not in fields:
                self.fault(field, f'unknown field "{key}{field}"; fields are {", ".join(fields)}')

    def table(self, key: str) -> dict[str, Any]:
        value = self.file.get(key, {})
        if isinstance(value, dict):
            return value
        self.fault(key, f"{key} is not a table")
        return {}

    def json_table(self, key: str) -> dict[str, Any]:
        """A table of what config.json can hold: TOML's dates and infinities are not among it."""
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
        """These texts, once for every value of the repeat variables that the first one holds."""
        used = [v for v in self.repeat if "{" + v + "}" in texts[0]]
        count = math.prod(self.repeat[v] for v in used) * len(texts)
        if count > _MAX_NAMES_PER_LINE * 2:  # a tensor and its axes, a space and its parent
            self.fault(texts[0], f'"{texts[0]}" stands for more than {_MAX_NAMES_PER_LINE} names')
            return
        self.names += count
        if self.names > _MAX_NAMES:
            if "repeat" not in self.faulty:
                self.fault(
                    "repeat",
                    f"the file must stand for at most {_MAX_NAMES:,} names, repeats written out",
                )
            return
        for values in itertools.product(*(range(self.repeat[v]) for v in used)):
            out = list(texts)
            for variable, value in zip(used, values, strict=True):
                out = [t.replace("{" + variable + "}", str(value)) for t in out]
            yield tuple(out)

    def spaces(self) -> Iterator[tuple[str, Space]]:
        for key, value in self.table("spaces").items():
            if not isinstance(value, dict):
                self.fault(
                    key,
                    f'spaces."{key}" is not a table such as {{ size = 8, group = "permutation" }}',
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
                self.fault(key, f'spaces."{key}" has size {_abbreviate(size)}')
                continue
            if not isinstance(why, str) or not isinstance(over, str | None):
                self.fault(key, f'spaces."{key}": why and over are strings')
                continue
            if constant not in ("", "unseen", "passed"):
                self.fault(
                    key,
                    f'spaces."{key}" has constant {_abbreviate(constant)}; it is "unseen" or '
                    '"passed"',
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
        if name is None and field == "folded":
            return None
        if not isinstance(name, str) or name not in GROUPS:
            self.fault(
                key,
                f'spaces."{key}" has {field} {_abbreviate(name)}; groups are {", ".join(GROUPS)}',
            )
            return None
        return GROUPS[name]

    def axes(self, key: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for pattern, text in table.items():
            if not isinstance(text, str):
                self.fault(pattern, f'{key}."{pattern}" is {_abbreviate(text)}, not an axes string')
                continue
            for name, one in self.expand(pattern, text):
                try:
                    ax.parse(one)
                except AxesError as error:
                    self.fault(name, f'{key}."{pattern}": {error}')
                    self.faulty.add(f"output {name}")
                    break
                yield name, one

    def tensors(self) -> tuple[dict[str, str], dict[str, str]]:
        tensors: dict[str, str] = {}
        parts: dict[str, str] = {}
        for part, table in self.table("tensors").items():
            if part not in PARTS or not isinstance(table, dict):
                self.fault(
                    part,
                    f'tensors."{part}" is not a part; parts are '
                    f"{', '.join(f'[tensors.{p}]' for p in PARTS)}",
                )
                continue
            for name, text in self.axes(f"tensors.{part}", table):
                if name in tensors:
                    self.fault(name, f'"{name}" is described twice')
                tensors[name], parts[name] = text, part
        return tensors, parts

    def strings(self, key: str) -> Iterator[tuple[str, str]]:
        for name, value in self.table(key).items():
            if isinstance(value, str):
                yield from ((a, b) for a, b in self.expand(name, value))
            else:
                self.fault(name, f'{key}."{name}" is {_abbreviate(value)}, not a tensor name')

    def numbers(self, key: str) -> Iterator[tuple[str, float]]:
        for name, value in self.table(key).items():
            if _is_number(value):
                yield from ((one, float(value)) for (one,) in self.expand(name))
            else:
                self.fault(name, f'{key}."{name}" is {_abbreviate(value)}, not a number')

    def string_list(self, key: str, value: Any) -> list[str]:
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            return value
        self.fault(key, f"{key} is not a list of strings")
        return []

    def patterns(self) -> tuple[str, ...]:
        out = []
        for pattern in self.string_list("buffers", self.file.get("buffers", [])):
            try:
                compile_pattern(pattern)
                out.append(pattern)
            except PatternError as error:
                self.fault("buffers", f"buffers: {error}")
        return tuple(out)

    def norms(self) -> Iterator[Norm]:
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
            right = (
                isinstance(bias, str | None) and _is_number(neutral) and isinstance(padded, bool)
            )
            if not isinstance(gain, str) or not right or readers is None:
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
        value = self.file.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            self.fault(key, f"{key} is not a list of tables, [[{key}]]")
            return []
        for i, entry in enumerate(value):
            self.check_fields(f"{key}[{i}].", entry, fields)
        return value

    def pairs(self, value: Any) -> list[tuple[str, str]] | None:
        """[weight, bias] or [weight]; an absent bias is an empty string here."""
        good = isinstance(value, list) and all(
            isinstance(p, list) and len(p) in (1, 2) and all(isinstance(n, str) and n for n in p)
            for p in value
        )
        return [(p[0], p[1] if len(p) == 2 else "") for p in value] if good else None

    def expand_pairs(
        self, gain: str, bias: str | None, pairs: list[tuple[str, str]]
    ) -> Iterator[tuple[str, str | None, Pairs]]:
        for one, shift, *names in self.expand(
            gain, bias or "", *(n for pair in pairs for n in pair)
        ):
            yield (
                one,
                shift or None,
                tuple((w, b or None) for w, b in zip(names[0::2], names[1::2], strict=True)),
            )


def _abbreviate(value: Any) -> str:
    """Show a value of a file in an error, whatever its size and depth."""
    try:
        text = repr(value) if isinstance(value, str) else str(value)
    except (RecursionError, ValueError):  # nested too deep, or a number with thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    )  # finite, and a float


def dump_spec(spec: Spec) -> str:
    """A spec as the text of a spec file, everything written out. `load_spec` of it gives an equal
    spec.
    """
    homeless = [name for name in spec.tensors if name not in spec.parts]
    if homeless:
        raise SpecError(
            f'"{homeless[0]}" is in no part, and a spec file lists tensors by part',
            hint=f"parts are {', '.join(PARTS)}",
        )
    lines = [f"regauge = {VERSION}", f"family = {_format_string(spec.family)}"]
    for key, listed in (("buffers", spec.buffers), ("notes", spec.notes)):
        if listed:
            lines += [f"{key} = [", *(f"    {_format_string(v)}," for v in listed), "]"]
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

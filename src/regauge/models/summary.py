"""Summary of a model's symmetry, as JSON data and as text."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.files import format_bytes
from regauge.checkpoints.headers import FLOATS
from regauge.checkpoints.reader import Checkpoint
from regauge.core.check import Fault
from regauge.core.fold import folded_spec
from regauge.core.spec import Spec, stored_tensors
from regauge.errors import SpecError
from regauge.models.sources import Model, discover_source, find_faults, require_fit, resolve

if TYPE_CHECKING:
    from regauge.models.discovery import Discovery
    from regauge.models.discovery.explain import Reason
    from regauge.models.sources import Source

VERSION = 1


@dataclass(frozen=True, eq=False)
class Inspection:
    """The symmetry of a model: its parts, its spaces with their groups, and the reasons.

    Attributes:
        model: The model.
        faults: Every mismatch of its tensors and its spec.
    """

    model: Model
    faults: Sequence[Fault]

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON data."""
        facts = summarize(self.model.checkpoint, self.model.spec)
        facts["faults"] = [str(fault) for fault in self.faults]
        found = self.model.discovery
        if found is not None:
            facts["discovered"] = {
                "error": found.error,
                "folded_error": found.folded_error,
                "verified_on": found.verified_on,
                "dropped": list(found.dropped),
            }
        return facts

    def explain(self, name: str) -> dict[str, Any]:
        """Explain the group of a space, or why nothing acts on an axis (see `explain_space`).

        Raises:
            SpecError: The name is not a space, or the symmetry was not discovered.
        """
        if self.model.discovery is None:
            raise SpecError(
                f"the symmetry of {self.model.name} is that of its family, without reasons",
                hint="inspect it with discover=True",
            )
        return explain_space(self.model.discovery, name)

    def require_fit(self) -> None:
        """Raise unless the tensors match the spec."""
        require_fit(self.model.checkpoint, self.model.spec, self.faults)

    def format(self, *, verbose: bool = False) -> str:
        """Format the summary as text, with every tensor if `verbose` is set."""
        checkpoint, spec, found = self.model.checkpoint, self.model.spec, self.model.discovery
        rows = list(tensor_rows(spec, checkpoint)) if verbose else []
        text = format_summary(self.to_dict(), rows)
        if found is None:
            return text
        folded = (
            ""
            if found.folded_error is None
            else (f", {found.folded_error:.1e} with its norms folded")
        )
        return (
            f"{text}\ndiscovered, and verified on {found.verified_on}: a random element of every "
            f"space changes its outputs by {found.error:.1e}{folded}"
        )

    def __str__(self) -> str:
        return self.format()

    def __repr__(self) -> str:
        return (
            f"<{self.model.name}: {self.model.spec.family}, {len(self.model.spec.spaces)} spaces>"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def inspect(
    source: Source, *, spec: Spec | str | Path | None = None, discover: bool = False
) -> Inspection:
    """Return the symmetry of a model: its parts, its spaces and their groups.

    Args:
        source: A path, a hub id, a checkpoint, a module, or a state dict with `spec`.
        spec: A spec or spec file. Default: that of the model's family.
        discover: Infer the symmetry from the model's graph, even for a known family.

    Returns:
        The summary, with `to_dict()`, `explain(space)` and the `faults` of the model.

    Example:
        >>> # print(regauge.models.summary.inspect("model"))
    """
    model = discover_source(source) if discover else resolve(source, spec)
    return Inspection(model, find_faults(model.checkpoint, model.spec))


def explain_space(discovery: Discovery, name: str) -> dict[str, Any]:
    """Explain the group of a space, or why nothing acts on an axis of a parameter ("name[0]", or
    all axes of a name).
    """
    spec = discovery.spec
    frozen = {
        axis: reasons
        for axis, reasons in discovery.frozen.items()
        if name in (axis, axis.rpartition("[")[0])
    }
    if name in spec.spaces:
        return {
            "name": name,
            "group": _describe_group(spec, name),
            "reasons": [_reason_to_dict(r) for r in discovery.reasons.get(name, ())],
        }
    if frozen:
        return {
            "name": name,
            "group": "nothing acts",
            "reasons": [_reason_to_dict(r) for reasons in frozen.values() for r in reasons],
        }
    raise SpecError(
        f'--explain must name a space or an axis without a group, got "{name}"',
        hint=f"spaces are {', '.join(list(spec.spaces)[:8])}, ...; an axis is written as "
        "h.0.weight[1]",
    )


def _describe_group(spec: Spec, name: str) -> str:
    """Describe the group of a space in a few words."""
    space = spec.spaces[name]
    over = f", one for each position of {space.over}" if space.over else ""
    folded = f"; with the norms folded, {space.folded}" if space.folded else ""
    return f"{space.group} on {space.size}{over}{folded}"


def _reason_to_dict(reason: Reason) -> dict[str, Any]:
    """Return a reason as a dict for JSON."""
    places = [
        {"file": p.file, "line": p.line, "code": p.code, "module": p.module}
        for p in reason.locations
    ]
    return {
        "operator": reason.operator_name,
        "does": reason.effect,
        "keeps": reason.preserves,
        "places": places,
        "text": str(reason),
    }


@dataclass(frozen=True)
class SpaceRun:
    """Spaces that differ only in their layer: `ffn.0..31`."""

    name: str
    members: tuple[str, ...]


def group_spaces(spec: Spec) -> list[SpaceRun]:
    """Group spaces that differ only in their layer; parents of the same layer count as equal."""
    groups: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
    for name, space in spec.spaces.items():
        match = re.fullmatch(r"(.*?)(\d+)", name)
        prefix, layer = (match.group(1), int(match.group(2))) if match else (name, -1)
        over = space.over
        if over is not None and match and over.endswith(match.group(2)):
            over = over[: -len(match.group(2))] + "#"
        key = (
            prefix,
            space.size,
            str(space.group),
            over,
            str(space.folded),
            space.why,
            spec.count(name),
            name in spec.visible,
        )
        groups.setdefault(key, []).append((layer, name))
    runs: list[SpaceRun] = []
    for (prefix, *_), entries in groups.items():
        entries.sort()
        if entries[0][0] < 0:
            runs.append(SpaceRun(entries[0][1], (entries[0][1],)))
            continue
        label, start = "", 0
        for i in range(1, len(entries) + 1):
            if i == len(entries) or entries[i][0] != entries[i - 1][0] + 1:
                first, last = entries[start][0], entries[i - 1][0]
                label += ("," if label else "") + (
                    str(first) if first == last else f"{first}..{last}"
                )
                start = i
        runs.append(SpaceRun(prefix + label, tuple(name for _, name in entries)))
    return runs


def summarize(checkpoint: Checkpoint, spec: Spec) -> dict[str, Any]:
    """Return the output of `regauge inspect` as JSON data."""
    entries = stored_tensors(spec)
    covered = [n for n in checkpoint if n in entries]
    numel = {n: e.numel for n, e in checkpoint.entries.items()}
    parts = {}
    for part in ("embed", "backbone", "head"):
        names = [n for n in covered if spec.parts.get(entries[n].pattern) == part]
        parts[part] = {"tensors": len(names), "parameters": sum(numel[n] for n in names)}
    folded = folded_spec(spec)
    spaces = [_summarize_run(spec, folded, run) for run in group_spaces(spec)]
    buffers = [n for n in checkpoint if n not in entries and spec.is_buffer(n)]
    return {
        "version": VERSION,
        "path": str(checkpoint.path),
        "family": spec.family,
        "dtypes": sorted(set(checkpoint.dtypes.values())),
        "files": len(checkpoint.files),
        "bytes": sum(e.nbytes for e in checkpoint.entries.values()),
        "parts": parts,
        "parameters": {
            "all": sum(n for name, n in numel.items() if name not in buffers),
            "covered": sum(numel[n] for n in covered),
            "buffers": sum(numel[n] for n in buffers),
        },
        "spaces": spaces,
        "bits": sum(s["bits"] for s in spaces),
        "dimensions": sum(s["dimensions"] for s in spaces),
        "visible": sorted(spec.visible),
        "outputs": dict(spec.outputs),
        "ties": dict(spec.ties),
        "folds": {
            "norms": len(spec.norms),
            "scales": len(spec.scales),
            "done": _is_folded(checkpoint, folded),
        },
        "notes": list(spec.notes),
    }


def _is_folded(checkpoint: Checkpoint, folded: Spec) -> bool:
    """Return whether every gain has the value that folding gives it. Compares raw bits, so that
    torch is not loaded.
    """
    return bool(folded.fixed) and all(
        name in checkpoint and bool((_values(checkpoint, name) == value).all())
        for name, value in folded.fixed.items()
    )


def _values(checkpoint: Checkpoint, name: str) -> Any:
    """Return the values of a tensor as a NumPy array."""
    bits, dtype = checkpoint.bits[name], checkpoint.entries[name].dtype
    if dtype == "BF16":  # the upper half of a float32
        return (bits.astype("<u4") << 16).view("<f4")
    return bits.view(f"<f{bits.itemsize}") if dtype in FLOATS else bits


def _summarize_run(spec: Spec, folded: Spec, run: SpaceRun) -> dict[str, Any]:
    """Return the summary of a run of spaces."""
    first = run.members[0]
    space = spec.spaces[first]
    copies = sum(spec.count(m) for m in run.members)
    return {
        "name": run.name,
        "members": list(run.members),
        "size": space.size,
        "group": str(space.group),
        "over": space.over
        if len(run.members) == 1
        else None
        if space.over is None
        else re.sub(r"\d+$", "*", space.over),
        "folded": None
        if folded.spaces[first].group == space.group
        else str(folded.spaces[first].group),
        "why": space.why,
        "visible": first in spec.visible,
        "copies": copies,
        "bits": space.group.bits(space.size) * copies,
        "dimensions": space.group.dim(space.size) * copies,
    }


def format_summary(facts: dict[str, Any], tensors: list[tuple[str, ...]]) -> str:
    """Format a summary as text; `tensors` are rows of `tensor_rows`."""
    parameters = facts["parameters"]
    files = f"{facts['files']} file{'s' * (facts['files'] != 1)}, {format_bytes(facts['bytes'])}"
    lines = [
        (
            f"{facts['path']}: {facts['family']}, {format_count(parameters['all'])} parameters, "
            f"{', '.join(facts['dtypes'])}, {files}"
        ),
        "",
        format_columns(
            [
                ("part", "tensors", "parameters"),
                *(
                    (p, f"{v['tensors']}", f"{v['parameters']:,}")
                    for p, v in facts["parts"].items()
                ),
            ],
            right=(1, 2),
        ),
        "",
    ]
    head = ("space", "size", "copies", "group", "bits", "dimensions", "why it is not larger")
    rows = [
        (
            s["name"] + " (visible)" * s["visible"],
            f"{s['size']}",
            f"{s['copies']}",
            s["group"],
            f"{s['bits']:,.0f}",
            f"{s['dimensions']:,}",
            _format_why(s),
        )
        for s in facts["spaces"]
    ]
    total = ("all", "", "", "", f"{facts['bits']:,.0f}", f"{facts['dimensions']:,}", "")
    lines += [format_columns([head, *rows, total], right=(1, 2, 4, 5)), ""]
    lines.append(
        f"key space: 2^{facts['bits']:,.0f} discrete choices "
        f"(10^{facts['bits'] * math.log10(2):,.0f}), {facts['dimensions']:,} continuous parameters"
    )
    if facts["visible"]:
        outputs = ", ".join(f"{name} [{text}]" for name, text in facts["outputs"].items())
        lines.append(
            f"visible at the outputs: {', '.join(facts['visible'])} in {outputs}; transforming it "
            "changes the outputs"
        )
    folds = facts["folds"]
    if folds["norms"] or folds["scales"]:
        label, verb = (
            ("folded already", "is, with --fold,") if folds["done"] else ("folding", "would be")
        )
        gained = "; ".join(
            f"{s['name']} {verb} {s['folded']}" for s in facts["spaces"] if s["folded"]
        )
        lines.append(
            f"{label} ({folds['norms']} norms, {folds['scales']} scales): "
            f"{gained or 'gives no gained group'}"
        )
    for alias, target in facts["ties"].items():
        lines.append(f"tied: {alias} repeats {target}")
    lines += [f"note: {note}" for note in facts["notes"]]
    buffers = f" and {parameters['buffers']:,} numbers in buffers" if parameters["buffers"] else ""
    lines.append(f"covered: {parameters['covered']:,} of {parameters['all']:,} parameters{buffers}")
    if tensors:
        lines += ["", format_columns([("tensor", "shape", "axes"), *tensors])]
    return "\n".join(lines)


def _format_why(space: dict[str, Any]) -> str:
    """Format the reason of a space's group."""
    folded = f"; folded: {space['folded']}" if space["folded"] else ""
    over = f" (one per index of {space['over']})" if space["over"] else ""
    return f"{space['why']}{folded}{over}"


def tensor_rows(spec: Spec, checkpoint: Checkpoint) -> Iterator[tuple[str, ...]]:
    """Yield the name, shape and axes of every tensor."""
    for name, entry in stored_tensors(spec).items():
        if name in checkpoint:
            yield name, "x".join(map(str, checkpoint.shapes[name])), entry.axes


def format_count(n: int) -> str:
    """Format a number with a unit: 15.2 M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)


def format_columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Align rows as text. Columns in `right` are right-aligned; the last column is not padded."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if i in right else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)

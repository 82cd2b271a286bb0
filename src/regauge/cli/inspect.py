"""`regauge inspect`: what a model's symmetry is, as a table or as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regauge.cli import options
from regauge.cli.console import columns, data, data_json

if TYPE_CHECKING:
    from regauge.checkpoint import Checkpoint
    from regauge.spec import Spec

VERSION = 1


def inspect(model: options.Model, spec: options.SpecFile = None, json: options.Json = False, verbose: options.Verbose = 0) -> int:
    """Show a model's symmetry: its parts, its spaces with their groups, what holds, what does not and why."""
    from regauge.cli.model import faults_of, open_model, require_fit

    checkpoint, described = open_model(model, spec)
    faults = faults_of(checkpoint, described)
    facts = facts_of(checkpoint, described)
    facts["faults"] = [str(f) for f in faults]
    if json:
        data_json(facts)
    elif not faults:
        data(text_of(facts, [] if verbose == 0 else list(_rows_of_tensors(described, checkpoint))))
    require_fit(checkpoint, described, faults)
    return 0


@dataclass(frozen=True)
class Run:
    """Spaces alike in all but their layer: `ffn.0..31`."""

    name: str
    members: tuple[str, ...]


def runs(spec: Spec) -> list[Run]:
    """Spaces that say the same, joined over consecutive layers. A parent of the same layer counts as the same."""
    found: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
    for name, space in spec.spaces.items():
        match = re.fullmatch(r"(.*?)(\d+)", name)
        prefix, layer = (match.group(1), int(match.group(2))) if match else (name, -1)
        over = space.over
        if over is not None and match and over.endswith(match.group(2)):
            over = over[: -len(match.group(2))] + "#"
        key = (prefix, space.size, str(space.group), over, str(space.folded), space.why, spec.count(name), name in spec.visible)
        found.setdefault(key, []).append((layer, name))
    out: list[Run] = []
    for (prefix, *_), entries in found.items():
        entries.sort()
        if entries[0][0] < 0:
            out.append(Run(entries[0][1], (entries[0][1],)))
            continue
        label, start = "", 0
        for i in range(1, len(entries) + 1):
            if i == len(entries) or entries[i][0] != entries[i - 1][0] + 1:
                first, last = entries[start][0], entries[i - 1][0]
                label += ("," if label else "") + (str(first) if first == last else f"{first}..{last}")
                start = i
        out.append(Run(prefix + label, tuple(name for _, name in entries)))
    return out


def facts_of(checkpoint: Checkpoint, spec: Spec) -> dict[str, Any]:
    """Everything that `inspect` says, as JSON."""
    from regauge.fold import folded_spec
    from regauge.spec import stored

    entries = stored(spec)
    covered = [n for n in checkpoint if n in entries]
    numel = {n: e.numel for n, e in checkpoint.entries.items()}
    parts = {}
    for part in ("embed", "backbone", "head"):
        names = [n for n in covered if spec.parts.get(entries[n].pattern) == part]
        parts[part] = {"tensors": len(names), "parameters": sum(numel[n] for n in names)}
    folded = folded_spec(spec)
    spaces = [_space(spec, folded, run) for run in runs(spec)]
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
        "folds": {"norms": len(spec.norms), "scales": len(spec.scales)},
        "notes": list(spec.notes),
    }


def _space(spec: Spec, folded: Spec, run: Run) -> dict[str, Any]:
    first = run.members[0]
    space = spec.spaces[first]
    times = sum(spec.count(m) for m in run.members)
    return {
        "name": run.name,
        "members": list(run.members),
        "size": space.size,
        "group": str(space.group),
        "over": space.over if len(run.members) == 1 else None if space.over is None else re.sub(r"\d+$", "*", space.over),
        "folded": None if folded.spaces[first].group == space.group else str(folded.spaces[first].group),
        "why": space.why,
        "visible": first in spec.visible,
        "copies": times,
        "bits": space.group.bits(space.size) * times,
        "dimensions": space.group.dim(space.size) * times,
    }


def text_of(facts: dict[str, Any], tensors: list[tuple[str, ...]]) -> str:
    parameters = facts["parameters"]
    files = f"{facts['files']} file{'s' * (facts['files'] != 1)}, {facts['bytes'] / 1e6:.1f} MB"
    lines = [
        f"{facts['path']}: {facts['family']}, {count(parameters['all'])} parameters, {', '.join(facts['dtypes'])}, {files}",
        "",
        columns(
            [("part", "tensors", "parameters"), *((p, f"{v['tensors']}", f"{v['parameters']:,}") for p, v in facts["parts"].items())], right=(1, 2)
        ),
        "",
    ]
    head = ("space", "size", "copies", "group", "bits", "dimensions", "why it is not larger")
    rows = [
        (s["name"] + " (visible)" * s["visible"], f"{s['size']}", f"{s['copies']}", s["group"], f"{s['bits']:,.0f}", f"{s['dimensions']:,}", _why(s))
        for s in facts["spaces"]
    ]
    total = ("all", "", "", "", f"{facts['bits']:,.0f}", f"{facts['dimensions']:,}", "")
    lines += [columns([head, *rows, total], right=(1, 2, 4, 5)), ""]
    lines.append(
        f"key space: 2^{facts['bits']:,.0f} discrete choices (10^{facts['bits'] * math.log10(2):,.0f}), {facts['dimensions']:,} continuous parameters"
    )
    if facts["visible"]:
        shown = ", ".join(f"{name} [{text}]" for name, text in facts["outputs"].items())
        lines.append(f"visible at the outputs: {', '.join(facts['visible'])} in {shown}; moving it moves what callers get")
    folds = facts["folds"]
    if folds["norms"] or folds["scales"]:
        gains = [s for s in facts["spaces"] if s["folded"]]
        larger = "; ".join(f"{s['name']} would be {s['folded']}" for s in gains)
        lines.append(f"folding ({folds['norms']} norms, {folds['scales']} scales): {larger or 'gives no larger group'}")
    for alias, target in facts["ties"].items():
        lines.append(f"tied: {alias} repeats {target}")
    lines += [f"note: {note}" for note in facts["notes"]]
    buffers = f" and {parameters['buffers']:,} numbers in buffers" if parameters["buffers"] else ""
    lines.append(f"covered: {parameters['covered']:,} of {parameters['all']:,} parameters{buffers}")
    if tensors:
        lines += ["", columns([("tensor", "shape", "axes"), *tensors])]
    return "\n".join(lines)


def _why(space: dict[str, Any]) -> str:
    folded = f"; folded: {space['folded']}" if space["folded"] else ""
    over = f" (one per place of {space['over']})" if space["over"] else ""
    return f"{space['why']}{folded}{over}"


def _rows_of_tensors(spec: Spec, checkpoint: Checkpoint) -> Iterator[tuple[str, ...]]:
    from regauge.spec import stored

    for name, entry in stored(spec).items():
        if name in checkpoint:
            yield name, "x".join(map(str, checkpoint.shapes[name])), entry.axes


def count(n: int) -> str:
    """A number as people say it: 15.2 M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)

"""Writing a checkpoint that an element moves: what `move` and `match` have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.cli.console import say, warn, writing_to

if TYPE_CHECKING:
    from regauge.checkpoint import Checkpoint
    from regauge.elements import Element
    from regauge.spec import Spec
    from regauge.writing import Plan, Written


@dataclass(frozen=True)
class Moving:
    """A checkpoint that is to be moved: as it is, or prepared, with its norms folded or gauges fixed first. `described` is the spec of `state`,
    `spec` that of the file."""

    checkpoint: Checkpoint
    spec: Spec
    described: Spec
    state: Mapping[str, Any]
    prepared: tuple[str, ...] = ()

    def thunks(self, g: Element, part: str | None = None) -> dict[str, Callable[[], Any]]:
        """What makes each tensor of the output."""
        from regauge.action import apply_lazily, only_gathers
        from regauge.fold import origin

        bits = not self.prepared and only_gathers(g)  # permutations look at no value, so torch is not even loaded
        made = apply_lazily(g, self.checkpoint.bits if bits else self.state, part)
        if self.prepared:  # rounded once, and only now
            made = {name: partial(_rounded, make, self.checkpoint[origin(self.spec, self.checkpoint, name)].dtype) for name, make in made.items()}
        return made

    def plan(self, out: Path, g: Element, thunks: Mapping[str, Callable[[], Any]], part: str | None = None, **small: bytes) -> Plan:
        """The files to be written: the checkpoint's own, moved, and small ones by their bytes (`match.json` as match_json)."""
        from regauge.action import moves
        from regauge.fold import origin
        from regauge.writing import is_file_name, plan_checkpoint

        sources = {m.name: m.source for m in moves(g, part)}
        origins = {name: origin(self.spec, self.checkpoint, sources.get(name, name)) for name in thunks}
        recipe = recipe_of(g, self.spec, self.prepared, part)
        plan = plan_checkpoint(out, self.checkpoint, thunks, origins=origins, config_changes=self.described.config, recipe=recipe)
        names = {key.replace("_", "."): value for key, value in small.items()}
        if is_file_name(out):
            names = {f"{out.stem}.{name}": value for name, value in names.items()}
        copies = {name: path for name, path in plan.copies.items() if name not in names}
        return replace(plan, small={**plan.small, **names}, copies=copies)


def moving(checkpoint: Checkpoint, spec: Spec, fold: bool, fix: Sequence[str] = ()) -> Moving:
    """A checkpoint and its spec, folded or not, and with these gauges fixed. Nothing is read but the norms, and what a balance needs."""
    if not fold and not fix:
        return Moving(checkpoint, spec, spec, checkpoint)
    from regauge.checkpoint import Lazy
    from regauge.fold import fold_lazily

    state: Mapping[str, Any] = checkpoint
    described = spec
    if fold:
        described, folded = fold_lazily(spec, checkpoint, rounded=False)
        state = Lazy(folded, partial(_made, folded))
    if fix:
        from regauge.matching.gauges import fix_lazily

        fixed = fix_lazily(described, state, fix)
        state = Lazy(fixed, partial(_made, fixed))
    return Moving(checkpoint, spec, described, state, (*(["fold"] if fold else []), *fix))


def moving_adapter(source: str, g: Element) -> tuple[Moving, Element]:
    """A LoRA adapter of the element's model, and the element over it."""
    from regauge.adapters import element_for, require_lora
    from regauge.checkpoint import open_checkpoint

    adapter = open_checkpoint(source)
    require_lora(adapter.path if adapter.is_folder else adapter.path.parent)
    h = element_for(g, adapter.entries)
    return Moving(adapter, h.spec, h.spec, adapter, False), h


def write_moved(out: Path, plan: Plan, thunks: Mapping[str, Callable[[], Any]], what: str, resume: bool, threads: int | None) -> Written:
    """Write a plan under a progress bar, and tell what is worth telling."""
    from regauge.writing import write_plan

    with writing_to(out, what) as progress:
        written = write_plan(out, plan, thunks, progress=progress, resume=resume, threads=threads)
    if written.nonfinite:
        names = ", ".join(written.nonfinite[:5]) + (f" and {len(written.nonfinite) - 5} more" if len(written.nonfinite) > 5 else "")
        warn(f"NaN or Inf in {len(written.nonfinite)} tensors: {names}")
    if written.left:
        say(f"not carried over (weights in other formats, elements): {', '.join(written.left)}")
    if written.resumed:
        say(f"kept from the interrupted run: {', '.join(sorted(written.resumed))}")
    return written


def summary(g: Element) -> str:
    """Which spaces an element moves, by their roots."""
    roots: dict[str, int] = {}
    for name in g.members:
        roots[name.split(".")[0]] = roots.get(name.split(".")[0], 0) + 1
    return ", ".join(f"{root} ({n})" if n > 1 else root for root, n in roots.items()) or "nothing"


def recipe_of(g: Element, unfolded: Spec, prepared: Sequence[str], part: str | None) -> bytes:
    """What, besides the source, determines the values that are written."""
    from regauge import __version__
    from regauge.specfile import dump_spec

    whole = hashlib.sha256(f"version={__version__} prepared={','.join(prepared)} part={part or ''}\n{dump_spec(unfolded)}".encode())
    for name in sorted(g.members):
        member = g.members[name]
        whole.update(name.encode() + type(member).__name__.encode())
        for key in ("index", "scale", "values", "factor", "layout"):
            value = getattr(member, key, None)
            if value is not None:
                whole.update(key.encode() + (value.encode() if isinstance(value, str) else value.tobytes()))
    return whole.digest()


def _made(thunks: Mapping[str, Callable[[], Any]], name: str) -> Any:
    return thunks[name]()


def _rounded(make: Callable[[], Any], dtype: Any) -> Any:
    return make().to(dtype)

"""A checkpoint that an element is to move, as it is or with its norms folded: what makes each tensor, and the plan of the files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regauge.checkpoint import Checkpoint
    from regauge.elements import Element
    from regauge.spec import Spec
    from regauge.writing import Plan


@dataclass(frozen=True)
class Moving:
    """A checkpoint that is to be moved: as it is, or with its norms folded first. `described` is the spec of `state`, `spec` that of the file."""

    checkpoint: Checkpoint
    spec: Spec
    described: Spec
    state: Mapping[str, Any]
    fold: bool

    def thunks(self, g: Element, part: str | None = None) -> dict[str, Callable[[], Any]]:
        """What makes each tensor of the output."""
        from regauge.action import apply_lazily, is_exact_on
        from regauge.fold import origin

        bits = not self.described.fixed and is_exact_on(g)  # permutations and signs look at no value, so torch is not even loaded
        made = apply_lazily(g, self.checkpoint.bits if bits else self.state, part)
        if self.fold:  # rounded once, and only now
            made = {name: partial(_rounded, make, self.checkpoint[origin(self.spec, self.checkpoint, name)].dtype) for name, make in made.items()}
        return made

    def plan(self, out: Path, g: Element, thunks: Mapping[str, Callable[[], Any]], part: str | None = None, **small: bytes) -> Plan:
        """The files to be written: the checkpoint's own, moved, and small ones by their bytes (`match.json` as match_json)."""
        from regauge.action import moves
        from regauge.fold import origin
        from regauge.writing import is_file_name, plan_checkpoint

        sources = {m.name: m.source for m in moves(g, part)}
        origins = {name: origin(self.spec, self.checkpoint, sources.get(name, name)) for name in thunks}
        recipe = recipe_of(g, self.spec, self.fold, part)
        plan = plan_checkpoint(out, self.checkpoint, thunks, origins=origins, config_changes=self.described.config, recipe=recipe)
        names = {key.replace("_", "."): value for key, value in small.items()}
        if is_file_name(out):
            names = {f"{out.stem}.{name}": value for name, value in names.items()}
        copies = {name: path for name, path in plan.copies.items() if name not in names}
        return replace(plan, small={**plan.small, **names}, copies=copies)


def moving(checkpoint: Checkpoint, spec: Spec, fold: bool) -> Moving:
    """A checkpoint and its spec, folded or not. Nothing is read but the norms."""
    if not fold:
        return Moving(checkpoint, spec, spec, checkpoint, False)
    from regauge.checkpoint import Lazy
    from regauge.fold import fold_lazily

    described, folded = fold_lazily(spec, checkpoint, rounded=False)
    return Moving(checkpoint, spec, described, Lazy(folded, partial(_made, folded)), True)


def recipe_of(g: Element, unfolded: Spec, fold: bool, part: str | None) -> bytes:
    """What, besides the source, determines the values that are written."""
    from regauge import __version__
    from regauge.specfile import dump_spec

    whole = hashlib.sha256(f"version={__version__} fold={fold} part={part or ''}\n{dump_spec(unfolded)}".encode())
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

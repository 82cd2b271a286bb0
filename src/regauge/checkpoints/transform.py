"""A checkpoint that an element is to move, as it is or prepared: what makes each tensor, and the
plan of the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.files import EVERYONE

if TYPE_CHECKING:
    from regauge.checkpoints.plan import Plan
    from regauge.checkpoints.reader import Checkpoint
    from regauge.core.element import Element
    from regauge.core.spec import Spec


@dataclass(frozen=True)
class TransformSource:
    """A checkpoint that is to be moved: as it is, or prepared, with its norms folded or gauges
    fixed first. `described` is the spec of `state`, `spec` that of the file.
    """

    checkpoint: Checkpoint
    spec: Spec
    state_spec: Spec
    state: Mapping[str, Any]
    steps: tuple[str, ...] = ()

    def with_state(
        self, made: Mapping[str, Callable[[], Any]], steps: Sequence[str]
    ) -> TransformSource:
        """Return the same checkpoint with another state of the same function, and the names of the
        steps that made it.
        """
        from regauge.checkpoints.reader import LazyState

        return replace(self, state=LazyState.from_thunks(made), steps=(*self.steps, *steps))

    def thunks(self, g: Element, part: str | None = None) -> dict[str, Callable[[], Any]]:
        """What makes each tensor of the output."""
        from regauge.core.action import apply_lazily, is_exact_on
        from regauge.core.fold import resolve_tie

        bits = (
            not self.steps and not self.state_spec.fixed and is_exact_on(g)
        )  # permutations and signs look at no value, so torch is not even loaded
        made = apply_lazily(g, self.checkpoint.bits if bits else self.state, part)
        if self.steps:  # rounded once, and only now
            made = {
                name: partial(
                    _make_rounded,
                    make,
                    self.checkpoint[resolve_tie(self.spec, self.checkpoint, name)].dtype,
                )
                for name, make in made.items()
            }
        return made

    def plan(
        self,
        out: Path,
        g: Element,
        thunks: Mapping[str, Callable[[], Any]],
        part: str | None = None,
        mode: int = EVERYONE,
        **small: bytes,
    ) -> Plan:
        """The files to be written: the checkpoint's own, moved, and small ones by their bytes
        (`match.json` as match_json). `mode` has the permission bits that inputs beside the
        checkpoint allow.
        """
        from regauge.checkpoints.plan import is_file_name, plan_checkpoint
        from regauge.core.action import tensor_transforms
        from regauge.core.fold import resolve_tie

        sources = {m.name: m.source for m in tensor_transforms(g, part)}
        origins = {
            name: resolve_tie(self.spec, self.checkpoint, sources.get(name, name))
            for name in thunks
        }
        recipe = recipe_digest(g, self.spec, self.steps, part)
        plan = plan_checkpoint(
            out,
            self.checkpoint,
            thunks,
            origins=origins,
            config_changes=self.state_spec.config,
            recipe=recipe,
        )
        names = {key.replace("_", "."): value for key, value in small.items()}
        if is_file_name(out):
            names = {f"{out.stem}.{name}": value for name, value in names.items()}
        copies = {name: path for name, path in plan.copies.items() if name not in names}
        return replace(plan, small={**plan.small, **names}, copies=copies, mode=plan.mode & mode)


def prepare_source(checkpoint: Checkpoint, spec: Spec, fold: bool) -> TransformSource:
    """Prepare a checkpoint to be transformed, with its norms folded if asked. Only norms are
    read.
    """
    if not fold:
        return TransformSource(checkpoint, spec, spec, checkpoint)
    from regauge.checkpoints.reader import LazyState
    from regauge.core.fold import fold_lazily

    described, folded = fold_lazily(spec, checkpoint, rounded=False)
    return TransformSource(checkpoint, spec, described, LazyState.from_thunks(folded), ("fold",))


def prepare_adapter(source: str, g: Element) -> tuple[TransformSource, Element]:
    """A LoRA adapter of the element's model, and the element over it."""
    from regauge.checkpoints.adapters import element_for, require_lora
    from regauge.checkpoints.reader import open_checkpoint

    adapter = open_checkpoint(source)
    require_lora(adapter.path if adapter.is_folder else adapter.path.parent)
    h = element_for(g, adapter.entries)
    return TransformSource(adapter, h.spec, h.spec, adapter), h


def recipe_digest(g: Element, unfolded: Spec, prepared: Sequence[str], part: str | None) -> bytes:
    """What, besides the source, determines the values that are written."""
    from regauge import __version__
    from regauge.checkpoints.spec_files import dump_spec

    whole = hashlib.sha256(
        f"version={__version__} prepared={','.join(prepared)} "
        f"part={part or ''}\n{dump_spec(unfolded)}".encode()
    )
    for name in sorted(g.members):
        member = g.members[name]
        whole.update(name.encode() + type(member).__name__.encode())
        for key in ("index", "scale", "values", "factor", "layout"):
            value = getattr(member, key, None)
            if value is not None:
                whole.update(
                    key.encode() + (value.encode() if isinstance(value, str) else value.tobytes())
                )
    return whole.digest()


def _make_rounded(make: Callable[[], Any], dtype: Any) -> Any:
    return make().to(dtype)

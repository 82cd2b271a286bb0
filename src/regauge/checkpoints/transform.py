"""A checkpoint transformed by an element: the thunks of its tensors, and the plan of its files."""

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
    """A checkpoint to transform, unchanged or prepared by folding norms or fixing gauges.

    Attributes:
        checkpoint: The files.
        spec: The spec of the files.
        state_spec: The spec of `state`.
        state: The tensors after preparation.
        steps: Names of the preparation steps.
    """

    checkpoint: Checkpoint
    spec: Spec
    state_spec: Spec
    state: Mapping[str, Any]
    steps: tuple[str, ...] = ()

    def with_state(
        self, thunks: Mapping[str, Callable[[], Any]], steps: Sequence[str]
    ) -> TransformSource:
        """Return the same checkpoint with another state of the same function.

        Args:
            thunks: Functions that compute the tensors of the state.
            steps: Names of the steps that made it.
        """
        from regauge.checkpoints.reader import LazyState

        return replace(self, state=LazyState.from_thunks(thunks), steps=(*self.steps, *steps))

    def thunks(
        self, g: Element, part: str | None = None, *, as_bits: bool = True
    ) -> dict[str, Callable[[], Any]]:
        """Return the functions that compute each tensor of the output.

        Args:
            g: The element.
            part: The part that is transformed. Default: all.
            as_bits: Compute exact members on stored bits, as numpy arrays.
        """
        from regauge.core.action import apply_lazily, is_exact_on
        from regauge.core.fold import resolve_tie

        # Permutations and signs work on bits, so torch is not even imported.
        on_bits = as_bits and not self.steps and not self.state_spec.fixed and is_exact_on(g)
        thunks = apply_lazily(g, self.checkpoint.bits if on_bits else self.state, part)
        if self.steps:  # rounded once, after all steps
            thunks = {
                name: partial(
                    _make_rounded,
                    make,
                    self.checkpoint[resolve_tie(self.spec, self.checkpoint, name)].dtype,
                )
                for name, make in thunks.items()
            }
        return thunks

    def plan(
        self,
        out: Path,
        g: Element,
        thunks: Mapping[str, Callable[[], Any]],
        part: str | None = None,
        mode: int = EVERYONE,
        **small: bytes,
    ) -> Plan:
        """Plan the output files.

        Args:
            out: The output folder or .safetensors file.
            g: The element.
            thunks: Functions that compute the tensors (`thunks`).
            part: The part that is transformed. Default: all.
            mode: The loosest mode that inputs besides the checkpoint allow.
            small: Content of further small files; match_json is written as `match.json`.
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
    """Prepare a checkpoint to be transformed, reading only norms.

    Args:
        checkpoint: The checkpoint.
        spec: Its spec.
        fold: Fold norms and scales into the weights that read them.
    """
    if not fold:
        return TransformSource(checkpoint, spec, spec, checkpoint)
    from regauge.checkpoints.reader import LazyState
    from regauge.core.fold import fold_lazily

    folded_spec, folded = fold_lazily(spec, checkpoint, rounded=False)
    return TransformSource(checkpoint, spec, folded_spec, LazyState.from_thunks(folded), ("fold",))


def prepare_adapter(source: str, g: Element) -> tuple[TransformSource, Element]:
    """Open a LoRA adapter of the element's model; return it with the element over its spec."""
    from regauge.checkpoints.adapters import element_for, require_lora
    from regauge.checkpoints.reader import open_checkpoint

    adapter = open_checkpoint(source)
    require_lora(adapter.path if adapter.is_folder else adapter.path.parent)
    h = element_for(g, adapter.entries)
    return TransformSource(adapter, h.spec, h.spec, adapter), h


def recipe_digest(g: Element, unfolded: Spec, steps: Sequence[str], part: str | None) -> bytes:
    """Return the SHA-256 of everything besides the source that determines the written values.

    Args:
        g: The element.
        unfolded: The spec of the source.
        steps: Names of the preparation steps.
        part: The part that is transformed, or None for all.
    """
    from regauge import __version__
    from regauge.checkpoints.spec_files import dump_spec

    digest = hashlib.sha256(
        f"version={__version__} prepared={','.join(steps)} "
        f"part={part or ''}\n{dump_spec(unfolded)}".encode()
    )
    for name in sorted(g.members):
        member = g.members[name]
        digest.update(name.encode() + type(member).__name__.encode())
        for key in ("index", "scale", "values", "factor", "layout"):
            value = getattr(member, key, None)
            if value is not None:
                digest.update(
                    key.encode() + (value.encode() if isinstance(value, str) else value.tobytes())
                )
    return digest.digest()


def _make_rounded(make: Callable[[], Any], dtype: Any) -> Any:
    return make().to(dtype)

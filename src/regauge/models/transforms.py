"""`move` and `fold_norms` on what users hold: a model in another basis, with the same function."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from regauge.checkpoints.element_files import load_element, save_element
from regauge.checkpoints.files import require_file, strictest_mode
from regauge.checkpoints.outputs import Job, Output, format_spaces
from regauge.checkpoints.plan import check_target, find_enclosing, is_taken
from regauge.checkpoints.transform import TransformSource, prepare_adapter, prepare_source
from regauge.core.action import is_exact_on
from regauge.core.element import Element, element, identity
from regauge.core.groups import Kind
from regauge.core.options import require_choice
from regauge.core.spec import PARTS, Spec
from regauge.core.threads import within_threads
from regauge.errors import ElementError, Hint, RegaugeError
from regauge.models.sources import require_fit, require_unlocked, resolve

if TYPE_CHECKING:
    import torch

    from regauge.checkpoints.reader import Checkpoint
    from regauge.checkpoints.writer import WriteResult
    from regauge.core.progress import Progress
    from regauge.models.sources import Source

Part = Literal["embed", "backbone", "head"]


@dataclass(frozen=True, repr=False)
class TransformJob(Job):
    """A planned transform, ready to write.

    Attributes:
        element: The element.
        element_file: A new file for it; None if it is not saved.
    """

    element: Element
    element_file: Path | None = None

    def write(
        self,
        *,
        progress: Progress | None = None,
        resume: bool = False,
        threads: int | None = None,
    ) -> WriteResult:
        if self.element_file is not None:
            save_element(self.element, self.element_file, new=True)
        try:
            return super().write(progress=progress, resume=resume, threads=threads)
        except BaseException:
            # a finished output needs its element
            if self.element_file is not None and not is_taken(self.out):
                self.element_file.unlink(missing_ok=True)
            raise


@dataclass(frozen=True, eq=False)
class TransformedModel(Output):
    """A model in another basis.

    Attributes:
        source: What is transformed: the model, its folded form, or an adapter of it.
        element: The element that is applied.
        part: The part that is transformed; None for the whole model.
        base: The model.
        mode: The loosest mode of the output that the inputs allow.
        notes: Remarks on what is transformed and what is not.
        warnings: Remarks on visible changes of the outputs.
        adapter: The LoRA adapter that is transformed in place of the model.
    """

    source: TransformSource
    element: Element
    part: Part | None
    base: Checkpoint
    mode: int
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    adapter: str | None = None

    @property
    def spec(self) -> Spec:
        """The spec of the transformed model."""
        return self.source.state_spec

    @property
    def is_folded(self) -> bool:
        """Whether norms were folded first."""
        return bool(self.source.steps)

    def plan(
        self,
        out: str | Path,
        *,
        threads: int | None = None,
        element: str | Path | None = None,
    ) -> TransformJob:
        """Check everything that `save` checks, and return what it would write.

        Args:
            out: The output folder or .safetensors file.
            threads: Number of threads.
            element: A new file for the element, outside of the model. The element is a secret: its
                holder can undo the transform.
        """
        out = Path(out)
        file = None if element is None else Path(element)
        if file is not None:
            if os.path.lexists(file):
                raise ElementError(
                    f"{file} exists already",
                    hint="an element is a secret that cannot be recreated: name a new file",
                )
            require_outside(file, out, self.base.path)
        for path in self.base.sources:
            check_target(out, path)
        thunks = self.source.thunks(self.element, self.part)
        facts = {
            "adapter": self.adapter,
            "family": self.spec.family,
            "out": str(out),
            "moved": list(self.element.members),
            "folded": self.is_folded,
            "part": self.part,
            "tensors": len(thunks),
        }
        plan = self.source.plan(out, self.element, thunks, self.part, self.mode)
        return TransformJob(
            out,
            plan,
            thunks,
            self.element,
            file,
            facts=facts,
            notes=self.notes,
            warnings=self.warnings,
        )

    def save(
        self,
        out: str | Path,
        *,
        element: str | Path | None = None,
        progress: Progress | None = None,
        resume: bool = False,
        threads: int | None = None,
    ) -> WriteResult:
        """Write the model as `Output.save` does, and the element to a new file if one is named."""
        job = self.plan(out, threads=threads, element=element)
        return job.write(progress=progress, resume=resume, threads=threads)

    def save_element(self, path: str | Path) -> None:
        """Write the element to a new file."""
        save_element(self.element, Path(path), new=True)

    def state(self) -> dict[str, torch.Tensor]:
        thunks = self.source.thunks(self.element, self.part, as_bits=False)
        return {name: make() for name, make in thunks.items()}

    def __str__(self) -> str:
        return (
            f"{self.spec.family}: transforms {format_spaces(self.element.members)}"
            f"{' after folding' if self.is_folded else ''}"
            f"{f', {self.part} only' if self.part else ''}"
        )

    def __repr__(self) -> str:
        return f"<{self.source.checkpoint.path.name}, {self}>"


def require_outside(element: Path, out: Path, source: Path) -> None:
    """Raise if an element, which is a secret, lies in a published folder or in the output."""
    if find_enclosing(element, out, source) is not None:
        raise ElementError(
            f"{element} lies in the model or in the output, and would be published with it",
            hint="keep the element in a separate folder",
        )


@within_threads
def move(
    source: Source,
    g: Element | str | Path | int | None = None,
    *,
    invert: bool = False,
    group: Kind = "permutation",
    spaces: Sequence[str] | None = None,
    part: Part | None = None,
    fold: bool = False,
    adapter: str | Path | None = None,
    spec: Spec | str | Path | None = None,
) -> TransformedModel:
    """Apply an element to a model: the same function in another basis.

    Args:
        source: A path, a hub id, a checkpoint, a module, or a state dict with `spec`.
        g: The element or its file; an integer samples one from a public seed. By default one is
            sampled by the system's randomness.
        invert: Apply the inverse of the element.
        group: The kind of subgroup to sample from.
        spaces: The spaces to transform, by name or root. By default, a sampled element acts on all
            that are not visible at the outputs.
        part: Transform only "embed", "backbone" or "head"; the parts then no longer fit each
            other.
        fold: Fold the norms first, which allows rotations of the stream.
        adapter: A LoRA adapter of the model, which is transformed in its place.
        spec: A spec or spec file. Default: that of the model's family.

    Returns:
        The transformed model, with `save(out)`, `state()`, `element` and `save_element(path)`.

    Raises:
        RegaugeError: The element transforms nothing.
        ElementError: The element belongs to another model, or the part is unknown.
        LockError: The model is locked.

    Example:
        >>> moved = regauge.move("model")
        >>> _ = moved.save("moved", element="secret.element")
        >>> _ = regauge.move("moved", "secret.element", invert=True).save("back")
    """
    if part is not None:
        require_choice(ElementError, "part", part, PARTS)
    model = resolve(source, spec)
    require_unlocked(model.checkpoint)
    require_fit(model.checkpoint, model.spec)
    prepared = prepare_source(model.checkpoint, model.spec, fold)
    notes = list(model.notes)
    warnings: list[str] = []
    mode, state_spec = model.checkpoint.mode, prepared.state_spec
    if isinstance(g, str | Path):
        file = Path(g)
        require_file(file)
        g = load_element(file, state_spec)
        mode &= strictest_mode([file])
    if isinstance(g, Element):
        g = g.to(state_spec)
        g.require()
        g = g if spaces is None else g.only(*spaces)
    else:
        g = _sample(state_spec, os.urandom(32) if g is None else g, group, spaces, notes)
    visible = sorted(state_spec.visible & g.members.keys())
    if visible:
        warnings.append(
            f"{', '.join(visible)} {'is' if len(visible) == 1 else 'are'} visible at the outputs "
            f"({', '.join(state_spec.outputs)}), which are transformed too"
        )
    if not g.members:
        raise RegaugeError(
            "the element transforms nothing",
            hint=Hint(
                "spec.spaces lists the spaces and their groups",
                cli="regauge inspect lists the spaces and their groups",
            ),
        )
    g = ~g if invert else g
    if adapter is not None:
        prepared, g = prepare_adapter(str(adapter), g)
    if prepared.steps or not is_exact_on(g):
        import torch  # noqa: F401 (so that limits on threads apply to it from the start)
    moved = TransformedModel(
        prepared,
        g,
        part,
        model.checkpoint,
        mode,
        warnings=tuple(warnings),
        adapter=None if adapter is None else str(adapter),
    )
    return replace(moved, notes=(*notes, str(moved)))


def _sample(
    spec: Spec, seed: int | bytes, group: Kind, spaces: Sequence[str] | None, notes: list[str]
) -> Element:
    """Sample an element, and add remarks on what it cannot transform."""
    if spaces is None and spec.visible:
        notes.append(
            f"{', '.join(sorted(spec.visible))} unchanged, since visible at the outputs "
            f"({', '.join(spec.outputs)}); --spaces overrides"
        )
    if spaces is None:
        # A name would also select a longer, visible one.
        spaces = [
            name
            for name in spec.spaces
            if name not in spec.visible and not any(v.startswith(f"{name}.") for v in spec.visible)
        ]
    g = element(spec, seed, within=group, spaces=spaces)
    restricted = sorted(
        name
        for name in g.members
        if group in ("orthogonal", "full") and spec.spaces[name].folded is not None
    )
    if restricted:
        notes.append(
            f"{', '.join(restricted)}: {spec.spaces[restricted[0]].group.within(group)} only; "
            "--fold allows rotations"
        )
    return g


@within_threads
def fold_norms(source: Source, *, spec: Spec | str | Path | None = None) -> TransformedModel:
    """Fold every norm and LayerScale that can be folded into the weights that read it.

    The function stays the same; the stream gets a larger group. `regauge.core.fold.fold_norms` is
    the pure function of a spec and a state.

    Args:
        source: A path, a hub id, a checkpoint, a module, or a state dict with `spec`.
        spec: A spec or spec file. Default: that of the model's family.

    Returns:
        The folded model, with `save(out)`, `state()` and `spec`.

    Raises:
        SpecError: The state does not fit the spec, or a norm cannot be folded.
        LockError: The model is locked.

    Example:
        >>> folded = regauge.fold_norms("model")
        >>> str(folded.spec.spaces["stream"].group)
        'orthogonal-ones'
        >>> _ = folded.save("folded")
    """
    model = resolve(source, spec)
    require_unlocked(model.checkpoint)
    prepared = prepare_source(model.checkpoint, model.spec, fold=True)
    g, checkpoint = identity(prepared.state_spec), model.checkpoint
    return TransformedModel(prepared, g, None, checkpoint, checkpoint.mode)

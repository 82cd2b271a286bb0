"""A checkpoint transformed by an element: the thunks of its tensors, and the plan of its files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.checkpoints.files import EVERYONE
from regauge.errors import SpecError

if TYPE_CHECKING:
    from regauge.checkpoints.plan import Plan
    from regauge.checkpoints.reader import Checkpoint
    from regauge.core.action import TensorTransform
    from regauge.core.element import Element
    from regauge.core.spec import Spec


@dataclass(frozen=True)
class TransformSource:
    """A checkpoint to transform, unchanged or prepared by folding norms.

    Attributes:
        checkpoint: The files.
        spec: The spec of the files.
        state_spec: The spec of `state`.
        state: The tensors after preparation.
        steps: Names of the preparation steps.
        norms: Gains and biases that the transformed model is written with, if norms were folded
            and the output shall have norms again.
        tied_spec: The spec of the files, if `spec` has fewer ties.
    """

    checkpoint: Checkpoint
    spec: Spec
    state_spec: Spec
    state: Mapping[str, Any]
    steps: tuple[str, ...] = ()
    norms: Mapping[str, Any] | None = None
    tied_spec: Spec | None = None

    @property
    def is_folded(self) -> bool:
        """Whether norms were folded."""
        return "fold" in self.steps

    def unfolded(self) -> TransformSource:
        """Return the same model with norms as stored."""
        spec = self.tied_spec or self.spec
        return prepare_source(
            self.checkpoint, spec, False, spec.ties.keys() - self.spec.ties.keys()
        )

    def _stored_name(self, name: str) -> str:
        """Return the tensor of the files that holds the values of this one."""
        from regauge.core.fold import resolve_tie

        return resolve_tie(self.tied_spec or self.spec, self.checkpoint, name)

    def with_norms_of(self, other: TransformSource) -> tuple[TransformSource, list[str]]:
        """Return this folded model, to be written with the norms of another one.

        Returns:
            The source, and remarks on gains that could not be taken over.
        """
        import torch

        from regauge.core.unfold import norms_of, smallest_gains

        names = [n for norm in self.spec.norms for n in (norm.gain, norm.bias) if n is not None]
        names += [scale.gain for scale in self.spec.scales]
        dtypes = {name: self.checkpoint[name].dtype for name in names}
        stored = {name: self._stored_name(name) for name in self.state}
        narrow = {
            name: torch.float16
            for name, source in stored.items()
            if self.checkpoint.entries[source].dtype == "F16"
        }
        smallest = smallest_gains(self.spec, self.state, narrow)
        norms, notes = norms_of(self.spec, other.checkpoint, dtypes, smallest)
        digest = hashlib.sha256()
        for name in sorted(norms):
            digest.update(name.encode() + norms[name].double().numpy().tobytes())
        return replace(self, norms=norms, steps=(*self.steps, f"norms {digest.hexdigest()}")), notes

    @property
    def output_spec(self) -> Spec:
        """The spec of what is written."""
        from regauge.core.unfold import unfolded_spec

        return self.state_spec if self.norms is None else unfolded_spec(self.spec)

    def thunks(
        self,
        g: Element,
        part: str | None = None,
        *,
        as_bits: bool = True,
        rounded: bool = True,
    ) -> dict[str, Callable[[], Any]]:
        """Return the functions that compute each tensor of the output.

        Args:
            g: The element.
            part: The part that is transformed. Default: all.
            as_bits: Compute exact members on stored bits, as numpy arrays.
            rounded: Round what folding computes to the stored dtype.
        """
        from regauge.core.action import apply_lazily, is_exact_on, tensor_transforms

        # Permutations and signs work on bits, so torch is not even imported.
        on_bits = as_bits and not self.steps and not self.state_spec.fixed and is_exact_on(g)
        thunks = apply_lazily(g, self.checkpoint.bits if on_bits else self.state, part)
        if self.steps and rounded:  # what is rounded to half precision is computed in float32
            for transform in tensor_transforms(g, part):
                if transform.name in thunks and self._is_half(transform.name):
                    thunks[transform.name] = partial(_act_in_own_dtype, g, self.state, transform)
        if self.norms is not None:
            from regauge.checkpoints.reader import LazyState
            from regauge.core.unfold import unfold_lazily

            thunks = unfold_lazily(self.spec, LazyState.from_thunks(thunks), self.norms)
        if self.steps and rounded:  # once, after all steps
            thunks = {
                name: partial(
                    _make_rounded,
                    make,
                    self.checkpoint[self._stored_name(name)].dtype,
                    name,
                )
                for name, make in thunks.items()
            }
        return thunks

    def _is_half(self, name: str) -> bool:
        """Return whether a tensor is stored in half precision."""
        return self.checkpoint.entries[self._stored_name(name)].dtype in {"BF16", "F16"}

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

        sources = {m.name: m.source for m in tensor_transforms(g, part)}
        origins = {name: self._stored_name(sources.get(name, name)) for name in thunks}
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


def prepare_source(
    checkpoint: Checkpoint, spec: Spec, fold: bool, untie: Collection[str] = ()
) -> TransformSource:
    """Prepare a checkpoint to be transformed, reading only norms.

    Args:
        checkpoint: The checkpoint.
        spec: Its spec.
        fold: Fold norms and scales into the weights that read them.
        untie: Tied tensors that become tensors of their own.
    """
    from regauge.checkpoints.reader import LazyState
    from regauge.core.fold import fold_lazily
    from regauge.core.ties import untie_lazily

    source = TransformSource(checkpoint, spec, spec, checkpoint)
    if spec.ties.keys() & set(untie):
        new, thunks = untie_lazily(spec, checkpoint, untie)
        state = LazyState.from_thunks(thunks)
        source = TransformSource(checkpoint, new, new, state, ("untie",), tied_spec=spec)
    if not fold:
        return source
    folded_spec, folded = fold_lazily(source.spec, source.state, rounded=False)
    steps = (*source.steps, "fold")
    return replace(source, state_spec=folded_spec, state=LazyState.from_thunks(folded), steps=steps)


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


def _act_in_own_dtype(g: Element, state: Mapping[str, Any], transform: TensorTransform) -> Any:
    """Transform a tensor in its own dtype: folded ones in half precision are in float32."""
    from regauge.core.action import act

    return act(g, state[transform.source], transform.axes, at=transform.at)


def _make_rounded(make: Callable[[], Any], dtype: Any, name: str) -> Any:
    """Return a tensor in its stored dtype, and raise a SpecError if its values do not fit."""
    value = make()
    rounded = value.to(dtype)
    if dtype.itemsize == 2 and bool((value.isfinite() & ~rounded.isfinite()).any()):
        largest = float(value.abs().max())
        raise SpecError(
            f'"{name}" must fit {str(dtype).split(".")[-1]}, got values up to {largest:.3g}',
            hint="convert the checkpoint to bfloat16 or float32 first",
        )
    return rounded

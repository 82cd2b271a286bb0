"""LoRA adapters in PEFT's names and layout, transformed by the element of their model.

An adapter adds B A to the weight of a layer with axes "out in*". So A, [r, in], has axes "_ in*",
and B, [out, r], has "out _". The axes of the layer determine those of the adapter: transforming an
adapter is the usual action over a spec derived from the model's. PEFT lays A and B out as torch's
Linear, whatever the layout of the layer itself (GPT-2's Conv1D is "in* out").

    adapter = load_file("adapter_model.safetensors")       # trained on the locked model
    plain = move_adapter(~g, adapter, part="backbone")     # for the plain one

Supported: `lora_A`, `lora_B` with or without a bias, `lora_embedding_A` and `_B`, DoRA's
`lora_magnitude_vector`, and full tensors of the model (`modules_to_save`, trained biases).
Prefixes ("base_model.model.") and adapter names ("lora_A.default.weight") are optional. Other kinds
of adapters raise an error that names the tensor.

DoRA normalizes the rows of a weight (the columns of an embedding): its magnitudes follow signed
permutations of the layer's output, and every rotation of its input.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regauge.core import axes as ax
from regauge.core.action import apply
from regauge.core.check import Fault, check, require
from regauge.core.element import Element
from regauge.core.groups import Orthogonal, SignedPermutation
from regauge.core.spec import Shaped, Spec, stored_tensors
from regauge.errors import ElementError, SpecError

if TYPE_CHECKING:
    import torch

    Tensor = torch.Tensor

LORA = re.compile(
    r"(?P<layer>.+)\."
    r"(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?P<adapter>[^.]+?))??(?:\.(?P<what>weight|bias))?"
)
_WRAPPED = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
_HOLE = ax.Hole()

HINT = (
    "supported are LoRA's A and B, DoRA's magnitudes and full tensors of the model; check that "
    "the adapter belongs to this model"
)


class Layer(NamedTuple):
    """The layer that a LoRA tensor adapts.

    Attributes:
        prefix: Prefix of the layer's name in the adapter.
        pattern: Pattern of the layer's weight in the spec.
        stack: Axes term of a stack of experts that are stored one by one; empty otherwise.
        out: Axes term of the output.
        into: Axes term of the input.
        rest: Further terms (a convolution's kernel).
    """

    prefix: str
    pattern: str
    stack: tuple[ax.Term, ...]
    out: ax.Term
    into: ax.Term
    rest: tuple[ax.Term, ...]

    @property
    def is_table(self) -> bool:
        """Whether this is an embedding, [rows, width], neither of which is contracted."""
        return any(ax.leaves(self.into)) and not is_input_axis(self.into)


def adapter_spec(spec: Spec, names: Iterable[str]) -> Spec:
    """Derive the spec of an adapter from the spec of its model.

    The spaces are the model's, so elements of the model apply to the adapter:
    `tensors["base_model.model.h.0.attn.c_proj.lora_B.weight"]` is "stream _".

    Args:
        spec: The spec of the model.
        names: The names of the adapter's tensors.

    Raises:
        SpecError: A tensor is not supported, or adapts a layer that the model does not have.
    """
    known = stored_tensors(spec)
    tensors: dict[str, str] = {}
    parts: dict[str, str] = {}
    faults: list[Fault] = []
    for name in names:
        try:
            new, axes, pattern = _describe_tensor(spec, known, name)
        except SpecError as error:
            faults.append(Fault(name, str(error)))
            continue
        tensors[new] = axes
        if pattern in spec.parts:
            parts[new] = spec.parts[pattern]
    require(faults, f'the adapter does not fit the spec "{spec.family}"', hint=HINT)
    return Spec(spec.family, spec.spaces, tensors, parts)


def _describe_tensor(spec: Spec, known: Mapping[str, Any], name: str) -> tuple[str, str, str]:
    """Return the entry of one tensor in the adapter's spec.

    Returns:
        Its name (with braces if it is one of a stack), its axes, and the pattern of the weight that
        it adapts.
    """
    lora = LORA.fullmatch(name)
    if lora is None:
        target = find_tensor(known, unwrap_name(name))
        if target is None:
            raise SpecError(f'"{name}" is neither a tensor of the model nor one of a LoRA adapter')
        pattern = known[target[1]].pattern
        if known[target[1]].parent is not None:
            raise SpecError(
                f'"{name}" is a single expert; experts are transformed only together with the model'
            )
        return name, spec.tensors[pattern], pattern
    layer = _find_layer(spec, known, name, unwrap_name(lora["layer"]))
    terms = _lora_terms(layer, lora["kind"], lora["what"], name)
    new = name
    if layer.stack:
        stem = layer.pattern.removesuffix(".weight")
        new = layer.prefix + stem + name[len(lora["layer"]) :]
    return new, str(ax.Axes((*layer.stack, *terms))), layer.pattern


def unwrap_name(name: str) -> str:
    """Return the model's name of a tensor that PEFT has wrapped."""
    return _WRAPPED.sub("", f"{name}.")[:-1]


def find_tensor(known: Mapping[str, Any], name: str) -> tuple[str, str] | None:
    """Split a name into a prefix and a known name; None if no suffix is known."""
    words = name.split(".")
    for i in range(len(words)):
        if ".".join(words[i:]) in known:
            return "".join(f"{w}." for w in words[:i]), ".".join(words[i:])
    return None


def _find_layer(spec: Spec, known: Mapping[str, Any], name: str, path: str) -> Layer:
    """Return the layer at a path of the model; `name` is the LoRA tensor, for errors."""
    target = find_tensor(known, f"{path}.weight")
    if target is None:
        raise SpecError(f'"{name}" adapts a layer that the model does not have')
    prefix, weight = target
    entry = known[weight]
    terms = ax.parse(spec.tensors[entry.pattern]).terms
    stack, terms = (terms[:1], terms[1:]) if entry.parent is not None else ((), terms)
    if len(terms) < 2:
        raise SpecError(f'"{name}" adapts "{weight}", which has no input and output: {entry.axes}')
    first, second, *rest = terms
    if is_input_axis(first) and not is_input_axis(second):
        return Layer(prefix, entry.pattern, stack, second, first, tuple(rest))
    return Layer(prefix, entry.pattern, stack, first, second, tuple(rest))


def is_input_axis(term: ax.Term) -> bool:
    """Return whether an axis is contracted with the layer's input: all of its spaces are starred.

    (The output of a key projection has a star on `qk` alone.)
    """
    leaves = list(ax.leaves(term))
    return bool(leaves) and all(leaf.star for leaf in leaves)


def _lora_terms(layer: Layer, kind: str, suffix: str | None, name: str) -> tuple[ax.Term, ...]:
    """Return the axes of a LoRA tensor, without the stack."""
    match kind, suffix:
        case "lora_A", "weight":
            return (_HOLE, layer.into, *layer.rest)
        case "lora_B", "weight":
            return (layer.out, _HOLE, *(_HOLE for _ in layer.rest))
        case "lora_B", "bias":
            return (layer.out,)
        # An embedding is [rows, width] and its update is (B A)^T: its rows are A's, its width B's.
        case "lora_embedding_A", None:
            return (_HOLE, layer.out)
        case "lora_embedding_B", None:
            return (layer.into, _HOLE)
        case "lora_magnitude_vector", _ if not layer.rest and not layer.stack:
            return ax.parse(
                ax.bar(str(ax.Axes((layer.into if layer.is_table else layer.out,))))
            ).terms
    raise SpecError(f'"{name}" is not a LoRA tensor that can be transformed')


def move_adapter(
    g: Element, state: Mapping[str, Tensor], part: str | None = None
) -> dict[str, Tensor]:
    """Return an adapter transformed by an element of its model.

    Args:
        g: The element of the model; `~g` undoes it.
        state: The tensors of the adapter.
        part: Transform only the tensors of this part ("backbone" for a locked model). Default: all.

    Returns:
        The transformed tensors.

    Raises:
        SpecError: A tensor is not of a LoRA adapter of the model.
        ElementError: The magnitudes of DoRA cannot follow the element.

    Example:
        >>> g = regauge.element(regauge.spec_of(model), 0)
        >>> name = "transformer.h.0.attn.c_attn.lora_A.weight"
        >>> moved = regauge.move_adapter(g, {name: torch.randn(2, 12)})
    """
    return apply(element_for(g, state), state, part)


def element_for(g: Element, tensors: Mapping[str, Shaped]) -> Element:
    """Return the element over the spec of an adapter with these tensors, after checking shapes."""
    spec = adapter_spec(g.spec, tensors)
    sizes = replace(
        spec, tensors={n: axes.replace("|", "") for n, axes in spec.tensors.items()}
    )  # a bar changes the action on an axis, not its size
    require(
        check(sizes, tensors, complete=False),
        f'the adapter does not fit the spec "{spec.family}"',
        hint=HINT,
    )
    _require_magnitudes(g, tensors)
    return g.to(spec)


def require_lora(folder: Path) -> None:
    """Raise if adapter_config.json, when present, declares anything but LoRA on the model's layers.

    Raises:
        SpecError: `peft_type` is not LORA, or the tensors are not those of the model's layers.
    """
    from regauge.checkpoints.reader import read_json

    path = folder / "adapter_config.json"
    if not path.is_file():
        return
    config = read_json(path)
    if config.get("peft_type", "LORA") != "LORA":
        raise SpecError(
            f"{path} describes a {config['peft_type']} adapter; only LORA is supported",
            hint="merge it into its model and transform that",
        )
    for key in ("layer_replication", "target_parameters", "megatron_config"):
        if config.get(key):
            raise SpecError(
                f'{path} sets "{key}", so its tensors are not those of the model\'s layers',
                hint="merge it into its model and transform that",
            )


def _require_magnitudes(g: Element, names: Iterable[str]) -> None:
    """Raise if the element acts on a DoRA layer by more than its magnitudes can follow."""
    known = stored_tensors(g.spec)
    for name in names:
        lora = LORA.fullmatch(name)
        if lora is None or lora["kind"] != "lora_magnitude_vector":
            continue
        layer = _find_layer(g.spec, known, name, unwrap_name(lora["layer"]))
        written, read = (layer.into, layer.out) if layer.is_table else (layer.out, layer.into)
        for side, term, group, allowed in (
            ("output", written, SignedPermutation(), "signed permutations"),
            ("input", read, Orthogonal(), "rotations"),
        ):
            for leaf in ax.leaves(term):
                member = g.members.get(leaf.space)
                if member is not None and group.fault(member):
                    raise ElementError(
                        f'"{name}" holds row norms, which on the layer\'s {side} follow {allowed} '
                        f'only; the element on "{leaf.space}" is more general',
                        hint="merge the adapter into its model and transform that",
                    )

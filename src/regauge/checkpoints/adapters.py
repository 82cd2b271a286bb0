"""LoRA adapters in PEFT's names and layout: moved by the same element as the model that they belong
to.

An adapter adds B A to the weight of a layer, whose axes are "out in*". So A, [r, in], has axes "_
in*" and B, [out, r], has "out _": the axes of the layer say it all, and moving an adapter is the
one action, over a spec that is derived from the model's. PEFT's A and B are those of torch's Linear
whatever the layout of the layer itself (GPT-2's Conv1D is "in* out").

    adapter = load_file("adapter_model.safetensors")       # trained on the locked model
    plain = move_adapter(~g, adapter, part="backbone")     # for the plain one

What is moved: `lora_A`, `lora_B` with or without a bias, `lora_embedding_A` and `_B`, DoRA's
`lora_magnitude_vector`, and whole tensors of the model (`modules_to_save`, trained biases).
Prefixes ("base_model.model.") and names of adapters ("lora_A.default.weight") may be there or not.
Other kinds of adapters are refused by name.

DoRA normalises the rows of a weight (of an embedding's table, the columns): its magnitudes follow
permutations and signs of the layer's output, and every rotation of its input.
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
    r"(?P<layer>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?P<adapter>[^.]+?))??(?:\.(?P<what>weight|bias))?"
)
_WRAPPED = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
_HOLE = ax.Hole()

HINT = (
    "LoRA's A and B, DoRA's magnitudes and whole tensors of the model are moved; is the "
    "adapter of this model?"
)


class Layer(NamedTuple):
    """The layer of a LoRA tensor: its prefix in the adapter, its weight's pattern in the spec, and
    the terms of its output, its input and the rest.

    `stack` is the term of a stack of experts that are stored one by one.
    """

    prefix: str
    pattern: str
    stack: tuple[ax.Term, ...]
    out: ax.Term
    into: ax.Term
    rest: tuple[ax.Term, ...]

    @property
    def is_table(self) -> bool:
        """Is this an embedding, [rows, width], neither of which is contracted?"""
        return any(ax.leaves(self.into)) and not _is_input(self.into)


def adapter_spec(spec: Spec, names: Iterable[str]) -> Spec:
    """The spec of an adapter with these tensors, on a model with this spec. Its spaces, and so its
    elements, are the model's.

    >>> # adapter_spec(spec_of(model),
    adapter).tensors["base_model.model.h.0.attn.c_proj.lora_B.weight"] is "stream _"
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
    """What the adapter's spec says of one tensor: its name (with braces if it is one of a stack),
    its axes, the pattern of the weight behind it.
    """
    found = LORA.fullmatch(name)
    if found is None:
        whole = find_tensor(known, unwrap_name(name))
        if whole is None:
            raise SpecError(f'"{name}" is neither a tensor of the model nor one of a LoRA adapter')
        pattern = known[whole[1]].pattern
        if known[whole[1]].parent is not None:
            raise SpecError(
                f'"{name}" is one expert of several, which are moved with the whole model only'
            )
        return name, spec.tensors[pattern], pattern
    layer = _find_layer(spec, known, name, unwrap_name(found["layer"]))
    terms = _lora_terms(layer, found["kind"], found["what"], name)
    new = name
    if layer.stack:
        stem = layer.pattern.removesuffix(".weight")
        new = layer.prefix + stem + name[len(found["layer"]) :]
    return new, str(ax.Axes((*layer.stack, *terms))), layer.pattern


def unwrap_name(name: str) -> str:
    """The model's name of what PEFT has wrapped."""
    return _WRAPPED.sub("", f"{name}.")[:-1]


def find_tensor(known: Mapping[str, Any], name: str) -> tuple[str, str] | None:
    """A name without whatever stands before the model's own, and that."""
    words = name.split(".")
    for i in range(len(words)):
        if ".".join(words[i:]) in known:
            return "".join(f"{w}." for w in words[:i]), ".".join(words[i:])
    return None


def _find_layer(spec: Spec, known: Mapping[str, Any], name: str, path: str) -> Layer:
    found = find_tensor(known, f"{path}.weight")
    if found is None:
        raise SpecError(f'"{name}" adapts a layer that the model does not have')
    prefix, weight = found
    entry = known[weight]
    terms = ax.parse(spec.tensors[entry.pattern]).terms
    stack, terms = (terms[:1], terms[1:]) if entry.parent is not None else ((), terms)
    if len(terms) < 2:
        raise SpecError(f'"{name}" adapts "{weight}", which has no input and output: {entry.axes}')
    first, second, *rest = terms
    if _is_input(first) and not _is_input(second):
        return Layer(prefix, entry.pattern, stack, second, first, tuple(rest))
    return Layer(prefix, entry.pattern, stack, first, second, tuple(rest))


def _is_input(term: ax.Term) -> bool:
    """Is this axis contracted with what the layer reads: are all of its spaces starred? (A key's
    output has a star on `qk` alone.)
    """
    inner = list(ax.leaves(term))
    return bool(inner) and all(leaf.star for leaf in inner)


def _lora_terms(layer: Layer, kind: str, what: str | None, name: str) -> tuple[ax.Term, ...]:
    match kind, what:
        case "lora_A", "weight":
            return (_HOLE, layer.into, *layer.rest)
        case "lora_B", "weight":
            return (layer.out, _HOLE, *(_HOLE for _ in layer.rest))
        case "lora_B", "bias":
            return (layer.out,)
        # An embedding's table is [rows, width]: what it adds is (B A)^T, so its rows are A's and
        # its width is B's.
        case "lora_embedding_A", None:
            return (_HOLE, layer.out)
        case "lora_embedding_B", None:
            return (layer.into, _HOLE)
        case "lora_magnitude_vector", _ if not layer.rest and not layer.stack:
            return ax.parse(
                ax.bar(str(ax.Axes((layer.into if layer.is_table else layer.out,))))
            ).terms
    raise SpecError(f'"{name}" is no tensor of a LoRA adapter that can be moved')


def move_adapter(
    g: Element, state: Mapping[str, Tensor], part: str | None = None
) -> dict[str, Tensor]:
    """A new adapter, moved by an element of the model: all of it, or what belongs to one part. A
    lock moves the backbone; `~g` brings it back.
    """
    return apply(element_for(g, state), state, part)


def element_for(g: Element, tensors: Mapping[str, Shaped]) -> Element:
    """The same element over the spec of an adapter with these tensors, whose shapes are looked
    at.
    """
    spec = adapter_spec(g.spec, tensors)
    sizes = replace(
        spec, tensors={n: axes.replace("|", "") for n, axes in spec.tensors.items()}
    )  # bars say how an axis moves, not how long it is
    require(
        check(sizes, tensors, complete=False),
        f'the adapter does not fit the spec "{spec.family}"',
        hint=HINT,
    )
    _require_magnitudes(g, tensors)
    return g.to(spec)


def require_lora(folder: Path) -> None:
    """Refuse an adapter whose adapter_config.json, if there is one, says that it is something else
    than LoRA on the model's own layers.
    """
    from regauge.checkpoints.reader import read_json

    path = folder / "adapter_config.json"
    if not path.is_file():
        return
    config = read_json(path)
    if config.get("peft_type", "LORA") != "LORA":
        raise SpecError(
            f"{path} describes a {config['peft_type']} adapter; only LORA is moved",
            hint="merge it into its model and move that",
        )
    for key in ("layer_replication", "target_parameters", "megatron_config"):
        if config.get(key):
            raise SpecError(
                f'{path} says "{key}", so its tensors are not those of the model\'s layers',
                hint="merge it into its model and move that",
            )


def _require_magnitudes(g: Element, names: Iterable[str]) -> None:
    known = stored_tensors(g.spec)
    for name in names:
        found = LORA.fullmatch(name)
        if found is None or found["kind"] != "lora_magnitude_vector":
            continue
        layer = _find_layer(g.spec, known, name, unwrap_name(found["layer"]))
        written, read = (layer.into, layer.out) if layer.is_table else (layer.out, layer.into)
        for side, term, group, allowed in (
            ("output", written, SignedPermutation(), "signed permutations"),
            ("input", read, Orthogonal(), "rotations"),
        ):
            for leaf in ax.leaves(term):
                member = g.members.get(leaf.space)
                if member is not None and group.fault(member):
                    raise ElementError(
                        f'"{name}" holds the norms of rows, which on the layer\'s {side} follow '
                        f"{allowed} only; "
                        f'the element does more on "{leaf.space}"',
                        hint="merge the adapter into its model and move that",
                    )

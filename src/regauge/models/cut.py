"""The cut of an unmodified model of transformers or timm into embedding, backbone and head.

The backbone is the model's own loop over its blocks. A *route* passes that loop to a function:
every block is called as usual, but all except the last only record their arguments and return the
stream unchanged, and the last one returns `fn(crossing)`. The crossing holds the recorded
arguments, by the names of the forward's parameters, and `crossing.run()` runs the real blocks.

    # bit for bit the same
    with cut(model).route(lambda c: c.run()):
        model(**inputs)
    # the edges of a locked backbone
    with cut(locked).route(lambda c: c.restore(g, c.transform(g).run())):
        locked.generate(**inputs)

Modules, parameters, hooks and the state dict are unchanged: a route uses only the slot that torch
has for a compiled call, which neither deepcopy nor pickle copies. So a copy of a routed model is
not routed.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from regauge.core import axes as ax
from regauge.core.action import act
from regauge.core.element import Element
from regauge.errors import CutError, UnknownModelError
from regauge.models.families import Boundary, family_of
from regauge.models.families.pieces import Config, Names
from regauge.models.resolve import config_of, discover_unknown

if TYPE_CHECKING:
    from regauge.models.sources import Source

Tensor = torch.Tensor
Fn = Callable[["Crossing"], Tensor]

# Spaces of activations alone: no weight has them, and so a model's spec does not contain them.
TOKEN_SPACES = frozenset({"token", "source"})


@dataclass(frozen=True)
class Call:
    """The arguments of one block, positional and by keyword, as (argument, key into the crossing's
    inputs).
    """

    args: tuple[tuple[str, str], ...]
    kwargs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class Crossing:
    """The inputs of a backbone's blocks in one forward pass, before any block runs.

    Tensors for which the boundary declares axes are transformed by `transform`; everything else
    (caches, flags) crosses unchanged.

    Attributes:
        boundary: where the model is cut.
        inputs: the arguments by name; a value that only later blocks receive (Gemma 2 has two
            masks) is stored under "name@block".
        calls: the arguments of each block.
        blocks: the blocks.
        callables: the functions that run the blocks.
        derived: inputs that were computed by the blocks here, and so are already transformed.
    """

    boundary: Boundary
    inputs: Mapping[str, Any]
    calls: tuple[Call, ...]
    blocks: tuple[torch.nn.Module, ...]
    callables: tuple[Callable[..., Any], ...]
    derived: frozenset[str] = frozenset()

    @property
    def stream(self) -> Tensor:
        """Return the stream at the entry of the backbone."""
        return self.inputs[self.boundary.stream]  # type: ignore[no-any-return]

    def axes(self, key: str) -> str | None:
        """Return the axes of an input, or None if it crosses unchanged."""
        return self.boundary.enter.get(key.partition("@")[0])

    @property
    def tensors(self) -> dict[str, Any]:
        """Return the inputs that have axes and are not None: tensors, or tuples of tensors (rotary
        tables).
        """
        return {
            key: value
            for key, value in self.inputs.items()
            if self.axes(key) is not None and value is not None
        }

    def with_inputs(self, **inputs: Any) -> Crossing:
        """Return the crossing with some inputs replaced.

        Raises:
            CutError: the blocks have no such argument.
        """
        unknown = inputs.keys() - self.inputs.keys()
        if unknown:
            raise CutError(
                f'the blocks have no argument "{min(unknown)}"',
                hint=f"their arguments are {', '.join(self.inputs)}",
            )
        return replace(self, inputs={**self.inputs, **inputs})

    def run(self, **inputs: Any) -> Tensor:
        """Run the blocks locally, with some inputs replaced, and return the stream that leaves
        them.
        """
        values = {**self.with_inputs(**inputs).inputs}
        z: Any = values[self.boundary.stream]
        carried: dict[str, Any] = {}
        for block, call in zip(self.callables, self.calls, strict=True):
            arguments = {**values, self.boundary.stream: z}
            args = [carried.get(name, arguments[key]) for name, key in call.args]
            result = block(
                *args, **{name: carried.get(name, arguments[key]) for name, key in call.kwargs}
            )
            z = result
            if self.boundary.returns:
                z, *rest = result
                carried = {
                    name: value
                    for name, value in zip(self.boundary.returns[1:], rest, strict=False)
                    if name
                }
        return z  # type: ignore[no-any-return]

    def transform(self, g: Element) -> Crossing:
        """Transform every input that has axes by an element.

        Spaces that the element's spec lacks are left unchanged: an element of the model leaves the
        tokens alone, and one whose spec has only `token` permutes rows, masks, position ids and
        rotary tables together. That requires an explicit mask: models that leave a causal one to
        the kernel (sdpa, flash) must receive it as a 4-D tensor, or use eager attention.

        Raises:
            CutError: the tokens cannot be permuted here, or an input lacks the declared axes.
        """
        if "token" not in g.members:
            return replace(
                self,
                inputs={
                    key: v if key in self.derived else _transform(g, v, self.axes(key))
                    for key, v in self.inputs.items()
                },
            )
        if not any("token" in ax.spaces(axes) for axes in self.boundary.enter.values()):
            raise CutError(f'no input of "{self.boundary.blocks}" has tokens that may be permuted')
        explicit = self._explicit()
        return replace(
            explicit,
            inputs={
                key: _transform(g, value, explicit.axes(key))
                for key, value in explicit.inputs.items()
            },
        )

    def _explicit(self) -> Crossing:
        """Return the crossing with everything that the blocks would compute from the order of their
        rows.

        It is computed by the blocks here, and so is transformed already if they are.
        """
        derived: dict[str, Any] = {}
        for name, make in self.boundary.implicit.items():
            values = [v for key, v in self.inputs.items() if key.partition("@")[0] == name]
            if values and all(v is not None for v in values):
                continue
            if make is None:
                raise CutError(
                    f'the blocks compute "{name}" from the order of their rows, so the rows '
                    "cannot be permuted",
                    hint="pass the model a 4-D mask, or call model.set_attn_implementation('eager')"
                    if name == "attention_mask"
                    else None,
                )
            derived[name] = make(self.blocks[0], self.inputs)
        return replace(
            self, inputs={**self.inputs, **derived}, derived=self.derived | derived.keys()
        )

    def restore(self, g: Element, z: Tensor) -> Tensor:
        """Return the stream that a transformed backbone returned, as the head expects it."""
        return _transform(~g, z, self.boundary.leave)  # type: ignore[no-any-return]


def _transform(g: Element, value: Any, axes: str | None) -> Any:
    """Transform a tensor, or each of a tuple of tensors, by an element."""
    if axes is None or value is None:
        return value
    if isinstance(value, tuple | list):
        return type(value)(_transform(g, v, axes) for v in value)
    if not isinstance(value, torch.Tensor):
        raise CutError(f"an input with axes {axes!r} must be a tensor, got {type(value).__name__}")
    terms = ax.parse(axes).terms
    if len(terms) != value.dim():
        raise CutError(
            f"an input with axes {axes!r} has shape {list(value.shape)}",
            hint="masks cross as 4-D tensors; pass one to the model, or choose "
            "attn_implementation='eager' or 'sdpa'",
        )
    sizes = g.spec.sizes
    unknown = ax.spaces(axes) - sizes.keys() - TOKEN_SPACES
    if unknown and not sizes.keys() <= TOKEN_SPACES:
        raise CutError(
            f'the boundary uses the space "{min(unknown)}", which the element\'s spec lacks',
            hint="sample the element from this model's spec",
        )
    masked = ax.Axes(
        tuple(
            ax.Hole() if n == 1 and ax.size(t, sizes) != 1 else t
            for t, n in zip(_mask_unknown(terms, sizes), value.shape, strict=True)
        )
    )
    return act(g, value, str(masked)) if ax.spaces(str(masked)) else value


def _mask_unknown(terms: Sequence[ax.Term], sizes: Mapping[str, int]) -> tuple[ax.Term, ...]:
    """Replace every space that `sizes` does not contain by `_`."""
    out: list[ax.Term] = []
    for term in terms:
        match term:
            case ax.Leaf():
                out.append(term if term.space in sizes else ax.Hole())
            case ax.Product():
                out.append(ax.Product(_mask_unknown(term.factors, sizes), term.star))
            case ax.Sum():
                inner = _mask_unknown(term.terms, sizes)
                out.append(
                    ax.Hole() if all(isinstance(t, ax.Hole) for t in inner) else ax.Sum(inner)
                )
            case ax.Hole():
                out.append(term)
    return tuple(out)


@dataclass(frozen=True, eq=False)
class Cut:
    """A model and its boundaries. Encoder-decoders and CLIP have several, identified by name; other
    models have one, named "".
    """

    model: torch.nn.Module
    boundaries: tuple[Boundary, ...]

    def route(self, fn: Fn | Mapping[str, Fn]) -> Route:
        """Route the backbone through `fn(crossing) -> stream` until the route is removed.

        Args:
            fn: one function for all boundaries (`crossing.boundary.name` distinguishes them), or a
                mapping from boundary names to functions; boundaries that it omits run as usual.

        Returns:
            The route; use it as a context manager, or call `remove()`. Routes nest: a later one
            uses the earlier one as its blocks.
        """
        return Route(self, self._per_boundary(fn))

    def embed(
        self, *args: Any, results: Tensor | Mapping[str, Tensor] | None = None, **inputs: Any
    ) -> Crossing:
        """Run the first part of the model, up to the backbone. With several boundaries, stop at the
        first one for which `results` has no stream.
        """
        streams = self._results(results)
        routes: dict[str, Fn] = {
            b.name: _return_stream(streams[b.name]) if b.name in streams else _raise_crossing
            for b in self.boundaries
        }
        try:
            with self.route(routes):
                self.model(*args, **inputs)
        except _CrossingReachedError as stop:
            return stop.crossing
        raise CutError(
            "the model did not call its backbone",
            hint="every boundary already has a result; call head",
        )

    def backbone(self, crossing: Crossing) -> Tensor:
        """Run the second part of the model locally."""
        return crossing.run()

    def head(self, results: Tensor | Mapping[str, Tensor], *args: Any, **inputs: Any) -> Any:
        """Run the last part of the model on the stream that left each backbone. This calls the
        whole model, so the embedding is computed again and discarded.
        """
        streams = self._results(results)
        with self.route({name: _return_stream(z) for name, z in streams.items()}):
            return self.model(*args, **inputs)

    def _results(self, results: Tensor | Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
        """Return the streams by boundary name."""
        if isinstance(results, torch.Tensor):
            if len(self.boundaries) > 1:
                raise CutError(
                    "the model has several boundaries: "
                    f"{', '.join(b.name for b in self.boundaries)}",
                    hint="pass {name: stream}",
                )
            return {self.boundaries[0].name: results}
        return results or {}

    def _per_boundary(self, fn: Fn | Mapping[str, Fn]) -> dict[str, Fn]:
        """Return the function of each boundary that is routed."""
        names = [b.name for b in self.boundaries]
        if not isinstance(fn, Mapping):
            return dict.fromkeys(names, fn)
        for name in fn.keys() - set(names):
            raise CutError(
                f'the model has no boundary "{name}"', hint=f"its boundaries are {', '.join(names)}"
            )
        return dict(fn)


class _CrossingReachedError(BaseException):
    """Carries a crossing out of the model. Not an Exception, so that no handler on the way catches
    it.
    """

    def __init__(self, crossing: Crossing) -> None:
        super().__init__()
        self.crossing = crossing


def _raise_crossing(crossing: Crossing) -> Tensor:
    raise _CrossingReachedError(crossing)


def _return_stream(z: Tensor) -> Fn:
    return lambda crossing: z


def cut(
    model: Source,
    config: Mapping[str, Any] | None = None,
    *,
    boundaries: Sequence[Boundary] | None = None,
) -> Cut:
    """Find where a model is cut.

    A model of no known family is cut where its graph shows blocks that pass a stream on
    (`regauge.models.discovery`).

    Args:
        model: a live module, or a path, a hub id or a checkpoint, which is loaded.
        config: a config to use instead of the model's own.
        boundaries: the boundaries of a custom module.

    Returns:
        The cut, with `embed`, `backbone` and `head`.

    Raises:
        CutError: the model has no blocks at its boundaries, or no boundaries.

    Example:
        >>> cut = regauge.cut(model)
        >>> crossing = cut.embed(input_ids=torch.arange(6)[None])
        >>> cut.head(cut.backbone(crossing), input_ids=torch.arange(6)[None]).logits.shape
        torch.Size([1, 6, 30])
    """
    from regauge.models.load import load_model

    model = load_model(model)
    if boundaries is None:
        try:
            config = config_of(model) if config is None else config
            boundaries = family_of(config).boundaries(Config(config), Names(model.state_dict()))
        except UnknownModelError as unknown:
            boundaries = discover_unknown(model, unknown).boundaries
            if not boundaries:
                raise CutError(
                    f"this {type(model).__name__} has no list of blocks that pass a stream on, so "
                    "it cannot be cut",
                    hint="pass boundaries=[Boundary(...)] (docs/cut.md)",
                ) from unknown
    present = tuple(b for b in boundaries if _get_submodule(model, b.blocks) is not None)
    if not present:
        tried = " or ".join(b.blocks for b in boundaries)
        why = (
            f"has no blocks at {tried}"
            if boundaries
            else "cannot be cut: its family defines no boundary for it"
        )
        raise CutError(
            f"this {type(model).__name__} {why}",
            hint="pass boundaries=[Boundary(...)] for a custom module",
        )
    return Cut(model, present)


def _get_submodule(model: torch.nn.Module, path: str) -> torch.nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


class Route:
    """An installed route. `remove()` uninstalls it; as a context manager it removes itself."""

    def __init__(self, cut: Cut, fns: Mapping[str, Fn]) -> None:
        self._passes: list[_BlockStubs] = []
        config = getattr(cut.model, "config", None)
        has_layerdrop = any(
            getattr(config, name, 0)
            for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
        )
        for boundary in cut.boundaries:
            if boundary.name in fns:
                container = cut.model.get_submodule(boundary.blocks)
                if isinstance(container, torch.nn.ModuleList | torch.nn.Sequential):
                    blocks = tuple(container)
                else:
                    blocks = (container,)
                if len({id(b) for b in blocks}) < len(blocks):
                    raise CutError(
                        f'a block occurs twice in "{boundary.blocks}"',
                        hint="a route needs distinct blocks; copy the shared one",
                    )
                stubs = _BlockStubs(boundary, blocks, fns[boundary.name], has_layerdrop)
                self._passes.append(stubs)

    def remove(self) -> None:
        """Restore the blocks. A second call has no effect."""
        while self._passes:
            self._passes[-1].remove()
            self._passes.pop()

    def __enter__(self) -> Route:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


class _BlockStubs:
    """The stubs of one boundary's blocks. The arguments recorded in one pass are thread-local."""

    def __init__(
        self, boundary: Boundary, blocks: tuple[torch.nn.Module, ...], fn: Fn, has_layerdrop: bool
    ) -> None:
        self.boundary, self.blocks, self.fn, self.has_layerdrop = (
            boundary,
            blocks,
            fn,
            has_layerdrop,
        )
        self.signatures = [inspect.signature(b.forward) for b in blocks]
        self.previous = [b._compiled_call_impl for b in blocks]
        self.callables = tuple(
            impl or b._call_impl for b, impl in zip(blocks, self.previous, strict=True)
        )
        self.recorded = threading.local()
        self.stubs: list[Any] = [
            torch.compiler.disable(_make_stub(self, i)) for i in range(len(blocks))
        ]
        # torch.compile bypasses `__call__`, and with it the stubs, unless the instance has its own
        # forward.
        self.marked = [b for b in blocks if "forward" not in b.__dict__]
        for block, stub in zip(blocks, self.stubs, strict=True):
            block._compiled_call_impl = stub
        for block in self.marked:
            block.forward = block.forward

    def remove(self) -> None:
        """Restore the blocks."""
        for block, stub in zip(self.blocks, self.stubs, strict=True):
            if block._compiled_call_impl is not stub:
                raise CutError(
                    "another route was installed over this one",
                    hint="remove routes in the reverse order of their creation",
                )
        for block, before in zip(self.blocks, self.previous, strict=True):
            del block._compiled_call_impl
            if before is not None:
                block._compiled_call_impl = before
        for block in self.marked:
            del block.forward

    def call(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the arguments of block `i`; at the last block, call the route's function."""
        block = self.blocks[i]
        if block.training and getattr(block, "gradient_checkpointing", False):
            raise CutError(
                "gradient checkpointing would run a routed backbone twice",
                hint="call model.gradient_checkpointing_disable() first",
            )
        if block.training and self.has_layerdrop:
            raise CutError(
                "layerdrop skips blocks, and with them the route",
                hint="set layerdrop to 0, or call model.eval()",
            )
        recorded: list[tuple[inspect.BoundArguments, int]] = (
            [] if i == 0 else getattr(self.recorded, "calls", [])
        )
        if len(recorded) != i:
            raise CutError(
                f'block {i} of "{self.boundary.blocks}" was called before block {len(recorded)}'
            )
        recorded.append((self.signatures[i].bind(*args, **kwargs), len(args)))
        self.recorded.calls = recorded
        z = self._stream(recorded[-1][0])
        if i > 0 and z is not self._stream(recorded[0][0]):
            raise CutError(
                f'the model changes the stream between the blocks of "{self.boundary.blocks}"',
                hint="cut it around a larger module",
            )
        if i + 1 == len(self.blocks):
            self.recorded.calls = []
            z = self.fn(self._crossing(recorded))
            if not isinstance(z, torch.Tensor):
                raise CutError(f"a route's function must return a tensor, got {type(z).__name__}")
        return (z, *(None for _ in self.boundary.returns[1:])) if self.boundary.returns else z

    def _stream(self, bound: inspect.BoundArguments) -> Any:
        return bound.arguments[self.boundary.stream]

    def _crossing(self, recorded: list[tuple[inspect.BoundArguments, int]]) -> Crossing:
        """Build the crossing from the recorded arguments."""
        inputs: dict[str, Any] = {}
        calls = []
        carried = {self.boundary.stream, *self.boundary.returns[1:]}
        for i, (bound, n_positional) in enumerate(recorded):
            arguments = _bound_arguments(bound)
            keys = {}
            for name, value in arguments.items():
                keys[name] = (
                    name if i > 0 and name in carried else _input_key(inputs, name, value, i)
                )
            pairs = tuple(keys.items())
            calls.append(Call(pairs[:n_positional], pairs[n_positional:]))
        return Crossing(self.boundary, inputs, tuple(calls), self.blocks, self.callables)


def _make_stub(stubs: _BlockStubs, i: int) -> Callable[..., Any]:
    def stub(*args: Any, **kwargs: Any) -> Any:
        return stubs.call(i, args, kwargs)

    return stub


def _bound_arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return the arguments by name, in the order of the signature, with `**kwargs` expanded."""
    out: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            out |= value
        else:
            out[name] = value
    return out


def _input_key(inputs: dict[str, Any], name: str, value: Any, block: int) -> str:
    """Return the key of an argument's value; equal values of several blocks are stored once."""
    for key in inputs:
        if key.partition("@")[0] == name and _is_same(inputs[key], value):
            return key
    key = name if name not in inputs else f"{name}@{block}"
    inputs[key] = value
    return key


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (
        isinstance(a, int | float | str | tuple)
        and type(a) is type(b)
        and _is_plain(a)
        and bool(a == b)
    )


def _is_plain(a: Any) -> bool:
    return (
        all(_is_plain(x) for x in a) if isinstance(a, tuple) else isinstance(a, int | float | str)
    )

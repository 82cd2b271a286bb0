"""The cut: embed | backbone | head of an unmodified model of the transformers library or timm.

The backbone is the model's own loop over its blocks. A *route* hands that loop to a function: every
block is called as ever, but the first ones only note what they were given and pass the stream on,
and the last one calls `fn(crossing)`, whose result leaves the backbone in their place. The crossing
holds what the blocks were given, by the names of their forward's arguments, and `crossing.run()`
runs the real blocks.

    with cut(model).route(lambda c: c.run()):                            # nothing changes, bit for
    bit
        model(**inputs)
    with cut(locked).route(lambda c: c.restored(g, c.moved(g).run())):   # the edges of a locked
    backbone
        locked.generate(**inputs)

Modules, parameters, hooks and the state dict stay as they are: only the slot that torch keeps for a
compiled call is taken, which neither deepcopy nor pickle carries along. So a copy of a routed model
is not routed.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from regauge.core import axes as ax
from regauge.core.action import act
from regauge.core.element import Element
from regauge.errors import CutError, UnknownModelError
from regauge.models.families import Boundary, family_of
from regauge.models.families.pieces import Config, Names
from regauge.models.resolve import config_of, discover_unknown

Tensor = torch.Tensor
Fn = Callable[["Crossing"], Tensor]

# Spaces of activations alone: no weight has them, so a model's spec does not either.
TOKEN_SPACES = frozenset({"token", "source"})


@dataclass(frozen=True)
class Call:
    """How one block was called: (argument, key into the crossing's inputs), by place and by
    name.
    """

    args: tuple[tuple[str, str], ...]
    kwargs: tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class Crossing:
    """What the blocks of one backbone were given in one pass, before any of them ran.

    `inputs` goes by the argument's name; a value that only later blocks are given (Gemma 2 has two
    masks) goes by "name@block". Tensors that the boundary gives axes for are moved by `moved`;
    everything else (caches, flags) crosses as it is.
    """

    boundary: Boundary
    inputs: Mapping[str, Any]
    calls: tuple[Call, ...]
    blocks: tuple[torch.nn.Module, ...]
    callables: tuple[Callable[..., Any], ...]
    derived: frozenset[str] = frozenset()

    @property
    def stream(self) -> Tensor:
        """The stream where it enters the backbone."""
        return self.inputs[self.boundary.stream]  # type: ignore[no-any-return]

    def axes(self, key: str) -> str | None:
        """The axes of an input, or None if it crosses as it is."""
        return self.boundary.enter.get(key.partition("@")[0])

    @property
    def tensors(self) -> dict[str, Any]:
        """The inputs that have axes and are there: tensors, or tuples of tensors (rotary
        tables).
        """
        return {
            key: value
            for key, value in self.inputs.items()
            if self.axes(key) is not None and value is not None
        }

    def with_inputs(self, **inputs: Any) -> Crossing:
        """The same crossing with other values for some inputs."""
        unknown = inputs.keys() - self.inputs.keys()
        if unknown:
            raise CutError(
                f'the blocks were given no "{min(unknown)}"',
                hint=f"they were given {', '.join(self.inputs)}",
            )
        return replace(self, inputs={**self.inputs, **inputs})

    def run(self, **inputs: Any) -> Tensor:
        """Run the real blocks here, with these inputs replaced, and return the stream where it
        leaves them.
        """
        values = {**self.with_inputs(**inputs).inputs}
        z: Any = values[self.boundary.stream]
        carried: dict[str, Any] = {}
        for block, call in zip(self.callables, self.calls, strict=True):
            given = {**values, self.boundary.stream: z}
            args = [carried.get(name, given[key]) for name, key in call.args]
            result = block(
                *args, **{name: carried.get(name, given[key]) for name, key in call.kwargs}
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
        """Every input with axes moved by an element.

        Spaces that the element's spec does not have stay as they are: an element of the model
        leaves the tokens alone, and one whose spec has only `token` moves rows, masks, position ids
        and rotary tables together. That needs the mask: models that leave a causal one to the
        kernel (sdpa, flash) must be given it as a 4-D tensor, or be set to eager attention.
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
            raise CutError(
                f'nothing that crosses at "{self.boundary.blocks}" has tokens that may change '
                "places"
            )
        here = self._explicit()
        return replace(
            here,
            inputs={
                key: _transform(g, value, here.axes(key)) for key, value in here.inputs.items()
            },
        )

    def _explicit(self) -> Crossing:
        """The same crossing with everything that the blocks would make from the order of their
        rows.

        It is made by the blocks that are here, and so is as moved as they are already.
        """
        made: dict[str, Any] = {}
        for name, make in self.boundary.implicit.items():
            given = [v for key, v in self.inputs.items() if key.partition("@")[0] == name]
            if given and all(v is not None for v in given):
                continue
            if make is None:
                raise CutError(
                    f'the blocks make "{name}" from the order of their rows, so the rows cannot '
                    "move",
                    hint="pass the model a 4-D mask, or call model.set_attn_implementation('eager')"
                    if name == "attention_mask"
                    else None,
                )
            made[name] = make(self.blocks[0], self.inputs)
        return replace(self, inputs={**self.inputs, **made}, derived=self.derived | made.keys())

    def restore(self, g: Element, z: Tensor) -> Tensor:
        """The stream that a moved backbone returned, as the head expects it."""
        return _transform(~g, z, self.boundary.leave)  # type: ignore[no-any-return]


def _transform(g: Element, value: Any, axes: str | None) -> Any:
    if axes is None or value is None:
        return value
    if isinstance(value, tuple | list):
        return type(value)(_transform(g, v, axes) for v in value)
    if not isinstance(value, torch.Tensor):
        raise CutError(f"only tensors have axes; {axes!r} was given a {type(value).__name__}")
    terms = ax.parse(axes).terms
    if len(terms) != value.dim():
        raise CutError(
            f"a tensor of shape {list(value.shape)} crosses where the boundary says {axes!r}",
            hint="masks cross as 4-D tensors; pass one to the model, or choose "
            "attn_implementation='eager' or 'sdpa'",
        )
    sizes = g.spec.sizes
    strange = ax.spaces(axes) - sizes.keys() - TOKEN_SPACES
    if strange and not sizes.keys() <= TOKEN_SPACES:
        raise CutError(
            f'the boundary speaks of "{min(strange)}", which the element\'s model does not have',
            hint="draw the element from this model's spec",
        )
    known = ax.Axes(
        tuple(
            ax.Hole() if n == 1 and ax.size(t, sizes) != 1 else t
            for t, n in zip(_mask_unknown(terms, sizes), value.shape, strict=True)
        )
    )
    return act(g, value, str(known)) if ax.spaces(str(known)) else value


def _mask_unknown(terms: Sequence[ax.Term], sizes: Mapping[str, int]) -> tuple[ax.Term, ...]:
    """The terms, with `_` for every space that the sizes do not name."""
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
    """A model and where it is cut. Encoder-decoders and CLIP have several boundaries, known by
    name; others one, named "".
    """

    model: torch.nn.Module
    boundaries: tuple[Boundary, ...]

    def route(self, fn: Fn | Mapping[str, Fn]) -> Route:
        """Hand the backbone to `fn(crossing) -> stream` until the returned route is removed, or for
        the length of a `with` block.

        With several boundaries `fn` serves them all (`crossing.boundary.name` tells them apart), or
        a mapping names some; the others run as ever. Routes nest: a later one sees the earlier as
        its blocks.
        """
        return Route(self, self._per_boundary(fn))

    def embed(
        self, *args: Any, results: Tensor | Mapping[str, Tensor] | None = None, **inputs: Any
    ) -> Crossing:
        """The model's first part: everything up to the backbone. With several boundaries, the next
        one that `results` has no stream for.
        """
        done = self._results(results)
        routes: dict[str, Fn] = {
            b.name: _return_stream(done[b.name]) if b.name in done else _raise_crossing
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
        """The model's second part, on this machine."""
        return crossing.run()

    def head(self, results: Tensor | Mapping[str, Tensor], *args: Any, **inputs: Any) -> Any:
        """The model's last part, given the stream that left each backbone. It calls the model, and
        so computes embed again without using it.
        """
        done = self._results(results)
        with self.route({name: _return_stream(z) for name, z in done.items()}):
            return self.model(*args, **inputs)

    def _results(self, results: Tensor | Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
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
        names = [b.name for b in self.boundaries]
        if not isinstance(fn, Mapping):
            return dict.fromkeys(names, fn)
        for name in fn.keys() - set(names):
            raise CutError(
                f'the model has no boundary "{name}"', hint=f"its boundaries are {', '.join(names)}"
            )
        return dict(fn)


class _CrossingReachedError(BaseException):
    """Carries a crossing out of the model. No Exception, so that nothing on the way swallows it."""

    def __init__(self, crossing: Crossing) -> None:
        super().__init__()
        self.crossing = crossing


def _raise_crossing(crossing: Crossing) -> Tensor:
    raise _CrossingReachedError(crossing)


def _return_stream(z: Tensor) -> Fn:
    return lambda crossing: z


def cut(
    model: torch.nn.Module,
    config: Mapping[str, Any] | None = None,
    *,
    boundaries: Sequence[Boundary] | None = None,
) -> Cut:
    """Where a model is cut: as the family of its config says (its own, or a given one), or at given
    boundaries for a module of your own.

    A model that no family knows is cut where its graph shows that blocks hand a stream on
    (`regauge.models.discovery`).
    """
    if boundaries is None:
        try:
            config = config_of(model) if config is None else config
            boundaries = family_of(config).boundaries(Config(config), Names(model.state_dict()))
        except UnknownModelError as unknown:
            boundaries = discover_unknown(model, unknown).boundaries
            if not boundaries:
                raise CutError(
                    f"this {type(model).__name__} has no list of blocks that hand a stream from "
                    "one to the next, so that it could be cut there",
                    hint="pass boundaries=[Boundary(...)] (docs/cut.md)",
                ) from unknown
    here = tuple(b for b in boundaries if _get_submodule(model, b.blocks) is not None)
    if not here:
        tried = " or ".join(b.blocks for b in boundaries)
        why = (
            f"has no blocks at {tried}"
            if boundaries
            else "is of a kind that its family does not cut"
        )
        raise CutError(
            f"this {type(model).__name__} {why}",
            hint="pass boundaries=[Boundary(...)] for a module of your own",
        )
    return Cut(model, here)


def _get_submodule(model: torch.nn.Module, path: str) -> torch.nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


class Route:
    """An installed route. `remove()` takes it away; as a context manager it removes itself."""

    def __init__(self, cut: Cut, fns: Mapping[str, Fn]) -> None:
        self._passes: list[_BlockStubs] = []
        config = getattr(cut.model, "config", None)
        drops = any(
            getattr(config, name, 0)
            for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
        )
        for boundary in cut.boundaries:
            if boundary.name in fns:
                found = _get_submodule(cut.model, boundary.blocks)
                listed = isinstance(found, torch.nn.ModuleList | torch.nn.Sequential)
                blocks = tuple(found) if listed else (found,)  # type: ignore[arg-type]
                if len({id(b) for b in blocks}) < len(blocks):
                    raise CutError(
                        f'one block stands twice in "{boundary.blocks}"',
                        hint="a route needs blocks of their own; copy the shared one",
                    )
                self._passes.append(_BlockStubs(boundary, blocks, fns[boundary.name], drops))  # type: ignore[arg-type]

    def remove(self) -> None:
        """Give the blocks back. A second call does nothing."""
        while self._passes:
            self._passes[-1].remove()
            self._passes.pop()

    def __enter__(self) -> Route:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


class _BlockStubs:
    """The stand-ins of one boundary's blocks. What one pass has noted so far is kept per thread."""

    def __init__(
        self, boundary: Boundary, blocks: tuple[torch.nn.Module, ...], fn: Fn, drops: bool
    ) -> None:
        self.boundary, self.blocks, self.fn, self.has_layerdrop = boundary, blocks, fn, drops
        self.signatures = [inspect.signature(b.forward) for b in blocks]
        self.previous = [b._compiled_call_impl for b in blocks]
        self.callables = tuple(
            impl or b._call_impl for b, impl in zip(blocks, self.previous, strict=True)
        )
        self.recorded = threading.local()
        self.stubs: list[Any] = [
            torch.compiler.disable(_make_stub(self, i))  # type: ignore[no-untyped-call]
            for i in range(len(blocks))
        ]
        # torch.compile passes by `__call__`, and with it the stubs, unless the instance has a
        # forward of its own.
        self.marked = [b for b in blocks if "forward" not in b.__dict__]
        for block, stub in zip(blocks, self.stubs, strict=True):
            block._compiled_call_impl = stub
        for block in self.marked:
            block.forward = block.forward

    def remove(self) -> None:
        for block, stub in zip(self.blocks, self.stubs, strict=True):
            if block._compiled_call_impl is not stub:
                raise CutError(
                    "another route was laid over this one",
                    hint="remove routes in the reverse of the order in which they were made",
                )
        for block, before in zip(self.blocks, self.previous, strict=True):
            del block._compiled_call_impl
            if before is not None:
                block._compiled_call_impl = before
        for block in self.marked:
            del block.forward

    def call(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        block = self.blocks[i]
        if block.training and getattr(block, "gradient_checkpointing", False):
            raise CutError(
                "gradient checkpointing would run a routed backbone twice",
                hint="call model.gradient_checkpointing_disable() first",
            )
        if block.training and self.has_layerdrop:
            raise CutError(
                "layer dropping skips blocks, and with them the route",
                hint="set layerdrop to 0, or call model.eval()",
            )
        noted: list[tuple[inspect.BoundArguments, int]] = (
            [] if i == 0 else getattr(self.recorded, "calls", [])
        )
        if len(noted) != i:
            raise CutError(
                f'block {i} of "{self.boundary.blocks}" was called before block {len(noted)}'
            )
        noted.append((self.signatures[i].bind(*args, **kwargs), len(args)))
        self.recorded.calls = noted
        z = self._stream(noted[-1][0])
        if i > 0 and z is not self._stream(noted[0][0]):
            raise CutError(
                f'the model changes the stream between the blocks of "{self.boundary.blocks}"',
                hint="cut it around a larger module",
            )
        if i + 1 == len(self.blocks):
            self.recorded.calls = []
            z = self.fn(self._crossing(noted))
            if not isinstance(z, torch.Tensor):
                raise CutError(
                    f"a route's function returns the stream, a tensor, not a {type(z).__name__}"
                )
        return (z, *(None for _ in self.boundary.returns[1:])) if self.boundary.returns else z

    def _stream(self, bound: inspect.BoundArguments) -> Any:
        return bound.arguments[self.boundary.stream]

    def _crossing(self, noted: list[tuple[inspect.BoundArguments, int]]) -> Crossing:
        inputs: dict[str, Any] = {}
        calls = []
        carried = {self.boundary.stream, *self.boundary.returns[1:]}
        for i, (bound, places) in enumerate(noted):
            given = _bound_arguments(bound)
            keys = {}
            for name, value in given.items():
                keys[name] = (
                    name if i > 0 and name in carried else _input_key(inputs, name, value, i)
                )
            pairs = tuple(keys.items())
            calls.append(Call(pairs[:places], pairs[places:]))
        return Crossing(self.boundary, inputs, tuple(calls), self.blocks, self.callables)


def _make_stub(passing: _BlockStubs, i: int) -> Callable[..., Any]:
    def stub(*args: Any, **kwargs: Any) -> Any:
        return passing.call(i, args, kwargs)

    return stub


def _bound_arguments(bound: inspect.BoundArguments) -> dict[str, Any]:
    """The arguments by name, in the order of the signature, those of `**kwargs` under their own
    names.
    """
    out: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            out |= value
        else:
            out[name] = value
    return out


def _input_key(inputs: dict[str, Any], name: str, value: Any, block: int) -> str:
    """The key under which this value of this argument is kept; a value that an earlier block was
    given is kept once.
    """
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

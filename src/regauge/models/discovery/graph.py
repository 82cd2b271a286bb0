"""A module as a graph of tensor operators: `torch.export`, with what the rest of discovery asks of
it.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from regauge.errors import RegaugeError
from regauge.testing import name_outputs

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)'
)
_PREFIX = "module."
_LIBRARY = re.compile(r"[/\\]torch[/\\]")


class DiscoveryError(RegaugeError):
    """A module's symmetry could not be read off its graph."""


class _NamedOutputs(torch.nn.Module):
    """The module, returning its floating-point outputs by name and nothing else: caches are no part
    of the function.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        return name_outputs(self.module(*args, **kwargs))


@dataclass(frozen=True, eq=False)
class Graph:
    """The operators of a module. `names` maps a source node to the state dict's name, `kinds` to
    "parameter", "buffer", "constant" or "input".
    """

    nodes: tuple[fx.Node, ...]
    names: Mapping[fx.Node, str]
    kinds: Mapping[fx.Node, str]
    outputs: Mapping[str, fx.Node]
    ties: Mapping[str, str]
    unused: tuple[str, ...]
    constants: Mapping[
        fx.Node, torch.Tensor
    ]  # what is computed from constants alone, and is stored nowhere


def trace(
    module: torch.nn.Module,
    inputs: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Graph:
    """The graph of a module in evaluation mode on these inputs. `buffers`: the numbers of those
    that the module itself has on the meta device.
    """
    given = {
        k: torch.zeros_like(v, device="cpu") if isinstance(v, torch.Tensor) and v.is_meta else v
        for k, v in inputs.items()
    }
    if "use_cache" in inspect.signature(module.forward).parameters:
        given.setdefault("use_cache", False)
    was_training = module.training
    module.eval()
    try:
        with (
            torch.no_grad(),
            _disable_fastpath(),
            _batched_experts(module),
            _suppress_warnings(),
            _fake_tensors(module, buffers),
        ):
            program = torch.export.export(_NamedOutputs(module), (), given, strict=False)
    except Exception as error:  # torch.export raises whatever the module runs into
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DiscoveryError(
            f"torch.export cannot trace {type(module).__name__}: {first}",
            hint="data-dependent control flow and custom kernels cannot be traced; write a spec "
            "file instead (docs/adding-a-model.md)",
        ) from error
    finally:
        module.train(was_training)
    _make_concrete(program, given)
    return _build_graph(program, module)


@contextlib.contextmanager
def _fake_tensors(module: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A module on the meta device as if it lay in memory, without the memory. On that device a list
    of places that is written in the code would lose its numbers too, and with them all that follows
    from constants.
    """
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    there: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    made: dict[int, torch.Tensor] = {}  # tied parameters stay one
    for path, part in module.named_modules(remove_duplicate=False):
        for name, tensor in [*part._parameters.items(), *part._buffers.items()]:
            if tensor is None or not tensor.is_meta:
                continue
            if id(tensor) not in made:
                with mode:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                known = buffers.get(f"{path}.{name}" if path else name)
                made[id(tensor)] = (
                    torch.nn.Parameter(empty, tensor.requires_grad)
                    if name in part._parameters
                    else empty
                    if known is None
                    else known
                )
            held: dict[str, Any] = part._parameters if name in part._parameters else part._buffers
            there.append((held, name, tensor))
            held[name] = made[id(tensor)]
    try:
        yield
    finally:
        for held, name, tensor in there:
            held[name] = tensor


def _make_concrete(program: torch.export.ExportedProgram, given: Mapping[str, Any]) -> None:
    """Sizes that depend on data (a mask picks some tokens) become those of the example inputs."""
    from torch.utils import _pytree

    def is_open(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and any(not isinstance(n, int) for n in value.shape)

    if not any(
        is_open(v) for n in program.graph.nodes for v in _pytree.tree_leaves(n.meta.get("val"))
    ):
        return
    signature, inputs = program.graph_signature, iter(_pytree.tree_leaves(((), dict(given))))
    named = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    lifted = signature.inputs_to_lifted_tensor_constants
    values = []
    for node in (n for n in program.graph.nodes if n.op == "placeholder"):
        if node.name in named:
            name = named[node.name]
            values.append(program.state_dict.get(name, program.constants.get(name)))
        else:
            values.append(
                program.constants[lifted[node.name]] if node.name in lifted else next(inputs)
            )

    class Sizes(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.op == "call_function":
                n.meta["val"] = _pytree.tree_map_only(
                    torch.Tensor,
                    lambda t: torch.empty(t.shape, dtype=t.dtype, device="meta"),
                    result,
                )
            return result

    with torch.no_grad():
        Sizes(program.graph_module).run(*values)


def _build_graph(program: torch.export.ExportedProgram, module: torch.nn.Module) -> Graph:
    from regauge.models.discovery.constants import evaluate_constants

    signature = program.graph_signature
    sources = {
        **{k: ("parameter", v) for k, v in signature.inputs_to_parameters.items()},
        **{k: ("buffer", v) for k, v in signature.inputs_to_buffers.items()},
        **{k: ("constant", v) for k, v in signature.inputs_to_lifted_tensor_constants.items()},
    }
    names, kinds = {}, {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            kind, name = sources.get(node.name, ("input", node.name))
            names[node], kinds[node] = name.removeprefix(_PREFIX), kind
    spec = program.call_spec.out_spec
    keys = list(spec.context) if spec is not None else []
    last = next(n for n in reversed(program.graph.nodes) if n.op == "output")
    returned = [a for a in last.args[0] if isinstance(a, fx.Node)]
    mutated = len(returned) - len(keys)  # buffers that change come first
    outputs = dict(zip(keys, returned[mutated:], strict=True))
    live = _live_nodes(list(outputs.values()))
    read = {names[n] for n in live if kinds.get(n) == "parameter"}
    ties = _find_ties(module)
    read |= {ties[n] for n in read if n in ties}
    unread = tuple(
        n
        for n, _ in module.named_parameters(remove_duplicate=False)
        if n not in read and n not in ties
    )
    nodes = tuple(n for n in program.graph.nodes if n in live)
    constants = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    held = {n: program.constants.get(constants.get(n.name, "")) for n in names}
    known = evaluate_constants(
        nodes, {n: t for n, t in held.items() if isinstance(t, torch.Tensor) and _has_data(t)}
    )
    return Graph(nodes, names, kinds, outputs, ties, unread, known)


def _has_data(tensor: torch.Tensor) -> bool:
    from torch._subclasses import FakeTensor

    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _live_nodes(ends: list[fx.Node]) -> set[fx.Node]:
    """What the outputs depend on, and what changes any of that in place."""
    seen: set[fx.Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
            todo += [u for u in node.users if mutates(u) and u.args and u.args[0] is node]
    return seen


def parameter_dependent(graph: Graph) -> set[fx.Node]:
    """Nodes that depend on a parameter."""
    out: set[fx.Node] = set()
    for node in graph.nodes:
        if graph.kinds.get(node) == "parameter" or any(n in out for n in node.all_input_nodes):
            out.add(node)
    return out


def mutates(node: fx.Node) -> bool:
    """Does an operator write into its first argument?"""
    return (
        node.op == "call_function"
        and operator_name(node).endswith("_")
        and not operator_name(node).startswith("_")
    )


def operator_name(node: fx.Node) -> str:
    """The operator's name without its overload: `add` for aten.add.Tensor."""
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(target, "__name__", str(target))


def _find_ties(module: torch.nn.Module) -> dict[str, str]:
    """Names that repeat another parameter, which has the first of its names."""
    same: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        same.setdefault(id(p), []).append(name)
    return {alias: alike[0] for alike in same.values() for alias in alike[1:]}


@dataclass(frozen=True)
class SourceLocation:
    """Where in the source an operator stands, and in which module."""

    file: str
    line: int
    code: str
    module: str

    def __str__(self) -> str:
        return f"line {self.line} of {self.file}" if self.file else "an unknown line"


def source_location(node: fx.Node) -> SourceLocation:
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    path = path.removeprefix("module").removeprefix(".")
    if not frames:
        return SourceLocation("", 0, "", path)
    own = [
        f for f in frames if not _LIBRARY.search(f["file"])
    ]  # the model's line, not that of torch's own module
    last = (own or frames)[-1]
    return SourceLocation(
        "/".join(last["file"].split("/")[-2:]), int(last["line"]), last["code"].strip(), path
    )


@contextlib.contextmanager
def _disable_fastpath() -> Iterator[None]:
    """torch's encoder layers compute as written, not in one fused operator."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _batched_experts(module: torch.nn.Module) -> Iterator[None]:
    """Experts of the transformers library are computed in one batch: a loop over those that were
    chosen depends on data, and cannot be traced.
    """
    before = getattr(getattr(module, "config", None), "_experts_implementation", None)
    choose: Any = getattr(module, "set_experts_implementation", None)
    if before is None or choose is None:
        yield
        return
    try:
        choose("batched_mm")
        yield
    finally:
        choose(before)


@contextlib.contextmanager
def _suppress_warnings() -> Iterator[None]:
    """Warnings of torch.export about the module's own code are not the user's."""
    import logging
    import warnings

    loggers = [logging.getLogger(n) for n in ("torch.export", "torch._export", "torch.fx")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)

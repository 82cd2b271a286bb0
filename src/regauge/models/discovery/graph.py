"""The graph of a module's tensor operators, from `torch.export`."""

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

from regauge.errors import DiscoveryError
from regauge.testing import name_outputs

_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>[^\n]*)'
)
_PREFIX = "module."
_LIBRARY = re.compile(r"[/\\]torch[/\\]")


class _NamedOutputs(torch.nn.Module):
    """A wrapper that returns the floating-point outputs of a module by name and drops the others
    (caches).
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        return name_outputs(self.module(*args, **kwargs))


@dataclass(frozen=True, eq=False)
class Graph:
    """The operators of a module.

    Attributes:
        nodes: the operators that the outputs depend on, in order.
        names: the state dict's name of each source node.
        kinds: "parameter", "buffer", "constant" or "input" for each source node.
        outputs: the nodes of the outputs, by name.
        ties: for each alias of a tied parameter, its first name.
        unused: parameters that no output depends on.
        constants: the values of nodes that depend on constants alone and are not stored.
    """

    nodes: tuple[fx.Node, ...]
    names: Mapping[fx.Node, str]
    kinds: Mapping[fx.Node, str]
    outputs: Mapping[str, fx.Node]
    ties: Mapping[str, str]
    unused: tuple[str, ...]
    constants: Mapping[fx.Node, torch.Tensor]


def trace(
    module: torch.nn.Module,
    inputs: Mapping[str, Any],
    buffers: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Graph:
    """Trace a module in evaluation mode.

    Args:
        module: the module; it may be on the meta device.
        inputs: example inputs, as keyword arguments of forward.
        buffers: the values of buffers that the module itself has on the meta device.

    Raises:
        DiscoveryError: torch.export cannot trace the module.
    """
    kwargs = {
        k: torch.zeros_like(v, device="cpu") if isinstance(v, torch.Tensor) and v.is_meta else v
        for k, v in inputs.items()
    }
    if "use_cache" in inspect.signature(module.forward).parameters:
        kwargs.setdefault("use_cache", False)
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
            program = torch.export.export(_NamedOutputs(module), (), kwargs, strict=False)
    except Exception as error:  # torch.export raises exceptions of any type
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DiscoveryError(
            f"torch.export cannot trace {type(module).__name__}: {message}",
            hint="data-dependent control flow and custom kernels cannot be traced; write a spec "
            "file instead (docs/guides/adding-a-model.md)",
        ) from error
    finally:
        module.train(was_training)
    _make_concrete(program, kwargs)
    return _build_graph(program, module)


@contextlib.contextmanager
def _fake_tensors(module: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replace meta tensors of a module by fake CPU tensors, which take no memory. On the meta
    device, index lists written in the code would lose their values too, and with them everything
    computed from constants.
    """
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    originals: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    fakes: dict[int, torch.Tensor] = {}  # tied parameters stay one
    for path, submodule in module.named_modules(remove_duplicate=False):
        for name, tensor in [*submodule._parameters.items(), *submodule._buffers.items()]:
            if tensor is None or not tensor.is_meta:
                continue
            if id(tensor) not in fakes:
                with mode:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                value = buffers.get(f"{path}.{name}" if path else name)
                fakes[id(tensor)] = (
                    torch.nn.Parameter(empty, tensor.requires_grad)
                    if name in submodule._parameters
                    else empty
                    if value is None
                    else value
                )
            registry: dict[str, Any] = (
                submodule._parameters if name in submodule._parameters else submodule._buffers
            )
            originals.append((registry, name, tensor))
            registry[name] = fakes[id(tensor)]
    try:
        yield
    finally:
        for registry, name, tensor in originals:
            registry[name] = tensor


def _make_concrete(program: torch.export.ExportedProgram, kwargs: Mapping[str, Any]) -> None:
    """Replace data-dependent sizes (a mask selects some tokens) by those of the example inputs."""
    from torch.utils import _pytree

    def is_symbolic(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and any(not isinstance(n, int) for n in value.shape)

    if not any(
        is_symbolic(v) for n in program.graph.nodes for v in _pytree.tree_leaves(n.meta.get("val"))
    ):
        return
    signature, inputs = program.graph_signature, iter(_pytree.tree_leaves(((), dict(kwargs))))
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
    """Convert an exported program to a graph."""
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
    used = {names[n] for n in live if kinds.get(n) == "parameter"}
    ties = _find_ties(module)
    used |= {ties[n] for n in used if n in ties}
    unused = tuple(
        n
        for n, _ in module.named_parameters(remove_duplicate=False)
        if n not in used and n not in ties
    )
    nodes = tuple(n for n in program.graph.nodes if n in live)
    constants = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    stored = {n: program.constants.get(constants.get(n.name, "")) for n in names}
    values = evaluate_constants(
        nodes, {n: t for n, t in stored.items() if isinstance(t, torch.Tensor) and _has_data(t)}
    )
    return Graph(nodes, names, kinds, outputs, ties, unused, values)


def _has_data(tensor: torch.Tensor) -> bool:
    from torch._subclasses import FakeTensor

    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _live_nodes(outputs: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes that the outputs depend on, and those that modify one of them in place."""
    live: set[fx.Node] = set()
    todo = list(outputs)
    while todo:
        node = todo.pop()
        if node not in live:
            live.add(node)
            todo += node.all_input_nodes
            todo += [u for u in node.users if mutates(u) and u.args and u.args[0] is node]
    return live


def parameter_dependent(graph: Graph) -> set[fx.Node]:
    """Return the nodes that depend on a parameter."""
    out: set[fx.Node] = set()
    for node in graph.nodes:
        if graph.kinds.get(node) == "parameter" or any(n in out for n in node.all_input_nodes):
            out.add(node)
    return out


def mutates(node: fx.Node) -> bool:
    """Return whether an operator writes into its first argument."""
    return (
        node.op == "call_function"
        and operator_name(node).endswith("_")
        and not operator_name(node).startswith("_")
    )


def operator_name(node: fx.Node) -> str:
    """Return the name of an operator without its overload: `add` for aten.add.Tensor."""
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(target, "__name__", str(target))


def _find_ties(module: torch.nn.Module) -> dict[str, str]:
    """Map each further name of a tied parameter to its first name."""
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(name)
    return {alias: names[0] for names in names_by_id.values() for alias in names[1:]}


@dataclass(frozen=True)
class SourceLocation:
    """The source line of an operator, and the path of its module."""

    file: str
    line: int
    code: str
    module: str

    def __str__(self) -> str:
        return f"line {self.line} of {self.file}" if self.file else "an unknown line"


def source_location(node: fx.Node) -> SourceLocation:
    """Return the source line of an operator: the model's own line rather than one inside torch."""
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    path = path.removeprefix("module").removeprefix(".")
    if not frames:
        return SourceLocation("", 0, "", path)
    model_frames = [f for f in frames if not _LIBRARY.search(f["file"])]
    last = (model_frames or frames)[-1]
    return SourceLocation(
        "/".join(last["file"].split("/")[-2:]), int(last["line"]), last["code"].strip(), path
    )


@contextlib.contextmanager
def _disable_fastpath() -> Iterator[None]:
    """Make torch's encoder layers compute operator by operator instead of in one fused operator."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextlib.contextmanager
def _batched_experts(module: torch.nn.Module) -> Iterator[None]:
    """Make transformers compute experts in one batch: a loop over the selected experts depends on
    data and cannot be traced.
    """
    before = getattr(getattr(module, "config", None), "_experts_implementation", None)
    set_implementation: Any = getattr(module, "set_experts_implementation", None)
    if before is None or set_implementation is None:
        yield
        return
    try:
        set_implementation("batched_mm")
        yield
    finally:
        set_implementation(before)


@contextlib.contextmanager
def _suppress_warnings() -> Iterator[None]:
    """Suppress the warnings and tracebacks that torch.export logs about the module's code."""
    import logging
    import warnings

    names = ("torch.export", "torch._export", "torch.fx", "torch._subclasses.fake_tensor")
    loggers = [logging.getLogger(n) for n in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)  # a failure is raised as a DiscoveryError
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)

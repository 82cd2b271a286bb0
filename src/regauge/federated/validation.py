"""Validation of contributions: form, names, dtypes, shapes, values, claimed counts and norms.

Contributions are untrusted. `collect` divides the answers of a round into contributions that are
aggregated and rejections, each with a reason (one of `REASONS`) and a text. It never raises,
whatever a client sends. Two claims cannot be verified by a server, so they are bounded:

- examples: at most `Limits.max_examples`, since the count is a weight in the mean
- norm: at most `norm_factor` times the median of the round. Clients differ in their local steps, so
  the limit grows with the steps that the claimed count of examples allows
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch

from regauge.federated.client import max_steps
from regauge.federated.settings import Settings
from regauge.federated.states import Absence, Contribution, State, norm_of

REASONS = (
    "type",
    "client",
    "duplicate",
    "round",
    "layout",
    "kind",
    "names",
    "dtype",
    "shape",
    "values",
    "examples",
    "metrics",
    "norm",
)
MAX_EXAMPLES = 10_000_000  # if neither the settings nor the server's data state a maximum
MAX_NORM = math.sqrt(torch.finfo(torch.float32).max)  # else FedAdam's second moment overflows
QUORUM = 3  # contributions that a median needs: of two, either may be the outlier
MAX_TEXT = 1000  # characters of a reason that are recorded
UNKNOWN = "?"  # the client of an answer without a valid client

_log = logging.getLogger("regauge.federated")


@dataclass(frozen=True)
class Limits:
    """Bounds from the server's own data and model.

    Attributes:
        max_examples: The largest number of examples that a client may claim.
        names: The tensors that clients may send; None: all of the state.
    """

    max_examples: int = MAX_EXAMPLES
    names: Set[str] | None = None


@dataclass(frozen=True)
class Call:
    """A round of the server: its number, the selected clients, and the state that was sent out.

    `layout` is the layout digest of the state.
    """

    number: int
    clients: Sequence[int]
    state: State
    layout: str
    limits: Limits = Limits()


class Fault(NamedTuple):
    """A failed check: its name in `REASONS`, and a text."""

    reason: str
    text: str


@dataclass(frozen=True, eq=False)
class Collected:
    """The validated answers of a round.

    Attributes:
        sent: The contributions that count, sorted by client.
        absent: The reasons of all other clients, by client.
        rejected: The failed check of each rejected contribution, by client.
    """

    sent: tuple[Contribution, ...]
    absent: Mapping[str, str]
    rejected: Mapping[str, str]


def collect(answers: Iterable[Any], call: Call, settings: Settings) -> Collected:
    """Validate the answers of a round.

    The first valid contribution of a client counts; a client without an answer is absent.

    Args:
        answers: Contributions and absences, untrusted.
        call: The round.
        settings: The settings of the run.
    """
    sent: dict[int, Contribution] = {}
    absent: dict[str, str] = {}
    rejected: dict[str, str] = {}

    def reject(client: Any, fault: Fault) -> None:
        key = show_value(client) if is_count(client) else UNKNOWN
        absent[key], rejected[key] = printable(fault.text), fault.reason
        _log.info(
            "round %d: rejected client %s (%s): %s", call.number + 1, key, fault.reason, absent[key]
        )

    for answer in answers:
        if isinstance(answer, Absence):
            absent[str(answer.client)] = printable(answer.reason)
            continue
        fault = fault_of(answer, call, settings)
        if fault is None and answer.client in sent:
            fault = Fault(
                "duplicate",
                "contributions must be one a client and round, got a second: the first counts",
            )
        if fault is None:
            sent[answer.client] = answer
        else:
            reject(getattr(answer, "client", None), fault)
    for client, fault in find_outliers([sent[c] for c in sorted(sent)], settings).items():
        del sent[client]
        reject(client, fault)
    for client in call.clients:
        if client not in sent and str(client) not in absent:
            absent[str(client)] = "it did not answer"
    return Collected(tuple(sent[c] for c in sorted(sent)), absent, rejected)


def fault_of(sent: Any, call: Call, settings: Settings) -> Fault | None:
    """Return the fault of a single contribution to this round; None if it is valid."""
    if not isinstance(sent, Contribution):
        return Fault("type", f"an answer must be a contribution, got {type(sent).__name__}")
    if not is_count(sent.client) or sent.client not in call.clients:
        return Fault(
            "client", "a contribution must come from a client that was selected for the round"
        )
    if not is_count(sent.round) or sent.round != call.number:
        return Fault(
            "round",
            f"the round must be {call.number + 1}, got "
            f"{show_value(sent.round + 1 if is_count(sent.round) else sent.round)}",
        )
    if not isinstance(sent.layout, str) or sent.layout != call.layout:
        return Fault(
            "layout",
            "the layout must be that of the server's state: it trained another version of the "
            "model",
        )
    kind = "weights" if settings.independent and call.number == 0 else "change"
    if not isinstance(sent.kind, str) or sent.kind != kind:
        return Fault(
            "kind",
            f"a contribution to this round must be of the kind {kind}, got {show_value(sent.kind)}",
        )
    return _fault_of_numbers(sent, call.limits, settings) or _fault_of_tensors(
        sent.tensors, kind, call
    )


def _fault_of_numbers(sent: Contribution, limits: Limits, settings: Settings) -> Fault | None:
    max_examples = settings.max_examples or limits.max_examples
    if not is_count(sent.examples) or not 1 <= sent.examples <= max_examples:
        return Fault(
            "examples",
            f"examples must be between 1 and {max_examples}, got {show_value(sent.examples)}; "
            "the maximum is --max-examples",
        )
    steps = max_steps(sent.examples, settings)
    if not is_count(sent.steps) or not 1 <= sent.steps <= steps:
        return Fault(
            "metrics", f"steps must be between 1 and {steps}, got {show_value(sent.steps)}"
        )
    if not is_count(sent.batch) or not 1 <= sent.batch <= settings.batch:
        return Fault(
            "metrics", f"batch must be between 1 and {settings.batch}, got {show_value(sent.batch)}"
        )
    for name, value in (("loss", sent.loss), ("rate", sent.lr)):
        if (
            not isinstance(value, float | int)
            or isinstance(value, bool)
            or not abs(value) <= torch.finfo(torch.float32).max
        ):
            return Fault(
                "metrics", f"{name} must be a finite float32 number, got {show_value(value)}"
            )
    return None


def _fault_of_tensors(tensors: Any, kind: str, call: Call) -> Fault | None:
    if not isinstance(tensors, Mapping) or not all(
        isinstance(tensor, torch.Tensor) for tensor in tensors.values()
    ):
        return Fault("type", "tensors must be a mapping from names to tensors")
    if not tensors:
        return Fault("names", "tensors must not be empty")
    for name, tensor in tensors.items():
        if name not in call.state:
            return Fault("names", f"tensors must be the model's, got {show_value(name)}")
        if call.limits.names is not None and name not in call.limits.names:
            return Fault("names", f'"{name}" must not be sent: the run freezes or withholds it')
        expected = call.state[name]
        if tensor.dtype != expected.dtype or tensor.layout != torch.strided or tensor.is_meta:
            form = "meta tensor" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
            dtype, got = (str(t.dtype).removeprefix("torch.") for t in (expected, tensor))
            return Fault("dtype", f'"{name}" must be a dense {dtype} tensor, got {got} ({form})')
        if tensor.shape != expected.shape:
            return Fault(
                "shape",
                f'"{name}" must have the shape {list(expected.shape)}, got {list(tensor.shape)}',
            )
        if not bool(torch.isfinite(tensor).all()):
            return Fault("values", f'"{name}" must be finite, got NaN or Inf')
    missing = sorted(call.state.keys() - tensors.keys()) if kind == "weights" else ()
    if missing:
        return Fault("names", f'whole weights must have every tensor, "{missing[0]}" is missing')
    return None


def find_outliers(sent: Sequence[Contribution], settings: Settings) -> dict[int, Fault]:
    """Return the contributions of a round whose norm is beyond the limits, by client."""
    norms = {c.client: norm_of(c.tensors) for c in sent}
    faults = {}
    for client, norm in norms.items():
        limit = min(MAX_NORM, settings.max_norm or MAX_NORM)
        if not norm <= limit:
            hint = "the limit is --max-norm" if limit < MAX_NORM else "its square overflows float32"
            faults[client] = Fault(
                "norm", f"the norm must be at most {limit:.4g}, got {norm:.4g}; {hint}"
            )
    others = [c for c in sent if c.client not in faults]
    for client, expected in expected_norms(others).items() if settings.norm_factor else ():
        if norms[client] > settings.norm_factor * expected:
            text = (
                f"the norm must be at most {settings.norm_factor:g} x {expected:.4g}, the "
                f"median of the round, got {norms[client]:.4g}"
            )
            faults[client] = Fault("norm", f"{text}; the factor is --norm-factor")
    return faults


def expected_norms(sent: Sequence[Contribution]) -> dict[int, float]:
    """Return the norm with which each client is compared.

    It is the median norm of the round, or the median norm of a local step times the client's steps,
    whichever is larger. Empty without a meaningful median: with fewer contributions than `QUORUM`,
    or if most norms are zero.
    """
    norms = {c.client: norm_of(c.tensors) for c in sent}
    middle = median(norms.values()) if len(sent) >= QUORUM else 0.0
    if middle == 0:
        return {}
    pace = median(norms[c.client] / c.steps for c in sent)
    return {c.client: middle if c.kind == "weights" else max(middle, c.steps * pace) for c in sent}


def is_count(value: Any) -> bool:
    """Return whether a value is a nonnegative integer, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def show_value(value: Any) -> str:
    """Return the text of an untrusted value for a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python converts
        text = (
            f"a number of {value.bit_length()} bits"
            if isinstance(value, int)
            else type(value).__name__
        )
    return text if len(text) <= 80 else f"{text[:80]} ..."


def printable(text: Any) -> str:
    """Return an untrusted text as one line of printable characters, of bounded length."""
    line = " ".join(str(text)[: 2 * MAX_TEXT].split())
    safe = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in line
    )
    return safe if len(safe) <= MAX_TEXT else f"{safe[:MAX_TEXT]} ..."

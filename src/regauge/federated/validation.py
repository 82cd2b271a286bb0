"""Checks on contributions before they count: form, names, dtypes, shapes, values, claimed counts
and norms.

A contribution comes from outside. `collect` sorts a round's answers into those that are aggregated
and those that are rejected, each with a reason (one of `REASONS`) and a text. Nothing that a client
sends raises here. Two things are claims that a server cannot verify, so they are bounded:

    examples    at most `Limits.max_examples`: a count is a weight in the mean
    norm        at most `norm_factor` times the median of the round. A client may take more local
    steps than another, so the limit grows with
                the steps that its count of examples allows
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
MAX_EXAMPLES = (
    10_000_000  # a backstop where neither the settings nor the server's data state a maximum
)
MAX_NORM = math.sqrt(
    torch.finfo(torch.float32).max
)  # beyond it the second moment of FedAdam overflows
QUORUM = 3  # contributions without which a median says nothing: of two, either may be the outlier
MAX_TEXT = 1000  # characters of a reason that are recorded
UNKNOWN = "?"  # the client of an answer that names none

_log = logging.getLogger("regauge.federated")


@dataclass(frozen=True)
class Limits:
    """Bounds that the server knows from its own data and model. `names` are the tensors that
    clients may send; None: all of the state's.
    """

    max_examples: int = MAX_EXAMPLES
    names: Set[str] | None = None


@dataclass(frozen=True)
class Call:
    """A round as the server calls it: its number, the clients it selected, the state it sent out
    and that state's layout digest.
    """

    number: int
    clients: Sequence[int]
    state: State
    layout: str
    limits: Limits = Limits()


class Fault(NamedTuple):
    reason: str
    text: str


@dataclass(frozen=True, eq=False)
class Collected:
    """The answers of a round: contributions that count, sorted by client; why other clients have
    none; and the reasons of rejections by client.
    """

    sent: tuple[Contribution, ...]
    absent: Mapping[str, str]
    rejected: Mapping[str, str]


def collect(answers: Iterable[Any], call: Call, settings: Settings) -> Collected:
    """Sort the answers of a round. A client's first valid contribution counts; a client without an
    answer is absent.
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
    """Return why one contribution must not count in this round, by itself; None if it may."""
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
    most = settings.max_examples or limits.max_examples
    if not is_count(sent.examples) or not 1 <= sent.examples <= most:
        return Fault(
            "examples",
            f"examples must be between 1 and {most}, got {show_value(sent.examples)}; the "
            "maximum is "
            "--max-examples",
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
        isinstance(t, torch.Tensor) for t in tensors.values()
    ):
        return Fault("type", "tensors must be a mapping from names to tensors")
    if not tensors:
        return Fault("names", "tensors must not be empty")
    for name, t in tensors.items():
        if name not in call.state:
            return Fault("names", f"tensors must be the model's, got {show_value(name)}")
        if call.limits.names is not None and name not in call.limits.names:
            return Fault("names", f'"{name}" must not be sent: the run freezes or withholds it')
        own = call.state[name]
        if t.dtype != own.dtype or t.layout != torch.strided or t.is_meta:
            form = "meta tensor" if t.is_meta else str(t.layout).removeprefix("torch.")
            return Fault(
                "dtype",
                f'"{name}" must be a dense {own.dtype} tensor, got {t.dtype} ({form})'.replace(
                    "torch.", ""
                ),
            )
        if t.shape != own.shape:
            return Fault(
                "shape", f'"{name}" must have the shape {list(own.shape)}, got {list(t.shape)}'
            )
        if not bool(torch.isfinite(t).all()):
            return Fault("values", f'"{name}" must be finite, got NaN or Inf')
    missing = sorted(call.state.keys() - tensors.keys()) if kind == "weights" else ()
    if missing:
        return Fault("names", f'whole weights must have every tensor, "{missing[0]}" is missing')
    return None


def find_outliers(sent: Sequence[Contribution], settings: Settings) -> dict[int, Fault]:
    """Return the contributions of a round whose norm is beyond the limits, by client."""
    norms = {c.client: norm_of(c.tensors) for c in sent}
    out = {}
    for client, norm in norms.items():
        most = min(MAX_NORM, settings.max_norm or MAX_NORM)
        if not norm <= most:
            hint = "the limit is --max-norm" if most < MAX_NORM else "its square overflows float32"
            out[client] = Fault(
                "norm", f"the norm must be at most {most:.4g}, got {norm:.4g}; {hint}"
            )
    rest = [c for c in sent if c.client not in out]
    for client, usual in expected_norms(rest).items() if settings.norm_factor else ():
        if norms[client] > settings.norm_factor * usual:
            text = (
                f"the norm must be at most {settings.norm_factor:g} x {usual:.4g}, the "
                f"median of the round, got {norms[client]:.4g}"
            )
            out[client] = Fault("norm", f"{text}; the factor is --norm-factor")
    return out


def expected_norms(sent: Sequence[Contribution]) -> dict[int, float]:
    """Return the norm that each client is compared with: the median of the round, or that of norms
    per local step times the client's steps, if it is larger. Empty where a median says nothing:
    with fewer contributions than `QUORUM`, or if most are zero.
    """
    norms = {c.client: norm_of(c.tensors) for c in sent}
    middle = median(norms.values()) if len(sent) >= QUORUM else 0.0
    if middle == 0:
        return {}
    pace = median(norms[c.client] / c.steps for c in sent)
    return {c.client: middle if c.kind == "weights" else max(middle, c.steps * pace) for c in sent}


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def show_value(value: Any) -> str:
    """Return a value from outside for a message."""
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
    """Return a text from outside as one line of printable characters, of bounded length: it is
    recorded, printed and saved.
    """
    line = " ".join(str(text)[: 2 * MAX_TEXT].split())
    safe = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in line
    )
    return safe if len(safe) <= MAX_TEXT else f"{safe[:MAX_TEXT]} ..."

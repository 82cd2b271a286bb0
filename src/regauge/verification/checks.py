"""The theorems of papers 000 and 001, each as a check on the model at hand, each with a negative
control that must fail by far.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch

from regauge.checkpoints.reader import Lazy
from regauge.core import axes as ax
from regauge.core.action import act, apply_lazily, moves
from regauge.core.element import Element, element
from regauge.core.spec import stored
from regauge.results.findings import UNTOLD, Finding
from regauge.verification.faults import first_fault
from regauge.verification.paper import head_columns
from regauge.verification.subject import (
    EXACT,
    MULTIPLE,
    PLAIN,
    Pass,
    Subject,
    Trained,
    Way,
    against,
    errors,
    flat,
    overall,
    relative_error,
    run,
    train,
)

# How many times the tolerance a negative control must reach, so that the check can be said to see
# anything.
MARGIN = {torch.float64: 1e6, torch.float32: 1e3, torch.bfloat16: 10.0, torch.float16: 10.0}

# How many times its share of the tolerance one tensor alone may be off; from where on a tensor's
# own rounding leaves nothing to compare; and of how many tensors one may be such, so that the
# others are judged without it. With more of them nothing can be told.
ONE, NOISE, FEW = 4.0, 0.5, 20

Tensor = torch.Tensor
State = Mapping[str, Tensor]
Errors = Mapping[str, float]
ALONE = "the rows shuffled, and nothing with them or after them"


@dataclass(frozen=True, eq=False)
class Case:
    """A subject, its plain pass, its own rounding errors tensor by tensor, and the element that its
    columns are moved by.
    """

    subject: Subject
    plain: Pass
    rounding: Mapping[str, Errors]  # of "forward", "gradients", "features"
    flat: frozenset[str]  # parameters without a gradient
    columns: Element
    seed: int
    steps: int
    optimizer: str
    rate: float

    def again(self, k: int) -> Case:
        """The same case with other rows and columns."""
        return replace(
            self,
            seed=self.seed + k,
            columns=element(self.subject.spec, self.seed + k, within="permutation"),
        )

    def moved(self, g: Element) -> Subject:
        return self.subject.of(moved_copy(self.subject.model, g))

    def live(self, values: State) -> State:
        """The tensors of parameters that have a gradient."""
        return Lazy([n for n in values if n not in self.flat], values.__getitem__)


def prepare(subject: Subject, seed: int, steps: int, optimizer: str) -> Case:
    """Run the plain model, and the same in float64, to know what rounding alone does."""
    subject = subject.aimed(seed)
    columns = element(subject.spec, seed, within="permutation")
    plain = run(subject, backward=True)
    own: dict[str, Errors]
    if subject.dtype == torch.float64:
        none = flat(plain.gradients)
        own = {
            kind: dict.fromkeys(getattr(plain, kind), EXACT)
            for kind in ("forward", "gradients", "features")
        }
    else:
        exact, gradients, none = against(subject.exact(), plain)
        own = {
            "forward": errors(plain.forward, exact.forward),
            "gradients": gradients,
            "features": errors(plain.features, exact.features),
        }
        own = {
            kind: _at_least(parts, getattr(plain, kind), subject.dtype)
            for kind, parts in own.items()
        }
    own["gradients"] = {n: e for n, e in own["gradients"].items() if n not in none}
    return Case(
        subject, plain, own, frozenset(none), columns, seed, steps, optimizer, subject.rate(plain)
    )


def moved_copy(
    model: torch.nn.Module, g: Element, part: str | None = "backbone"
) -> torch.nn.Module:
    """A copy with its backbone moved, or all of it. Tensors that the spec does not know stay as
    they are.
    """
    out, known = copy.deepcopy(model), stored(g.spec)
    with torch.no_grad():
        state, target = model.state_dict(), out.state_dict()
        for name, thunk in apply_lazily(
            g, {k: v for k, v in state.items() if k in known}, part
        ).items():
            target[name].copy_(thunk())
    return out


def moved_weights(g: Element, values: State) -> State:
    """These tensors, those of the backbone moved as weights are, each when it is asked for."""
    return _acted(g, values, lambda axes: axes)


def moved_gradients(g: Element, values: State) -> State:
    """These tensors, those of the backbone moved as gradients are, each when it is asked for."""
    return _acted(g, values, ax.dual)


def _acted(g: Element, values: State, axes: Callable[[str], str]) -> State:
    plan = {m.name: m for m in moves(g, "backbone")}

    def read(name: str) -> Tensor:
        move = plan.get(name)
        return (
            values[name]
            if move is None
            else act(g, values[move.source], axes(move.axes), at=move.at)
        )

    return Lazy(list(values), read)


def _at_least(own: Errors, tensors: State, dtype: torch.dtype) -> dict[str, float]:
    """Rounding errors as they may well be: no smaller than a fraction of the dtype's own, and
    larger where few numbers tell of them.
    """
    least = torch.finfo(dtype).eps / 4
    return {
        n: max(e, least) * (1 + 3 / math.sqrt(2 * tensors[n].numel())) if n in tensors else e
        for n, e in own.items()
    }


# The checks: each takes a case and returns its findings.


def row_forward(c: Case) -> list[Finding]:
    statement = (
        "T(P Z) = P T(Z): shuffling the tokens after the position embedding, with masks "
        "and positions, shuffles the result and nothing else."
    )
    out = []
    for seed in (
        c.seed,
        c.seed + 1,
    ):  # one shuffle may leave the very row in its place that a broken module treats apart
        way = Way(rows=seed)
        right, wrong = run(c.subject, way), run(c.subject, replace(way, alone=True))
        found = _compare(c, "forward", right.forward, c.plain.forward, wrong.forward, ALONE)
        out.append(
            _located(c, found.finding("row/forward", statement, "000 Thm 4.1"), c.subject, way)
        )
    return [_worse(*out)]


def row_backward(c: Case) -> list[Finding]:
    way = Way(rows=c.seed)
    right, wrong = (
        run(c.subject, way, backward=True),
        run(c.subject, replace(way, alone=True), backward=True),
    )
    weights = _compare(
        c,
        "gradients",
        c.live(right.gradients),
        c.live(c.plain.gradients),
        c.live(wrong.gradients),
        ALONE,
    )
    shuffled = c.subject.features_moved(c.plain.features, way)
    features = _compare(
        c,
        "features",
        right.features,
        shuffled,
        c.plain.features,
        "the plain gradients, not shuffled",
    )
    return [
        weights.finding(
            "row/weights",
            "Weight gradients are equal with and without the shuffle.",
            "000 Thm 4.2, Cor 4.3",
        ),
        features.finding(
            "row/features",
            "Gradients of the features are shuffled as the features are.",
            "000 Lem 4.8",
        ),
    ]


def column_forward(c: Case) -> list[Finding]:
    statement = (
        "T_C(Z P) = T(Z) P for a permutation of the stream's channels without "
        "restriction, of heads, of their insides and of neurons."
    )
    out = []
    for g in (c.columns, c.again(1).columns):
        way, moved = Way(columns=g), c.moved(g)
        right, wrong = run(moved, way), run(moved)
        found = _compare(
            c,
            "forward",
            right.forward,
            c.plain.forward,
            wrong.forward,
            "the moved backbone given plain features",
        )
        out.append(
            _located(c, found.finding("column/forward", statement, "000 Thm 4.4"), moved, way)
        )
    return [_worse(*out)]


def _worse(a: Finding, b: Finding) -> Finding:
    """The one that fails, else the one that is not judged, else that with the larger error."""
    badness = {True: 0, None: 1, False: 2}
    return max(a, b, key=lambda f: (badness[f.holds], f.value or 0))


def column_heads(c: Case) -> list[Finding]:
    statement = (
        "The paper's own columns: one permutation on both sides of every projection, "
        "which therefore keeps heads together."
    )
    g, remark = head_columns(c.subject.spec, c.seed)
    if g is None:
        return [Finding("column/heads", statement, None, sentence=remark, source="000 Thm 4.4")]
    way, moved = Way(columns=g), c.moved(g)
    right, wrong = run(moved, way), run(moved)
    found = _compare(
        c,
        "forward",
        right.forward,
        c.plain.forward,
        wrong.forward,
        "the moved backbone given plain features",
    )
    return [found.finding("column/heads", statement, "000 Thm 4.4", remark)]


def column_backward(c: Case) -> list[Finding]:
    way = Way(columns=c.columns)
    got = run(c.moved(c.columns), way, backward=True)
    expected, how = (
        c.live(moved_gradients(c.columns, c.plain.gradients)),
        "the plain gradients, not moved",
    )
    weights = _compare(
        c, "gradients", c.live(got.gradients), expected, c.live(c.plain.gradients), how
    )
    features = _compare(
        c,
        "features",
        got.features,
        c.subject.features_moved(c.plain.features, way),
        c.plain.features,
        how,
    )
    statement = (
        "Gradients of the moved backbone are the plain ones, moved; those of embedding "
        "and head are equal."
    )
    return [
        weights.finding("column/weights", statement, "000 Thm 4.5", _flat_remark(c)),
        features.finding(
            "column/features",
            "Gradients of the features are moved as the features are.",
            "000 Thm 4.5",
        ),
    ]


def both(c: Case) -> list[Finding]:
    way, moved = Way(rows=c.seed, columns=c.columns), c.moved(c.columns)
    right, wrong = (
        run(moved, way, backward=True),
        run(moved, replace(way, columns=None), backward=True),
    )
    how = "the columns of the features left alone"
    forward = _compare(c, "forward", right.forward, c.plain.forward, wrong.forward, how)
    expected = c.live(moved_gradients(c.columns, c.plain.gradients))
    weights = _compare(
        c, "gradients", c.live(right.gradients), expected, c.live(wrong.gradients), how
    )
    edges = [n for n in c.rounding["gradients"] if c.subject.part(n) == "embed"]
    embed = _compare(
        c,
        "gradients",
        _only(right.gradients, edges),
        _only(c.plain.gradients, edges),
        _only(wrong.gradients, edges),
        how,
    )
    return [
        forward.finding(
            "both/forward", "Rows and columns at once: the function is the same.", "000 Eq. 8"
        ),
        weights.finding(
            "both/weights",
            "Rows and columns at once: weight gradients follow the columns and do not see the "
            "rows.",
            "000 Eq. 8",
        ),
        embed.finding(
            "both/embedding",
            "The embedding and its positions get the gradients they would get without it.",
            "000 Thm 10.1",
        ),
    ]


def training(c: Case) -> list[Finding]:
    """Train the plain model, and the same with rows, with columns and with both (Algorithm 1);
    fresh rows in every step.
    """
    start = {n: p.detach() for n, p in c.subject.model.named_parameters()}

    def trained(subject: Subject, way: Way) -> Trained:
        return train(subject, way, c.steps, c.optimizer, c.rate)

    plain = trained(c.subject.of(copy.deepcopy(c.subject.model)), PLAIN)
    if c.subject.dtype == torch.float64:
        function, weights = (
            dict.fromkeys(plain.forward, EXACT),
            {n: EXACT for n in plain.weights if n not in c.flat},
        )
    else:
        exact = trained(c.subject.exact(), PLAIN)
        function = _at_least(errors(plain.forward, exact.forward), plain.forward, c.subject.dtype)
        weights = _at_least(
            _updates(c, plain.weights, exact.weights, start), start, c.subject.dtype
        )
        del exact
    out = []
    how = f"{c.steps} steps of {c.optimizer}"
    for name, way, source in (
        ("row", Way(rows=c.seed), "000 Cor 4.3, Lem 4.8"),
        ("column", Way(columns=c.columns), "000 Cor 4.6"),
        ("both", Way(rows=c.seed, columns=c.columns), "000 Alg. 1"),
    ):
        if way.rows is not None and c.subject.rows_fixed:
            continue
        fresh = (
            c.subject.of(copy.deepcopy(c.subject.model))
            if way.columns is None
            else c.moved(c.columns)
        )
        got = trained(fresh, way)
        wrong = run(fresh, replace(way, alone=True) if way.columns is None else PLAIN)
        first = start if way.columns is None else moved_weights(c.columns, start)
        expected = plain.weights if way.columns is None else moved_weights(c.columns, plain.weights)
        other = moved_weights(c.columns, plain.weights) if way.columns is None else plain.weights
        of_function = _measured(
            c,
            function,
            errors(got.forward, plain.forward),
            errors(wrong.forward, plain.forward),
            "the trained model used plainly",
        )
        of_weights = replace(
            _measured(
                c,
                weights,
                _updates(c, got.weights, expected, first),
                _updates(c, other, expected, first),
                "in another description",
            ),
            noise=math.inf,  # an update may be less than its weight's last digit
        )
        if (
            c.subject.dtype.itemsize >= 4
            # the weights of a half-precision model are rounded after training; its float32 copies
            # are compared below
        ):
            out.append(
                of_function.finding(
                    f"{name}/trained", f"The trained function is the same, after {how}.", source
                )
            )
        statement = (
            f"The trained weights correspond, after {how}; errors are relative to the update."
        )
        out.append(of_weights.finding(f"{name}/trained-weights", statement, source))
        del fresh, got, expected, other
    return out


def mixed(c: Case) -> list[Finding]:
    statement = (
        "Under bfloat16 autocast, rows and columns at once change the function by no "
        "more than autocast itself does."
    )
    if c.subject.dtype != torch.float32:
        return []
    way, moved = (
        Way(rows=None if c.subject.rows_fixed else c.seed, columns=c.columns),
        c.moved(c.columns),
    )
    exact = run(c.subject.exact()).forward
    with torch.autocast(next(c.subject.model.parameters()).device.type, torch.bfloat16):
        plain, right, wrong = run(c.subject).forward, run(moved, way).forward, run(moved).forward
    own = _at_least(errors(plain, exact), plain, torch.bfloat16)
    found = _measured(
        c,
        own,
        errors(right, plain),
        errors(wrong, plain),
        "the moved backbone given plain features",
        torch.bfloat16,
    )
    found = replace(found, advice="")  # autocast has no other
    return [found.finding("both/mixed", statement, "THEORY 2")]


def dropout(c: Case) -> list[Finding]:
    statement = (
        "Dropout keeps the law in distribution only: masks are drawn in the order of "
        "storage, and do not follow a shuffle."
    )
    drops = [m for m in c.subject.model.modules() if isinstance(m, torch.nn.Dropout) and m.p > 0]
    if not drops:
        return []
    way, moved = (
        Way(rows=None if c.subject.rows_fixed else c.seed, columns=c.columns),
        c.moved(c.columns),
    )
    with torch.random.fork_rng():
        torch.manual_seed(c.seed)
        plain = run(
            c.subject.of(copy.deepcopy(c.subject.model)), training=True
        ).forward  # running statistics change in training
        torch.manual_seed(c.seed)
        other = run(moved, way, training=True).forward
    own = c.rounding["forward"]
    value = overall(errors(other, plain), own)
    sentence = (
        f"with dropout on, one seed gives outputs that differ by {value:.1e}; every "
        "check here runs with dropout off"
    )
    return [Finding("both/dropout", statement, None, value, None, None, sentence, "THEORY 2")]


def description(c: Case) -> list[Finding]:
    spec, half = c.subject.spec, c.subject.dtype.itemsize < 4
    statement = (
        "Every tensor moved by a random element of the model's whole group: other "
        "weights, the same function."
    )
    remark = (
        "signed permutations only: anything else would round the weights once more" if half else ""
    )
    g = element(spec, c.seed, within="signed" if half else "full")
    names = [
        n
        for n in c.plain.forward
        if (n in spec.outputs if spec.outputs else not n.startswith("stream"))
    ]
    want = {
        n: act(g, v, spec.outputs[n]) if spec.visible else v
        for n, v in _only(c.plain.forward, names).items()
    }
    whole = replace(c.subject, cut=None)
    moved = moved_copy(c.subject.model, g, None)
    right = run(whole.of(moved)).forward
    plain = c.subject.model.state_dict()
    moved.load_state_dict({n: plain[n] for n in list(plain)[::2]}, strict=False)
    wrong = run(whole.of(moved)).forward
    found = _compare(
        c,
        "forward",
        _only(right, names),
        want,
        _only(wrong, names),
        "every second tensor left as it was",
    )
    if half:  # embedding and head are computed in another order too
        found = replace(found, tolerance=2 * found.tolerance)
    return [found.finding("description/forward", statement, "THEORY 1", remark)]


def _flat_remark(c: Case) -> str:
    if not c.flat:
        return ""
    first = min(c.flat)
    return (
        f"{len(c.flat)} tensors have no gradient ({first}, ...) and are compared through the "
        "function"
    )


def _only(values: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    return {n: values[n] for n in names if n in values}


def _updates(c: Case, a: State, b: State, start: State) -> dict[str, float]:
    """How far trained weights are apart, relative to how far they came."""
    return {n: relative_error(a[n], b[n], start[n]) for n in c.live(a)}


# How a comparison becomes a finding.


@dataclass(frozen=True)
class _Found:
    value: float
    tolerance: float
    control: float
    parts: Errors
    how: str
    dtype: torch.dtype
    own: Errors
    noise: float = NOISE
    advice: str = "; try a wider dtype"
    drowned: Errors = field(
        default_factory=dict
    )  # tensors that are not judged: their own rounding is too large

    def typical(self, name: str) -> float:
        """A tensor's own rounding error, but no less than the middle one: a small tensor may be
        precise by accident.
        """
        return max(self.own[name], median(self.own.values())) if name in self.own else math.inf

    def finding(self, name: str, statement: str, source: str, remark: str = "") -> Finding:
        if not self.parts:
            return Finding(
                name,
                statement,
                None,
                sentence="nothing to compare: parameters are frozen, or outputs have no names",
                source=source,
            )
        worst = max(self.parts, key=lambda n: self.parts[n] / self.typical(n))
        lone = self.parts[worst] / self.typical(worst) / MULTIPLE[self.dtype]
        reached = self.control / self.tolerance
        noisy = [n for n, e in self.own.items() if e > self.noise]
        holds: bool | None = True
        if self.value <= self.tolerance and lone > ONE:
            holds = False
            sentence = (
                f"does not hold: {worst} is off by {self.parts[worst]:.1e}, "
                f"{lone / ONE:.2g} times what rounding allows one tensor"
            )
        elif not self.value <= self.tolerance:
            holds = False
            sentence = (
                f"does not hold: off by {self.value:.1e}, "
                f"{self.value / self.tolerance:.2g} times what rounding allows; furthest off: "
                f"{worst}"
            )
        elif noisy:
            holds = None
            sentence = (
                f"{UNTOLD} in {str(self.dtype)[6:]}: {noisy[0]} is off by "
                f"{self.own[noisy[0]]:.1e} from its own value in float64"
            )
        elif self.control == 0:
            holds = None
            sentence = f"{UNTOLD}: the control ({self.how}) changes nothing here"
        elif not reached >= MARGIN[self.dtype]:
            holds = None
            sentence = (
                f"{UNTOLD} in {str(self.dtype)[6:]}: the control ({self.how}) is only "
                f"{reached:.2g} times the tolerance{self.advice}"
            )
        else:
            sentence = (
                f"holds to {self.value:.1e}; the control ({self.how}) is off by {self.control:.1e}"
            )
        sentence += f"; {remark}" if remark else ""
        if self.drowned:
            first, more = max(self.drowned, key=lambda n: self.drowned[n]), len(self.drowned) - 1
            off = f"{str(self.dtype)[6:]} gets {self.drowned[first]:.0%} of it wrong"
            sentence += f"; not judged: {first} ({off}){f' and {more} more' if more else ''}"
        return Finding(
            name,
            statement,
            holds,
            self.value,
            self.tolerance,
            self.control,
            sentence,
            source,
            where=worst if holds is False else "",
        )


def _compare(c: Case, kind: str, got: State, want: State, wrong: State, how: str) -> _Found:
    own = {n: c.rounding[kind][n] for n in want if n in c.rounding[kind]}
    return _measured(c, own, errors(got, want), errors(wrong, want), how)


def _measured(
    c: Case, own: Errors, parts: Errors, control: Errors, how: str, dtype: torch.dtype | None = None
) -> _Found:
    dtype = dtype or c.subject.dtype
    lost = {
        n for n, e in own.items() if e == math.inf
    }  # zero in exact arithmetic: nothing to be compared with
    drowned = {n: e for n, e in own.items() if n not in lost and e > NOISE}
    drowned = (
        drowned if dtype.itemsize == 2 and len(drowned) * FEW <= len(own) else {}
    )  # in wider dtypes that is no rounding
    own, parts, control = (
        {n: e for n, e in x.items() if n not in lost and n not in drowned}
        for x in (own, parts, control)
    )
    return _Found(
        overall(parts, own),
        MULTIPLE[dtype] * overall(own, own),
        overall(control, own),
        parts,
        how,
        dtype,
        own,
        drowned=drowned,
    )


def _located(c: Case, finding: Finding, moved: Subject, way: Way) -> Finding:
    """A failing finding with the module where it goes wrong."""
    if finding.holds is not False or finding.floor is None:
        return finding
    module = first_fault(c.subject, moved, way, finding.floor)
    return (
        finding
        if module is None
        else replace(
            finding, where=module, sentence=f"{finding.sentence}; it goes wrong in {module}"
        )
    )

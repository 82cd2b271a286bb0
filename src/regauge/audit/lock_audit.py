"""The audit of a lock: run every applicable attack on a locked model and score it by the key.

    case = LockCase(spec, locked, "permutation", base=base, truth=g, model=model, test=test)
    results = audit_lock(case)
    results.facts["verdict"]

Attacks get a view only; the truth that they are scored by stays in this module. The value of a
finding is the share of the protected secret that an attack recovers, between its floor (a guess)
and its ceiling (all of it).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regauge.attacks import edges, features, theft, weights
from regauge.attacks.views import (
    HiddenStates,
    KnownInputs,
    LockedFile,
    LockedFileWithBase,
    LockedFileWithCandidates,
    LockedFileWithLabels,
    ObservedFeatures,
    part_spec,
)
from regauge.audit.engine import Steps, resolve_names
from regauge.audit.tables import plot_lock
from regauge.audit.verdicts import (
    CONFIDENCE,
    Verdict,
    evidence_of_share,
    order_verdicts,
    with_verdicts,
)
from regauge.checkpoints.resume import StateStore
from regauge.core.action import State, apply
from regauge.core.element import Element
from regauge.core.groups import Kind
from regauge.core.members import Member, Monomial
from regauge.core.progress import Progress
from regauge.core.rng import Stream, seed_key
from regauge.core.spec import Spec
from regauge.data.evaluate import predict
from regauge.data.tasks import Examples
from regauge.errors import AuditError, CutError, Hint
from regauge.matching.barriers import score
from regauge.matching.invariants import find_nonfinite
from regauge.models.cut import cut
from regauge.results.findings import Finding, Results, Table, apply_threshold

if TYPE_CHECKING:
    from regauge.locking.keys import Key
    from regauge.locking.lock import Record

LABEL_COUNTS = (50, 200, 1000)
TOKEN_COUNTS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
VOCABULARY_TOKENS = 12  # of the text that is recovered from hidden states
RECOVERED = 0.99  # share of the key from which it counts as known
GUESSED = 0.05  # share of the key up to which a base counts as unrelated
MARGIN = 0.05  # of accuracy: a stolen model this near to the owner's is as good
EXPLAINED = "share explained"  # the measure of a guess without the key
# What follows if an attack recovers all of its secret.
UNDONE = {
    "lock/public edges": "The file alone undoes this lock: its embedding and head are not locked "
    "and reveal the order of the stream.",
    "lock/known inputs": "An observer of the features of known inputs recovers the key of the "
    "stream: {sentence}.",
    "lock/seen features": "An observer of the features of enough unknown inputs, with the "
    "embedding, recovers it too: do not use one key for many batches.",
    "lock/vocabulary": "Hidden states of an open language model reveal the text itself, whatever "
    "the key.",
}
ATTACKS = (
    "public edges",
    "public base",
    "lineage",
    "known inputs",
    "seen features",
    "vocabulary",
    "theft",
    "handling",
)
THEFTS = {
    "new edges": theft.new_edges,
    "tuned": theft.fine_tune,
    "scratch": theft.train_from_scratch,
}


@dataclass(frozen=True, eq=False)
class LockCase:
    """A locked model, the attacker's resources, and the truth that attacks are scored by.

    Attributes:
        spec: The spec of the model.
        state: The locked weights.
        kind: The group of the lock.
        truth: The element of the key, if the key is available.
        base: A public model from which this one may be fine-tuned.
        candidates: Further possible ancestors by name.
        model: A live model with the locked weights.
        train: Labelled examples of a thief.
        test: Examples to evaluate on.
        record: The lock record, to check wrong keys, changed weights and key reuse.
        key: The key that belongs to `record`.
    """

    spec: Spec
    state: State
    kind: Kind
    truth: Element | None = None
    base: State | None = None
    candidates: Mapping[str, State] = field(default_factory=dict)
    model: torch.nn.Module | None = None
    train: Examples | None = None
    test: Examples | None = None
    record: Record | None = None
    key: Key | None = None


def audit_lock(
    case: LockCase,
    *,
    labels: Sequence[int] = LABEL_COUNTS,
    budget: theft.Budget | None = None,
    seed: int = 0,
    fail_above: float | None = None,
    attacks: Sequence[str] | None = None,
    progress: Progress | None = None,
    store: StateStore | None = None,
) -> Results:
    """Run every attack that the case allows, and score it.

    Args:
        case: The locked model and what the attacks may use.
        labels: Numbers of labels that a thief has; one theft for each.
        budget: The training budget of a thief.
        seed: The random seed of samples and shuffles.
        fail_above: Fail a finding if its attack gets further than this share of the way from
            baseline to upper bound. None: findings have no verdict.
        attacks: Names of attacks; "all", None or empty: all.
        progress: Progress callback.
        store: The saved steps of an interrupted run.

    Returns:
        One finding for each attack, a table of costs, and the verdict in `facts["verdict"]`.

    Raises:
        AttackNameError: An attack is unknown.
        AuditError: A state has NaN or Inf, or no attack is applicable.
    """
    budget = budget or theft.Budget(seed=seed)
    for owner, state in (
        ("the locked model", case.state),
        ("the base", case.base),
        *case.candidates.items(),
    ):
        tensor = None if state is None else find_nonfinite(state)
        if tensor is not None:
            raise AuditError(
                f'{owner} must be finite, got NaN or Inf in "{tensor}"',
                hint="check that it is the right file",
            )
    chosen = resolve_names(attacks, ATTACKS, "locks") or ATTACKS
    reasons = {name: _reason_skipped(case, name) for name in chosen}
    unchecked = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    names = [name for name, reason in reasons.items() if not reason]
    references = References(case)
    plan: list[tuple[str, Callable[[Progress], Iterator[Finding]]]] = []
    for name in names:
        if name != "theft":
            plan.append((name, partial(_RUN[name], case, references, seed)))
            continue
        assert case.train is not None
        few = [n for n in labels if n > len(case.train)]
        unchecked += [f"theft with {n} labels: there are {len(case.train)} examples" for n in few]
        rng = np.random.default_rng(budget.seed)
        subsets = [np.sort(rng.permutation(len(case.train))[:n]) for n in labels if n not in few]
        plan += [
            (f"theft/{way} {len(rows)}", partial(_try_theft, case, references, way, rows, budget))
            for rows in subsets
            for way in THEFTS
        ]
    needs_scores = case.model is not None and case.test is not None
    needs_scores = needs_scores and any(
        n in ("public edges", "public base", "theft") for n in names
    )
    kinds = [title.rpartition(" ")[0] if "theft" in title else title for title, _ in plan]
    steps = Steps([*(["scores"] if needs_scores else []), *kinds], progress, store)
    if needs_scores:
        message = "scores of the locked and the owner's model"
        saved = steps.run("scores", message, lambda within: ({"scores": references.measure()}, {}))
        references.floor, references.ceiling = saved.values["scores"]
    findings: list[Finding] = []
    costs: list[float] = []
    hits: dict[str, list[bool]] = {}
    for title, run in plan:

        def compute(
            within: Progress, run: Callable[[Progress], Iterator[Finding]] = run
        ) -> tuple[Any, dict[str, torch.Tensor]]:
            timed, started = [], time.monotonic()
            references.hits.clear()
            for finding in run(within):  # the time until each finding is its cost
                timed.append((asdict(finding), round(time.monotonic() - started, 2)))
                started = time.monotonic()
            return {"findings": timed, "hits": dict(references.hits)}, {}

        outcome = steps.run(title, title, compute).values
        hits.update(outcome["hits"])
        for values, seconds in outcome["findings"]:
            findings.append(apply_threshold(Finding(**values), fail_above))
            costs.append(seconds)
    if not findings:
        raise AuditError(
            "no attack is applicable to this lock",
            hint=Hint(
                "pass base=, or data= with examples of its task",
                cli="pass --against BASE, or --data with examples of its task",
            ),
        )
    table = Table(
        "What each attack recovers",
        ("attack", "baseline", "value", "control", "measure", "seconds"),
        tuple(
            (f.id, f.floor, f.value, f.ceiling, f.measure, seconds)
            for f, seconds in zip(findings, costs, strict=True)
        ),
    )
    results = Results(
        "What this lock is worth",
        tuple(findings),
        (table,),
        plot_lock(findings),
        facts={"kind": case.kind},
        unchecked=tuple(unchecked),
    )
    return with_verdicts(results, build_verdict(findings, hits))


class References:
    """The scores of the locked model and the owner's, between which attacks are scored."""

    def __init__(self, case: LockCase) -> None:
        self.case = case
        self.floor: Any = None
        self.ceiling: Any = None
        self.hits: dict[str, list[bool]] = {}  # which test examples the last theft gets right

    def measure(self) -> list[float | None]:
        """Return the score of the locked model, and of the owner's if the key is available."""
        truth = self.case.truth
        owner = None if truth is None else apply(~truth, self.case.state, "backbone")
        return [_evaluate(self.case, state) for state in (self.case.state, owner)]


def build_verdict(
    findings: Sequence[Finding], hits: Mapping[str, Sequence[bool]] | None = None
) -> list[Verdict]:
    """Return the consequences for the owner of the lock, the worst first.

    Args:
        findings: The findings.
        hits: For each theft, by the id of its finding, which test examples it gets right.
    """
    by_id = {f.id.removeprefix("lock/"): f for f in findings}
    base = by_id.get("public base")

    def undone(*names: str) -> list[Verdict]:
        found = [by_id[name] for name in names if name in by_id]
        return [
            Verdict(UNDONE[f.id].format(sentence=f.sentence), "leak")
            for f in found
            if f.value is not None and f.value >= RECOVERED
        ]

    situation = "Without a related model" if base is None else "Without a base"
    return order_verdicts(
        [
            *undone("public edges"),
            _judge_base(base),
            *_judge_thefts(findings, hits or {}, situation),
            *undone("known inputs", "seen features", "vocabulary"),
        ]
    )


def _judge_base(base: Finding | None) -> Verdict:
    """Judge the attack with a public base."""
    if base is None or base.value is None:
        return Verdict(
            "No base was tried: if this model was fine-tuned from a public one, run the audit with "
            "--against that one; the lock then gives nothing.",
            "unclear",
        )
    if base.value >= RECOVERED:
        return Verdict(
            "The base is public: this lock gives nothing. Anyone with the base undoes the lock.",
            "leak",
        )
    if base.measure == EXPLAINED:
        # Not a share of the key: unrelated weights explain some of any weights.
        shuffled = base.floor or 0.0
        is_relative = base.value - shuffled > (1 - shuffled) / 2
        return Verdict(
            f"The base that was tried, transformed by the guess, explains {base.value:.0%} of the "
            f"weights (shuffled weights: {shuffled:.0%}); with -k KEY the audit reports the share "
            "of the key.",
            "leak" if is_relative else "unclear",
        )
    guessed = base.value <= GUESSED
    about = ", about as a guess" if guessed else ""
    return Verdict(
        f"The base that was tried reveals {base.value:.0%} of the key{about}.",
        "none" if guessed else "partial",
    )


def _judge_thefts(
    findings: Sequence[Finding], hits: Mapping[str, Sequence[bool]], situation: str
) -> list[Verdict]:
    """Judge the best theft with most labels against a model trained on the labels alone."""
    by_id = {f.id: f for f in findings}
    thefts = [f for f in findings if f.id.startswith("lock/theft/") and f.value is not None]
    stolen = [f for f in thefts if "scratch" not in f.id]
    if not stolen:
        return []
    labels = max(int(f.id.rsplit(" ", 1)[1]) for f in stolen)
    rivals = [f for f in stolen if f.id.endswith(f" {labels}")]
    best = max(rivals, key=lambda f: f.value or 0.0)
    scratch = by_id.get(f"lock/theft/scratch {labels}")
    ceiling = f" of {best.ceiling:.2f}" if best.ceiling is not None else ""
    sentence = f"{situation}: an attacker with {labels} labels reaches {best.value:.2f}{ceiling}"
    if scratch is None or scratch.value is None or best.value is None:
        return [Verdict(f"{sentence}.")]
    sentence += f"; the labels alone give {scratch.value:.2f}"
    if best.id not in hits or scratch.id not in hits:
        return [Verdict(f"{sentence}.")]
    low, high = gain_interval(hits[best.id], hits[scratch.id], len(rivals))
    usable = best.ceiling is not None and best.value >= best.ceiling - MARGIN
    if low > 0:
        return [Verdict(f"{sentence}.", "leak" if usable else "partial")]
    if high <= MARGIN:
        help_ = f"at 99 % confidence the locked weights add at most {high:.2f}"
        return [Verdict(f"{sentence}; {help_}.", "none")]
    few = f"{len(hits[best.id])} test examples are too few to decide if the locked weights help"
    return [Verdict(f"{sentence}; {few}.", "unclear")]


def gain_interval(
    better: Sequence[bool], baseline: Sequence[bool], tried: int = 1
) -> tuple[float, float]:
    """Return the 99 % interval of the gain in accuracy, paired over the same test examples.

    It is the adjusted Wald interval of Agresti and Min (2005), which is not empty if all pairs
    agree.

    Args:
        better: Which examples the better model gets right.
        baseline: Which examples the baseline gets right.
        tried: The number of models of which this is the best (Bonferroni).

    Example:
        >>> low, high = gain_interval([True] * 10, [True] * 7 + [False] * 3)
        >>> low < 0 < high
        True
    """
    from scipy.stats import norm

    difference = np.asarray(better, float) - np.asarray(baseline, float)
    count, net = len(difference) + 2, float(difference.sum())
    variance = float(np.abs(difference).sum()) + 1 - net**2 / count
    width = norm.isf((1 - CONFIDENCE) / 2 / tried) * math.sqrt(variance) / count
    return net / count - float(width), net / count + float(width)


def _reason_skipped(case: LockCase, name: str) -> str:
    """Return why an attack does not apply to a case; empty if it does."""
    if name == "handling":
        return "" if case.record is not None and case.key is not None else "the key was not given"
    if name == "public edges":
        if not edges.has_permuted_stream(LockedFile(case.spec, case.state, case.kind)):
            return "the lock must permute the stream"
        return "" if case.truth is not None else "the key that scores it was not given"
    if name in ("public base", "lineage"):
        return (
            ""
            if case.base is not None or (name == "lineage" and case.candidates)
            else "no possible ancestor of the model was given"
        )
    if case.model is None or case.test is None:
        return "no data were given"
    if name == "theft":
        if case.test.causal or case.test.tokens:
            return "language models have no task with few labels"
        return "" if case.train is not None else "no labels"
    try:
        cut(case.model)
    except CutError as error:
        return str(error)
    if name == "vocabulary" and not case.test.causal:
        return "not a language model"
    # Known inputs and attacked ones are halves of the examples.
    return "fewer than two examples were given" if len(case.test) < 2 else ""


def _try_public_edges(
    case: LockCase, references: References, seed: int, within: Progress
) -> Iterator[Finding]:
    assert case.truth is not None
    guess = edges.public_edges(LockedFile(case.spec, case.state, case.kind), progress=within)
    streams = {s: m for s, m in case.truth.members.items() if s in guess.element.members}
    if not streams:
        return
    share = _key_share(guess.element.members, streams)
    floor = len(streams) / sum(m.size for m in streams.values())
    sentence = (
        f"the file alone gives {share:.1%} of the order of the stream in {guess.seconds:.1f} s"
    )
    statement = "the plain embedding and head do not reveal the key of the stream"
    yield _make_finding("lock/public edges", statement, share, floor, 1.0, sentence)
    yield from _try_unlocked_model(case, references, guess, "public edges")


def _try_unlocked_model(
    case: LockCase, references: References, guess: weights.Guess, attack: str
) -> Iterator[Finding]:
    if case.model is None or case.test is None:
        return
    floor, ceiling = references.floor, references.ceiling
    value = _evaluate(case, guess.unlock(case.spec, case.state))
    sentence = "the model that the guess unlocks, the locked one and the owner's"
    statement = "the unlocked guess is not worth the owner's model"
    yield _make_finding(
        f"lock/{attack}, used",
        statement,
        value,
        floor,
        ceiling,
        sentence,
        _metric_name(case),
        _count_of(case),
    )


def _try_public_base(
    case: LockCase, references: References, seed: int, within: Progress
) -> Iterator[Finding]:
    assert case.base is not None
    view = LockedFileWithBase(case.spec, case.state, case.kind, base=case.base)
    if case.truth is not None:
        guess = weights.norm_vectors(view)
        streams = {s: m for s, m in case.truth.members.items() if s in guess.element.members}
        if streams:
            share = _key_share(guess.element.members, streams)
            sentence = f"gains and biases give {share:.0%} of the order of the stream"
            yield _make_finding(
                "lock/norm vectors",
                "gains and biases do not reveal the key of the stream",
                share,
                0.0,
                1.0,
                sentence,
            )
    guess = weights.public_base(view, progress=within)
    if case.truth is not None:
        spaces = part_spec(case.spec, "backbone").spaces
        share = _key_share(
            guess.element.members, {s: m for s, m in case.truth.members.items() if s in spaces}
        )
        sentence = f"{share:.1%} of the key in {guess.seconds:.1f} s, from {guess.start}"
        measure, floor = "share of the key", 0.0
    else:
        # Without the key: the share of the locked weights that the guess explains, relative to a
        # guess from shuffled weights.
        shuffled = weights.public_base(replace(view, base=_shuffle_weights(case.base, seed)))
        share, floor = (max(0.0, 1 - result.relative**2) for result in (guess, shuffled))
        sentence = (
            f"the base, transformed by the guess, explains {share:.1%} of the squares of the "
            f"locked weights; shuffled weights {floor:.1%}"
        )
        measure = EXPLAINED
    yield _make_finding(
        "lock/public base",
        "a public base does not give the key away",
        share,
        floor,
        1.0,
        sentence,
        measure,
    )
    yield from _try_unlocked_model(case, references, guess, "public base")


def _try_lineage(
    case: LockCase, references: References, seed: int, within: Progress
) -> Iterator[Finding]:
    candidates = dict(case.candidates)
    if case.base is not None:
        candidates["the base"] = case.base
        candidates["a stranger"] = _shuffle_weights(case.base, seed)
    distances = weights.lineage(
        LockedFileWithCandidates(case.spec, case.state, case.kind, candidates=candidates)
    )
    nearest = min(distances, key=lambda name: distances[name])
    baseline = distances.get("a stranger", max(distances.values()))
    sentence = (
        f"nearest in invariants of the weights is {nearest}: {distances[nearest]:.3f}; "
        f"{', '.join(f'{n} {d:.3f}' for n, d in distances.items() if n != nearest)}"
    )
    share = max(0.0, 1 - distances[nearest] / baseline) if baseline else 1.0
    yield _make_finding(
        "lock/lineage",
        "the model's descent is hidden",
        share,
        0.0,
        1.0,
        sentence,
        "1 - distance / a stranger's",
    )


def _shuffle_weights(base: State, seed: int) -> dict[str, torch.Tensor]:
    """Return a model of the same numbers in random order, as a baseline."""
    generator = torch.Generator().manual_seed(seed)
    return {
        n: v.flatten()[torch.randperm(v.numel(), generator=generator)].view(v.shape)
        if v.numel() > 1
        else v
        for n, v in base.items()
    }


def _try_known_inputs(
    case: LockCase, references: References, seed: int, within: Progress
) -> Iterator[Finding]:
    known, others, member = _sample_features(case, seed)
    observed = _apply_member(known, member)
    needed, share = math.nan, 0.0
    for n in (n for n in TOKEN_COUNTS if n <= len(known)):
        guess = features.known_inputs(KnownInputs(known[:n], observed[:n], case.kind))
        share = _restored_share(guess, member, others)
        if share >= RECOVERED:
            needed = n
            break
    sentence = (
        f"{needed} token{'s are' if needed > 1 else ' is'} enough"
        if needed == needed
        else f"{len(known)} tokens give {share:.0%}"
    )
    yield _make_finding(
        "lock/known inputs",
        "known inputs do not give the key of the stream",
        share,
        1 / member.size,
        1.0,
        sentence,
    )


def _try_observed_features(
    case: LockCase, references: References, seed: int, within: Progress
) -> Iterator[Finding]:
    rows, others, member = _sample_features(case, seed)
    guess = features.feature_statistics(
        ObservedFeatures(_apply_member(rows, member), others, case.kind)
    )
    share = _restored_share(guess, member, rows)
    sentence = (
        f"{len(rows)} observed tokens, and {len(others)} embedded tokens of other examples, "
        f"give {share:.0%}"
    )
    yield _make_finding(
        "lock/seen features",
        "observed features alone do not give the key of the stream",
        share,
        1 / member.size,
        1.0,
        sentence,
    )


def _try_vocabulary(
    case: LockCase, references: References, seed: int, within: Progress
) -> Iterator[Finding]:
    """Recover text from hidden states of the locked model.

    Any model would do, if the adversary has its weights and observes its hidden states.
    """
    assert case.model is not None
    assert case.test is not None
    *_, member = _sample_features(case, seed)
    ids = case.test.batch(np.arange(1))[0]["input_ids"][:, :VOCABULARY_TOKENS]
    layer = max(1, int(getattr(case.model.config, "num_hidden_layers", 2)) // 2)
    with torch.no_grad():
        states = case.model(input_ids=ids, output_hidden_states=True).hidden_states[layer][0]
    recovered = features.vocabulary_search(
        HiddenStates(_apply_member(states, member), case.model, layer, case.kind)
    )
    right = [a == b for a, b in zip(recovered, ids[0].tolist(), strict=True)]
    sentence = f"{sum(right)} of {len(right)} tokens, from the states at layer {layer}"
    yield _make_finding(
        "lock/vocabulary",
        "hidden states do not give the text",
        float(np.mean(right)),
        1 / case.test.classes,
        1.0,
        sentence,
        "share of tokens",
    )


def _try_theft(
    case: LockCase,
    references: References,
    way: str,
    rows: np.ndarray,
    budget: theft.Budget,
    within: Progress,
) -> Iterator[Finding]:
    """Steal with the labels of these examples; the best learning rate counts."""
    assert case.model is not None
    assert case.train is not None
    floor, owner = references.floor, references.ceiling
    examples, count = case.train.only(rows), len(rows)
    view = LockedFileWithLabels(
        case.spec, case.state, case.kind, model=case.model, examples=examples
    )
    values = []
    for i, variant in enumerate(budget.each_lr()):

        def report(done: int, total: int, label: str, i: int = i) -> None:
            within(i * total + done, len(budget.lrs) * total, label)

        stolen = THEFTS[way](view, variant, report)
        values.append(_evaluate(case, stolen.state_dict(), stolen))
        if values[-1] >= max(v for v in (-math.inf, *values) if not math.isnan(v)):
            references.hits[f"lock/theft/{way} {count}"] = _find_correct(stolen, case.test)
    value = max(values, key=lambda v: -math.inf if math.isnan(v) else v)
    sentence = f"{value:.3f} with {count} labels; the locked model {floor:.3f}" + (
        "" if owner is None else f", the owner's {owner:.3f}"
    )
    yield _make_finding(
        f"lock/theft/{way} {count}",
        f"{count} labels are of little use to a thief",
        value,
        floor,
        owner,
        sentence,
        _metric_name(case),
        _count_of(case),
    )


def _check_handling(
    case: LockCase, references: References, seed: int, within: Progress
) -> Iterator[Finding]:
    """Check that misuse is detected: a wrong key, a changed bit, a missing tensor, a reused key."""
    from regauge.errors import TamperedModelError, WrongKeyError
    from regauge.locking.keys import generate_key
    from regauge.locking.lock import add_tags, header_of, locked_element, verify_tags

    record, key = case.record, case.key
    assert record is not None
    assert key is not None
    header, digests = header_of(case.state), {name: name.encode() for name in case.state}
    # Tags of placeholder digests, to avoid hashing all weights again.
    sealed = add_tags(record, key, case.spec, header, digests)
    first = min(header)

    def adversary_success(error: type[Exception], action: Callable[[], object]) -> float:
        try:
            action()
        except error:
            return 0.0
        return 1.0

    flipped = {**digests, first: b"other"}
    incomplete = {name: entry for name, entry in header.items() if name != first}
    checks: dict[str, tuple[str, Callable[[], float]]] = {
        "wrong key": (
            "another key is rejected",
            lambda: adversary_success(
                WrongKeyError, lambda: locked_element(case.spec, record, generate_key())
            ),
        ),
        "changed bit": (
            "changed weights are rejected",
            lambda: adversary_success(
                TamperedModelError, lambda: verify_tags(sealed, key, case.spec, header, flipped)
            ),
        ),
        "lost tensor": (
            "a model that lacks a tensor is rejected",
            lambda: adversary_success(
                TamperedModelError, lambda: verify_tags(sealed, key, case.spec, incomplete, digests)
            ),
        ),
        "key reuse": (
            "one key gives two models unrelated elements",
            lambda: _measure_key_reuse(case, record, key),
        ),
    }
    for name, (statement, attempt) in checks.items():
        value = attempt()
        sentence = "as expected" if value < 0.5 else "NOT as expected"
        finding = _make_finding(
            f"lock/handling/{name}",
            statement,
            value,
            0.0,
            1.0,
            sentence,
            "success of the adversary",
        )
        yield replace(finding, holds=value < 0.5)


def _measure_key_reuse(case: LockCase, record: Record, key: Key) -> float:
    """Return the share of the stream on which the elements of two models under one key agree."""
    from regauge.core.element import element
    from regauge.locking.lock import LOCKS

    within = LOCKS[record.group].within
    elements = [
        element(case.spec, key.derive("lock/element", bytes.fromhex(digest)), within=within)
        for digest in (record.digest, f"{1:064x}")
    ]
    streams = {s: m for s, m in elements[0].members.items() if s.startswith("stream")}
    return _key_share({s: m for s, m in elements[1].members.items() if s in streams}, streams)


def _sample_features(case: LockCase, seed: int) -> tuple[torch.Tensor, torch.Tensor, Member]:
    """Return embedded tokens of two disjoint halves of the test, and a random member of the group.

    The attacks on features do not depend on the member, so they can run without the key.
    """
    assert case.test is not None
    order = np.random.default_rng(seed).permutation(len(case.test))
    half = len(order) // 2
    first, second = (_embed_tokens(case, rows, seed) for rows in (order[:half], order[half:]))
    return (
        first,
        second,
        features.GROUPS[case.kind].sample(
            first.shape[1], 1, Stream(seed_key(seed), "audit/stream")
        ),
    )


def _embed_tokens(case: LockCase, indices: Any, seed: int) -> torch.Tensor:
    """Return the embedded tokens of some examples, without padding, in random order."""
    assert case.model is not None
    assert case.test is not None
    rows: list[torch.Tensor] = []
    parts = cut(case.model)
    for start in range(0, len(indices), 32):
        inputs, _ = case.test.batch(np.sort(indices[start : start + 32]))
        with torch.no_grad():
            stream = parts.embed(**inputs).stream
        flat, mask = stream.reshape(-1, stream.shape[-1]), inputs.get("attention_mask")
        rows.append(
            flat if mask is None or mask.numel() != len(flat) else flat[mask.flatten().bool()]
        )
        if sum(map(len, rows)) >= TOKEN_COUNTS[-1]:
            break
    tokens = torch.cat(rows).double()
    return tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))]


def _apply_member(rows: torch.Tensor, member: Member) -> torch.Tensor:
    """Return the features as an observer sees them, transformed by a member."""
    return rows @ torch.from_numpy(member.matrix()[0]).to(rows).T


def _evaluate(case: LockCase, state: Any, model: torch.nn.Module | None = None) -> Any:
    """Return the accuracy; for a language model, minus its loss in nats."""
    if state is None:
        return None
    assert case.test is not None
    module = model or case.model
    assert module is not None
    scores = score(
        module, {n: v.float() if v.is_floating_point() else v for n, v in state.items()}, case.test
    )
    return -scores.loss if case.test.causal else scores.accuracy


def _find_correct(model: torch.nn.Module, examples: Examples | None) -> list[bool]:
    """Return which examples a model gets right."""
    assert examples is not None
    batches = predict(model, examples, 16)
    return [hit for b in batches for hit in (b.logits.argmax(1) == b.labels).tolist()]


def _metric_name(case: LockCase) -> str:
    return (
        "minus nats of a next token" if case.test is not None and case.test.causal else "accuracy"
    )


def _count_of(case: LockCase) -> int:
    """Return the number of examples behind an accuracy; 0 for the loss of a language model."""
    return 0 if case.test is None or case.test.causal else len(case.test)


def _make_finding(
    name: str,
    statement: str,
    value: float,
    floor: float | None,
    ceiling: float | None,
    sentence: str,
    measure: str = "share of the key",
    count: int = 0,
) -> Finding:
    """Return a finding; with the exact interval of a share of `count` examples."""
    interval = evidence_of_share(value, floor or 0.0, count).interval if count else None
    return Finding(
        name,
        statement,
        None,
        float(value),
        floor,
        ceiling,
        sentence,
        measure=measure,
        interval=interval,
    )


def _restored_share(guess: Member, member: Member, rows: torch.Tensor) -> float:
    """Return the share of a member that a guess recovers.

    For permutations that is the share of positions. For matrices it is the share of the features
    that the guess restores: features span only a part of the space, and the rest does not matter.
    """
    if isinstance(guess, Monomial) and isinstance(member, Monomial):
        return _key_share({"": guess}, {"": member})
    x = rows.numpy()
    error = np.square(x @ (guess.matrix()[0] - member.matrix()[0]).T).sum() / max(
        float(np.square(x).sum()), 1e-300
    )
    return max(0.0, 1 - float(error))


def _key_share(guesses: Mapping[str, Member], truth: Mapping[str, Member]) -> float:
    """Return the share of a key's members that a guess recovers.

    For permutations that is the share of correct coordinates, for matrices the share of rows with
    a relative error below 0.1.
    """
    right = total = 0.0
    for space, member in truth.items():
        guess = guesses.get(space)
        total += member.count * member.size
        if isinstance(member, Monomial) and isinstance(guess, Monomial):
            guess_scale, true_scale = (
                np.ones(member.index.shape) if m.scale is None else m.scale for m in (guess, member)
            )
            right += float(
                (
                    (guess.index == member.index)
                    & (np.abs(guess_scale - true_scale) < 0.1 * np.abs(true_scale))
                ).sum()
            )
        elif guess is not None:
            m = member.matrix()
            errors = np.linalg.norm(guess.matrix() - m, axis=2) / np.maximum(
                np.linalg.norm(m, axis=2), 1e-300
            )
            right += float((errors < 0.1).sum())
    return right / max(total, 1.0)


_RUN: Mapping[str, Callable[[LockCase, References, int, Progress], Iterator[Finding]]] = {
    "public edges": _try_public_edges,
    "public base": _try_public_base,
    "lineage": _try_lineage,
    "known inputs": _try_known_inputs,
    "seen features": _try_observed_features,
    "vocabulary": _try_vocabulary,
    "handling": _check_handling,
}

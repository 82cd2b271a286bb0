"""Audits: every attack on one's own case, and what it comes to in plain words. Attacks see a view;
here is the truth that they are scored by.

    results = audit_lock(LockCase(spec, locked, "permutation", base=base, truth=g, model=model,
    train=train, test=test))
    results.facts["verdict"]

A finding's value is how much of what was protected an attack has got, between its floor (what a
guess gets) and its ceiling (all of it).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from regauge.core.action import State, apply
from regauge.core.element import Element
from regauge.core.groups import Kind
from regauge.core.members import Member, Monomial
from regauge.core.progress import Progress
from regauge.core.rng import Stream, seed_key
from regauge.core.spec import Spec
from regauge.data.tasks import Examples
from regauge.errors import CutError, RegaugeError
from regauge.matching.barriers import score
from regauge.matching.invariants import find_nonfinite
from regauge.models.cut import cut
from regauge.results.findings import Finding, Results, Table, apply_threshold

if TYPE_CHECKING:
    from regauge.locking.keys import Key
    from regauge.locking.lock import Record

LABEL_COUNTS = (50, 200, 1000)
TOKEN_COUNTS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096)
RECOVERED = 0.99  # a key is known if so much of it is
EXPLAINED = "share explained"  # what is measured of a guess where there is no key to score it by


class AuditError(RegaugeError):
    """A case that cannot be audited."""


@dataclass(frozen=True, eq=False)
class LockCase:
    """A locked model, and what there is to attack it with and to judge the attacks by.

    `state` is the locked one; `truth` the key's element, if the key is at hand. `base` is a public
    model that it may descend from. `model` is a live model with the locked weights; `train` are
    examples that a thief would have, `test` others. `record` and `key` are for how the lock is
    handled: wrong keys, changed weights, one key for several models.
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
    attacks: Collection[str] | None = None,
    progress: Progress | None = None,
) -> Results:
    """Every attack that the case allows, or some by name. `most`: findings fail where an attack
    gets more than this share of the way from its floor to its ceiling.
    """
    budget = budget or theft.Budget(seed=seed)
    for what, state in (
        ("the locked model", case.state),
        ("the base", case.base),
        *case.candidates.items(),
    ):
        bad = None if state is None else find_nonfinite(state)
        if bad is not None:
            raise AuditError(
                f'{what} holds NaN or Inf in "{bad}", so that nothing can be compared with it',
                hint="is it the right file?",
            )
    parts: list[tuple[str, Callable[[], Iterator[tuple[Finding, float]]]]] = [
        ("public edges", lambda: _try_public_edges(case)),
        ("public base", lambda: _try_public_base(case, seed)),
        ("lineage", lambda: _try_lineage(case, seed)),
        ("known inputs", lambda: _try_known_inputs(case, seed)),
        ("seen features", lambda: _try_observed_features(case, seed)),
        ("vocabulary", lambda: _try_vocabulary(case, seed)),
        ("theft", lambda: _try_theft(case, labels, budget)),
        ("handling", lambda: _check_handling(case)),
    ]
    parts = [part for part in parts if attacks is None or part[0] in attacks]
    findings: list[Finding] = []
    costs: list[tuple[str, float]] = []
    unchecked: list[str] = []
    for i, (name, run) in enumerate(parts):
        why = _reason_skipped(case, name)
        if why:
            unchecked.append(f"{name}: {why}")
            continue
        if progress:
            progress(i, len(parts), name)
        if name == "theft" and case.train is not None:
            unchecked += [
                f"theft with {n} labels: there are {len(case.train)} examples"
                for n in labels
                if n > len(case.train)
            ]
        for finding, seconds in run():
            findings.append(apply_threshold(finding, fail_above))
            costs.append((finding.id, round(seconds, 2)))
    if not findings:
        raise AuditError(
            "nothing could be tried against this lock",
            hint="give --against BASE, or --data with examples of its task",
        )
    table = Table(
        "What each attack gets",
        ("attack", "floor", "value", "ceiling", "measure", "seconds"),
        tuple(
            (f.id, f.floor, f.value, f.ceiling, f.measure, s)
            for f, (_, s) in zip(findings, costs, strict=True)
        ),
    )
    verdict = build_verdict(findings)
    return Results(
        "What this lock is worth",
        tuple(findings),
        (table,),
        (),
        {"verdict": verdict, "kind": case.kind},
        tuple(unchecked),
    )


def build_verdict(findings: Sequence[Finding]) -> list[str]:
    """What it comes to, for the user's situation."""
    by = {f.id: f for f in findings}
    out = []
    edge = by.get("lock/public edges")
    if edge is not None and edge.value is not None and edge.value >= RECOVERED:
        out.append(
            "The file alone undoes this lock: its embedding and head, which are in plain, give "
            "the order of the stream away."
        )
    base = by.get("lock/public base")
    if base is not None and base.value is not None:
        if base.value >= RECOVERED:
            out.append(
                "The base is public: this lock gives nothing. Whoever has it undoes the lock."
            )
        elif (
            base.measure == EXPLAINED
        ):  # a stranger explains some of any weights, so this is not a share of the key
            out.append(
                f"The base that was tried, moved as guessed, explains {base.value:.0%} of the "
                "weights; with -k KEY: how much of the key that is."
            )
        else:
            out.append(f"The base that was tried gives {base.value:.0%} of the lock away.")
    else:
        out.append(
            "No base was tried: if this model was tuned from a public one, run the audit "
            "against it; the lock then gives nothing."
        )
    stolen = [
        f
        for f in findings
        if f.id.startswith("lock/theft/") and "scratch" not in f.id and f.value is not None
    ]
    if stolen:
        labels = max(int(f.id.rsplit(" ", 1)[1]) for f in stolen)
        best = max((f for f in stolen if f.id.endswith(f" {labels}")), key=lambda f: f.value or 0.0)
        alone = by.get(f"lock/theft/scratch {labels}")
        top = f" of {best.ceiling:.2f}" if best.ceiling is not None else ""
        rest = (
            f"; the labels alone give {alone.value:.2f}"
            if alone is not None and alone.value is not None
            else ""
        )
        who = "No relative known" if base is None else "Without a base"
        out.append(f"{who}: an attacker with {labels} labels reaches {best.value:.2f}{top}{rest}.")
    known = by.get("lock/known inputs")
    if known is not None and known.value is not None and known.value >= RECOVERED:
        out.append(
            "Whoever sees moved features of inputs that it knows has the key of the stream: "
            + known.sentence
        )
    seen = by.get("lock/seen features")
    if seen is not None and seen.value is not None and seen.value >= RECOVERED:
        out.append(
            "Whoever sees moved features of enough unknown inputs, and has the embedding, has "
            "it too: do not use one key for many batches."
        )
    text = by.get("lock/vocabulary")
    if text is not None and text.value is not None and text.value >= RECOVERED:
        out.append(
            "Hidden states of an open language model give the text itself, whatever the key."
        )
    return out


def _reason_skipped(case: LockCase, name: str) -> str:
    if name == "handling":
        return "" if case.record is not None and case.key is not None else "the key was not given"
    if name == "public edges":
        if not edges.has_permuted_stream(LockedFile(case.spec, case.state, case.kind)):
            return "it is for permutations of the stream"
        return "" if case.truth is not None else "it is scored by the key, which was not given"
    if name in ("public base", "lineage"):
        return (
            ""
            if case.base is not None or (name == "lineage" and case.candidates)
            else "no model was given that it may descend from"
        )
    if case.model is None or case.test is None:
        return "no data were given"
    if name == "theft":
        if case.test.causal or case.test.tokens:
            return "it is of language models no task with few labels"
        return "" if case.train is not None else "no labels"
    try:
        cut(case.model)
    except CutError as error:
        return str(error)
    if name == "vocabulary" and not case.test.causal:
        return "it is no language model"
    return (
        "fewer than two examples were given" if len(case.test) < 2 else ""
    )  # what is known and what is sought are halves of them


def _try_public_edges(case: LockCase) -> Iterator[tuple[Finding, float]]:
    assert case.truth is not None
    guess = edges.public_edges(LockedFile(case.spec, case.state, case.kind))
    streams = {s: m for s, m in case.truth.members.items() if s in guess.element.members}
    if not streams:
        return
    share = _key_share(guess.element.members, streams)
    floor = len(streams) / sum(m.size for m in streams.values())
    said = f"the file alone gives {share:.1%} of the order of the stream in {guess.seconds:.1f} s"
    statement = "embedding and head, in plain, do not give the key of the stream"
    yield _make_finding("lock/public edges", statement, share, floor, 1.0, said), guess.seconds
    if case.model is not None and case.test is not None:
        yield from _try_unlocked_model(case, guess, "public edges")


def _try_unlocked_model(
    case: LockCase, guess: weights.Guess, attack: str
) -> Iterator[tuple[Finding, float]]:
    started = time.monotonic()
    value, floor, ceiling = (
        _evaluate(case, s) for s in (guess.unlock(case.spec, case.state), case.state, _unlock(case))
    )
    said = "the model that the guess unlocks, the locked one and the owner's"
    statement = "the unlocked guess is not worth the owner's model"
    yield (
        _make_finding(
            f"lock/{attack}, used", statement, value, floor, ceiling, said, _metric_name(case)
        ),
        time.monotonic() - started,
    )


def _try_public_base(case: LockCase, seed: int) -> Iterator[tuple[Finding, float]]:
    assert case.base is not None
    view = LockedFileWithBase(case.spec, case.state, case.kind, base=case.base)
    if case.truth is not None:
        started = time.monotonic()
        guess = weights.norm_vectors(view)
        streams = {s: m for s, m in case.truth.members.items() if s in guess.element.members}
        if streams:
            share = _key_share(guess.element.members, streams)
            said = f"gains and biases give {share:.0%} of the order of the stream"
            yield (
                _make_finding(
                    "lock/norm vectors",
                    "gains and biases do not tell the key of the stream",
                    share,
                    0.0,
                    1.0,
                    said,
                ),
                time.monotonic() - started,
            )
    started = time.monotonic()
    guess = weights.public_base(view)
    seconds = time.monotonic() - started
    if case.truth is not None:
        inside = part_spec(case.spec, "backbone").spaces
        share = _key_share(
            guess.element.members, {s: m for s, m in case.truth.members.items() if s in inside}
        )
        said = f"{share:.1%} of the key in {seconds:.1f} s, from {guess.start}"
        measure, floor = "share of the key", 0.0
    # without the key: how much of the locked weights the guess explains, and a guess from the same
    # numbers in no order
    else:
        by_none = weights.public_base(replace(view, base=_shuffle_weights(case.base, seed)))
        share, floor = (max(0.0, 1 - one.relative**2) for one in (guess, by_none))
        said = (
            f"the base, moved as guessed, explains {share:.1%} of the locked weights' "
            f"squares; a stranger {floor:.1%}"
        )
        measure = EXPLAINED
    yield (
        _make_finding(
            "lock/public base",
            "a public base does not give the key away",
            share,
            floor,
            1.0,
            said,
            measure,
        ),
        seconds,
    )
    if case.model is not None and case.test is not None:
        yield from _try_unlocked_model(case, guess, "public base")


def _try_lineage(case: LockCase, seed: int) -> Iterator[tuple[Finding, float]]:
    started = time.monotonic()
    candidates = dict(case.candidates)
    if case.base is not None:
        candidates["the base"] = case.base
        candidates["a stranger"] = _shuffle_weights(case.base, seed)
    found = weights.lineage(
        LockedFileWithCandidates(case.spec, case.state, case.kind, candidates=candidates)
    )
    nearest = min(found, key=lambda name: found[name])
    stranger = found.get("a stranger", max(found.values()))
    said = (
        f"nearest in what no key changes is {nearest}: {found[nearest]:.3f}; "
        f"{', '.join(f'{n} {d:.3f}' for n, d in found.items() if n != nearest)}"
    )
    share = max(0.0, 1 - found[nearest] / stranger) if stranger else 1.0
    yield (
        _make_finding(
            "lock/lineage",
            "the model's descent is hidden",
            share,
            0.0,
            1.0,
            said,
            "1 - distance / a stranger's",
        ),
        time.monotonic() - started,
    )


def _shuffle_weights(base: State, seed: int) -> dict[str, torch.Tensor]:
    """A model of the same numbers in no order: what it gives, anything gives."""
    draw = torch.Generator().manual_seed(seed)
    return {
        n: v.flatten()[torch.randperm(v.numel(), generator=draw)].view(v.shape)
        if v.numel() > 1
        else v
        for n, v in base.items()
    }


def _try_known_inputs(case: LockCase, seed: int) -> Iterator[tuple[Finding, float]]:
    started = time.monotonic()
    plain, others, member = _sample_features(case, seed)
    moved = _apply_member(plain, member)
    needed, share = math.nan, 0.0
    for n in (n for n in TOKEN_COUNTS if n <= len(plain)):
        guess = features.known_inputs(KnownInputs(plain[:n], moved[:n], case.kind))
        share = _restored_share(guess, member, others)
        if share >= RECOVERED:
            needed = n
            break
    said = (
        f"{needed} token{'s are' if needed > 1 else ' is'} enough"
        if needed == needed
        else f"{len(plain)} tokens give {share:.0%}"
    )
    finding = _make_finding(
        "lock/known inputs",
        "known inputs do not give the key of the stream",
        share,
        1 / member.size,
        1.0,
        said,
    )
    yield finding, time.monotonic() - started


def _try_observed_features(case: LockCase, seed: int) -> Iterator[tuple[Finding, float]]:
    started = time.monotonic()
    plain, others, member = _sample_features(case, seed)
    guess = features.feature_statistics(
        ObservedFeatures(_apply_member(plain, member), others, case.kind)
    )
    share = _restored_share(guess, member, plain)
    said = (
        f"{len(plain)} moved tokens, and {len(others)} of other examples through the "
        f"embedding, give {share:.0%}"
    )
    yield (
        _make_finding(
            "lock/seen features",
            "moved features alone do not give the key of the stream",
            share,
            1 / member.size,
            1.0,
            said,
        ),
        (time.monotonic() - started),
    )


def _try_vocabulary(case: LockCase, seed: int, tokens: int = 12) -> Iterator[tuple[Finding, float]]:
    """On the model as it stands: any model would do of which the adversary has the weights and sees
    hidden states.
    """
    assert case.model is not None
    assert case.test is not None
    started = time.monotonic()
    *_, member = _sample_features(case, seed)
    ids = case.test.batch(np.arange(1))[0]["input_ids"][:, :tokens]
    layer = max(1, int(getattr(case.model.config, "num_hidden_layers", 2)) // 2)
    with torch.no_grad():
        states = case.model(input_ids=ids, output_hidden_states=True).hidden_states[layer][0]
    found = features.vocabulary_search(
        HiddenStates(_apply_member(states, member), case.model, layer, case.kind)
    )
    share = float(np.mean([a == b for a, b in zip(found, ids[0].tolist(), strict=True)]))
    said = (
        f"{sum(a == b for a, b in zip(found, ids[0].tolist(), strict=True))} of "
        f"{ids.shape[1]} tokens, from the states at layer {layer}"
    )
    yield (
        _make_finding(
            "lock/vocabulary",
            "hidden states do not give the text",
            share,
            1 / case.test.classes,
            1.0,
            said,
            "share of tokens",
        ),
        (time.monotonic() - started),
    )


def _try_theft(
    case: LockCase, labels: Sequence[int], budget: theft.Budget
) -> Iterator[tuple[Finding, float]]:
    assert case.model is not None
    assert case.train is not None
    owner = _evaluate(case, _unlock(case))
    floor = _evaluate(case, case.state)
    draw = np.random.default_rng(budget.seed)
    for n in (n for n in labels if n <= len(case.train)):
        some = case.train.only(np.sort(draw.permutation(len(case.train))[:n]))
        view = LockedFileWithLabels(
            case.spec, case.state, case.kind, model=case.model, examples=some
        )
        for name, steal in (
            ("new edges", theft.new_edges),
            ("tuned", theft.fine_tune),
            ("scratch", theft.train_from_scratch),
        ):
            started = time.monotonic()
            trained = (steal(view, one) for one in budget.each_lr())
            value = max(
                (_evaluate(case, stolen.state_dict(), stolen) for stolen in trained),
                key=lambda v: -math.inf if math.isnan(v) else v,
            )
            said = f"{value:.3f} with {n} labels; the locked model as it stands {floor:.3f}" + (
                "" if owner is None else f", the owner's {owner:.3f}"
            )
            yield (
                _make_finding(
                    f"lock/theft/{name} {n}",
                    f"{n} labels are of little use to a thief",
                    value,
                    floor,
                    owner,
                    said,
                    _metric_name(case),
                ),
                (time.monotonic() - started),
            )


def _check_handling(case: LockCase) -> Iterator[tuple[Finding, float]]:
    """What goes wrong in use: another key, a changed bit, a lost tensor, and one key for two
    models.
    """
    from regauge.errors import TamperedModelError, WrongKeyError
    from regauge.locking.keys import generate_key
    from regauge.locking.lock import add_tags, header_of, locked_element, verify_tags

    record, key = case.record, case.key
    assert record is not None
    assert key is not None
    header, digests = header_of(case.state), {name: name.encode() for name in case.state}
    sealed = add_tags(
        record, key, case.spec, header, digests
    )  # tags of stand-ins for digests, so that not all is hashed again
    first = min(header)

    def refused(by: type[Exception], act: Callable[[], object]) -> float:
        try:
            act()
        except by:
            return 0.0
        return 1.0

    flipped = {**digests, first: b"other"}
    fewer = {name: entry for name, entry in header.items() if name != first}
    tries: dict[str, tuple[str, Callable[[], float]]] = {
        "wrong key": (
            "another key is refused",
            lambda: refused(
                WrongKeyError, lambda: locked_element(case.spec, record, generate_key())
            ),
        ),
        "changed bit": (
            "changed weights are refused",
            lambda: refused(
                TamperedModelError, lambda: verify_tags(sealed, key, case.spec, header, flipped)
            ),
        ),
        "lost tensor": (
            "a model that lacks a tensor is refused",
            lambda: refused(
                TamperedModelError, lambda: verify_tags(sealed, key, case.spec, fewer, digests)
            ),
        ),
        "key reuse": (
            "one key gives two models unrelated elements",
            lambda: _measure_key_reuse(case, record, key),
        ),
    }
    for name, (statement, attempt) in tries.items():
        started = time.monotonic()
        value = attempt()
        said = "as it should" if value < 0.5 else "NOT as it should"
        yield (
            replace(
                _make_finding(
                    f"lock/handling/{name}",
                    statement,
                    value,
                    0.0,
                    1.0,
                    said,
                    "success of the adversary",
                ),
                holds=value < 0.5,
            ),
            (time.monotonic() - started),
        )


def _measure_key_reuse(case: LockCase, record: Record, key: Key) -> float:
    """The share of one model's stream that the element of another model, under the same key, has in
    the same place.
    """
    from regauge.core.element import element
    from regauge.locking.lock import LOCKS

    within = LOCKS[record.group].within
    drawn = [
        element(case.spec, key.derive("lock/element", bytes.fromhex(digest)), within=within)
        for digest in (record.digest, f"{1:064x}")
    ]
    streams = {s: m for s, m in drawn[0].members.items() if s.startswith("stream")}
    return _key_share({s: m for s, m in drawn[1].members.items() if s in streams}, streams)


def _sample_features(case: LockCase, seed: int) -> tuple[torch.Tensor, torch.Tensor, Member]:
    """What enters the backbone through the model's own embedding, of two halves of the test that
    have no example in common, and a member like the key's: the attacks on features do not depend on
    which it is, so that no key is needed to try them.
    """
    assert case.test is not None
    order = np.random.default_rng(seed).permutation(len(case.test))
    half = len(order) // 2
    one, other = (_embed_tokens(case, rows, seed) for rows in (order[:half], order[half:]))
    return (
        one,
        other,
        features.GROUPS[case.kind].sample(one.shape[1], 1, Stream(seed_key(seed), "audit/stream")),
    )


def _embed_tokens(case: LockCase, chosen: Any, seed: int) -> torch.Tensor:
    """The tokens of some examples where they enter the backbone, padding left out, in random
    order.
    """
    assert case.model is not None
    assert case.test is not None
    rows: list[torch.Tensor] = []
    cutting = cut(case.model)
    for start in range(0, len(chosen), 32):
        inputs, _ = case.test.batch(np.sort(chosen[start : start + 32]))
        with torch.no_grad():
            stream = cutting.embed(**inputs).stream
        flat, mask = stream.reshape(-1, stream.shape[-1]), inputs.get("attention_mask")
        rows.append(
            flat if mask is None or mask.numel() != len(flat) else flat[mask.flatten().bool()]
        )
        if sum(map(len, rows)) >= TOKEN_COUNTS[-1]:
            break
    found = torch.cat(rows).double()
    return found[torch.randperm(len(found), generator=torch.Generator().manual_seed(seed))]


def _apply_member(rows: torch.Tensor, member: Member) -> torch.Tensor:
    return rows @ torch.from_numpy(member.matrix()[0]).to(rows).T


def _unlock(case: LockCase) -> State | None:
    return None if case.truth is None else apply(~case.truth, case.state, "backbone")


def _evaluate(case: LockCase, state: Any, model: torch.nn.Module | None = None) -> Any:
    """The accuracy; of a language model, minus its nats."""
    if state is None:
        return None
    assert case.test is not None
    module = model or case.model
    assert module is not None
    found = score(
        module, {n: v.float() if v.is_floating_point() else v for n, v in state.items()}, case.test
    )
    return -found.loss if case.test.causal else found.accuracy


def _metric_name(case: LockCase) -> str:
    return (
        "minus nats of a next token" if case.test is not None and case.test.causal else "accuracy"
    )


def _make_finding(
    name: str,
    statement: str,
    value: float,
    floor: float | None,
    ceiling: float | None,
    sentence: str,
    measure: str = "share of the key",
) -> Finding:
    return Finding(name, statement, None, float(value), floor, ceiling, sentence, measure=measure)


def _restored_share(guess: Member, member: Member, rows: torch.Tensor) -> float:
    """How much of a member is known: of a permutation the share of places, of a matrix the share of
    the features that it restores (features fill a part of the space only, and beyond that part
    there is nothing to know).
    """
    if isinstance(guess, Monomial) and isinstance(member, Monomial):
        return _key_share({"": guess}, {"": member})
    x = rows.numpy()
    apart = np.square(x @ (guess.matrix()[0] - member.matrix()[0]).T).sum() / max(
        float(np.square(x).sum()), 1e-300
    )
    return max(0.0, 1 - float(apart))


def _key_share(found: Mapping[str, Member], truth: Mapping[str, Member]) -> float:
    """How much of a key's members is known: of permutations the share of coordinates that are
    right, of matrices that of rows to a tenth.
    """
    right = total = 0.0
    for space, member in truth.items():
        guess = found.get(space)
        total += member.count * member.size
        if isinstance(member, Monomial) and isinstance(guess, Monomial):
            here, there = (
                np.ones(member.index.shape) if m.scale is None else m.scale for m in (guess, member)
            )
            right += float(
                ((guess.index == member.index) & (np.abs(here - there) < 0.1 * np.abs(there))).sum()
            )
        elif guess is not None:
            m = member.matrix()
            apart = np.linalg.norm(guess.matrix() - m, axis=2) / np.maximum(
                np.linalg.norm(m, axis=2), 1e-300
            )
            right += float((apart < 0.1).sum())
    return right / max(total, 1.0)

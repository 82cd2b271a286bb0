"""Hostile clients: what is rejected, what robust aggregation computes, and that a run and its saved
model survive.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import support.federations as fed
from regauge.checkpoints import files
from regauge.checkpoints.tensor_files import write_tensors
from regauge.cli import main
from regauge.errors import CheckpointError, NonFiniteError
from regauge.federated import (
    Contribution,
    FederatedError,
    InProcess,
    Settings,
    aggregate,
    run_rounds,
    state_of,
    state_store,
)
from regauge.federated.aggregation import COMBINE, Memory, trim_count
from regauge.federated.outputs import save_model
from regauge.federated.rounds import MAX_VOID_ROUNDS
from regauge.federated.runs import server_limits
from regauge.federated.settings import read_settings
from regauge.federated.state_store import RunState
from regauge.federated.states import Absence, State, digest_of, layout_of, norm_of
from regauge.federated.validation import Limits, printable
from regauge.results.findings import load_results

START = {"w": torch.zeros(4), "b": torch.zeros(2)}
DIGEST = digest_of(layout_of(START))
FOUR = Settings(clients=4, rounds=1)


def change(client: int, scale: float = 1.0, number: int = 0, **more: Any) -> Contribution:
    """An honest change: about [1, 2, 3, 4] and [1, 1], by its client's own small noise."""
    draw = np.random.default_rng([client, number])
    tensors = {"w": torch.arange(1.0, 5.0), "b": torch.ones(2)}
    tensors = {
        n: scale * (t + 0.1 * torch.from_numpy(draw.normal(size=t.shape)).float())
        for n, t in tensors.items()
    }
    return replace(Contribution(client, number, DIGEST, tensors, 10, 1, 8, 0.1, 0.5), **more)


class Scripted:
    """An engine of honest clients, but for what `bad` makes of the last one's answer."""

    def __init__(self, settings: Settings, bad: Any) -> None:
        self.settings, self.bad = settings, bad

    def ask(
        self, number: int, clients: Sequence[int], state: State
    ) -> Iterable[Contribution | Absence]:
        last = self.settings.clients - 1
        for client in clients:
            yield (
                self.bad(change(client, number=number))
                if client == last
                else change(client, number=number)
            )


def run_with(bad: Any, settings: Settings = FOUR, **more: Any) -> RunState:
    return run_rounds(Scripted(settings, bad), START, settings, **more)


def without(settings: Settings = FOUR) -> State:
    """The state of a run in which the last client never answers."""
    return run_with(lambda c: Absence(c.client, "away"), settings).state


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a
    )


# Checks


class Odd:
    def __repr__(self) -> str:
        return "odd" * 1000


BAD: dict[str, tuple[str, Any]] = {
    "float64": ("dtype", {"tensors": {n: t.double() for n, t in START.items()}}),
    "integers": ("dtype", {"tensors": {"b": torch.ones(2, dtype=torch.int64)}}),
    "complex": ("dtype", {"tensors": {"b": torch.ones(2, dtype=torch.complex64)}}),
    "sparse": ("dtype", {"tensors": {"b": torch.ones(2).to_sparse()}}),
    "meta": ("dtype", {"tensors": {"b": torch.ones(2, device="meta")}}),
    "broadcast": ("shape", {"tensors": {"b": torch.ones(1)}}),
    "inf": ("values", {"tensors": {"b": torch.tensor([1.0, float("inf")])}}),
    "no mapping": ("type", {"tensors": [torch.ones(2)]}),
    "no tensors": ("type", {"tensors": {"b": [1.0, 1.0]}}),
    "a number as a name": ("names", {"tensors": {3: torch.ones(2)}}),
    "3e38": ("norm", {"tensors": {"b": torch.full((2,), 3e38)}}),
    "sign-flipped x20": ("norm", {"tensors": {n: -20 * t for n, t in change(3).tensors.items()}}),
    "10**12 examples": ("examples", {"examples": 10**12}),
    "5,000 digits": ("examples", {"examples": 10**5000}),
    "text": ("examples", {"examples": "many"}),
    "true": ("examples", {"examples": True}),
    "nan examples": ("examples", {"examples": float("nan")}),
    "steps": ("metrics", {"steps": 10**9}),
    "batch": ("metrics", {"batch": -1}),
    "rate": ("metrics", {"lr": float("inf")}),
    "loss": ("metrics", {"loss": 1e300}),
    "loss of none": ("metrics", {"loss": None}),
    "odd loss": ("metrics", {"loss": Odd()}),
    "kind": ("kind", {"kind": "weights"}),
    "array as kind": ("kind", {"kind": np.zeros(3)}),
    "array as layout": ("layout", {"layout": np.zeros(3)}),
    "round": ("round", {"round": 1}),
    "round of 5,000 digits": ("round", {"round": 10**5000}),
    "text as round": ("round", {"round": "0"}),
}


@pytest.mark.parametrize("strategy", ["fedavg", "fedadam"])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_contribution_is_rejected_by_its_reason_and_leaves_no_trace(
    name: str, strategy: str
) -> None:
    reason, bad = BAD[name]
    settings = replace(FOUR, strategy=strategy, rounds=2)
    run_result = run_with(
        lambda c: replace(c, **({"round": c.round + 1} if name == "round" else bad)), settings
    )
    assert [r.rejected for r in run_result.history] == [{"3": reason}] * 2
    assert all(len(text) < 1100 for r in run_result.history for text in r.absent.values())
    assert same(run_result.state, without(settings))
    assert all(bool(torch.isfinite(t).all()) for t in run_result.memory.tensors.values())
    honest = run_with(lambda c: c, settings)
    assert [r.rejected for r in honest.history] == [{}] * 2
    assert not same(honest.state, run_result.state)


def test_replies_of_another_type_and_of_unknown_clients_are_rejected() -> None:
    for answer in (
        None,
        7,
        "text",
        {"client": 3},
        replace(change(3), client=[3]),
        replace(change(3), client=-1),
        replace(change(3), client=10**5000),
    ):
        run_result = run_with(lambda c, answer=answer: answer)
        assert set(run_result.history[0].rejected.values()) in ({"type"}, {"client"})
        assert same(run_result.state, without())


def test_the_maximum_of_examples_is_a_setting_or_the_largest_part(tmp_path: Path) -> None:
    claim = lambda c: replace(c, examples=2000, steps=1)  # noqa: E731
    assert run_with(claim).history[0].rejected == {}
    assert run_with(claim, replace(FOUR, max_examples=1999)).history[0].rejected == {
        "3": "examples"
    }
    assert run_with(claim, limits=Limits(max_examples=1999)).history[0].rejected == {
        "3": "examples"
    }
    assert (
        run_with(claim, replace(FOUR, max_examples=2000), limits=Limits(max_examples=1999))
        .history[0]
        .rejected
        == {}
    )
    model = fed.vit()
    assert server_limits(model, fed.bars(50), FOUR).max_examples == 13
    parts = fed.partition_examples(
        fed.bars(50), unlike := replace(FOUR, partition="dirichlet", alpha=0.1)
    )
    assert (
        server_limits(model, fed.bars(50), unlike).max_examples == max(len(p) for p in parts) > 13
    )


def test_a_part_that_the_run_freezes_cannot_be_sent() -> None:
    """Otherwise one client alone would decide on tensors that no other client sends."""
    settings = Settings(clients=3, rounds=1, lr=0.05, defences=("freeze=embedding",))
    model, examples = fed.vit(), fed.bars()
    limits, state = server_limits(model, examples, settings), state_of(model)
    name = "vit.embeddings.patch_embeddings.projection.bias"

    class One(InProcess):
        def ask(
            self, number: int, clients: Sequence[int], state: State
        ) -> Iterable[Contribution | Absence]:
            for c in super().ask(number, clients, state):
                assert isinstance(c, Contribution)
                yield (
                    replace(c, tensors={**c.tensors, name: torch.full_like(state[name], 0.01)})
                    if c.client == 2
                    else c
                )

    found = run_rounds(
        One(model, fed.partition_examples(examples, settings), settings),
        state,
        settings,
        limits=limits,
    )
    assert found.history[0].rejected == {"2": "names"}
    assert torch.equal(found.state[name], state[name])
    unlimited = run_rounds(
        One(model, fed.partition_examples(examples, settings), settings), state, settings
    )
    assert not torch.equal(unlimited.state[name], state[name])


def test_norms_are_limited_by_the_median_from_three_contributions_on() -> None:
    def grown(c: Contribution) -> Contribution:
        return replace(c, tensors={n: 20 * t for n, t in c.tensors.items()})

    assert run_with(grown).history[0].rejected == {"3": "norm"}
    assert run_with(grown, replace(FOUR, norm_factor=30.0)).history[0].rejected == {}
    assert run_with(grown, replace(FOUR, norm_factor=0.0)).history[0].rejected == {}
    two = Settings(clients=2, rounds=1)
    assert run_with(grown, two).history[0].rejected == {}  # of two, either may be the outlier
    assert run_with(grown, replace(two, max_norm=10.0)).history[0].rejected == {"1": "norm"}
    tiny = run_with(lambda c: replace(c, tensors={n: 1e-30 * t for n, t in c.tensors.items()}), two)
    assert tiny.history[0].contributed == (0, 1)  # nor can a small one have the other rejected


def test_a_client_that_takes_more_steps_may_change_more() -> None:
    settings = replace(FOUR, batch=10, max_examples=100)

    def grown(c: Contribution, steps: int) -> Contribution:
        return replace(
            c, examples=100, steps=steps, tensors={n: 10 * t for n, t in c.tensors.items()}
        )

    assert run_with(lambda c: grown(c, 10), settings).history[0].rejected == {}
    assert run_with(lambda c: grown(c, 1), settings).history[0].rejected == {"3": "norm"}
    assert run_with(lambda c: replace(grown(c, 10), examples=10), settings).history[0].rejected == {
        "3": "metrics"
    }


def test_zero_updates_of_most_clients_reject_no_client() -> None:
    class Still(Scripted):
        def ask(
            self, number: int, clients: Sequence[int], state: State
        ) -> Iterable[Contribution | Absence]:
            for c in super().ask(number, clients, state):
                assert isinstance(c, Contribution)
                yield (
                    c
                    if c.client == 3
                    else replace(c, tensors={n: 0 * t for n, t in c.tensors.items()})
                )

    assert run_rounds(Still(FOUR, lambda c: c), START, FOUR).history[0].rejected == {}


def test_a_run_without_enough_valid_contributions_ends_with_one_error_and_its_last_state(
    tmp_path: Path,
) -> None:
    settings, folder = replace(FOUR, min_clients=4, rounds=2), tmp_path / "run"
    state_store.begin(folder, settings, DIGEST, {})
    first = run_with(lambda c: c, replace(settings, rounds=1), folder=folder)
    with pytest.raises(
        FederatedError,
        match=rf"round 2 had too few contributions {MAX_VOID_ROUNDS} times \(4 are needed\): "
        r"client 3: "
        r"examples must be",
    ):
        run_with(lambda c: replace(c, examples=10**12), settings, folder=folder)
    run_state = state_store.load(folder)
    assert run_state is not None
    assert same(run_state.state, first.state)
    assert [r.rejected for r in run_state.history] == [{}, *[{"3": "examples"}] * MAX_VOID_ROUNDS]


def test_a_result_that_is_not_finite_does_not_count(tmp_path: Path) -> None:
    huge = {n: torch.full_like(t, 1e19) for n, t in START.items()}
    with pytest.raises(
        NonFiniteError, match='the aggregated state must be finite, got NaN or Inf in "w"'
    ):
        aggregate(
            START, [replace(change(0), tensors=huge)], Memory(), replace(FOUR, server_lr=1e20)
        )
    bad = {n: torch.full_like(t, 3e38) for n, t in START.items()}
    with pytest.raises(NonFiniteError, match="optimizer state"):
        aggregate(
            START, [replace(change(0), tensors=bad)], Memory(), replace(FOUR, strategy="fedadam")
        )
    settings = replace(FOUR, server_lr=1e38, norm_factor=0.0)
    with pytest.raises(
        FederatedError,
        match=f"round 1 failed {MAX_VOID_ROUNDS} times: the aggregated state must be finite",
    ):
        run_with(lambda c: replace(c, tensors={n: 1e6 * t for n, t in c.tensors.items()}), settings)


def test_texts_from_outside_are_one_printable_line_of_bounded_length() -> None:
    assert printable("two\nlines \x1b[31m \ud800") == "two lines \\x1b[31m \\ud800"
    assert len(printable("x" * 10**6)) < 1100


# Aggregation


def slow(sent: Sequence[Contribution], rule: str, settings: Settings) -> dict[str, list[float]]:
    """Each rule, coordinate by coordinate, in Python's floats."""
    out: dict[str, list[float]] = {}
    norms = [sum(float(x) ** 2 for t in c.tensors.values() for x in t) ** 0.5 for c in sent]
    for name in START:
        have = [(c, n) for c, n in zip(sent, norms, strict=True) if name in c.tensors]
        out[name] = []
        for i in range(len(START[name])):
            values = sorted(float(c.tensors[name][i]) for c, _ in have)
            if rule == "median":
                out[name].append((values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2)
            elif rule == "trimmed-mean":
                k = 1 if len(values) in (3, 4) else int(settings.trim * len(values))
                out[name].append(sum(values[k : len(values) - k]) / (len(values) - 2 * k))
            else:
                most = settings.clipping_norm or sorted(norms)[len(norms) // 2]
                parts = [
                    c.examples * min(1.0, most / n) * float(c.tensors[name][i]) for c, n in have
                ]
                out[name].append(sum(parts) / sum(c.examples for c, _ in have))
    return out


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 11])
@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "clipped-mean"])
def test_robust_rules_agree_with_slow_ones(rule: str, count: int) -> None:
    if rule == "clipped-mean" and count % 2 == 0:
        norm = 3.0
    else:
        norm = 0.0
    settings = replace(FOUR, aggregation=rule, clipping_norm=norm, trim=0.3)
    sent = [change(c, scale=0.5 + c, examples=1 + c) for c in range(count)]
    if count > 4:
        sent[2] = replace(sent[2], tensors={"w": sent[2].tensors["w"]})  # it withholds the other
    combined = COMBINE[rule](sent[::-1], settings)
    want = slow(sent, rule, settings)
    assert all(
        np.allclose(combined[n].numpy(), want[n], rtol=1e-6) and combined[n].dtype == torch.float32
        for n in START
    )
    assert same(combined, COMBINE[rule](sent, settings))
    if count > 2:
        mean = COMBINE["mean"](sent, settings)
        assert not torch.allclose(mean["w"], combined["w"], rtol=1e-4)


def test_a_trimmed_mean_drops_at_least_one_of_three() -> None:
    assert [trim_count(0.2, n) for n in (1, 2, 3, 4, 5, 9, 10)] == [0, 0, 1, 1, 1, 1, 2]


@pytest.mark.parametrize("strategy", ["fedavg", "fedprox", "fedadam"])
@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "clipped-mean"])
def test_robust_rules_hold_against_one_client_without_any_check(rule: str, strategy: str) -> None:
    settings = replace(
        FOUR,
        clients=5,
        aggregation=rule,
        strategy=strategy,
        proximal=0.1,
        norm_factor=0.0,
        weigh="clients",
        rounds=3,
    )
    honest = run_rounds(
        Scripted(replace(settings, clients=4), lambda c: c), START, replace(settings, clients=4)
    )

    def flipped(c: Contribution) -> Contribution:
        return replace(c, tensors={n: -1e6 * t for n, t in c.tensors.items()})

    run_result = run_with(flipped, settings)
    plain = run_with(flipped, replace(settings, aggregation="mean"))

    def away(state: State) -> float:
        return norm_of({n: state[n] - t for n, t in honest.state.items()}) / norm_of(honest.state)

    assert away(run_result.state) < 0.5
    assert away(plain.state) > 1.5


def test_the_default_is_the_weighted_mean_bit_for_bit() -> None:
    """As it was before there were rules: float64 sums by client, then one rounding."""
    settings = Settings(clients=4, rounds=3, batch=8, lr=0.1, partition="dirichlet", alpha=0.3)
    state: dict[str, torch.Tensor] = state_of(fed.vit())
    engine = InProcess(fed.vit(), fed.partition_examples(fed.bars(), settings), settings)
    for number in range(3):
        sent = [c for c in engine.ask(number, range(4), state) if isinstance(c, Contribution)]
        weights = [c.examples for c in sent]
        for name in state:
            total = torch.zeros_like(state[name], dtype=torch.float64)
            for weight, c in zip(weights, sent, strict=True):
                total.add_(c.tensors[name].double(), alpha=weight)
            state[name] = state[name] + (total / sum(weights)).float()
    run_result = fed.run_rounds(settings)
    assert same(run_result.state, state)
    assert not any(r.rejected for r in run_result.history)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"aggregation": "best"}, "aggregation must be one of mean, median"),
        ({"trim": 0.5}, r"trim must be in \(0, 0.5\), got 0.5"),
        ({"clipping_norm": -1.0}, "clipping_norm must be >= 0 and finite, got -1"),
        ({"max_examples": -1}, "max_examples must be >= 0, got -1"),
        ({"max_norm": float("inf")}, "max_norm must be >= 0 and finite, got inf"),
        ({"norm_factor": 0.5}, "norm_factor must be 0 or > 1 and finite, got 0.5"),
        (
            {"secure": True, "aggregation": "median"},
            (
                'aggregation must be "mean" with secure sums, got "median": the server sees only '
                "their sum"
            ),
        ),
        (
            {"secure": True, "max_norm": 1.0},
            "max_norm must be 0 with secure sums, got 1: the server sees only their sum",
        ),
        (
            {"independent": True, "aggregation": "median"},
            'aggregation must be "mean" with independent',
        ),
    ],
)
def test_settings_that_contradict_themselves_are_one_error(
    options: dict[str, Any], why: str
) -> None:
    with pytest.raises(FederatedError, match=why):
        Settings(**{"clients": 4, "rounds": 1, **options})


def test_a_run_from_before_goes_on_and_limits_may_change() -> None:
    old = {
        k: v
        for k, v in FOUR.to_dict().items()
        if k
        not in ("aggregation", "trim", "clipping_norm", "max_examples", "max_norm", "norm_factor")
    }
    assert (
        read_settings(old).digest
        == FOUR.digest
        == replace(FOUR, max_examples=9, max_norm=1.0, norm_factor=0.0).digest
    )
    assert FOUR.digest != replace(FOUR, aggregation="median").digest


# The folder


def test_results_count_rejections_by_client_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed.vit(num_labels=10).save_pretrained(tmp_path / "start")  # type: ignore[operator]
    ask = InProcess.ask

    def hostile(
        self: InProcess, number: int, clients: Sequence[int], state: State
    ) -> Iterable[Contribution | Absence]:
        for c in ask(self, number, clients, state):
            assert isinstance(c, Contribution)
            yield replace(c, examples=10**12) if c.client == 1 else c

    monkeypatch.setattr(InProcess, "ask", hostile)
    common = [
        "--data",
        "digits",
        "--test",
        "digits",
        "--mean",
        "0.3",
        "--std",
        "0.38",
        "--steps",
        "1",
        "--clients",
        "3",
        "--rounds",
        "2",
    ]
    command = ["federate", str(tmp_path / "start"), *common]
    assert main([*command, "--aggregation", "trimmed-mean", "-o", str(tmp_path / "run")]) == 0
    captured = capsys.readouterr()
    assert (
        "round 2/2: 2 contributed, 1 rejected, client 1: examples must be between 1 and 480, "
        "got 1000000000000" in captured.err
    )
    assert "rejected contributions: client 1: examples 2" in captured.out
    results = load_results(tmp_path / "run" / "results.json")
    assert results.facts["rejected"] == {"1": {"examples": 2}}
    assert results.tables[1].rows == (("1", "examples", 2),)
    assert main([*command, "--min-clients", "3", "-o", str(tmp_path / "other")]) == 1
    assert (
        "round 1 had too few contributions 3 times (3 are needed): client 1: examples must be"
        in capsys.readouterr().err
    )
    assert (
        main(
            [
                *command,
                "--min-clients",
                "3",
                "--max-examples",
                str(10**12),
                "-o",
                str(tmp_path / "other"),
            ]
        )
        == 0
    )  # the same run goes on


def save_run(folder: Path) -> None:
    settings = replace(FOUR, strategy="fedadam", rounds=2)
    state_store.begin(folder, settings, DIGEST, {})
    run_with(lambda c: c, settings, folder=folder)


def test_a_damaged_state_is_one_typed_error(tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    path = tmp_path / "run" / state_store.STATE_FILE
    good = state_store.load(tmp_path / "run")
    assert good is not None
    tensors = {f"state/{n}": t for n, t in good.state.items()} | {
        f"memory/{n}": t for n, t in good.memory.tensors.items()
    }
    rounds = [{"number": i, "contributed": [0], "absent": {}} for i in range(2)]
    about = {
        "regauge": "federated state",
        "version": "1",
        "rounds": "2",
        "history": json.dumps(rounds),
    }
    write_tensors(path, tensors, about)
    assert state_store.load(tmp_path / "run") is not None

    def written(
        history: Any = rounds, extra: dict[str, torch.Tensor] | None = None, **more: str
    ) -> None:
        write_tensors(
            path, {**tensors, **(extra or {})}, {**about, "history": json.dumps(history), **more}
        )

    damages: list[dict[str, Any]] = [
        {"history": 3},
        {"history": [3]},
        {"history": [{**rounds[0], "number": "0"}]},
        {"history": [{**rounds[0], "absent": [1]}]},
        {"history": [{**rounds[0], "seconds": "long"}]},
        {"history": [{**rounds[0], "contributed": 3}]},
        {"history": [rounds[0], rounds[0]]},
        {"history": [{**rounds[0], "colour": 1}]},
        {"rounds": "9"},
        {"rounds": "two"},
        {"extra": {"other/w": torch.zeros(4)}},
        {"extra": {"memory/m/w": torch.zeros(5)}},
        {"extra": {"memory/m/u": torch.zeros(5)}},
        {"extra": {"state/w": torch.full((4,), float("nan"))}},
    ]
    for damage in damages:
        written(**damage)
        with pytest.raises(CheckpointError):
            state_store.load(tmp_path / "run")
    write_tensors(path, tensors, {**about, "history": "[" * 100_000})
    with pytest.raises(CheckpointError):
        state_store.load(tmp_path / "run")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"regauge": "federated run", "version": 1}',
        '{"regauge": "federated run", "version": 1, "settings": 3, "layout": ""}',
    ],
)
def test_a_damaged_description_is_one_typed_error(text: str, tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    (tmp_path / "run" / state_store.RUN_FILE).write_text(text)
    with pytest.raises(FederatedError):
        state_store.begin(tmp_path / "run", FOUR, DIGEST, {})


@pytest.mark.parametrize(
    "bad",
    [
        {"clients": 2.5},
        {"clients": True},
        {"defences": 3},
        {"defences": [1]},
        {"strategy": 1},
        {"secure": 1},
        {"seed": None},
    ],
)
def test_settings_of_another_type_are_one_typed_error(bad: dict[str, Any]) -> None:
    assert read_settings(FOUR.to_dict()) == FOUR
    with pytest.raises(FederatedError):
        read_settings({**FOUR.to_dict(), **bad})


@pytest.mark.parametrize("exchange", [True, False])
def test_the_old_model_is_in_place_until_the_new_one_is(
    exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every removal and rename on the way may be the last thing that happens: some whole model is
    there.
    """
    out = tmp_path / "model"
    save_model(fed.vit(), out, tmp_path)
    if not exchange:
        monkeypatch.setattr(files, "_exchange", lambda a, b: False)
    steps: list[str] = []

    def whole() -> bool:
        return transformers.ViTForImageClassification.from_pretrained(out).config.num_labels in (
            4,
            7,
        )

    def removed(path: Path, **more: Any) -> None:
        steps.append("remove")
        real(path, **more)
        assert whole()

    real = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", removed)
    save_model(fed.vit(num_labels=7), out, tmp_path)
    assert "remove" in steps
    assert transformers.ViTForImageClassification.from_pretrained(out).config.num_labels == 7
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.startswith(".model.partial") and not (self / "old").exists() and target == out:
            raise OSError("the disk is gone")
        return rename(self, target)

    (out / "old").touch()
    monkeypatch.setattr(Path, "rename", failing)
    if exchange:
        save_model(fed.vit(), out, tmp_path)  # no rename is needed
    else:
        with pytest.raises(CheckpointError, match="the disk is gone"):
            save_model(fed.vit(), out, tmp_path)
    assert whole()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]

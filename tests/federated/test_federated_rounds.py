"""The engine-free core of federated learning: partitions, a client's part of a round, aggregation,
rounds and their folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import support.federations as fed
from regauge.data.evaluate import evaluate_model
from regauge.errors import CheckpointError
from regauge.federated import (
    Contribution,
    FederatedError,
    InProcess,
    Settings,
    aggregate,
    contribute,
    load_state,
    partition_examples,
    partitions,
    prepare_model,
    run_rounds,
    state_of,
    state_store,
)
from regauge.federated.aggregation import BETAS, TAU, Memory, weighted_mean
from regauge.federated.client import sample_rows
from regauge.federated.rounds import MAX_VOID_ROUNDS, Engine, completed_rounds, select_clients
from regauge.federated.runs import run_federated
from regauge.federated.settings import read_settings
from regauge.federated.states import Absence, State, digest_of, layout_of
from regauge.jigsaw import MaskedJigsaw

FOUR = Settings(clients=4, rounds=3, batch=8, optimizer="sgd", lr=0.1)


def same(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def make_contribution(
    client: int, change: float = 1.0, examples: int = 10, number: int = 0, **more: object
) -> Contribution:
    like = {"w": torch.zeros(3)}
    layout = digest_of(layout_of(like))
    made = Contribution(
        client, number, layout, {"w": torch.full((3,), change)}, examples, 1, 8, 0.1, 0.5
    )
    return replace(made, **more)  # type: ignore[arg-type]


# Partitions


def test_even_parts_hold_every_example_once() -> None:
    parts = partitions.iid(22, 4, seed=3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(22))
    assert {len(p) for p in parts} == {5, 6}
    assert any(
        (a != b).any()
        for a, b in zip(parts, partitions.iid(22, 4, seed=4), strict=True)
        if len(a) == len(b)
    )


def test_dirichlet_parts_hold_every_example_once_and_differ_more_the_smaller_alpha_is() -> None:
    labels = np.random.default_rng(0).integers(0, 5, 500)

    def unlike(alpha: float) -> float:
        parts = partitions.dirichlet(labels, 5, alpha, seed=1)
        assert sorted(np.concatenate(parts).tolist()) == list(range(500))
        shares = [np.bincount(labels[p], minlength=5) / len(p) for p in parts if len(p)]
        return float(np.std(shares, 0).mean())

    assert unlike(0.1) > 2 * unlike(100.0)


def test_more_clients_than_examples_are_refused() -> None:
    with pytest.raises(FederatedError, match="examples must be >= 60, one for each client, got 48"):
        partition_examples(fed.bars(), Settings(clients=60, rounds=1))


# A client


def test_a_contribution_is_the_change_of_plain_steps() -> None:
    settings = replace(FOUR, steps=2, clip=0.0)
    model, part = fed.vit(), fed.bars(20)
    state = state_of(model)
    made = contribute(model, state, part, settings, 1, 2)
    by_hand = fed.vit().train()
    optimizer = torch.optim.SGD(by_hand.parameters(), 0.1)
    for rows in sample_rows(20, settings, 1, 2):
        inputs, labels = part.batch(np.asarray(rows))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(by_hand(**inputs).logits, labels).backward()
        optimizer.step()
    after = state_of(by_hand)
    assert (made.steps, made.batch, made.examples, made.kind) == (2, 8, 20, "change")
    assert all(
        torch.allclose(made.tensors[n], after[n] - state[n], atol=1e-7) for n in made.tensors
    )
    assert not same(
        made.tensors, contribute(model, state, part, settings, 2, 2).tensors
    )  # another round draws other batches


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_the_learning_rate_is_that_of_the_optimizer_and_of_the_start(optimizer: str) -> None:
    """Ten times larger from scratch; explicit rates stay."""
    settings = Settings(clients=3, rounds=1, optimizer=optimizer)
    assert settings.training.lr == settings.learning_rate == (0.005 if optimizer == "sgd" else 1e-4)
    scratch = settings.with_learning_rate(from_scratch=True)
    assert scratch.lr == pytest.approx(10 * settings.learning_rate)
    assert replace(settings, independent=True).learning_rate == scratch.lr
    assert replace(settings, lr=0.3).with_learning_rate(from_scratch=True).lr == 0.3
    if optimizer == "sgd":
        heavy = replace(settings, momentum=0.9)
        assert heavy.learning_rate == pytest.approx(0.1 * settings.learning_rate)
    else:
        with pytest.raises(FederatedError, match="momentum must be 0 with adam"):
            replace(settings, momentum=0.9)


def test_rows_of_an_epoch_are_every_example_once() -> None:
    rows = sample_rows(20, FOUR, 0, 0)
    assert [len(r) for r in rows] == [8, 8, 4]
    assert sorted(i for r in rows for i in r) == list(range(20))
    assert len(sample_rows(20, replace(FOUR, epochs=10, step_jitter=0.9), 0, 0)) < 30


def test_fedprox_stays_nearer() -> None:
    settings = replace(FOUR, epochs=4)
    model, part = fed.vit(), fed.bars(20)
    state = state_of(model)

    def moved(s: Settings) -> float:
        return sum(
            float(t.square().sum())
            for t in contribute(model, state, part, s, 0, 0).tensors.values()
        )

    assert moved(replace(settings, strategy="fedprox", proximal=1.0)) < 0.9 * moved(settings)


def test_puzzles_are_sampled_per_client_and_round_and_reproducible() -> None:
    settings = replace(FOUR, jigsaw=0.5, probability=1.0)
    model = prepare_model(fed.vit(), settings)
    assert isinstance(model, MaskedJigsaw)
    state, part = state_of(model), fed.bars(16)
    first = contribute(model, state, part, settings, 0, 0)
    assert same(first.tensors, contribute(model, state, part, settings, 0, 0).tensors)
    assert float(first.tensors["unknown"].abs().sum()) > 0
    plain = contribute(prepare_model(fed.vit(), FOUR), state_of(fed.vit()), part, FOUR, 0, 0)
    name = "vit.layernorm.bias"
    assert not torch.allclose(first.tensors[f"model.{name}"], plain.tensors[name])


def test_another_model_version_and_an_empty_partition_are_rejected() -> None:
    with pytest.raises(
        FederatedError,
        match=r"two versions of a model differ:\n.*classifier.bias.* is float32 \[4\] in the "
        r"model here and float32 \[5\]",
    ):
        contribute(fed.vit(), state_of(fed.vit(num_labels=5)), fed.bars(), FOUR, 0, 0)
    with pytest.raises(FederatedError, match="client 3 has no examples"):
        contribute(fed.vit(), state_of(fed.vit()), fed.bars().only([]), FOUR, 0, 3)


# Aggregation


def test_the_mean_weighs_examples_or_clients_in_any_order() -> None:
    some = [
        make_contribution(2, 4.0, 30),
        make_contribution(0, 1.0, 10),
        make_contribution(1, -3.0, 20),
    ]
    assert weighted_mean(some)["w"][0] == pytest.approx((10 - 60 + 120) / 60)
    assert weighted_mean(some, "clients")["w"][0] == pytest.approx(2 / 3)
    draw = [
        make_contribution(i, float(x), 1 + i)
        for i, x in enumerate(np.random.default_rng(0).normal(size=20) * 1e4)
    ]
    assert same(weighted_mean(draw), weighted_mean(draw[::-1]))


def test_a_tensor_that_some_withhold_is_averaged_over_the_others_and_stays_where_all_do() -> None:
    state = {"w": torch.zeros(3), "v": torch.ones(3)}
    both = replace(make_contribution(0), tensors={"w": torch.ones(3), "v": torch.ones(3)})
    after, _ = aggregate(state, [both, make_contribution(1, 3.0)], Memory(), FOUR)
    assert after["w"].tolist() == [2.0] * 3
    assert after["v"].tolist() == [2.0] * 3
    after, _ = aggregate(state, [make_contribution(0), make_contribution(1)], Memory(), FOUR)
    assert after["v"].tolist() == [1.0] * 3


def test_fedadam_follows_its_formula() -> None:
    settings = replace(FOUR, strategy="fedadam", server_lr=0.1)
    state, memory, m, v, x = {"w": torch.zeros(3)}, Memory(), 0.0, 0.0, 0.0
    for t, change in enumerate((1.0, -0.5, 2.0), 1):
        state, memory = aggregate(state, [make_contribution(0, change)], memory, settings)
        m, v = BETAS[0] * m + (1 - BETAS[0]) * change, BETAS[1] * v + (1 - BETAS[1]) * change**2
        x += (
            0.1
            * np.sqrt(1 - BETAS[1] ** (t + 1))
            / (1 - BETAS[0] ** (t + 1))
            * m
            / (np.sqrt(v) + TAU)
        )
    assert state["w"][0] == pytest.approx(x, rel=1e-5)


def test_nothing_and_twice_are_refused() -> None:
    with pytest.raises(FederatedError, match="contributions must be >= 1, got 0"):
        aggregate({"w": torch.zeros(3)}, [], Memory(), FOUR)
    with pytest.raises(FederatedError, match="got two of one client"):
        aggregate(
            {"w": torch.zeros(3)}, [make_contribution(0), make_contribution(0)], Memory(), FOUR
        )


# Rounds


class Scripted:
    """An engine with scripted replies, round by round."""

    def __init__(self, *answers: Sequence[Contribution | Absence]) -> None:
        self.answers = list(answers)

    def ask(
        self, number: int, clients: Sequence[int], state: State
    ) -> Iterable[Contribution | Absence]:
        return self.answers.pop(0)


def run_scripted(
    engine: Engine, settings: Settings, folder: Path | None = None
) -> state_store.RunState:
    return run_rounds(engine, {"w": torch.zeros(3)}, settings, folder=folder)


def test_training_together_learns() -> None:
    settings = Settings(clients=4, rounds=8, batch=8, optimizer="adamw", lr=1e-2)
    model, test = fed.vit(), fed.bars(100, seed=2)
    before = evaluate_model(model, test, 100)["accuracy"]
    load_state(model, fed.run_rounds(settings).state)
    assert evaluate_model(model, test, 100)["accuracy"] > before + 0.3


def test_a_bert_learns_from_texts_with_and_without_puzzles(tmp_path: Path) -> None:
    source = fed.reader(tmp_path)
    settings = Settings(clients=3, rounds=8, batch=8, optimizer="adamw", lr=1e-2)
    plain = run_federated(source, settings, tmp_path / "plain")
    accuracies = [r.measures["accuracy"] for r in plain.run_state.history]
    assert max(accuracies) > 0.85 > accuracies[0] + 0.1
    puzzled = run_federated(source, replace(settings, rounds=1, jigsaw=0.3), tmp_path / "puzzled")
    assert not torch.equal(
        puzzled.run_state.state["model.classifier.weight"],
        plain.run_state.state["classifier.weight"],
    )
    assert (
        transformers.BertForSequenceClassification.from_pretrained(
            tmp_path / "puzzled" / "model"
        ).config.num_labels
        == 2
    )


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"loss": float("nan")}, "metrics: loss must be a finite float32 number, got nan"),
        (
            {"layout": "other"},
            (
                "layout: the layout must be that of the server's state: it trained another version "
                "of the model"
            ),
        ),
        (
            {"tensors": {"w": torch.tensor([1.0, float("nan"), 1.0])}},
            'values: "w" must be finite, got NaN or Inf',
        ),
        ({"tensors": {"w": torch.ones(4)}}, 'shape: "w" must have the shape [3], got [4]'),
        ({"tensors": {"u": torch.ones(3)}}, "names: tensors must be the model's, got 'u'"),
        ({"tensors": {}}, "names: tensors must not be empty"),
        ({"round": 7}, "round: the round must be 1, got 8"),
        ({"examples": 0}, "examples: examples must be between 1 and 10000000, got 0"),
        ({"client": 9}, "client: a contribution must come from a client that was selected"),
    ],
)
def test_incompatible_contributions_are_rejected_and_the_round_continues(
    bad: dict[str, object], why: str
) -> None:
    run_state = run_scripted(
        Scripted(
            [
                make_contribution(0),
                make_contribution(1, 3.0),
                replace(make_contribution(2, 100.0), **bad),
            ]
        ),
        Settings(clients=3, rounds=1),
    )  # type: ignore[arg-type]
    (entry,) = run_state.history
    assert entry.contributed == (0, 1)
    assert any(
        why in f"{entry.rejected.get(client)}: {text}" for client, text in entry.absent.items()
    )
    assert run_state.state["w"].tolist() == [2.0] * 3


def test_a_second_reply_does_not_count_and_a_missing_one_is_reported() -> None:
    run_state = run_scripted(
        Scripted([make_contribution(0), make_contribution(0, 100.0)]), Settings(clients=2, rounds=1)
    )
    assert run_state.state["w"].tolist() == [1.0] * 3
    assert run_state.history[0].absent == {
        "0": "contributions must be one a client and round, got a second: the first counts",
        "1": "it did not answer",
    }
    assert run_state.history[0].rejected == {"0": "duplicate"}


def test_a_round_with_too_few_clients_is_void_and_repeated(tmp_path: Path) -> None:
    settings = Settings(clients=2, rounds=1, min_clients=2)
    folder = tmp_path / "run"
    state_store.begin(folder, settings, "l", {})
    run_state = run_scripted(
        Scripted([make_contribution(0)], [make_contribution(0), make_contribution(1)]),
        settings,
        folder,
    )
    assert [(r.number, r.void) for r in run_state.history] == [(0, True), (0, False)]
    assert len(completed_rounds(run_state.history)) == 1


def test_a_run_without_clients_stops_by_name_and_goes_on_later(tmp_path: Path) -> None:
    settings = Settings(clients=2, rounds=2)
    folder = tmp_path / "run"
    state_store.begin(folder, settings, "l", {})
    with pytest.raises(
        FederatedError,
        match=f"round 2 had too few contributions {MAX_VOID_ROUNDS} times.*client 0: gone",
    ):
        run_scripted(
            Scripted([make_contribution(0)], *[[Absence(0, "gone")]] * MAX_VOID_ROUNDS),
            settings,
            folder,
        )
    run_state = run_scripted(Scripted([make_contribution(1, 2.0, number=1)]), settings, folder)
    assert run_state.state["w"].tolist() == [3.0] * 3
    assert [r.number for r in completed_rounds(run_state.history)] == [0, 1]


def test_clients_are_sampled_for_each_round() -> None:
    settings = Settings(clients=10, rounds=1, participation=0.4)
    selections = [select_clients(settings, n) for n in range(5)]
    assert all(len(set(d)) == 4 for d in selections)
    assert len(set(selections)) > 1


def test_a_run_that_was_interrupted_ends_as_one_that_was_not(tmp_path: Path) -> None:
    settings = replace(
        FOUR, strategy="fedadam", partition="dirichlet", step_jitter=0.5, drop=0.2, rounds=4
    )
    whole = fed.run_rounds(settings)
    folder = tmp_path / "run"
    state_store.begin(folder, settings, "l", {})
    halts = iter([False, False, True])
    fed.run_rounds(settings, folder=folder, stop=lambda: next(halts))
    run_state = state_store.load(folder)
    assert run_state is not None
    assert len(run_state.history) == 2
    again = fed.run_rounds(settings, folder=folder)
    assert same(again.state, whole.state)
    assert [r.number for r in again.history] == [0, 1, 2, 3]


def test_dropouts_are_reported_and_reproducible() -> None:
    settings = replace(FOUR, drop=0.4)
    one, two = fed.run_rounds(settings), fed.run_rounds(settings)
    assert same(one.state, two.state)
    assert any("it dropped out" in r.absent.values() for r in one.history)
    assert not same(one.state, fed.run_rounds(FOUR).state)


def test_an_empty_part_takes_no_part() -> None:
    settings = Settings(clients=2, rounds=1)
    model = fed.vit()
    run_state = run_rounds(
        InProcess(model, [fed.bars(8), fed.bars(8).only([])], settings), state_of(model), settings
    )
    assert run_state.history[0].contributed == (0,)
    assert "its part is empty" in run_state.history[0].absent["1"]


# The folder


def test_a_folder_of_other_settings_or_of_something_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    state_store.begin(folder, FOUR, "l", {})
    state_store.begin(folder, replace(FOUR, rounds=9), "l", {})  # longer is allowed
    with pytest.raises(
        FederatedError, match=r"other settings .*\(lr 0.1, now 0.2; seed 0, now 1\)"
    ):
        state_store.begin(folder, replace(FOUR, lr=0.2, seed=1), "l", {})
    with pytest.raises(FederatedError, match="other settings or another model"):
        state_store.begin(folder, FOUR, "m", {})
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").write_text("")
    with pytest.raises(FederatedError, match="got other files"):
        state_store.begin(other, FOUR, "l", {})


def test_a_folder_is_locked_by_one_process_and_reading_needs_no_lock(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with state_store.hold_folder(folder):
        state_store.begin(folder, FOUR, "l", {})
        under_way = folder / f".{state_store.STATE_FILE}.partial-00"
        under_way.write_bytes(b"")
        assert state_store.load(folder) is None
        assert under_way.exists()  # reading a running run leaves its files alone
        with (
            pytest.raises(CheckpointError, match="another process is at work"),
            state_store.hold_folder(folder),
        ):
            pass
    with state_store.hold_folder(folder):
        state_store.begin(folder, FOUR, "l", {})
        assert not under_way.exists()


def test_damaged_folders_are_rejected(tmp_path: Path) -> None:
    state_store.begin(tmp_path / "run", FOUR, "l", {})
    (tmp_path / "run" / state_store.STATE_FILE).write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"global.safetensors cannot be read"):
        state_store.load(tmp_path / "run")
    (tmp_path / "run" / state_store.RUN_FILE).write_text(
        '{"regauge": "federated run", "version": 99}'
    )
    with pytest.raises(FederatedError, match="version 99"):
        state_store.load_about(tmp_path / "run")
    with pytest.raises(FederatedError, match="is not a run"):
        state_store.load_about(tmp_path / "nowhere")


def test_settings_round_trip_and_all_faults_are_reported_at_once() -> None:
    settings = replace(FOUR, jigsaw=0.3, defences=("clip=1",))
    assert read_settings(settings.to_dict()) == settings
    with pytest.raises(FederatedError, match='"colour"'):
        read_settings({**settings.to_dict(), "colour": 1})
    with pytest.raises(
        FederatedError, match=r"(?s)clients must be >= 1, got 0.*strategy must be.*lr must be"
    ):
        Settings(clients=0, rounds=1, strategy="best", lr=-1)

"""What leaves a client, what a server sees of it and can make of it, and clients that begin
apart.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import support.federations as fed
from regauge import apply, element
from regauge.audit import recorded
from regauge.audit.gradient_audit.attempts import Budget
from regauge.audit.recorded_audit.engine import open_run, rehearse_recorded, to_update
from regauge.cli import main
from regauge.core.fold import fold_norms
from regauge.errors import DefenceError, MissingExtraError, UpdateError
from regauge.federated import (
    Contribution,
    FederatedError,
    Settings,
    contribute,
    fusion,
    partition_examples,
    prepare_model,
    state_of,
    state_store,
)
from regauge.federated.defences import apply_defences, client_epsilon, frozen_names, read_defences
from regauge.federated.fusion import average_weights, split_test
from regauge.federated.recorder import (
    RecordedUpdate,
    load_rows,
    load_update,
    make_recorder,
    recorded_rounds,
)
from regauge.federated.runs import Source, run_federated
from regauge.federated.states import digest_of, layout_of, load_state
from regauge.models.resolve import spec_of
from regauge.results.findings import load_results

SETTINGS = Settings(clients=3, rounds=2, batch=4, steps=1, lr=0.1, optimizer="sgd", clip=0.0)
KEY = bytes(32)


def make_case(change: float = 1.0) -> Contribution:
    model = fed.vit()
    state = state_of(model)
    draw = torch.Generator().manual_seed(0)
    tensors = {n: change * torch.randn(t.shape, generator=draw) for n, t in state.items()}
    return Contribution(1, 0, digest_of(layout_of(state)), tensors, 10, 1, 4, 0.1, 0.5)


def norm(c: Contribution) -> float:
    return sum(float(t.double().square().sum()) for t in c.tensors.values()) ** 0.5


def test_clipping_bounds_the_whole_change_and_leaves_a_small_one() -> None:
    big, small = make_case(), make_case(1e-4)
    assert norm(big) > 5
    assert norm(apply_defences(big, fed.vit(), read_defences(["clip=1"]), KEY)) == pytest.approx(
        1.0, rel=1e-4
    )
    same = apply_defences(small, fed.vit(), read_defences(["clip=1"]), KEY)
    assert all(torch.equal(same.tensors[n], small.tensors[n]) for n in small.tensors)


def test_private_noise_has_its_size_depends_on_the_secret_and_costs_an_epsilon() -> None:
    chosen = read_defences(["private=2,norm=0.5"])
    quiet = replace(
        make_case(), tensors={n: torch.zeros_like(t) for n, t in make_case().tensors.items()}
    )
    one, two = (
        apply_defences(quiet, fed.vit(), chosen, secret) for secret in (KEY, bytes([1]) * 32)
    )
    flat = torch.cat([t.flatten() for t in one.tensors.values()])
    assert float(flat.std()) == pytest.approx(1.0, rel=0.1)  # 2 times 0.5
    assert any(not torch.equal(one.tensors[n], two.tensors[n]) for n in one.tensors)
    few, many = client_epsilon(chosen, 1), client_epsilon(chosen, 20)
    assert few is not None
    assert many is not None
    assert 0 < few < many
    assert client_epsilon(read_defences(["clip=1"]), 5) is None


def test_what_is_withheld_is_not_sent_and_what_is_frozen_is_not_trained() -> None:
    chosen = read_defences(["withhold=embedding"])
    sent = apply_defences(make_case(), fed.vit(), chosen, KEY)
    gone = make_case().tensors.keys() - sent.tensors.keys()
    assert "vit.embeddings.position_embeddings" in gone
    assert "classifier.weight" in sent.tensors
    assert not frozen_names(fed.vit(), chosen)
    run_state = fed.run_rounds(replace(SETTINGS, defences=("freeze=embedding",)))
    plain, start = fed.run_rounds(SETTINGS), state_of(fed.vit())
    name = "vit.embeddings.position_embeddings"
    assert torch.equal(run_state.state[name], start[name])
    assert not torch.equal(plain.state[name], start[name])
    assert not torch.equal(run_state.state["classifier.weight"], start["classifier.weight"])


def test_compression_keeps_few_numbers_or_few_bits() -> None:
    pruned = apply_defences(make_case(), fed.vit(), read_defences(["prune=0.9"]), KEY).tensors[
        "classifier.weight"
    ]
    assert float((pruned != 0).float().mean()) == pytest.approx(0.1, abs=0.03)
    rounded = apply_defences(make_case(), fed.vit(), read_defences(["round=2"]), KEY).tensors[
        "classifier.weight"
    ]
    assert len(rounded.unique()) <= 4


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["hide"], 'unknown defence "hide"'),
        (["clip=1", "clip=2"], "twice"),
        (["clip=1", "private=1"], "both clip and private"),
        (["clip=-1"], "norm"),
    ],
)
def test_invalid_defences_are_rejected(texts: list[str], message: str) -> None:
    with pytest.raises(DefenceError, match=message):
        read_defences(texts)


# The recorder


def test_the_recorder_saves_what_was_sent_and_separately_what_was_not(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    state_store.begin(folder, SETTINGS, "l", {})
    start = state_of(fed.vit())
    fed.run_rounds(SETTINGS, folder=folder, recorder=make_recorder(folder, SETTINGS))
    assert recorded_rounds(folder) == {0: [0, 1, 2], 1: [0, 1, 2]}
    recorded = load_update(folder, 0, 1)
    assert (recorded.steps, recorded.lr, recorded.batch) == (1, 0.1, 4)
    assert all(torch.equal(recorded.state[n], start[n]) for n in start)
    (rows,) = load_rows(folder, 0, 1)
    part = partition_examples(fed.bars(), SETTINGS)[1]
    model = fed.vit().train()
    inputs, labels = part.batch(list(rows))
    torch.nn.functional.cross_entropy(model(**inputs).logits, labels).backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert torch.allclose(
        to_update(recorded).grads["classifier.weight"], grads["classifier.weight"], atol=1e-5
    )
    sent = (folder / "seen").rglob("*")
    assert not any(p.suffix == ".json" for p in sent)
    with pytest.raises(FederatedError, match="got no recorded rounds"):
        recorded_rounds(tmp_path)


def test_a_missing_accountant_is_an_error_before_a_run_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    fed.vit(num_labels=10).save_pretrained(tmp_path / "start")  # type: ignore[operator]
    source = Source(str(tmp_path / "start"), "digits", mean=[0.3], std=[0.38], test="digits")
    settings = Settings(clients=2, rounds=1, batch=4, steps=1)
    with pytest.raises(MissingExtraError, match='"privacy"'):
        run_federated(source, replace(settings, defences=("private=1",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run_federated(source, replace(settings, defences=("clip=1",)), tmp_path / "run")


def test_an_audit_attacks_what_was_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, run = tmp_path / "start", tmp_path / "run"
    fed.vit(num_labels=10).save_pretrained(start)  # type: ignore[operator]
    source = Source(str(start), "digits", mean=[0.3], std=[0.38], test="digits")
    run_federated(
        source,
        Settings(clients=2, rounds=2, batch=1, steps=1, lr=0.1, optimizer="sgd"),
        run,
        record=True,
    )
    out = tmp_path / "r.json"
    assert (
        main(
            [
                "audit",
                "gradients",
                "--from",
                str(run),
                "--attacks",
                "least squares,labels",
                "--json",
                str(out),
                "--report",
                str(tmp_path / "p.html"),
            ]
        )
        == 0
    )
    capsys.readouterr()
    results = load_results(out)
    rows = results.tables[0].rows
    assert results.headline.text.startswith("Images are revealed in rounds 1, 2: PSNR")
    assert [row[0] for row in rows] == [1, 2]
    assert rows[0][2] > rows[0][3] + 10  # one image, one step: far above the mean image
    assert rows[0][5] == 1.0  # its label is revealed
    page = (tmp_path / "p.html").read_text()
    assert "Accuracy over rounds" in page
    assert "Leakage over rounds" in page
    hidden = tmp_path / "hidden"
    run_federated(
        source,
        Settings(
            clients=2,
            rounds=1,
            batch=1,
            steps=1,
            lr=0.1,
            optimizer="sgd",
            defences=("freeze=embedding",),
        ),
        hidden,
        record=True,
    )
    assert (
        main(
            [
                "audit",
                "gradients",
                "--from",
                str(hidden),
                "--attacks",
                "least squares",
                "--json",
                str(out),
            ]
        )
        == 0
    )
    table = load_results(out).tables[0]
    assert table.rows[0][2] is None
    assert "sent. The update must contain" in table.note
    assert main(["audit", "gradients", "--from", str(start)]) == 1
    assert "is not a run" in capsys.readouterr().err
    for more, named in (
        (["--fail-above", "0.1"], "--fail-above requires undefended updates"),
        (
            ["--defence", "rows", "--batch-size", "2", "--steps", "2", "--device", "cpu"],
            "--defence, --batch-size, --steps, --device must not be given with --from",
        ),
        ([str(start)], "MODEL must not be given with --from: the run sets it"),
    ):
        assert main(["audit", "gradients", "--from", str(run), *more]) == 2
        assert named in " ".join(capsys.readouterr().err.split())
    assert main(["audit", "gradients", "--from", str(run), "--rounds", "7"]) == 1
    assert "recorded: rounds 1, 2" in capsys.readouterr().err  # counted as --rounds counts
    assert main(["audit", "gradients", str(start), "--data", "digits", "--rounds", "1"]) == 2
    assert "--rounds requires --from RUN" in " ".join(capsys.readouterr().err.split())
    assert (
        main(
            [
                "audit",
                "gradients",
                "--from",
                str(run),
                "--rounds",
                "1",
                "--attacks",
                "labels",
                "--gallery",
                "0",
                "--threads",
                "1",
            ]
        )
        == 0
    )
    assert json.loads((run / "run.json").read_text())["version"] == 1


def test_a_run_of_a_model_from_the_hub_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    there = tmp_path / "cache"
    fed.vit(num_labels=10).save_pretrained(there)  # type: ignore[operator]
    (there / "preprocessor_config.json").write_text(
        json.dumps({"do_normalize": True, "image_mean": [0.25], "image_std": [0.5]})
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(there))
    run_federated(
        Source("owner/name", "digits", test="digits"),
        Settings(clients=2, rounds=1, batch=1, steps=1),
        tmp_path / "run",
        record=True,
    )
    run = open_run(tmp_path / "run")
    assert (run.task["kind"], list(run.task["mean"]), list(run.task["std"])) == (
        "images",
        [0.25],
        [0.5],
    )


def test_a_run_on_images_with_several_answers_is_attacked_by_what_needs_no_labels(
    tmp_path: Path,
) -> None:
    fed.vit().save_pretrained(tmp_path / "start")  # type: ignore[operator]
    x = fed.bars(40).batch(np.arange(40))[0]["pixel_values"]
    pixels = ((x - x.min()) / (x.max() - x.min()) * 255).byte().permute(0, 2, 3, 1).numpy()
    np.savez(
        tmp_path / "data.npz", image=pixels, label=np.random.default_rng(0).integers(0, 2, (40, 4))
    )
    source = Source(str(tmp_path / "start"), str(tmp_path / "data.npz"), mean=[0.3], std=[0.38])
    run_federated(
        source,
        Settings(clients=2, rounds=1, batch=1, steps=1, lr=0.1, optimizer="sgd"),
        tmp_path / "run",
        record=True,
    )
    results = recorded(tmp_path / "run", attacks=["least squares", "labels"]).results
    assert results.tables[0].rows[0][2] is not None
    assert results.unchecked == ("labels and counts: images must have one label each, got several",)


def test_a_server_practises_and_gets_past_frozen_layers(tmp_path: Path) -> None:
    """Closed forms cannot try where the first layers are not sent; attacks that practise as the
    clients do can, and beat a guess.
    """
    start, run = tmp_path / "start", tmp_path / "run"
    fed.vit(num_labels=10, num_hidden_layers=2).save_pretrained(start)  # type: ignore[operator]
    source = Source(str(start), "digits", mean=[0.3], std=[0.38], test="digits")
    settings = Settings(
        clients=6,
        rounds=1,
        batch=1,
        steps=1,
        lr=0.1,
        optimizer="sgd",
        defences=("freeze=embedding,first",),
    )
    run_federated(source, settings, run, record=True)
    closed = recorded(run, attacks=["least squares", "span"]).results.tables[0]
    assert closed.rows[0][2] is None
    assert closed.rows[0][4] is None
    practised = recorded(
        run, attacks=["regression", "membership", "labels"], budget=Budget(practice=60)
    ).results.tables[0]
    _, _, leak, floor, patches, labels, *_ = practised.rows[0]
    assert leak >= floor - 0.1  # no less than the mean image
    assert patches > 0.6
    assert labels == 1.0
    with pytest.raises(UpdateError, match='unknown attack "search" on images'):
        recorded(run, attacks=["search"])


def test_a_server_rehearses_what_its_clients_do(tmp_path: Path) -> None:
    """As many examples and steps, the same puzzles and defences; under a secure sum as many
    clients.
    """
    settings = replace(SETTINGS, steps=2, jigsaw=0.3, probability=1.0, momentum=0.9)
    model = prepare_model(fed.vit(), settings)
    state, own = state_of(model), fed.bars(16)
    sent = contribute(model, state, own, settings, 3, 0)
    recorded = RecordedUpdate(
        3, 0, state, sent.tensors, sent.steps, sent.lr, sent.batch, sent.examples
    )
    first, second = rehearse_recorded(model, recorded, own, settings, 2, 0)
    assert first.update.tensors.keys() == recorded.tensors.keys()
    assert (first.update.steps, len(first.inputs)) == (2, 8)
    assert not torch.equal(first.inputs, first.original)  # type: ignore[arg-type]
    assert not torch.equal(first.inputs, second.inputs)
    (hidden,) = rehearse_recorded(
        model, recorded, own, replace(settings, defences=("freeze=embedding", "noise=0.1")), 1, 0
    )
    assert not any("embeddings" in n for n in hidden.update.tensors)
    noisy, frozen, withheld = (
        next(
            rehearse_recorded(model, recorded, own, replace(settings, defences=(d,)), 1, 0)
        ).update.tensors["model.classifier.weight"]
        for d in ("noise=0.5", "freeze=embedding", "withhold=embedding")
    )
    assert not torch.allclose(noisy, first.update.tensors["model.classifier.weight"], rtol=0.1)
    assert not torch.equal(
        frozen, withheld
    )  # in the second step what is withheld has been trained, and what is frozen has not
    assert torch.equal(withheld, first.update.tensors["model.classifier.weight"])
    (summed,) = rehearse_recorded(model, recorded, own, settings, 1, 0, clients=3)
    assert len(summed.inputs) == 24


@pytest.mark.parametrize("jigsaw", [0.0, 0.3])
def test_an_audit_reads_the_texts_that_were_sent(
    tmp_path: Path, jigsaw: float, capsys: pytest.CaptureFixture[str]
) -> None:
    source = fed.reader(
        tmp_path,
        num_hidden_layers=2,
        hidden_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    run, out = tmp_path / "run", tmp_path / "r.json"
    run_federated(
        source,
        Settings(
            clients=2,
            rounds=2,
            batch=1,
            steps=1,
            lr=0.1,
            optimizer="sgd",
            jigsaw=jigsaw,
            probability=0.0,
        ),
        run,
        record=True,
    )
    assert (
        main(
            [
                "audit",
                "gradients",
                "--from",
                str(run),
                "--rounds",
                "2",
                "--json",
                str(out),
                "--report",
                str(tmp_path / "p.html"),
            ]
        )
        == 0
    )
    results = load_results(out)
    ((number, _, leak, floor, exact, words, labels, count),) = results.tables[0].rows
    assert (number, count) == (2, 2)
    assert leak == exact == words == labels == 1.0
    assert floor < 0.5
    assert results.headline.text.startswith("Texts are revealed in round 2: ROUGE-L 1.00")
    assert "Leakage over rounds" in (tmp_path / "p.html").read_text()
    assert main(["audit", "gradients", "--from", str(run), "--attacks", "least squares"]) == 2
    assert 'unknown attack "least squares" on texts' in capsys.readouterr().err
    assert main(["audit", "gradients", "--from", str(run), "--gallery", "2"]) == 2
    assert "--gallery requires a run on images" in " ".join(capsys.readouterr().err.split())
    many = tmp_path / "many"
    run_federated(
        source,
        Settings(clients=2, rounds=1, batch=8, steps=1, lr=0.1, optimizer="sgd"),
        many,
        record=True,
    )
    table = recorded(many).results.tables[0]
    assert "fewer tokens than the model has channels" in table.note
    assert table.rows[0][2] < 0.9  # words by place, and not which belong together
    assert table.rows[0][5] == 1.0  # words, by the rows of their table


# Clients that begin apart


def max_difference(
    settings: Settings,
) -> tuple[torch.nn.Module, dict[str, torch.Tensor], list[Contribution]]:
    """Three descriptions of one model, as three clients would send them; and the logits that all of
    them give.
    """
    model = fed.vit(num_labels=10)
    folded, state = fold_norms(spec_of(model), state_of(model))
    sent = []
    for i in range(3):
        moved = {
            n: t.contiguous()
            for n, t in (apply(element(folded, i + 1), state) if i else state).items()
        }
        sent.append(replace(make_case(), client=i, tensors=moved, kind="weights"))
    return model, state_of(model), sent


def test_matched_clients_average_to_the_function_that_each_of_them_has() -> None:
    settings = Settings(clients=3, rounds=1, independent=True, strategy="matched")
    model, state, sent = max_difference(settings)
    images = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        true = model(pixel_values=images).logits
        load_state(
            model,
            average_weights(
                model, state, sent, settings, inputs=[{"pixel_values": images}] * 2, steps=2
            ),
        )
        matched = model(pixel_values=images).logits
        load_state(model, average_weights(model, state, sent, replace(settings, strategy="fedavg")))
        plain = model(pixel_values=images).logits
    assert torch.allclose(matched, true, atol=1e-3)
    assert float((plain - true).abs().max()) > 0.1


def test_a_server_of_texts_matches_by_half_of_its_own_and_measures_on_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusion, "REFINE_STEPS", 5)
    source = fed.reader(tmp_path)
    settings = Settings(clients=2, rounds=1, batch=8, steps=2, independent=True, strategy="matched")
    run_result = run_federated(source, settings, tmp_path / "run")
    assert run_result.run_state.history[0].contributed == (0, 1)
    _, test, _ = source.load_examples(source.build_model(settings))
    rest, inputs = split_test(test)
    assert (
        len(rest)
        == run_result.run_state.history[0].measures["examples"]
        == len(test) - sum(len(one["input_ids"]) for one in inputs)
    )
    plain = run_federated(source, replace(settings, strategy="fedavg"), tmp_path / "plain")
    assert (
        plain.run_state.history[0].measures["loss"]
        != run_result.run_state.history[0].measures["loss"]
    )


def test_clients_with_different_starts_send_weights_and_are_averaged() -> None:
    settings = Settings(clients=2, rounds=2, batch=8, steps=1, independent=True, strategy="matched")
    model = fed.vit()
    from functools import partial

    run_state = fed.run_rounds(settings, fuse=partial(average_weights, model, steps=2))
    assert [r.contributed for r in run_state.history] == [(0, 1), (0, 1)]
    with pytest.raises(FederatedError, match="independent must be set for the strategy matched"):
        Settings(clients=2, rounds=1, strategy="matched")
    _, state, sent = max_difference(settings)
    with pytest.raises(FederatedError, match=r'client 1 did not send "classifier.bias"'):
        average_weights(
            fed.vit(num_labels=10),
            state,
            [
                sent[0],
                replace(
                    sent[1],
                    tensors={k: v for k, v in sent[1].tensors.items() if k != "classifier.bias"},
                ),
            ],
            settings,
        )

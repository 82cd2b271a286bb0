"""What a server of split learning learns: what it is sent is what is written down, scores are of
the truth, and the command says what it comes to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import support.picos as picos
from experiments.paper_000.reconstruction import merge_trials
from regauge.attacks.views import ServerPass
from regauge.audit.engine import denormalize
from regauge.audit.scores import (
    MEAN_IMAGE,
    OTHERS,
    SHUFFLED_PATCHES,
    AttackScores,
    Case,
    Row,
    best_assignment,
    mean_score,
    score_baselines,
    score_images,
    worst_score,
)
from regauge.audit.split_audit import AuditError, SplitCase, audit_split
from regauge.audit.split_audit.attempts import (
    ATTACKS,
    Budget,
    Setting,
    attempt,
    collect_views,
    patch_size,
)
from regauge.audit.split_audit.engine import chance_accuracy, measure_label_leak
from regauge.audit.split_audit.report import (
    build_results,
    build_verdict,
    identification_rate,
    image_findings,
    without_rows,
)
from regauge.audit.split_audit.victims import (
    defend_images,
    drop_shuffles,
    drop_singleton_batch,
    is_shuffled,
    make_split_pair,
    parse_combination,
    split_batches,
)
from regauge.cli import main
from regauge.data.datasets import Data
from regauge.data.tasks import Examples, loss_of, prepare, task_of
from regauge.defences.split import LowPass, Rows
from regauge.errors import DataError, DefenceError
from regauge.models.cut import cut
from regauge.results.findings import load_results
from regauge.split import OptimizerConfig
from regauge.split.client.train import Run

BASELINES = (MEAN_IMAGE, SHUFFLED_PATCHES, OTHERS)
ADAMW = OptimizerConfig("adamw", lr=5e-3)


def vit(seed: int = 0, **more: Any) -> Any:
    config = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 8,
        "patch_size": 2,
    }
    config |= {
        "num_channels": 1,
        "num_labels": 3,
        "initializer_range": 0.1,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    torch.manual_seed(seed)
    return transformers.ViTForImageClassification(transformers.ViTConfig(**config | more))


def pictures(count: int, seed: int = 0) -> torch.Tensor:
    """Smooth images in -1..1, the class of each in how bright its left half is."""
    g = torch.Generator().manual_seed(seed)
    small = torch.rand(count, 1, 3, 3, generator=g)
    return (
        2 * torch.nn.functional.interpolate(small, (8, 8), mode="bilinear", align_corners=False) - 1
    )


def examples(count: int, seed: int = 0, multi: bool = False) -> Examples:
    x = pictures(count, seed)
    if multi:
        answers = torch.stack(
            [
                x[:, 0, :, :4].mean((1, 2)) > 0,
                x[:, 0, :4].mean((1, 2)) > 0,
                x.mean((1, 2, 3)) > 0.1,
            ],
            1,
        ).float()
        return Examples(count, 3, lambda i: ({"pixel_values": x[i]}, answers[i]), multi_label=True)
    labels = torch.bucketize(x[:, 0, :, :4].mean((1, 2)), torch.tensor([-0.15, 0.15]))
    return Examples(count, 3, lambda i: ({"pixel_values": x[i]}, labels[i]))


def test_combinations_are_parsed_and_split() -> None:
    assert parse_combination("none") == ()
    assert [type(d) for d in parse_combination("rows+low-pass=0.1")] == [LowPass, Rows]
    assert is_shuffled("noise=1+rows")
    assert is_shuffled("batch-shuffle=0.5")
    assert not is_shuffled("noise=1e+3")
    assert drop_shuffles("low-pass=0.1,disc+batch-shuffle=0.5+rows=sample") == "low-pass=0.1,disc"
    assert drop_shuffles("rows") == "none"
    assert (without_rows("noise=1+rows"), without_rows("rows=sample"), without_rows("noise=1")) == (
        "noise=1",
        "none",
        None,
    )
    with pytest.raises(DefenceError, match="fog"):
        parse_combination("fog+rows")


def test_the_server_sees_what_was_sent_and_nothing_else() -> None:
    model, x = vit(), pictures(6)
    with torch.no_grad():
        sent = cut(model).embed(pixel_values=x).stream
    features = make_split_pair(vit(), "none").record_features(x, 3, "a")
    assert torch.allclose(features, sent)
    shuffled = make_split_pair(vit(), "rows=sample").record_features(x, 3, "a")
    assert not torch.allclose(shuffled, sent)
    assert torch.allclose(shuffled.sort(1).values, sent.sort(1).values)
    filtered = make_split_pair(vit(), "low-pass=0.2").record_features(x, 3, "a")
    with torch.no_grad():
        assert torch.allclose(
            filtered,
            cut(model).embed(pixel_values=defend_images("low-pass=0.2", x, 3)).stream,
            atol=1e-6,
        )


def test_sampling_is_reproducible() -> None:
    pair, x = make_split_pair(vit(), "noise=1+rows"), pictures(4)
    once, again, later = (pair.record_features(x, 2, label) for label in ("a", "a", "b"))
    assert torch.equal(once, again)
    assert not torch.equal(once, later)


def test_gradients_are_recorded_in_the_selected_steps() -> None:
    pair, data = make_split_pair(vit(), "rows", ADAMW), examples(20)
    passes = pair.train(data, Run(5, 4), record_first=3)
    assert len(passes) == 3
    assert all(
        p.grad is not None and p.grad.shape == p.stream.shape and float(p.grad.abs().sum()) > 0
        for p in passes
    )
    assert len(pair.losses) == 5
    assert not make_split_pair(vit(), "rows", ADAMW).train(data, Run(2, 4))


def test_a_victim_learns_with_its_defences_and_rows_cost_nothing() -> None:
    train, test = examples(120), examples(60, 1)
    found = {}
    for combination in ("low-pass=0.3", "low-pass=0.3+rows"):
        model = vit().double()
        pair = make_split_pair(model, combination, ADAMW)
        before = pair.measure(test, 20)["accuracy"]
        pair.train(train, Run(40, 20))
        found[combination] = pair.measure(test, 20)
        assert found[combination]["accuracy"] > before + 0.15
    a, b = (found[c]["loss"] for c in found)
    assert a == pytest.approx(b, rel=1e-6)


def test_no_batch_is_one_image_alone() -> None:
    assert [len(b) for b in split_batches(pictures(7), 3)] == [3, 4]
    assert len(drop_singleton_batch(examples(7), 3)) == 6
    assert len(drop_singleton_batch(examples(8), 3)) == 8
    make_split_pair(vit(), "batch-shuffle").record_features(pictures(5), 4, "a")


def test_scores_are_of_each_image_and_know_what_is_worse() -> None:
    true = denormalize(pictures(6), [0.5], [0.5])
    near = true.clone()
    near[1:] += 0.2 * torch.randn(near[1:].shape, generator=torch.Generator().manual_seed(0))
    scores = score_images(near, true)
    assert set(scores) == {"SSIM", "PSNR", "MSE", "identified"}, "AlexNet is not given"
    assert all(len(v) == 6 for v in scores.values())
    assert worst_score(scores, "SSIM") == pytest.approx(1.0)
    assert worst_score(scores, "MSE") == 0.0
    assert scores["PSNR"][0] == 100.0
    assert (mean_score(scores, "SSIM") or 0) < 0.99
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert torch.equal(best_assignment(near[order], true), near)
    free = score_baselines(true, true, 2)
    assert mean_score(free["the mean image"], "identified") == 0.0
    assert (mean_score(free["true patches in a random order"], "SSIM") or 0) < 0.5


def test_a_best_assignment_re_identifies_no_one() -> None:
    """Images of other people, each assigned to its best fit, look re-identified:
    that is a floor, and no attack's success.
    """
    true, others = (denormalize(pictures(12, seed), [0.5], [0.5]) for seed in (0, 1))
    free = score_baselines(others, true, 2)
    by_naming = mean_score(free[OTHERS], "identified") or 0.0
    assert by_naming > 2 / 12, "far above a guess"
    assert score_baselines(others[:5], true, 2)[OTHERS]["SSIM"], "fewer of its own than there are"
    regroup, exact = (
        next(a for a in ATTACKS if a.name == name) for name in ("regrouped", "public embedding")
    )
    got = {
        a.name: AttackScores(
            a.name,
            score_images(best_assignment(others, true) if a is regroup else true, true),
            [],
            1.0,
            0.0,
        )
        for a in (regroup, exact)
    }
    blind = Row("batch-shuffle=0.5", {regroup.name: got[regroup.name]}, 0.5, 0.1)
    exposed = Row("none", got, 0.5, 0.1)
    assert (identification_rate(blind, ATTACKS), identification_rate(exposed, ATTACKS)) == (
        0.0,
        1.0,
    )
    findings = image_findings(Case("faces", (exposed, blind), free), ATTACKS)
    assert [
        f"by the best assignment, as are {by_naming:.0%} of other images" in f.sentence
        for f in findings
    ] == [f.id.endswith("regrouped") for f in findings]


def test_when_an_attacker_has_stopped() -> None:
    falling, flat = [1.0 - 0.05 * i for i in range(16)], [1.0, 0.5, 0.3, 0.2, *[0.2] * 12]
    assert not AttackScores("a", {}, falling, 1.0, 0.0).has_stopped
    assert AttackScores("a", {}, flat, 1.0, 0.0).has_stopped
    assert not AttackScores("a", {}, flat[:3], 1.0, 0.0).has_stopped


def test_attacks_are_exact_without_a_defence_and_at_the_floor_under_noise() -> None:
    own, true = pictures(150, 2), pictures(12, 3)
    clear = denormalize(true, [0.5], [0.5])
    floor = (
        mean_score(
            score_baselines(denormalize(own, [0.5], [0.5]), clear, 2)["the mean image"], "SSIM"
        )
        or 0.0
    )
    exact = [a for a in ATTACKS if a.name in ("public embedding", "least squares")]
    got: dict[str, dict[str, float]] = {}
    for combination in ("none", "rows", "noise=30+rows"):
        views = collect_views(make_split_pair(vit(), combination), own, true, 10, 0)
        setting = Setting(combination, Budget(16, 1, 2), 10)
        tried = {a.name: attempt(a, views, setting) for a in exact if a.fits(combination)}
        got[combination] = {
            n: mean_score(score_images(denormalize(t.output, [0.5], [0.5]), clear), "SSIM") or 0.0
            for n, t in tried.items()
            if t is not None
        }
    assert got["none"]["public embedding"] > 0.999
    assert got["rows"]["public embedding"] > 0.999
    assert got["none"]["least squares"] > 0.99
    assert got["noise=30+rows"]["least squares"] < floor + 0.15
    assert got["noise=30+rows"]["public embedding"] < floor + 0.15


@pytest.mark.parametrize("combination", ["noise=1.5", "noise=1.5+rows"])
def test_fresh_noise_is_averaged_away(combination: str) -> None:
    own, true = pictures(150, 2), pictures(12, 3)
    clear = denormalize(true, [0.5], [0.5])
    views = collect_views(make_split_pair(vit(), combination), own, true, 10, 0)
    chosen = {a.name: a for a in ATTACKS if a.name in ("least squares", "averaged")}
    got = {}
    for name, attack in chosen.items():
        tried = attempt(attack, views, Setting(combination, Budget(16, 1, 2), 10))
        assert tried is not None
        got[name] = (
            mean_score(score_images(denormalize(tried.output, [0.5], [0.5]), clear), "SSIM") or 0.0
        )
    assert got["averaged"] > got["least squares"] + 0.05
    assert not any(
        chosen["averaged"].fits(c)
        for c in ("none", "rows", "low-pass=0.3", "noise=0.5+batch-shuffle=0.5")
    )
    assert collect_views(make_split_pair(vit(), "rows"), own, true, 10, 0).repeated is None


def test_seeds_are_distinguished_from_images() -> None:
    one = AttackScores("decoder", {"SSIM": [0.1, 0.3, 0.6, 0.8]}, [], 0.0, 1.0, seeds=2)
    assert one.by_seed("SSIM") == pytest.approx([0.2, 0.7])


def test_gradients_reveal_labels_and_noise_does_not() -> None:
    data, run = examples(60), Run(12, 10)
    passes = make_split_pair(vit(), "rows", ADAMW).train(data, run, record_first=6)
    assert (measure_label_leak(passes, data, run) or (0,))[0] > 0.9
    g = torch.Generator().manual_seed(0)
    noise = [
        ServerPass(p.stream, p.others, torch.randn(p.stream.shape, generator=g)) for p in passes
    ]
    assert (measure_label_leak(noise, data, run) or (0,))[0] < 0.65
    assert measure_label_leak([], data, run) is None
    many = examples(60, multi=True)
    passes = make_split_pair(vit(), "none", ADAMW).train(many, run, record_first=6)
    assert (measure_label_leak(passes, many, run) or (0,))[0] > chance_accuracy(many)


def test_several_answers_to_each_image() -> None:
    rows = np.array([[1, -1], [-1, -1], [1, 1]])
    data = Data(
        "d",
        {
            "image": np.zeros((3, 8, 8), np.uint8),
            "glasses": rows[:, 0],
            "beard": rows[:, 1],
            "label": rows,
        },
        "",
    )
    task = {"kind": "images", "classes": 2, "mean": [0.5], "std": [0.5]}
    for one in ({**task, "attributes": ["glasses", "beard"]}, task):
        made = prepare(one, data)
        assert made.multi_label
        assert made.batch(np.arange(3))[1].tolist() == [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    logits = torch.tensor([[0.3, -0.3], [-9.0, -9.0], [9.0, 9.0]])
    labels = made.batch(np.arange(3))[1]
    assert float(loss_of(made, logits, labels)) == pytest.approx(
        float(torch.nn.functional.binary_cross_entropy_with_logits(logits, labels))
    )
    assert chance_accuracy(made) == pytest.approx(2 / 3)
    model = vit(num_labels=2)
    assert task_of(model, data, mean=[0.5], std=[0.5], attributes=["glasses", "beard"])[0][
        "attributes"
    ] == ["glasses", "beard"]
    with pytest.raises(DataError, match="must name the 2 outputs of the model, got 1 names"):
        task_of(model, data, mean=[0.5], std=[0.5], attributes=["glasses"])
    pair = make_split_pair(vit(), "rows", ADAMW)
    many = examples(60, multi=True)
    before = pair.measure(many, 20)["accuracy"]
    pair.train(many, Run(30, 20))
    assert pair.measure(many, 20)["accuracy"] > max(before, chance_accuracy(many) - 0.05)


def test_labels_that_are_words_are_numbered_as_the_model_names_them() -> None:
    data = Data(
        "d", {"image": np.zeros((2, 8, 8), np.uint8), "label": np.array(["happy", "neutral"])}, ""
    )
    model = vit(num_labels=2, id2label={0: "neutral", 1: "happy"})
    task, _ = task_of(model, data, mean=[0.5], std=[0.5])
    assert prepare(task, data).batch(np.arange(2))[1].tolist() == [1, 0]
    with pytest.raises(DataError, match='the label "happy", which is not a class of the model'):
        prepare({**task, "names": ["neutral"]}, data)


def row(combination: str, accuracy: float, decoder: float, best: float, identified: float) -> Row:
    def got(name: str, value: float) -> AttackScores:
        return AttackScores(
            name, {"SSIM": [value, value], "identified": [identified, identified]}, [1.0], 1.0, 1.0
        )

    return Row(
        combination,
        {"decoder": got("decoder", decoder), "public embedding": got("public embedding", best)},
        accuracy,
        0.5,
        1.0,
    )


def test_a_combination_that_no_attack_fits_has_no_verdict() -> None:
    """Otherwise it would be the one that leaks least."""
    free = {name: {"SSIM": [0.1] * 8, "identified": [0.0] * 8} for name in BASELINES}
    tried = AttackScores("least squares", {"SSIM": [0.9] * 8, "identified": [1.0] * 8})
    rows = [
        Row("none", {tried.attack: tried}, 0.9, 0.1),
        Row("rows", {tried.attack: tried}, 0.9, 0.1),
        Row("batch-shuffle=0.5", {}, 0.8, 0.1),
        Row("batch-shuffle=0.5+rows", {}, 0.8, 0.1),
    ]
    results = build_results("", [Case("data", tuple(rows), free)], ATTACKS)
    text = " ".join(results.facts["verdict"])
    assert "No verdict on images under batch-shuffle=0.5, batch-shuffle=0.5+rows" in text
    assert "The strongest defence is rows:" in text
    assert [row[3] for row in results.tables[0].rows] == [1.0, 1.0, None, None, 0.0]


def test_the_verdict_is_in_words() -> None:
    floor = {"SSIM": [0.4, 0.4], "identified": [0.0, 0.0]}
    rows = (
        row("none", 0.9, 0.9, 1.0, 1.0),
        row("rows", 0.9, 0.45, 1.0, 1.0),
        row("noise=1", 0.7, 0.5, 0.5, 0.1),
    )
    verdict = build_verdict(
        Case("faces", rows, {"the mean image": floor, "true patches in a random order": floor}),
        ATTACKS,
    )
    assert [v.level for v in verdict] == ["leak", "partial", "note", "note"]
    assert verdict[0].text.startswith(
        "Images are revealed under no defence, rows: SSIM 1.00 by public embedding (a guess: 0.40)"
    )
    assert verdict[1].text.startswith("Images are partly revealed under noise=1: SSIM")
    assert (
        "the best attack (public embedding) reaches SSIM 1.00 with them and 1.00 without; the "
        "paper's decoder alone 0.45 and 0.90" in verdict[2].text
    )
    assert (
        "The strongest defence is noise=1: the best attack goes 17% of the way" in verdict[3].text
    )
    together = merge_trials([row("rows", 0.8, 0.2, 0.4, 0.0), row("rows", 0.6, 0.4, 0.4, 0.0)])
    assert together.accuracy == pytest.approx(0.7)
    assert together.value("decoder", "SSIM") == pytest.approx(0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audit")
    vit().save_pretrained(path / "vit")
    picos.build("swin").float().save_pretrained(path / "swin")
    x = ((pictures(150)[:, 0] + 1) * 127).numpy().astype(np.uint8)
    labels = examples(150).batch(np.arange(150))[1].numpy()
    np.savez(path / "images.npz", image=x, label=labels)
    np.savez(
        path / "colours.npz",
        image=np.repeat(np.repeat(x.repeat(2, 1).repeat(2, 2)[..., None], 3, 3), 1, 0),
        label=labels % 2,
    )
    return path


def audit(folder: Path, *more: str, model: str = "vit", data: str = "images.npz") -> int:
    return main(
        [
            "audit",
            "split",
            str(folder / model),
            "--data",
            str(folder / data),
            "--mean",
            "0.5",
            "--std",
            "0.5",
            *more,
        ]
    )


QUICKLY = ("--epochs", "1", "--attacker", "16,1,2", "--attacked", "10", "--batch-size", "25")


def test_the_command_says_what_it_comes_to(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "r.json", tmp_path / "page.html"
    options = (
        "--defence",
        "rows",
        "--defence",
        "batch-shuffle=0.5",
        "--random-weights",
        "--gallery",
        "2",
    )
    assert audit(folder, *QUICKLY, *options, "--json", str(out), "--report", str(page)) == 0
    captured = capsys.readouterr()
    assert "Images are revealed under no defence, rows" in captured.out
    assert "not measured: LPIPS and F-SIM" in captured.out
    assert "75 client images, 45 attacker images, 30 test images; 10 to attack" in captured.err
    results = load_results(out)
    assert [r[0] for r in results.tables[0].rows] == [
        "none",
        "rows",
        "batch-shuffle=0.5",
        "a guess, the mean image",
    ]
    ids = {f.id for f in results.findings}
    assert "images/rows/places" in ids
    assert "images/none/places" not in ids
    assert "images/batch-shuffle=0.5/regrouped" in ids
    exact = next(f for f in results.findings if f.id == "images/rows/public embedding")
    assert exact.value == pytest.approx(1.0, abs=1e-3)
    assert all(f.floor is not None and f.ceiling is not None for f in results.findings)
    kinds = [f.kind for f in results.figures]
    assert kinds[:2] == ["points", "points"]
    assert "lines" in kinds
    gallery = next(f for f in results.figures if f.kind == "images")
    assert [len(r["images"]) for r in gallery.data["rows"]] == [2] * 4
    text = page.read_text()
    assert "Images are revealed under no defence, rows" in text.split("<h2")[0], (
        "the verdict comes first"
    )
    assert text.count("data:image/png") >= 8
    assert json.loads(out.read_text())["facts"]["weights"] == "random"


def test_an_audit_fails_above_its_threshold(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--attacks", "public embedding,least squares", "--defence", "rows", "--gallery", "0")
    assert audit(folder, *QUICKLY, *options, "--fail-above", "0.5") == 3
    assert "FAILS  images/rows/public embedding" in capsys.readouterr().out


def test_a_convolution_over_single_pixels_makes_no_patches() -> None:
    """A stem of 1 x 1, as hybrids have before their patches, was taken for the patch embedding."""
    stem, patches = torch.nn.Conv2d(3, 3, 1), torch.nn.Conv2d(3, 8, 4, stride=4)
    assert patch_size(torch.nn.Sequential(stem, patches), pictures(2)) == 4
    assert patch_size(vit(), pictures(2)) == 2
    for none in (
        torch.nn.Sequential(stem),
        torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4, stride=2)),
        torch.nn.Conv2d(3, 8, (4, 2), stride=(4, 2)),
    ):
        with pytest.raises(AuditError, match="must embed square patches"):
            patch_size(none, pictures(2))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--defence", "low-pass=0"), "radius must be in (0, 0.5], got 0"),
        (("--defence", "noise=-1"), "noise must be positive and finite, got -1"),
        (("--defence", "fog"), 'unknown defence "fog"'),
        (("--radii", "0"), "radius must be in (0, 0.5], got 0"),
        (("--defence", "batch-shuffle", "--batch-size", "1"), "the batch size must be >= 2"),
        (
            ("--model", "swin", "--data", "colours.npz", "--defence", "rows"),
            "the rows of a SwinForImageClassification cannot be permuted",
        ),
        (("--data", "colours.npz"), "must be 8 x 8, got 16 x 16"),
        (("--attacks", "magic"), 'unknown attack "magic" on images'),
        (("--attacks", "all,magic"), 'unknown attack "magic" on images'),
        (
            ("--attacks", "places,sets", "--defence", "rows"),
            "one that applies to an undefended victim",
        ),
        (("--attacks", "averaged", "--defence", "noise=1"), "hint: add least squares or decoder"),
        (("--attacker", "big"), "must be WIDTH,DEPTH,EPOCHS"),
        (("--lr", "-1"), "must be > 0 and finite, got -1"),
        (("--lpips", "nothing.safetensors"), "nothing.safetensors"),
    ],
)
def test_invalid_options_are_rejected_before_training(
    folder: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], message: str
) -> None:
    options = dict(zip(more[::2], more[1::2], strict=True))
    model, data = options.pop("--model", "vit"), options.pop("--data", "images.npz")
    assert audit(
        folder, *(x for pair in options.items() for x in pair), model=model, data=data
    ) in (
        1,
        2,
    )
    captured = capsys.readouterr()
    assert message in captured.err
    assert "train through" not in captured.err
    assert captured.out == ""


def test_too_few_images_are_refused() -> None:
    few = SplitCase(vit(), examples(20), examples(10), examples(10), [0.5], [0.5])
    with pytest.raises(AuditError, match="must have >= 20 images, got 10"):
        audit_split(few, ("rows",))

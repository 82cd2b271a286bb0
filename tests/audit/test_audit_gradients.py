"""`regauge audit gradients` on images: what it says, what it writes, what it refuses; and Table 5
on pico models.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import EXPERIMENTS, Lab
from regauge.attacks.membership import auc
from regauge.audit.engine import resolve_attacks, select_attacks
from regauge.audit.gradient_audit import GradientCase, audit_gradients
from regauge.audit.gradient_audit.attempts import (
    ATTACKS,
    QUICK,
    TEXT_ATTACKS,
    Budget,
)
from regauge.audit.gradient_audit.engine import score_baselines
from regauge.audit.scores import OTHERS, label_recall, mean_score
from regauge.audit.scores import best_assignment as by_name
from regauge.audit.split_audit import AuditError
from regauge.cli import main
from regauge.data.tasks import Examples
from regauge.errors import MissingExtraError, RegaugeError, UpdateError
from regauge.results.findings import load_results
from support.updates import examples, pictures, vit


def save_case(folder: Path, **more: Any) -> Path:
    vit(**more).save_pretrained(folder / "vit")
    (folder / "vit" / "preprocessor_config.json").write_text(
        json.dumps({"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    )
    pixels = ((pictures(40) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    np.savez(folder / "data.npz", image=pixels, label=np.arange(40) % 5)
    return folder / "vit"


def test_the_audit_says_which_defence_hides_what(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_case(tmp_path)
    page, out = tmp_path / "page.html", tmp_path / "r.json"
    defences = ("rows", "mjp=0.5", "batch=8", "freeze=embedding,first", "private=1")
    options = [
        "audit",
        "gradients",
        str(model),
        "--data",
        str(tmp_path / "data.npz"),
        "--updates",
        "2",
    ]
    options += [
        "--attacks",
        "least squares,span,mask,labels,inverting",
        "--budget",
        "3,1",
        "--optimized",
        "1",
    ]
    more = ["--batches", "1,4", "--train", "2", "--json", str(out), "--report", str(page)]
    assert main([*options, *(a for d in defences for a in ("--defence", d)), *more]) == 0
    output = capsys.readouterr().out
    results = load_results(out)
    by = {f.id.removeprefix("data/"): f for f in results.findings}
    assert by["none/least squares"].value > 45 > 30 > by["batch=8/least squares"].value
    assert by["rows/least squares"].value == pytest.approx(by["none/least squares"].value, abs=3)
    assert by["none/patches"].value > 0.95
    assert "Images are revealed under no defence, rows: PSNR" in output
    assert "Masked positions are revealed under mjp=0.5: 100%" in output
    assert "epsilon" in output
    assert "freeze=embedding,first, least squares: the update must contain" in output
    assert {f.title.split(": ")[1] for f in results.figures} == {
        "what the server recovers", ("leakage against batch "
        "size"), "patches and labels against batch size", "leakage against training"
    }  # fmt: skip
    assert "<img" in page.read_text()
    metrics = next(t for t in results.tables if t.title.startswith("Every metric"))
    at = metrics.columns.index("FFT2D")
    assert all(
        isinstance(row[at], float) for row in metrics.rows
    )  # of every attack, and of the mean image
    short = ["--attacks", "least squares", "--batches", "", "--fail-above", "0.5"]
    assert main([*options[:5], "--updates", "2", "--defence", "rows", *short]) == 3
    assert main([*options[:5], "--updates", "2", "--defence", "private=1", *short]) == 0


def test_of_local_steps_the_default_leaves_out_what_is_for_one_batch_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_case(tmp_path)
    options = [
        "audit",
        "gradients",
        str(model),
        "--data",
        str(tmp_path / "data.npz"),
        "--updates",
        "1",
        "--attacks",
        "labels",
        "--batches",
        "",
    ]
    assert main([*options, "--steps", "2"]) == 0
    output = capsys.readouterr().out
    assert (
        "not measured: private=1.0: applies to gradients of one batch; updates have 2 steps"
        in output
    )
    assert "prune=0.9" in output
    assert (
        main([*options, "--steps", "2", "--defence", "private=1.0"]) == 1
    )  # reported if named explicitly
    assert "leave out steps" in capsys.readouterr().err
    assert main(options) == 0
    assert "not measured: private" not in (output := capsys.readouterr().out)
    assert "private=1.0" in output


def test_a_missing_accountant_is_an_error_before_any_attack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    case = GradientCase(vit(), examples(8), examples(12, 1), [0.5] * 3, [0.5] * 3, updates=1)
    done: list[str] = []
    with pytest.raises(MissingExtraError, match='"privacy"'):
        audit_gradients(
            case,
            ["private=1"],
            attacks=select_attacks(["least squares"], ATTACKS),
            progress=lambda n, of, what: done.append(what),
        )
    assert not done
    assert audit_gradients(
        case, ["noise=1"], attacks=select_attacks(["least squares"], ATTACKS)
    ).findings  # who tells no epsilon needs none


def several(count: int, seed: int = 0) -> Examples:
    """Images with five answers each, yes or no."""
    x, y = (
        pictures(count, seed),
        (torch.rand(count, 5, generator=torch.Generator().manual_seed(seed)) > 0.5).float(),
    )
    return Examples(count, 5, lambda i: ({"pixel_values": x[i]}, y[i]), multi_label=True)


def test_images_with_several_answers_are_attacked_by_what_needs_no_labels() -> None:
    case = GradientCase(vit(), several(8), several(12, 1), [0.5] * 3, [0.5] * 3, updates=2)
    results = audit_gradients(
        case,
        ["batch=2"],
        attacks=select_attacks(["least squares", "labels", "idlg"], ATTACKS),
        pictures=0,
    )
    assert {f.id for f in results.findings} >= {
        "gradients/none/least squares",
        "gradients/batch=2/least squares",
    }
    assert not any("idlg" in f.id or "labels" in f.id for f in results.findings)
    assert "labels and counts: images must have one label each, got several" in results.unchecked
    assert "iDLG: images must have one label each, got several" in results.unchecked
    one = audit_gradients(
        replace(case, victims=examples(8), own=examples(12, 1)),
        [],
        attacks=select_attacks(["least squares", "labels"], ATTACKS),
        pictures=0,
    )
    assert any("abels" in c for t in one.tables for c in t.columns)
    assert not any("abels" in c for t in results.tables for c in t.columns)
    assert not any("one label" in line for line in one.unchecked)
    with pytest.raises(UpdateError, match="one label each for labels and counts"):
        audit_gradients(case, [], attacks=select_attacks(["labels"], ATTACKS), pictures=0)


def test_unsupported_audits_raise_an_error_that_names_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_case(tmp_path)
    options = ["audit", "gradients", str(model), "--data", str(tmp_path / "data.npz")]
    for more, text in (
        (["--defence", "fog"], 'unknown defence "fog"'),
        (["--defence", "batch=99"], "must have >= 99 images"),
        (["--attacks", "fog"], "fog"),
        (["--budget", "1"], "STEPS,RESTARTS"),
        (["--batches", "x"], "numbers"),
        (["--lr", "-1"], "must be > 0 and finite, got -1"),
    ):
        assert main([*options, *more]) in (1, 2)
        assert text in " ".join(capsys.readouterr().err.split())
    plain = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 5))
    with pytest.raises(RegaugeError, match="no patch embedding"):
        audit_gradients(GradientCase(plain, examples(4), examples(4), [0.5] * 3, [0.5] * 3), [])
    with pytest.raises(AuditError, match="images of its own"):
        audit_gradients(GradientCase(vit(), examples(4), examples(1), [0.5] * 3, [0.5] * 3), [])


def test_of_several_images_in_an_update_the_floor_is_what_a_best_naming_gives_to_others() -> None:
    case = GradientCase(
        vit().double(), examples(40, 1), examples(40, 2), [0.5], [0.5], batch=4, updates=2
    )
    free, alone = score_baselines(case, None), score_baselines(replace(case, batch=1), None)
    assert list(alone) == ["the mean image"]
    assert (mean_score(free[OTHERS], "identified") or 0) > (
        mean_score(free["the mean image"], "identified") or 0
    ), "of any images some fit"


def test_scores_are_of_what_they_are_named_for() -> None:
    x = pictures(3)
    assert torch.equal(by_name(x[[2, 0, 1]], x), x)
    assert by_name(x[:1], x).shape == x.shape
    assert auc(torch.tensor([2.0, 3.0]), torch.tensor([0.0, 1.0])) == 1
    assert auc(torch.zeros(3), torch.zeros(3)) == 0.5
    assert label_recall(torch.tensor([2, 0, 1]), torch.tensor([0, 2, 2])) == pytest.approx(2 / 3)
    assert [a.name for a in select_attacks(["span", "least squares"], ATTACKS)] == [
        "least squares",
        "span",
    ]
    assert len({a.name for a in ATTACKS}) == len(ATTACKS)
    assert Budget().steps > 0


def test_attacks_are_chosen_by_name_on_images_and_on_texts_alike() -> None:
    for table, usual, name in (
        (ATTACKS, QUICK, "span"),
        (TEXT_ATTACKS, TEXT_ATTACKS[:1], "words"),
    ):
        assert (
            resolve_attacks(None, table, usual, "these")
            == resolve_attacks([], table, usual, "these")
            == tuple(usual)
        )
        assert [a.name for a in resolve_attacks([name], table, usual, "these")] == [name]
        assert (
            resolve_attacks(["all"], table, usual, "these")
            == resolve_attacks([name, "all"], table, usual, "these")
            == table
        )
        with pytest.raises(UpdateError, match='unknown attack "fog" on these') as caught:
            resolve_attacks([name, "fog"], table, usual, "these")
        assert name in str(caught.value.hint)


def test_table_5_has_every_row_and_one_seed_gives_no_verdict(tmp_path: Path) -> None:
    results = EXPERIMENTS["002/table5"](Lab("pico", cache=tmp_path))
    (table,) = results.tables
    assert {(r[0], r[1]) for r in table.rows} >= {
        ("ViT", "(a)"),
        ("ViT w/o PEs", "(b)"),
        ("ViT + MJP w/o unknown", "(c)"),
        ("ViT + MJP", "(d)"),
    }
    assert len(table.rows) == 31
    by = {f.id: f for f in results.findings}
    for name in ("table5/plain", "table5/a"):
        assert by[name].holds is None
        assert "1 seed, a verdict needs 3" in by[name].sentence
        assert " dB" in by[name].sentence


@pytest.mark.slow
def test_the_front_measures_every_recipe_at_every_batch(tmp_path: Path) -> None:
    from experiments.gradients.defence_tradeoff import PICO

    results = EXPERIMENTS["gradients/front"](Lab("pico", cache=tmp_path))
    (table,) = results.tables
    assert {(r[0], r[1]) for r in table.rows} == {(r, size) for r in PICO for size in (1, 4)} | {
        ("no training at all", None)
    }
    by = {(r[0], r[1]): dict(zip(table.columns, r, strict=True)) for r in table.rows}
    assert by["none", 1]["dB above floor"] > by["none", 4]["dB above floor"]
    assert by["private=1", 1]["epsilon"] > 0

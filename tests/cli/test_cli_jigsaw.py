"""`regauge jigsaw` as a transcript: a ViT learns digits with puzzles, is measured, studied, and
loads without regauge's help.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from regauge.cli import main
from regauge.data.datasets import open_data
from regauge.jigsaw import VARIANTS, MaskedJigsaw
from regauge.jigsaw.folder import load_wrapped, save_wrapped
from regauge.jigsaw.robustness import aupr, aurra
from regauge.models.load import load_model
from regauge.results.findings import load_results

HOW = ["--data", "digits", "--mean", "0.3", "--std", "0.38"]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    size = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "initializer_range": 0.2,
    }
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(**size, image_size=8, patch_size=2, num_channels=1, num_labels=10)
    )
    folder = tmp_path_factory.mktemp("jigsaw") / "start"
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(start: Path) -> Path:
    out = start.parent / "trained"
    options = [
        "--ratio",
        "0.5",
        "--per",
        "sample",
        "--epochs",
        "2",
        "--lr",
        "1e-2",
        "--schedule",
        "reference",
    ]
    assert main(["jigsaw", "train", str(start), *HOW, *options, "-o", str(out)]) == 0
    return out


def test_what_is_trained_is_a_plain_checkpoint_and_what_puzzles_learned(
    start: Path, trained: Path
) -> None:
    assert sorted(p.name for p in trained.iterdir()) == [
        "config.json",
        "jigsaw",
        "model.safetensors",
    ]
    assert not list(trained.parent.glob(".*"))  # nothing half-done is left
    plain = transformers.ViTForImageClassification.from_pretrained(trained).eval()
    wrapped = load_wrapped(trained)
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(wrapped(images).logits, plain(images).logits)
    assert wrapped.variant == VARIANTS["J"]
    assert (wrapped.ratio, wrapped.per, wrapped.passes) == (0.5, "sample", 44)
    assert not torch.equal(
        plain.classifier.weight,
        transformers.ViTForImageClassification.from_pretrained(start).classifier.weight,
    )


def test_training_lowers_the_loss_and_says_so(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--variant", "E", "--lr", "1e-2", "--fresh", "--flip", "--shift", "1"]
    page = tmp_path / "page.html"
    assert (
        main(
            [
                "jigsaw",
                "train",
                str(start),
                *HOW,
                *options,
                "-o",
                str(tmp_path / "out"),
                "--json",
                "--report",
                str(page),
            ]
        )
        == 0
    )
    assert "The training loss" in page.read_text()
    report = json.loads(capsys.readouterr().out)
    assert report["variant"] == "JP"
    assert report["last_loss"] < report["first_loss"] - 0.1
    assert report["end"]["loss"] < report["start"]["loss"]
    assert main(["jigsaw", "train", str(start), *HOW, "-o", str(tmp_path / "out")]) == 1
    assert "exists already" in capsys.readouterr().err


def test_a_training_goes_on_with_its_own_state_and_no_other(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from regauge.checkpoints import resume
    from regauge.data import train as training

    def command(out: str, *more: str) -> list[str]:
        return [
            "jigsaw",
            "train",
            str(start),
            *HOW,
            "--epochs",
            "2",
            "--lr",
            "1e-2",
            *more,
            "-o",
            str(tmp_path / out),
        ]

    def stopping(model: object, optimizer: object, step: int, *rest: object) -> None:
        keep(model, optimizer, step, *rest)  # type: ignore[arg-type]
        if step == 20:
            raise KeyboardInterrupt

    assert main(command("whole", "--ratio", "0.5")) == 0
    keep = training._save_state
    monkeypatch.setattr(training, "_save_state", stopping)
    monkeypatch.setattr(resume, "SAVE_INTERVAL", 0.0)
    assert main(command("out", "--ratio", "0.5")) == 130
    monkeypatch.setattr(training, "_save_state", keep)
    assert ".out.training" in capsys.readouterr().err
    assert (tmp_path / ".out.training").stat().st_mode & 0o077 == 0
    for other in (
        ["--ratio", "0.3"],
        ["--ratio", "0.5", "--seed", "1"],
        ["--ratio", "0.5", "--variant", "A"],
        ["--ratio", "0.5", "--batch-size", "32"],
    ):
        assert main(command("out", *other)) == 1
        assert "that was interrupted" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert main(command("out", "--ratio", "0.5")) == 0
    assert "train 21/" in capsys.readouterr().err, "it went on"
    whole, out = (load_wrapped(tmp_path / name).state_dict() for name in ("whole", "out"))
    assert all(torch.equal(whole[name], out[name]) for name in whole)
    assert [p.name for p in tmp_path.glob(".*")] == []


def test_what_is_not_finite_is_refused(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = transformers.ViTForImageClassification.from_pretrained(start)
    with torch.no_grad():
        model.classifier.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    assert (
        main(["jigsaw", "train", str(tmp_path / "broken"), *HOW, "-o", str(tmp_path / "out")]) == 1
    )
    assert '"classifier.weight" of' in capsys.readouterr().err
    assert main(["jigsaw", "evaluate", str(tmp_path / "broken"), *HOW]) == 1
    assert "logits of the model are not finite" in capsys.readouterr().err
    assert (
        main(["jigsaw", "train", str(start), *HOW, "--lr", "1e30", "-o", str(tmp_path / "out")])
        == 1
    )
    assert "the loss must be finite" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_strong_recipe_trains_too(
    start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "jigsaw",
                "train",
                str(start),
                *HOW,
                "--strong",
                "--lr",
                "1e-2",
                "--fresh",
                "-o",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    words = capsys.readouterr().out.split()
    first, last = (float(words[words.index(before) - 3]) for before in ("start,", "end"))
    assert last < first  # of mixed and smoothed labels: not far


def test_evaluate(
    start: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--ratios",
        "0.5,0.9",
        "--samples",
        "60",
        "--json",
        str(tmp_path / "r.json"),
        "--report",
        str(tmp_path / "page.html"),
    ]
    assert main(["jigsaw", "evaluate", str(start), str(trained), *HOW, *options]) == 0
    captured = capsys.readouterr()
    assert "consistency" in captured.out
    assert f"the unknown embedding marks shuffled patches for: {trained};" in captured.err
    table = load_results(tmp_path / "r.json").tables[0]
    rows = table.rows
    assert [row[1] for row in rows] == [0, 0.5, 0.9] * 2
    assert rows[3][2] > rows[0][2] + 20  # it has learned
    norm, squared, bare = (
        table.columns.index(name) for name in ("difference norm", "squared", "unwrapped")
    )
    assert all(row[squared] > 0 and row[squared] != row[norm] for row in rows if row[1])
    assert [row[bare] for row in rows[:3]] == [None] * 3  # a plain model receives no puzzle
    assert "marks the shuffled patches" in table.note
    alone = tmp_path / "alone"
    transformers.ViTForImageClassification.from_pretrained(trained).save_pretrained(alone)
    assert (
        main(
            [
                "jigsaw",
                "evaluate",
                str(alone),
                *HOW,
                *options[:4],
                "--json",
                str(tmp_path / "alone.json"),
            ]
        )
        == 0
    )
    assert [row[3] for row in load_results(tmp_path / "alone.json").tables[0].rows] == [
        row[bare] for row in rows[3:]
    ]
    assert [row[3] for row in rows[3:]] != [row[bare] for row in rows[3:]]
    assert "Consistency under puzzles" in (tmp_path / "page.html").read_text()


@pytest.fixture(scope="module")
def net(start: Path) -> Path:
    """A ResNet: neither patches nor positions of its own."""
    torch.manual_seed(0)
    size = {
        "num_channels": 1,
        "embedding_size": 8,
        "hidden_sizes": [8],
        "depths": [1],
        "layer_type": "basic",
        "num_labels": 10,
    }
    transformers.ResNetForImageClassification(transformers.ResNetConfig(**size)).save_pretrained(
        start.parent / "net"
    )
    return start.parent / "net"


def test_models_of_one_call_are_given_the_same_puzzles(
    start: Path, net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ResNet has the patches of the ViT beside it, or those that the other ResNet was trained
    with; what differs still is refused.
    """
    few = [*HOW, "--ratios", "0.5", "--samples", "20"]
    assert (
        main(["jigsaw", "evaluate", str(net), str(start), *few, "--json", str(tmp_path / "r.json")])
        == 0
    )
    table = load_results(tmp_path / "r.json").tables[0]
    assert {row[table.columns.index("patch") :] for row in table.rows} == {("2 x 2", "4 x 4")}
    for patch in ("2", "4"):
        save_wrapped(
            MaskedJigsaw(load_model(net), 0.3, variant="E", patch=int(patch)), tmp_path / patch
        )
    assert (
        main(
            [
                "jigsaw",
                "evaluate",
                str(net),
                str(tmp_path / "4"),
                *few,
                "--json",
                str(tmp_path / "r.json"),
            ]
        )
        == 0
    )
    table = load_results(tmp_path / "r.json").tables[0]
    assert {row[-2:] for row in table.rows} == {("4 x 4", "2 x 2")}
    assert table.rows[1][4] is None
    assert table.rows[3][4] == table.rows[3][3]  # the shuffle alone is not passed
    capsys.readouterr()
    assert (
        main(["jigsaw", "evaluate", str(net), str(tmp_path / "4"), str(tmp_path / "2"), *few]) == 1
    )
    assert f"{net}: 4 x 4 patches of 2 x 2 pixels" in capsys.readouterr().err
    assert main(["jigsaw", "evaluate", str(start), str(tmp_path / "4"), *few]) == 1
    output = capsys.readouterr().err
    assert f"{tmp_path / '4'}: 2 x 2 patches of 4 x 4 pixels" in output
    assert "--patch 2 gives the same puzzles to all" in output
    assert (
        main(
            [
                "jigsaw",
                "evaluate",
                str(start),
                str(tmp_path / "4"),
                *few,
                "--patch",
                "2",
                "--json",
                str(tmp_path / "r.json"),
            ]
        )
        == 0
    )
    assert {row[-2:] for row in load_results(tmp_path / "r.json").tables[0].rows} == {
        ("2 x 2", "4 x 4")
    }


def test_study(
    start: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "--corruptions",
        "--samples",
        "2",
        "--report",
        str(tmp_path / "page.html"),
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert main(["jigsaw", "study", str(start), str(trained), *HOW, *options]) == 0
    assert "1-D MAE" in capsys.readouterr().out
    page, results = (tmp_path / "page.html").read_text(), load_results(tmp_path / "r.json")
    for title in (
        "Accumulated eigenvalues",
        "PCA of positions",
        "Attention of CLS in the last layer",
        "Errors under corruptions",
    ):
        assert title in page
    (row,) = (r for r in results.tables[-1].rows if str(r[0]).startswith("mCE"))
    assert row[1] == pytest.approx(100)


def test_study_leaves_out_what_a_model_lacks(
    start: Path, net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ResNet is the reference of mCE, and a Swin has errors too, though neither has a table of
    positions or CLS.
    """
    size = {
        "image_size": 8,
        "patch_size": 1,
        "num_channels": 1,
        "embed_dim": 8,
        "depths": [1],
        "num_heads": [1],
        "window_size": 2,
        "num_labels": 10,
    }
    transformers.SwinForImageClassification(transformers.SwinConfig(**size)).save_pretrained(
        tmp_path / "swin"
    )
    swin = str(tmp_path / "swin")
    options = [
        "--corruptions",
        "--samples",
        "2",
        "--report",
        str(tmp_path / "page.html"),
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert main(["jigsaw", "study", str(net), swin, str(start), *HOW, *options]) == 0
    output, results = capsys.readouterr().out, load_results(tmp_path / "r.json")
    for name, model in ((str(net), "ResNet"), (swin, "Swin")):
        for what, lacks in (
            ("positions", "no table of absolute positions"),
            ("attention", "no CLS token that attends to all patches"),
        ):
            (note,) = (
                text for text in results.unchecked if text.startswith(f"{what} of {name}: {model}")
            )
            assert lacks in note
            assert f"not checked: {note}" in output
    assert not any(str(start) in text for text in results.unchecked)
    assert [row[0] for row in results.tables[0].rows] == [str(start)]
    assert results.tables[-1].columns == ("corruption", str(net), swin, str(start))
    assert str(results.tables[-1].rows[-1][0]).startswith("mCE")
    assert "no table of absolute positions" in (tmp_path / "page.html").read_text()
    assert main(["jigsaw", "study", str(net)]) == 1  # nothing is left
    assert "no table of absolute positions" in capsys.readouterr().err


def test_study_of_hard_images_and_of_images_of_no_class(
    start: Path, trained: Path, net: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the definitions: accuracy and AURRA of one data set, AUPR of another against the first."""
    digits = open_data("digits", split="test")
    pixels, labels = np.asarray(digits["image"]), np.asarray(digits["label"])
    np.savez(tmp_path / "hard.npz", image=pixels[:50], label=labels[:50])
    np.savez(
        tmp_path / "none.npz",
        image=np.random.default_rng(0)
        .permuted(pixels[:90].reshape(90, -1), axis=1)
        .reshape(90, 8, 8),
    )
    options = [
        "--hard",
        str(tmp_path / "hard.npz"),
        "--outside",
        str(tmp_path / "none.npz"),
        "--batch-size",
        "32",
        "--device",
        "cpu",
    ]
    outputs = ["--json", str(tmp_path / "r.json"), "--report", str(tmp_path / "page.html")]
    assert main(["jigsaw", "study", str(trained), str(net), *HOW, *options, *outputs]) == 0
    assert "AURRA" in capsys.readouterr().out
    assert "AUPR" in (tmp_path / "page.html").read_text()
    tables = {table.title: table for table in load_results(tmp_path / "r.json").tables}

    def sure(images: Any) -> tuple[Any, Any]:
        top = (
            load_wrapped(trained)(((torch.from_numpy(images).float() / 255 - 0.3) / 0.38)[:, None])
            .logits.softmax(-1)
            .max(-1)
        )
        return top.values.detach().numpy(), top.indices.numpy()

    confidence, predicted = sure(pixels[:50])
    name, accuracy, area, count = tables["Hard images"].rows[0]
    assert (name, count) == (str(trained), 50)
    assert accuracy == pytest.approx(100 * (predicted == labels[:50]).mean())
    assert area == pytest.approx(100 * aurra(confidence, predicted == labels[:50]), abs=1e-3)
    scrambled = np.load(tmp_path / "none.npz")["image"]
    name, area, guess, some, none = tables["Images of no class"].rows[0]
    assert (some, none) == (len(pixels), 90)
    assert area == pytest.approx(100 * aupr(sure(pixels)[0], sure(scrambled)[0]), abs=1e-3)
    assert guess == pytest.approx(100 * 90 / (90 + len(pixels)))
    assert [row[0] for row in tables["Hard images"].rows] == [str(trained), str(net)]
    assert (
        main(["jigsaw", "study", str(start), "--hard", str(tmp_path / "none.npz"), *HOW[2:]]) == 1
    )
    assert "label" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "output"),
    [
        (["evaluate", "START", *HOW, "--ratios", "1.5"], "must be in [0, 1)"),
        (["train", "START", *HOW, "--ratio", "1", "-o", "OUT"], "must be in [0, 1)"),
        (["train", "START", *HOW, "--variant", "Z", "-o", "OUT"], 'unknown variant "Z"'),
        (["train", "START", *HOW, "--lr", "-1", "-o", "OUT"], "--lr"),
        (["train", "START", *HOW, "--weight-decay", "nan", "-o", "OUT"], "--weight-decay"),
        (["study", "START", "--corruptions"], "--data"),
        (["study", "START", "--outside", "digits"], "--data"),
        (["study", "START", *HOW, "--outside", "nowhere.npz"], "nowhere.npz"),
        (["study", "START", *HOW, "--device", "nowhere"], "nowhere"),
        (["study", "START", *HOW, "--patch", "3"], "got 3 x 3"),
        (["evaluate", "NOWHERE", *HOW], "NOWHERE"),
    ],
)
def test_bad_input_is_named(
    options: list[str], output: str, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {
        "START": str(start),
        "OUT": str(tmp_path / "out"),
        "NOWHERE": str(tmp_path / "NOWHERE"),
    }
    assert main(["jigsaw", *(places.get(word, word) for word in options)]) in (1, 2)
    assert output in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_damaged_file_of_what_was_learned_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    (copy / "jigsaw" / "learned.safetensors").write_bytes(b"nothing")
    assert main(["jigsaw", "evaluate", str(copy), *HOW]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_a_model_other_than_a_vit_is_rejected_with_alternatives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ResNet has the shuffle alone, in patches that may have to be given; a model of texts is
    refused by name.
    """
    folds = {
        "num_channels": 1,
        "embedding_size": 8,
        "hidden_sizes": [8],
        "depths": [1],
        "layer_type": "basic",
        "num_labels": 10,
    }
    transformers.ResNetForImageClassification(transformers.ResNetConfig(**folds)).save_pretrained(
        tmp_path / "net"
    )
    assert (
        main(
            [
                "jigsaw",
                "train",
                str(tmp_path / "net"),
                *HOW,
                "--ratio",
                "0.5",
                "-o",
                str(tmp_path / "out"),
            ]
        )
        == 1
    )
    output = capsys.readouterr().err
    assert "only the shuffle of patches applies" in output
    assert "multiple of the patch, 16 x 16" in output
    assert all(line.startswith("regauge: ") for line in output.splitlines())
    assert (
        main(
            [
                "jigsaw",
                "train",
                str(tmp_path / "net"),
                *HOW,
                "--ratio",
                "0.5",
                "--patch",
                "2",
                "-o",
                str(tmp_path / "out"),
            ]
        )
        == 0
    )
    words = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    transformers.BertForSequenceClassification(transformers.BertConfig(**words)).save_pretrained(
        tmp_path / "bert"
    )
    capsys.readouterr()
    assert main(["jigsaw", "train", str(tmp_path / "bert"), *HOW, "-o", str(tmp_path / "no")]) == 1
    assert "MODEL must be an image model" in capsys.readouterr().err

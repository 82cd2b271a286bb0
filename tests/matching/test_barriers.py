"""Barriers: what the curves' numbers mean, planted elements that make a barrier and undo it, what
cannot be joined, and the command.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from regauge.checkpoints.element_files import save_element
from regauge.cli import main
from regauge.core.action import apply
from regauge.core.element import element, identity
from regauge.core.fold import fold_norms
from regauge.data.datasets import Data
from regauge.data.tasks import Examples, loss_of, prepare, task_of
from regauge.errors import DataError, PathError
from regauge.matching.barriers import (
    Curve,
    _fit_temperature,
    interpolate,
    measure_path,
    measure_plane,
    require_interpolable,
    score,
)
from regauge.matching.barriers import Path as Walked
from regauge.matching.connectivity import (
    UNALIGNED,
    Aligner,
    _conclude,
    align_by_weights,
    connect,
)
from regauge.models.resolve import spec_of
from regauge.results.findings import load_results
from regauge.results.report import page
from support.picos import PICOS, build
from support.texts import WORDS, readings, spoken, words


def label_examples(model: Any, count: int = 40) -> Examples:
    """Images or texts with the labels that the model itself gives them, after its head was made to
    have no favourite.
    """
    if hasattr(model, "vit"):
        inputs = {
            "pixel_values": torch.randn(
                count, 3, 8, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64
            )
        }
    else:
        inputs = {
            "input_ids": torch.randint(
                3, 30, (count, 9), generator=torch.Generator().manual_seed(5)
            )
        }
    with torch.no_grad():
        model.classifier.bias -= model(**inputs).logits.mean(0)
        labels = model(**inputs).logits.argmax(1)
    assert len(labels.unique()) > 1
    return Examples(
        count,
        model.config.num_labels,
        lambda rows: ({k: x[rows] for k, x in inputs.items()}, labels[rows]),
    )


def test_the_numbers_of_a_curve() -> None:
    curve = Curve((0.0, 0.25, 0.5, 0.75, 1.0), (1.0, 2.0, 2.5, 2.0, 2.0))
    assert curve.excesses == pytest.approx((0, 0.75, 1.0, 0.25, 0))
    assert (curve.barrier, curve.peak) == (1.0, 0.5)
    assert (curve.rise, curve.span, curve.midpoint) == (1.5, 1.5, 1.5)
    below = Curve((0.0, 0.5, 1.0), (1.0, 0.4, 2.0))
    assert below.barrier == pytest.approx(
        -1.1
    )  # the ends, where the excess is nothing, do not count
    assert (below.rise, below.span, below.midpoint) == pytest.approx((1.0, 1.6, -0.6))
    assert math.isnan(Curve((0.0, 0.5, 1.0), (1.0, math.nan, 2.0)).barrier)
    path = Walked((0.0, 0.5, 1.0), (0.0, 0.0, 0.0), (0.9, 0.5, 0.7))
    assert path.accuracy_barrier == pytest.approx(0.3)


def test_interpolation_is_in_float32_or_better() -> None:
    a = {"w": torch.tensor([1.0, 3.0], dtype=torch.float16), "n": torch.arange(3)}
    b = {"w": torch.tensor([2.0, 1.0], dtype=torch.float16), "n": torch.arange(3)}
    third = interpolate(a, b, 1 / 3)
    assert third["w"].dtype == torch.float32
    assert third["w"].tolist() == pytest.approx([4 / 3, 7 / 3], rel=1e-6)
    assert torch.equal(third["n"], a["n"])
    assert torch.equal(interpolate(a, b, 0)["w"], a["w"].float())
    assert torch.equal(interpolate(a, b, 1)["w"], b["w"].float())
    assert interpolate({"w": a["w"].double()}, {"w": b["w"]}, 0.5)["w"].dtype == torch.float64


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"w": None}, '"w" is in the first model and not in the second model'),
        ({"more": torch.zeros(1)}, '"more" is in the second model and not in the first model'),
        ({"w": torch.zeros(3)}, r'"w" is \[2\] in the first model and \[3\] in the second model'),
        ({"n": torch.ones(2, dtype=torch.int64)}, '"n" is not floating-point and differs'),
        (
            {"w": torch.tensor([1.0, math.nan])},
            '"w" of the second model has values that are not finite',
        ),
        (
            {"w": torch.tensor([1.0, math.inf])},
            '"w" of the second model has values that are not finite',
        ),
    ],
)
def test_what_no_line_joins(change: dict[str, Any], says: str) -> None:
    a = {"w": torch.zeros(2), "n": torch.zeros(2, dtype=torch.int64)}
    b = {n: x for n, x in {**a, **change}.items() if x is not None}
    with pytest.raises(PathError, match=says):
        interpolate(a, b, 0.5)
    require_interpolable(a, a)


def test_a_score_is_the_mean_loss_and_leaves_the_module_alone() -> None:
    model, other = build("vit"), build("vit", seed=1)
    examples = label_examples(other)
    before = {n: x.clone() for n, x in model.state_dict().items()}
    scores = score(model, other.state_dict(), examples, batch_size=7)
    inputs, labels = examples.batch(np.arange(len(examples)))
    with torch.no_grad():
        assert scores.loss == pytest.approx(
            float(F.cross_entropy(other(**inputs).logits, labels)), rel=1e-5
        )
    assert scores.accuracy == 1
    assert score(model, before, examples).accuracy < 0.9
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert not model.training


def test_a_tied_model_is_used_untied_where_its_state_is() -> None:
    """Folding unties the head of GPT-2: the same function, in a module whose own tables are one."""
    model = build("gpt2")
    examples = readings(spoken(model))
    folded = fold_norms(spec_of(model), model.state_dict())[1]
    assert not torch.equal(folded["lm_head.weight"], folded["transformer.wte.weight"])
    plain = score(model, model.state_dict(), examples)
    assert score(model, folded, examples).loss == pytest.approx(plain.loss, rel=1e-5)
    wrong = {**folded, "lm_head.weight": folded["transformer.wte.weight"]}
    assert abs(score(model, wrong, examples).loss - plain.loss) > 0.1


@pytest.mark.parametrize("true", [0.3, 1.0, 4.0])
def test_the_temperature_that_was_used(true: float) -> None:
    logits = 3 * torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.multinomial(
        (logits / true).softmax(1), 1, generator=torch.Generator().manual_seed(1)
    )[:, 0]
    temperature = _fit_temperature([(logits[:7000], labels[:7000]), (logits[7000:], labels[7000:])])
    assert temperature == pytest.approx(true, rel=0.05)

    def loss(t: float) -> float:
        return float(F.cross_entropy(logits / t, labels))

    assert loss(temperature) <= min(loss(0.98 * temperature), loss(1.02 * temperature))


def test_temperatures_of_odd_logits() -> None:
    right = torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    assert (
        _fit_temperature([(right, torch.tensor([0, 1]))]) <= 0.02
    )  # always right: as cold as it gets
    assert _fit_temperature([(right, torch.tensor([1, 0]))]) >= 500
    assert _fit_temperature([(torch.zeros(3, 2), torch.tensor([0, 1, 0]))]) > 0
    assert _fit_temperature([(right * math.nan, torch.tensor([0, 1]))]) == 1


@pytest.mark.parametrize("name", ["gpt2-untied", "llama", "vit", "bert-classifier"])
def test_a_planted_element_makes_a_barrier_and_its_inverse_undoes_it(name: str) -> None:
    model = build(name)
    examples = label_examples(model) if hasattr(model, "classifier") else readings(spoken(model))
    spec, a = fold_norms(spec_of(model), model.state_dict())
    g = element(spec, 3)
    b = apply(g, a)
    plain = measure_path(model, a, b, examples, points=5)
    assert plain.losses[0] == pytest.approx(plain.losses[-1], abs=1e-4)
    assert plain.barrier > 0.1
    assert plain.accuracy_barrier > 0.02
    undone = measure_path(model, a, apply(~g, b), examples, points=5)
    assert abs(undone.barrier) < 1e-4
    assert undone.accuracy_barrier == pytest.approx(0, abs=0.01)


def test_the_path_has_its_midpoint_and_temperatures() -> None:
    model, other = build("vit"), build("vit", seed=1)
    examples = label_examples(model)
    recorded: list[tuple[int, int, str]] = []
    path = measure_path(
        model,
        model.state_dict(),
        other.state_dict(),
        examples,
        points=4,
        progress=lambda *a: recorded.append(a),
        calibration=examples,
    )
    assert path.ts == pytest.approx((0, 1 / 3, 0.5, 2 / 3, 1))
    assert [s[0] for s in recorded] == [0, 1, 2, 3, 4]
    assert path.calibrated is not None
    assert all(
        cool <= warm + 1e-6 for cool, warm in zip(path.calibrated.losses, path.losses, strict=True)
    )  # fitted on the same: it can only help
    assert len(path.temperatures) == 5
    with pytest.raises(PathError, match="points must be >= 3, got 2"):
        measure_path(model, model.state_dict(), other.state_dict(), examples, points=2)


def test_the_plane_goes_through_its_corners() -> None:
    model = build("vit").float()
    examples = label_examples(build("vit"))
    states = [build("vit", seed=s).float().state_dict() for s in range(3)]
    plane = measure_plane(
        model, dict(zip("ABC", states, strict=True)), examples, points=3, margin=0.0
    )
    (ax, ay), (bx, by), (cx, cy) = plane.points.values()
    assert (bx, by, ay) == (0, 0, 0)

    def far(a: int, b: int) -> float:
        return math.sqrt(
            sum(float((states[a][n] - states[b][n]).double().square().sum()) for n in states[0])
        )

    assert math.hypot(ax - bx, ay - by) == pytest.approx(far(0, 1), rel=1e-5)
    assert math.hypot(cx - bx, cy - by) == pytest.approx(far(2, 1), rel=1e-5)
    assert math.hypot(cx - ax, cy - ay) == pytest.approx(far(2, 0), rel=1e-5)
    assert plane.losses[0][0] == pytest.approx(score(model, states[1], examples).loss, rel=1e-4)
    assert plane.losses[0][-1] == pytest.approx(score(model, states[0], examples).loss, rel=1e-4)
    middle = interpolate(states[0], states[1], 0.5)
    assert plane.losses[0][1] == pytest.approx(score(model, middle, examples).loss, rel=1e-4)
    with pytest.raises(PathError, match="lie on one line"):
        measure_plane(model, {"A": states[0], "B": states[1], "C": middle}, examples, points=3)


def test_results_of_a_planted_pair() -> None:
    a, b = build("gpt2").float(), build("gpt2").float()
    g = element(spec_of(b), 4)  # in the group of the unmatched model, so that B is a plain GPT-2
    b.load_state_dict(apply(g, b.state_dict()))
    examples = readings(spoken(a))
    results = connect(
        a, b, examples, aligner=lambda spec, *_: g.to(spec), label="moved", points=5, grid=3
    )
    rows = {
        row[0]: dict(zip(results.tables[0].columns, row, strict=True))
        for row in results.tables[0].rows
    }
    assert list(rows) == [UNALIGNED, "moved"]
    assert rows[UNALIGNED]["barrier"] > 0.1
    assert rows[UNALIGNED]["of unaligned"] == 1
    assert abs(rows["moved"]["barrier"]) < 1e-3
    assert rows["moved"]["rotation symmetry: range"] < 1e-3
    assert {f.id: f.holds for f in results.findings if f.holds is not None} == {
        "ends/moved": True,
    }
    assert results.facts["examples"] == 20
    assert results.facts["examples for temperatures"] == 4
    assert results.facts["notes"] == [
        "norms are folded, and lm_head.weight untied, before alignment: the same function"
    ]
    assert all("lm_head.weight untied" in f.sentence for f in results.findings if f.holds)
    assert results.unchecked == (
        "the plane through A, B and the moved A: the three models lie on one line",
    )
    assert "The loss on the way from A to B" in page(results)
    headline = "Alignment removes the barrier: A and B can be averaged"
    assert (results.headline.text, results.headline.tone) == (headline, "good")


@pytest.mark.parametrize("label", ["folded", "matched"])
def test_both_ends_stay_when_norms_are_folded_and_when_a_is_aligned(label: str) -> None:
    a, b = build("gpt2").float(), build("gpt2", seed=1).float()
    aligners: dict[str, Aligner] = {
        "folded": lambda spec, *_: identity(spec),
        "matched": align_by_weights,
    }
    examples = readings(spoken(a))
    results = connect(
        a, b, examples, aligner=aligners[label], label=label, points=3, calibrate=False
    )
    (ends,) = (f for f in results.findings if f.id == f"ends/{label}")
    assert ends.holds
    assert ends.value is not None
    assert ends.value < 1e-4
    assert "norms are folded" in ends.sentence
    plain = [score(m, m.state_dict(), examples).loss for m in (a, b)]
    for losses in results.figures[0].data["y"].values():
        assert [losses[0], losses[-1]] == pytest.approx(plain, abs=1e-4)


@pytest.mark.parametrize(
    ("before", "after", "tone", "text"),
    [
        (0.04, 0.0, "good", "can be averaged without alignment"),
        (8.0, 0.04, "good", "Alignment removes the barrier: A and B can be averaged"),
        (8.0, 0.79, "mixed", "lowers the barrier between A and B, and does not remove it"),
        (8.0, 9.0, "bad", "does not lower the barrier"),
    ],
)
def test_only_a_negligible_barrier_is_removed(
    before: float, after: float, tone: str, text: str
) -> None:
    ends = (0.0, 0.5, 1.0)
    paths = {
        name: Walked(ends, (0.0, barrier, 0.0), ())
        for name, barrier in ((UNALIGNED, before), ("matched", after))
    }
    claim = _conclude(paths, "matched")
    assert claim.tone == tone
    assert text in claim.text


def test_the_plane_of_a_pair() -> None:
    a, b = build("gpt2").float(), build("gpt2", seed=1).float()
    g = element(spec_of(b), 4)
    results = connect(
        a,
        b,
        readings(spoken(a)),
        aligner=lambda spec, *_: g.to(spec),
        label="moved",
        points=3,
        grid=4,
    )
    figure = results.figures[-1]
    assert (figure.kind, len(figure.data["values"]), list(figure.data["points"])) == (
        "plane",
        4,
        ["A", "B", "A, moved"],
    )
    assert figure.data["joined"] == [["B", "A"], ["B", "A, moved"]]
    html = page(results)
    assert "The loss on the plane through A, B and the moved A" in html
    assert ">A, moved<" in html


def test_an_element_that_is_not_a_symmetry_is_reported() -> None:
    a, b = build("gpt2").float(), build("gpt2", seed=1).float()
    wrong = element(spec_of(a), 4).only("stream")

    def mover(spec: Any, state_a: dict[str, torch.Tensor], state_b: Any) -> Any:
        state_a["transformer.h.0.mlp.c_fc.weight"] = (
            state_a["transformer.h.0.mlp.c_fc.weight"] * 1.3
        )  # behind the element's back
        return wrong.to(spec)

    results = connect(
        a, b, readings(spoken(a)), aligner=mover, label="moved", points=3, calibrate=False
    )
    assert [f.id for f in results.failed] == ["ends/moved"]
    assert results.headline.tone == "bad"


# the command


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two GPT-2s that are one, with a tokenizer, a text that they say, and the element between
    them.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    a, b = build("gpt2").float(), build("gpt2").float()
    g = element(spec_of(a), 4)
    b.load_state_dict(apply(g, b.state_dict()))
    a.save_pretrained(tmp_path / "a")
    b.save_pretrained(tmp_path / "b")
    save_element(g, tmp_path / "g.safetensors")
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "a" / "tokenizer.json"))
    (tmp_path / "said.txt").write_text(
        "\n".join(" ".join(WORDS[i] for i in row) for row in spoken(a).tolist())
    )
    return tmp_path


def run(pair: Path, *more: str) -> int:
    return main(
        [
            "barrier",
            str(pair / "a"),
            str(pair / "b"),
            "--data",
            str(pair / "said.txt"),
            "--length",
            "12",
            "--points",
            "3",
            *more,
        ]
    )


def test_the_command_with_an_element(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = pair / "r.json"
    assert (
        run(
            pair,
            "-g",
            str(pair / "g.safetensors"),
            "--json",
            str(out),
            "--report",
            str(pair / "page.html"),
        )
        == 0
    )
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "GPT2LMHeadModel: the loss on the straight line from A to B"
    assert lines[2].split()[:2] == ["path", "barrier"]
    assert lines[3].startswith("unaligned ")
    assert (
        "the loss, inside the path, over the straight line between the losses of the two ends, "
        "in nats" in captured.out
    )
    assert "holds  the ends of the path, moved, compute what A and B compute" in captured.out
    assert "regauge: barrier 2/6: path unaligned: t = 0.5\n" in captured.err
    results = load_results(out)
    moved = results.facts["paths"]["moved"]
    assert moved["loss"] == pytest.approx([moved["loss"][0]] * 3, abs=1e-3)
    stand = results.facts["paths"]["as they stand"]["loss"]
    assert stand[1] > stand[0] + 0.1
    assert results.facts["A"] == str(pair / "a")
    assert "The loss on the way from A to B" in (pair / "page.html").read_text()


def test_the_command_finds_the_element_itself(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(pair, "--json", "-", "--no-calibrate") == 0
    report = json.loads(capsys.readouterr().out)["facts"]["paths"]
    assert list(report) == ["as they stand", "matched"]
    assert report["matched"]["loss"] == pytest.approx(
        [report["as they stand"]["loss"][0]] * 3, abs=1e-3
    )
    assert "calibrated" not in report["matched"]


def test_the_command_as_they_stand(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(pair, "--align", "none", "--no-calibrate", "--samples", "8", "--json", "-") == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["facts"]["paths"]) == ["as they stand"]
    assert report["facts"]["examples"] == 8
    assert report["unchecked"]


def test_what_the_command_refuses(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def says(code: int, text: str, *arguments: str) -> None:
        assert main(["barrier", *arguments]) == code
        output = capsys.readouterr().err
        assert text in output
        assert ("loading" in output) == (text in loaded), (
            "what is wrong with data is said before the weights are loaded"
        )

    a, b, text = str(pair / "a"), str(pair / "b"), str(pair / "said.txt")
    loaded = ("must have the same tensors and shapes", '"transformer.ln_f.weight" of')
    build("llama").float().save_pretrained(tmp_path / "llama")
    build("gpt2-untied").float().save_pretrained(tmp_path / "untied")
    says(1, "must have the same tensors and shapes", a, str(tmp_path / "llama"), "--data", text)
    says(1, "nowhere.txt does not exist", a, b, "--data", "nowhere.txt")
    says(2, "--data is required", a, b)
    says(1, "needs a tokenizer, and its folder contains none", b, a, "--data", text)
    says(2, "must be NAME=COLUMN, got", a, b, "--data", text, "--field", "text")
    says(2, "must be comma-separated numbers", a, b, "--data", text, "--mean", "x")
    (tmp_path / "t.tsv").write_text("sentence\tlabel\nw3 w4\t1\n")
    says(
        1,
        "needs the field 'text', which t.tsv does not have",
        a,
        b,
        "--data",
        str(tmp_path / "t.tsv"),
    )
    says(
        1,
        "fewer than one window of 12",
        a,
        b,
        "--data",
        str(tmp_path / "t.tsv"),
        "--field",
        "text=sentence",
        "--length",
        "12",
    )
    broken = build("gpt2").float()
    with torch.no_grad():
        broken.transformer.ln_f.weight[0] = math.nan
    broken.save_pretrained(tmp_path / "broken")
    says(1, '"transformer.ln_f.weight" of', a, str(tmp_path / "broken"), "--data", text)


def test_tasks_are_read_off_the_model(tmp_path: Path) -> None:
    images = Data(
        "d", {"image": np.zeros((4, 8, 8, 3), np.uint8), "label": np.array([0, 1, 2, 4])}, ""
    )
    vit = build("vit")
    with pytest.raises(DataError, match="the normalization of the model's images is unknown"):
        task_of(vit, images)
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.5, 0.5]})
    )
    task, reader = task_of(vit, images, beside=tmp_path)
    assert (task["mean"], task["classes"], task["size"], reader) == ([0.1, 0.2, 0.3], 5, 8, None)
    inputs, labels = prepare(task, images).batch(np.arange(4))
    assert inputs["pixel_values"].shape == (4, 3, 8, 8)
    assert labels.tolist() == [0, 1, 2, 4]
    with pytest.raises(DataError, match="must be between -1 and 4, got 0 to 5"):
        task_of(
            vit,
            Data("d", {"image": images["image"], "label": np.array([0, 5, 2, 4])}, ""),
            beside=tmp_path,
        )
    with pytest.raises(DataError, match="needs the field 'label'"):
        task_of(vit, Data("d", {"image": images["image"]}, ""), beside=tmp_path)
    with pytest.raises(DataError, match="does not classify images"):
        task_of(build("vit-base"), images, mean=[0.5], std=[0.5])
    with pytest.raises(DataError, match="no loss is defined for BertModel"):
        task_of(build("bert-base"), images, tokenizer="x")


def test_what_is_not_to_be_measured_needs_no_labels(tmp_path: Path) -> None:
    images = Data("d", {"image": np.zeros((4, 8, 8, 3), np.uint8)}, "")
    task, _ = task_of(build("vit-base"), images, mean=[0.5], std=[0.5], labelled=False)
    assert prepare(task, images).batch(np.arange(2))[0]["pixel_values"].shape == (2, 3, 8, 8)
    texts = Data("d", {"text": ["w3 w4", "w5"]}, "")
    task, reader = task_of(build("bert-base"), texts, tokenizer=words(tmp_path), labelled=False)
    inputs = prepare(task, texts, reader).batch(np.arange(2))[0]
    assert inputs["input_ids"].tolist() == [[1, 3, 4, 2], [1, 5, 2, 0]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]


def test_a_masked_model_predicts_what_is_hidden(tmp_path: Path) -> None:
    data = Data("d", {"text": [" ".join(WORDS[3 + i * i % 26] for i in range(400))]}, "")
    model = build("bert")
    task, reader = task_of(model, data, tokenizer=words(tmp_path), length=12)
    prepared = prepare(task, data, reader)
    inputs, labels = prepared.batch(np.arange(len(prepared)))
    hidden = labels != -100
    assert (len(prepared), prepared.tokens) == (40, True)
    assert (inputs["input_ids"][:, 0] == 1).all()
    assert (inputs["input_ids"][:, -1] == 2).all()
    assert (inputs["input_ids"][hidden] == 29).all()
    assert not (inputs["input_ids"][~hidden] == 29).any()
    assert hidden.any(1).all()
    assert 0.1 < hidden.double().mean() < 0.2
    assert torch.equal(prepare(task, data, reader).batch(np.arange(40))[1], labels)
    with torch.no_grad():
        logits = model(**inputs).logits
    expected = F.cross_entropy(logits[hidden], labels[hidden])
    torch.testing.assert_close(loss_of(prepared, logits, labels), expected)
    assert score(model, model.state_dict(), prepared).loss == pytest.approx(
        float(expected), rel=1e-5
    )
    plain = tmp_path / "plain" / "tokenizer.json"
    plain.parent.mkdir()
    plain.write_text((tmp_path / "tokenizer.json").read_text().replace("[MASK]", "[HIDE]"))
    with pytest.raises(DataError, match="has no mask"):
        prepare(task, data, plain)


def test_what_is_cut_keeps_the_mark_of_its_end(tmp_path: Path) -> None:
    data = Data("d", {"text": ["w3 w4 w5 w6", "w7", "w8 w9"], "label": np.array([0, 1, 0])}, "")
    task, reader = task_of(build("bert-classifier"), data, tokenizer=words(tmp_path), length=4)
    assert prepare(task, data, reader).batch(np.arange(3))[0]["input_ids"].tolist() == [
        [1, 3, 4, 2],
        [1, 7, 2, 0],
        [1, 8, 9, 2],
    ]
    plain = prepare({**task, "special": False}, data, reader).batch(np.arange(3))[0]["input_ids"]
    assert plain.tolist() == [[3, 4, 5, 6], [7, 0, 0, 0], [8, 9, 0, 0]]
    unmasked = tmp_path / "plain.json"  # a tokenizer without a mask has an end too
    unmasked.write_text((tmp_path / "tokenizer.json").read_text().replace("[MASK]", "[HIDE]"))
    assert prepare(task, data, unmasked).batch(np.arange(1))[0]["input_ids"].tolist() == [
        [1, 3, 4, 2]
    ]


def test_places_behind_the_padding_token_are_counted(tmp_path: Path) -> None:
    """RoBERTa's first place is that behind its padding token: a text as long as its table would
    reach over the end.
    """
    data = Data("d", {"text": [" ".join(WORDS[3 + i % 20] for i in range(100))]}, "")
    for name, offset in (("roberta", True), ("bert", False)):
        model = build(name)
        rows = model.config.max_position_embeddings
        task, reader = task_of(model, data, tokenizer=words(tmp_path), length=1000)
        assert task["length"] == rows - (model.config.pad_token_id + 1 if offset else 0)
        with torch.no_grad():
            model(**prepare(task, data, reader).batch(np.arange(1))[0])


def test_several_answers_to_each_example_have_no_path() -> None:
    model = build("vit")
    inputs = PICOS["vit"].inputs["pixel_values"]
    several = Examples(
        2,
        5,
        lambda rows: ({"pixel_values": inputs[rows]}, torch.ones(len(rows), 5)),
        multi_label=True,
    )
    with pytest.raises(PathError, match="one label each"):
        score(model, model.state_dict(), several)
    assert score(model, model.state_dict(), label_examples(model, 4)).accuracy == 1

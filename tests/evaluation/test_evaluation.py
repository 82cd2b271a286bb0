"""Evaluation of several models: names, tasks, changes, keys, and the result as text and page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import regauge
import support.federations as fed
from regauge.data.evaluate import Guess, Score, evaluate_model
from regauge.data.tasks import Examples
from regauge.errors import DataError, LockError, UnknownModelError, WrongKeyError
from regauge.evaluation.models import evaluate_modules, evaluate_sources
from regauge.evaluation.report import Evaluation, is_worse
from regauge.results.findings import from_json
from support.texts import WORDS, words

DIGITS = regauge.DataSource("digits", samples=64, mean=(0.3,), std=(0.38,))


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "vit"
    fed.vit(num_labels=10).save_pretrained(folder)  # type: ignore[operator]
    return folder


def score(correct: int, n: int = 100, tokens: bool = False) -> Score:
    right = np.arange(n) < correct
    guess = Guess(2.0, 0.3, np.log(10), 0.1)
    return Score(np.where(right, 0.1, 3.0), right.astype(float), np.ones(n), guess, tokens)


def test_one_evaluation_for_paths_and_modules(vit: Path) -> None:
    live = regauge.load_model(vit).train()
    evaluation = regauge.evaluate([vit, live], DIGITS)
    assert list(evaluation.scores) == ["vit", "ViTForImageClassification"]
    examples = DIGITS.read(live, vit)[0]
    chosen = np.sort(np.random.default_rng(0).permutation(len(examples))[:64])
    expected = evaluate_model(live.eval(), examples.only(chosen), 32)
    for found in evaluation.scores.values():
        assert found.to_dict() == pytest.approx(expected)
    assert evaluate_sources(vit, DIGITS).scores["vit"].loss == pytest.approx(expected["loss"])


def test_modules_are_not_changed(vit: Path) -> None:
    live = regauge.load_model(vit).train()
    live.get_submodule("vit.embeddings").eval()
    flags = {name: m.training for name, m in live.named_modules()}
    regauge.evaluate(live, fed.bars(8))
    assert {name: m.training for name, m in live.named_modules()} == flags
    assert len(set(flags.values())) == 2


def test_names_differ_and_may_be_chosen(vit: Path, tmp_path: Path) -> None:
    other = tmp_path / "vit"
    regauge.load_model(vit).save_pretrained(other)  # type: ignore[operator]
    examples = fed.bars(8)
    names = list(regauge.evaluate([vit, other, other], examples).scores)
    assert names == [str(vit), str(other), f"{other} (2)"]
    assert list(regauge.evaluate({"before": vit, "after": other}, examples).scores) == [
        "before",
        "after",
    ]


def test_a_result_stands_for_its_model(vit: Path) -> None:
    model = fed.vit()
    trained = regauge.federated.run(model, fed.bars(), clients=2, rounds=1, test=fed.bars(16))
    evaluation = regauge.evaluate({"before": model, "after": trained}, fed.bars(16))
    assert evaluation.scores["after"].accuracy == trained.history[-1].measures["accuracy"]


@pytest.mark.parametrize("kind", ["causal", "masked", "classes"])
def test_texts(kind: str, tmp_path: Path) -> None:
    """All tasks of texts, by the names of their files; tokens have a perplexity."""
    small: dict[str, Any] = {"vocab_size": 30, "pad_token_id": 0, "max_position_embeddings": 32}
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertConfig(**small, **size, intermediate_size=16, num_labels=2)
    gpt2 = transformers.GPT2Config(vocab_size=30, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    model: Any = {
        "causal": lambda: transformers.GPT2LMHeadModel(gpt2),
        "masked": lambda: transformers.BertForMaskedLM(bert),
        "classes": lambda: transformers.BertForSequenceClassification(bert),
    }[kind]()
    model.save_pretrained(tmp_path / "model")
    words(tmp_path / "model")
    generator = np.random.default_rng(0)
    lines = [" ".join(generator.choice(WORDS[3:29], 16)) for _ in range(12)]
    if kind == "classes":
        data = tmp_path / "reviews.csv"
        data.write_text("text,label\n" + "".join(f"{t},{i % 2}\n" for i, t in enumerate(lines)))
    else:
        data = tmp_path / "book.txt"
        data.write_text(" ".join(lines))
    source = regauge.DataSource(str(data), length=16)
    evaluation = regauge.evaluate(tmp_path / "model", source)
    found = evaluation.scores["model"]
    assert evaluation.metric == ("accuracy" if kind == "classes" else "perplexity")
    assert (found.perplexity is None) == (kind == "classes")
    assert found.guess.uniform_loss == pytest.approx(np.log(2 if kind == "classes" else 30))
    assert len(found) >= 10


def test_a_locked_model_needs_its_key(vit: Path, tmp_path: Path) -> None:
    key, other = regauge.generate_key(), regauge.generate_key()
    regauge.lock(vit, key).save(tmp_path / "locked")
    locked = tmp_path / "locked"
    plain = regauge.evaluate(vit, DIGITS).scores["vit"]
    evaluation = regauge.evaluate([vit, locked], DIGITS, key=key, control=True)
    assert list(evaluation.scores) == ["vit", "locked", "locked, without its key"]
    assert evaluation.scores["locked"].loss == pytest.approx(plain.loss, abs=1e-5)
    without = evaluation.scores["locked, without its key"]
    assert abs(without.loss - plain.loss) > 1e-4
    (note,) = regauge.evaluate(locked, DIGITS).notes
    assert f"locked is locked by the key {key.id} and was evaluated without it" in note
    with pytest.raises(WrongKeyError):
        regauge.evaluate(locked, DIGITS, key=other)
    with pytest.raises(LockError, match="none of vit is locked, and a key was given"):
        regauge.evaluate(vit, DIGITS, key=key)


def test_a_live_locked_model_stays_locked(vit: Path, tmp_path: Path) -> None:
    key = regauge.generate_key()
    regauge.lock(vit, key).save(tmp_path / "locked")
    live = regauge.load_model(tmp_path / "locked")
    before = {n: t.clone() for n, t in live.state_dict().items()}
    found = regauge.evaluate(live, DIGITS, key=key)
    plain = regauge.evaluate(vit, DIGITS).scores["vit"]
    (one,) = found.scores.values()
    assert one.loss == pytest.approx(plain.loss, abs=1e-5)
    assert all(torch.equal(t, before[n]) for n, t in live.state_dict().items())
    (unkeyed,) = regauge.evaluate(live, DIGITS).scores.values()
    assert abs(unkeyed.loss - plain.loss) > 1e-4
    authorized = regauge.authorize(live, key)
    (again,) = regauge.evaluate(authorized, DIGITS).scores.values()
    assert again.loss == pytest.approx(plain.loss, abs=1e-5)


def test_few_examples_that_all_change_alike() -> None:
    """Their residuals are zero; one example has none."""

    def of(values: list[float]) -> Score:
        correct = np.array(values)
        return Score(1 - correct, correct, np.ones(len(values)), score(60).guess, False)

    assert not is_worse(of([0.0]), of([1.0])), "one example"
    assert is_worse(of([0.0] * 10), of([1.0] * 10))
    change, error = of([0.0] * 10).accuracy_change(of([1.0] * 10))
    assert (change, error) == (-1, pytest.approx(0.0935, abs=1e-4))
    assert of([1.0] * 10).accuracy_change(of([1.0] * 10)) == (0, 0)


def test_worse_is_significant_and_by_the_metric_of_the_task() -> None:
    assert is_worse(score(60), score(80))
    assert not is_worse(score(79), score(80)), "one example of a hundred is chance"
    assert not is_worse(score(80), score(60))
    broken = score(80, tokens=True)
    infinite = Score(np.full(100, np.nan), broken.correct, broken.labels, broken.guess, True)
    assert is_worse(infinite, broken), "nan is worse"
    assert not is_worse(broken, infinite)
    right = score(80)
    undefined = Score(np.full(100, np.nan), right.correct, right.labels, right.guess, False)
    assert is_worse(undefined, right), "of classes too"
    evaluation = Evaluation({"start": score(80), "end": score(60), "noise": score(30)})
    assert evaluation.verdicts == (
        "noise is no better than a guess",
        "end is worse than start",
        "noise is worse than start",
    )
    assert evaluation.best == "start"
    headline = evaluation.results.headline
    assert headline.text == "start has the highest accuracy of 3 models"
    assert "end is worse than start" in headline.sentence


def test_the_result_as_text_json_and_page(tmp_path: Path) -> None:
    evaluation = Evaluation({"start": score(80), "end": score(60)}, {"data": "images"})
    assert str(evaluation).splitlines() == [
        "images: 100 examples (± standard error)",
        "",
        "model                                loss        accuracy  change of accuracy",
        "start                     0.6800 ± 0.1166  80.0 % ± 4.0 %",
        "end                       1.2600 ± 0.1428  60.0 % ± 4.9 %  -20.0 ± 4.0 points",
        "guess: label frequencies           2.0000          30.0 %",
        "guess: uniform                     2.3026          10.0 %",
        "",
        "end is worse than start",
    ]
    assert repr(evaluation) == "<evaluation, accuracy: start 80.0 %, end 60.0 %>"
    again = from_json(evaluation.to_json())
    (table,) = again.tables
    assert table.columns[-2:] == ("change of accuracy", "change error")
    assert table.rows[1][0] == "end"
    assert table.rows[1][3:6] == (0.6, pytest.approx(0.04924, abs=1e-5), pytest.approx(-0.2))
    assert [(f.value, f.floor) for f in again.findings] == [(0.8, 0.3), (0.6, 0.3)]
    evaluation.to_html(tmp_path / "page.html")
    assert "accuracy 60.0 % ± 4.9 %; a guess has 30.0 %" in (tmp_path / "page.html").read_text()
    assert "start" in evaluation._repr_html_()


def test_different_labels_are_not_compared() -> None:
    evaluation = evaluate_modules({"one": fed.vit()}, fed.bars(8))
    other = evaluate_modules({"two": fed.vit()}, fed.bars(12))
    both = Evaluation({**evaluation.scores, **other.scores})
    assert not both.is_worse("two")
    assert both.results.tables[0].rows[1][-2:] == (None, None)


def test_bad_input(vit: Path) -> None:
    with pytest.raises(UnknownModelError, match="models must not be empty"):
        regauge.evaluate([], DIGITS)
    with pytest.raises(UnknownModelError, match="got a state dict"):
        regauge.evaluate(fed.vit().state_dict(), DIGITS)
    with pytest.raises(UnknownModelError, match="got a state dict"):
        regauge.evaluate([vit, fed.vit().state_dict()], DIGITS)
    with pytest.raises(DataError, match="batch_size must be >= 1, got 0"):
        regauge.evaluate(vit, DIGITS, batch_size=0)
    with pytest.raises(DataError, match="data must be a path"):
        regauge.evaluate(vit, 3)  # type: ignore[arg-type]
    reads = Examples(2, 4, lambda rows: ({"pixel_values": torch.zeros(len(rows), 1, 8, 8)}, rows))
    with pytest.raises(UnknownModelError, match="a model must be a path"):
        regauge.evaluate([3], reads)  # type: ignore[list-item]

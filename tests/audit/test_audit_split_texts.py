"""What a server of split learning reads of texts: all of it where nothing defends, nothing where
all is noise; and the command says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from regauge.audit.split_audit import AuditError, SplitCase, audit_texts
from regauge.audit.text_scores import rouge_l, score_texts
from regauge.cli import main
from regauge.data.tasks import Examples
from regauge.results.findings import load_results
from regauge.split import OptimizerConfig
from regauge.split.client.train import Run

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 90,
    "max_position_embeddings": 16,
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2}


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZES, **STILL, num_labels=2)
    )


def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
        "vocab_size": 90,
        "initializer_range": 0.2,
    }
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


def texts(count: int, seed: int, causal: bool = False) -> Examples:
    """Random tokens, so that no guess is better than another; the class is in the first of them.
    Some are shorter.
    """
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(1, 90, (count, 10)))
    lengths = torch.from_numpy(rng.integers(8, 11, count))

    def batch(rows: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        mask = (torch.arange(10)[None] < lengths[rows][:, None]).long()
        inputs = {"input_ids": ids[rows] * mask, "attention_mask": mask}
        return inputs, torch.where(mask.bool(), ids[rows], -100) if causal else (
            ids[rows, 0] > 45
        ).long()

    return Examples(count, 90 if causal else 2, batch, causal=causal)


def case(model: Any, causal: bool = False) -> SplitCase:
    training = OptimizerConfig("adamw", 1e-3, schedule="constant")
    parts = [texts(n, seed, causal) for seed, n in enumerate((32, 60, 12))]
    return SplitCase(model, *parts, training=training, run=Run(4, 8), attacked=12, name="texts")


def leak_value(found: Any, name: str) -> float:
    value = next(f.value for f in found.findings if f.id == f"texts/{name}")
    assert value is not None
    return float(value)


def test_texts_are_read_under_shuffles_and_not_under_noise() -> None:
    results = audit_texts(case(bert()), ("rows", "noise=20", "bottleneck=6"))
    for combination in ("none", "rows"):
        assert leak_value(results, f"{combination}/vocabulary") > 0.95, combination
        assert leak_value(results, f"{combination}/regression") > 0.6, combination
    assert leak_value(results, "noise=20/vocabulary") < 0.25
    assert leak_value(results, "noise=20/regression") < 0.25
    assert leak_value(results, "bottleneck=6/vocabulary") > 0.6, (
        "an attacker sees which channels are sent"
    )
    assert all(f.floor is not None and f.floor < 0.2 for f in results.findings)
    assert results.headline.text.startswith(
        "Texts are revealed under no defence, rows, bottleneck=6: ROUGE-L"
    )
    assert results.headline.tone == "bad"
    rows = {row[0]: row for row in results.tables[0].rows}
    assert rows["rows"][2] is not None, "gradients reveal the labels"


def test_a_causal_model_tells_the_order_by_its_mask() -> None:
    results = audit_texts(case(gpt2(), causal=True), ("rows",))
    assert leak_value(results, "rows/vocabulary") > 0.95
    assert leak_value(results, "rows/regression") > 0.5
    assert "labels" not in results.tables[0].columns


def test_a_text_audit_fails_above_its_threshold() -> None:
    results = audit_texts(case(bert()), ("rows", "noise=20"), fail_above=0.5)
    assert {f.id for f in results.failed} == {"texts/rows/vocabulary", "texts/rows/regression"}


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(AuditError, match="got LowPass, which acts on images"):
        audit_texts(case(bert()), ("low-pass=0.1",))
    with pytest.raises(AuditError, match="it moves tokens between texts"):
        audit_texts(case(bert()), ("batch-shuffle=0.5",))
    few = SplitCase(bert(), texts(8, 0), texts(5, 1), texts(8, 2))
    with pytest.raises(AuditError, match="must have >= 20 texts, got 5"):
        audit_texts(few, ("rows",))


def test_scores_of_texts() -> None:
    assert rouge_l([1, 2, 3], [1, 9, 3]) == pytest.approx(2 / 3)
    scores = score_texts([[4, 5], [1, 2, 3]], [[1, 2, 3], [5, 4]])
    assert scores["exact"] == [1.0, 0.0]
    assert scores["words"] == [1.0, 1.0]
    assert scores["in place"] == [1.0, 0.0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, **{f"w{i}": i for i in range(1, 90)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    bert().save_pretrained(tmp_path / "bert")
    tokenizer.save(str(tmp_path / "bert" / "tokenizer.json"))
    rng = np.random.default_rng(0)
    lines = [
        f"{int(i % 2)}\t{' '.join(f'w{k}' for k in rng.integers(2, 90, 10))}" for i in range(120)
    ]
    (tmp_path / "texts.tsv").write_text("\n".join(["label\ttext", *lines]) + "\n")
    return tmp_path


def test_the_command_reads_texts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "r.json"
    command = [
        "audit",
        "split",
        str(folder / "bert"),
        "--data",
        str(folder / "texts.tsv"),
        "--epochs",
        "1",
        "--batch-size",
        "20",
        "--attacked",
        "6",
    ]
    assert (
        main(
            [
                *command,
                "--defence",
                "rows",
                "--json",
                str(out),
                "--report",
                str(folder / "page.html"),
            ]
        )
        == 0
    )
    captured = capsys.readouterr()
    assert "Texts are revealed under no defence, rows" in captured.out
    assert "60 client texts, 36 attacker texts, 24 test texts; 6 to attack" in captured.err
    assert leaked_of(out, "texts/rows/vocabulary") > 0.9
    assert "Texts are revealed under no defence, rows" in (folder / "page.html").read_text()
    assert json.loads(out.read_text())["facts"]["client's texts"] == 60
    assert main([*command, "--defence", "rows", "--attacks", "decoder"]) == 2
    assert "use vocabulary, regression; or all" in capsys.readouterr().err
    assert main([*command, "--defence", "low-pass=0.1"]) == 1
    assert "acts on images" in capsys.readouterr().err


def leaked_of(path: Path, name: str) -> float:
    value = next(f.value for f in load_results(path).findings if f.id == name)
    assert value is not None
    return float(value)

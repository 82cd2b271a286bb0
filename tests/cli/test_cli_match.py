"""regauge match and regauge compare, as users call them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from regauge import apply, element, spec_of
from regauge.cli import main
from regauge.matching import preparation
from support import forks
from support.picos import build


def gpt2(folder: Path, seed: int, **more: Any) -> Path:
    torch.manual_seed(seed)
    sizes = {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 40,
        "n_positions": 16,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    model = GPT2LMHeadModel(GPT2Config(**sizes | more))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A model, and the same model in another basis."""
    a, b = gpt2(tmp_path / "a", 0), tmp_path / "b"
    model = GPT2LMHeadModel.from_pretrained(a)
    moved = apply(element(spec_of(model), 3), model.state_dict())
    model.load_state_dict(moved)
    model.save_pretrained(b)
    return a, b


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def test_match_writes_a_folder_that_anything_loads(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = pair
    out, element_file = tmp_path / "out", tmp_path / "g.safetensors"
    assert (
        run(
            "match",
            a,
            b,
            "-o",
            out,
            "--save-element",
            element_file,
            "--report",
            tmp_path / "page.html",
        )
        == 0
    )
    here, there = AutoModelForCausalLM.from_pretrained(out), AutoModelForCausalLM.from_pretrained(b)
    for (name, x), (_, y) in zip(
        here.state_dict().items(), there.state_dict().items(), strict=True
    ):
        assert torch.allclose(x, y, atol=1e-4), name
    results = json.loads((out / "match.json").read_text())
    assert results["findings"][0]["value"] < 1e-3 < results["findings"][0]["ceiling"]
    assert "Distance by module" in (tmp_path / "page.html").read_text()
    assert element_file.exists()
    assert not list(tmp_path.glob(".out*"))
    assert "distance" in capsys.readouterr().out


def test_strangers_are_matched_by_what_they_do_and_refined(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "get_context", lambda method: forks.context())
    a, b = pair[0], gpt2(tmp_path / "stranger", 7)
    out = tmp_path / "out"
    wishes = ("--samples", 32, "--workers", 2, "--refine", "self", "--refine-steps", 2)
    assert run("match", a, b, "-o", out, "--data", "self", *wishes) == 0
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    models = [AutoModelForCausalLM.from_pretrained(x) for x in (a, out)]
    with torch.no_grad():
        logits = [m(torch.arange(8)[None]).logits for m in models]
    assert torch.allclose(*logits, atol=1e-3)


def test_a_refined_match_is_judged_by_what_was_refined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two models near each other: refinement moves A away from B by weights. This is not a failure,
    and the function of A stays.
    """
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    model: Any = build("gpt2").float()
    model.save_pretrained(a)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn_like(p))
    model.save_pretrained(b)
    assert (
        run("match", a, b, "-o", out, "--refine", "self", "--refine-steps", 30, "--samples", 8) == 0
    )
    assert "before refinement" in capsys.readouterr().out
    distance, divergence = json.loads((out / "match.json").read_text())["findings"]
    assert distance["value"] > distance["ceiling"], "the control: a verdict by distance would fail"
    assert distance["holds"] is None
    assert divergence["holds"] is True
    with torch.no_grad():
        logits = [
            AutoModelForCausalLM.from_pretrained(x)(torch.arange(8)[None]).logits for x in (a, out)
        ]
    assert torch.allclose(*logits, atol=1e-3)
    assert run("match", a, b, "-o", tmp_path / "plain") == 0
    (plain,) = json.loads((tmp_path / "plain" / "match.json").read_text())["findings"]
    assert plain["holds"] is True


def test_the_options_of_the_search(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = pair
    out = tmp_path / "out"
    wishes = ("--anchors", "*wte*,*wpe*", "--weight", "*c_fc*=0.5", "--group", "permutation")
    assert run("match", a, b, "-o", out, *wishes, "--stream", "permutation") == 0
    assert json.loads((out / "match.json").read_text())["facts"]["folded"] is False
    for wrong in ("c_fc", "*c_fc*=x", "*c_fc*=-1", "=1"):
        assert run("match", a, b, "-o", tmp_path / "c", "--weight", wrong) == 2
    assert not (tmp_path / "c").exists()


def test_presets_are_published_methods(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = pair
    names = ("git-re-basin", "rotation-symmetry")
    for name in names:
        assert run("match", a, b, "-o", tmp_path / name, "--preset", name) == 0
    first, second = (json.loads((tmp_path / n / "match.json").read_text())["facts"] for n in names)
    assert "stream" in first["order"]
    assert {s.split(".")[0] for s in second["order"]} == {"qk", "vo", "ffn"}
    assert (first["folded"], second["folded"]) == (False, False)
    assert run("match", a, b, "-o", tmp_path / "c", "--preset", "other") == 1
    assert "preset must be one of git-re-basin, rotation-symmetry" in capsys.readouterr().err
    assert run("match", a, b, "-o", tmp_path / "c", "--preset", names[0], "--sweeps", 1) == 2


def test_compare_says_what_two_models_are_to_each_other(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = pair
    assert run("compare", a, a) == 0
    assert "equal" in capsys.readouterr().out
    assert run("compare", a, b, "--json", tmp_path / "c.json") == 0
    assert "same model, transformed" in capsys.readouterr().out
    assert (
        json.loads((tmp_path / "c.json").read_text())["facts"]["verdict"]
        == "same model, transformed"
    )
    near = GPT2LMHeadModel.from_pretrained(a)
    with torch.no_grad():
        for p in near.parameters():
            p.add_(0.02 * torch.randn_like(p))
    near.save_pretrained(tmp_path / "near")
    assert run("compare", a, tmp_path / "near") == 0
    assert "share a basis without matching" in capsys.readouterr().out
    assert run("compare", b, tmp_path / "near") == 0
    assert "have a common ancestor, but different bases" in capsys.readouterr().out
    assert run("compare", a, gpt2(tmp_path / "stranger", 7)) == 0
    assert "do not share a basis" in capsys.readouterr().out


def test_unmatchable_models_raise_an_error_that_names_the_cause(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = pair
    out = tmp_path / "out"
    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            vocab_size=40,
        )
    ).save_pretrained(tmp_path / "llama")
    cases = {
        (a, tmp_path / "llama"): "models must be of one family, got gpt2",
        (a, gpt2(tmp_path / "wide", 0, n_inner=48)): 'the space "ffn.0" has size 64 in one and 48',
        (a, gpt2(tmp_path / "deep", 0, n_layer=3)): 'only one of them has the space "ffn.2"',
        (
            a,
            gpt2(tmp_path / "words", 0, vocab_size=44),
        ): '"transformer.wte.weight" is [40, 16] in one and [44, 16]',
        (a, tmp_path / "nowhere"): "nowhere",
    }
    for (one, other), words in cases.items():
        assert run("match", one, other, "-o", out) == 1
        assert words in capsys.readouterr().err
        assert not out.exists()
    assert run("match", a, b, "-o", out, "--layers", "x") == 2
    assert run("match", a, b, "-o", a) == 1
    assert run("match", a, b, "-o", out, "--dry-run") == 0
    assert not out.exists()


def test_different_vocabularies_are_matched_by_the_tokens_of_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = gpt2(tmp_path / "a", 0, vocab_size=40)
    (a / "vocab.json").write_text(json.dumps({f"t{i}": i for i in range(40)}))
    model = GPT2LMHeadModel.from_pretrained(a)
    moved = apply(element(spec_of(model), 3), model.state_dict())
    b = gpt2(tmp_path / "b", 0, vocab_size=44)
    order = torch.randperm(40)
    table = torch.randn(44, 16)
    table[order] = moved["transformer.wte.weight"]
    other = GPT2LMHeadModel.from_pretrained(b)
    other.load_state_dict({**moved, "transformer.wte.weight": table, "lm_head.weight": table})
    other.save_pretrained(b)
    (b / "vocab.json").write_text(
        json.dumps(
            {f"t{i}": int(order[i]) for i in range(40)} | {f"new{i}": i for i in range(40, 44)}
        )
    )
    out = tmp_path / "out"
    assert run("match", a, b, "-o", out) == 1
    assert "--shared-tokens" in capsys.readouterr().err
    assert run("match", a, b, "-o", out, "--shared-tokens") == 0
    report = json.loads((out / "match.json").read_text())["findings"][0]
    assert report["value"] < 1e-2 < report["ceiling"]


def test_an_interrupted_match_leaves_what_it_found(
    pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    a, b = pair
    out = tmp_path / "out"
    import regauge.matching.search as finding

    whole, calls = finding._solve_unit, []

    def stop(task: Any) -> Any:
        calls.append(task)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(task)

    monkeypatch.setattr(finding, "_solve_unit", stop)
    assert run("match", a, b, "-o", out) == 130
    saved = tmp_path / ".out.state"
    assert (
        len(list(saved.rglob("*.safetensors"))) == 3
    )  # the stream, and the first layer's two parts
    output = capsys.readouterr().err.splitlines()
    assert output[-2] == "regauge: error: interrupted"
    assert output[-1].endswith(str(saved))  # and how to go on
    assert saved.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(finding, "_solve_unit", whole)
    assert run("match", a, b, "-o", out, "--resume") == 0
    assert json.loads((out / "match.json").read_text())["findings"][0]["value"] < 1e-3
    assert not list(tmp_path.glob(".out*"))

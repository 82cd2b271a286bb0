"""`regauge merge` as transcripts: what it writes, what it refuses, and what a kill leaves
behind.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regauge
from regauge.demo.move import GPT2, LLAMA, make_checkpoint
from support.cli_runs import Run
from support.merges import State, digests, finetune, interrupting, kill_and_resume, near, state_of
from support.picos import build


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "a", LLAMA, 0)


def edit_config(folder: Path, change: Callable[[State, dict[str, Any]], None]) -> Path:
    state, config = (
        load_file(folder / "model.safetensors"),
        json.loads((folder / "config.json").read_text()),
    )
    change(state, config)
    save_file(
        {n: t.contiguous() for n, t in state.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_models_on_the_command_line(run: Run, a: Path, tmp_path: Path) -> None:
    b, c = finetune(a, tmp_path / "b", 1), finetune(a, tmp_path / "c", 2)
    result = run(
        "merge",
        a,
        b,
        c,
        "--weight",
        1,
        "--weight",
        0.3,
        "--weight",
        0.5,
        "-o",
        tmp_path / "out",
        "--json",
    )
    assert result.code == 0
    assert "share a basis without alignment" in result.err
    x, y, z = (state_of(m) for m in (a, b, c))
    for name, value in state_of(tmp_path / "out").items():
        assert near(value, (x[name] + 0.3 * y[name] + 0.5 * z[name]) / 1.8), name
    report = json.loads(result.out)
    assert report["method"] == "linear"
    assert [v["verdict"] for v in report["basis"]] == ["same basis", "same basis"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "recipe.yaml",
    ]
    again = run(
        "merge", tmp_path / "out" / "recipe.yaml", "-o", tmp_path / "again"
    )  # the recipe is the merge
    assert again.code == 0
    assert (
        digests(tmp_path / "again")["model.safetensors"]
        == digests(tmp_path / "out")["model.safetensors"]
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert (tmp_path / "out" / "recipe.yaml").read_text().strip() in card
    assert "same basis" in card
    assert f"regauge {regauge.__version__}, torch" in card


@pytest.mark.parametrize(
    "method",
    [
        "slerp",
        "task_arithmetic",
        "ties",
        "dare_linear",
        "dare_ties",
        "della_linear",
        "della",
        "model_stock",
        "karcher",
    ],
)
def test_every_method_through_the_engine(run: Run, a: Path, tmp_path: Path, method: str) -> None:
    from regauge.merging import merge_states

    b, c = finetune(a, tmp_path / "b", 1), finetune(a, tmp_path / "c", 2)
    based = method != "karcher"
    models = [b] if method == "slerp" else [b, c]
    settings: dict[str, Any] = {"slerp": {"t": 0.3}, "model_stock": {}, "karcher": {}}.get(
        method, {"density": 0.5, "lambda": 0.7}
    )
    options = [f"--set={k}={v}" for k, v in settings.items()]
    assert (
        run(
            "merge",
            *models,
            *(["--base", a] if based else []),
            "--method",
            method,
            *options,
            "-o",
            tmp_path / "out",
            "--seed",
            5,
        ).code
        == 0
    )
    weighted = {"weight": 1} if "density" in settings else {}
    wanted = merge_states(
        [state_of(m) for m in models],
        method,
        base=state_of(a) if based else None,
        seed=5,
        **{**settings, **weighted},
    )
    for name, value in state_of(tmp_path / "out").items():
        assert near(value, wanted[name]), name
        assert not near(value, state_of(a)[name]), name


def test_gradients_filters_and_dtypes(run: Run, a: Path, tmp_path: Path) -> None:
    b = finetune(a, tmp_path / "b", 1)
    (tmp_path / "r.yaml").write_text(
        f"""
merge_method: task_arithmetic
base_model: {a}
models:
  - model: {b}
    parameters:
      weight:
        - filter: self_attn
          value: [0, 1]
        - filter: mlp
          value: 0.5
        - value: [0.25, 9]
dtype: float32
out_dtype: bfloat16
"""
    )
    assert run("merge", tmp_path / "r.yaml", "-o", tmp_path / "out").code == 0
    x, y = state_of(a), state_of(b)
    for name, value in state_of(tmp_path / "out").items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        t = layer / 3
        w = t if "self_attn" in name else 0.5 if "mlp" in name else 0.25 + t * 8.75
        assert value.dtype == torch.bfloat16
        assert near(value, (x[name] + w * (y[name] - x[name])).to(torch.bfloat16), 5e-3), (
            name
        )  # one unit of bfloat16
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_slices(run: Run, a: Path, tmp_path: Path) -> None:
    b = finetune(a, tmp_path / "b", 1)
    edit_config(a, lambda state, config: config.update(layer_types=["p", "q", "r", "s"]))
    (tmp_path / "r.yaml").write_text(
        f"""
merge_method: passthrough
slices:
  - sources: [{{model: {a}, layer_range: [0, 3]}}]
  - sources:
      - model: {b}
        layer_range: [1, 4]
        parameters: {{scale: {{filter: down_proj, value: 0.5}}}}
"""
    )
    assert run("merge", tmp_path / "r.yaml", "-o", tmp_path / "out").code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 6
    assert config["layer_types"] == ["p", "q", "r", "q", "r", "s"]
    x, y, out = state_of(a), state_of(b), state_of(tmp_path / "out")
    at = "model.layers.{}.mlp.{}.weight"
    assert torch.equal(out[at.format(2, "up_proj")], x[at.format(2, "up_proj")])
    assert torch.equal(out[at.format(5, "up_proj")], y[at.format(3, "up_proj")])
    assert near(out[at.format(3, "down_proj")], y[at.format(1, "down_proj")] / 2)
    assert torch.equal(
        out["model.embed_tokens.weight"], x["model.embed_tokens.weight"]
    )  # before the layers: of the first slice
    assert torch.equal(out["lm_head.weight"], y["lm_head.weight"])  # after them: of the last
    assert len(out) == 6 * 9 + 3
    (tmp_path / "r.yaml").write_text(
        f"merge_method: passthrough\nslices:\n- sources:\n  - model: {a}\n    layer_range: [0, 5]\n"
    )
    result = run("merge", tmp_path / "r.yaml", "-o", tmp_path / "no")
    assert result.code == 1
    assert "line 4" in result.err
    assert "must end at 4 or before" in result.err


def test_a_merge_loads_with_transformers_and_writes_text(run: Run, tmp_path: Path) -> None:
    import transformers

    for pico in ("llama", "gpt2", "qwen3"):
        build(pico).float().save_pretrained(tmp_path / pico)
        other = finetune(tmp_path / pico, tmp_path / f"{pico}-b", 1, 0.01)
        assert (
            run(
                "merge",
                tmp_path / pico,
                other,
                "-o",
                tmp_path / f"{pico}-out",
                "--shard-size",
                "8kB",
            ).code
            == 0
        )
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / f"{pico}-out", output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        assert len(list((tmp_path / f"{pico}-out").glob("*.safetensors"))) > 1
        written = model.generate(
            torch.tensor([[3, 4]]), max_new_tokens=4, do_sample=False, pad_token_id=0
        )
        assert written.shape == (1, 6)
        one, two, mixed = (state_of(p) for p in (tmp_path / pico, other, tmp_path / f"{pico}-out"))
        assert all(near(mixed[n], (one[n] + two[n]) / 2) for n in mixed)


def test_tied_weights_are_written_once(run: Run, tmp_path: Path) -> None:
    gpt2 = make_checkpoint(tmp_path / "gpt2", GPT2, 0)

    def repeat(state: State, config: dict[str, Any]) -> None:
        state["lm_head.weight"] = state["transformer.wte.weight"].clone()

    b = edit_config(finetune(gpt2, tmp_path / "b", 1), repeat)
    both = edit_config(finetune(gpt2, tmp_path / "c", 2), repeat)
    assert run("merge", b, both, "-o", tmp_path / "out").code == 0
    assert "lm_head.weight" not in state_of(tmp_path / "out")

    def untie(state: State, config: dict[str, Any]) -> None:
        state["lm_head.weight"] = state["transformer.wte.weight"] + 0.01
        config["tie_word_embeddings"] = False

    own = edit_config(finetune(gpt2, tmp_path / "d", 3), untie)
    assert (
        run("merge", gpt2, own, "-o", tmp_path / "mixed").code == 0
    )  # a head of its own, and a tied one: the tied one's is its table
    x, y, mixed = state_of(gpt2), state_of(own), state_of(tmp_path / "mixed")
    assert near(mixed["lm_head.weight"], (x["transformer.wte.weight"] + y["lm_head.weight"]) / 2)
    assert (
        json.loads((tmp_path / "mixed" / "config.json").read_text())["tie_word_embeddings"] is False
    )


def test_a_moved_copy_is_refused_and_given_back_by_align(run: Run, a: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    assert run("move", a, "--random", "--group", "full", "--seed", 3, "-o", moved).code == 0
    before = sorted(p.name for p in tmp_path.iterdir())
    result = run("merge", a, moved, "-o", tmp_path / "out")
    assert result.code == 1
    assert "error: " in result.err
    assert "does not share a basis with" in result.err
    assert "do not share a basis without alignment (cosine " in result.err
    assert "--align" in result.err
    assert sorted(p.name for p in tmp_path.iterdir()) == before  # nothing is left behind
    result = run("merge", a, moved, "--align", "-o", tmp_path / "out", "--json")
    assert result.code == 0
    x, out = state_of(a), state_of(tmp_path / "out")
    assert all(near(out[n], x[n], 1e-4) for n in x)
    assert json.loads(result.out)["basis"][0]["verdict"] == "different bases"
    assert "aligned with" in (tmp_path / "out" / "README.md").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*before, "out"])
    forced = run("merge", a, moved, "--force", "-o", tmp_path / "noise")
    assert forced.code == 0
    assert "warning: " in forced.err
    assert not near(state_of(tmp_path / "noise")["lm_head.weight"], x["lm_head.weight"], 0.1)
    assert "by force" in (tmp_path / "noise" / "README.md").read_text()


def test_one_transformed_layer_is_detected(run: Run, a: Path, tmp_path: Path) -> None:
    """The rest of the model is as it was, so that a look at the whole alone would pass it."""
    assert (
        run("move", a, "--random", "--seed", 3, "--spaces", "ffn.2", "-o", tmp_path / "moved").code
        == 0
    )
    result = run("merge", a, tmp_path / "moved", "-o", tmp_path / "out")
    assert result.code == 1
    assert "does not share a basis" in result.err


def test_align_to_another_model_and_with_folded_norms(run: Run, a: Path, tmp_path: Path) -> None:
    b = finetune(a, tmp_path / "b", 1)
    assert (
        run(
            "move",
            a,
            "--random",
            "--fold",
            "--group",
            "orthogonal",
            "--seed",
            4,
            "-o",
            tmp_path / "turned",
        ).code
        == 0
    )
    (tmp_path / "r.yaml").write_text(
        f"merge_method: linear\nalign: {{to: {b}, fold: true}}\nmodels:\n"
        f"- {{model: {tmp_path / 'turned'}, parameters: {{weight: 0.5}}}}\n- "
        f"{{model: {b}, parameters: {{weight: 0.5}}}}\n"
    )
    assert run("merge", tmp_path / "r.yaml", "-o", tmp_path / "out").code == 0
    from regauge import load_model

    ids = torch.arange(12).view(1, 12) * 7 % 250
    with torch.no_grad():
        loaded, wanted, other = (
            load_model(p)(input_ids=ids).logits for p in (tmp_path / "out", a, b)
        )
    assert float((loaded - wanted).norm() / wanted.norm()) < 1.5 * float(
        (other - wanted).norm() / wanted.norm()
    )  # between its ends


def test_unrelated_models_are_refused_and_aligned_under_protest(
    run: Run, a: Path, tmp_path: Path
) -> None:
    z = make_checkpoint(tmp_path / "z", LLAMA, 9)
    result = run("merge", a, z, "-o", tmp_path / "out")
    assert result.code == 1
    assert "does not share a basis" in result.err
    result = run("merge", a, z, "--align", "-o", tmp_path / "out")
    assert result.code == 0
    assert "after alignment: models so far apart average to one that is usually worse" in result.err


def test_what_match_has_aligned_is_merged_with_a_warning(run: Run, tmp_path: Path) -> None:
    """The head of one is tied, and the other's has become a tensor of its own."""
    tied = {**GPT2, "tie_word_embeddings": True}
    a, z = (make_checkpoint(tmp_path / name, tied, seed) for name, seed in (("a", 0), ("z", 9)))
    assert run("merge", a, z, "-o", tmp_path / "out").code == 1
    assert run("match", a, z, "-o", tmp_path / "aligned").code == 0
    result = run("merge", tmp_path / "aligned", z, "-o", tmp_path / "out")
    assert result.code == 0, result.err
    assert "were trained independently and aligned" in result.err
    assert "models so far apart average to one that is usually worse" in result.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    aligned, there, out = (state_of(tmp_path / n) for n in ("aligned", "z", "out"))
    head = next(n for n in out if n not in there)
    table = next(n for n in there if there[n].shape == out[head].shape)
    assert near(out[head], (aligned[head] + there[table]) / 2, 1e-6)


def test_much_noise_is_not_another_basis(run: Run, a: Path, tmp_path: Path) -> None:
    assert (
        run("merge", a, finetune(a, tmp_path / "b", 1, 0.1), "-o", tmp_path / "out").code == 0
    )  # half as much noise as weight
    result = run(
        "merge", a, finetune(a, tmp_path / "c", 1, 0.5), "-o", tmp_path / "no"
    )  # one basis, but far apart
    assert result.code == 0
    assert "models so far apart average to one that is usually worse" in result.err


def test_a_different_head_is_not_a_different_basis(run: Run, tmp_path: Path) -> None:
    """Classifiers that were fine-tuned apart have different heads, which says nothing about the
    basis of the rest.
    """
    build("llama-classifier").float().save_pretrained(tmp_path / "a")
    b = finetune(tmp_path / "a", tmp_path / "b", 1, 0.01)
    edit_config(
        b,
        lambda state, config: state.update(
            {"score.weight": torch.randn(state["score.weight"].shape)}
        ),
    )
    assert run("merge", tmp_path / "a", b, "-o", tmp_path / "out").code == 0


def tokenizer(folder: Path, tokens: list[str], special: tuple[str, ...] = ()) -> None:
    added = [
        {"id": len(tokens) + i, "content": s, "special": True, "normalized": False}
        for i, s in enumerate(special)
    ]
    document = {
        "added_tokens": added,
        "model": {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))
    (folder / "tokenizer_config.json").write_text("{}")


def test_vocabularies_that_differ(run: Run, a: Path, tmp_path: Path) -> None:
    tokens = [f"t{i}" for i in range(256)]
    b = finetune(a, tmp_path / "b", 1)

    def shorter(state: State, config: dict[str, Any]) -> None:
        order = torch.arange(255, 5, -1)  # other rows, and six tokens fewer
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            state[name] = torch.cat([state[name][order], torch.full((2, 64), 3.0)])
        config["vocab_size"] = 252

    edit_config(b, shorter)
    tokenizer(a, tokens)
    tokenizer(b, tokens[:5:-1], ("<new>", "<pad>"))
    result = run("merge", a, b, "-o", tmp_path / "no")
    assert result.code == 1
    assert "the vocabularies differ" in result.err
    assert "tokenizer_source: union" in result.err

    x, y = (state_of(m)["lm_head.weight"] for m in (a, b))
    assert run("merge", a, b, "--tokenizer", "union", "-o", tmp_path / "union").code == 0
    out = state_of(tmp_path / "union")["lm_head.weight"]
    assert out.shape == (258, 64)
    assert near(out[100], (x[100] + y[155]) / 2)  # t100 is row 155 of b
    assert torch.equal(out[3], x[3])  # only a has it
    assert near(out[256], y[250])  # only b has it
    assert json.loads((tmp_path / "union" / "config.json").read_text())["vocab_size"] == 258
    document = json.loads((tmp_path / "union" / "tokenizer.json").read_text())
    assert [(e["id"], e["content"], e["special"]) for e in document["added_tokens"]] == [
        (256, "<new>", True),
        (257, "<pad>", True),
    ]

    assert run("merge", a, b, "--tokenizer", "base", "-o", tmp_path / "base").code == 0
    assert near(state_of(tmp_path / "base")["lm_head.weight"], out[:256])
    assert run("merge", a, b, "--tokenizer", b, "-o", tmp_path / "of-b").code == 0
    other = state_of(tmp_path / "of-b")["lm_head.weight"]
    assert near(other[155], out[100])
    assert (tmp_path / "of-b" / "tokenizer.json").read_bytes() == (
        b / "tokenizer.json"
    ).read_bytes()

    assert (
        run("move", b, "--random", "--seed", 3, "-o", tmp_path / "moved").code == 0
    )  # and the tokens that both have are what it is aligned by
    assert (
        run("merge", a, tmp_path / "moved", "--tokenizer", "union", "-o", tmp_path / "refused").code
        == 1
    )
    assert (
        run(
            "merge",
            a,
            tmp_path / "moved",
            "--tokenizer",
            "union",
            "--align",
            "-o",
            tmp_path / "aligned",
        ).code
        == 0
    )
    assert near(state_of(tmp_path / "aligned")["lm_head.weight"], out, 1e-4)


def test_incompatible_models_raise_one_error(run: Run, a: Path, tmp_path: Path) -> None:
    b = finetune(a, tmp_path / "b", 1)
    gpt2 = make_checkpoint(tmp_path / "gpt2", GPT2, 0)
    wider = make_checkpoint(tmp_path / "wider", {**LLAMA, "intermediate_size": 180}, 0)
    deeper = make_checkpoint(tmp_path / "deeper", {**LLAMA, "num_hidden_layers": 5}, 0)
    broken = finetune(a, tmp_path / "broken", 1)
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    typo = tmp_path / "typo.yaml"
    typo.write_text(f"merge_method: linear\nmodels:\n- model: {a}\n  paramters: {{weight: 1}}\n")
    lacking = tmp_path / "lacking.yaml"
    lacking.write_text(
        f"merge_method: linear\nmodels:\n- model: {a}\n  parameters: {{weight: 1}}\n- model: {b}\n"
    )
    before = sorted(p.name for p in tmp_path.iterdir())
    for arguments, words in (
        ((a, gpt2), "is a llama and"),
        ((a, wider), '"model.layers.0.mlp.gate_proj.weight" is [172, 64] in'),
        ((a, deeper), 'lacks "model.layers.4.self_attn.q_proj.weight"'),
        ((a, broken), "is truncated"),
        ((a, tmp_path / "nowhere"), "does not exist"),
        ((a, b, "--method", "ties"), "needs a base model"),
        ((a, b, "--method", "ties", "--base", tmp_path / "nowhere"), "does not exist"),
        ((a, b, "--method", "tiess"), 'known method, got "tiess"'),
        ((a, b, "--method", "slerp"), 'needs the parameter "t"'),
        ((a, b, "--set", "densty=1"), 'has no "densty"'),
        ((typo,), 'line 4: a model has no "paramters"'),
        ((lacking,), f'line 5: linear needs the parameter "weight" of the model {b}'),
    ):
        result = run("merge", *arguments, "-o", tmp_path / "out")
        assert result.code == 1, arguments
        assert words in result.err, (arguments, result.err)
        assert result.err.count("error: ") == 1
        assert "hint: " in result.err, arguments
        assert sorted(p.name for p in tmp_path.iterdir()) == before
    for arguments in (
        (a,),
        (a, b, "--weight", 1, "--weight", 2, "--weight", 3),
        (typo, "--method", "ties"),
        (a, b, "--shard-size", "big"),
    ):
        assert run("merge", *arguments, "-o", tmp_path / "out").code == 2, arguments
    assert run("merge", a, b, "-o", a).code == 1  # the output is an input
    assert run("merge", a, b, "-o", tmp_path / "out.safetensors").code == 1


def test_a_dry_run_writes_nothing(run: Run, a: Path, tmp_path: Path) -> None:
    b = finetune(a, tmp_path / "b", 1)
    before = sorted(p.name for p in tmp_path.iterdir())
    result = run("merge", a, b, "-o", tmp_path / "out", "--dry-run", "--json")
    assert result.code == 0
    assert json.loads(result.out)["dry_run"] is True
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_full_disk(run: Run, a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = finetune(a, tmp_path / "b", 1)
    before = sorted(p.name for p in tmp_path.iterdir())
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000)
    )  # type: ignore[attr-defined]
    result = run("merge", a, b, "-o", tmp_path / "out")
    assert result.code == 1
    assert "no space left on the device" in result.err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_values_that_overflow_are_refused(run: Run, a: Path, tmp_path: Path) -> None:
    b = edit_config(
        finetune(a, tmp_path / "b", 1),
        lambda state, config: state.update({"model.norm.weight": torch.full((64,), 1e6)}),
    )
    result = run("merge", a, b, "--dtype", "float16", "-o", tmp_path / "out")
    assert result.code == 1
    assert '"model.norm.weight" would hold NaN or Inf' in result.err


def test_a_merge_that_was_killed_goes_on(run: Run, a: Path, tmp_path: Path) -> None:
    b, c = finetune(a, tmp_path / "b", 1), finetune(a, tmp_path / "c", 2)
    arguments = [
        "merge",
        b,
        c,
        "--base",
        a,
        "--method",
        "dare_ties",
        "--set",
        "density=0.5",
        "--shard-size",
        "100kB",
    ]
    kill_and_resume(run, tmp_path, arguments, 2, 1, True)


@pytest.mark.slow
def test_fifty_kills(run: Run, a: Path, tmp_path: Path) -> None:
    b, c = finetune(a, tmp_path / "b", 1), finetune(a, tmp_path / "c", 2)
    assert (
        run("move", c, "--random", "--group", "full", "--seed", 3, "-o", tmp_path / "moved").code
        == 0
    )
    arguments = [
        "merge",
        b,
        tmp_path / "moved",
        "--base",
        a,
        "--method",
        "dare_ties",
        "--set",
        "density=0.5",
        "--align",
        "--shard-size",
        "100kB",
    ]
    kill_and_resume(run, tmp_path, arguments, 50, 2, False)


def test_a_search_is_not_made_twice(
    run: Run, a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regauge.merging import basis

    assert (
        run("move", a, "--random", "--group", "full", "--seed", 3, "-o", tmp_path / "moved").code
        == 0
    )
    end = interrupting(monkeypatch, 3)
    assert run("merge", a, tmp_path / "moved", "--align", "-o", tmp_path / "out").code == 130
    end()

    def never(*arguments: object, **more: object) -> None:
        raise AssertionError("it was found already")

    monkeypatch.setattr(basis, "match_pair", never)
    monkeypatch.setattr(basis, "check_basis", never)
    monkeypatch.setattr("regauge.merging.engine.check_basis", never)
    assert run("merge", a, tmp_path / "moved", "--align", "-o", tmp_path / "out").code == 0
    assert all(
        near(value, state_of(a)[name], 1e-4) for name, value in state_of(tmp_path / "out").items()
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "moved", "out"]


def test_a_kill_before_or_after_the_journal(run: Run, a: Path, tmp_path: Path) -> None:
    """What a kill leaves before the first journal is whole, or after it was removed, is not in the
    way; what is somebody else's is.
    """
    b = finetune(a, tmp_path / "b", 1)
    partial = tmp_path / ".out.partial"
    assert run("merge", a, b, "-o", tmp_path / "whole").code == 0
    shutil.copytree(tmp_path / "whole", partial)
    assert run("merge", a, b, "-o", tmp_path / "out").code == 0
    shutil.rmtree(tmp_path / "out")
    partial.mkdir()
    (partial / "..regauge.json.partial-123").write_text("{")
    assert run("merge", a, b, "-o", tmp_path / "out").code == 0
    assert (
        digests(tmp_path / "out")["model.safetensors"]
        == digests(tmp_path / "whole")["model.safetensors"]
    )
    shutil.rmtree(tmp_path / "out")
    partial.mkdir()
    (partial / "model.safetensors").write_text("mine")
    result = run("merge", a, b, "-o", tmp_path / "out")
    assert result.code == 1
    assert "was not written by regauge" in result.err
    assert (partial / "model.safetensors").read_text() == "mine"


def test_finished_shards_are_reused(
    run: Run, a: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = finetune(a, tmp_path / "b", 1)
    end = interrupting(monkeypatch, 25)
    assert (
        run("merge", a, b, "-o", tmp_path / "out", "--shard-size", "100kB", "--threads", "1").code
        == 130
    )
    assert not (tmp_path / "out").exists()
    end()
    result = run("merge", a, b, "-o", tmp_path / "out", "--shard-size", "100kB", "--json")
    assert result.code == 0
    assert json.loads(result.out)["resumed"]
    assert run("merge", a, b, "-o", tmp_path / "whole", "--shard-size", "100kB").code == 0
    digests_after, wanted = digests(tmp_path / "out"), digests(tmp_path / "whole")
    assert {k: v for k, v in digests_after.items() if k != "README.md"} == {
        k: v for k, v in wanted.items() if k != "README.md"
    }

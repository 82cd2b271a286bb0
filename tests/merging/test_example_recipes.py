"""The recipes of examples/recipes: each runs as it is written, and does what its first lines say.

`python -m benchmarks merging` holds them against mergekit.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from regauge.demo.move import LLAMA, make_checkpoint
from support.cli_runs import Run
from support.merges import State, finetune, near, state_of

RECIPES = sorted((Path(__file__).parents[2] / "examples" / "recipes").glob("*.yml"))


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, State]:
    """The models that the recipes name, in the folder from which they are named."""
    (tmp_path / "models").mkdir()
    root = make_checkpoint(tmp_path / "models" / "root", LLAMA, 0)
    for seed, name in enumerate("abc"):
        finetune(root, tmp_path / "models" / name, seed, dtype=torch.float16)
    monkeypatch.chdir(tmp_path)
    return {
        name: {n: t.float() for n, t in state_of(Path("models") / name).items()}
        for name in ("root", "a", "b", "c")
    }


def run_recipe(run: Run, name: str) -> State:
    result = run("merge", next(p for p in RECIPES if p.stem == name), "-o", "out")
    assert result.code == 0, result.err
    out = state_of(Path("out"))
    assert {t.dtype for t in out.values()} == {torch.float16}
    return {n: t.float() for n, t in out.items()}


def test_these_are_all() -> None:
    assert [p.stem for p in RECIPES] == ["gradient-slerp", "linear", "stack", "ties-sum", "ties"]


def test_linear(run: Run, models: dict[str, State]) -> None:
    for name, merged_state in run_recipe(run, "linear").items():
        assert near(
            merged_state,
            (models["a"][name] + 0.4 * models["b"][name] + 0.2 * models["c"][name]) / 1.6,
            1e-3,
        )


def test_gradient_slerp(run: Run, models: dict[str, State]) -> None:
    merged_state = run_recipe(run, "gradient-slerp")
    for first, last, part in (("a", "b", "self_attn.q_proj"), ("b", "a", "mlp.up_proj")):
        for layer, model in ((0, first), (3, last)):
            name = f"model.layers.{layer}.{part}.weight"
            assert torch.equal(merged_state[name], models[model][name])
            assert not torch.equal(models[first][name], models[last][name])
    name = "model.layers.1.mlp.up_proj.weight"
    assert not near(merged_state[name], models["a"][name], 1e-3)
    assert not near(merged_state[name], models["b"][name], 1e-3)


def test_stack(run: Run, models: dict[str, State]) -> None:
    merged_state = run_recipe(run, "stack")
    assert json.loads(Path("out/config.json").read_text())["num_hidden_layers"] == 5
    for layer, (model, of) in enumerate([("a", 0), ("a", 1), ("a", 2), ("b", 2), ("b", 3)]):
        assert torch.equal(
            merged_state[f"model.layers.{layer}.mlp.up_proj.weight"],
            models[model][f"model.layers.{of}.mlp.up_proj.weight"],
        )
    assert torch.equal(
        merged_state["model.embed_tokens.weight"], models["a"]["model.embed_tokens.weight"]
    )
    assert torch.equal(merged_state["lm_head.weight"], models["b"]["lm_head.weight"])


@pytest.mark.parametrize(("recipe", "most"), [("ties-sum", 0.8), ("ties", 0.9 + 0.5)])
def test_ties(run: Run, models: dict[str, State], recipe: str, most: float) -> None:
    """What is not kept of any model stays the root's, and what is changed is changed as one of the
    models changed it.
    """
    merged_state, name = run_recipe(run, recipe), "model.layers.0.self_attn.q_proj.weight"
    root = models["root"][name].half().float()
    changed = (merged_state[name] - root).abs() > 5e-4
    share = float(changed.float().mean())
    assert 0.2 < share <= min(most, 1.0)
    signs = [
        (models[m][name] - root)[changed].sign() == (merged_state[name] - root)[changed].sign()
        for m in "ab"
    ]
    assert bool((signs[0] | signs[1]).all())

"""`regauge.match` and `regauge.compare` on what users hold: paths, checkpoints, modules, states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import regauge
import support.picos as picos
from regauge.checkpoints.transform import _make_rounded
from regauge.core.fold import fold_norms
from regauge.errors import (
    CheckpointError,
    DataError,
    LockError,
    RegaugeError,
    SpecError,
    UnknownModelError,
)
from regauge.locking.locked_checkpoints import plan_lock
from regauge.matching import SharedRows, activations, match_states, search
from regauge.matching.api import ModelMatch
from regauge.matching.compare import compare_unmatched

IDS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same model moved by an element, as folders."""
    root = tmp_path_factory.mktemp("models")
    model = picos.build("gpt2").float()
    model.save_pretrained(root / "a")
    spec = regauge.spec_of(model)
    model.load_state_dict(regauge.apply(regauge.element(spec, 3), model.state_dict()))
    model.save_pretrained(root / "b")
    return root / "a", root / "b"


def distance(folders: tuple[Path, Path], kind: str) -> ModelMatch:
    """Match the two as one kind of source."""
    if kind == "paths":
        return regauge.match(*folders)
    if kind == "texts":
        return regauge.match(*map(str, folders))
    if kind == "checkpoints":
        return regauge.match(*map(regauge.open_checkpoint, folders))
    models = [regauge.load_model(folder) for folder in folders]
    if kind == "modules":
        return regauge.match(*models)
    if kind == "mixed":
        return regauge.match(folders[0], models[1])
    states = [model.state_dict() for model in models]
    return regauge.match(*states, spec=regauge.spec_of(models[0]))


@pytest.mark.parametrize(
    "kind", ["paths", "texts", "checkpoints", "modules", "mixed", "state dicts"]
)
def test_every_kind_of_source_is_matched_and_saved(
    folders: tuple[Path, Path], kind: str, tmp_path: Path
) -> None:
    matched = distance(folders, kind)
    assert matched.distance < 1e-4 < matched.distance_before
    assert "distance" in repr(matched)
    assert matched.results.headline.tone == "good"
    assert matched.results.headline.number.endswith("→ 0%")
    matched.save(tmp_path / "aligned")
    assert json.loads((tmp_path / "aligned" / "match.json").read_text()) == matched.to_dict()
    saved = regauge.open_checkpoint(tmp_path / "aligned")
    for name, tensor in regauge.open_checkpoint(folders[1]).items():
        assert (saved[name] - tensor).abs().max() < 1e-4
    if kind != "state dicts":  # these have no config to save
        aligned, original = (
            regauge.load_model(folder) for folder in (tmp_path / "aligned", folders[0])
        )
        with torch.no_grad():
            outputs = [model(IDS).logits for model in (aligned, original)]
        assert (outputs[0] - outputs[1]).abs().max() < 1e-4


def test_a_module_is_not_changed_by_a_match(folders: tuple[Path, Path]) -> None:
    a, b = (regauge.load_model(folder) for folder in folders)
    before = {n: t.clone() for n, t in a.state_dict().items()}
    moved = regauge.match(a, b).state()
    assert all(torch.equal(t, before[n]) for n, t in a.state_dict().items())
    assert any(not torch.equal(moved[n], before[n]) for n in before)


def test_results_become_a_page_and_a_cell_of_a_notebook(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    compared = regauge.compare(*folders)
    assert compared.verdict == "same model, transformed"
    assert compared.verdict in repr(compared)
    compared.to_html(tmp_path / "page.html")
    headline = compared.results.headline
    assert (headline.text, headline.tone) == (
        "One model in two bases: match before merging",
        "mixed",
    )
    page = compared.to_html()
    assert f"</span> {headline.text}</h1>" in page
    assert page == (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    cell = compared._repr_html_()
    assert "<table>" in cell
    assert "By layer" in cell


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of different seeds with a tied head, as folders."""
    root = tmp_path_factory.mktemp("strangers")
    for name, seed in (("a", 0), ("b", 1)):
        picos.build("gpt2", seed).float().save_pretrained(root / name)
    return root / "a", root / "b"


def test_the_stream_is_rotated_and_b_stays(strangers: tuple[Path, Path], tmp_path: Path) -> None:
    matched = regauge.match(*strangers)
    plain = regauge.match(*strangers, options=regauge.MatchOptions(stream="permutation"))
    assert matched.pair.is_folded
    assert not plain.pair.is_folded
    assert matched.element.members["stream"].permutation() is None
    assert plain.element.members["stream"].permutation() is not None
    matched.save(tmp_path / "a")
    saved, b = (regauge.open_checkpoint(f) for f in (tmp_path / "a", strangers[1]))
    norms = [n for n in saved if ".ln_" in n and (n.endswith("weight") or "ln_f" not in n)]
    assert norms
    for name in norms:
        assert torch.equal(saved[name], b[name]), "the output has the norms of B"
    assert saved.config is not None
    assert saved.config["tie_word_embeddings"] is False
    state = matched.state()
    assert all(torch.equal(state[n], saved[n]) for n in saved)
    matched.save_element(tmp_path / "element")
    side = matched.pair.a
    folded_spec, folded = fold_norms(side.spec, side.checkpoint)
    moved = regauge.apply(regauge.load_element(tmp_path / "element", folded_spec), folded)
    for n, t in fold_norms(matched.pair.output[0].output_spec, saved)[1].items():
        assert torch.allclose(moved[n], t, atol=1e-4), f"the saved element does not make {n}"
    aligned, original = (regauge.load_model(f) for f in (tmp_path / "a", strangers[0]))
    with torch.no_grad():
        outputs = [model(IDS).logits for model in (aligned, original)]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-4 * outputs[1].abs().max()


def test_language_models_trained_apart_are_matched_by_text_that_they_write(
    strangers: tuple[Path, Path], folders: tuple[Path, Path]
) -> None:
    by_text, by_weights = regauge.match(*strangers), regauge.match(*strangers, data=None)
    assert by_text.results.facts["by"] == "self-written text"
    assert by_weights.results.facts["by"] == "weights"
    assert by_text.distance > by_weights.distance, "activations, not weights, were aligned"
    named = regauge.match(*strangers, data="self")
    assert named.distance == by_text.distance, "the default is what the name gives"
    moved = regauge.match(*folders)
    assert moved.results.facts["by"] == "weights", "weights find a moved copy exactly"
    plain = regauge.match(*strangers, options=regauge.MatchOptions(stream="permutation"))
    assert plain.results.facts["by"] == "weights", "options of the search keep to the weights"


def test_models_that_write_no_text_are_matched_by_weights(
    strangers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [regauge.load_model(folder).state_dict() for folder in strangers]
    matched = regauge.match(*states, spec=regauge.spec_of(regauge.load_model(strangers[0])))
    assert matched.results.facts["by"] == "weights"
    monkeypatch.setattr(activations, "MAX_WRITER", 10)
    assert regauge.match(*strangers).results.facts["by"] == "weights", "too large to write text"


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoders_are_matched_by_text_that_they_write(family: str) -> None:
    models = [picos.build(family, seed).float() for seed in (0, 1)]
    matched = regauge.match(*models)
    assert not matched.match.notes, "their text was generated and read"
    named = regauge.match(*models, data="self")
    assert named.results.facts["by"] == "self-written text"


def test_a_context_of_one_token_is_filled_by_the_first() -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=1)
    models = [transformers.GPT2LMHeadModel(config) for _ in range(2)]
    assert not regauge.match(*models).match.notes


def test_models_whose_generation_fails_are_matched_by_weights(
    strangers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*_: object, **__: object) -> None:
        raise RuntimeError("probabilities are NaN\nin many lines")

    by_weights = regauge.match(*strangers, data=None)
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "generate", generate)
    matched = regauge.match(*strangers)
    assert matched.results.facts["by"] == "weights"
    assert any("failed to generate text: probabilities" in note for note in matched.match.notes)
    assert matched.distance == by_weights.distance, "all sweeps ran"
    with pytest.raises(RegaugeError, match="failed to generate text"):
        regauge.match(*strangers, data="self")


def test_parts_of_the_default_are_not_those_of_named_text(
    strangers: tuple[Path, Path], tmp_path: Path
) -> None:
    """The first pass of the default compares weights."""
    fresh = regauge.match(*strangers, data="self")
    regauge.match(*strangers, out=tmp_path / "out")  # leaves its parts: it is not saved
    resumed = regauge.match(*strangers, data="self", out=tmp_path / "out", resume=True)
    assert [s.squared for s in resumed.match.steps] == [s.squared for s in fresh.match.steps]


def test_modules_keep_their_mode() -> None:
    models = [picos.build("gpt2", seed).float().train() for seed in (0, 1)]
    regauge.match(*models, data="self")
    assert all(module.training for model in models for module in model.modules())


def test_shared_tokens_are_matched_by_data(tmp_path: Path) -> None:
    folders = []
    for seed, size in ((0, 40), (1, 44)):
        torch.manual_seed(seed)
        config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=size)
        folders.append(tmp_path / str(seed))
        transformers.GPT2LMHeadModel(config).save_pretrained(folders[-1])
        vocabulary = {f"w{i}": i for i in range(size)}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
        (folders[-1] / "tokenizer.json").write_text(json.dumps({"model": model}))
    batches = [{"input_ids": torch.arange(40).view(4, 10)}]
    matched = regauge.match(*folders, data=batches, shared_tokens=True)
    assert matched.results.facts["by"] == "1 batches of inputs"
    assert matched.distance < matched.distance_before
    name = "transformer.wte.weight"
    states = [regauge.load_model(folder).state_dict() for folder in folders]
    states[0][name][3, 0] = torch.nan
    spec = regauge.spec_of(regauge.load_model(folders[1]))
    rows = dict.fromkeys([name, "lm_head.weight"], SharedRows((0, 1, 2), (0, 1, 2)))
    with pytest.raises(RegaugeError, match="not finite"):  # of a row that is not shared
        match_states(spec, *states, rows=rows)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_norm_of_b_without_gains_is_matched(family: str, tmp_path: Path) -> None:
    a, b = (picos.build(family, seed).float() for seed in (0, 1))
    name = next(n for n, _ in b.named_parameters() if n.endswith(("ln_1.weight", "norm.weight")))
    with torch.no_grad():
        b.get_parameter(name).zero_()
    regauge.match(a, b).save(tmp_path / "aligned")
    aligned = regauge.load_model(tmp_path / "aligned")
    with torch.no_grad():
        assert torch.allclose(aligned(IDS).logits, a(IDS).logits, atol=1e-3)


def test_tiny_gains_of_b_overflow_no_half_precision(tmp_path: Path) -> None:
    for name, seed, value in (("a", 0, 50.0), ("b", 1, 2e-4)):
        model = picos.build("gpt2", seed).float()
        with torch.no_grad():
            model.get_parameter("transformer.h.0.ln_2.weight").fill_(value)
            model.get_parameter("transformer.h.0.ln_2.bias").zero_()
        model.half().save_pretrained(tmp_path / name)
    matched = regauge.match(tmp_path / "a", tmp_path / "b", options=regauge.MatchOptions(sweeps=1))
    assert matched.pair.is_folded
    assert "ln_2" in matched.pair.output[1][0]
    state = matched.state()
    assert all(bool(t.isfinite().all()) for t in state.values())
    matched.save(tmp_path / "out")
    aligned, original = (regauge.load_model(tmp_path / n).float() for n in ("out", "a"))
    with torch.no_grad():
        outputs = [model(IDS).logits for model in (aligned, original)]
    assert (outputs[0] - outputs[1]).abs().max() < 0.05 * outputs[1].abs().max()


def test_what_does_not_fit_half_precision_is_an_error() -> None:
    value = torch.tensor([1.0, -1e5])
    with pytest.raises(SpecError, match=r'"w" must fit float16, got values up to 1e\+05'):
        _make_rounded(lambda: value, torch.float16, "w")
    assert _make_rounded(lambda: value / 0, torch.float16, "w").isinf().all()


def test_models_of_one_ancestor_are_permuted_and_stay_tied(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    matched = regauge.match(*folders)
    assert not matched.pair.is_folded
    matched.save(tmp_path / "a")
    saved = regauge.open_checkpoint(tmp_path / "a")
    assert saved.config == regauge.open_checkpoint(folders[0]).config
    assert "lm_head.weight" not in saved
    b = regauge.open_checkpoint(folders[1])
    name = "transformer.wte.weight"
    assert torch.equal(saved[name], b[name]), "a permutation of the stream rounds nothing"


@pytest.mark.parametrize("related", [True, False])
def test_layers_of_permuted_copies_are_not_compared_in_a_rotated_basis(
    related: bool, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream alone shows that one model is a permuted copy of the other."""
    picos.build("gpt2", 5).float().save_pretrained(tmp_path / "other")
    rotated: list[bool] = []
    solve_unit = search._solve_unit

    def spy(task: Any) -> Any:
        rotated.append("stream" in task[0].spec.spaces and bool(task[0].spec.fixed))
        return solve_unit(task)

    monkeypatch.setattr(search, "_solve_unit", spy)
    matched = regauge.match(folders[0], folders[1] if related else tmp_path / "other", data=None)
    assert matched.pair.is_folded == (not related)
    assert rotated
    assert set(rotated) == {not related}


def test_a_norm_that_cannot_be_folded_leaves_permutations(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 1)):
        model = picos.build("gpt2", seed).float()
        with torch.no_grad():
            model.get_parameter("transformer.ln_f.weight")[0] = 0.0
        model.save_pretrained(tmp_path / name)
    matched = regauge.match(tmp_path / "a", tmp_path / "b")
    assert not matched.pair.is_folded
    assert any("permutations only" in note for note in matched.match.notes)
    assert any("permutations only" in note for note in matched.results.unchecked)


def test_generated_text_matches_modules_by_activations(folders: tuple[Path, Path]) -> None:
    a, b = (regauge.load_model(folder) for folder in folders)
    matched = regauge.match(a, b, data="self")
    assert not matched.by_weights
    assert matched.distance < 1e-3


def test_a_shared_basis_needs_no_search(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = regauge.load_model(folders[0])
    with torch.no_grad():
        for p in near.parameters():
            p.add_(0.05 * torch.randn_like(p))
    deep = regauge.compare(folders[0], near, deep=True)
    assert deep.verdict == "same basis"
    assert deep.comparison.cosines[1] is not None

    def search(*arguments: object, **more: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr("regauge.matching.compare.match_states", search)
    fast = regauge.compare(folders[0], near)
    assert fast.verdict == "same basis"
    assert fast.comparison.cosines[1:] == (None, None)
    assert "matched" not in str(fast).replace("unmatched", "")
    assert "By layer" in fast.to_html()
    assert [f.id for f in fast.results.findings] == ["basis/unmatched"]
    with torch.no_grad():  # a tenth of the neurons of one layer in another order
        layer = near.transformer.h[0].mlp
        order = torch.arange(layer.c_fc.weight.shape[1])
        order[:8] = order[:8].roll(1)
        layer.c_fc.weight.copy_(layer.c_fc.weight[:, order])
        layer.c_fc.bias.copy_(layer.c_fc.bias[order])
        layer.c_proj.weight.copy_(layer.c_proj.weight[order])
    with pytest.raises(AssertionError, match="searched"):
        regauge.compare(folders[0], near)


@pytest.fixture(scope="module")
def wide() -> torch.nn.Module:
    """A GPT-2 of one layer with 32 heads."""
    torch.manual_seed(0)
    config = picos.gpt2(n_embd=128, n_layer=1, n_head=32)
    return transformers.GPT2LMHeadModel(config).apply(_fill)


def _fill(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters(recurse=False):
            p.normal_(std=0.1)


@pytest.mark.parametrize(
    ("change", "is_conclusive"),
    [("none", True), ("trained", True), ("heads", False), ("values", False), ("neurons", False)],
)
def test_a_few_moved_rows_need_a_search(
    wide: torch.nn.Module, change: str, is_conclusive: bool
) -> None:
    """They are few: nine of ten rows and columns of every matrix are similar."""
    spec, a = regauge.spec_of(wide), wide.state_dict()
    b = {n: t + 1e-3 * torch.randn(t.shape) for n, t in a.items()}
    attention, mlp = "transformer.h.0.attn.", "transformer.h.0.mlp."
    qkv, proj = b[f"{attention}c_attn.weight"], b[f"{attention}c_proj.weight"]
    if change == "heads":  # the first two, of four rows each
        order = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])
        for start in (0, 128, 256):
            qkv[:, start : start + 8] = qkv[:, start + order]
            b[f"{attention}c_attn.bias"][start : start + 8] = b[f"{attention}c_attn.bias"][
                start + order
            ]
        proj[:8] = proj[order]
    elif change == "values":  # those of one head, by a rotation
        turn = torch.linalg.qr(torch.randn(4, 4))[0]
        qkv[:, 256:260] = qkv[:, 256:260] @ turn
        b[f"{attention}c_attn.bias"][256:260] = b[f"{attention}c_attn.bias"][256:260] @ turn
        proj[:4] = turn.T @ proj[:4]
    elif change == "neurons":
        b[f"{mlp}c_fc.weight"][:, :2] = b[f"{mlp}c_fc.weight"][:, [1, 0]]
        b[f"{mlp}c_fc.bias"][:2] = b[f"{mlp}c_fc.bias"][[1, 0]]
        b[f"{mlp}c_proj.weight"][:2] = b[f"{mlp}c_proj.weight"][[1, 0]]
    elif change == "trained":  # neurons beyond recognition, but at their places
        b[f"{mlp}c_fc.weight"][:, :2] = torch.randn(128, 2)
        b[f"{mlp}c_proj.weight"][:2] = torch.randn(2, 128)
    assert (compare_unmatched(spec, a, b) is not None) == is_conclusive


def test_fingerprints_of_all_sources_agree(folders: tuple[Path, Path]) -> None:
    first = regauge.fingerprint(folders[0])
    assert first.is_same(regauge.fingerprint(regauge.load_model(folders[0])))
    assert first.is_same(regauge.fingerprint(folders[1]))


def test_what_is_no_model_is_refused_with_a_way_out(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    model = regauge.load_model(folders[0])
    with pytest.raises(SpecError, match="no config") as missing:
        regauge.match(model.state_dict(), model)
    assert "spec=" in str(missing.value.hint)
    with pytest.raises(UnknownModelError, match="got int"):
        regauge.match(3, model)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="must be a tensor"):
        regauge.match({"x": 1}, model, spec=regauge.spec_of(model))  # type: ignore[dict-item]
    with pytest.raises(DataError, match="nonsense does not exist"):
        regauge.match(*folders, data="nonsense")
    with pytest.raises(RegaugeError, match='"self" or "noise", got int'):
        regauge.match(*folders, data=3)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="is the input"):
        regauge.match(*folders).save(folders[0])
    with pytest.raises(RegaugeError, match="one family"):
        regauge.compare(folders[0], picos.build("bert").float())


def test_a_locked_model_is_compared_but_not_matched(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    opened = regauge.open_checkpoint(folders[0])
    locked = tmp_path / "locked"
    plan_lock(opened, regauge.spec_of(opened), locked, regauge.generate_key()).write()
    with pytest.raises(LockError, match="is locked by the key"):
        regauge.match(locked, folders[1])
    compared = regauge.compare(locked, folders[0])  # the key moves the layers, but not the edges
    assert compared.verdict == "related"
    assert "probably locked" in str(compared)

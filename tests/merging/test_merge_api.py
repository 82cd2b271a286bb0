"""`regauge.merge` and `regauge.barrier` on what users hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regauge
import support.picos as picos
from regauge.core.action import apply
from regauge.core.element import element
from regauge.data.sources import DataSource
from regauge.errors import CheckpointError, LockError, MatchError, MergeError
from regauge.locking.locked_checkpoints import plan_lock
from regauge.merging import merge_states
from support.merges import finetune, reader, state_of

Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A model, and a fine-tuned copy of it."""
    root = tmp_path_factory.mktemp("models")
    picos.build("gpt2").float().save_pretrained(root / "a")
    return root / "a", finetune(root / "a", root / "b", 1)


@pytest.fixture(scope="module")
def moved(folders: Folders) -> Any:
    """The fine-tuned copy in another basis, as a module."""
    model: Any = regauge.load_model(folders[1])
    spec = regauge.spec_of(model)
    model.load_state_dict(regauge.apply(regauge.element(spec, 3), model.state_dict()))
    return model


def mean_of(folders: Folders) -> dict[str, torch.Tensor]:
    a, b = (state_of(folder) for folder in folders)
    return {name: (a[name] + b[name]) / 2 for name in a}


@pytest.mark.parametrize("kind", ["paths", "texts", "checkpoints", "modules", "states", "mixed"])
def test_every_kind_of_source_is_merged_and_saved(
    folders: Folders, kind: str, tmp_path: Path
) -> None:
    modules = [regauge.load_model(folder) for folder in folders]
    states: list[Any] = [module.state_dict() for module in modules]
    sources: dict[str, list[Any]] = {
        "paths": list(folders),
        "texts": [str(folder) for folder in folders],
        "checkpoints": [regauge.open_checkpoint(folder) for folder in folders],
        "modules": modules,
        "states": states,
        "mixed": [folders[0], modules[1]],
    }
    merged = regauge.merge(sources[kind])
    state = merged.state()
    for name, wanted in mean_of(folders).items():
        assert torch.allclose(state[name], wanted, atol=1e-6)
    merged.save(tmp_path / "out")
    saved = state_of(tmp_path / "out")
    assert all(torch.equal(value, state[name]) for name, value in saved.items())
    assert "merged by linear" in merged._repr_html_()
    assert merged.results.headline.tone == "good"
    assert json.loads(merged.to_json()) == merged.to_dict()


def test_models_in_another_basis_are_rejected_or_aligned(folders: Folders, moved: Any) -> None:
    with pytest.raises(MergeError, match="does not share a basis"):
        regauge.merge([folders[0], moved])
    merged = regauge.merge([folders[0], moved], align=True)
    (verdict,) = merged.verdicts
    assert verdict.shared is False
    assert "aligned with" in verdict.moved
    forced = regauge.merge([folders[0], moved], options=regauge.MergeOptions(force=True))
    assert forced.results.headline.tone == "bad"
    assert "do not share a basis" in forced.results.headline.text
    assert merged.results.headline.tone == "none", "an alignment is not yet a good result"
    distances = [
        sum(float((t - wanted).square().sum()) for t, wanted in zip(state, means, strict=True))
        for means in (list(mean_of(folders).values()),)
        for state in ([result.state()[n] for n in mean_of(folders)] for result in (merged, forced))
    ]
    assert distances[0] < 0.05 * distances[1]


def test_weights_base_and_parameters_reach_the_method(folders: Folders) -> None:
    a, b = (state_of(folder) for folder in folders)
    options = regauge.MergeOptions(parameters={"lambda": 0.5})
    state = regauge.merge(
        [folders[1]], base=folders[0], method="task_arithmetic", weights=0.5, options=options
    ).state()
    for name, value in state.items():
        assert torch.allclose(value, a[name] + 0.25 * (b[name] - a[name]), atol=1e-6)
    for arguments, words in (
        ({"method": "slerp", "weights": [1.0, 2.0]}, "takes no weights"),
        ({"weights": [1.0, 2.0, 3.0]}, "for each of 2 models, got 3"),
    ):
        with pytest.raises(MergeError, match=words):
            regauge.merge(list(folders), **arguments)  # type: ignore[arg-type]
    with pytest.raises(MergeError, match="must be two or more"):
        regauge.merge([folders[0]])
    with pytest.raises(MergeError, match="list of models"):
        regauge.merge(folders[0])


def test_a_recipe_defines_the_merge(folders: Folders, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"merge_method: linear\nparameters: {{weight: 1}}\nmodels:\n- model: {folders[0]}\n"
        f"- model: {folders[1]}\n"
    )
    state = regauge.merge(recipe).state()
    assert all(torch.allclose(state[n], t, atol=1e-6) for n, t in mean_of(folders).items())
    with pytest.raises(MergeError, match="the recipe defines the merge"):
        regauge.merge(recipe, method="ties")


def test_statistics_of_modules_in_memory(folders: Folders, tmp_path: Path) -> None:
    tokens = reader(tmp_path, 30) / "tokenizer.json"
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"t{i % 30}" for i in range(400)))
    data = DataSource(str(text), tokenizer=str(tokens), length=8, samples=8)
    of_files, of_modules = (
        regauge.merge(models, method="fisher", data=data).state()
        for models in (list(folders), [regauge.load_model(folder) for folder in folders])
    )
    assert all(torch.equal(of_files[name], of_modules[name]) for name in of_files)
    plain = mean_of(folders)
    assert any(not torch.allclose(of_files[name], plain[name], atol=1e-4) for name in plain)


def test_a_locked_model_is_not_merged(folders: Folders, tmp_path: Path) -> None:
    opened = regauge.open_checkpoint(folders[0])
    locked = tmp_path / "locked"
    plan_lock(opened, regauge.spec_of(opened), locked, regauge.generate_key()).write()
    with pytest.raises(LockError, match="is locked by the key"):
        regauge.merge([locked, folders[1]])


def test_a_barrier_of_paths_and_modules(folders: Folders, moved: Any, tmp_path: Path) -> None:
    tokens = reader(tmp_path, 30) / "tokenizer.json"
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"t{i % 30}" for i in range(400)))
    data = DataSource(str(text), tokenizer=str(tokens), length=8)
    options = regauge.BarrierOptions(points=3, calibrate=False)
    measured = regauge.barrier(folders[0], moved, data, stream="permutation", options=options)
    assert abs(measured.barriers["matched"]) < 0.1 * abs(measured.barriers["unaligned"])
    assert "matched" in str(measured)
    assert "barrier in nats" in repr(measured)
    of_files = regauge.barrier(*folders, data, align=None, options=options)
    of_modules = regauge.barrier(
        *(regauge.load_model(folder) for folder in folders), data, align=None, options=options
    )
    assert of_files.barriers == of_modules.barriers
    assert set(of_files.barriers) == {"unaligned"}
    with pytest.raises(MatchError, match="same tensors"):
        regauge.barrier(folders[0], picos.build("gpt2-base").float(), data, options=options)


def test_an_existing_output_is_rejected_before_tensors_are_computed(
    folders: Folders, tmp_path: Path
) -> None:
    merged = regauge.merge([regauge.load_model(folder) for folder in folders])
    done: list[int] = []
    merged.save(tmp_path / "new", progress=lambda n, total, message: done.append(n))
    assert done
    done.clear()
    with pytest.raises(CheckpointError, match="exists already"):
        merged.save(tmp_path / "new", progress=lambda n, total, message: done.append(n))
    assert not done


def test_a_merge_is_shown_after_it_was_saved(folders: Folders, tmp_path: Path) -> None:
    merged = regauge.merge(folders, out=tmp_path / "out")
    written = merged.save()
    assert merged.to_dict()["bytes"] == written.bytes
    assert "2 models merged" in merged._repr_html_()


@pytest.mark.parametrize(
    ("family", "buffer", "value"),
    [
        ("bert", "bert.embeddings.position_ids", torch.arange(16)[None]),
        ("gpt2", "transformer.h.1.attn.masked_bias", torch.tensor(-1e4)),
    ],
)
@pytest.mark.parametrize("holder", [0, 1])
def test_slices_copy_a_buffer_that_one_of_the_models_lacks(
    family: str, buffer: str, value: torch.Tensor, holder: int, tmp_path: Path
) -> None:
    picos.build(family).float().save_pretrained(tmp_path / "a")
    folders = [tmp_path / "a", finetune(tmp_path / "a", tmp_path / "b", 1)]
    without = regauge.merge(folders).state()
    file = folders[holder] / "model.safetensors"
    save_file(load_file(file) | {buffer: value}, file, {"format": "pt"})
    sources = "".join(f"  - {{model: {folder}, layer_range: [0, 2]}}\n" for folder in folders)
    (tmp_path / "slices.yaml").write_text(
        f"merge_method: linear\nparameters: {{weight: 1}}\nslices:\n- sources:\n{sources}"
    )
    sliced = regauge.merge(tmp_path / "slices.yaml").state()
    whole = regauge.merge(folders).state()
    assert torch.equal(sliced[buffer], value)
    assert sliced.keys() == whole.keys() == without.keys() | {buffer}
    assert all(torch.equal(sliced[name], whole[name]) for name in whole)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_neurons_keep_their_norms(family: str) -> None:
    models = [picos.build(family, seed).float() for seed in (0, 1)]
    options = [
        regauge.MergeOptions({"keep_norms": keep}, force=True, seed=0) for keep in (False, True)
    ]
    plain, kept = (regauge.merge(models, weights=0.5, options=o).state() for o in options)
    first, second = (model.state_dict() for model in models)
    neurons = [
        n for n in plain if n.endswith(("c_fc.weight", "gate_proj.weight", "up_proj.weight"))
    ]
    assert neurons
    for name in neurons:
        reading = 0 if "c_fc" in name else 1
        wanted = (first[name].norm(dim=reading) + second[name].norm(dim=reading)) / 2
        assert torch.allclose(kept[name].norm(dim=reading), wanted, rtol=1e-5)
        assert (plain[name].norm(dim=reading) < wanted).all(), "the control: means are shorter"
        cosine = torch.nn.functional.cosine_similarity(kept[name], plain[name], dim=reading)
        assert torch.allclose(cosine, torch.ones_like(cosine), atol=1e-5)
    others = set(plain) - set(neurons)
    assert all(torch.equal(plain[name], kept[name]) for name in others)


def products_of(family: str, state: Any, layer: int) -> list[torch.Tensor]:
    """Return the products of queries and keys, and of values and outputs, for each head."""
    d, heads = (12, 3) if family == "gpt2" else (16, 4)
    if family == "gpt2":
        at = f"transformer.h.{layer}.attn."
        rows = torch.cat([state[at + "c_attn.weight"], state[at + "c_attn.bias"][None]])
        q, k, v = (part.unflatten(1, (heads, -1)) for part in rows.split(d, 1))
        o = state[at + "c_proj.weight"].unflatten(0, (heads, -1))
    else:
        at = f"model.layers.{layer}.self_attn."
        q, k, v = (state[f"{at}{n}_proj.weight"].T.unflatten(1, (-1, d // heads)) for n in "qkv")
        v = v.repeat_interleave(heads // v.shape[1], 1)
        o = state[at + "o_proj.weight"].T.unflatten(0, (heads, -1))
    outputs = torch.einsum("fhc,hcd->hfd", v, o)
    return [outputs] if family == "llama" else [torch.einsum("fhc,ghc->hfg", q, k), outputs]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_products_of_heads_are_averaged(family: str) -> None:
    models = [picos.build(family, seed).float() for seed in (0, 1)]
    states = [model.state_dict() for model in models]
    options = [
        regauge.MergeOptions({"products": products}, force=True) for products in (False, True)
    ]
    plain, merged = (regauge.merge(models, weights=[1, 3], options=o).state() for o in options)
    wanted = [
        a / 4 + 3 * b / 4 for a, b in zip(*(products_of(family, s, 0) for s in states), strict=True)
    ]
    for product, control, want in zip(
        products_of(family, merged, 0), products_of(family, plain, 0), wanted, strict=True
    ):
        if family == "gpt2":  # the best approximation of the rank of a head
            left, values, right = torch.linalg.svd(want)
            want = (left[..., :4] * values[:, None, :4]) @ right[:, :4]
            torch.testing.assert_close(product, want, atol=1e-5, rtol=1e-4)
        error, before = (product - want).norm(), (control - want).norm()
        assert error < 0.9 * before, "the control: products of averages"
    changed = {n for n in plain if not torch.equal(plain[n], merged[n])}
    attention = ("c_attn", "c_proj") if family == "gpt2" else ("v_proj", "o_proj")
    assert changed
    assert all("attn" in n and any(part in n for part in attention) for n in changed)


def test_products_do_not_depend_on_the_basis_inside_heads() -> None:
    model, other = (picos.build("gpt2", seed).float() for seed in (0, 1))
    spec, options = regauge.spec_of(model), {"products": True}
    states = [model.state_dict(), other.state_dict()]
    moved = apply(element(spec, 3, spaces=["qk", "vo"]), states[0])
    first = merge_states(states, spec=spec, **options)
    second = merge_states([moved, states[1]], spec=spec, **options)
    for one, two in zip(products_of("gpt2", first, 0), products_of("gpt2", second, 0), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-3)
    same = merge_states([states[0], states[0]], spec=spec, **options)
    for one, two in zip(
        products_of("gpt2", same, 0), products_of("gpt2", states[0], 0), strict=True
    ):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


def test_parameters_that_need_a_spec_say_so() -> None:
    state = picos.build("gpt2", 0).state_dict()
    for name in ("products", "keep_norms"):
        with pytest.raises(MergeError, match=f"{name} need the spec"):
            merge_states([state, state], **{name: True})


def test_factors_of_a_product_need_the_same_weights(tmp_path: Path) -> None:
    folders = []
    for seed in (0, 1):
        folders.append(tmp_path / str(seed))
        picos.build("gpt2", seed).save_pretrained(folders[-1])
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(
        "merge_method: linear\nparameters: {products: true}\nmodels:\n"
        f"  - model: {folders[0]}\n    parameters: {{weight: 1}}\n"
        f"  - model: {folders[1]}\n    parameters:\n      weight:\n"
        "        - {filter: c_proj, value: 0.5}\n        - {value: 1}\n"
    )
    with pytest.raises(MergeError, match="must have the same weights with products"):
        regauge.merge(recipe, options=regauge.MergeOptions(force=True)).save(tmp_path / "out")

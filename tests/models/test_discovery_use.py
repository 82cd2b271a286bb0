"""A discovered spec, used: inspected, verified, locked, matched and merged, on the command line and
in Python, by the names of the files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import regauge
from regauge.cli.app import run
from regauge.core.action import apply
from regauge.core.check import check
from regauge.core.element import Element
from regauge.errors import CutError, LockError
from regauge.locking.authorize import authorize_with_element
from regauge.locking.keys import load_key
from regauge.locking.lock import lock_state, locked_element
from regauge.models.cut import cut
from regauge.models.discovery import discovery_of, example_inputs, proof
from regauge.models.discovery.stored_names import stored_spec
from regauge.models.families import spec_from
from regauge.models.load import load_model
from regauge.testing import compute_outputs
from support.further_models import FURTHER, timm_models
from support.own_modules_hidden import Hidden
from support.picos import IDS, PICOS, build
from support.spec_equality import differences, larger


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-NeoX: no family knows it, and transformers stores it under other names than it has in
    memory.
    """
    where = tmp_path_factory.mktemp("discovered")
    torch.manual_seed(0)
    model = FURTHER["gpt-neox"]()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.3 + (1.0 if p.dim() == 1 else 0.0))
    model.save_pretrained(where / "plain")
    assert not state_of(where / "plain").keys() <= model.state_dict().keys()
    return where


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "REGAUGE_CACHE", str(tmp_path_factory.getbasetemp() / "cache" / "experiments")
    )


def logits(folder: Path, key: Path | None = None) -> torch.Tensor:
    model = load_model(folder, "float64")
    if key is not None:
        regauge.authorize(model, load_key(key, "lock"), files=folder)
    with torch.no_grad():
        return model(**IDS).logits  # type: ignore[no-any-return]


def test_a_saved_folder_is_inspected_and_moved_by_the_names_in_its_files(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(folder / "plain"), "--discover", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["faults"] == []
    assert facts["discovered"]["error"] < 1e-9
    assert (
        run(
            [
                "inspect",
                str(folder / "plain"),
                "--explain",
                next(n for n in state_of(folder / "plain") if "embed_in" in n),
            ]
        )
        == 0
    )
    assert "it is looked up by index" in capsys.readouterr().out
    assert (
        run(["move", str(folder / "plain"), "--random", "--seed", "1", "-o", str(folder / "moved")])
        == 0
    )
    before, after = state_of(folder / "plain"), state_of(folder / "moved")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[n], after[n]) for n in before)
    assert float((logits(folder / "plain") - logits(folder / "moved")).abs().max()) < 1e-3


def test_it_is_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["verify", str(folder / "plain"), "--dtype", "float64", "--steps", "0", "--no-general"])
        == 0
    )
    captured = capsys.readouterr()
    assert "no family describes this model" in captured.out
    assert "holds  column/forward" in captured.out
    assert "holds  description/forward" in captured.out


def test_it_is_locked_used_with_its_key_and_unlocked(folder: Path) -> None:
    plain, key, locked = folder / "plain", folder / "key", folder / "locked"
    assert run(["keygen", "-o", str(key)]) == 0
    assert run(["lock", str(plain), "-k", str(key), "-o", str(locked)]) == 0
    expected = logits(plain)
    assert float((logits(locked) - expected).abs().max()) > 0.1
    assert float((logits(locked, key) - expected).abs().max()) < 1e-9
    assert run(["unlock", str(locked), "-k", str(key), "-o", str(folder / "back")]) == 0
    before, after = state_of(plain), state_of(folder / "back")
    assert all(torch.equal(before[n], after[n]) for n in before)


def test_it_is_matched_and_merged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    plain, other = load_model(folder / "plain", "float32"), folder / "other"
    g = regauge.element(regauge.spec_of(plain), 2)
    near = {n: t + 1e-3 * torch.randn_like(t) for n, t in plain.state_dict().items()}
    plain.load_state_dict(apply(g, near))
    plain.save_pretrained(other)
    expected = state_of(folder / "plain")
    assert any(float((t - expected[n]).abs().max()) > 0.1 for n, t in state_of(other).items())
    assert run(["match", str(other), str(folder / "plain"), "-o", str(folder / "matched")]) == 0
    assert (
        max(float((t - expected[n]).abs().max()) for n, t in state_of(folder / "matched").items())
        < 0.05
    )
    assert (
        run(["merge", str(folder / "plain"), str(other), "-o", str(folder / "apart")]) != 0
    )  # no basis in common
    assert "--align" in capsys.readouterr().err
    assert (
        run(["merge", str(folder / "plain"), str(other), "--align", "-o", str(folder / "merged")])
        == 0
    )
    assert float((logits(folder / "merged") - logits(folder / "plain")).abs().max()) < 0.1


def test_in_python_a_module_of_ones_own_is_locked_at_the_cut_that_was_found() -> None:
    from support.own_modules import Mnist

    torch.manual_seed(0)
    module, images = Mnist().double().eval(), {"x": torch.randn(2, 1, 28, 28, dtype=torch.float64)}
    discovery = discovery_of(module, images)
    (boundary,) = discovery.boundaries
    assert (boundary.blocks, boundary.enter, boundary.leave) == (
        "transformer.layers",
        {"input": "_ _ stream"},
        "_ _ stream",
    )
    assert {p for n, p in discovery.spec.parts.items() if n.startswith("transformer.layers.")} == {
        "backbone"
    }
    assert {discovery.spec.parts[n] for n in ("cls_token", "patch_to_embedding.weight")} == {
        "embed"
    }
    assert discovery.spec.parts["mlp_head.0.weight"] == "head"
    key, before = regauge.generate_key(), compute_outputs(module, images)["logits"]
    locked = lock_state(discovery.spec, module.state_dict(), key)
    module.load_state_dict(locked.state)
    assert float((compute_outputs(module, images)["logits"] - before).abs().max()) > 1e-3
    authorize_with_element(
        module, locked_element(locked.spec, locked.record, key), boundaries=discovery.boundaries
    )
    assert float((compute_outputs(module, images)["logits"] - before).abs().max()) < 1e-9


def test_a_model_without_blocks_is_not_cut_and_says_so() -> None:
    discovery = discovery_of(Hidden(torch.relu), torch.randn(2, 6))
    assert discovery.boundaries == ()
    with pytest.raises(LockError, match="the lock would have no effect") as caught:
        lock_state(discovery.spec, Hidden(torch.relu).state_dict(), regauge.generate_key())
    assert "no embedding or head" in str(caught.value.hint)
    torch.manual_seed(0)
    with pytest.raises(
        CutError, match="no list of blocks that pass a stream"
    ):  # ALBERT calls one block again and again
        cut(FURTHER["albert"]().eval())


CUTS = {"whisper": 2, "siglip": 2, "beit": 1, "phi": 1, "falcon": 1, "modernbert": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CUTS, "timm beit", "timm convnext", "timm resnet"])
def test_a_locked_backbone_computes_the_plain_function_between_its_boundaries(name: str) -> None:
    torch.manual_seed(0)
    if name.startswith("timm "):
        model = timm_models()[name.removeprefix("timm ")]().double().eval()
        inputs = {"x": torch.randn(2, 3, 32, 32, dtype=torch.float64)}
    else:
        model = FURTHER[name]().double().eval()
        inputs = {
            k: v.double() if v.is_floating_point() else v for k, v in example_inputs(model).items()
        }
    model = proof.randomized_copy(model)
    discovery = discovery_of(model, inputs)
    assert len(discovery.boundaries) == CUTS.get(name, len(discovery.boundaries)) > 0
    before = compute_outputs(model, inputs)
    whole = regauge.element(discovery.spec, 4)
    g = Element(
        discovery.spec,
        {n: m for n, m in whole.members.items() if discovery.spec.spaces[n].size > 1},
    )
    model.load_state_dict(apply(g, model.state_dict(), "backbone"))
    assert (
        max(float((compute_outputs(model, inputs)[k] - v).abs().max()) for k, v in before.items())
        > 1e-3
    )
    with cut(model, boundaries=discovery.boundaries).route(
        lambda x: x.restore(g, x.transform(g).run())
    ):
        after = compute_outputs(model, inputs)
    assert max(float((after[k] - v).abs().max()) for k, v in before.items()) < 1e-9 * max(
        1.0, *(float(v.abs().max()) for v in before.values())
    )


@pytest.mark.parametrize(
    "name", ["vit", "mixtral", pytest.param("dinov2-swiglu", marks=pytest.mark.slow)]
)
def test_what_is_stored_in_another_form_is_described_as_the_family_does(
    name: str, tmp_path: Path
) -> None:
    """Renamed (ViT), one tensor for each expert (Mixtral, whose loop over experts is traced in one
    batch), two tensors in one (DINOv2's SwiGLU).
    """
    model = build(name)
    model.save_pretrained(tmp_path)
    state = state_of(tmp_path)
    discovery = discovery_of(model, PICOS[name].inputs).spec
    assert check(discovery, state) != []
    spec, names = stored_spec(discovery, model, state)
    known = spec_from(json.loads((tmp_path / "config.json").read_text()), state)
    assert check(spec, state) == []
    assert {n.gain: set(n.readers) for n in spec.norms} == {
        n.gain: set(n.readers) for n in known.norms
    }
    unread = [new for n in model.state_dict() if "mask_token" in n for new in names.get(n, [n])]
    shapes = {n: tuple(t.shape) for n, t in state.items() if n not in unread}
    assert differences(spec, known, shapes) == []
    assert larger(spec, known, shapes) == []
    if name == "mixtral":
        experts = {n: a for n, a in known.tensors.items() if "{expert" in n}
        assert len(experts) == 6
        assert {n: spec.tensors[n] for n in experts} == experts

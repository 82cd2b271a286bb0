"""Discovery on whole models: it finds what the families say, and as much where no family does. All
of them are slow; a few run always.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from regauge.checkpoints.spec_files import load_spec
from regauge.core import axes as ax
from regauge.core.action import apply
from regauge.core.element import element
from regauge.core.fold import folded_spec
from regauge.core.spec import Spec
from regauge.models.discovery import discovery_of, example_inputs
from regauge.testing import assert_symmetry, compute_outputs
from support.further_models import FURTHER, timm_models
from support.jacobians import CASES, group_dimension, jacobian, nullity
from support.own_modules import Characters, Cifar, Mnist, Perceptual
from support.picos import PICOS, build, spec_of
from support.spec_equality import differences, larger

# Tensors that the family knows and the class does not read, or not on these inputs: there is no
# graph to read them off.
UNREAD = {
    "deberta-v2-unread": ("encoder.rel_embeddings", "encoder.LayerNorm"),
    "deberta-v2-absolute": ("encoder.LayerNorm",),
    "clip-classifier": ("vision_model.post_layernorm",),
}
MASKED = {"bool_masked_pos": torch.tensor([[True, False, True, False], [False, False, True, True]])}
QUICK = ("gpt2", "llama", "bert", "vit", "qwen3", "mixtral")
KERNELS = ("eager", "sdpa")


def both(names: object) -> list[object]:
    listed = [(name, kernel) for name in PICOS for kernel in KERNELS]
    return [
        pytest.param(n, k, marks=() if n in QUICK and k == "sdpa" else pytest.mark.slow)
        for n, k in listed
        if n in names
    ]  # type: ignore[operator]


def useful(spec: Spec) -> set[str]:
    """The gains that fold, of spaces that become larger by it."""
    after = folded_spec(spec).spaces
    gains = [*(n.gain for n in spec.norms), *(s.gain for s in spec.scales)]
    return {
        g
        for g in gains
        if any(after[s].group != spec.spaces[s].group for s in ax.spaces(spec.tensors[g]))
    }


@pytest.mark.parametrize(("name", "kernel"), both(PICOS))
def test_what_is_discovered_is_what_the_family_says(name: str, kernel: str) -> None:
    model = build(name)
    if hasattr(model, "set_attn_implementation"):
        try:
            model.set_attn_implementation(kernel)
        except ValueError:
            pytest.skip(f"{type(model).__name__} has no {kernel} attention")
    elif kernel == "sdpa":
        pytest.skip("timm's models choose their kernel themselves")
    if name == "mixtral":
        model.set_experts_implementation(
            "batched_mm"
        )  # the loop over experts depends on data, and is not traced
    inputs = PICOS[name].inputs
    if name == "vit-masked" or name.startswith("dinov2"):
        inputs = inputs | MASKED
    discovery, known = discovery_of(model, inputs), spec_of(model)
    shapes = {
        n: tuple(t.shape)
        for n, t in model.state_dict().items()
        if not n.startswith(UNREAD.get(name, ("-",)))
    }
    assert differences(discovery.spec, known, shapes) == []
    assert discovery.dropped == ()
    assert discovery.error < 1e-9
    assert larger(discovery.spec, known, shapes) == []  # a family that says less is to be corrected
    assert useful(discovery.spec) == useful(known)
    assert_symmetry(model, discovery.spec, element(discovery.spec, 5), inputs)


def test_a_smaller_spec_than_the_familys_is_reported() -> None:
    """The comparison itself can fail."""
    from dataclasses import replace

    from regauge.core.groups import Permutation
    from regauge.models.discovery.proof import drop_space

    model = build("llama")
    known = spec_of(model)
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    assert differences(known, known, shapes) == []
    assert any(
        "qk.0 is not found" in d or "is not" in d
        for d in differences(drop_space(known, "qk.0"), known, shapes)
    )
    smaller = replace(
        known, spaces={**known.spaces, "vo.1": replace(known.spaces["vo.1"], group=Permutation())}
    )
    assert (
        differences(smaller, known, shapes)[0] == "vo.1: folded, permutation is smaller than linear"
    )


ALWAYS = ("phi", "bloom")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.slow) for n in FURTHER]
)
def test_further_architectures_are_discovered_moved_saved_and_loaded(
    name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = FURTHER[name]().double().eval()
    inputs = {
        k: v.double() if v.is_floating_point() else v for k, v in example_inputs(model).items()
    }
    discovery = discovery_of(model, inputs)
    assert discovery.dropped == ()
    assert discovery.error < 1e-9
    spec = discovery.spec
    roles = {n.split(".")[0] for n in spec.spaces}
    assert roles >= {"stream", "ffn"}
    assert roles & {"head", "kv", "vo"}
    g = element(spec, 3)
    moved = apply(g, {k: v.detach().clone() for k, v in model.state_dict().items()})
    twin = FURTHER[name]().double().eval()
    twin.load_state_dict(moved)
    twin.save_pretrained(tmp_path / "moved")
    loaded = type(model).from_pretrained(tmp_path / "moved", dtype=torch.float64).eval()
    before, after = compute_outputs(model, inputs), compute_outputs(loaded, inputs)
    from regauge.core.action import act

    for key in spec.outputs:
        expected = act(g, before[key], spec.outputs[key]) if spec.visible else before[key]
        assert float((after[key] - expected).abs().max()) < 1e-9 * max(
            1.0, float(expected.abs().max())
        )
    assert any(
        not torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp-mixer", "convnext", "resnet", "eva", "cait", "beit"])
def test_models_of_timm(name: str) -> None:
    torch.manual_seed(0)
    model = timm_models()[name]().double().eval()
    images = torch.randn(
        2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    discovery = discovery_of(model, {"x": images})
    assert discovery.dropped == ()
    assert discovery.error < 1e-9
    assert any(n.startswith("stream") for n in discovery.spec.spaces)
    assert_symmetry(model, discovery.spec, element(discovery.spec, 2), {"x": images})


OWN = {
    "vit_cifar10_postln": (Cifar, lambda: {"x": torch.randn(2, 3, 32, 32)}),
    "vit_mnist_preln": (Mnist, lambda: {"x": torch.randn(2, 1, 28, 28)}),
    "gptchar_learnedpos": (lambda: Characters(65), lambda: {"x": torch.randint(0, 65, (2, 9))}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_modules_of_no_library(name: str) -> None:
    """What is discovered is what their spec files say."""
    make, inputs = OWN[name]
    torch.manual_seed(0)
    module = make()
    discovery = discovery_of(module, inputs())
    known = load_spec(Path(__file__).parents[1] / "support" / "specs" / f"{name}.toml")
    assert discovery.dropped == ()
    assert (
        differences(
            discovery.spec, known, {n: tuple(t.shape) for n, t in module.state_dict().items()}
        )
        == []
    )


ASSETS = Path(__file__).parents[3] / "shared" / "assets"
REAL = {
    **OWN,
    "lpips_alex": (
        Perceptual,
        lambda: {"x": torch.rand(2, 3, 63, 63) * 2 - 1, "y": torch.rand(2, 3, 63, 63) * 2 - 1},
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "vit_mnist_preln" else pytest.mark.slow) for n in REAL],
)
def test_modules_of_no_library_with_the_weights_that_they_were_trained_to(name: str) -> None:
    """Discovered on the trained module, moved by a random element of everything, in strict float64:
    the same outputs.
    """
    if not ASSETS.is_dir():
        pytest.skip("the shared assets are not here")
    make, inputs = REAL[name]
    torch.manual_seed(0)
    module = make()
    state = load_file(ASSETS / f"{name}.safetensors")
    module.load_state_dict({k: v.float() for k, v in state.items()})
    module = module.double().eval()
    double_inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs().items()}
    discovery = discovery_of(module, double_inputs)
    assert (discovery.dropped, discovery.spec.notes) == ((), ())
    g = element(discovery.spec, 8)
    before = compute_outputs(module, double_inputs)["logits"]
    moved = apply(g, module.state_dict())
    assert all(
        not torch.equal(moved[n], t)
        for n, t in module.state_dict().items()
        if "weight" in n and n in discovery.spec.tensors
    )
    module.load_state_dict(moved)
    assert float(
        (compute_outputs(module, double_inputs)["logits"] - before).abs().max()
    ) < 1e-9 * max(1.0, float(before.abs().max()))
    if name == "lpips_alex":
        assert [str(s.group) for s in discovery.spec.spaces.values()] == ["permutation"] * 5
        assert discovery.spec.tensors["lin1.weight"] == "_1 conv1* _1 _1"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_discovery_misses_no_continuous_symmetry(case: str) -> None:
    """The certificate: the kernel of the Jacobian is the discovered group and the flat directions
    that are not a change of basis.
    """
    model, inputs, extras, folds = CASES[case]()
    spec = discovery_of(model, inputs).spec
    assert nullity(jacobian(model, inputs)) == group_dimension(
        folded_spec(spec) if folds else spec
    ) + sum(extras.values())

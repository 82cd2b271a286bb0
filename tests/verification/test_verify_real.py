"""Verify on real weights: every law holds in three dtypes, through the command line and on modules
of one's own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from regauge import open_checkpoint, verify
from regauge.checkpoints.spec_files import load_spec
from regauge.cli import main
from regauge.results.findings import load_results
from support.own_modules import Characters, Cifar, Mnist
from support.paths import ASSETS, FETCHED
from support.spec_assets import SPECS, data, needs_assets

DTYPES = ("float64", "float32", "bfloat16")


@needs_assets
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (i + k) % 3 == 0 else pytest.mark.slow)
        for i, name in enumerate(("vit_cifar10_postln", "vit_mnist_preln", "gptchar_learnedpos"))
        for k, dtype in enumerate(DTYPES)
    ],
)
def test_modules_of_ones_own(name: str, dtype: str) -> None:
    """Three networks of no library: a spec file says what their tensors are, one line where
    they are cut.
    """
    forward, x, _ = data(name, 2)
    state = dict(open_checkpoint(ASSETS / f"{name}.safetensors"))
    module = {"vit_cifar10_postln": Cifar, "vit_mnist_preln": Mnist}.get(
        name, lambda: Characters(len(state["token_embedding.weight"]))
    )()
    module.load_state_dict(state)
    x = x if x.is_floating_point() else x[:, :24]
    with torch.no_grad():
        assert torch.allclose(module.eval()(x), forward(state, x), atol=1e-4)
    kind = getattr(torch, dtype)
    inputs = {"x": x.to(kind) if x.is_floating_point() else x}
    results = verify(
        module.to(kind),
        inputs,
        spec=load_spec(SPECS / f"{name}.toml"),
        boundaries=module.boundaries,
        steps=2,
    )
    assert not [
        f.sentence for f in results.findings if f.holds is False or "inconclusive" in f.sentence
    ]
    assert {"row/forward", "column/weights", "both/trained-weights", "description/forward"} <= {
        f.id for f in results.findings if f.holds
    }


CHECKPOINTS = {
    "stories260K": ASSETS / "llama_stories260K.safetensors",
    "stories15M": ASSETS / "llama_stories15M_fp16.safetensors",
    "gpt2-pair": ASSETS / "gpt2_pair" / "seed1",
    "minilm": FETCHED / "minilm",
    "dinov2-small": FETCHED / "dinov2-small",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n == "stories15M" else n for n in CHECKPOINTS],
)
def test_checkpoints_through_the_command_line(name: str, tmp_path: Path) -> None:
    if not CHECKPOINTS[name].exists():
        pytest.skip(
            f"{CHECKPOINTS[name].name} is absent; `make real` fetches what the assets can fetch"
        )
    command = [
        "verify",
        str(CHECKPOINTS[name]),
        "--steps",
        "1",
        "--no-general",
        "--threads",
        "1",
        "--json",
        str(tmp_path / "r.json"),
    ]
    for dtype in DTYPES if name == "stories260K" else ("float32",):
        assert main([*command, "--dtype", dtype]) == 0
        results = load_results(tmp_path / "r.json")
        assert not [f.sentence for f in results.findings if "inconclusive" in f.sentence]
        assert results.facts["dtype"] == dtype
        (tmp_path / "r.json").unlink()


@needs_assets
def test_inputs_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = str(CHECKPOINTS["stories260K"]), tmp_path / "batch.npz"
    np.savez(file, input_ids=np.array([[1, 5, 9, 30, 7], [1, 8, 8, 100, 2]]))
    assert main(["verify", model, "--steps", "0", "--no-general", "--inputs", str(file)]) == 0
    file.write_bytes(b"no arrays")
    assert main(["verify", model, "--inputs", str(file)]) == 1
    assert "batch.npz cannot be read as inputs" in capsys.readouterr().err
    np.savez(file, pixels=np.zeros((1, 3)))
    assert main(["verify", model, "--inputs", str(file)]) == 1
    assert "pixels" in capsys.readouterr().err

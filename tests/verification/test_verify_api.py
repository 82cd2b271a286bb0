"""`verify` of paths, modules and modules that no family describes, and its result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import regauge
from regauge.errors import CheckpointError, SpecError, UnknownModelError
from support.picos import build


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return result


class Own(torch.nn.Module):
    """A module without a config."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(5, 8)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


def test_a_module_without_a_family_is_discovered() -> None:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(2, 4, 5, dtype=torch.float64)}
    verification = regauge.verify(Own().double(), inputs, steps=1)
    assert verification.failed == ()
    source, spaces, backbone = verification.notes
    assert "inferred from its graph" in source
    assert spaces.startswith("discovered spaces: stream (")
    assert backbone == "discovered backbone: blocks"
    assert spaces in str(verification)
    held = {f.id for f in verification.findings if f.holds}
    assert {"spec/fits", "column/forward", "column/weights"} <= held
    with pytest.raises(UnknownModelError, match="neither a config nor a pretrained_cfg") as raised:
        regauge.verify(Own().double(), steps=1)
    assert raised.value.hint is not None
    assert 'regauge.verify(module, {"x": tensor})' in raised.value.hint


@pytest.mark.parametrize("form", ["tensor", "tuple"])
def test_inputs_of_a_module_by_position(form: str) -> None:
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    verification = regauge.verify(Own(), x if form == "tensor" else (x,), steps=0)
    assert verification.failed == ()
    assert len(verification.notes) == 3


def test_an_own_class_with_the_config_of_a_family_is_discovered() -> None:
    """The config names a family, whose tensors the class does not have."""
    own = Own()
    own.config = {"model_type": "gpt2"}  # type: ignore[assignment]
    x = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    assert regauge.verify(own, {"x": x}, steps=0).failed == ()
    with pytest.raises(SpecError, match="n_embd"):
        regauge.verify(own, steps=0)


def test_a_path_and_its_result(tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path / "gpt2")
    verification = regauge.verify(tmp_path / "gpt2", steps=0, dtype="float64", facts={"by": "test"})
    assert verification.failed == ()
    assert "checks hold" in str(verification)
    assert "0 failed" in repr(verification)
    assert "<table" in verification._repr_html_()
    document = verification.to_dict()
    assert document["facts"]["by"] == "test"
    assert document["facts"]["dtype"] == "float64"
    with pytest.raises(CheckpointError, match="dtype must be one of"):
        regauge.verify(tmp_path / "gpt2", dtype="int8")

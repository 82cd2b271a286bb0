"""Pairs in memory: tensors that a library renames when it loads a file."""

from __future__ import annotations

from pathlib import Path

import torch

import regauge
import support.picos as picos
from support.picos import IMAGES


def test_a_vit_is_refined_and_matched_by_activations(tmp_path: Path) -> None:
    """transformers stores a ViT under other names than those of its modules."""
    for name, seed in (("a", 0), ("b", 1)):
        picos.build("vit", seed).float().save_pretrained(tmp_path / name)
    a, b = tmp_path / "a", tmp_path / "b"
    module = regauge.load_model(a)
    assert set(regauge.open_checkpoint(a)) != set(module.state_dict()), "the names differ"
    batches = [{"pixel_values": IMAGES["pixel_values"].float()}] * 2
    options = regauge.MatchOptions(sweeps=0, refine_steps=2)
    matched = regauge.match(a, b, data=batches, refine=batches, options=options)
    assert matched.refined is not None
    assert matched.element.spec is matched.pair.spec
    matched.save(tmp_path / "aligned")
    with torch.no_grad():
        outputs = [
            regauge.load_model(tmp_path / name)(**batches[0]).logits for name in ("a", "aligned")
        ]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-4 * outputs[0].abs().max()

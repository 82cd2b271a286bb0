"""Estimates: counted on the model and timed on the data, before a run starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.__main__ import main
from experiments.estimate import cost_of, count_pass, trainings
from experiments.shared.runner import Lab
from regauge.data.tasks import Examples
from regauge.errors import DataError


def test_operations_and_activations_are_counted() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(pixel_values))

    x, y = torch.randn(5, 6), torch.zeros(5, dtype=torch.long)
    examples = Examples(5, 3, lambda rows: ({"pixel_values": x[rows]}, y[rows]))
    flops, kept = count_pass(Net(), examples, np.arange(5), "cpu")
    # forward and the gradient of the weights of both layers, and of the inputs of the second
    assert flops == 2 * 5 * (2 * 6 * 8 + 3 * 8 * 3)
    least = 4 * 5 * (6 + 8 + 3)  # inputs of both layers, and log-probabilities
    assert least <= kept <= 3 * least
    assert count_pass(Net(), examples, np.arange(2), "cpu")[0] == flops * 2 / 5


def test_the_cost_of_a_training() -> None:
    lab = Lab("pico")
    ((subject, count),) = trainings("000/figure5", lab)
    assert count == 4  # plain, with the key, without it, from scratch
    cost = cost_of(lab, subject)
    assert subject.recipe is not None
    assert cost.steps == cost.examples // 64 * subject.recipe["epochs"]
    assert cost.state == 4 * cost.checkpoint  # weights, gradients and two moments of Adam
    assert cost.checkpoint == 8 * cost.parameters  # float64
    assert cost.flops > 6 * cost.parameters  # every token meets every weight of the blocks
    assert cost.rate > 1e6
    longer = replace(subject, recipe={**subject.recipe, "epochs": 10 * subject.recipe["epochs"]})
    assert cost_of(lab, longer).steps == 10 * cost.steps


def test_an_estimate_is_printed_and_nothing_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "cache"))
    assert main(["002/table1", "--preset", "pico", "--estimate"]) == 0
    said = capsys.readouterr().out
    assert "Estimate of 002/table1, preset pico" in said
    for name in ("ViT", "Swin", "ResNet", "GFLOP/s", "of training on cpu"):
        assert name in said
    assert not (tmp_path / "cache").exists()
    assert main(["000/table6", "--preset", "pico", "--estimate"]) == 0
    with pytest.raises(DataError, match="split/leaks has no estimate"):
        trainings("split/leaks", Lab("pico"))

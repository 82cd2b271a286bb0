"""The training loop against loops that are written out, bit for bit."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from regauge.data.optimizer_config import OptimizerConfig
from regauge.data.tasks import Examples
from regauge.data.train import (
    ScheduledOptimizer,
    backward_on,
    cosine_factor,
    descend,
    seeded,
    train_snapshots,
)

STEPS = 6


def make_model() -> torch.nn.Module:
    with seeded(0):
        return torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(8, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
        )


def make_examples() -> Examples:
    with seeded(1):
        pixels, labels = torch.randn(20, 2, 4), torch.randint(0, 3, (20,))
    return Examples(20, 3, lambda rows: ({"pixel_values": pixels[rows]}, labels[rows]))


def rows_of(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 20, 4)


def train(model: torch.nn.Module, config: OptimizerConfig) -> list[float]:
    optimizer = ScheduledOptimizer(model.parameters(), config)
    backward = backward_on(model, make_examples(), rows_of)
    return [loss for _, loss in descend(optimizer, backward, range(STEPS))]


def test_descend_is_the_loop_written_out() -> None:
    config = OptimizerConfig(
        "adamw", 0.1, weight_decay=0.05, schedule="cosine", warmup=2, steps=STEPS, clip=0.5
    )
    model, expected, examples = make_model(), make_model(), make_examples()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.1, weight_decay=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = config.lr_at(step)
        inputs, labels = examples.batch(rows_of(step))
        loss = torch.nn.functional.cross_entropy(expected(inputs["pixel_values"]), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert train(model, config) == losses
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(p, q)
    # the control: without the clip, or without the schedule, the losses are others
    assert train(make_model(), OptimizerConfig("adamw", 0.1, weight_decay=0.05)) != losses


def test_accumulated_micro_batches_are_one_batch() -> None:
    whole, parts, examples = make_model(), make_model(), make_examples()
    numbers: list[int] = []

    def half(n: int) -> torch.Tensor:
        numbers.append(n)
        rows = rows_of(n // 2)[2 * (n % 2) :][:2]
        inputs, labels = examples.batch(rows)
        loss = torch.nn.functional.cross_entropy(parts(inputs["pixel_values"]), labels) / 2
        loss.backward()
        return loss.detach()

    config = OptimizerConfig("sgd", 0.1, momentum=0.9)
    optimizer = ScheduledOptimizer(parts.parameters(), config)
    losses = [loss for _, loss in descend(optimizer, half, range(STEPS), accumulate=2)]
    assert numbers == list(range(2 * STEPS))
    assert losses == pytest.approx(train(whole, config))
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_gradients_may_be_changed_before_a_step() -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters())
    seen = []

    def mask(step: int) -> None:
        seen.append(step)
        parameters["3.weight"].grad = None

    optimizer = ScheduledOptimizer(model.parameters(), OptimizerConfig("sgd", 0.1))
    backward = backward_on(model, make_examples(), rows_of)
    for _ in descend(optimizer, backward, range(3), before_step=mask):
        pass
    assert seen == [0, 1, 2]
    assert torch.equal(parameters["3.weight"], before["3.weight"])
    assert not torch.equal(parameters["3.bias"], before["3.bias"])


def test_a_training_goes_on_at_the_step_of_its_schedule() -> None:
    config = OptimizerConfig("sgd", 0.1, schedule="linear", steps=STEPS)
    whole, halves = make_model(), make_model()
    expected = train(whole, config)
    losses = []
    for steps in (range(2), range(2, STEPS)):  # sgd without momentum has no state
        optimizer = ScheduledOptimizer(halves.parameters(), config)
        backward = backward_on(halves, make_examples(), rows_of)
        for done, loss in descend(optimizer, backward, steps):
            losses.append(loss)
            assert done == len(losses)
    assert losses == expected
    for p, q in zip(whole.parameters(), halves.parameters(), strict=True):
        assert torch.equal(p, q)


def test_snapshots_leave_the_model_as_it_is() -> None:
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    snapshots = train_snapshots(model, make_examples(), [1, 4], seed=0)
    assert sorted(snapshots) == [1, 4]
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    first, second = (snapshots[step].state_dict()["3.weight"] for step in (1, 4))
    assert not torch.equal(first, before["3.weight"])
    assert not torch.equal(first, second)
    assert train_snapshots(model, make_examples(), [], seed=0) == {}


def test_the_cosine_schedule() -> None:
    assert [cosine_factor(step, 10, 2) for step in (0, 1, 2)] == [0.5, 1.0, 1.0]
    assert cosine_factor(6, 10, 2) == pytest.approx(0.5)
    assert cosine_factor(10, 10, 2) == 0.0
    assert cosine_factor(0, 10, 0) == 1.0
    assert cosine_factor(9, 10, 0) == 0.5 * (1 + math.cos(0.9 * math.pi))


def test_a_seed_leaves_the_global_state_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with seeded(1):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeded(1):
        assert torch.equal(torch.rand(3), first)
    with seeded(2):
        assert not torch.equal(torch.rand(3), first)

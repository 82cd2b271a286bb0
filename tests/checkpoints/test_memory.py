"""Models in memory as checkpoints: a change since they were passed is an error, not a mixture."""

from __future__ import annotations

import pytest
import torch

import regauge
from regauge.checkpoints.memory import StateCheckpoint
from regauge.errors import CheckpointError
from support.picos import build


def test_a_model_that_changed_since_it_was_passed_is_not_read() -> None:
    model = build("gpt2")
    moved = regauge.move(model, 5)
    state = moved.state()
    model.load_state_dict(state)
    with pytest.raises(CheckpointError, match="has changed since the model was passed") as error:
        moved.state()
    assert "take its state" in str(error.value.hint)
    again = regauge.move(model, 5).state()
    assert not all(torch.equal(again[name], state[name]) for name in state)


def test_an_unchanged_model_is_read_as_often_as_needed() -> None:
    model = build("gpt2")
    moved = regauge.move(model, 5)
    first = moved.state()
    model(input_ids=torch.arange(5)[None]).logits.sum().backward()
    second = moved.state()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_tensors_of_inference_mode_are_read() -> None:
    with torch.inference_mode():
        state = {"w": torch.ones(3)}
    assert StateCheckpoint(state, None, "m")["w"].tolist() == [1, 1, 1]

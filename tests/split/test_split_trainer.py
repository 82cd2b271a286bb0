"""transformers' Trainer trains a model whose backbone is elsewhere as it trains a whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from regauge.split import Host, InProcess, OptimizerConfig, connect
from support.split_pairs import assemble_state, batch, distance, make_model

RATE, STEPS = 1e-2, 6


class Rows(torch.utils.data.Dataset):
    """Sixteen texts of seven tokens, each its own label."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        inputs = batch("gpt2", i)
        return {k: v[0] for k, v in inputs.items()}


def train_model(model: torch.nn.Module, folder: Path) -> list[float]:
    import transformers as T

    options = T.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        learning_rate=RATE,
        lr_scheduler_type="linear",
        max_grad_norm=0.0,
        weight_decay=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=3,
    )
    trainer: Any = T.Trainer(model=model, args=options, train_dataset=Rows())
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("over", ["process", "grpc"])
def test_a_trainer_does_not_notice(tmp_path: Path, over: str) -> None:
    plain, mine = make_model("gpt2", torch.float32), make_model("gpt2", torch.float32)
    before = {n: t.clone() for n, t in plain.state_dict().items()}
    expected = train_model(plain, tmp_path / "plain")
    host = Host(
        make_model("gpt2", torch.float32),
        OptimizerConfig("adamw", RATE, schedule="linear", steps=STEPS),
    )
    if over == "process":
        with connect(mine, InProcess(host), rows="batch"):
            losses = train_model(mine, tmp_path / "split")
    else:
        pytest.importorskip("grpc")
        from regauge.split.server.network import Grpc, Server

        with (
            Server(host) as server,
            Grpc(f"127.0.0.1:{server.port}") as network,
            connect(mine, network, rows="batch"),
        ):
            losses = train_model(mine, tmp_path / "split")
    assert len(losses) == STEPS
    assert host.step == STEPS
    assert losses == pytest.approx(expected, rel=1e-4)
    assert distance(assemble_state(mine, host, None), plain.state_dict()) < 1e-4
    assert distance(before, dict(plain.state_dict())) > 1e-2

"""Split training with transformers' Trainer: the backbone is on a server; data, labels, embedding
and head stay with the client. The Trainer needs no changes.

    pip install '.[models]' accelerate && python examples/split_trainer.py

In this example the server runs in the same process, over the same wire format. Over a network:
Server(host, "0.0.0.0:7000", tls=...) on the server, and connect(model, Grpc("server.example:7000",
tls=...)) on the client, or `regauge split serve` and `regauge split train`: docs/guides/split.md.
"""

import copy
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

from regauge.split import Host, InProcess, OptimizerConfig, connect

torch.manual_seed(0)
STEPS, LR = 40, 1e-3
config = BertConfig(
    vocab_size=50,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    num_labels=2,
)
start = BertForSequenceClassification(config)


class Texts(torch.utils.data.Dataset):
    """Texts of twelve tokens. The label is whether token 7 occurs more often than token 8."""

    def __init__(self, n: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(5, 11, (n, 12), generator=rng)
        self.labels = ((self.ids == 7).sum(1) > (self.ids == 8).sum(1)).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


server = Host(
    copy.deepcopy(start), OptimizerConfig("adamw", LR, schedule="linear", steps=STEPS)
)  # the server trains the blocks
client = copy.deepcopy(start)
with (
    tempfile.TemporaryDirectory() as folder,
    connect(client, InProcess(server), rows="batch"),
):  # a new shuffle of the tokens for every batch
    options = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=32,
        learning_rate=LR,
        max_grad_norm=0.0,
        weight_decay=0.0,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=client, args=options, train_dataset=Texts(2000, 0), eval_dataset=Texts(200, 1)
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]

print(
    f"loss on held-out texts: {before:.3f} before, {after:.3f} after {server.step} steps of "
    "the server"
)
assert server.step == STEPS
assert after < before

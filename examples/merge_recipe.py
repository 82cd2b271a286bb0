"""Merge two fine-tunes of one model by a mergekit recipe: TIES trims their differences from the
base, elects signs, and adds them to the base.

python examples/merge_recipe.py       # some seconds
"""

import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from regauge.cli import main as regauge_command

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=32,
    n_positions=64,
    n_embd=64,
    n_layer=2,
    n_head=4,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
tasks = [
    torch.tensor([[(a * i + b) % 32 for i in range(48)]]) for a, b in ((3, 1), (5, 2), (7, 4))
]  # the base's, and one for each fine-tune


def fine_tune(model: GPT2LMHeadModel, text: torch.Tensor, steps: int) -> GPT2LMHeadModel:
    """Train a model on one text and return it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def loss(folder: Path, text: torch.Tensor) -> float:
    """Return the loss of a saved model on one text."""
    return GPT2LMHeadModel.from_pretrained(folder)(input_ids=text, labels=text).loss.item()


RECIPE = """\
merge_method: ties
base_model: {work}/root
models:
  - model: {work}/a
    parameters: {{density: 0.8, weight: 1.0}}
  - model: {work}/b
    parameters: {{density: 0.8, weight: 1.0}}
dtype: float32
"""

with tempfile.TemporaryDirectory() as folder:
    work = Path(folder)
    fine_tune(GPT2LMHeadModel(config), tasks[0], 40).save_pretrained(work / "root")
    for name, task in zip("ab", tasks[1:], strict=True):
        fine_tune(GPT2LMHeadModel.from_pretrained(work / "root"), task, 25).save_pretrained(
            work / name
        )
    (work / "recipe.yml").write_text(RECIPE.format(work=work))
    assert (
        regauge_command(["merge", str(work / "recipe.yml"), "-o", str(work / "merged")]) == 0
    )  # checks first that the three share a basis
    losses = {
        name: [loss(work / name, task) for task in tasks[1:]]
        for name in ("root", "a", "b", "merged")
    }

for name, (on_a, on_b) in losses.items():
    print(f"{name:6}  on a's task {on_a:.2f}  on b's task {on_b:.2f}")
assert losses["merged"][0] < losses["b"][0] and losses["merged"][1] < losses["a"][1], (
    "it is better at each task than the fine-tune on the other"
)

"""Merge two fine-tunes of one model by a recipe, as mergekit has them: what both learned, trimmed
and with elected signs, added to their ancestor.

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
]  # the ancestor's, and one for each fine-tune


def tuned(model: GPT2LMHeadModel, text: torch.Tensor, steps: int) -> GPT2LMHeadModel:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        model(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def loss(folder: Path, text: torch.Tensor) -> float:
    return GPT2LMHeadModel.from_pretrained(folder)(input_ids=text, labels=text).loss.item()


RECIPE = """\
merge_method: ties
base_model: {here}/root
models:
  - model: {here}/a
    parameters: {{density: 0.8, weight: 1.0}}
  - model: {here}/b
    parameters: {{density: 0.8, weight: 1.0}}
dtype: float32
"""

with tempfile.TemporaryDirectory() as folder:
    here = Path(folder)
    tuned(GPT2LMHeadModel(config), tasks[0], 40).save_pretrained(here / "root")
    for name, task in zip("ab", tasks[1:], strict=True):
        tuned(GPT2LMHeadModel.from_pretrained(here / "root"), task, 25).save_pretrained(here / name)
    (here / "recipe.yml").write_text(RECIPE.format(here=here))
    assert (
        regauge_command(["merge", str(here / "recipe.yml"), "-o", str(here / "merged")]) == 0
    )  # asks first whether the three share a basis
    found = {
        name: [loss(here / name, task) for task in tasks[1:]]
        for name in ("root", "a", "b", "merged")
    }

for name, (on_a, on_b) in found.items():
    print(f"{name:6}  on a's task {on_a:.2f}  on b's task {on_b:.2f}")
assert found["merged"][0] < found["b"][0] and found["merged"][1] < found["a"][1], (
    "it does each task better than the fine-tune of the other"
)

"""Align two models in different bases, then merge them with any tool: with mergekit if it is
installed, otherwise with regauge.

python examples/align_then_mergekit.py       # some seconds
"""

import importlib.util
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from regauge.cli import main as regauge_command

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
ids = torch.arange(24)[None]


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return LlamaForCausalLM.from_pretrained(folder).eval()(ids).logits


with tempfile.TemporaryDirectory() as folder:
    work = Path(folder)
    LlamaForCausalLM(config).save_pretrained(work / "a")
    # b is a with a little noise, as after a short fine-tuning, in another basis, as after an
    # independent training.
    b = LlamaForCausalLM.from_pretrained(work / "a")
    with torch.no_grad():
        for p in b.parameters():
            p.add_(0.002 * torch.randn_like(p))
    b.save_pretrained(work / "near")
    assert (
        regauge_command(
            ["move", str(work / "near"), "--random", "--seed", "1", "-o", str(work / "b")]
        )
        == 0
    )
    assert (
        regauge_command(["match", str(work / "b"), str(work / "a"), "-o", str(work / "aligned")])
        == 0
    )  # a plain folder: b, aligned with a

    if importlib.util.find_spec("mergekit") and shutil.which("mergekit-yaml"):
        models = "".join(
            f"  - model: {work / name}\n    parameters: {{weight: 1.0}}\n"
            for name in ("a", "aligned")
        )
        recipe = f"merge_method: linear\nmodels:\n{models}dtype: float32\n"
        (work / "recipe.yml").write_text(recipe)
        subprocess.run(
            ["mergekit-yaml", str(work / "recipe.yml"), str(work / "merged")], check=True
        )
    else:
        assert (
            regauge_command(
                ["merge", str(work / "a"), str(work / "aligned"), "-o", str(work / "merged")]
            )
            == 0
        )
    assert (
        regauge_command(
            ["merge", str(work / "a"), str(work / "b"), "--force", "-o", str(work / "naive")]
        )
        == 0
    )  # without alignment
    a, same, merged, naive = (logits(work / name) for name in ("a", "aligned", "merged", "naive"))
    assert torch.allclose(same, logits(work / "b"), atol=1e-4), "matching preserves the function"

aligned, unaligned = float((merged - a).norm()), float((naive - a).norm())
print(
    f"distance of the logits from a's: aligned and merged {aligned:.3f}, merged unaligned "
    f"{unaligned:.3f}"
)
assert aligned < 0.2 * unaligned

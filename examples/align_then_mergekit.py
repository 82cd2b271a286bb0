"""Two models in different bases, for any merging tool: match first, then merge as ever. By mergekit
if it is installed, or by regauge.

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
    here = Path(folder)
    LlamaForCausalLM(config).save_pretrained(here / "a")
    # b is a with a little noise, as after a short fine-tuning, written in another basis, as by
    # another training.
    b = LlamaForCausalLM.from_pretrained(here / "a")
    with torch.no_grad():
        for p in b.parameters():
            p.add_(0.002 * torch.randn_like(p))
    b.save_pretrained(here / "near")
    assert (
        regauge_command(
            ["move", str(here / "near"), "--random", "--seed", "1", "-o", str(here / "b")]
        )
        == 0
    )
    assert (
        regauge_command(["match", str(here / "b"), str(here / "a"), "-o", str(here / "aligned")])
        == 0
    )  # a plain folder: b, next to a

    if importlib.util.find_spec("mergekit") and shutil.which("mergekit-yaml"):
        models = "".join(
            f"  - model: {here / name}\n    parameters: {{weight: 1.0}}\n"
            for name in ("a", "aligned")
        )
        recipe = f"merge_method: linear\nmodels:\n{models}dtype: float32\n"
        (here / "recipe.yml").write_text(recipe)
        subprocess.run(
            ["mergekit-yaml", str(here / "recipe.yml"), str(here / "merged")], check=True
        )
    else:
        assert (
            regauge_command(
                ["merge", str(here / "a"), str(here / "aligned"), "-o", str(here / "merged")]
            )
            == 0
        )
    assert (
        regauge_command(
            ["merge", str(here / "a"), str(here / "b"), "--force", "-o", str(here / "naive")]
        )
        == 0
    )  # what happens without
    a, same, merged, naive = (logits(here / name) for name in ("a", "aligned", "merged", "naive"))
    assert torch.allclose(same, logits(here / "b"), atol=1e-4), "matching changes no function"

matched, stood = float((merged - a).norm()), float((naive - a).norm())
print(
    f"distance of the logits from a's: matched and merged {matched:.3f}, merged as they stood "
    f"{stood:.3f}"
)
assert matched < 0.2 * stood

"""What a lock is worth: the attacks on one's own case, and a verdict in words. Here the base is
public, and the lock gives nothing.

python examples/audit_lock.py       # some seconds
"""

import tempfile
from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from regauge.cli import main as regauge_command
from regauge.results.findings import load_results

torch.manual_seed(0)
base = BertModel(
    BertConfig(
        vocab_size=100,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
    )
)
with tempfile.TemporaryDirectory() as folder:
    here = Path(folder)
    with torch.no_grad():
        for p in base.parameters():
            p.add_(
                0.1 * torch.randn_like(p)
            )  # a model as training leaves it: no two channels alike
        base.save_pretrained(here / "base")
        for p in base.parameters():
            p.add_(0.01 * torch.randn_like(p))  # and a fine-tune of it
    base.save_pretrained(here / "mine")
    assert regauge_command(["keygen", "-o", str(here / "key")]) == 0
    assert (
        regauge_command(
            ["lock", str(here / "mine"), "-k", str(here / "key"), "-o", str(here / "locked")]
        )
        == 0
    )
    line = [
        "audit",
        "lock",
        str(here / "locked"),
        "-k",
        str(here / "key"),
        "--against",
        str(here / "base"),
        "--json",
        str(here / "found.json"),
    ]
    assert regauge_command(line) == 0
    found = load_results(here / "found.json")

matched = next(f for f in found.findings if f.id == "lock/public base")
print(
    f"\n{matched.id}: {matched.value:.0%} of the key, between {matched.floor:.1%} (a guess) and "
    f"{matched.ceiling:.0%}"
)
assert matched.value > 0.9

"""What a lock is worth: attacks on your own case, and a verdict in words. Here the base is public,
and the lock protects nothing.

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
    work = Path(folder)
    with torch.no_grad():
        for p in base.parameters():
            # Like a trained model: no two channels are equal.
            p.add_(0.1 * torch.randn_like(p))
        base.save_pretrained(work / "base")
        for p in base.parameters():
            p.add_(0.01 * torch.randn_like(p))  # a fine-tune of it
    base.save_pretrained(work / "mine")
    assert regauge_command(["keygen", "-o", str(work / "key")]) == 0
    assert (
        regauge_command(
            ["lock", str(work / "mine"), "-k", str(work / "key"), "-o", str(work / "locked")]
        )
        == 0
    )
    command = [
        "audit",
        "lock",
        str(work / "locked"),
        "-k",
        str(work / "key"),
        "--against",
        str(work / "base"),
        "--json",
        str(work / "results.json"),
    ]
    assert regauge_command(command) == 0
    results = load_results(work / "results.json")

finding = next(f for f in results.findings if f.id == "lock/public base")
print(
    f"\n{finding.id}: {finding.value:.0%} of the key, between {finding.floor:.1%} (a guess) and "
    f"{finding.ceiling:.0%}"
)
assert finding.value > 0.9

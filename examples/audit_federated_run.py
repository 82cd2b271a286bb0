"""What the server of a federated run learns: record the updates it receives, attack them, and
change the run until the attack recovers nothing.

python examples/audit_federated_run.py       # some seconds
"""

import tempfile
from pathlib import Path

import torch
from transformers import ViTConfig, ViTForImageClassification

from regauge.cli import main as regauge_command
from regauge.results.findings import load_results

torch.manual_seed(0)
size = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "initializer_range": 0.1,
}
model = ViTForImageClassification(
    ViTConfig(**size, image_size=8, patch_size=2, num_channels=1, num_labels=10)
)
audits = {}
with tempfile.TemporaryDirectory() as folder:
    work = Path(folder)
    model.save_pretrained(work / "start")
    settings = [
        "--data",
        "digits",
        "--test",
        "digits",
        "--mean",
        "0.3",
        "--std",
        "0.38",
        "--clients",
        "3",
        "--rounds",
        "2",
        "--batch-size",
        "1",
        "--steps",
        "1",
        "--optimizer",
        "sgd",
    ]
    for name, defence in (("plain", []), ("embedding frozen", ["--defence", "freeze=embedding"])):
        run = work / name
        assert (
            regauge_command(
                ["federate", str(work / "start"), *settings, *defence, "--record", "-o", str(run)]
            )
            == 0
        )
        command = [
            "audit",
            "gradients",
            "--from",
            str(run),
            "--json",
            str(run / "audit.json"),
            "--report",
            str(run / "page.html"),
        ]
        assert regauge_command(command) == 0
        audits[name] = load_results(run / "audit.json")

for name, results in audits.items():
    print(f"\n{name}:", *results.facts["verdict"], sep="\n  ")
assert "in 2 of 2 rounds" in audits["plain"].facts["verdict"][0]
assert "in 0 of 2 rounds" in audits["embedding frozen"].facts["verdict"][0]

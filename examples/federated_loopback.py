"""A SuperLink and its SuperNodes on this machine, each in its own process: TLS, registered node
keys, no telemetry, nothing installed at run time.

    python examples/federated_loopback.py MODEL OUT [--nodes 4] [--rounds 3]

MODEL is a ViT for images of 8 x 8; if it does not exist, a small one is created. The nodes
partition scikit-learn's digits. It takes minutes on two cores, most of it because Flower starts a
Python for every message. OUT/run is what `regauge federate` writes; running the program again
resumes it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from regauge.federated import Settings
from regauge.federated.deployment import loopback, write_bundle
from regauge.federated.runs import Source


def main() -> int:
    """Run the federation and return the exit code of its server."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    model = args.model.absolute()
    if not model.exists():
        make_model(model)
    settings = Settings(clients=args.nodes, rounds=args.rounds, batch=16, steps=10)
    source = Source(str(model), "digits", mean=[0.3], std=[0.38], test="digits")
    configs = [
        {
            "partition-id": i,
            "model": str(model),
            "shared-data": "digits",
            "mean": "0.3",
            "std": "0.38",
            "test": "digits",
        }
        for i in range(args.nodes)
    ]
    with loopback(args.out / "network", configs) as net:
        write_bundle(
            args.out / "bundle", source.to_dict(), settings, args.out / "run", wait=300, gather=120
        )
        code = net.run(args.out / "bundle").wait()
        sys.stdout.write(net.log("run"))
    return code


def make_model(folder: Path) -> None:
    """Save a small ViT with random weights."""
    import transformers

    size = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "initializer_range": 0.1,
    }
    config = transformers.ViTConfig(
        **size, image_size=8, patch_size=2, num_channels=1, num_labels=10
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())

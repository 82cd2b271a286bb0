"""Our inverting-gradients attack against that of breaching 0.1.2: the same models, images, updates
and number of steps, one run.

breaching has an environment of its own in a cache folder, made when this is first run. Models are
torch's own layers (below), so that both environments build the same: a small convolutional net and
a small ViT, with random weights; images are of CIFAR-10 ($REGAUGE_ASSETS), or smooth noise without
it. Goal: at least its PSNR in not more time, wherever either is 3 dB above the floor (the mean of
other images). Both have one thread; five runs of each in turns, and the medians of their CPU
seconds count.

$REGAUGE_BENCH_STEPS is the budget (300), $REGAUGE_BENCH_IMAGES how many images (2).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.environments import TORCH, environment

BREACHING = "0.1.2"
STEPS, IMAGES = (
    int(os.environ.get("REGAUGE_BENCH_STEPS", "300")),
    int(os.environ.get("REGAUGE_BENCH_IMAGES", "2")),
)
TRIALS = 5  # of each, in turns: the median of their times counts
OVER = 3.0  # dB above the floor from which on a result counts
MEAN, STD = 0.5, 0.25


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    def __init__(self, width: int = 96, layers: int = 2, patch: int = 8, side: int = 32) -> None:
        super().__init__()
        self.patch, self.place = (
            nn.Conv2d(3, width, patch, patch),
            nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2, width)),
        )
        self.blocks, self.head = (
            nn.Sequential(*(Block(width, 4) for _ in range(layers))),
            nn.Linear(width, 10),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2) + self.place).mean(1))


def convolutional() -> nn.Module:
    layers = [
        nn.Conv2d(3, 16, 5, 2, 2),
        nn.GELU(),
        nn.Conv2d(16, 32, 5, 2, 2),
        nn.GELU(),
        nn.Conv2d(32, 32, 5, 1, 2),
        nn.GELU(),
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 64, 10))


MODELS = {"convolutional": convolutional, "ViT": Vit}

THEIRS = """
import json, sys, time
import torch
library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    try: library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    except RuntimeError: pass
torch.set_num_threads(1)
import breaching
sys.path.insert(0, sys.argv[2])
from benchmarks.gradients import MEAN, MODELS, STD
given = torch.load(sys.argv[1])
model = MODELS[given["name"]]()
model.load_state_dict(given["state"])
model.eval()
attack = breaching.get_attack_config("invertinggradients")
attack.optim.max_iterations, attack.optim.callback = given["steps"], given["steps"]
attack.restarts.num_trials = 1
class About:
    shape, classes, size, modality, vocab_size = (3, 32, 32), 10, 1, "vision", 0
    normalize, mean, std = True, [MEAN] * 3, [STD] * 3
    def get(self, name, default=None): return getattr(self, name, default)
    def __getitem__(self, name): return getattr(self, name)
setup = {"device": torch.device("cpu"), "dtype": torch.float}
attacker = breaching.attacks.prepare_attack(model, torch.nn.CrossEntropyLoss(), attack, setup)
state = {"parameters": list(model.parameters()), "buffers": list(model.buffers())}
payload = [{**state, "metadata": About()}]
meta = {"num_data_points": 1, "labels": given["label"], "local_hyperparams": None}
shared = [{"gradients": list(given["slopes"].values()), "buffers": None, "metadata": meta}]
start, cpu = time.perf_counter(), time.process_time()
found, _ = attacker.reconstruct(payload, shared, {}, dryrun=False)
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
torch.save(found["data"].detach(), sys.argv[1] + ".out")
print("\\n" + json.dumps({"seconds": seconds, "cpu": cpu}))
"""


def main() -> int:
    torch.set_num_threads(1)
    there = environment(
        f"breaching-{BREACHING}",
        ["--no-deps", f"breaching=={BREACHING}", "torchvision", "lpips"],
        [f"torch=={TORCH}", "hydra-core>=1.1", "scipy", "numpy", "pillow", "tqdm"],
    )
    images, others = _images()
    bad = 0
    print(
        f"inverting gradients, {STEPS} steps, one restart; CPU-seconds and PSNR in dB, regauge "
        f"beside breaching {BREACHING}"
    )
    for name in MODELS:
        for i in range(IMAGES):
            floor = _psnr(others.mean(0, keepdim=True), images[i : i + 1])
            given = _update(name, images[i : i + 1], i)
            pairs = [(_ours(given), _theirs(there, given)) for _ in range(TRIALS)]
            (ours, _), (theirs, _) = pairs[0]
            our_time, their_time = (
                statistics.median(times)
                for times in zip(*((a[1], b[1]) for a, b in pairs), strict=True)
            )
            a, b = _psnr(ours, images[i : i + 1]), _psnr(theirs, images[i : i + 1])
            counts = max(a, b) > floor + OVER
            good = not counts or (a >= b and our_time <= their_time)
            bad += not good
            said = (
                "goal met"
                if good and counts
                else "no goal: both within 3 dB of the floor"
                if good
                else "GOAL MISSED"
            )
            print(
                f"{name}, image {i}: {a:.2f} dB in {our_time:.1f} s, {b:.2f} dB in "
                f"{their_time:.1f} s; floor {floor:.2f}: {said}",
                flush=True,
            )
    return 1 if bad else 0


def _images() -> tuple[torch.Tensor, torch.Tensor]:
    path = Path(os.environ.get("REGAUGE_ASSETS") or "../shared/assets") / "cifar10_test.npz"
    if path.exists():
        with np.load(path) as held:
            x = torch.from_numpy(held["X"][: IMAGES + 100]).float().permute(0, 3, 1, 2) / 255
    else:
        small = torch.rand(IMAGES + 100, 3, 6, 6, generator=torch.Generator().manual_seed(0))
        x = nn.functional.interpolate(small, (32, 32), mode="bilinear", align_corners=False)
    x = (x - MEAN) / STD
    return x[:IMAGES], x[IMAGES:]


def _update(name: str, image: torch.Tensor, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    label = torch.tensor([seed % 10])
    loss = nn.functional.cross_entropy(model(image), label)
    found = torch.autograd.grad(loss, list(model.parameters()))
    slopes = dict(zip((n for n, _ in model.named_parameters()), found, strict=True))
    return {
        "name": name,
        "state": model.state_dict(),
        "slopes": slopes,
        "label": label,
        "steps": STEPS,
    }


def _ours(given: dict[str, Any]) -> tuple[torch.Tensor, float]:
    from regauge.attacks.descents import DescentConfig, inverting_gradients
    from regauge.attacks.updates import Granted, SentUpdate, Update

    model = MODELS[given["name"]]()
    model.load_state_dict(given["state"])
    low, high = ((v - MEAN) / STD for v in (0.0, 1.0))
    range_of = torch.stack(
        [torch.full((3, 32, 32), v) for v in (low, high)]
    )  # what pixels can be, which breaching is told too
    view = SentUpdate(
        model,
        Update(given["slopes"]),
        (3, 32, 32),
        Granted(batch=1, labels=given["label"], images=range_of),
    )
    started = time.process_time()
    found = inverting_gradients(
        view,
        DescentConfig(steps=given["steps"], objective="cosine", tv_weight=0.02, schedule="cosine"),
    )
    return found.images, time.process_time() - started


def _theirs(there: Path, given: dict[str, Any]) -> tuple[torch.Tensor, float]:
    with tempfile.TemporaryDirectory(prefix="regauge-breaching-") as folder:
        path = Path(folder) / "given.pt"
        torch.save(given, path)
        root = str(Path(__file__).parent.parent)
        command = [str(there / "bin" / "python"), "-c", THEIRS, str(path), root]
        ran = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
        if ran.returncode:
            raise RuntimeError(f"breaching failed: {ran.stderr.strip().splitlines()[-3:]}")
        return torch.load(f"{path}.out"), float(
            json.loads(ran.stdout.strip().splitlines()[-1])["cpu"]
        )


def _psnr(found: torch.Tensor, true: torch.Tensor) -> float:
    a, b = ((v * STD + MEAN).clamp(0, 1).double() for v in (found, true))
    return float(-10 * (a - b).square().mean().log10())


if __name__ == "__main__":
    sys.exit(main())

"""The inverting-gradients attack compared with breaching 0.1.2: the same models, images, updates
and number of steps, in one run.

breaching has its own environment in a cache folder, created on first use. Models consist of torch
layers (below), so that both environments build the same: a small convolutional net and a small ViT,
with random weights. Images are from CIFAR-10 ($REGAUGE_ASSETS), or smooth noise without it. Goal:
at least its PSNR in at most its time, if either is 3 dB above the baseline (the mean of other
images). Both use one thread; five interleaved runs of each, compared by their median CPU seconds.

$REGAUGE_BENCH_STEPS is the number of steps (300), $REGAUGE_BENCH_IMAGES of images (2).
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
TRIALS = 5  # interleaved runs of each tool; their median times are compared
OVER = 3.0  # dB above the baseline from which on a result counts
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
case = torch.load(sys.argv[1])
model = MODELS[case["name"]]()
model.load_state_dict(case["state"])
model.eval()
attack = breaching.get_attack_config("invertinggradients")
attack.optim.max_iterations, attack.optim.callback = case["steps"], case["steps"]
attack.restarts.num_trials = 1
class Metadata:
    shape, classes, size, modality, vocab_size = (3, 32, 32), 10, 1, "vision", 0
    normalize, mean, std = True, [MEAN] * 3, [STD] * 3
    def get(self, name, default=None): return getattr(self, name, default)
    def __getitem__(self, name): return getattr(self, name)
setup = {"device": torch.device("cpu"), "dtype": torch.float}
attacker = breaching.attacks.prepare_attack(model, torch.nn.CrossEntropyLoss(), attack, setup)
state = {"parameters": list(model.parameters()), "buffers": list(model.buffers())}
payload = [{**state, "metadata": Metadata()}]
meta = {"num_data_points": 1, "labels": case["label"], "local_hyperparams": None}
shared = [{"gradients": list(case["grads"].values()), "buffers": None, "metadata": meta}]
start, cpu = time.perf_counter(), time.process_time()
reconstruction, _ = attacker.reconstruct(payload, shared, {}, dryrun=False)
seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
torch.save(reconstruction["data"].detach(), sys.argv[1] + ".out")
print("\\n" + json.dumps({"seconds": seconds, "cpu": cpu}))
"""


def main() -> int:
    torch.set_num_threads(1)
    breaching = environment(
        f"breaching-{BREACHING}",
        ["--no-deps", f"breaching=={BREACHING}", "torchvision", "lpips"],
        [f"torch=={TORCH}", "hydra-core>=1.1", "scipy", "numpy", "pillow", "tqdm"],
    )
    images, others = _images()
    missed = 0
    print(
        f"inverting gradients, {STEPS} steps, one restart; CPU-seconds and PSNR in dB, regauge "
        f"and breaching {BREACHING}"
    )
    for name in MODELS:
        for i in range(IMAGES):
            baseline = _psnr(others.mean(0, keepdim=True), images[i : i + 1])
            case = _make_case(name, images[i : i + 1], i)
            pairs = [(_ours(case), _theirs(breaching, case)) for _ in range(TRIALS)]
            (ours, _), (theirs, _) = pairs[0]
            our_time, their_time = (
                statistics.median(times)
                for times in zip(*((a[1], b[1]) for a, b in pairs), strict=True)
            )
            a, b = _psnr(ours, images[i : i + 1]), _psnr(theirs, images[i : i + 1])
            counts = max(a, b) > baseline + OVER
            met = not counts or (a >= b and our_time <= their_time)
            missed += not met
            verdict = (
                "goal met"
                if met and counts
                else "no goal: both within 3 dB of the baseline"
                if met
                else "GOAL MISSED"
            )
            print(
                f"{name}, image {i}: {a:.2f} dB in {our_time:.1f} s, {b:.2f} dB in "
                f"{their_time:.1f} s; baseline {baseline:.2f}: {verdict}",
                flush=True,
            )
    return 1 if missed else 0


def _images() -> tuple[torch.Tensor, torch.Tensor]:
    path = Path(os.environ.get("REGAUGE_ASSETS") or "../shared/assets") / "cifar10_test.npz"
    if path.exists():
        with np.load(path) as archive:
            x = torch.from_numpy(archive["X"][: IMAGES + 100]).float().permute(0, 3, 1, 2) / 255
    else:
        small = torch.rand(IMAGES + 100, 3, 6, 6, generator=torch.Generator().manual_seed(0))
        x = nn.functional.interpolate(small, (32, 32), mode="bilinear", align_corners=False)
    x = (x - MEAN) / STD
    return x[:IMAGES], x[IMAGES:]


def _make_case(name: str, image: torch.Tensor, seed: int) -> dict[str, Any]:
    """Return a model, the gradients of its loss on an image, and the label."""
    torch.manual_seed(seed)
    model = MODELS[name]().eval()
    label = torch.tensor([seed % 10])
    loss = nn.functional.cross_entropy(model(image), label)
    values = torch.autograd.grad(loss, list(model.parameters()))
    grads = dict(zip((n for n, _ in model.named_parameters()), values, strict=True))
    return {
        "name": name,
        "state": model.state_dict(),
        "grads": grads,
        "label": label,
        "steps": STEPS,
    }


def _ours(case: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Run regauge's attack. Returns the image and the CPU seconds."""
    from regauge.attacks.descents import DescentConfig, inverting_gradients
    from regauge.attacks.updates import Granted, SentUpdate, Update

    model = MODELS[case["name"]]()
    model.load_state_dict(case["state"])
    low, high = ((v - MEAN) / STD for v in (0.0, 1.0))
    # The range of pixel values, which breaching has too.
    pixel_range = torch.stack([torch.full((3, 32, 32), v) for v in (low, high)])
    view = SentUpdate(
        model,
        Update(case["grads"]),
        (3, 32, 32),
        Granted(batch=1, labels=case["label"], images=pixel_range),
    )
    started = time.process_time()
    result = inverting_gradients(
        view,
        DescentConfig(steps=case["steps"], objective="cosine", tv_weight=0.02, schedule="cosine"),
    )
    return result.images, time.process_time() - started


def _theirs(breaching: Path, case: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Run breaching's attack in its environment. Returns the image and the CPU seconds."""
    with tempfile.TemporaryDirectory(prefix="regauge-breaching-") as folder:
        path = Path(folder) / "case.pt"
        torch.save(case, path)
        root = str(Path(__file__).parent.parent)
        command = [str(breaching / "bin" / "python"), "-c", THEIRS, str(path), root]
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


def _psnr(image: torch.Tensor, true: torch.Tensor) -> float:
    a, b = ((v * STD + MEAN).clamp(0, 1).double() for v in (image, true))
    return float(-10 * (a - b).square().mean().log10())


if __name__ == "__main__":
    sys.exit(main())

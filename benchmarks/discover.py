"""CPU-seconds of discovery, verification included: pico-models (goal: 3 each) and a model of a
hundred million parameters (goal: 60).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

PICO, LARGE = 3.0, 60.0


def main() -> int:
    import torch
    import transformers as T

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from regauge.models.discovery import discovery_of
    from support.picos import PICOS, build

    torch.set_num_threads(1)
    discovery_of(build("gpt2"), PICOS["gpt2"].inputs)  # warms up torch.export
    met = True
    for name in ("gpt2", "llama", "bert", "vit", "t5", "swin"):
        model = build(name)
        start = time.process_time()
        discovery = discovery_of(model, PICOS[name].inputs)
        seconds = time.process_time() - start
        met &= seconds <= PICO
        print(f"{name:8}  {seconds:5.2f} CPU-s  error {discovery.error:.1e}", flush=True)
    large = T.GPT2LMHeadModel(T.GPT2Config()).eval()
    count = sum(p.numel() for p in large.parameters())
    start = time.process_time()
    discovery = discovery_of(large, {"input_ids": torch.arange(7)[None]})
    seconds = time.process_time() - start
    met &= seconds <= LARGE
    print(
        f"GPT-2 of {count / 1e6:.0f} M  {seconds:5.1f} CPU-s  error {discovery.error:.1e}, "
        f"verified on {discovery.verified_on}"
    )
    print(
        f"goals: {PICO:g} CPU-seconds for a pico-model, {LARGE:g} for a hundred million "
        f"parameters: {'met' if met else 'NOT MET'}"
    )
    return 0 if met else 1

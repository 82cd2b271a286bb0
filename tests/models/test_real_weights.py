"""Real weights, moved by the command line, loaded with from_pretrained by a process that never
imports regauge: the same outputs.

The Llamas and the GPT-2 lie in the shared assets; `make real` fetches MiniLM, DINOv2-small and the
float32 Llama into a cache and runs these on them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from regauge.checkpoints.reader import open_checkpoint
from regauge.cli import main
from support import forks
from support.paths import ASSETS, FETCHED

# name: (where, its class, largest difference relative to the largest output)
MODELS = {
    "stories260K": (ASSETS / "llama_stories260K.safetensors", "AutoModelForCausalLM", 1e-4),
    "stories15M-fp16": (ASSETS / "llama_stories15M_fp16.safetensors", "AutoModelForCausalLM", 1e-2),
    "gpt2-pair": (ASSETS / "gpt2_pair" / "seed1", "AutoModelForCausalLM", 1e-2),
    "stories15m": (FETCHED / "stories15m", "AutoModelForCausalLM", 1e-4),
    "minilm": (FETCHED / "minilm", "AutoModel", 1e-4),
    "dinov2-small": (FETCHED / "dinov2-small", "AutoModel", 1e-4),
}

COMPARE = """
import json, sys
import support.torchvision_ops as torchvision_ops, torch, transformers
def outputs(folder):
    model = getattr(transformers, sys.argv[1]).from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(0)
    if hasattr(model.config, "vocab_size"):
        top = min(400, model.config.vocab_size)
        inputs = {"input_ids": torch.randint(3, top, (2, 24), generator=generator)}
    else:
        pixels = torch.randn(1, 3, 224, 224, generator=generator, dtype=model.dtype)
        inputs = {"pixel_values": pixels}
    with torch.no_grad():
        result = model(**inputs)
    return {k: v.double() for k, v in result.items() if isinstance(v, torch.Tensor)}, model
a, before = outputs(sys.argv[2])
found = []
for folder in sys.argv[3:]:
    b, after = outputs(folder)
    error = max(float((a[k] - b[k]).abs().max() / a[k].abs().max()) for k in a)
    pairs = zip(before.parameters(), after.parameters())
    found.append([error, max(float((p.double() - q.double()).abs().max()) for p, q in pairs)])
assert not any(m == "regauge" or m.startswith("regauge.") for m in sys.modules)
print(json.dumps(found))
"""


def folder_of(source: Path, tmp_path: Path) -> Path:
    """The model as a folder that from_pretrained takes."""
    if source.is_dir():
        return source
    folder = tmp_path / "original"
    folder.mkdir()
    shutil.copy(source, folder / "model.safetensors")
    shutil.copy(source.with_suffix(".config.json"), folder / "config.json")
    return folder


MOVES = {
    "permutation": ["--group", "permutation"],
    "full": ["--group", "full"],
    "rotation": ["--fold", "--group", "orthogonal"],
}


@pytest.mark.parametrize("name", MODELS)
def test_moved_real_weights_give_the_same_outputs(name: str, tmp_path: Path) -> None:
    source, kind, tolerance = MODELS[name]
    if not source.exists():
        pytest.skip(f"{source.name} is absent; `make real` fetches what the assets can fetch")
    folder = folder_of(source, tmp_path)
    for move, options in MOVES.items():
        assert (
            main(
                [
                    "move",
                    str(folder),
                    "--random",
                    "--seed",
                    "7",
                    *options,
                    "-o",
                    str(tmp_path / move),
                ]
            )
            == 0
        )
    code, out, err = forks.run(COMPARE, kind, folder, *(tmp_path / move for move in MOVES))
    assert code == 0, err[-3000:]
    for move, (error, moved) in zip(MOVES, json.loads(out.splitlines()[-1]), strict=True):
        assert moved > 0.01, move
        assert error < tolerance, (move, error)


@pytest.mark.parametrize("name", MODELS)
def test_locked_real_weights_come_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    source, _, _ = MODELS[name]
    if not source.exists():
        pytest.skip(f"{source.name} is absent; `make real` fetches what the assets can fetch")
    key, folder = str(tmp_path / "key"), folder_of(source, tmp_path)
    assert main(["keygen", "-o", key]) == 0
    plain = open_checkpoint(folder)
    for group in ("permutation", "signed"):
        locked, back = tmp_path / group, tmp_path / f"back-{group}"
        assert main(["lock", str(folder), "-k", key, "-o", str(locked), "--group", group]) == 0
        assert main(["unlock", str(locked), "-k", key, "-o", str(back)]) == 0
        moved, found = open_checkpoint(locked), open_checkpoint(back)
        assert all(found.bits[n].tobytes() == plain.bits[n].tobytes() for n in plain)
        assert any(moved.bits[n].tobytes() != plain.bits[n].tobytes() for n in plain)
        shutil.rmtree(locked)
        shutil.rmtree(back)

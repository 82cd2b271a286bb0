"""Pickled checkpoints: every way torch writes them converts bit for bit; small files that would
fill the memory are rejected within a bound.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import support.bombs as bombs
from regauge.checkpoints import reader
from regauge.checkpoints.blocks import bits_of
from regauge.checkpoints.convert import open_pickles, plan_conversion
from regauge.checkpoints.reader import open_checkpoint
from regauge.checkpoints.writer import write_plan
from regauge.errors import CheckpointError


def convert(source: Path, out: Path) -> dict[str, torch.Tensor]:
    plan, thunks = plan_conversion(out, open_pickles(source))
    write_plan(out, plan, thunks)
    return dict(open_checkpoint(out))


def _state() -> dict[str, Any]:
    torch.manual_seed(0)
    whole = torch.randn(6, 8)
    base = torch.randn(64)
    attributed = torch.ones(2)
    attributed.note = "hello"  # type: ignore[attr-defined]
    return {
        "plain": torch.randn(3, 5),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(3, 4).T,
        "slice": whole[1:3, ::2],
        "tail": whole[3:],
        "window": base.as_strided((30, 4), (2, 1)),
        "expanded": torch.arange(5.0).expand(3, 5),
        "one row": torch.arange(7)[None].expand(1, -1),
        "parameter": torch.nn.Parameter(torch.randn(4)),
        "attributed": attributed,
        "nan": torch.tensor([float("nan"), float("inf")]),
        **{str(d): torch.randn(5).to(d) for d in (torch.float64, torch.float16, torch.bfloat16)},
        **{
            str(d): torch.arange(5).to(d)
            for d in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool)
        },
    }


SAVED: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "zip": lambda s, p: torch.save(s, p),
    "before 1.6": lambda s, p: torch.save(s, p, _use_new_zipfile_serialization=False),
    "before 1.6, protocol 3": lambda s, p: torch.save(
        s, p, pickle_protocol=3, _use_new_zipfile_serialization=False
    ),
    "protocol 3": lambda s, p: torch.save(s, p, pickle_protocol=3),
    "ordered": lambda s, p: torch.save(OrderedDict(s), p),
    "state_dict": lambda s, p: torch.save(
        {"state_dict": s, "epoch": 3, "history": [0.5, {"a": (1, None)}]}, p
    ),
    "model": lambda s, p: torch.save(
        {
            "model": OrderedDict(s),
            "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}, "on": torch.device("cpu")},
        },
        p,
    ),
}


@pytest.mark.parametrize("way", SAVED)
def test_bit_for_bit(tmp_path: Path, way: str) -> None:
    state = _state()
    SAVED[way](state, tmp_path / "x.pt")
    result = convert(tmp_path / "x.pt", tmp_path / "out.safetensors")
    assert result.keys() == state.keys()
    for name, tensor in state.items():
        expected = tensor.detach().contiguous()
        assert (result[name].dtype, result[name].shape) == (expected.dtype, expected.shape), name
        assert bits_of(result[name]).tobytes() == bits_of(expected).tobytes(), name


def test_module_and_ties(tmp_path: Path) -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)
    )
    module[2].weight = module[0].weight
    for old in (False, True):
        torch.save(
            module.state_dict(), tmp_path / f"{old}.pt", _use_new_zipfile_serialization=not old
        )
        pickles = open_pickles(tmp_path / f"{old}.pt")
        assert pickles.aliases == {"2.weight": "0.weight"}
        result = convert(tmp_path / f"{old}.pt", tmp_path / f"{old}.safetensors")
        assert all(
            torch.equal(result[n], t) for n, t in module.state_dict().items() if n != "2.weight"
        )
        assert pickles.unchecked == (("True.pt",) if old else ())


def test_big_endian(tmp_path: Path) -> None:
    values = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    raw = bombs.archive(
        bombs.state(a=bombs.tensor((2, 3), (3, 1), numel=6)),
        {"0": values.numpy().astype(">i4").tobytes()},
    )
    (tmp_path / "x.pt").write_bytes(raw)
    little = convert(tmp_path / "x.pt", tmp_path / "little.safetensors")["a"]
    assert not torch.equal(little.view(torch.int32), values)
    with_order = bombs.archive(
        bombs.state(a=bombs.tensor((2, 3), (3, 1), numel=6)),
        {"0": values.numpy().astype(">i4").tobytes()},
        order="big",
    )
    (tmp_path / "y.pt").write_bytes(with_order)
    assert torch.equal(
        convert(tmp_path / "y.pt", tmp_path / "big.safetensors")["a"].view(torch.int32), values
    )


def test_python_2(tmp_path: Path) -> None:
    """Python 2 wrote byte strings, and the items of an ordered dictionary as its arguments."""
    pair = b"](U\x01a" + bombs.tensor((1,), (1,), view=b"N") + b"e"
    (tmp_path / "x.pt").write_bytes(
        bombs.old_format(
            b"\x80\x02ccollections\nOrderedDict\n](" + pair + b"e\x85R.", raw=struct.pack("<f", 2.5)
        )
    )
    assert convert(tmp_path / "x.pt", tmp_path / "out")["a"].tolist() == [2.5]


def test_without_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(4.0)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert open_pickles(tmp_path / "x.pt").unchecked == ("x.pt",)
    assert torch.equal(convert(tmp_path / "x.pt", tmp_path / "out")["a"], torch.arange(4.0))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3).to_sparse(), "is sparse"),
        (torch.empty(3, device="meta"), "meta device"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "is quantized"),
        (torch.ones(3).to(torch.float8_e4m3fn), "is torch.float8_e4m3fn"),
        (torch.ones(3, dtype=torch.uint16), "is torch.uint16"),
        (torch.ones(3, dtype=torch.complex64), "is torch.complex64"),
        (torch.ones(3, dtype=torch.complex64).conj(), "conjugated"),
    ],
)
def test_tensors_that_cannot_be_written(tmp_path: Path, value: Any, message: str) -> None:
    torch.save({"a": torch.ones(2), "b": value}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=f'"b" of .*{message}'):
        convert(tmp_path / "x.pt", tmp_path / "out")


# Opens every file in a process of limited address space, without torch: what fails for lack of
# memory is untyped.
_CHILD = """
import json, resource, sys
from pathlib import Path
from regauge.checkpoints.convert import open_pickles
from regauge.errors import RegaugeError
import numpy
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]),) * 2)
for path in sys.argv[2:]:
    try:
        opened = open_pickles(Path(path))
        said = "read"
        for file in opened.files.values():
            for tensor in file.values():
                lazy = hasattr(tensor, "bits")
                numpy.ascontiguousarray(tensor.bits() if lazy else tensor.contiguous())
    except RegaugeError as error:
        said = f"{error} | {error.hint}"
    except BaseException as error:
        said = f"UNTYPED {type(error).__name__} {error}"
    print(json.dumps(said), flush=True)
"""


def open_in_child(paths: list[Path], address_space: int = 1 << 30) -> list[str]:
    """Return the message that each file gets."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _CHILD, str(address_space), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_bombs_are_rejected_within_a_gigabyte(tmp_path: Path) -> None:
    paths = []
    for i, (build, _) in enumerate(bombs.CONVERT.values()):
        paths.append(tmp_path / f"{i}.pt")
        paths[-1].write_bytes(build())
    errors = dict(zip(bombs.CONVERT, open_in_child(paths), strict=True))
    assert [
        f"{name}: {errors[name]}"
        for name, (_, part) in bombs.CONVERT.items()
        if part not in errors[name] or " | None" in errors[name]
    ] == []


def test_what_stalls_or_crashes_an_unpickler(tmp_path: Path) -> None:
    for name, build in bombs.SLOW.items():
        (tmp_path / f"{name}.pt").write_bytes(build())
    errors = open_in_child([tmp_path / f"{name}.pt" for name in bombs.SLOW])
    assert [line for line in errors if "UNTYPED" in line or line == "read"] == []


def test_large_dictionaries_convert_in_linear_time(tmp_path: Path) -> None:
    """An index was compared with lists of names: 2,000 names took 2 million comparisons."""
    names = [f"t{i}" for i in range(2_000)]
    opened = bombs.state(**{name: bombs.tensor((1,), (1,)) for name in names})
    (tmp_path / "pytorch_model-1.bin").write_bytes(bombs.archive(opened))
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    (tmp_path / "pytorch_model.bin.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "pytorch_model-1.bin")})
    )
    comparisons = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal comparisons
            comparisons += 1
            return str.__eq__(self, other)

    read = reader.read_json
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            reader,
            "read_json",
            lambda path, *limit: {
                "weight_map": {Name(k): v for k, v in read(path, *limit)["weight_map"].items()}
            },
        )
        assert len(open_pickles(tmp_path).files["pytorch_model-1.bin"]) == len(names)
    assert comparisons < 10 * len(names)


def test_expansion_within_the_bound(tmp_path: Path) -> None:
    """A mask that was expanded before it was saved is written out: 4 MB from 4 kB."""
    torch.save(
        {"mask": torch.arange(1000.0).expand(1000, 1000), "w": torch.ones(3)}, tmp_path / "x.pt"
    )
    result = convert(tmp_path / "x.pt", tmp_path / "out")
    assert torch.equal(result["mask"], torch.arange(1000.0).expand(1000, 1000))


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100_000)}, tmp_path / "x.pt")
    opened = open_pickles(tmp_path / "x.pt")
    os.truncate(tmp_path / "x.pt", 4096)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        opened.files["x.pt"]["a"].bits()

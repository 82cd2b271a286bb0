"""Checkpoints: what is read, what is refused and how, and that writing is all or nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

import regauge.checkpoints.writer as writing_module
from regauge.checkpoints.files import write_bytes
from regauge.checkpoints.headers import read_header
from regauge.checkpoints.plan import Thunks, is_finite, plan_checkpoint
from regauge.checkpoints.reader import Checkpoint, LazyState, open_checkpoint
from regauge.checkpoints.writer import WriteResult, write_plan
from regauge.errors import CheckpointError

CONFIG = {"model_type": "llama", "hidden_size": 4}


def tensors() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(4, 6, generator=g).bfloat16(),
        "b": torch.randn(5, generator=g).half(),
        "c": torch.randn(3, 2, generator=g),
        "d": torch.randn(2, 2, generator=g).double(),
        "mask": torch.ones(3, 3, dtype=torch.bool),
        "ids": torch.arange(4),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.0),
    }


def write_sharded(folder: Path) -> Path:
    folder.mkdir()
    state = tensors()
    names = list(state)
    where = {}
    for i, part in enumerate((names[:3], names[3:6], names[6:]), 1):
        file = f"model-0000{i}-of-00003.safetensors"
        save_file({n: state[n] for n in part}, folder / file, {"format": "pt", "shard": str(i)})
        where |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 1, "note": "kept"}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=4))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"old weights")
    (folder / "sub").mkdir()
    (folder / "sub" / "extra.txt").write_text("carried over")
    return folder


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def shards_of(checkpoint: Checkpoint) -> dict[str, list[str]]:
    return {name: list(shard.entries) for name, shard in checkpoint.files.items()}


def copy_thunks(source: Checkpoint) -> dict[str, Callable[[], torch.Tensor]]:
    return {name: (lambda name=name: source[name].clone()) for name in source}


def write_checkpoint(
    out: Path,
    source: Checkpoint,
    thunks: Thunks,
    *,
    origins: dict[str, str] | None = None,
    config_changes: dict[str, Any] | None = None,
    recipe: bytes = b"",
    **more: Any,
) -> WriteResult:
    plan = plan_checkpoint(
        out, source, thunks, origins=origins, config_changes=config_changes, recipe=recipe
    )
    return write_plan(out, plan, thunks, **more)


def test_every_dtype_is_read_from_a_folder_a_file_and_shards(tmp_path: Path) -> None:
    state = tensors()
    (tmp_path / "one").mkdir()
    save_file(state, tmp_path / "one" / "model.safetensors", {"format": "pt"})
    (tmp_path / "one" / "config.json").write_text(json.dumps(CONFIG))
    for source in (
        tmp_path / "one",
        tmp_path / "one" / "model.safetensors",
        write_sharded(tmp_path / "shards"),
    ):
        opened = open_checkpoint(source)
        assert set(opened) == set(state) == set(opened.shapes)
        assert all(same(opened[n], t) for n, t in state.items())
        assert opened.config == CONFIG
        assert opened.dtypes["a"] == "BF16"
        assert opened.shapes["a"] == (4, 6)
    assert len(opened.files) == 3
    assert opened.files["model-00002-of-00003.safetensors"].metadata == {
        "format": "pt",
        "shard": "2",
    }


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "in")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    open_checkpoint(folder)["a"].zero_()
    assert all(p.read_bytes() == data for p, data in before.items())


def test_config_beside_a_single_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    assert open_checkpoint(tmp_path / "x.safetensors").config is None
    (tmp_path / "config.json").write_text('{"model_type": "far"}')
    (tmp_path / "x.config.json").write_text('{"model_type": "near"}')
    assert open_checkpoint(tmp_path / "x.safetensors").config == {"model_type": "near"}


def test_a_copy_keeps_everything(tmp_path: Path) -> None:
    source = open_checkpoint(write_sharded(tmp_path / "in"))
    written = write_checkpoint(tmp_path / "out", source, copy_thunks(source))
    out = open_checkpoint(tmp_path / "out")
    assert shards_of(out) == shards_of(source)
    assert all(out.files[file].metadata == shard.metadata for file, shard in source.files.items())
    assert all(same(out[n], source[n]) for n in source)
    assert (tmp_path / "out" / "config.json").read_bytes() == (
        tmp_path / "in" / "config.json"
    ).read_bytes()
    assert (tmp_path / "out" / "sub" / "extra.txt").read_text() == "carried over"
    assert written.skipped == ("pytorch_model.bin",)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    for file, names in shards_of(out).items():  # another reader agrees
        assert set(load_file(tmp_path / "out" / file)) == set(names)


def test_new_tensors_join_the_last_shard_and_the_config_changes(tmp_path: Path) -> None:
    source = open_checkpoint(write_sharded(tmp_path / "in"))
    thunks = copy_thunks(source) | {"new": lambda: torch.full((2, 2), 7.0)}
    write_checkpoint(tmp_path / "out", source, thunks, config_changes={"tied": False})
    out = open_checkpoint(tmp_path / "out")
    assert shards_of(out)["model-00003-of-00003.safetensors"][-1] == "new"
    assert bool((out["new"] == 7).all())
    assert out.config == CONFIG | {"tied": False}
    assert out.index is not None
    assert out.index["metadata"] == {
        "total_size": sum(e.nbytes for e in out.entries.values()),
        "note": "kept",
    }


def test_one_file_becomes_a_file_or_a_folder(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors", {"format": "pt"})
    (tmp_path / "x.config.json").write_text("{}")
    source = open_checkpoint(tmp_path / "x.safetensors")
    write_checkpoint(tmp_path / "y.safetensors", source, copy_thunks(source))
    write_checkpoint(tmp_path / "y", source, copy_thunks(source))
    assert open_checkpoint(tmp_path / "y.safetensors").config == {}
    assert sorted(p.name for p in (tmp_path / "y").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    shards = open_checkpoint(write_sharded(tmp_path / "in"))
    with pytest.raises(CheckpointError, match="3 shards and cannot become the one file"):
        write_checkpoint(tmp_path / "z.safetensors", shards, copy_thunks(shards))


def refuse(match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        call()
    assert caught.value.hint, "an error shows the way out"


def test_invalid_folders_are_rejected(tmp_path: Path) -> None:
    shard = "model-00002-of-00003.safetensors"

    def case(name: str, change: Callable[[Path], Any], match: str) -> None:
        folder = write_sharded(tmp_path / name)
        change(folder)
        refuse(match, lambda: open_checkpoint(folder))

    size = (write_sharded(tmp_path / "whole") / shard).stat().st_size
    case(
        "cut",
        lambda f: os.truncate(f / shard, size - 5),
        rf"{shard} is truncated: it must have {size} bytes according to its header, got {size - 5}",
    )
    case(
        "cut-header",
        lambda f: os.truncate(f / shard, 40),
        rf"{shard} is truncated: it must have at least \d+ bytes, got 40",
    )
    case("no-bytes", lambda f: os.truncate(f / shard, 3), "does not start like a safetensors file")
    case(
        "longer",
        lambda f: (f / shard).open("ab").write(b"xx"),
        f"it must have {size} bytes according to its header, got {size + 2}",
    )
    case("gone", lambda f: (f / shard).unlink(), f"lacks 1 of its 3 shards: {shard}")
    case(
        "lfs",
        lambda f: (f / shard).write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
        ),
        "Git LFS pointer",
    )
    case(
        "other",
        lambda f: save_file({"x": torch.ones(1)}, f / shard),
        f'places ".*" in {shard}, which does not have it',
    )
    case(
        "index",
        lambda f: (f / "model.safetensors.index.json").write_text("{"),
        "index.json is not JSON",
    )
    case(
        "no-map",
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        "has no weight_map",
    )
    for i, file in enumerate(
        ("../x", "", "..", ".regauge.json", ".x.safetensors", "config.json", "x" * 300, "x\0", 3)
    ):
        index = json.dumps({"weight_map": {"a": file}})
        case(
            f"shard-{i}",
            lambda f, index=index: (f / "model.safetensors.index.json").write_text(index),
            'places "a" in .*, which is not a valid name of a shard',
        )
    case(
        "no-index",
        lambda f: (f / "model.safetensors.index.json").unlink(),
        "but no model.safetensors.index.json",
    )
    case("config", lambda f: (f / "config.json").write_text("[]"), "must hold a JSON object")
    case(
        "quantised",
        lambda f: (f / "config.json").write_text(
            '{"quantization_config": {"quant_method": "gptq"}}'
        ),
        r"quantized \(gptq\)",
    )


def test_what_is_not_safetensors_is_refused_with_the_way_out(tmp_path: Path) -> None:
    refuse("does not exist", lambda: open_checkpoint(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    refuse("is empty", lambda: open_checkpoint(tmp_path / "empty"))
    for name, match in (
        ("pytorch_model.bin", "is a pickle"),
        ("model.pt", "is a pickle"),
        ("q4.gguf", "is GGUF"),
        ("notes.txt", "has no weights"),
    ):
        folder = tmp_path / f"folder-{name}"
        folder.mkdir()
        (folder / name).write_bytes(b"abc")
        refuse(match, lambda folder=folder: open_checkpoint(folder))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "folder-pytorch_model.bin" / "pytorch_model.bin")
    assert "regauge convert" in str(caught.value.cli_hint)


def test_unsupported_dtypes_are_rejected(tmp_path: Path) -> None:
    save_file(
        {"w": torch.ones(2).to(torch.float8_e4m3fn), "v": torch.ones(2).to(torch.float8_e4m3fn)},
        tmp_path / "x.safetensors",
    )
    refuse(
        '"[vw]" and 1 more tensors of .* must be .*, got F8_E4M3',
        lambda: open_checkpoint(tmp_path / "x.safetensors"),
    )
    save_file({"w": torch.ones(2, dtype=torch.int8)}, tmp_path / "y.safetensors")
    refuse("got I8", lambda: open_checkpoint(tmp_path / "y.safetensors"))


GOOD = save({"a": torch.ones(3, 2), "b": torch.ones(4).half()}, {"format": "pt"})


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_no_damaged_file_gives_anything_but_our_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    path.write_bytes(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))
    try:
        opened = open_checkpoint(path)
        assert all(tuple(opened[n].shape) == e.shape for n, e in opened.entries.items())
    except CheckpointError as error:
        caught = str(error)
    else:
        return
    assert "x.safetensors" in caught


@pytest.mark.parametrize(
    "header",
    [
        '{"a": 1}',
        "[]",
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        (
            '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {"dtype": "F32", '
            '"shape": [1], "data_offsets": [0, 4]}}'
        ),
        '{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}',
        '{"__metadata__": {"a": 1}}',
        "[" * 100_000,
        "\xff",
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'.encode("utf-16").decode(
            "latin-1"
        ),
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'.encode("utf-16-le").decode(
            "latin-1"
        ),
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'.encode("utf-8-sig").decode(
            "latin-1"
        ),
    ],
)
def test_damaged_headers(tmp_path: Path, header: str) -> None:
    raw = header.encode("latin-1")
    (tmp_path / "x.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(4))
    refuse("x.safetensors is damaged", lambda: read_header(tmp_path / "x.safetensors"))


def test_outputs_that_would_do_harm_are_refused(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "in")
    source = open_checkpoint(folder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    (tmp_path / "link").symlink_to(folder)
    for out, match in (
        (folder, "is the input"),
        (tmp_path / "link", "exists already|is the input"),
        (folder / "new", "lies inside the input"),
        (tmp_path, "lies around the input"),
        (tmp_path / "full", "exists already"),
        (tmp_path / "no" / "such", "does not exist"),
    ):
        refuse(match, lambda out=out: write_checkpoint(out, source, copy_thunks(source)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "in", "link"]
    (tmp_path / "blank").mkdir()
    write_checkpoint(tmp_path / "blank", source, copy_thunks(source))


def test_no_space_is_noticed_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_checkpoint(write_sharded(tmp_path / "in"))
    usage = SimpleNamespace(total=100, used=90, free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refuse(
        "no space left on the device: .* 10 B free",
        lambda: write_checkpoint(tmp_path / "out", source, copy_thunks(source)),
    )
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("number", "match"),
    [(errno.ENOSPC, "no space left on the device while writing"), (errno.EIO, "cannot be written")],
)
def test_an_error_midway_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, match: str
) -> None:
    source = open_checkpoint(write_sharded(tmp_path / "in"))
    real, calls = os.write, []

    def fails(fd: int, data: Any) -> int:
        calls.append(len(data))
        if len(calls) > 6:
            raise OSError(number, os.strerror(number))
        return real(fd, data)

    monkeypatch.setattr(writing_module.os, "write", fails)
    refuse(match, lambda: write_checkpoint(tmp_path / "out", source, copy_thunks(source)))
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_failing_thunk_leaves_nothing(tmp_path: Path) -> None:
    source = open_checkpoint(write_sharded(tmp_path / "in"))

    def fail() -> torch.Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_checkpoint(tmp_path / "out", source, copy_thunks(source) | {"d": fail})
    with pytest.raises(CheckpointError, match='"d" must have'):
        write_checkpoint(
            tmp_path / "out", source, copy_thunks(source) | {"d": lambda: torch.ones(2, 2)}
        )
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_checkpoint(write_sharded(tmp_path / "in"))

    def refused(self: Path, *args: Any, **more: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    refuse(
        "cannot be written: Permission denied",
        lambda: write_checkpoint(tmp_path / "out", source, copy_thunks(source)),
    )


def test_resume_keeps_finished_shards_of_the_same_recipe_only(tmp_path: Path) -> None:
    source = open_checkpoint(write_sharded(tmp_path / "in"))
    made: list[str] = []

    def thunks(stop: bool) -> dict[str, Callable[[], torch.Tensor]]:
        def make(name: str) -> torch.Tensor:
            if stop and name in source.files["model-00003-of-00003.safetensors"].entries:
                raise KeyboardInterrupt
            made.append(name)
            return source[name].clone()

        return {name: (lambda name=name: make(name)) for name in source}

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            write_checkpoint(
                tmp_path / "out", source, thunks(True), recipe=b"one", resume=True, threads=1
            )
        assert not (tmp_path / "out").exists()

    interrupted()
    made.clear()
    written = write_checkpoint(tmp_path / "out", source, thunks(False), recipe=b"one", resume=True)
    assert set(written.resumed) == {
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
    }
    assert set(made) == set(source.files["model-00003-of-00003.safetensors"].entries)
    assert all(same(open_checkpoint(tmp_path / "out")[n], source[n]) for n in source)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    shutil.rmtree(tmp_path / "out")
    interrupted()
    assert (
        write_checkpoint(
            tmp_path / "out", source, thunks(False), recipe=b"two", resume=True
        ).resumed
        == ()
    )


@pytest.mark.parametrize(
    "journal", [b"[" * 200_000, b"{", b"[]", b'{"plan": 1, "done": 2}', b"\xff"]
)
def test_an_invalid_journal_is_discarded(tmp_path: Path, journal: bytes) -> None:
    source = open_checkpoint(write_sharded(tmp_path / "in"))
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / ".regauge.json").write_bytes(journal)
    assert (
        write_checkpoint(tmp_path / "out", source, copy_thunks(source), resume=True).resumed == ()
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_a_source_may_disappear_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_checkpoint(write_sharded(tmp_path / "in"))
    real = writing_module._publish

    def finish(partial: Path, out: Path) -> None:
        real(partial, out)
        shutil.rmtree(tmp_path / "in")

    monkeypatch.setattr(writing_module, "_publish", finish)
    written = write_checkpoint(tmp_path / "out", source, copy_thunks(source))
    assert written.bytes == sum(
        p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file()
    )


def test_two_runs_do_not_write_the_same_output(tmp_path: Path) -> None:
    source = open_checkpoint(write_sharded(tmp_path / "in"))

    def second() -> torch.Tensor:
        write_checkpoint(tmp_path / "out", source, copy_thunks(source))
        return source["a"]

    refuse(
        "another run is writing",
        lambda: write_checkpoint(
            tmp_path / "out", source, copy_thunks(source) | {"a": second}, threads=1
        ),
    )


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
def test_nan_and_inf_are_found(dtype: str) -> None:
    kind, whole = {
        "BF16": ("bfloat16", "int16"),
        "F16": ("float16", "int16"),
        "F32": ("float32", "int32"),
        "F64": ("float64", "int64"),
    }[dtype]
    floats = getattr(torch, kind)

    def found_finite(x: torch.Tensor) -> bool:
        return is_finite(x.view(getattr(torch, whole)).numpy(), dtype)

    x = torch.randn(300_001).to(floats)
    x[3], x[5] = torch.finfo(floats).max, torch.finfo(floats).min
    assert found_finite(x)
    for bad in ("nan", "inf", "-inf"):
        for place in (0, 200_000, 300_000):
            y = x.clone()
            y[place] = float(bad)
            assert not found_finite(y)
    y = x.clone()
    y[7] = -torch.tensor(float("nan"), dtype=floats).abs()
    assert not found_finite(y)


def test_nan_is_reported_where_it_was_and_refused_where_it_was_not(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "in")
    save_file(
        {"c": torch.full((3, 2), float("nan")), "e": torch.ones(3, 2)}, folder / "model.safetensors"
    )
    source = open_checkpoint(folder)
    assert write_checkpoint(tmp_path / "out", source, copy_thunks(source)).nonfinite == ("c",)
    swapped = {"c": lambda: source["e"], "e": lambda: source["c"]}
    assert write_checkpoint(
        tmp_path / "swapped", source, swapped, origins={"c": "e", "e": "c"}
    ).nonfinite == ("e",)
    refuse('"e" would hold NaN or Inf', lambda: write_checkpoint(tmp_path / "no", source, swapped))
    refuse(
        '"new" would hold NaN or Inf',
        lambda: write_checkpoint(
            tmp_path / "no", source, copy_thunks(source) | {"new": swapped["e"]}
        ),
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out", "swapped"]


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_a_source_that_changes_its_size_is_an_error_and_no_crash(tmp_path: Path, size: int) -> None:
    save_file({"a": torch.ones(1000), "b": torch.ones(1000)}, tmp_path / "x.safetensors")
    for touched in (False, True):
        source = open_checkpoint(tmp_path / "x.safetensors")
        whole = (tmp_path / "x.safetensors").read_bytes()
        if touched:
            assert float(source["b"].sum()) == 1000
        os.truncate(tmp_path / "x.safetensors", size)
        for read in (source, source.bits):
            refuse(
                rf"x.safetensors changed while it was read: it had {len(whole)} bytes, now it "
                rf"has {size}",
                lambda read=read: read["a"],
            )
        (tmp_path / "x.safetensors").write_bytes(whole)


def test_write_bytes_replaces_or_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_bytes(tmp_path / "x", b"one")
    write_bytes(tmp_path / "x", b"two")
    assert (tmp_path / "x").read_bytes() == b"two"

    def fails(fd: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "fsync", fails)
    refuse("no space left", lambda: write_bytes(tmp_path / "x", b"three"))
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"two"


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = write_sharded(tmp_path / "snapshot")
    requests: list[tuple[str, str | None]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert "*.bin" not in allow_patterns
        requests.append((name, revision))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert (
        len(open_checkpoint("owner/name"))
        == len(open_checkpoint("owner/name@main"))
        == len(tensors())
    )
    assert requests == [("owner/name", None), ("owner/name", "main")]

    def offline(*args: Any, **more: Any) -> str:
        raise ConnectionError("no network\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    refuse(
        "owner/name could not be fetched from the hub: no network(\n|$)",
        lambda: open_checkpoint("owner/name"),
    )
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="huggingface_hub is not installed") as caught:
        open_checkpoint("owner/name")
    assert "regauge[hub]" in str(caught.value.hint)


def test_a_state_of_thunks_makes_each_tensor_anew() -> None:
    made: list[str] = []
    state = LazyState.from_thunks({"a": lambda: made.append("a"), "b": lambda: made.append("b")})
    assert (list(state), len(state), "a" in state, "c" in state, made) == (
        ["a", "b"],
        2,
        True,
        False,
        [],
    )
    _ = state["b"], state["b"]
    assert made == ["b", "b"]
    with pytest.raises(KeyError):
        _ = state["c"]

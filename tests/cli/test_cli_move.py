"""The command line as transcripts: the command, what it prints, what is left on disk; for good and
bad input alike.
"""

from __future__ import annotations

import ast
import errno
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regauge
from regauge.checkpoints.reader import open_checkpoint
from regauge.cli import main
from regauge.demo.move import GPT2, LLAMA, make_checkpoint
from regauge.results.findings import Claim, Finding, Results, from_json
from support.cli_runs import Run, contents, reconfigure, shard

HERE = Path(__file__).parents[1]
ASSETS = HERE.parents[1] / "shared" / "assets"
needs_assets = pytest.mark.skipif(
    not ASSETS.is_dir(), reason=f"the real weights are not there ({ASSETS})"
)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "llama", LLAMA, 0)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    state = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def test_usage_errors(run: Run, tmp_path: Path, llama: Path) -> None:
    for arguments in (
        ["nonsense"],
        ["move", llama],
        ["move", llama, "-o", tmp_path / "o"],
        ["move", llama, "-o", tmp_path / "o", "--random", "-g", "x"],
        ["move", llama, "-o", tmp_path / "o", "-g", "x", "--seed", "1"],
        ["move", llama, "-o", tmp_path / "o", "--random", "--resume"],
        ["move", llama, "-o", tmp_path / "o", "--random", "--group", "round"],
    ):
        result = run(*arguments)
        assert result.code == 2, arguments
        assert result.err.startswith("regauge: error: ")
        assert "regauge: hint: regauge" in result.err
        assert result.out == ""
    assert run("--version").out == f"regauge {regauge.__version__}\n"


def test_inspect(run: Run, llama: Path) -> None:
    result = run("inspect", llama)
    assert result.code == 0
    assert result.err == ""
    for line in (
        "embed           1      16,384",
        "ffn.0..3   172       4  monomial     4,825         688  the gate's activation",
        "folding (9 norms, 0 scales): stream would be orthogonal",
        "covered: 214,592 of 214,592 parameters",
    ):
        assert line in result.out
    facts = json.loads(run("inspect", llama, "--json").out)
    assert facts["version"] == 1
    assert facts["family"] == "llama"
    assert facts["parameters"]["all"] == facts["parameters"]["covered"] == 214_592
    assert [s["name"] for s in facts["spaces"]] == [
        "stream",
        "kv.0..3",
        "rep.0..3",
        "qk.0..3",
        "vo.0..3",
        "ffn.0..3",
    ]
    assert "layers.0.mlp.gate_proj.weight  " in run("inspect", llama, "-v").out


def test_visible_spaces_are_shown_and_left_alone(run: Run, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "gpt2", GPT2, 0)
    state = {
        n.removeprefix("transformer."): t
        for n, t in load_file(folder / "model.safetensors").items()
    }
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    reconfigure(folder, architectures=["GPT2Model"])
    assert "visible at the outputs: stream" in run("inspect", folder).out
    result = run("move", folder, "--random", "--seed", 1, "-o", tmp_path / "out", "--json")
    assert result.code == 0
    assert "stream unchanged" in result.err
    assert "stream" not in json.loads(result.out)["moved"]
    result = run(
        "move",
        folder,
        "--random",
        "--seed",
        1,
        "--spaces",
        "stream",
        "-o",
        tmp_path / "out2",
        "--json",
    )
    assert json.loads(result.out)["moved"] == ["stream"]


def test_move_save_and_move_back(run: Run, tmp_path: Path, llama: Path) -> None:
    from regauge.checkpoints.element_files import load_element
    from regauge.core.action import apply
    from regauge.models.families import spec_from

    before = contents(llama)
    result = run(
        "move", llama, "--random", "-o", tmp_path / "out", "--save-element", tmp_path / "g"
    )
    assert result.code == 0
    assert result.out == ""
    assert "regauge: llama: transforms stream, kv (4), rep (4), vo (4), ffn (4)" in result.err
    assert contents(llama) == before
    assert (tmp_path / "out" / "config.json").read_bytes() == before["config.json"]
    old, new = open_checkpoint(llama), open_checkpoint(tmp_path / "out")
    spec = spec_from(LLAMA, old.names)
    back = apply(~load_element(tmp_path / "g", spec), new)
    assert all(torch.equal(back[n], old[n]) for n in old)
    assert not torch.equal(new["lm_head.weight"], old["lm_head.weight"])
    result = run("move", llama, "-g", tmp_path / "g", "-o", tmp_path / "again", "--json")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")
    assert json.loads(result.out)["nonfinite"] == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "g", "llama", "out"]


def test_seeds_differ_and_the_systems_randomness_is_the_default(
    run: Run, tmp_path: Path, llama: Path
) -> None:
    for name, more in (
        ("a", ["--seed", 1]),
        ("b", ["--seed", 1]),
        ("c", ["--seed", 2]),
        ("d", []),
        ("e", []),
    ):
        assert run("move", llama, "--random", *more, "-o", tmp_path / name).code == 0
    a, b, c, d, e = (contents(tmp_path / name)["model.safetensors"] for name in "abcde")
    assert a == b
    assert len({a, c, d, e}) == 4


def test_parts_and_dry_run(run: Run, tmp_path: Path, llama: Path) -> None:
    result = run(
        "move",
        llama,
        "--random",
        "--seed",
        1,
        "-o",
        tmp_path / "dry",
        "--dry-run",
        "--json",
        "--save-element",
        tmp_path / "g",
    )
    assert result.code == 0
    assert json.loads(result.out)["dry_run"] is True
    assert [p.name for p in tmp_path.iterdir()] == ["llama"]
    assert (
        run(
            "move", llama, "--random", "--seed", 1, "--part", "backbone", "-o", tmp_path / "out"
        ).code
        == 0
    )
    old, new = open_checkpoint(llama), open_checkpoint(tmp_path / "out")
    for name in old:
        assert torch.equal(old[name], new[name]) == (not name.startswith("model.layers.")), name


def test_fold_and_rotate(run: Run, tmp_path: Path, llama: Path) -> None:
    result = run(
        "move",
        llama,
        "--random",
        "--seed",
        1,
        "--group",
        "orthogonal",
        "--fold",
        "-o",
        tmp_path / "out",
        "--save-element",
        tmp_path / "g",
    )
    assert result.code == 0
    assert bool((open_checkpoint(tmp_path / "out")["model.norm.weight"] == 1).all())
    result = run("move", llama, "-g", tmp_path / "g", "-o", tmp_path / "no")
    assert result.code == 1
    assert 'on "stream" the element is a rotation' in result.err
    assert "rotations of the stream need regauge move --fold" in result.err
    assert not (tmp_path / "no").exists()


def test_folding_a_tied_model_unties_it(run: Run, tmp_path: Path) -> None:
    folder = shard(make_checkpoint(tmp_path / "gpt2", GPT2, 0), tmp_path / "shards")
    assert (
        run(
            "move",
            folder,
            "--random",
            "--seed",
            1,
            "--group",
            "full",
            "--fold",
            "-o",
            tmp_path / "out",
        ).code
        == 0
    )
    out = open_checkpoint(tmp_path / "out")
    assert out.config is not None
    assert out.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in out
    assert list(out.files)[-1] == out.index["weight_map"]["lm_head.weight"]  # type: ignore[index]
    assert run("inspect", tmp_path / "out").code == 0


def bad_element(folder: Path) -> None:
    (folder.parent / "g").write_bytes(b"not an element")


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (
        lambda f: os.truncate(f / "model.safetensors", 5000),
        "model.safetensors is truncated: it must have",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    "wrong shape": (
        lambda f: rewrite(f, lambda s: s.update({"model.norm.weight": torch.ones(65)})),
        'axis 0 |stream| of "model.norm.weight" has size 65, expected 64',
    ),
    "missing tensor": (
        lambda f: rewrite(f, lambda s: s.pop("lm_head.weight")),
        '"lm_head.weight" is in the spec but not in the file',
    ),
    "surplus tensor": (
        lambda f: rewrite(f, lambda s: s.update(x=torch.ones(1))),
        '"x" is in the file but not in the spec',
    ),
    "contradicting config": (
        lambda f: reconfigure(f, num_attention_heads=4, num_key_value_heads=2, hidden_size=32),
        "expected 32",
    ),
    "senseless config": (
        lambda f: reconfigure(f, hidden_size="wide"),
        "is not a valid llama config",
    ),
    "incomplete config": (
        lambda f: (f / "config.json").write_text('{"model_type": "llama"}'),
        'config.json has no "',
    ),
    "unknown architecture": (
        lambda f: reconfigure(f, model_type="mamba9"),
        "no family describes models of type 'mamba9'; known are",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_models(run: Run, tmp_path: Path, llama: Path, case: str) -> None:
    change, message = BAD[case]
    change(llama)
    before = contents(llama)
    for arguments in (
        ["inspect", llama],
        [
            "move",
            llama,
            "--random",
            "--seed",
            1,
            "-o",
            tmp_path / "out",
            "--save-element",
            tmp_path / "g",
        ],
    ):
        result = run(*arguments)
        assert result.code == 1
        assert result.out == ""
        assert result.err.startswith("regauge: error: ")
        assert message in result.err
        assert "regauge: hint: " in result.err
    if case == "unknown architecture":
        assert "llama" in result.err
        assert "docs/guides/adding-a-model.md" in result.err
    assert contents(llama) == before
    assert [p.name for p in tmp_path.iterdir()] == ["llama"]


def test_missing_shard(run: Run, tmp_path: Path, llama: Path) -> None:
    folder = shard(llama, tmp_path / "shards")
    (folder / "model-00002-of-00003.safetensors").unlink()
    result = run("move", folder, "--random", "-o", tmp_path / "out")
    assert result.code == 1
    assert "lacks 1 of its 3 shards: model-00002-of-00003.safetensors" in result.err


def test_nan_is_a_warning(run: Run, tmp_path: Path, llama: Path) -> None:
    rewrite(llama, lambda s: s["model.norm.weight"].fill_(float("nan")))
    result = run("move", llama, "--random", "-o", tmp_path / "out", "--json")
    assert result.code == 0
    assert "regauge: warning: NaN or Inf in 1 tensors: model.norm.weight" in result.err
    assert json.loads(result.out)["nonfinite"] == ["model.norm.weight"]


def test_what_becomes_infinite_is_an_error(run: Run, tmp_path: Path, llama: Path) -> None:
    def large(state: dict[str, torch.Tensor]) -> None:
        state.update({n: t.half() for n, t in state.items()})
        state["model.layers.2.input_layernorm.weight"].fill_(60_000)
        state["model.layers.2.self_attn.v_proj.weight"].fill_(2)

    rewrite(llama, large)
    result = run(
        "move",
        llama,
        "--random",
        "--fold",
        "--group",
        "orthogonal",
        "-o",
        tmp_path / "out",
        "--save-element",
        tmp_path / "g",
    )
    assert result.code == 1
    assert 'error: "model.layers.2.self_attn.v_proj.weight" must fit float16' in result.err
    assert [p.name for p in tmp_path.iterdir()] == ["llama"]


def test_nan_travels_with_an_expert(run: Run, tmp_path: Path) -> None:
    from regauge.checkpoints.element_files import load_element
    from regauge.models.resolve import spec_of
    from support.picos import build

    build("mixtral").save_pretrained(tmp_path / "in")
    rewrite(
        tmp_path / "in",
        lambda s: s["model.layers.0.block_sparse_moe.experts.1.w2.weight"].fill_(float("nan")),
    )
    result = run(
        "move",
        tmp_path / "in",
        "--random",
        "--seed",
        1,
        "--group",
        "full",
        "-o",
        tmp_path / "out",
        "--save-element",
        tmp_path / "g",
        "--json",
    )
    assert result.code == 0
    index = (
        load_element(tmp_path / "g", spec_of(tmp_path / "in"))
        .members["expert.0"]
        .permutation()
        .index[0]
        .tolist()
    )  # type: ignore[union-attr]
    assert index[1] != 1, "the seed moves this expert"
    assert json.loads(result.out)["nonfinite"] == [
        f"model.layers.0.block_sparse_moe.experts.{index.index(1)}.w2.weight"
    ]


def test_folding_and_rotating_rounds_once(run: Run, tmp_path: Path) -> None:
    """The tied head too, which is a tensor of its own afterwards."""
    from regauge.checkpoints.element_files import load_element
    from regauge.core.action import apply
    from regauge.core.element import Element
    from regauge.core.fold import fold_norms
    from regauge.models.resolve import spec_of

    folder = make_checkpoint(tmp_path / "gpt2", GPT2, 0)
    rewrite(folder, lambda s: s.update({n: t.bfloat16() for n, t in s.items()}))
    result = run(
        "move",
        folder,
        "--random",
        "--seed",
        1,
        "--group",
        "full",
        "--fold",
        "-o",
        tmp_path / "out",
        "--save-element",
        tmp_path / "g",
    )
    assert result.code == 0
    spec, exact = fold_norms(
        spec_of(folder), {n: t.double() for n, t in open_checkpoint(folder).items()}
    )
    expected = apply(Element(spec, load_element(tmp_path / "g", spec).members), exact)
    out = open_checkpoint(tmp_path / "out")
    assert set(out.dtypes.values()) == {"BF16"}
    assert out.keys() == expected.keys()
    for name, values in expected.items():
        differ = float((out[name] != values.bfloat16()).double().mean())
        # a value between two may go either way in float32; rounded twice, a tenth and more differ
        assert differ < max(0.01, 1.5 / values.numel()), name


def test_outputs_are_never_overwritten(run: Run, tmp_path: Path, llama: Path) -> None:
    before = contents(tmp_path)
    for out, message in (
        (llama, "is the input"),
        (llama / "x", "lies inside the input"),
        (tmp_path, "lies around the input"),
    ):
        result = run("move", llama, "--random", "-o", out)
        assert result.code == 1
        assert message in result.err
    (tmp_path / "g").write_bytes(b"precious")
    result = run(
        "move", llama, "--random", "-o", tmp_path / "out", "--save-element", tmp_path / "g"
    )
    assert result.code == 1
    assert "g exists already" in result.err
    assert contents(tmp_path) == before | {"g": b"precious"}


def test_no_space(run: Run, tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write

    def full(fd: int, data: Any) -> int:
        if len(data) > 30_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        result = run(
            "move", llama, "--random", "-o", tmp_path / "out", "--save-element", tmp_path / "g"
        )
        assert result.code == 1
        assert "no space left on the device while writing" in result.err
    usage = SimpleNamespace(total=100, used=90, free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    result = run(
        "move", llama, "--random", "-o", tmp_path / "out", "--save-element", tmp_path / "g"
    )
    assert result.code == 1
    assert "has 10 B free, the output needs 862.7 kB" in result.err
    assert [p.name for p in tmp_path.iterdir()] == ["llama"]


def test_elements_that_do_not_belong(run: Run, tmp_path: Path, llama: Path) -> None:
    gpt2 = make_checkpoint(tmp_path / "gpt2", GPT2, 0)
    assert (
        run(
            "move", gpt2, "--random", "-o", tmp_path / "moved", "--save-element", tmp_path / "g"
        ).code
        == 0
    )
    whole = (tmp_path / "g").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:-100])
    (tmp_path / "noise").write_bytes(b"not an element")
    shutil.copy(llama / "model.safetensors", tmp_path / "weights")
    for file, message in (
        ("g", 'does not fit the model "llama"'),
        ("cut", "cannot be read as an element"),
        ("noise", "cannot be read as an element"),
        ("weights", "is not an element"),
        ("absent", "absent"),
    ):
        result = run("move", llama, "-g", tmp_path / file, "-o", tmp_path / "out")
        assert result.code == 1, result
        assert message in result.err
        assert not (tmp_path / "out").exists()
    result = run("move", llama, "--random", "--spaces", "strem", "-o", tmp_path / "out")
    assert 'the model has no space "strem"' in result.err


def test_a_killed_run_leaves_no_output_and_can_be_resumed(
    run: Run, tmp_path: Path, llama: Path
) -> None:
    folder = shard(llama, tmp_path / "shards")
    before = contents(folder)
    arguments = [
        "move",
        str(folder),
        "--random",
        "--seed",
        "7",
        "--resume",
        "-o",
        str(tmp_path / "out"),
    ]
    slow = (
        "import sys, time, os; import regauge.checkpoints.writer as w; real = os.write\n"
        "def write(fd, data):\n    time.sleep(0.03)\n    return real(fd, data)\n"
        "w.os.write = write\nfrom regauge.cli import main\nmain(sys.argv[1:])"
    )
    process = subprocess.Popen([sys.executable, "-c", slow, *arguments], stderr=subprocess.DEVNULL)
    journal = tmp_path / ".out.partial" / ".regauge.json"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        if journal.exists() and b"00001" in journal.read_bytes():
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    assert contents(folder) == before
    result = run(*arguments)
    assert result.code == 0
    assert "resumed from the interrupted run: model-00001-of-00003.safetensors" in result.err
    assert run("move", folder, "--random", "--seed", 7, "-o", tmp_path / "whole").code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama", "out", "shards", "whole"]


def test_terminated_politely_nothing_is_left(tmp_path: Path, llama: Path) -> None:
    code = (
        "import sys, time; import regauge.checkpoints.writer as w; real = w.is_finite\n"
        "def wait(*x):\n    print('on', flush=True); time.sleep(1); return real(*x)\n"
        "w.is_finite = wait\nfrom regauge.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    arguments = ["move", str(llama), "--random", "--threads", "1", "-o", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "on\n"
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith(f"regauge: error: interrupted; {tmp_path / 'out'} was not written\n")
    assert [p.name for p in tmp_path.iterdir()] == ["llama"]


def test_convert_one_file_and_shards(run: Run, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "gpt2", GPT2, 0)
    state = load_file(folder / "model.safetensors")
    pickled = {
        **state,
        "lm_head.weight": state["transformer.wte.weight"],
        "transposed": torch.randn(3, 4).T,
    }
    (tmp_path / "old").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "old")
    (tmp_path / "old" / "vocab.txt").write_text("a b")
    torch.save(pickled, tmp_path / "old" / "pytorch_model.bin")
    result = run("inspect", tmp_path / "old")
    assert result.code == 1
    assert "regauge convert" in result.err
    result = run("convert", tmp_path / "old", "-o", tmp_path / "new")
    assert result.code == 0
    assert "lm_head.weight is tied to transformer.wte.weight" in result.err
    new = open_checkpoint(tmp_path / "new")
    assert set(new) == {*state, "transposed"}
    assert all(torch.equal(new[n], pickled[n]) for n in new)
    assert new.files["model.safetensors"].metadata == {"format": "pt"}
    assert (tmp_path / "new" / "vocab.txt").read_text() == "a b"

    (tmp_path / "parts").mkdir()
    names = list(state)
    where = {}
    for i, part in enumerate((names[:10], names[10:]), 1):
        torch.save(
            {n: state[n] for n in part}, tmp_path / "parts" / f"pytorch_model-0000{i}-of-00002.bin"
        )
        where |= dict.fromkeys(part, f"pytorch_model-0000{i}-of-00002.bin")
    (tmp_path / "parts" / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where})
    )
    shutil.copy(folder / "config.json", tmp_path / "parts")
    assert run("convert", tmp_path / "parts", "-o", tmp_path / "joined", "--json").code == 0
    assert list(open_checkpoint(tmp_path / "joined").files) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert run("inspect", tmp_path / "joined").code == 0

    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "train.pt")
    assert run("convert", tmp_path / "train.pt", "-o", tmp_path / "train.safetensors").code == 0
    assert set(open_checkpoint(tmp_path / "train.safetensors")) == set(state)
    torch.save(state, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    assert run("convert", tmp_path / "legacy.pt", "-o", tmp_path / "legacy.safetensors").code == 0


def repack(
    source: Path,
    out: Path,
    compression: int = zipfile.ZIP_STORED,
    change: Callable[[str, bytes], bytes] = lambda name, data: data,
) -> Path:
    """A zipped pickle with its records compressed or changed."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(out, "w", compression) as new:
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename, old.read(info)))
    return out


def test_convert_reads_repacked_files_and_refuses_shortened_ones(run: Run, tmp_path: Path) -> None:
    state = {
        "a": torch.randn(300),
        "b": torch.zeros(500, dtype=torch.int64),
        "c": torch.randn(7).bfloat16(),
        "p": torch.nn.Parameter(torch.ones(3)),
    }
    torch.save(state | {"odd": {torch.device("cpu"): torch.Size([2])}}, tmp_path / "x.pt")
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        out = tmp_path / f"{compression}.safetensors"
        assert (
            run(
                "convert", repack(tmp_path / "x.pt", tmp_path / "y.pt", compression), "-o", out
            ).code
            == 0
        )
        assert all(torch.equal(open_checkpoint(out)[n], t) for n, t in state.items())
        short = repack(
            tmp_path / "x.pt",
            tmp_path / "short.pt",
            compression,
            lambda name, data: data[:-8] if name.endswith("data/1") else data,
        )
        result = run("convert", short, "-o", tmp_path / "no")
        assert result.code == 1
        assert (
            'short.pt is damaged: its record "x/data/1" must have 4000 bytes, got 3992'
            in result.err
        )
    (tmp_path / "cut.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:-100])
    assert (
        "cut.pt cannot be read: not a valid zip archive"
        in run("convert", tmp_path / "cut.pt", "-o", tmp_path / "no").err
    )
    assert not (tmp_path / "no").exists()


ONE, TWO = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"
SHARDS: dict[str, tuple[dict[str, list[str]], dict[str, str], str]] = {
    "twice": (
        {ONE: ["a", "b"], TWO: ["b", "c"]},
        {"a": ONE, "b": ONE, "c": TWO},
        f'{TWO} has "b", which pytorch_model.bin.index.json does not place',
    ),
    "nowhere": (
        {ONE: ["a"], TWO: ["c"]},
        {"a": ONE, "b": ONE, "c": TWO},
        f'places "b" in {ONE}, which does not have it',
    ),
    "unplaced": ({ONE: ["a", "b"], TWO: ["c"]}, {"a": ONE, "c": TWO}, f'{ONE} has "b", which'),
    "one name": ({"x.bin": ["a"], "x.pt": ["b"]}, {"a": "x.bin", "b": "x.pt"}, "x.bin and x.pt of"),
    "no shard": ({ONE: ["a"]}, {"a": ONE, "b": TWO}, f"lacks 1 of its 2 shards: {TWO}"),
    "hidden": ({".x.bin": ["a"]}, {"a": ".x.bin"}, "which is not a valid name of a shard"),
}


@pytest.mark.parametrize("case", SHARDS)
def test_convert_holds_index_and_shards_together(run: Run, tmp_path: Path, case: str) -> None:
    files, where, message = SHARDS[case]
    folder = tmp_path / "in"
    folder.mkdir()
    for file, names in files.items():
        torch.save({n: torch.ones(2) for n in names} | {"step": 3}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    result = run("convert", folder, "-o", tmp_path / "out")
    assert result.code == 1
    assert message in result.err
    assert "hint: " in result.err
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_convert_says_what_it_leaves_out(run: Run, tmp_path: Path) -> None:
    torch.save(
        {"model": {"a": torch.ones(2), "step": 1}, "b": torch.ones(1), "epoch": 3},
        tmp_path / "x.pt",
    )
    result = run("convert", tmp_path / "x.pt", "-o", tmp_path / "out", "--json")
    assert result.code == 0
    for line in (
        '"b" is stored beside "model" and is left out',
        '"epoch" is stored beside "model" and is left out',
        '"step" is not a tensor and is left out',
    ):
        assert f"regauge: warning: {line}\n" in result.err
    assert json.loads(result.out)["dropped"] == ["b", "epoch", "step"]
    assert set(open_checkpoint(tmp_path / "out")) == {"a"}


def test_convert_refuses_what_safetensors_cannot_hold(run: Run, tmp_path: Path) -> None:
    for name, value in (
        ("__metadata__", torch.ones(2)),
        ("nested", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    ):
        torch.save({"a": torch.ones(2), name: value}, tmp_path / "x.pt")
        result = run("convert", tmp_path / "x.pt", "-o", tmp_path / "out")
        assert result.code == 1
        assert f'"{name}"' in result.err
        assert "bug in regauge" not in result.err
        assert not (tmp_path / "out").exists()


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("hacked",)


def test_convert_runs_no_code(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, tmp_path / "evil.bin")
    (tmp_path / "noise.bin").write_bytes(b"noise")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "numbers.pt")
    for name, message in (
        ("evil.bin", "holds more than tensors"),
        ("noise.bin", "noise.bin"),
        ("list.pt", "must hold a dictionary of tensors, got list"),
        ("numbers.pt", "holds no tensors"),
        ("absent.pt", "does not exist"),
    ):
        result = run("convert", tmp_path / name, "-o", tmp_path / "out")
        assert result.code == 1
        assert message in result.err
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "evil.bin",
        "list.pt",
        "noise.bin",
        "numbers.pt",
    ]


def test_demo(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chapter as it is, with fewer epochs, images and updates."""
    from regauge.demo import basis, digits, gradients, jigsaw, leakage, lock, merge, split

    monkeypatch.chdir(tmp_path)
    for module, smaller in (
        (digits, {"EPOCHS": 3, "LAYERS": 2}),
        (basis, {"SHORT": 200}),
        (merge, {"STEPS": 10, "POINTS": 3}),
        (lock, {"STEPS": 10, "TUNING_EPOCHS": 1, "FURTHER": 100}),
        (split, {"DIGITS": 100}),
        (leakage, {"TRAIN": 300, "PUBLIC": 200, "ATTACKED": 10}),
        (leakage, {"EPOCHS": 1, "DECODER_EPOCHS": 1}),
        (gradients, {"UPDATES": 2, "PUBLIC": 100, "PRACTICE": 10}),
        (jigsaw, {"EPOCHS": 2}),
    ):
        for name, value in smaller.items():
            monkeypatch.setattr(module, name, value)
    result = run("demo", "--output", tmp_path / "demo", "--json")
    assert result.code == 0, result.err
    results = from_json(result.out)
    claims = [chapter.headline for chapter in results.chapters]
    assert len(claims) == 6
    for number, claim in enumerate(claims, 1):
        assert f"{number}. {claim.text}\n" in result.err
        assert f"{claim.number.replace('→', 'to')} {claim.label}\n" in result.err
    assert claims[0].tone == "good"
    assert [claim.tone for claim in claims[2:5]] == ["bad", "bad", "bad"]
    html = (tmp_path / "regauge-demo.html").read_text()
    assert [html.index(claim.text) for claim in claims] == sorted(
        html.index(claim.text) for claim in claims
    )
    findings = {f.id: f for f in results.all_findings}
    assert {f.id for f in findings.values() if f.holds} >= {
        "digits/adaptive",
        "digits/noise",
        "digits/one",
        "split/trained",
        "locked/authorised",
        "jigsaw/consistency",
    }
    moves = [f for f in findings.values() if f.id.startswith("moving/")]
    assert len(moves) == 6
    for move in moves:
        assert move.holds
        assert move.value < 1e-4 < 0.1 < move.ceiling
        assert ("bit for bit" in move.sentence) == ("permutation" in move.id)
    assert sorted(p.name for p in (tmp_path / "demo").iterdir()) == [
        "BASE",
        "IMAGES",
        "MODEL",
        "OTHER",
        "PICKLED",
        "VIT",
        "gpt2",
        "llama",
    ]
    monkeypatch.chdir(tmp_path / "demo")
    for command in claims[0].command.splitlines():
        tried = run(*command.split()[1:])
        assert tried.code == 0, tried.err


def test_the_demo_prints_its_claims_and_what_to_do_next(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regauge import demo

    claims = (
        Claim(
            "This lock gives nothing", "bad", "1 → 2", "of the key", command="regauge a\nregauge b"
        ),
        Claim("It works"),
    )
    chapters = [lambda _, claim=claim: Results("t", claim=claim) for claim in claims]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "run_demo", partial(demo.run_demo, chapters=chapters))
    result = run("demo", "--output", "models")
    assert result.code == 0, result.err
    assert result.out == (
        "1. This lock gives nothing\n   1 to 2 of the key\n   try: regauge a\n        regauge b\n\n"
        "2. It works\n\n"
        "Page: regauge-demo.html (open it in a browser)\n"
        "Models and images: models (cd models to run the commands above)\n"
    )
    assert "This lock gives nothing" in (tmp_path / "regauge-demo.html").read_text()
    chapters[0] = lambda _: Results("t", (Finding("a/b", "c", False),), claim=claims[1])
    failed = run("demo", "--report", "other.html")
    assert failed.code == 3
    assert "1. 1 check fails\n" in failed.out
    assert failed.out.endswith("regauge demo -o DIR saves them\n")


def test_commands_of_the_demo_are_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of every command that the demo suggests exist; models are not needed for that."""
    from regauge.demo import CHAPTERS

    sources = [Path(inspect.getfile(chapter)).read_text() for chapter in CHAPTERS]
    texts = [
        node.value
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    commands = [line for text in texts for line in text.splitlines() if line.startswith("regauge ")]
    assert len(commands) >= 8
    monkeypatch.chdir(tmp_path)
    for command in commands:
        assert main(command.split()[1:]) != 2, command


def test_the_demo_takes_no_place_that_is_taken(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "llama").write_text("precious")
    before = contents(tmp_path)
    for out, message in (
        ("file", "exists already"),
        ("full", "exists already"),
        ("no/where", "does not exist"),
        ("y" * 300, "cannot be written"),
    ):
        result = run("demo", "--output", tmp_path / out)
        assert result.code == 1
        assert result.out == ""
        assert message in result.err
        assert "hint: " in result.err
    assert contents(tmp_path) == before


def test_sizes_are_human_readable(run: Run, tmp_path: Path, llama: Path) -> None:
    assert "1 file, 858.4 kB\n" in run("inspect", llama).out
    assert ": 862.7 kB in " in run("move", llama, "--random", "-o", tmp_path / "out").err


def test_mismatches_of_many_layers_are_reported_once(run: Run, llama: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        for i in range(4):
            state[f"model.layers.{i}.mlp.up_proj.weight"] = torch.ones(171, 64)
        for i in (0, 2, 3):
            state[f"model.layers.{i}.self_attn.q_norm.weight"] = torch.ones(8)
        state["model.norm.weight"] = torch.ones(65)

    rewrite(llama, change)
    result = run("inspect", llama)
    assert result.code == 1
    lines = result.err.splitlines()
    assert lines[1:-1] == [
        (
            'regauge:   "model.layers.0.self_attn.q_norm.weight" is in the file but not in the '
            "spec "
            "(and 2 more like it, layers 2-3)"
        ),
        (
            'regauge:   axis 0 ffn.0 of "model.layers.0.mlp.up_proj.weight" has size 171, expected '
            "172 (and 3 more like it, layers 1-3)"
        ),
        'regauge:   axis 0 |stream| of "model.norm.weight" has size 65, expected 64',
    ]
    assert len(json.loads(run("inspect", llama, "--json").out)["faults"]) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inspect_knows_a_folded_model(
    run: Run, tmp_path: Path, llama: Path, dtype: torch.dtype
) -> None:
    rewrite(llama, lambda s: s.update({n: t.to(dtype) for n, t in s.items()}))
    assert "folding (9 norms, 0 scales): stream would be orthogonal" in run("inspect", llama).out
    assert json.loads(run("inspect", llama, "--json").out)["folds"] == {
        "norms": 9,
        "scales": 0,
        "done": False,
    }
    assert run("move", llama, "--random", "--fold", "-o", tmp_path / "out").code == 0
    assert (
        "folded already (9 norms, 0 scales): stream is, with --fold, orthogonal"
        in run("inspect", tmp_path / "out").out
    )
    assert json.loads(run("inspect", tmp_path / "out", "--json").out)["folds"]["done"] is True


def test_invalid_paths(run: Run, tmp_path: Path, llama: Path) -> None:
    for arguments in (
        ["inspect", "z" * 5000],
        ["inspect", "~nobody-of-that-name/model"],
        ["move", llama, "--random", "-o", tmp_path / ("y" * 4000)],
    ):
        result = run(*arguments)
        assert result.code == 1
        assert "bug in regauge" not in result.err
        assert "hint:" in result.err


def test_what_is_not_regauges_is_left_alone(run: Run, tmp_path: Path, llama: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "data").write_text("precious")
    (tmp_path / ".out.partial").symlink_to(victim)
    result = run("move", llama, "--random", "-o", tmp_path / "out")
    assert result.code == 1
    assert "was not written by regauge" in result.err
    assert (victim / "data").read_text() == "precious"
    (tmp_path / "b.config.json").write_text("precious")
    assert (
        run("move", llama / "model.safetensors", "--random", "-o", tmp_path / "b.safetensors").code
        == 1
    )
    assert (tmp_path / "b.config.json").read_text() == "precious"


def test_the_element_is_saved_separately(run: Run, tmp_path: Path, llama: Path) -> None:
    for place in (
        llama / "key",
        tmp_path / "out" / "key",
        tmp_path / "out",
        tmp_path / "out.config.json",
        tmp_path / ".out.partial" / "key",
    ):
        result = run("move", llama, "--random", "-o", tmp_path / "out", "--save-element", place)
        assert result.code == 1
        assert "published" in result.err
    assert not (tmp_path / "out").exists()
    assert not (llama / "key").exists()


def test_an_element_in_the_model_is_not_published(run: Run, tmp_path: Path, llama: Path) -> None:
    assert (
        run(
            "move",
            llama,
            "--random",
            "-o",
            tmp_path / "first",
            "--save-element",
            tmp_path / "key.bak",
        ).code
        == 0
    )
    (llama / "notes").mkdir()
    for place in ("key.bak", "notes/key"):
        shutil.copy(tmp_path / "key.bak", llama / place)
    (llama / "notes" / "short").write_bytes(b"12")
    result = run("move", llama, "-g", llama / "key.bak", "-o", tmp_path / "out", "--json")
    assert result.code == 0
    assert "elements): key.bak, notes/key" in result.err
    assert json.loads(result.out)["left"] == ["key.bak", "notes/key"]
    assert set(contents(tmp_path / "out")) == {"config.json", "model.safetensors", "notes/short"}


def test_resume_keeps_nothing_of_another_spec_or_version(
    run: Run, tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import regauge
    import regauge.checkpoints.writer as writing
    from regauge.checkpoints.spec_files import dump_spec

    folder = shard(llama, tmp_path / "shards")
    text = dump_spec(regauge.spec_of(folder))
    arguments = [
        "move",
        folder,
        "--spec",
        tmp_path / "spec.toml",
        "--random",
        "--seed",
        1,
        "--resume",
        "--threads",
        1,
        "-o",
        tmp_path / "out",
    ]

    def resumed(change: Callable[[pytest.MonkeyPatch], Any]) -> str:
        """What the second run says, after a first one that was interrupted in its last shard, and a
        change.
        """
        (tmp_path / "spec.toml").write_text(text)
        with monkeypatch.context() as patch:
            calls: list[Any] = []

            def stop(*args: Any) -> bool:
                calls.append(args)
                if len(calls) > 30:
                    raise KeyboardInterrupt
                return True

            patch.setattr(writing, "is_finite", stop)
            assert run(*arguments).code == 130
        with monkeypatch.context() as patch:
            change(patch)
            result = run(*arguments)
        assert result.code == 0
        shutil.rmtree(tmp_path / "out")
        return result.err

    axes = '"model.layers.0.mlp.gate_proj.weight" = "|ffn.0| stream*"'
    assert axes in text
    assert (
        "resumed from the interrupted run: model-00001-of-00003.safetensors, model-00002"
        in resumed(lambda patch: None)
    )
    assert "resumed from" not in resumed(
        lambda patch: (tmp_path / "spec.toml").write_text(text.replace(axes, axes.replace("|", "")))
    )
    assert "resumed from" not in resumed(lambda patch: patch.setattr(regauge, "__version__", "9"))


def test_an_interrupt_says_what_became_of_the_output(
    run: Run, tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import regauge.checkpoints.writer as writing

    real = writing._publish
    for late in (False, True):

        def finish(partial: Path, out: Path, late: bool = late) -> None:
            if late:
                real(partial, out)
            raise KeyboardInterrupt

        monkeypatch.setattr(writing, "_publish", finish)
        (tmp_path / "out").mkdir()  # an empty folder is not an output, and may be used
        result = run(
            "move", llama, "--random", "-o", tmp_path / "out", "--save-element", tmp_path / "g"
        )
        assert result.code == 130
        assert result.err.endswith(
            f"regauge: error: interrupted; {tmp_path / 'out'} was {'' if late else 'not '}written\n"
        )
        assert (tmp_path / "g").exists() == (tmp_path / "out" / "config.json").exists() == late
        if not late:
            (tmp_path / "out").rmdir()


def test_pipes_are_refused(run: Run, tmp_path: Path, llama: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / "model.safetensors.index.json")
    for arguments in (
        ["inspect", pipe],
        ["inspect", tmp_path / "pipe.safetensors"],
        ["inspect", tmp_path / "folder"],
        ["inspect", llama, "--spec", pipe],
        ["move", llama, "-g", pipe, "-o", tmp_path / "out"],
        ["move", llama, "-g", llama, "-o", tmp_path / "out"],
        ["convert", pipe, "-o", tmp_path / "out"],
    ):
        result = run(*arguments)
        assert result.code == 1
        assert "is not a regular file\nregauge: hint: " in result.err


def test_threads_have_a_limit(run: Run, tmp_path: Path, llama: Path) -> None:
    result = run("move", llama, "--random", "-o", tmp_path / "out", "--threads", 1_000_000)
    assert result.code == 2
    assert "--threads must be a whole number from 1 to 256, got '1000000'" in result.err


STREAMS = {
    "stdout closed": ("inspect", ">&-", 1, "regauge: error: stdout is closed"),
    "stdout full": (
        "inspect",
        ">/dev/full",
        1,
        "regauge: error: stdout cannot be written: No space left on device\n",
    ),
    "stdout full, much": (
        "inspect -v",
        ">/dev/full",
        1,
        "regauge: error: stdout cannot be written: No space left on device\n",
    ),
    "stdout full, version": (
        "--version",
        ">/dev/full",
        1,
        "regauge: error: stdout cannot be written: No space left on device\n",
    ),
    "stdout full, help": (
        "--help",
        ">/dev/full",
        1,
        "regauge: error: stdout cannot be written: No space left on device\n",
    ),
    "stdout closed, unused": ("move --random", ">&-", 0, "regauge: wrote "),
    "stderr closed": ("move --random", "2>&-", 0, ""),
    "stderr full": ("move --random", "2>/dev/full", 0, ""),
    "stderr full, an error": ("move --seed 1 --spaces no --random", "2>/dev/full", 1, ""),
    "all closed": ("move --random", "<&- >&- 2>&-", 0, ""),
}


@pytest.mark.parametrize(
    ("case", "unbuffered"),
    [(case, more) for case in STREAMS for more in (["", "1"] if "full" in case else [""])],
)
def test_broken_streams(tmp_path: Path, llama: Path, case: str, unbuffered: str) -> None:
    command, where, code, message = STREAMS[case]
    options = (
        ""
        if command.startswith("--")
        else f"{llama}" + (f" -o {tmp_path / 'out'}" if command.startswith("move") else "")
    )
    line = f"exec {sys.executable} -m regauge.cli {command} {options} {where}"
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        ["sh", "-c", line],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == code, done
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    if command.startswith("move") and code == 0:
        assert open_checkpoint(tmp_path / "out").names


@pytest.mark.parametrize("module", ["typer", "regauge.cli.inspect", "numpy"])
def test_an_interrupt_while_importing_is_quiet(llama: Path, module: str) -> None:
    """The import of a module is where the signal comes."""
    code = (
        "import os, signal, sys\n"
        # a shell's background jobs are started with it ignored
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n            sys.meta_path.remove(self); "
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "from regauge.cli import main\nsys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", str(llama)], capture_output=True, text=True
    )
    assert done.returncode == 130
    assert done.stdout == ""
    assert done.stderr in ("", "regauge: error: interrupted\n")

"""Outputs are never looser than the strictest input they are made of, from the moment their files
are created; the umask counts too.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from regauge.checkpoints.files import make_folder, staged_folder, strictest_mode, write_bytes
from regauge.cli import main
from regauge.demo.move import LLAMA, make_checkpoint
from regauge.errors import CheckpointError
from support.picos import build

pytestmark = pytest.mark.skipif(os.name != "posix", reason="permission bits of POSIX")


class Inputs(NamedTuple):
    """A model, another one, an adapter, and a place for what a command needs beside them. Models
    have a tokenizer in a folder of its own.
    """

    model: Path
    other: Path
    adapter: Path
    more: Path


@pytest.fixture(scope="module")
def make_inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    top = tmp_path_factory.mktemp("inputs")
    inputs = Inputs(
        make_checkpoint(top / "a", LLAMA, 0),
        make_checkpoint(top / "b", LLAMA, 1),
        top / "adapter",
        top / "more",
    )
    for folder in (inputs.model, inputs.other):
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.json").write_text("{}")
    inputs.adapter.mkdir()
    (inputs.adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "lora_alpha": 1, "r": 1})
    )
    state = load_file(inputs.model / "model.safetensors")
    name = next(n for n in state if n.endswith("q_proj.weight"))
    layer = f"base_model.model.{name.removesuffix('.weight')}"
    save_file(
        {
            f"{layer}.lora_A.weight": torch.ones(1, state[name].shape[1]),
            f"{layer}.lora_B.weight": torch.ones(state[name].shape[0], 1),
        },
        inputs.adapter / "adapter_model.safetensors",
    )
    inputs.more.mkdir()
    for purpose in ("lock", "seal"):
        run("keygen", "-o", inputs.more / purpose, "--purpose", purpose)
    run("keygen", "-o", inputs.more / "second")
    run("lock", inputs.model, "-k", inputs.more / "lock", "-o", inputs.more / "locked")
    run("seal", inputs.model, "-k", inputs.more / "seal", "-o", inputs.more / "sealed")
    run(
        "move",
        inputs.model,
        "--random",
        "--seed",
        "1",
        "--save-element",
        inputs.more / "element",
        "-o",
        inputs.more / "moved",
    )
    shutil.copytree(inputs.model, inputs.more / "pickled")
    torch.save(dict(state), inputs.more / "pickled" / "pytorch_model.bin")
    (inputs.more / "pickled" / "model.safetensors").unlink()
    (inputs.more / "recipe.yaml").write_text(
        f"merge_method: passthrough\nmodels: [{{model: {top / 'a'}}}]\n"
    )
    return inputs


def run(*arguments: object) -> None:
    assert main([str(a) for a in arguments]) == 0


def _lock_reseal(i: Inputs, out: Path) -> None:
    run("lock", "--reseal", i.more / "locked", "-k", i.more / "lock")
    shutil.copytree(i.more / "locked", out)


def _jigsaw(i: Inputs, out: Path) -> None:
    from regauge.jigsaw import MaskedJigsaw
    from regauge.jigsaw.folder import save_wrapped

    save_wrapped(MaskedJigsaw(build("vit"), 0.0, variant="A"), out, i.model)


def _federated(i: Inputs, out: Path) -> None:
    from regauge.federated.outputs import save_model

    out.mkdir()
    (out / "old").touch()
    save_model(build("vit"), out, i.model)
    assert not (out / "old").exists()
    assert not list(out.parent.glob(".*partial*"))


def _split(i: Inputs, out: Path) -> None:
    from regauge.split.parts import join

    join(i.model, i.more / "moved", out)


# With a key, an output is for its owner only: the key is an input like any other.
COMMANDS: dict[str, Callable[[Inputs, Path], None]] = {
    "move": lambda i, out: run("move", i.model, "--random", "-o", out),
    "move to a file": lambda i, out: run(
        "move", i.model / "model.safetensors", "--random", "-o", out.with_suffix(".safetensors")
    ),
    "move by an element": lambda i, out: run("move", i.model, "-g", i.more / "element", "-o", out),
    "move an adapter": lambda i, out: run(
        "move", i.model, "--adapter", i.adapter, "-g", i.more / "element", "-o", out
    ),
    "match": lambda i, out: run("match", i.model, i.other, "--spaces", "ffn", "-o", out),
    "match, rotated": lambda i, out: run(
        "match", i.model, i.other, "--spaces", "stream", "--sweeps", 0, "-o", out
    ),
    "merge": lambda i, out: run("merge", i.model, i.other, "--force", "-o", out),
    "merge a recipe": lambda i, out: run("merge", i.more / "recipe.yaml", "-o", out),
    "merge an adapter": lambda i, out: run(
        "merge", f"{i.model}+{i.adapter}", i.model, "--force", "-o", out
    ),
    "convert": lambda i, out: run("convert", i.more / "pickled", "-o", out),
    "convert a file": lambda i, out: run(
        "convert", i.more / "pickled" / "pytorch_model.bin", "-o", out.with_suffix(".safetensors")
    ),
    "lock": lambda i, out: run("lock", i.model, "-k", i.more / "lock", "-o", out),
    "unlock": lambda i, out: run("unlock", i.more / "locked", "-k", i.more / "lock", "-o", out),
    "rekey": lambda i, out: run(
        "rekey", i.more / "locked", "-k", i.more / "lock", "--to", i.more / "second", "-o", out
    ),
    "reseal": lambda i, out: run(
        "lock", "--reseal", i.more / "locked", "-k", i.more / "lock", "-o", out
    ),
    "reseal in place": _lock_reseal,
    "seal": lambda i, out: run("seal", i.model, "-k", i.more / "seal", "-o", out),
    "open": lambda i, out: run("open", i.more / "sealed", "-k", i.more / "seal", "-o", out),
    "jigsaw": _jigsaw,
    "federated": _federated,
    "split": _split,
}
PRIVATE = {
    "move by an element",
    "move an adapter",
    "lock",
    "unlock",
    "rekey",
    "reseal",
    "seal",
    "open",
}


@pytest.fixture
def inputs(make_inputs: Inputs, tmp_path: Path) -> Iterator[Inputs]:
    """Copies of the inputs, and the umask of most systems."""
    before = os.umask(0o022)
    copied = Inputs(
        *(Path(shutil.copytree(folder, tmp_path / folder.name)) for folder in make_inputs)
    )
    (copied.more / "recipe.yaml").write_text(
        f"merge_method: passthrough\nmodels: [{{model: {copied.model}}}]\n"
    )
    yield copied
    os.umask(before)


def set_modes(inputs: Inputs, files: int, folders: int) -> None:
    for top in inputs:
        for path in (top, *top.rglob("*")):
            if path.name not in ("lock", "seal", "second", "element"):
                path.chmod(folders if path.is_dir() else files)


def modes(out: Path) -> tuple[set[int], set[int]]:
    """The modes of the files and folders of an output, a file or a folder."""
    found = [
        p
        for p in (
            out,
            out.with_suffix(".safetensors"),
            out.with_name("out.config.json"),
            out.with_name("first"),
        )
        if p.exists()
    ]
    found += [p for top in found for p in top.rglob("*")]
    assert found
    both = [
        {stat.S_IMODE(p.stat().st_mode) for p in found if p.is_dir() == folder}
        for folder in (False, True)
    ]
    return both[0], both[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_private_inputs_make_private_outputs(
    inputs: Inputs, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_modes(inputs, 0o600, 0o700)
    flushed: list[int] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        flushed.append(os.fstat(fd).st_mode)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    COMMANDS[command](inputs, tmp_path / "out")
    files, folders = modes(tmp_path / "out")
    assert files == {0o600}
    assert folders <= {0o700}
    before = {stat.S_IMODE(m) for m in flushed if stat.S_ISREG(m)}
    assert before == {0o600}, "half-written files are as private"


@pytest.mark.parametrize("command", COMMANDS)
def test_public_inputs_make_public_outputs_without_a_key(
    inputs: Inputs, tmp_path: Path, command: str
) -> None:
    set_modes(inputs, 0o644, 0o755)
    COMMANDS[command](inputs, tmp_path / "out")
    assert modes(tmp_path / "out")[0] == ({0o600} if command in PRIVATE else {0o644})
    assert modes(tmp_path / "out")[1] <= ({0o700} if command in PRIVATE else {0o755})


@pytest.mark.parametrize(
    "strict", ["model.safetensors", "config.json", "tokenizer/vocab.json", "tokenizer", ""]
)
def test_the_strictest_of_several_inputs_counts(
    inputs: Inputs, tmp_path: Path, strict: str
) -> None:
    set_modes(inputs, 0o644, 0o755)
    path = inputs.model / strict
    path.chmod(0o710 if path.is_dir() else 0o640)
    for command in ("move", "merge", "match", "split"):
        out = tmp_path / "out"
        COMMANDS[command](inputs, out)
        files, folders = modes(out)
        assert not any(m & 0o027 for m in (*files, *folders)), (
            command,
            [oct(m) for m in (*files, *folders)],
        )
        shutil.rmtree(out)
    for other in (inputs.other,):
        other.chmod(0o700)
        COMMANDS["merge"](inputs, tmp_path / "out")
        assert modes(tmp_path / "out") == ({0o600}, {0o700})


def test_the_umask_counts_too(inputs: Inputs, tmp_path: Path) -> None:
    set_modes(inputs, 0o664, 0o775)
    os.umask(0o027)
    for command in ("move", "split", "federated"):
        COMMANDS[command](inputs, tmp_path / "out")
        assert modes(tmp_path / "out") == ({0o640}, {0o750}), command
        shutil.rmtree(tmp_path / "out")
    os.umask(0o002)
    COMMANDS["move"](inputs, tmp_path / "out")
    assert modes(tmp_path / "out") == ({0o664}, {0o775})


def test_what_a_looser_run_has_left_is_tightened(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regauge.checkpoints import writer

    set_modes(inputs, 0o644, 0o755)

    def killed(partial: Path, out: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(writer, "_publish", killed)
        assert (
            main(
                [
                    "move",
                    str(inputs.model),
                    "--random",
                    "--seed",
                    "1",
                    "--resume",
                    "-o",
                    str(tmp_path / "out"),
                ]
            )
            == 130
        )
    assert modes(tmp_path / ".out.partial")[0] >= {0o644}
    (inputs.model / "model.safetensors").chmod(0o600)
    run("move", inputs.model, "--random", "--seed", "1", "--resume", "-o", tmp_path / "out")
    assert modes(tmp_path / "out") == ({0o600}, {0o700})


def test_the_rule(tmp_path: Path) -> None:
    before = os.umask(0o022)
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    for mode, bits in (
        (0o644, 0o755),
        (0o640, 0o750),
        (0o600, 0o700),
        (0o444, 0o755),
        (0o666, 0o777),
        (0o604, 0o705),
        (0o622, 0o700),
    ):
        file.chmod(mode)
        assert strictest_mode([file]) == bits, oct(mode)
    for mode, bits in (
        (0o755, 0o755),
        (0o750, 0o750),
        (0o711, 0o711),
        (0o744, 0o700),
        (0o500, 0o700),
    ):
        folder.chmod(mode)
        assert strictest_mode([folder]) == bits, oct(mode)
    folder.chmod(0o700)
    make_folder(folder / "a" / "b", 0o710)
    assert (
        stat.S_IMODE((folder / "a").stat().st_mode)
        == stat.S_IMODE((folder / "a" / "b").stat().st_mode)
        == 0o710
    )
    file.chmod(0o600)
    write_bytes(file, b"new")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600, "never looser than the file that is replaced"
    with (
        pytest.raises(CheckpointError, match="mode 0o700"),
        staged_folder(folder, 0o755, replace=True) as partial,
    ):
        raise CheckpointError(f"mode {stat.S_IMODE(partial.stat().st_mode):#o}")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert (folder / "a" / "b").is_dir(), "what was there stays, unless all is written"
    os.umask(before)

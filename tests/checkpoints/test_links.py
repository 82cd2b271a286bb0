"""Links in a model folder stay within it; those of the hub's cache stay within their repository."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from regauge.checkpoints.reader import open_checkpoint
from regauge.cli import main
from regauge.demo.move import LLAMA, make_checkpoint
from support.cli_runs import Run, contents, shard
from support.picos import build

SECRET = b"the secret of another folder"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(SECRET)
    return make_checkpoint(tmp_path / "model", LLAMA, 0)


def replace_with_link(path: Path) -> Path:
    """A file of the model, moved out of its folder, with a link in its place."""
    away = path.parents[1] / "outside" / path.name
    path.rename(away)
    path.symlink_to(away)
    return away


# What makes a link that leads out of the folder, or nowhere.
LINKS: dict[str, Callable[[Path], object]] = {
    "absolute": lambda m: (m / "vocab.txt").symlink_to(m.parent / "outside" / "secret"),
    "dots": lambda m: (m / "vocab.txt").symlink_to("../outside/secret"),
    "dots in a chain": lambda m: (
        (m / "vocab.txt").symlink_to("next.txt"),
        (m / "next.txt").symlink_to("../model/../outside/secret"),
    ),
    "in a subfolder": lambda m: (
        (m / "sub").mkdir(),
        (m / "sub" / "vocab.txt").symlink_to("../../outside/secret"),
    ),
    "to a folder": lambda m: (m / "tokenizer").symlink_to("../outside"),
    "dangling": lambda m: (m / "vocab.txt").symlink_to("../outside/absent"),
    "loop": lambda m: (
        (m / "vocab.txt").symlink_to("next.txt"),
        (m / "next.txt").symlink_to("vocab.txt"),
    ),
    "to itself": lambda m: (m / "vocab.txt").symlink_to("vocab.txt"),
    "the weights": lambda m: replace_with_link(m / "model.safetensors"),
    "the config": lambda m: replace_with_link(m / "config.json"),
}


@pytest.mark.parametrize("link", LINKS)
def test_links_that_lead_out_are_refused(run: Run, tmp_path: Path, model: Path, link: str) -> None:
    assert run("keygen", "-o", tmp_path / "key").code == 0
    assert run("keygen", "-o", tmp_path / "seal", "--purpose", "seal").code == 0
    LINKS[link](model)
    before = sorted(p.name for p in tmp_path.iterdir())
    for arguments in (
        ["move", model, "--random"],
        ["lock", model, "-k", tmp_path / "key"],
        ["merge", model, model],
        ["seal", model, "-k", tmp_path / "seal"],
    ):
        result = run(*arguments, "-o", tmp_path / "out")
        assert result.code == 1, arguments
        assert "link" in result.err or "neither a file nor a folder" in result.err
        assert "hint: " in result.err
        assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_links_that_stay_are_followed(run: Run, tmp_path: Path, model: Path) -> None:
    (model / "sub").mkdir()
    (model / "sub" / "vocab.txt").write_text("words")
    (model / "vocab.txt").symlink_to("sub/vocab.txt")
    (model / "other").symlink_to("sub")
    (model / ".hidden").symlink_to("../outside/secret")
    (tmp_path / "link").symlink_to(model)  # the user named it
    assert run("move", tmp_path / "link", "--random", "-o", tmp_path / "out").code == 0
    assert (tmp_path / "out" / "vocab.txt").read_text() == "words"
    assert not (tmp_path / "out" / "vocab.txt").is_symlink()
    assert all(SECRET not in data for data in contents(tmp_path / "out").values())
    (tmp_path / "file.safetensors").symlink_to(model / "model.safetensors")
    shutil.copy(model / "config.json", tmp_path / "file.config.json")
    assert (
        run(
            "move", tmp_path / "file.safetensors", "--random", "-o", tmp_path / "new.safetensors"
        ).code
        == 0
    )


def hub_cache(model: Path, top: Path) -> Path:
    """The model as the hub's client lays it out: blobs by their digests, and a snapshot of links to
    them.
    """
    repo = top / "hub" / "models--owner--name"
    snapshot = repo / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for i, path in enumerate(sorted(model.iterdir())):
        shutil.copy(path, repo / "blobs" / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    return snapshot


@pytest.mark.parametrize("sharded", [False, True])
def test_the_cache_of_the_hub(run: Run, tmp_path: Path, model: Path, sharded: bool) -> None:
    (model / "tokenizer.json").write_text("{}")
    source = shard(model, tmp_path / "sharded") if sharded else model
    snapshot = hub_cache(source, tmp_path)
    assert dict(open_checkpoint(snapshot)).keys() == dict(open_checkpoint(source)).keys()
    assert run("move", snapshot, "--random", "--seed", "1", "-o", tmp_path / "out").code == 0
    assert run("move", source, "--random", "--seed", "1", "-o", tmp_path / "same").code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "same")
    assert run("keygen", "-o", tmp_path / "seal", "--purpose", "seal").code == 0
    assert run("seal", snapshot, "-k", tmp_path / "seal", "-o", tmp_path / "sealed").code == 0
    (snapshot / "vocab.txt").symlink_to("../../../../outside/secret")
    result = run("move", snapshot, "--random", "-o", tmp_path / "no")
    assert result.code == 1
    assert "must stay within the model folder" in result.err
    (snapshot / "vocab.txt").unlink()
    (snapshot / "vocab.txt").symlink_to("../../blobs/out")
    (snapshot.parents[1] / "blobs" / "out").symlink_to(tmp_path / "outside" / "secret")
    assert run("move", snapshot, "--random", "-o", tmp_path / "no").code == 1, (
        "a blob may be a link as well"
    )
    assert not (tmp_path / "no").exists()


def test_other_layouts_are_not_taken_for_the_cache(run: Run, tmp_path: Path, model: Path) -> None:
    snapshot = hub_cache(model, tmp_path)
    for name in ("owner--name", "models"):
        repo = snapshot.parents[1].rename(tmp_path / "hub" / name)
        result = run("move", repo / "snapshots" / "0123abcd", "--random", "-o", tmp_path / "no")
        assert result.code == 1
        assert "must stay within the model folder" in result.err
        repo.rename(snapshot.parents[1])


def test_what_copies_single_files_refuses_them_too(tmp_path: Path, model: Path) -> None:
    from regauge.errors import CheckpointError
    from regauge.federated.outputs import save_model
    from regauge.jigsaw import MaskedJigsaw
    from regauge.jigsaw.folder import save_wrapped

    (model / "preprocessor_config.json").symlink_to(tmp_path / "outside" / "secret")
    with pytest.raises(CheckpointError, match="must stay within"):
        save_model(build("vit"), tmp_path / "out", model)
    with pytest.raises(CheckpointError, match="must stay within"):
        save_wrapped(MaskedJigsaw(build("vit"), 0.0, variant="A"), tmp_path / "out", model)
    (model / "preprocessor_config.json").unlink()
    torch.save(
        dict(load_file(model / "model.safetensors")), tmp_path / "outside" / "pytorch_model.bin"
    )
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").symlink_to(tmp_path / "outside" / "pytorch_model.bin")
    assert main(["convert", str(model), "-o", str(tmp_path / "out")]) == 1
    assert not os.path.lexists(tmp_path / "out")

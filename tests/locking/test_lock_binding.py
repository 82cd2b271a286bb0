"""A lock is checked on the bytes that are used, and binds the list of files: changes after the
check and added files are refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from regauge import authorize
from regauge.checkpoints import writer
from regauge.checkpoints.reader import open_checkpoint
from regauge.core.rng import seed_key
from regauge.demo.move import GPT2, LLAMA, _shapes, make_checkpoint
from regauge.errors import AuthorizeError, TamperedModelError
from regauge.locking import locked_checkpoints
from regauge.locking.authorize import save_trained
from regauge.locking.keys import Key
from regauge.locking.lock import UNKNOWN, record_of
from regauge.locking.locked_checkpoints import (
    bound_files,
    check_files,
    is_unbound,
    plan_lock,
    plan_rekey,
    plan_unlock,
    reseal,
    verify_files,
)
from regauge.models.resolve import spec_of
from support.cli_runs import Run, contents, shard
from support.picos import build

KEY, OTHER = Key(seed_key(1), "lock"), Key(seed_key(2), "lock")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    folder = make_checkpoint(tmp_path / "plain", LLAMA, 0)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "generation_config.json").write_text("{}")
    (folder / "README.md").write_text("about")
    return folder


def write_locked(plain: Path, out: Path, group: str = "signed") -> Path:
    opened = open_checkpoint(plain)
    plan_lock(opened, spec_of(opened), out, KEY, group=group).write()
    return out


def job(command: str, folder: Path, out: Path) -> locked_checkpoints.LockJob:
    opened = open_checkpoint(folder)
    match command:
        case "lock":
            return plan_lock(opened, spec_of(opened), out, KEY)
        case "unlock":
            return plan_unlock(opened, spec_of(opened), out, KEY)
        case _:
            return plan_rekey(opened, spec_of(opened), out, KEY, OTHER)


def overwrite(path: Path, at: int = -4) -> None:
    """Change a byte in place: the same file, of the same size."""
    with path.open("r+b") as file:
        file.seek(at, 2 if at < 0 else 0)
        old = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([old[0] ^ 1]))


@pytest.mark.parametrize("where", ["model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize(
    ("command", "group"),
    [
        ("unlock", "signed"),
        ("unlock", "rotation"),
        ("rekey", "signed"),
        ("rekey", "rotation"),
        ("lock", "signed"),
    ],
)
def test_a_file_that_is_rewritten_after_the_check(
    plain: Path, tmp_path: Path, command: str, group: str, where: str
) -> None:
    folder = plain if command == "lock" else write_locked(plain, tmp_path / "in", group)
    if command == "lock" and where == "tokenizer.json":
        pytest.skip("what is locked is what was copied")
    names = sorted(p.name for p in tmp_path.iterdir())
    planned = job(command, folder, tmp_path / "out")
    overwrite(folder / where)
    with pytest.raises(TamperedModelError, match="changed while it was read, after it was checked"):
        planned.write()
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    overwrite(folder / where)
    job(command, folder, tmp_path / "out").write()


def test_every_tensor_is_compared_with_its_checksum(plain: Path, tmp_path: Path) -> None:
    """Those that are moved and those that are copied, in the middle of the writing."""
    folder = write_locked(plain, tmp_path / "in")
    for name, entry in open_checkpoint(folder).entries.items():
        planned = job("unlock", folder, tmp_path / "out")
        overwrite(folder / "model.safetensors", entry.start)
        with pytest.raises(TamperedModelError, match="changed while"):
            planned.write()
        overwrite(folder / "model.safetensors", entry.start)
        assert name in open_checkpoint(folder)
    assert not (tmp_path / "out").exists()


def test_what_is_hashed_is_what_is_written(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is rewritten between the hash of a piece and its write."""
    folder = write_locked(plain, tmp_path / "in")
    write, entry = writer.os.write, open_checkpoint(folder).entries["model.embed_tokens.weight"]
    rewritten = []

    def slow(fd: int, data: Any) -> int:
        if not rewritten and len(data) == min(entry.nbytes, writer._CHUNK):
            rewritten.append(1)
            overwrite(folder / "model.safetensors", entry.start)
        return write(fd, data)

    planned = job("unlock", folder, tmp_path / "out")
    monkeypatch.setattr(writer.os, "write", slow)
    planned.write(threads=1)
    assert rewritten
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        plain / "model.safetensors"
    ).read_bytes()


ADDED: dict[str, Callable[[Path], object]] = {
    "adapter_model.safetensors": lambda p: save_file({"a": torch.zeros(1)}, p),
    "adapter_config.json": lambda p: p.write_text("{}"),
    "pytorch_model.bin": lambda p: p.write_bytes(b"x"),
    "model-00001-of-00002.safetensors": lambda p: save_file({"a": torch.zeros(1)}, p),
    "model.safetensors.index.json": lambda p: p.write_text("{}"),
    "modeling_llama.py": lambda p: p.write_text("import os"),
    "chat_template.jinja": lambda p: p.write_text("x"),
    "tokenizer/vocab.txt": lambda p: (p.parent.mkdir(), p.write_text("x")),
}


@pytest.mark.parametrize("name", ADDED)
def test_files_that_are_added_are_refused(run: Run, plain: Path, tmp_path: Path, name: str) -> None:
    folder = write_locked(plain, tmp_path / "in")
    checkpoint = open_checkpoint(folder)
    verify_files(checkpoint, spec_of(checkpoint), KEY)
    ADDED[name](folder / name)
    assert run("keygen", "-o", tmp_path / "key").code == 0
    for command in ("unlock", "rekey"):
        with pytest.raises(TamperedModelError, match=f"{name} was added to the folder") as refused:
            job(command, folder, tmp_path / "out")
        assert "--reseal" in str(refused.value.cli_hint)
    with pytest.raises(TamperedModelError, match="was added"):
        verify_files(checkpoint, spec_of(checkpoint), KEY)
    if "/" not in name and (name.startswith("adapter_") or name.endswith(".py")):
        with pytest.raises(
            TamperedModelError, match="was added"
        ):  # also of a model that was trained since, and without a key
            plan_unlock(checkpoint, spec_of(checkpoint), tmp_path / "out", KEY, retrained=True)
        with pytest.raises(TamperedModelError, match="was added"):
            check_files(checkpoint)
        assert f"{name} was added" in run("audit", "lock", folder, "--against", plain).err
    assert not (tmp_path / "out").exists()


def test_files_that_are_changed_or_removed_are_refused(plain: Path, tmp_path: Path) -> None:
    folder = write_locked(plain, tmp_path / "in")
    good = contents(folder)
    for name in ("tokenizer.json", "generation_config.json"):
        (folder / name).write_text('{"model": {"changed": 1}}')
        with pytest.raises(TamperedModelError, match=f"{name} was changed"):
            job("unlock", folder, tmp_path / "out")
        (folder / name).unlink()
        with pytest.raises(TamperedModelError, match=f"{name} is missing"):
            job("unlock", folder, tmp_path / "out")
        (folder / name).write_bytes(good[name])
    config = json.loads(good["config.json"])
    for field, value in (
        ("rms_norm_eps", 1e-3),
        ("auto_map", {"AutoModel": "x.Y"}),
        ("hidden_act", "relu"),
    ):
        (folder / "config.json").write_text(json.dumps({**config, field: value}))
        with pytest.raises(TamperedModelError, match=r"config\.json was changed"):
            job("unlock", folder, tmp_path / "out")
    record = {
        **config["regauge_lock"],
        "files": {**config["regauge_lock"]["files"], "adapter_config.json": "0" * 64},
    }
    (folder / "config.json").write_text(json.dumps({**config, "regauge_lock": record}))
    with pytest.raises(TamperedModelError, match="its lock record was changed"):
        job("unlock", folder, tmp_path / "out")
    (folder / "config.json").write_text(
        json.dumps(dict(reversed(config.items())))
    )  # the same contents
    job("unlock", folder, tmp_path / "out").write()
    assert contents(tmp_path / "out")["tokenizer.json"] == good["tokenizer.json"]


def test_what_nothing_loads_may_be_added_and_changed(plain: Path, tmp_path: Path) -> None:
    folder = write_locked(plain, tmp_path / "in")
    (folder / "README.md").write_text("another page")
    (folder / "LICENSE").write_text("MIT")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x.py").write_text("")
    job("unlock", folder, tmp_path / "out").write()
    assert [
        n for n in ("README.md", "docs/plot.png", "LICENSE.txt", "NOTICE") if not is_unbound(n)
    ] == []
    assert [
        n
        for n in (
            "vocab.txt",
            "merges.txt",
            "license.json",
            "readme.py",
            "a.safetensors",
            "config.json",
            "x.bin",
        )
        if is_unbound(n)
    ] == []


def test_what_is_bound(plain: Path, tmp_path: Path) -> None:
    folder = write_locked(shard(plain, tmp_path / "shards"), tmp_path / "in")
    record = record_of(open_checkpoint(folder))
    assert record is not None
    assert record.version == 2
    assert record.files == bound_files(open_checkpoint(folder))
    assert set(record.files) == {"config.json", "model.safetensors.index.json"}
    assert record.plain == record.digest
    whole = record_of(open_checkpoint(write_locked(plain, tmp_path / "whole", "rotation")))
    assert whole is not None
    assert set(whole.files or ()) == {"config.json", "tokenizer.json", "generation_config.json"}
    assert whole.plain == UNKNOWN


def test_reseal_binds_what_is_there(run: Run, plain: Path, tmp_path: Path) -> None:
    folder = write_locked(plain, tmp_path / "in")
    before = record_of(open_checkpoint(folder))
    (folder / "chat_template.jinja").write_text("x")
    checkpoint = open_checkpoint(folder)
    after = reseal(checkpoint, spec_of(checkpoint), KEY)
    assert before is not None
    assert set(after.files or ()) == {*(before.files or ()), "chat_template.jinja"}
    assert after.plain == before.plain, "its data are the same"
    job("unlock", folder, tmp_path / "out").write()
    state = load_file(folder / "model.safetensors")
    save_file({n: 2 * t for n, t in state.items()}, folder / "model.safetensors", {"format": "pt"})
    checkpoint = open_checkpoint(folder)
    assert reseal(checkpoint, spec_of(checkpoint), KEY).plain == UNKNOWN
    job("unlock", folder, tmp_path / "trained").write()
    job("rekey", folder, tmp_path / "again").write()


def test_authorize_holds_memory_to_the_files(plain: Path, tmp_path: Path) -> None:
    import transformers

    folder = write_locked(plain, tmp_path / "in")

    def loaded() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder)

    authorize(loaded(), KEY, files=folder)
    authorize(loaded().to(torch.bfloat16), KEY, files=folder)
    shutil.copy(folder / "model.safetensors", tmp_path / "good")
    overwrite(folder / "model.safetensors")
    model = loaded()
    (tmp_path / "good").replace(
        folder / "model.safetensors"
    )  # another file: the library may have mapped the first
    with pytest.raises(TamperedModelError, match="in memory differs from"):
        authorize(model, KEY, files=folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TamperedModelError, match=r"tokenizer\.json was changed"):
        authorize(loaded(), KEY, files=folder)


def test_an_adapter_in_a_locked_folder_is_not_loaded(plain: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    from regauge import load_model

    folder = write_locked(plain, tmp_path / "in")
    expected = load_model(folder).state_dict()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    )
    adapted.save_pretrained(folder)
    loaded = load_model(folder)
    assert {n: t.shape for n, t in loaded.state_dict().items()} == {
        n: t.shape for n, t in expected.items()
    }
    with pytest.raises(AuthorizeError, match="was loaded with an adapter"):
        authorize(transformers.AutoModelForCausalLM.from_pretrained(folder), KEY)
    authorize(loaded, KEY)


def test_saved_again_by_the_library(plain: Path, tmp_path: Path) -> None:
    import transformers

    model = authorize(
        transformers.AutoModelForCausalLM.from_pretrained(write_locked(plain, tmp_path / "in")), KEY
    )
    save_trained(model, tmp_path / "trained", KEY)
    job("unlock", tmp_path / "trained", tmp_path / "out").write()


def test_version_1_stays_readable(run: Run, tmp_path: Path) -> None:
    """A record that the first version wrote, of these weights: it binds them, and no other file."""
    folder = tmp_path / "plain"
    folder.mkdir()
    config = {**GPT2, "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 6}
    (folder / "config.json").write_text(json.dumps(config))
    shapes = sorted(_shapes(config).items())
    arrays = {
        n: (np.arange(int(np.prod(s)), dtype=np.float32).reshape(s) * (i + 1) % 17 - 8) / 16
        for i, (n, s) in enumerate(shapes)
    }
    save_arrays(arrays, folder / "model.safetensors", {"format": "pt"})
    old = {
        "version": 1,
        "scheme": "backbone",
        "family": "gpt2",
        "group": "signed",
        "spaces": None,
        "folded": False,
        "key": "57f45b5c41a9152c",
        "digest": "8752c1a2494b27058fca35ccd685c33aba2080b58f049703e6264e905b367a62",
        "layout": "7f0d698815d02255dda68a223e5c0bc62e89a0c6f1eaabc0101dae08d220cc10",
        "tags": {
            "record": "d879e17713420b16f4b50975abb927ea602370f40c4f9a6ae18ec1f127100fc3",
            "structure": "6d7fff5709252c9a303ac90e6d2149393579c350dfa7b790412ea80897ac6ab4",
            "data": "063d9038190b2cc0f7048869649d98313b99c3f98e2aa0afd5ea3d5d32db7c36",
        },
    }
    write_locked(folder, tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text(json.dumps({**config, "regauge_lock": old}))
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    job("unlock", tmp_path / "in", tmp_path / "out").write()
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        folder / "model.safetensors"
    ).read_bytes()
    planned = job("unlock", tmp_path / "in", tmp_path / "no")
    overwrite(tmp_path / "in" / "model.safetensors")
    with pytest.raises(TamperedModelError, match="changed while"):
        planned.write()
    with pytest.raises(TamperedModelError, match="its data were changed"):
        job("unlock", tmp_path / "in", tmp_path / "no")
    overwrite(tmp_path / "in" / "model.safetensors")
    job("rekey", tmp_path / "in", tmp_path / "again").write()
    record = record_of(open_checkpoint(tmp_path / "again"))
    assert record is not None
    assert (record.version, set(record.files or ())) == (2, {"config.json", "tokenizer.json"})
    shutil.rmtree(tmp_path / "out")


def test_a_live_model_of_another_class(tmp_path: Path) -> None:
    """Names differ by the prefix of the base model."""
    import transformers

    build("gpt2").save_pretrained(tmp_path / "plain")
    folder = write_locked(tmp_path / "plain", tmp_path / "in")
    model = transformers.AutoModel.from_pretrained(folder)
    checkpoint = open_checkpoint(folder)
    locked_checkpoints.verify_loaded(model, checkpoint, spec_of(checkpoint), KEY)
    with torch.no_grad():
        model.h[0].mlp.c_fc.weight[0, 0] += 1
    with pytest.raises(TamperedModelError, match="in memory differs from"):
        locked_checkpoints.verify_loaded(model, checkpoint, spec_of(checkpoint), KEY)

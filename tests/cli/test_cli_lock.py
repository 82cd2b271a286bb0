"""keygen, lock, unlock, rekey, seal, open and fingerprint on the command line: what they print, and
what is left on disk.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from regauge.checkpoints.reader import open_checkpoint
from regauge.cli import main
from regauge.demo.move import GPT2, LLAMA, make_checkpoint
from regauge.locking.keys import Key, load_key
from regauge.locking.lock import record_of
from regauge.matching.fingerprint import Fingerprint
from support.cli_runs import Run, contents, reconfigure, shard
from support.picos import build


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "llama", LLAMA, 0)


@pytest.fixture
def key(run: Run, tmp_path: Path) -> Path:
    assert run("keygen", "-o", tmp_path / "key").code == 0
    return tmp_path / "key"


def list_files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_keygen(run: Run, tmp_path: Path) -> None:
    result = run("keygen", "-o", tmp_path / "key", "--json")
    assert result.code == 0
    made = load_key(tmp_path / "key", "lock")
    first, _ = result.err.splitlines()
    assert first == (
        f"regauge: wrote {tmp_path / 'key'}: key {made.id} for lock; keep a copy in a safe place"
    )
    assert json.loads(result.out) == {
        "version": 1,
        "command": "keygen",
        "out": str(tmp_path / "key"),
        "id": made.id,
        "purpose": "lock",
        "passphrase": False,
    }
    result = run("keygen", "-o", tmp_path / "key")
    assert result.code == 1
    assert "exists already" in result.err
    assert load_key(tmp_path / "key", "lock") == made
    assert run("keygen", "-o", tmp_path / "seal", "--purpose", "seal").code == 0
    assert run("keygen", "-o", tmp_path / "other", "--purpose", "sign").code == 2
    assert list_files(tmp_path) == ["key", "seal"]


def test_passphrases(
    run: Run, tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import regauge.locking.keys

    monkeypatch.setattr(regauge.locking.keys, "SCRYPT", {"n": 16, "r": 8, "p": 1})
    (tmp_path / "word").touch(0o600)
    (tmp_path / "word").write_text("open sesame\n")
    assert run("keygen", "-o", tmp_path / "key", "--passphrase-file", tmp_path / "word").code == 0
    assert "wrapped" in (tmp_path / "key").read_text()
    result = run("lock", llama, "-k", tmp_path / "key", "-o", tmp_path / "out")
    assert result.code == 1
    assert "stdin is not a terminal" in result.err
    assert "REGAUGE_PASSPHRASE" in result.err
    assert (
        run(
            "lock",
            llama,
            "-k",
            tmp_path / "key",
            "-o",
            tmp_path / "out",
            "--passphrase-file",
            tmp_path / "word",
        ).code
        == 0
    )
    monkeypatch.setenv("REGAUGE_PASSPHRASE", "open barley")
    result = run("unlock", tmp_path / "out", "-k", tmp_path / "key", "-o", tmp_path / "back")
    assert result.code == 1
    assert "the passphrase does not unwrap" in result.err
    assert "barley" not in result.err
    monkeypatch.setenv("REGAUGE_PASSPHRASE", "open sesame")
    assert (
        run("unlock", tmp_path / "out", "-k", tmp_path / "key", "-o", tmp_path / "back").code == 0
    )
    assert run("keygen", "-o", tmp_path / "plain").code == 0
    assert "wrapped" not in (tmp_path / "plain").read_text(), (
        "a passphrase in the environment may be another key's"
    )
    assert run("keygen", "-o", tmp_path / "second", "--passphrase").code == 0
    assert "wrapped" in (tmp_path / "second").read_text()
    (tmp_path / "word").write_text("\n")
    result = run("keygen", "-o", tmp_path / "third", "--passphrase-file", tmp_path / "word")
    assert "must be a passphrase of 1 to" in result.err


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_passphrase_file_that_others_can_read_is_refused(
    run: Run, tmp_path: Path, mode: int
) -> None:
    word = tmp_path / "word"
    word.write_text("open sesame\n")
    word.chmod(mode)
    result = run("keygen", "-o", tmp_path / "key", "--passphrase-file", word)
    assert result.code == 1
    assert f"{word} can be read by others (mode {mode:04o})" in result.err
    assert f"hint: chmod 600 {word}" in result.err
    assert list_files(tmp_path) == ["word"]
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert (
        "not a regular file"
        in run("keygen", "-o", tmp_path / "key", "--passphrase-file", tmp_path / "pipe").err
    )


def test_lock_and_unlock(run: Run, tmp_path: Path, llama: Path, key: Path) -> None:
    before = contents(llama)
    result = run("lock", llama, "-k", key, "-o", tmp_path / "locked")
    assert result.code == 0
    assert result.out == ""
    assert (
        "llama: locks the backbone by signed permutations of stream, kv (4), rep (4), qk (4), "
        "vo (4), ffn (4); key" in result.err
    )
    assert "a lock is obfuscation, not encryption" in result.err
    old, new = open_checkpoint(llama), open_checkpoint(tmp_path / "locked")
    for name in old:
        assert torch.equal(old[name], new[name]) == (not name.startswith("model.layers.")), name
    record = record_of(new)
    assert record is not None
    assert record.key == load_key(key, "lock").id
    assert load_key(key, "lock").derive("x").hex()[:8] not in json.dumps(new.config)
    result = run("unlock", tmp_path / "locked", "-k", key, "-o", tmp_path / "back", "--json")
    assert result.code == 0
    assert json.loads(result.out)["command"] == "unlock"
    after = contents(tmp_path / "back")
    assert after["model.safetensors"] == before["model.safetensors"]
    assert json.loads(after["config.json"]) == json.loads(before["config.json"])
    assert contents(llama) == before
    assert list_files(tmp_path) == ["back", "key", "llama", "locked"]


def test_a_locked_folder_loads_and_gives_garbage(run: Run, tmp_path: Path, key: Path) -> None:
    """A model that has learned something: the next number. Locked it is at chance; unlocked it is
    right again.
    """
    import transformers

    torch.manual_seed(0)
    model: Any = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=2,
            vocab_size=16,
            n_positions=16,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    ids = (torch.arange(12)[None] + torch.arange(16)[:, None]) % 16
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "plain")

    def accuracy(folder: Path) -> float:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            return float(
                (loaded(input_ids=ids).logits[:, :-1].argmax(-1) == ids[:, 1:]).float().mean()
            )

    assert accuracy(tmp_path / "plain") > 0.99
    for group in ("permutation", "signed", "rotation"):
        assert (
            run(
                "lock", tmp_path / "plain", "-k", key, "-o", tmp_path / group, "--group", group
            ).code
            == 0
        )
        assert accuracy(tmp_path / group) < 0.35, group
        assert (
            run("unlock", tmp_path / group, "-k", key, "-o", tmp_path / f"back-{group}").code == 0
        )
        assert accuracy(tmp_path / f"back-{group}") > 0.99, group


def test_what_is_refused_leaves_nothing(run: Run, tmp_path: Path, llama: Path, key: Path) -> None:
    assert run("keygen", "-o", tmp_path / "other").code == 0
    assert run("keygen", "-o", tmp_path / "sealing", "--purpose", "seal").code == 0
    assert run("lock", llama, "-k", key, "-o", tmp_path / "locked").code == 0
    shutil.copytree(tmp_path / "locked", tmp_path / "flipped")
    data = bytearray((tmp_path / "flipped" / "model.safetensors").read_bytes())
    data[-1000] ^= 1
    (tmp_path / "flipped" / "model.safetensors").write_bytes(data)
    shutil.copytree(tmp_path / "locked", tmp_path / "short")
    os.truncate(tmp_path / "short" / "model.safetensors", 200_000)
    shutil.copytree(tmp_path / "locked", tmp_path / "heads")
    twice = {
        n: 2 * LLAMA[n] for n in ("num_attention_heads", "num_key_value_heads")
    }  # every shape still fits
    reconfigure(tmp_path / "heads", **twice)
    (tmp_path / "loose").write_bytes(key.read_bytes())
    (tmp_path / "loose").chmod(0o644)
    shutil.copy(key, llama / "inside")
    (llama / "inside").chmod(0o600)
    before, out = list_files(tmp_path), tmp_path / "out"
    for arguments, why in (
        (["lock", tmp_path / "locked", "-k", key], "is locked already"),
        (["unlock", llama, "-k", key], "is not locked"),
        (["rekey", llama, "-k", key, "--to", tmp_path / "other"], "is not locked"),
        (
            ["unlock", tmp_path / "locked", "-k", tmp_path / "other"],
            "the model was locked by the key",
        ),
        (
            ["unlock", tmp_path / "locked", "-k", tmp_path / "sealing"],
            'must be "lock", got "seal"',
        ),
        (
            ["unlock", tmp_path / "locked", "-k", tmp_path / "loose"],
            "can be read by others (mode 0644)",
        ),
        (["unlock", tmp_path / "locked", "-k", tmp_path / "absent"], "cannot be read"),
        (["unlock", tmp_path / "flipped", "-k", key], "its data were changed"),
        (
            ["rekey", tmp_path / "flipped", "-k", key, "--to", tmp_path / "other"],
            "its data were changed",
        ),
        (["unlock", tmp_path / "short", "-k", key], "truncated"),
        (["unlock", tmp_path / "heads", "-k", key], "other spaces than its config declares"),
        (
            ["unlock", tmp_path / "heads", "-k", key, "--retrained"],
            "other spaces than its config declares",
        ),
        (["rekey", tmp_path / "locked", "-k", key, "--to", key], "already"),
        (["lock", llama, "-k", key, "--spaces", "ffn,vo"], "the lock would have no effect"),
        (["lock", llama, "-k", llama / "inside"], "would be published with it"),
        (["move", tmp_path / "locked", "--random"], "would no longer fit"),
    ):
        result = run(*arguments, "-o", out)
        assert result.code == 1, arguments
        assert why in result.err, (arguments, result.err)
        assert result.out == ""
        assert list_files(tmp_path) == before
    for arguments in (
        ["lock", llama, "-k", key],
        ["lock", llama, "-o", out],
        ["lock", "--reseal", tmp_path / "locked", "-k", key, "--group", "signed"],
        ["lock", llama, "-k", key, "-o", out, "--group", "full"],
    ):
        assert run(*arguments).code == 2, arguments
    assert list_files(tmp_path) == before


def test_keys_are_not_carried_along(run: Run, tmp_path: Path, llama: Path, key: Path) -> None:
    shutil.copy(key, llama / "notes.txt")
    result = run("lock", llama, "-k", key, "-o", tmp_path / "locked")
    assert "not copied (weights in other formats, keys, elements): notes.txt" in result.err
    assert list_files(tmp_path / "locked") == ["config.json", "model.safetensors"]


def test_rekey_never_has_the_plain_model(
    run: Run, tmp_path: Path, llama: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regauge.checkpoints import writer

    assert run("keygen", "-o", tmp_path / "new").code == 0
    assert run("lock", llama, "-k", key, "-o", tmp_path / "locked", "--group", "signed").code == 0
    plain = {
        bytes(t.contiguous().numpy().tobytes())
        for n, t in load_file(llama / "model.safetensors").items()
        if n.startswith("model.layers.") and t.dim() > 1
    }
    frames: list[bytes] = []
    write = writer._write_all

    def watch(fd: int, view: memoryview, digest: Any = None) -> None:
        frames.append(bytes(view))
        write(fd, view, digest)

    monkeypatch.setattr(writer, "_write_all", watch)
    assert (
        run(
            "rekey",
            tmp_path / "locked",
            "-k",
            key,
            "--to",
            tmp_path / "new",
            "-o",
            tmp_path / "again",
        ).code
        == 0
    )
    assert len(frames) > 10
    assert not plain & set(frames)
    assert run("unlock", tmp_path / "again", "-k", key, "-o", tmp_path / "no").code == 1
    assert (
        run("unlock", tmp_path / "again", "-k", tmp_path / "new", "-o", tmp_path / "back").code == 0
    )
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        llama / "model.safetensors"
    ).read_bytes()


def test_trained_while_locked(run: Run, tmp_path: Path, llama: Path, key: Path) -> None:
    import transformers

    assert run("lock", llama, "-k", key, "-o", tmp_path / "locked").code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "locked")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    model.save_pretrained(tmp_path / "trained")
    assert (
        "its data were changed"
        in run("unlock", tmp_path / "trained", "-k", key, "-o", tmp_path / "no").err
    )
    assert (
        run("unlock", tmp_path / "trained", "-k", key, "-o", tmp_path / "back", "--retrained").code
        == 0
    )
    old, new = (
        load_file(llama / "model.safetensors"),
        load_file(tmp_path / "back" / "model.safetensors"),
    )
    assert all(torch.equal(new[n], 1.5 * old[n]) for n in new)
    assert run("keygen", "-o", tmp_path / "other").code == 0
    result = run("lock", "--reseal", tmp_path / "trained", "-k", tmp_path / "other", "--dry-run")
    assert result.code == 1, "a dry run checks what a run does"
    assert "the model was locked by the key" in result.err
    result = run("lock", "--reseal", llama, "-k", key, "--dry-run")
    assert f"{llama} is not locked" in result.err
    before = contents(tmp_path / "trained")
    result = run("lock", "--reseal", tmp_path / "trained", "-k", key, "--dry-run", "--json")
    assert json.loads(result.out)["dry_run"] is True
    assert contents(tmp_path / "trained") == before
    result = run("lock", "--reseal", tmp_path / "trained", "-k", key)
    assert result.code == 0
    assert "renewed the commitment" in result.err
    assert run("unlock", tmp_path / "trained", "-k", key, "-o", tmp_path / "again").code == 0
    assert (
        contents(tmp_path / "again")["model.safetensors"]
        == contents(tmp_path / "back")["model.safetensors"]
    )


def test_bare_files_shards_and_folders_without_config(run: Run, tmp_path: Path, key: Path) -> None:
    folder = make_checkpoint(tmp_path / "gpt2", GPT2, 0)
    shutil.copy(folder / "model.safetensors", tmp_path / "one.safetensors")
    shutil.copy(folder / "config.json", tmp_path / "one.config.json")
    assert (
        run(
            "lock", tmp_path / "one.safetensors", "-k", key, "-o", tmp_path / "locked.safetensors"
        ).code
        == 0
    )
    opened = open_checkpoint(tmp_path / "locked.safetensors")
    assert "regauge_lock" not in (opened.config or {})
    assert record_of(opened) is not None
    assert (
        run(
            "unlock",
            tmp_path / "locked.safetensors",
            "-k",
            key,
            "-o",
            tmp_path / "back.safetensors",
        ).code
        == 0
    )
    assert (tmp_path / "back.safetensors").read_bytes() == (
        tmp_path / "one.safetensors"
    ).read_bytes()
    result = run("lock", "--reseal", tmp_path / "locked.safetensors", "-k", key)
    assert result.code == 1
    assert "pass -o OUT" in result.err
    assert (
        run(
            "lock",
            "--reseal",
            tmp_path / "locked.safetensors",
            "-k",
            key,
            "-o",
            tmp_path / "resealed",
        ).code
        == 0
    )
    assert record_of(open_checkpoint(tmp_path / "resealed")) == record_of(opened)
    shards = shard(folder, tmp_path / "shards")
    assert run("lock", shards, "-k", key, "-o", tmp_path / "locked").code == 0
    assert run("unlock", tmp_path / "locked", "-k", key, "-o", tmp_path / "unlocked").code == 0
    assert {
        n: d for n, d in contents(tmp_path / "unlocked").items() if n.endswith(".safetensors")
    } == {n: d for n, d in contents(shards).items() if n.endswith(".safetensors")}
    record = json.loads((tmp_path / "locked" / "config.json").read_text())["regauge_lock"]
    state = load_file(tmp_path / "locked.safetensors")
    other = record | {"key": "0" * 16}
    save_file(state, tmp_path / "two.safetensors", {"regauge_lock": json.dumps(other)})
    (tmp_path / "two.config.json").write_text(json.dumps(GPT2 | {"regauge_lock": record}))
    assert (
        "two lock records that differ"
        in run("unlock", tmp_path / "two.safetensors", "-k", key, "-o", tmp_path / "no").err
    )


def test_a_spec_file_instead_of_a_config(run: Run, tmp_path: Path, llama: Path, key: Path) -> None:
    from regauge.checkpoints.spec_files import dump_spec
    from regauge.models.sources import resolve

    (tmp_path / "spec.toml").write_text(dump_spec(resolve(llama).spec))
    before = contents(llama)
    (llama / "config.json").unlink()
    assert (
        run(
            "lock", llama, "-k", key, "-o", tmp_path / "locked", "--spec", tmp_path / "spec.toml"
        ).code
        == 0
    )
    assert list_files(tmp_path / "locked") == ["model.safetensors"]
    assert (
        run(
            "unlock",
            tmp_path / "locked",
            "-k",
            key,
            "-o",
            tmp_path / "back",
            "--spec",
            tmp_path / "spec.toml",
        ).code
        == 0
    )
    assert contents(tmp_path / "back")["model.safetensors"] == before["model.safetensors"]


def test_dry_runs_write_nothing(run: Run, tmp_path: Path, llama: Path, key: Path) -> None:
    result = run("lock", llama, "-k", key, "-o", tmp_path / "out", "--dry-run", "--json")
    assert result.code == 0
    assert json.loads(result.out)["dry_run"] is True
    assert list_files(tmp_path) == ["key", "llama"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_and_resumed(tmp_path: Path, run: Run, llama: Path, key: Path, number: int) -> None:
    """Stopped after the first shard: nothing under the output's name; a resumed run ends as one
    that was never stopped.
    """
    shards = shard(llama, tmp_path / "shards")
    script = """
import os, sys, signal, threading
from regauge.checkpoints import writer as writing
from regauge.cli import main
close = writing._TensorWriter._close
def stop(self, file):
    close(self, file)
    os.kill(os.getpid(), int(sys.argv[1]))
    threading.Event().wait(1)
writing._TensorWriter._close = stop
sys.exit(main(sys.argv[2:]))
"""
    command = ["lock", str(shards), "-k", str(key), "-o", str(tmp_path / "out"), "--resume"]
    process = subprocess.run(
        [sys.executable, "-c", script, str(int(number)), *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode in (-signal.SIGKILL, 130)
    assert not (tmp_path / "out").exists()
    assert run(*command).code == 0
    assert run("lock", shards, "-k", key, "-o", tmp_path / "whole").code == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / ".out.partial").exists()


def test_seal_and_open(run: Run, tmp_path: Path, llama: Path, key: Path) -> None:
    assert run("keygen", "-o", tmp_path / "sealing", "--purpose", "seal").code == 0
    result = run(
        "seal", llama, "-k", tmp_path / "sealing", "-o", tmp_path / "llama.sealed", "--json"
    )
    assert result.code == 0
    assert json.loads(result.out)["bytes"] == (tmp_path / "llama.sealed").stat().st_size
    assert (
        run(
            "open", tmp_path / "llama.sealed", "-k", tmp_path / "sealing", "-o", tmp_path / "back"
        ).code
        == 0
    )
    assert contents(tmp_path / "back") == contents(llama)
    result = run("seal", llama, "-k", key, "-o", tmp_path / "x")
    assert 'must be "seal", got "lock"' in result.err
    result = run("seal", tmp_path, "-k", tmp_path / "sealing", "-o", tmp_path.parent / "x.sealed")
    assert "would be published with it" in result.err
    os.truncate(tmp_path / "llama.sealed", 500_000)
    result = run(
        "open", tmp_path / "llama.sealed", "-k", tmp_path / "sealing", "-o", tmp_path / "x"
    )
    assert result.code == 1
    assert "was changed or truncated since it was sealed" in result.err
    assert list_files(tmp_path) == ["back", "key", "llama", "llama.sealed", "sealing"]


def test_fingerprint(run: Run, tmp_path: Path, key: Path) -> None:
    """The same for what is moved, folded and locked; another for what is trained on, and for
    another model.
    """
    build("llama").float().save_pretrained(tmp_path / "plain")
    build("llama", seed=1).float().save_pretrained(tmp_path / "other")
    trained: Any = build("llama").float()
    with torch.no_grad():
        for p in trained.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    trained.save_pretrained(tmp_path / "trained")
    assert (
        run(
            "move",
            tmp_path / "plain",
            "--random",
            "--group",
            "full",
            "--fold",
            "-o",
            tmp_path / "moved",
        ).code
        == 0
    )
    for group in ("permutation", "signed", "rotation"):
        assert (
            run(
                "lock", tmp_path / "plain", "-k", key, "-o", tmp_path / group, "--group", group
            ).code
            == 0
        )

    def fingerprint(name: str) -> Fingerprint:
        one, other = json.loads(run("fingerprint", tmp_path / name, "--json").out)["digests"]
        return Fingerprint((one, other), ())

    plain = fingerprint("plain")
    for name in ("moved", "permutation", "signed", "rotation"):
        assert fingerprint(name).is_same(plain), name
    for name in ("trained", "other"):
        assert not fingerprint(name).is_same(plain), name
    result = run("fingerprint", tmp_path / "plain")
    assert result.out.startswith(f"llama  {plain.digests[0]}  {plain.digests[1]}\n")
    assert "model.layers.*.self_attn" in result.out or "qk.*" in result.out


def test_the_lock_is_never_called_encryption(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("lock", "unlock", "rekey", "keygen"):
        main([command, "--help"])
        text = capsys.readouterr().out.lower()
        assert "encrypt" not in text.replace("not encryption", "").replace(
            "seal: encrypt", ""
        ).replace("encrypt files at rest", ""), command


def test_key_repr_in_errors() -> None:
    assert str(Key(bytes(32))) == "Key(lock, 35f322c179f8fd31)"


def test_a_key_is_in_no_output_file(tmp_path: Path) -> None:
    from regauge.errors import KeyFileError
    from regauge.locking.keys import require_outside

    def key_at(path: Path) -> Key:
        return Key(bytes(32), "lock", path=path)

    (tmp_path / "link").symlink_to(tmp_path / "out")
    for place in ("out", "out/key", "out.config.json", ".out.partial/key", "link/key"):
        with pytest.raises(KeyFileError, match="would be published with it"):
            require_outside(key_at(tmp_path / place), tmp_path / "model", tmp_path / "out")
    for place in ("key", "out.key", "outer/key", "config.json"):
        require_outside(key_at(tmp_path / place), tmp_path / "model", tmp_path / "out")

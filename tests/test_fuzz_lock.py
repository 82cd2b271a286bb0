"""Mutated key files, locked files and sealed files: a typed error each time, or what was there before; nothing is written, nothing hangs.

REGAUGE_SOAK is the number of mutants of each kind; `make soak` runs 10,000.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from picos import build
from regauge.checkpoint import open_checkpoint
from regauge.errors import RegaugeError
from regauge.keys import Key, load_key, save_key
from regauge.lockfiles import plan_lock, plan_unlock
from regauge.sealing import open_sealed, seal
from regauge.sources import spec_of
from regauge.streams import seed_key

COUNT = int(os.environ.get("REGAUGE_SOAK", "150"))
KEY, SEAL = Key(seed_key(1)), Key(seed_key(1), "seal")


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A mutant that hangs is stopped: SIGALRM ends the test."""

    def stop(number: int, frame: object) -> None:
        raise AssertionError("a mutant hangs")

    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def mutants(good: bytes, seed: int, focus: int | None = None) -> Iterator[bytes]:
    """Bits flipped, bytes changed, stretches cut, doubled, swapped or filled in, words put in. Mostly before `focus`."""
    rng = random.Random(seed)
    words = [b"0", b"9", b"-1", b"1e999", b"null", b"true", b'"', b"{", b"}", b"[", b",", b"\\u0000", b"\xff", b"99999999999999999999", b"NaN", b"\n"]
    for _ in range(COUNT):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            top = max(1, len(data) if focus is None or rng.random() < 0.3 else min(focus, len(data)))
            at, n = rng.randrange(top), rng.randrange(1, 9)
            match rng.randrange(7):
                case 0:
                    data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)]) if data else b""
                case 1:
                    data[at : at + 1] = bytes([rng.randrange(256)])
                case 2:
                    del data[at : at + n]
                case 3:
                    data[at:at] = data[at : at + n]
                case 4:
                    data[at : at + rng.choice((0, 1, n))] = rng.choice(words)
                case 5:
                    del data[at:]
                case 6:
                    other = rng.randrange(top)
                    data[at : at + n], data[other : other + n] = data[other : other + n], data[at : at + n]
        yield bytes(data)


def survives(run: Callable[[], bool], data: bytes) -> bool:
    """Is it refused by a typed error? Otherwise `run` must say that nothing was lost."""
    signal.alarm(60)
    try:
        kept = run()
    except RegaugeError:
        return True
    finally:
        signal.alarm(0)
    assert kept, data[:2000]
    return False


@pytest.mark.parametrize("passphrase", [None, "word"])
def test_key_files(tmp_path: Path, passphrase: str | None) -> None:
    path = tmp_path / "key"
    save_key(KEY, path, passphrase, scrypt={"n": 16, "r": 8, "p": 1})
    refused = 0
    for data in mutants(path.read_bytes(), 1):
        path.write_bytes(data)
        refused += survives(lambda: load_key(path, "lock", passphrase) == KEY, data)
        assert [p.name for p in tmp_path.iterdir()] == ["key"]
    assert refused > 0.9 * COUNT


@pytest.mark.parametrize("where", ["folder", "config", "file"])
def test_locked_models(tmp_path: Path, where: str) -> None:
    build("gpt2").half().save_pretrained(tmp_path / "plain")
    plain = open_checkpoint(tmp_path / "plain")
    locked = tmp_path / ("locked.safetensors" if where == "file" else "locked")
    plan_lock(plain, spec_of(plain), locked, KEY, group="signed").write()
    target = {"folder": locked / "model.safetensors", "config": locked / "config.json", "file": locked}[where]
    good, right, out = target.read_bytes(), {n: plain.bits[n].tobytes() for n in plain}, tmp_path / "out"
    names = sorted(p.name for p in tmp_path.iterdir())

    def unlocked() -> bool:
        opened = open_checkpoint(locked)
        plan_unlock(opened, spec_of(opened), out, KEY).write()
        found = open_checkpoint(out)
        return {n: found.bits[n].tobytes() for n in found} == right

    refused = 0
    for data in mutants(good, 2, focus=None if where == "config" else 8 + int.from_bytes(good[:8], "little")):
        target.write_bytes(data)
        refused += survives(unlocked, data)
        shutil.rmtree(out, ignore_errors=True)
        assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert refused > (0.5 if where == "config" else 0.9) * COUNT  # much of a config is no business of the lock


def test_sealed_files(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(bytes(range(256)) * 20)
    seal(tmp_path / "in", SEAL, tmp_path / "sealed")
    good = (tmp_path / "sealed").read_bytes()

    def opened() -> bool:
        open_sealed(tmp_path / "sealed", SEAL, tmp_path / "out")
        return (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()

    for data in mutants(good, 3, focus=250):
        (tmp_path / "sealed").write_bytes(data)
        assert survives(opened, data) or data == good
        (tmp_path / "out").unlink(missing_ok=True)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "sealed"]

"""Interruptions of commands that write: kills at random moments, and rewrites of their input while
they read. The output must be complete and correct, or absent.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from regauge.checkpoints.reader import open_checkpoint
from regauge.core.rng import seed_key
from regauge.demo.move import LLAMA, make_checkpoint
from regauge.errors import TamperedModelError
from regauge.locking.api import lock
from regauge.locking.keys import Key, save_key
from regauge.locking.locked_checkpoints import plan_lock, plan_unlock
from regauge.locking.seal import seal
from regauge.models.resolve import spec_of
from soak.harness import HANG_SECONDS, Counter, Outcome

LOCK, SEAL = Key(seed_key(1), "lock"), Key(seed_key(1), "seal")
OTHER = Key(seed_key(2), "lock")
CONFIG = {**LLAMA, "hidden_size": 128, "intermediate_size": 512, "vocab_size": 4096}


def digests(path: Path) -> dict[str, str]:
    """Return the SHA-256 of a file, or of every file in a folder."""
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    return {
        p.relative_to(path).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files
    }


def _inputs(top: Path) -> dict[str, list[str]]:
    """Make the inputs. Returns the arguments of every command, without its output."""
    a, b = make_checkpoint(top / "a", CONFIG, 0), make_checkpoint(top / "b", CONFIG, 1)
    (a / "tokenizer.json").write_text("{}")
    save_key(LOCK, top / "lock.key")
    save_key(OTHER, top / "other.key")
    save_key(SEAL, top / "seal.key")
    lock(a, LOCK).save(top / "locked")
    seal(a, SEAL, top / "sealed")
    locking, sealing = ["-k", str(top / "lock.key")], ["-k", str(top / "seal.key")]
    rotation = ["--random", "--seed", "1", "--group", "orthogonal", "--fold"]
    return {
        "move": ["move", str(a), "--random", "--seed", "1"],
        "fold": ["move", str(a), *rotation],
        "lock": ["lock", str(a), *locking],
        "unlock": ["unlock", str(top / "locked"), *locking],
        "rekey": ["rekey", str(top / "locked"), *locking, "--to", str(top / "other.key")],
        "seal": ["seal", str(a), *sealing],
        "open": ["open", str(top / "sealed"), *sealing],
        "merge": ["merge", str(a), str(b), "--force"],
    }


def kills(scale: float) -> Iterator[Outcome]:
    """Kill each command (-9) at random moments. The output must be complete or absent, the inputs
    unchanged, and a second run must succeed.
    """
    rng = random.Random(1)
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        commands = _inputs(top)
        before = {p.name: digests(p) for p in top.iterdir()}
        for name, arguments in commands.items():
            count, out = Counter(f"kill -9 during {name}"), top / "out"
            command = [sys.executable, "-m", "regauge", *arguments, "-o", str(out)]
            start = time.monotonic()
            subprocess.run(command, check=True, capture_output=True)
            seconds, expected = time.monotonic() - start, digests(out)
            _remove(out)
            for _ in range(max(2, round(50 * scale))):
                process = subprocess.Popen(
                    command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                )
                time.sleep(rng.uniform(0.3, 1.05) * seconds)
                process.kill()
                process.wait()
                is_complete = not os.path.lexists(out) or _is_right(name, out, expected)
                _remove(out)
                ended = subprocess.run(
                    command, capture_output=True, text=True, timeout=10 * HANG_SECONDS
                )
                succeeds = ended.returncode == 0 and _is_right(name, out, expected)
                unchanged = all(digests(top / n) == digests for n, digests in before.items())
                passed = is_complete and succeeds and unchanged
                count.add(
                    "accepted" if passed else "lost",
                    None if passed else f"{name}: {ended.stderr[-300:]}",
                )
                _remove(out)
            yield count.outcome()


def _is_right(name: str, out: Path, expected: dict[str, str]) -> bool:
    """Return whether an output is complete. Sealed files, which have a random salt, are opened."""
    if name != "seal":
        return digests(out) == expected
    from regauge.locking.seal import open_sealed

    with tempfile.TemporaryDirectory() as temporary:
        open_sealed(out, SEAL, Path(temporary) / "opened")
        return digests(Path(temporary) / "opened") == digests(out.parent / "a")


def _remove(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True) if out.is_dir() else out.unlink(missing_ok=True)


def rewrites(scale: float) -> Iterator[Outcome]:
    """Rewrite the locked weights in place, back and forth, while `unlock` checks and reads them. It
    must write the plain weights bit for bit, or raise a typed error.
    """
    for group in ("signed", "rotation"):
        count = Counter(f"rewrite during unlock ({group})")
        with tempfile.TemporaryDirectory() as temporary:
            top = Path(temporary)
            plain = open_checkpoint(make_checkpoint(top / "plain", CONFIG, 0))
            plan_lock(plain, spec_of(plain), top / "locked", LOCK, group=group).write()
            opened = open_checkpoint(top / "locked")
            plan_unlock(opened, spec_of(opened), top / "right", LOCK).write()
            expected, weights = digests(top / "right"), top / "locked" / "model.safetensors"
            rng = random.Random(2)
            for trial in range(max(4, round(400 * scale))):
                place = rng.choice(list(opened.entries.values())).start
                count.trial(partial(_unlocks, top, weights, place, trial, expected))
        yield count.outcome()


def _unlocks(top: Path, weights: Path, at: int, trial: int, expected: dict[str, str]) -> bool:
    """Unlock while another thread flips a byte. In even trials it starts after the check."""
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            for _ in range(2):  # and back, so that the file is intact at the end
                with weights.open("r+b") as file:
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 1]))
            time.sleep(0.001)

    thread, out = threading.Thread(target=flip), top / "out"
    if trial % 2:
        thread.start()
    try:
        opened = open_checkpoint(top / "locked")
        job = plan_unlock(opened, spec_of(opened), out, LOCK)
        if not trial % 2:
            thread.start()
        job.write()
        return digests(out) == expected
    except TamperedModelError:
        if out.exists() or list(top.glob(".out*")):
            return False
        raise
    finally:
        stop.set()
        if thread.ident is not None:
            thread.join()
        _remove(out)

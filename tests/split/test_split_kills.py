"""Outputs of split learning under kill -9 at random moments: each is absent or complete, and one
that is replaced is always there.
"""

from __future__ import annotations

import json
import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from regauge.checkpoints.reader import open_checkpoint
from regauge.checkpoints.tensor_files import read_tensors
from regauge.split import Host
from regauge.split.client.journal import FolderJournal
from regauge.split.parts import join, write_part
from regauge.split.protocol.certificates import make_certificates
from regauge.split.server import checkpoint
from support.picos import build
from support.split_pairs import ADAMW, make_model
from support.split_processes import Child

KILLS = int(os.environ.get("REGAUGE_KILLS", "2"))
TLS_FILES = {
    "authority.pem",
    "server.pem",
    "server.key",
    "client.pem",
    "client.key",
    "clients.txt",
}


def _write_outputs(pipe: Connection, folder: str, model: str, start: int) -> None:
    """Write outputs of every kind, one set after another, until killed."""
    torch.set_num_threads(1)
    place, source = Path(folder), open_checkpoint(model)
    live, host = build("gpt2").float(), Host(make_model("gpt2"), ADAMW, folder=place / "server")
    journal = FolderJournal(place / "journal")
    pipe.send(("ready",))
    for n in range(start, start + 100_000):
        write_part(place / f"edges-{n}", live, source, "edges")
        write_part(place / f"backbone-{n}", live, source, "backbone")
        join(place / f"edges-{n}", place / f"backbone-{n}", place / f"whole-{n}")
        make_certificates(place / f"certs-{n}", clients=["client"])
        journal.put_request(n, [b"%d," % n * 20_000])
        host.step = n
        host.save()
        host.step = n + 1
        host.save()


def _check_outputs(folder: Path, names: set[str]) -> int:
    """Check all outputs that are there; return their number."""
    outputs = [p for p in folder.iterdir() if not p.name.startswith(".")]
    blocks = {name for name in names if ".h." in name}
    parts = {"edges": names - blocks, "backbone": blocks, "whole": names}
    for path in outputs:
        kind = path.name.partition("-")[0]
        if kind == "certs":
            assert {p.name for p in path.iterdir()} == TLS_FILES
        elif kind in parts:
            assert dict(open_checkpoint(path).items()).keys() == parts[kind]
            assert (path / "config.json").exists()
            assert (path / "split.json").exists() == (kind != "whole")
        elif kind == "journal":
            for file in path.glob("[0-9]*.request"):
                assert file.read_bytes() == b"%d," % int(file.stem) * 20_000
    return len(outputs)


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_process_leaves_no_output_half_written(tmp_path: Path, seed: int) -> None:
    model, place = tmp_path / "MODEL", tmp_path / "place"
    made = build("gpt2").float()
    made.save_pretrained(model)
    names = set(open_checkpoint(model).names)
    place.mkdir()
    child = Child(_write_outputs, str(place), str(model), 1)
    try:
        child.receive("ready")
        saved = place / "server" / checkpoint.FILE
        while not saved.exists():
            time.sleep(0.005)
        until, steps = time.monotonic() + random.Random(seed).uniform(0.0, 0.5), [0]
        while time.monotonic() < until:  # a checkpoint that is replaced is never missing
            _, metadata = read_tensors(saved, "split", checkpoint.VERSION)
            steps.append(json.loads(metadata["about"])["step"])
            assert steps[-1] >= steps[-2]
    finally:
        child.kill()
    assert _check_outputs(place, names) >= 6
    assert Host(make_model("gpt2"), ADAMW, folder=place / "server").step >= steps[-1] > 0


def test_a_writer_without_staging_is_found_out(tmp_path: Path) -> None:
    """The negative control: what an interrupted write in place leaves is not accepted."""
    model = tmp_path / "MODEL"
    build("gpt2").float().save_pretrained(model)
    names = set(open_checkpoint(model).names)
    place = tmp_path / "place"
    place.mkdir()
    live, source = build("gpt2").float(), open_checkpoint(model)
    write_part(place / "backbone-1", live, source, "backbone")
    assert _check_outputs(place, names) == 1
    (place / "backbone-1" / "split.json").unlink()
    with pytest.raises(AssertionError):
        _check_outputs(place, names)

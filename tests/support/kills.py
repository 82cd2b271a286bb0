"""Kills at every moment of a computation that writes: before each of its operations on files.

`python -m support.kills FOLDER [STEP] [--broken]`, in `tests`, kills runs of federated learning at
every moment, or every STEP-th, and prints their numbers. With --broken the old model is deleted
before the new one is in place, which must be noticed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from regauge.checkpoints import files

WRITES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.chmod")


def run_killed(action: Callable[[], Any], moment: int) -> bool:
    """Run an action in a forked process that is killed before its operation number `moment`.

    Returns:
        Whether it was killed; False if it has fewer operations.

    Raises:
        RuntimeError: The action failed.
    """
    pid = os.fork()
    if pid == 0:
        try:
            count = 0

            def on_event(event: str, args: tuple[Any, ...]) -> None:
                nonlocal count
                is_write = event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)
                is_exchange = event == "ctypes.dlsym" and args[1] == "renameat2"
                if is_write or is_exchange or event in WRITES:
                    if count == moment:
                        os.kill(os.getpid(), signal.SIGKILL)
                    count += 1

            sys.addaudithook(on_event)
            action()
        except BaseException as error:  # of the child: it must not return into the caller
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if status and not os.WIFSIGNALED(status):
        raise RuntimeError(f"the action failed before its operation {moment}")
    return bool(status)


@contextlib.contextmanager
def delete_first(out: Path, mode: int = 0o777, *, replace: bool = False) -> Iterator[Path]:
    """Replace a folder as `staged_folder` must not."""
    shutil.rmtree(out, ignore_errors=True)
    with files.staged_folder(out, mode) as folder:
        yield folder


def main(top: Path, step: int, broken: bool) -> None:
    """Kill new runs, and extensions of a finished one. Each must resume with an equal outcome."""
    import torch

    import regauge
    import support.federations as fed
    from regauge.federated import FederatedRun, Settings, outputs, run, state_store

    if broken:
        outputs.staged_folder = delete_first
    regauge.set_threads(1)
    torch.set_num_threads(1)
    settings = Settings(
        clients=3, rounds=1, steps=1, strategy="fedadam", defences=("withhold=head",)
    )
    model, examples = fed.vit(), fed.bars()

    def train(folder: Path, rounds: int) -> FederatedRun:
        return run(model, examples, settings=settings, rounds=rounds, folder=folder)

    train(top / "whole", 1)
    shutil.copytree(top / "whole", top / "first")
    whole = train(top / "whole", 2)
    weights = "model/model.safetensors"
    complete = {(top / name / weights).read_bytes() for name in ("first", "whole")}
    for name, start in (("new", None), ("extended", top / "first")):
        moment, killed, places = 0, True, set()
        while killed:
            folder = top / f"{name}-{moment}"
            if start is not None:
                shutil.copytree(start, folder)
            killed = run_killed(partial(train, folder, 2), moment)
            if start is not None or (folder / "model").exists():
                assert (folder / weights).read_bytes() in complete, moment
            saved = state_store.load(folder)
            places.add(0 if saved is None else len(saved.history))
            again = train(folder, 2)
            assert [r.number for r in again.history] == [0, 1], moment
            for key, tensor in whole.run_state.state.items():
                assert torch.equal(again.run_state.state[key], tensor), (moment, key)
            assert (folder / weights).read_bytes() == (top / "whole" / weights).read_bytes()
            assert not list(folder.rglob(".*.partial-*")), moment
            shutil.rmtree(folder)
            moment += step
        sys.stdout.write(f"{name}: {moment // step - 1} kills, after {sorted(places)} rounds\n")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[2:] if word.isdecimal()]
    main(Path(sys.argv[1]), *(numbers or [1]), "--broken" in sys.argv)

"""Python programs in processes of their own, for what signals and fresh interpreters do.

They are forked from a server that has imported what is heavy (`support.preloaded`, nothing of
regauge), so that a start takes a tenth of a second instead of three seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["support.preloaded"])
TESTS = Path(__file__).parents[1]


def start(target: Callable[..., None], *arguments: Any, daemon: bool = False) -> Any:
    """Start a function of a module in a forked process."""
    process = context().Process(target=target, args=arguments, daemon=daemon)
    process.start()
    return process


def context() -> Any:
    """Return the context of `multiprocessing` whose processes are forked from the server."""
    # It must find `support` when it starts: a module that it does not find is not preloaded.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), before]))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return CONTEXT


class Program:
    """A running `python -c CODE ARGUMENTS`, with its output in a pipe."""

    def __init__(
        self,
        code: str,
        *arguments: object,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        out, out_there = CONTEXT.Pipe(duplex=False)
        err, err_there = CONTEXT.Pipe(duplex=False)
        given = (code, [str(a) for a in arguments], str(cwd or Path.cwd()), dict(env or {}))
        self.process = start(_run, out_there, err_there, *given)
        for end in (out_there, err_there):
            end.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(end.fileno())) for end in (out, err))
        for end in (out, err):
            end.close()

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        code: int | None = self.process.exitcode
        return code

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            TimeoutError: It still runs.
        """
        self.process.join(seconds)
        code = self.poll()
        if code is None:
            raise TimeoutError(f"the program still runs after {seconds} s")
        return code

    def kill(self) -> None:
        """Kill it if it still runs, and close the pipes."""
        self.process.kill()
        self.process.join()
        self.stdout.close()
        self.stderr.close()


def run(code: str, *arguments: object, **more: Any) -> tuple[int, str, str]:
    """Run a program to its end; return exit code, output and what it wrote to stderr, both short
    enough for a pipe.
    """
    program = Program(code, *arguments, **more)
    with program.stdout, program.stderr:
        out = program.stdout.read()
        err = program.stderr.read()
    return program.wait(), out, err


def _run(
    out: Connection,
    err: Connection,
    code: str,
    arguments: list[str],
    cwd: str,
    env: dict[str, str],
) -> None:
    for number, end in ((1, out), (2, err)):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    sys.argv = ["-c", *arguments]
    os.chdir(cwd)
    os.environ.update(env)
    status: Any = 0
    try:
        exec(compile(code, "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status if isinstance(status, int) else 1)

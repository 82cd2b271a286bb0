"""The commands put together, and how a run of one ends: errors as lines on stderr, and an exit code."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import typer

from regauge.cli import (
    INTERRUPTED,
    audit,
    barrier,
    convert,
    demo,
    fingerprint,
    inspect,
    keygen,
    lock,
    match,
    merge,
    move,
    report,
    reproduce,
    seal,
    verify,
)
from regauge.cli.console import StoppedError, fail, say, silence
from regauge.errors import RegaugeError

app = typer.Typer(
    name="regauge",
    help="A Transformer's weights are one of many equal descriptions of the same function. regauge chooses which one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_COMMANDS = (
    inspect.inspect,
    verify.verify,
    move.move,
    match.match,
    match.compare,
    merge.merge,
    barrier.barrier,
    fingerprint.fingerprint,
    keygen.keygen,
    lock.lock,
    lock.unlock,
    lock.rekey,
    seal.seal,
    seal.open_,
    convert.convert,
    reproduce.reproduce,
    report.report,
    demo.demo,
)
for _command in _COMMANDS:
    app.command(_command.__name__.rstrip("_"))(_command)
app.add_typer(audit.app)


def _version(asked: bool) -> None:
    if asked:
        from regauge import __version__

        typer.echo(f"regauge {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version.")) -> None:
    pass


def run(arguments: list[str]) -> int:
    """Run one command; the exit code. What went to stdout has arrived, or the code is not 0."""
    _stop_on_sigterm()
    _mend_streams()
    code = _run(arguments)
    return code if _is_flushed() else code or 1


def _run(arguments: list[str]) -> int:
    try:
        code = int(app(args=arguments, prog_name="regauge", standalone_mode=False) or 0)
        return _interrupted() if code == INTERRUPTED else code  # typer makes this code of an interrupt
    except RegaugeError as error:
        if _debugging(arguments):
            say(traceback.format_exc())
        fail(error)
        return INTERRUPTED if isinstance(error, StoppedError) else 1
    except typer.Exit as stop:
        return _interrupted() if stop.exit_code == INTERRUPTED else int(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None:  # what regauge opens has a name: this is a stream
            _lose_stdout(error)
            return 1
        return _unexpected(error, arguments)


def _interrupted() -> int:
    say("error: interrupted")
    return INTERRUPTED


def _mend_streams() -> None:
    """Make the standard streams safe to use, whatever state they were handed over in."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # where one is closed, the next file to be opened would take its place
        pass
    os.close(fd)
    if getattr(sys, "stderr", None) is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (it stays open)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no error


def _is_flushed() -> bool:
    """Has stdout taken all that was written to it?"""
    try:
        if getattr(sys, "stdout", None) is not None:
            sys.stdout.flush()
    except OSError as error:
        _lose_stdout(error)
        return False
    return True


def _lose_stdout(error: OSError) -> None:
    if error.errno != errno.EPIPE:  # whoever stops reading knows it
        say(f"error: stdout cannot be written: {error.strerror}")
    silence(sys.stdout)


def _unexpected(error: Any, arguments: list[str]) -> int:
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's and click's usage errors
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "regauge"
        if error.format_message():  # without one the help has been shown
            say(f"error: {error.format_message()}")
            say(f"hint: {command} --help")
        return 2
    if _debugging(arguments):
        say(traceback.format_exc())
    say(f"error: {type(error).__name__}: {error}\nhint: this is a fault in regauge; run again with REGAUGE_DEBUG=1 for the place, and report it")
    return 1


def _debugging(arguments: list[str]) -> bool:
    return bool(os.environ.get("REGAUGE_DEBUG")) or arguments.count("-v") >= 2 or "-vv" in arguments


def _stop_on_sigterm() -> None:
    """Ask to be interrupted rather than killed, so that a partial output is cleaned up."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        return

"""The command line: `regauge inspect | move | convert | report | demo`.

Exit codes: 0 done, 1 error, 2 usage. Commands import what they need when they run: `regauge --help` loads neither numpy nor torch.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer

from regauge.cli import convert, demo, inspect, move, report
from regauge.cli.console import fail, say
from regauge.errors import RegaugeError

_SIGINT = 130  # what typer makes of an interrupt

app = typer.Typer(
    name="regauge",
    help="A Transformer's weights are one of many equal descriptions of the same function. regauge chooses which one.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (inspect.inspect, move.move, convert.convert, report.report, demo.demo):
    app.command()(_command)


def _version(asked: bool) -> None:
    if asked:
        from regauge import __version__

        typer.echo(f"regauge {__version__}")
        raise typer.Exit


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version.")) -> None:
    pass


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _stop_on_sigterm()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no error
    try:
        code = int(app(args=arguments, prog_name="regauge", standalone_mode=False) or 0)
        return _interrupted() if code == _SIGINT else code
    except RegaugeError as error:
        if _debugging(arguments):
            traceback.print_exc()
        fail(error)
        return 1
    except typer.Exit as stop:
        return _interrupted() if stop.exit_code == _SIGINT else int(stop.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _unexpected(error, arguments)


def _interrupted() -> int:
    say("error: interrupted; the output was not written")
    return 1


def _unexpected(error: Any, arguments: list[str]) -> int:
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # typer's and click's usage errors
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "regauge"
        if error.format_message():  # without one the help has been shown
            say(f"error: {error.format_message()}")
            say(f"hint: {command} --help")
        return 2
    if _debugging(arguments):
        traceback.print_exc()
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

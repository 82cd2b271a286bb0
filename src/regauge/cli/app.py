"""The commands put together, and how a run of one ends: errors as lines on stderr, and an exit
code.
"""

from __future__ import annotations

import errno
import glob
import io
import itertools
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from regauge.cli import INTERRUPTED
from regauge.cli.console import StoppedError, discard_stream, info, print_error, print_result
from regauge.cli.menu import OVERVIEW, epilog_of, panel_of
from regauge.errors import RegaugeError, RegaugeWarning

_COMMANDS = {  # the name, and where its function is: what is not asked for is not imported
    "demo": "demo:demo",
    "doctor": "doctor:doctor",
    "inspect": "inspect:inspect",
    "verify": "verify:verify",
    "move": "move:move",
    "match": "match:match",
    "compare": "match:compare",
    "merge": "merge:merge",
    "barrier": "barrier:barrier",
    "federate": "federate:federate",
    "fingerprint": "fingerprint:fingerprint",
    "keygen": "keygen:keygen",
    "lock": "lock:lock",
    "unlock": "lock:unlock",
    "rekey": "lock:rekey",
    "seal": "seal:seal",
    "open": "seal:open_",
    "convert": "convert:convert",
    "report": "report:report",
}
_GROUPS = {"audit": "audit_lock:app", "jigsaw": "jigsaw:app", "split": "split:app"}


def _hide_flag_metavars(found: list[Any]) -> list[Any]:
    """A switch takes no value, and its help shows none (typer 0.29 writes <bool> there, and <int>
    for -v).
    """
    for one in found:
        if getattr(one, "is_flag", False) or getattr(one, "count", False):
            one.metavar = ""
    return found


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_flag_metavars(super().get_params(ctx))


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _hide_flag_metavars(super().get_params(ctx))


def build_app(arguments: list[str]) -> typer.Typer:
    """The command that is called for, or all of them: building one takes typer a few hundredths of
    a second.
    """
    app = typer.Typer(
        name="regauge",
        cls=_Group,
        help="A Transformer's weights are one of many equal descriptions of the same function. "
        "regauge chooses which one.",
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    first = arguments[0] if arguments else ""
    known = first in _COMMANDS or first in _GROUPS
    app.callback()(_root)
    for name, place in _COMMANDS.items():
        if not known or name == first:
            app.command(name)(_load_command(place))
            _set_help(app.registered_commands[-1], name)
    for name, place in _GROUPS.items():
        if not known or name == first:
            group = _load_command(place)
            app.add_typer(group, cls=_Group, rich_help_panel=panel_of(name))
            for command in group.registered_commands:
                _set_help(command, f"{name} {command.name or command.callback.__name__}")
    return app


def _set_help(command: Any, name: str) -> None:
    """What the help of every command has: its place in the list, one line there, and an example at
    the end.
    """
    command.cls, command.rich_help_panel, command.epilog = _Command, panel_of(name), epilog_of(name)
    command.short_help = " ".join((command.callback.__doc__ or "").split())


def _load_command(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"regauge.cli.{module}"), name)


def _print_version(asked: bool) -> None:
    if asked:
        from regauge import __version__

        typer.echo(f"regauge {__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    if context.invoked_subcommand is None:
        print_result(OVERVIEW)


def run(
    arguments: list[str],
    build: Callable[[list[str]], typer.Typer] = build_app,
    name: str = "regauge",
) -> int:
    """Run one command of an app and return the exit code, which is 0 only if stdout was written
    completely.
    """
    _stop_on_sigterm()
    _repair_streams()
    with warnings.catch_warnings():
        warnings.simplefilter("always", RegaugeWarning)
        warnings.showwarning = _print_notes(warnings.showwarning)
        code = _run(arguments, build, name)
    return code if _flush_stdout() else code or 1


def _run(arguments: list[str], build: Callable[[list[str]], typer.Typer], name: str) -> int:
    try:
        code = int(build(arguments)(args=arguments, prog_name=name, standalone_mode=False) or 0)
        return (
            _report_interrupt(arguments) if code == INTERRUPTED else code
        )  # typer makes this code of an interrupt
    except RegaugeError as error:
        if _is_debugging(arguments):
            info(traceback.format_exc())
        print_error(error)
        return INTERRUPTED if isinstance(error, StoppedError) else 1
    except typer.Exit as stop:
        return (
            _report_interrupt(arguments) if stop.exit_code == INTERRUPTED else int(stop.exit_code)
        )
    except (KeyboardInterrupt, typer.Abort):
        return _report_interrupt(arguments)
    except Exception as error:
        if (
            isinstance(error, OSError) and error.filename is None
        ):  # what regauge opens has a name: this is a stream
            _abandon_stdout(error)
            return 1
        return _report_unexpected(error, arguments)


def _print_notes(others: Callable[..., None]) -> Callable[..., None]:
    """Return a `warnings.showwarning` that prints regauge's own warnings as notes."""

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, RegaugeWarning):
            info(f"note: {message}")
        else:
            others(message, category, *place, **more)

    return show


def _report_interrupt(arguments: list[str]) -> int:
    info("error: interrupted")
    outs = [Path(b) for a, b in itertools.pairwise(arguments) if a in ("-o", "--output")]
    kept = sorted(
        str(p)
        for out in outs
        if out.parent.is_dir()
        for p in out.parent.glob(f".{glob.escape(out.name)}.*")
    )
    if kept:
        info(
            "hint: kept to go on with, by the same command (with --resume where it has that): "
            f"{', '.join(kept)}"
        )
    return INTERRUPTED


def _repair_streams() -> None:
    """Make the standard streams safe to use, whatever state they were handed over in."""
    while (
        fd := os.open(os.devnull, os.O_RDWR)
    ) <= 2:  # where one is closed, the next file to be opened would take its place
        pass
    os.close(fd)
    if getattr(sys, "stderr", None) is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (it stays open)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a name that the terminal cannot show is no error


def _flush_stdout() -> bool:
    """Has stdout taken all that was written to it?"""
    try:
        if getattr(sys, "stdout", None) is not None:
            sys.stdout.flush()
    except OSError as error:
        _abandon_stdout(error)
        return False
    return True


def _abandon_stdout(error: OSError) -> None:
    if error.errno != errno.EPIPE:  # whoever stops reading knows it
        info(f"error: stdout cannot be written: {error.strerror}")
    discard_stream(sys.stdout)


def _report_unexpected(error: Any, arguments: list[str]) -> int:
    if hasattr(error, "format_message") and hasattr(
        error, "exit_code"
    ):  # typer's and click's usage errors
        command = getattr(getattr(error, "ctx", None), "command_path", None) or "regauge"
        if error.format_message():  # without one the help has been shown
            info(f"error: {error.format_message()}")
            info(f"hint: {command} --help")
        return 2
    if _is_debugging(arguments):
        info(traceback.format_exc())
    info(
        f"error: {type(error).__name__}: {error}\nhint: this is a fault in regauge; run again "
        "with REGAUGE_DEBUG=1 for the place, and report it"
    )
    return 1


def _is_debugging(arguments: list[str]) -> bool:
    return bool(os.environ.get("REGAUGE_DEBUG")) or arguments.count("-v") >= 2 or "-vv" in arguments


def _stop_on_sigterm() -> None:
    """Ask to be interrupted rather than killed, so that a partial output is cleaned up."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        return

"""The app of all commands, and the end of a run: errors as lines on stderr, and an exit code."""

from __future__ import annotations

import errno
import glob
import io
import itertools
import os
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from regauge.cli import INTERRUPTED
from regauge.cli.console import discard_stream, info, print_error, print_result, warn
from regauge.cli.menu import NEXT, OVERVIEW, PANELS, examples_of
from regauge.errors import QualityWarning, RegaugeError, RegaugeWarning, StoppedError

_COMMANDS = {  # name: "module:function", imported on demand
    "demo": "demo:demo",
    "doctor": "doctor:doctor",
    "inspect": "inspect:inspect",
    "verify": "verify:verify",
    "move": "move:move",
    "match": "match:match",
    "compare": "match:compare",
    "merge": "merge:merge",
    "extract-lora": "extract_lora:extract_lora",
    "barrier": "barrier:barrier",
    "evaluate": "evaluate:evaluate",
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
    "audit lock": "audit_lock:lock",
    "audit split": "audit_split:split",
    "audit gradients": "audit_gradients:gradients",
    "jigsaw train": "jigsaw:train",
    "jigsaw evaluate": "jigsaw:evaluate",
    "jigsaw study": "jigsaw:study",
    "split certs": "split:certs",
    "split serve": "split_server:serve",
    "split train": "split_client:train",
    "split predict": "split_client:predict",
    "split join": "split:join",
}
_GROUPS = {
    "audit": "Attack what regauge protects, on your own case, and report what the protection is "
    "worth.",
    "jigsaw": "Masked Jigsaw Puzzles: make an image model less sensitive to the positions of its "
    "patches, and measure it.",
    "split": "Train and use a model whose backbone is on a server. Data, labels, embedding and "
    "head stay here.",
}
_HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}


class _Command(TyperCommand):
    """A command with the help of `help.format_command`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from regauge.cli.help import format_command, help_width, terminal_style

        name = ctx.command_path.partition(" ")[2]
        style = terminal_style()
        ctx.color = style.is_colored
        formatter.write(format_command(self, ctx, examples_of(name), help_width(), style))


class _Group(TyperGroup):
    """A group of commands with the help of `help.format_commands`."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from regauge.cli.help import format_commands, help_width, terminal_style

        style = terminal_style()
        ctx.color = style.is_colored
        prefix = ctx.command_path.partition(" ")[2]
        after = f"`{ctx.command_path} COMMAND --help` shows the options of a command, and examples."
        formatter.write(
            format_commands(self, ctx, _sections(self, prefix), help_width(), style, after)
        )


def _sections(group: Any, prefix: str) -> dict[str, dict[str, str]]:
    """Return the summaries of a group's commands, by section and name."""
    from regauge.cli.help import summary_of

    leaves = {name: summary_of(command.help) for name, command in leaves_of(group, prefix)}
    listed = {
        title: {name: leaves[name] for name in names if name in leaves}
        for title, names in PANELS.items()
    }
    if prefix:
        names = [name for members in listed.values() for name in members]
        return {"Commands": {name.removeprefix(f"{prefix} "): leaves[name] for name in names}}
    return {title: members for title, members in listed.items() if members}


def leaves_of(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group by their full names, those of nested groups too."""
    for name, below in group.commands.items():
        full = f"{prefix} {name}".strip()
        if hasattr(below, "commands"):
            yield from leaves_of(below, full)
        else:
            yield full, below


def build_app(arguments: list[str]) -> typer.Typer:
    """Build the app with the command that the arguments name, or with all commands.

    Building one instead of all saves a few hundredths of a second.

    Args:
        arguments: the command line, without the program's name.
    """
    app = typer.Typer(
        name="regauge",
        cls=_Group,
        help="Rewrite a Transformer's weights in another basis without changing what it computes.",
        invoke_without_command=True,
        pretty_exceptions_enable=False,
        context_settings=_HELP_OPTIONS,
    )
    app.callback()(_root)
    apps = {"": app}
    for name in [n for n in _COMMANDS if n.split()[0] in arguments[:1]] or _COMMANDS:
        group, _, command = name.rpartition(" ")
        if group not in apps:
            apps[group] = typer.Typer(
                help=_GROUPS[group], no_args_is_help=True, context_settings=_HELP_OPTIONS
            )
            app.add_typer(apps[group], name=group, cls=_Group)
        apps[group].command(command, cls=_Command)(_load_command(_COMMANDS[name]))
    return app


def _load_command(target: str) -> Any:
    """Import a command by its `module:function`."""
    module, _, name = target.partition(":")
    return getattr(import_module(f"regauge.cli.{module}"), name)


def _print_version(requested: bool) -> None:
    if requested:
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
        # typer turns an interrupt into this code
        if code == INTERRUPTED:
            return _report_interrupt(arguments)
        if code == 0 and name == "regauge":
            _suggest_next(arguments)
        return code
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
        # regauge opens files by name, so an OSError without a name is of a stream
        if isinstance(error, OSError) and error.filename is None:
            _abandon_stdout(error)
            return 1
        return _report_unexpected(error, arguments)


def _print_notes(fallback: Callable[..., None]) -> Callable[..., None]:
    """Return a `warnings.showwarning` that prints regauge's own warnings as notes."""

    def show(
        message: Warning | str, category: type[Warning], *location: Any, **options: Any
    ) -> None:
        if issubclass(category, QualityWarning):
            warn(str(message))
        elif issubclass(category, RegaugeWarning):
            info(f"note: {message}")
        else:
            fallback(message, category, *location, **options)

    return show


def _report_interrupt(arguments: list[str]) -> int:
    """Print what an interrupted command has left to resume from, and return the exit code."""
    info("error: interrupted")
    outs = [Path(b) for a, b in itertools.pairwise(arguments) if a in ("-o", "--output")]
    saved = sorted(
        str(p)
        for out in outs
        if out.parent.is_dir()
        for p in out.parent.glob(f".{glob.escape(out.name)}.*")
    )
    if saved:
        flag = " with --resume" if _needs_resume(arguments) else ""
        info(f"hint: to continue, repeat the command{flag}; saved: {', '.join(saved)}")
    return INTERRUPTED


def _needs_resume(arguments: list[str]) -> bool:
    """Return whether a command resumes only with the option --resume."""
    commands = dict(leaves_of(typer.main.get_command(build_app(arguments))))
    name = _command_name(arguments)
    parameters = commands[name].params if name in commands else ()
    return any("--resume" in p.opts and not p.default for p in parameters)


def _command_name(arguments: list[str]) -> str:
    """Return the name of the command that the arguments run."""
    names = (" ".join(arguments[:2]), *arguments[:1])
    return next((name for name in names if name in _COMMANDS), "")


def _suggest_next(arguments: list[str]) -> None:
    """Print what to do with the output of a command, if it has one."""
    name = _command_name(arguments)
    outs = [b for a, b in itertools.pairwise(arguments) if a in ("-o", "--output")]
    if name in NEXT and outs and not {"--dry-run", "--help", "-h"} & set(arguments):
        purposes = (f"{name} --purpose {word}" for word in arguments)
        text = NEXT[next((full for full in purposes if full in NEXT), name)]
        info(f"next: {text.format(out=shlex.quote(outs[-1]))}")


def _repair_streams() -> None:
    """Make the standard streams safe to use, whatever state they were handed over in."""
    # If a stream is closed, the next file that is opened would take its descriptor.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    if getattr(sys, "stderr", None) is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (it stays open)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # names that the terminal cannot encode are escaped
            stream.reconfigure(errors="backslashreplace")


def _flush_stdout() -> bool:
    """Flush stdout and return whether it took everything that was written to it."""
    try:
        if getattr(sys, "stdout", None) is not None:
            sys.stdout.flush()
    except OSError as error:
        _abandon_stdout(error)
        return False
    return True


def _abandon_stdout(error: OSError) -> None:
    """Report a stdout that cannot be written, and discard the rest."""
    if error.errno != errno.EPIPE:  # a reader that closes the pipe needs no message
        info(f"error: stdout cannot be written: {error.strerror}")
    discard_stream(sys.stdout)


def _report_unexpected(error: Exception, arguments: list[str]) -> int:
    """Print a usage error or an unexpected exception, and return the exit code."""
    from regauge.cli.usage_errors import is_usage_error, report_usage

    if is_usage_error(error):
        return report_usage(error, arguments)
    if _is_debugging(arguments):
        info(traceback.format_exc())
    info(
        f"error: {type(error).__name__}: {error}\nhint: this is a bug in regauge; run again "
        "with REGAUGE_DEBUG=1 for a traceback, and report it"
    )
    return 1


def _is_debugging(arguments: list[str]) -> bool:
    return bool(os.environ.get("REGAUGE_DEBUG")) or arguments.count("-v") >= 2 or "-vv" in arguments


def _stop_on_sigterm() -> None:
    """Turn SIGTERM into an interrupt, so that a partial output is cleaned up."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        return

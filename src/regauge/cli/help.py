"""The layout of `--help`: summaries on one line, options in groups, and text that never has less
than 40 columns beside the names in a terminal of 80.

typer's own layout, a table of five columns, leaves 20 columns for the text.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from regauge.cli.options import ADVANCED, DATA, GENERAL

OPTIONS = "Options"
_LAST = (DATA, GENERAL, ADVANCED)  # groups that follow all others
WIDEST = 100  # columns; longer lines are hard to read
NAMES = 28  # columns for names at most; a longer name has a line of its own
NARROW = 70  # columns below which texts stand below the names

Rows = list[tuple[str, str]]


class Style:
    """Colours of a terminal, or none.

    Args:
        is_colored: Whether to write escape sequences.
    """

    def __init__(self, is_colored: bool) -> None:
        self.is_colored = is_colored

    def heading(self, text: str) -> str:
        """Return a heading."""
        return f"\x1b[1;33m{text}\x1b[0m" if self.is_colored else text

    def name(self, text: str) -> str:
        """Return the name of a command or an option."""
        return f"\x1b[36m{text}\x1b[0m" if self.is_colored else text


def terminal_style() -> Style:
    """Return the style of stdout: colours on a terminal, unless NO_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        return Style(False)
    if os.environ.get("FORCE_COLOR"):
        return Style(True)
    is_terminal = getattr(sys, "stdout", None) is not None and sys.stdout.isatty()
    return Style(is_terminal and os.environ.get("TERM") != "dumb")


def help_width() -> int:
    """Return the number of columns of a help."""
    return max(40, min(shutil.get_terminal_size((80, 24)).columns, WIDEST))


def format_sections(sections: Mapping[str, Rows], width: int, style: Style) -> Iterator[str]:
    """Yield the lines of sections: names with their texts in two columns, the same in all sections.

    On a narrow terminal, the texts stand below the names.
    """
    lengths = [len(name) for rows in sections.values() for name, _ in rows if len(name) <= NAMES]
    column = 8 if width < NARROW else 4 + max(lengths, default=NAMES)
    for title, rows in sections.items():
        yield from ("", style.heading(f"{title}:"))
        for name, text in rows:
            lines = _wrap(text, width - column)
            if lines and width >= NARROW and len(name) <= NAMES:
                padding = " " * (column - 2 - len(name))
                yield f"  {style.name(name)}{padding}{lines.pop(0)}"
            else:
                yield f"  {style.name(name)}"
            yield from (" " * column + line for line in lines)


def format_text(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a docstring, its paragraphs filled anew."""
    for i, paragraph in enumerate(inspect.cleandoc(text).split("\n\n")):
        yield from [""] * (i > 0)
        yield from _wrap(" ".join(paragraph.split()), width)


def summary_of(text: str) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


def choices_of(parameter: Any) -> list[str]:
    """Return the values of an option that takes one of several."""
    # the second of typer before 0.25
    kind = getattr(parameter, "type_descriptor", None) or getattr(parameter, "type", None)
    choices = getattr(kind, "choices", None) or ()
    return [str(getattr(choice, "value", choice)) for choice in choices]


def is_flag(parameter: Any) -> bool:
    """Return whether an option takes no value."""
    return bool(getattr(parameter, "is_flag", False) or getattr(parameter, "count", False))


def name_of(parameter: Any) -> str:
    """Return the names and the metavar of a parameter, as in `-o, --output OUT`."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    options = sorted(parameter.opts, key=lambda o: o.startswith("--"))
    names = ", ".join(options) + "".join(f" / {o}" for o in parameter.secondary_opts)
    if options[0].startswith("--"):
        names = f"    {names}"  # below the long names of options that have a short one
    if is_flag(parameter):
        return names
    inline = "|".join(choices_of(parameter))
    is_short = inline and len(f"{names} {inline}") <= NAMES
    return f"{names} {inline if is_short else parameter.metavar or parameter.name.upper()}"


def text_of(parameter: Any) -> str:
    """Return the text of a parameter: its help, its choices, and its default."""
    text = str(parameter.help or "")
    choices = choices_of(parameter)
    if choices and not name_of(parameter).endswith("|".join(choices)):
        text += f" One of: {', '.join(choices)}."
    default = default_of(parameter)
    if parameter.required and parameter.param_type_name == "option":
        text += f" {_unbroken('[required]')}"
    elif default and "Default" not in text:
        text += f" {_unbroken(f'[default: {default}]')}"
    return text.strip()


def _unbroken(text: str) -> str:
    """Return text that is not wrapped; `_wrap` restores its spaces."""
    return text.replace(" ", "\0")


def _wrap(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    """Wrap text at spaces only."""
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return [line.replace("\0", " ") for line in lines]


def default_of(parameter: Any) -> str:
    """Return the default of a parameter as text, or an empty text if there is none to show."""
    default = parameter.default
    if parameter.required or callable(default) or default is None:
        return ""
    if is_flag(parameter):
        on, off = parameter.opts[0], parameter.secondary_opts
        return (str(on) if default else str(off[0])) if off else ""
    if isinstance(default, float):
        return f"{default:.4g}"
    return str(getattr(default, "value", default)) if default != "" else ""


def groups_of(command: Any, context: Any) -> dict[str, list[Any]]:
    """Return the options of a command by group: common ones first, expert ones last."""
    groups: dict[str, list[Any]] = {OPTIONS: []}
    for parameter in command.get_params(context):
        if parameter.param_type_name == "argument" or getattr(parameter, "hidden", False):
            continue
        panel = (
            GENERAL
            if parameter.name == "help"
            else getattr(parameter, "rich_help_panel", None) or OPTIONS
        )
        groups.setdefault(panel, []).append(parameter)
    ordered = [name for name in groups if name not in _LAST] + [n for n in _LAST if n in groups]
    return {
        name: sorted(groups[name], key=lambda p: not p.required) for name in ordered if groups[name]
    }


def format_command(
    command: Any, context: Any, examples: Sequence[str], width: int, style: Style
) -> str:
    """Return the help of one command.

    Args:
        command: The command.
        context: Its context.
        examples: Lines for the end.
        width: Columns of the terminal.
        style: Colours.
    """
    arguments = [p for p in command.get_params(context) if p.param_type_name == "argument"]
    groups = {"Arguments": arguments} if arguments else {}
    groups |= groups_of(command, context)
    after = [line for example in examples for line in _wrapped_example(example, width)]
    heading = ["", style.heading("Examples:")] if examples else []
    return _format_help(command, context, [_rows(groups)], [*heading, *after], width, style)


def format_commands(
    command: Any,
    context: Any,
    sections: Mapping[str, Mapping[str, str]],
    width: int,
    style: Style,
    after: str,
) -> str:
    """Return the help of a program or of a group of commands: a line for each command.

    Args:
        command: The group.
        context: Its context.
        sections: The summaries of the commands by name, by section.
        width: Columns of the terminal.
        style: Colours.
        after: The last line.
    """
    listed = {title: list(members.items()) for title, members in sections.items()}
    options = [p for p in command.get_params(context) if p.param_type_name == "option"]
    parts = [listed, _rows({OPTIONS: options})]
    return _format_help(command, context, parts, ["", *format_text(after, width)], width, style)


def _rows(groups: Mapping[str, Sequence[Any]]) -> dict[str, Rows]:
    """Return the names and texts of parameters, by group."""
    return {title: [(name_of(p), text_of(p)) for p in group] for title, group in groups.items()}


def _format_help(
    command: Any,
    context: Any,
    parts: Sequence[Mapping[str, Rows]],
    after: Sequence[str],
    width: int,
    style: Style,
) -> str:
    """Return usage, description, parts whose sections share their columns, and the last lines."""
    lines = [*_usage(command, context, width, style), "", *format_text(command.help or "", width)]
    for sections in parts:
        lines += format_sections(sections, width, style)
    return "\n".join([*lines, *after])


def _usage(command: Any, context: Any, width: int, style: Style) -> list[str]:
    """Return the usage: the path of the command, and what must follow it."""
    parameters = command.get_params(context)
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    required = [p for p in parameters if p.param_type_name == "option" and p.required]
    pieces = [
        context.command_path,
        *(name_of(p) if p.required else f"[{name_of(p)}]" for p in arguments),
        *(name_of(p).strip().rpartition(", ")[2] for p in required),
        "COMMAND ..." if hasattr(command, "commands") else "[OPTIONS]",
    ]
    text = " ".join(_unbroken(piece) for piece in pieces)
    first, *rest = _wrap(text, width, "Usage: ", "       ")
    return [first.replace("Usage:", style.heading("Usage:"), 1), *rest]


def _wrapped_example(line: str, width: int) -> list[str]:
    """Return an example over several lines if it is long, as a shell accepts it."""
    pieces = _wrap(line, width - 2, "  ", "      ")
    return [f"{piece} \\" for piece in pieces[:-1]] + pieces[-1:]

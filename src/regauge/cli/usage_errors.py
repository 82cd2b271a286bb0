"""Usage errors of typer as `error:` and `hint:` lines: the option, what it accepts, and what was
passed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from regauge.cli.console import info
from regauge.cli.help import choices_of, is_flag, name_of

EXIT_USAGE = 2


def is_usage_error(error: Exception) -> bool:
    """Return whether an exception is a usage error of typer, of any version."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def report_usage(error: Any, arguments: Sequence[str]) -> int:
    """Print a usage error, or the help that it holds, and return the exit code.

    Args:
        error: The error.
        arguments: The command line, without the program's name.
    """
    message = error.format_message()
    if "Usage:" in message[:20]:  # the help of a group without a command
        sys.stderr.write(f"{message}\n")
    elif message:
        text, hint = describe_usage(error, arguments)
        info(f"error: {text}")
        info(f"hint: {hint}")
    return EXIT_USAGE


def describe_usage(error: Any, arguments: Sequence[str]) -> tuple[str, str]:
    """Return the text and the hint of a usage error."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "regauge"
    parameter = getattr(error, "param", None)
    if parameter is not None and type(error).__name__.startswith("Missing"):
        return f"{_label(parameter)} is required", f"{path} --help shows examples"
    if getattr(error, "param_hint", None):
        return f"{error.param_hint} {error.message}", f"{path} --help describes {error.param_hint}"
    if parameter is not None:
        text = _describe_value(parameter, error.message, arguments)
        return text, f"{path} --help describes {_label(parameter)}"
    if getattr(error, "option_name", None) and "possibilities" in vars(error):
        known = [o for p in context.command.get_params(context) for o in p.opts] if context else []
        close = get_close_matches(error.option_name, known, 1, 0.7)
        hint = f"did you mean {close[0]}?" if close else f"{path} --help lists its options"
        return f"{path} has no option {error.option_name}", hint
    commands = getattr(context.command, "commands", None) if context is not None else None
    if commands and "No such command" in error.message:
        word = next((a for a in arguments[path.count(" ") :] if not a.startswith("-")), "")
        close = get_close_matches(word, commands, 1, 0.6)
        hint = f"did you mean {path} {close[0]}?" if close else f"{path} --help lists its commands"
        return f'{path} has no command "{word}"', hint
    extra = "Got unexpected extra argument"
    if error.message.startswith(extra):
        word = error.message.rpartition("(")[2].rstrip(")")
        return f"unexpected argument: {word}", f"{path} --help shows its usage"
    if getattr(error, "option_name", None):
        return f"{error.option_name} requires a value", f"{path} --help describes it"
    text = error.message
    return f"{text[:1].lower()}{text[1:].rstrip('.')}", f"{path} --help shows its usage"


def _label(parameter: Any) -> str:
    """Return the long name of an option, or the metavar of an argument."""
    if parameter.param_type_name == "argument":
        return name_of(parameter)
    return str(max(parameter.opts, key=len))


def _describe_value(parameter: Any, message: str, arguments: Sequence[str]) -> str:
    """Return what is wrong with the value of a parameter: the option, its range, and the value."""
    passed = _passed_value(parameter, arguments)
    got = f", got {passed!r}" if passed is not None else ""
    choices = choices_of(parameter)
    if choices:
        return f"{_label(parameter)} must be one of {', '.join(choices)}{got}"
    # typer before 0.25 has the bounds in the type of the parameter
    kind = getattr(parameter, "type", parameter)
    low, high = (getattr(parameter, n, getattr(kind, n, None)) for n in ("min", "max"))
    is_real = isinstance(low, float) or isinstance(high, float) or "valid number" in message
    number = "a number" if is_real else "a whole number"
    bounds = {
        (True, True): f"{number} from {_short(low)} to {_short(high)}",
        (True, False): f"{number} >= {_short(low)}",
        (False, True): f"{number} <= {_short(high)}",
    }.get((low is not None, high is not None), number)
    if "Input" in message or "range" in message or "is not a valid" in message:
        return f"{_label(parameter)} must be {bounds}{got}"
    return f"{_label(parameter)}: {message[:1].lower()}{message[1:].rstrip('.')}"


def _short(bound: Any) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _passed_value(parameter: Any, arguments: Sequence[str]) -> str | None:
    """Return the last value that the command line gives an option."""
    value = None
    if parameter.param_type_name != "option" or is_flag(parameter):
        return value
    for i, word in enumerate(arguments):
        name, equals, rest = word.partition("=")
        if name in parameter.opts:
            value = rest if equals else next(iter(arguments[i + 1 : i + 2]), None)
    return value

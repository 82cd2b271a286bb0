"""`regauge keygen`, and how every command reads a key: the passphrase comes from a prompt, a file
or the environment, never from an argument.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regauge.cli import options
from regauge.cli.console import escape, info, print_json
from regauge.cli.run import find_enclosing
from regauge.errors import KeyFileError, PassphraseError

if TYPE_CHECKING:
    from regauge.locking.keys import Key
    from regauge.locking.keys import Purpose as Purposes

VERSION = 1
_MAX_PASSPHRASE = 4096  # bytes of a passphrase


class Purpose(StrEnum):
    lock = "lock"
    seal = "seal"


def keygen(
    out: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="KEY", help="The new key file, for its owner only."),
    ],
    passphrase: Annotated[
        bool,
        typer.Option(
            "--passphrase",
            help="Protect it by a passphrase: asked for twice, or taken from REGAUGE_PASSPHRASE.",
        ),
    ] = False,
    passphrase_file: options.PassphraseFile = None,
    purpose: Annotated[
        Purpose,
        typer.Option(
            "--purpose", help="lock: obfuscates a model that is used. seal: encrypts files at rest."
        ),
    ] = Purpose.lock,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Make a key: 32 random bytes in a file that only you can read. Keep a copy: nobody can make it
    again.
    """
    from regauge.locking.keys import generate_key, save_key

    if os.path.lexists(out):
        raise KeyFileError(
            f"{out} exists already", hint="a key cannot be made again: name a new file"
        )
    given = _read_passphrase(passphrase_file)
    if given is None and passphrase:
        _require_terminal(out)
        given = typer.prompt(
            "Passphrase", hide_input=True, confirmation_prompt="Passphrase again", err=True
        )
    elif not passphrase and passphrase_file is None:
        given = None  # REGAUGE_PASSPHRASE may be set for another key
    key = generate_key(purpose.value)
    save_key(key, out, given)
    info(
        f"wrote {out}: key {key.id} for "
        f"{key.purpose}{', protected by a passphrase' if given else ''}; keep a copy in a safe "
        "place"
    )
    if json:
        print_json(
            {
                "version": VERSION,
                "command": "keygen",
                "out": str(out),
                "id": key.id,
                "purpose": key.purpose,
                "passphrase": given is not None,
            }
        )
    return 0


def read_key(path: Path, purpose: Purposes, passphrase_file: Path | None) -> Key:
    """The key of a file. Its passphrase is looked for only if it has one."""
    from regauge.locking.keys import load_key

    return load_key(path, purpose, partial(_obtain_passphrase, path, passphrase_file))


def require_outside(key: Path, *places: Path) -> None:
    """A key must not lie in what is given away, nor where something is written."""
    place = find_enclosing(key, *places)
    if place is not None:
        raise KeyFileError(
            f"the key {key} lies in {place}, and would be given away with it",
            hint="keep keys in a folder of their own",
        )


def _obtain_passphrase(path: Path, passphrase_file: Path | None) -> str:
    given = _read_passphrase(passphrase_file)
    if given is None:
        _require_terminal(path)
        given = str(typer.prompt(escape(f"Passphrase of {path}"), hide_input=True, err=True))
    return given


def _read_passphrase(file: Path | None) -> str | None:
    """The passphrase of a file or of the environment, if there is one."""
    if file is None:
        return os.environ.get("REGAUGE_PASSPHRASE") or None
    from regauge.locking.keys import read_private

    first = read_private(file, "passphrase file").split(b"\n")[0].removesuffix(b"\r")
    if not first or len(first) > _MAX_PASSPHRASE:
        raise PassphraseError(
            f"{file} holds no passphrase on its first line",
            hint=f"at most {_MAX_PASSPHRASE} bytes of text",
        )
    try:
        return first.decode("utf-8")
    except UnicodeDecodeError:
        raise PassphraseError(
            f"{file} holds no text in UTF-8", hint="write the passphrase on its first line, as text"
        ) from None


def _require_terminal(path: Path) -> None:
    if not sys.stdin or not sys.stdin.isatty():
        raise PassphraseError(
            f"{path} needs a passphrase, and there is no terminal to ask at",
            hint="give it in REGAUGE_PASSPHRASE or with --passphrase-file",
        )

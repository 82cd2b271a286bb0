"""`regauge keygen`, and the key reader of all commands. A passphrase comes from a prompt, a file or
the environment, never from an argument.
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
    """The use of a key."""

    lock = "lock"
    seal = "seal"


def keygen(
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="KEY", help="New key file, readable by its owner only."
        ),
    ],
    passphrase: Annotated[
        bool,
        typer.Option(
            "--passphrase",
            help="Protect the key by a passphrase, from a prompt or REGAUGE_PASSPHRASE.",
        ),
    ] = False,
    passphrase_file: options.PassphraseFile = None,
    purpose: Annotated[
        Purpose,
        typer.Option(
            "--purpose", help="lock: obfuscate a model in use. seal: encrypt files at rest."
        ),
    ] = Purpose.lock,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Create a key: 32 random bytes in a file that only you can read. Keep a copy: a lost key
    cannot be recreated.
    """
    from regauge.locking.keys import generate_key, save_key

    if os.path.lexists(out):
        raise KeyFileError(
            f"{out} exists already", hint="a key cannot be recreated: name a new file"
        )
    secret = _read_passphrase(passphrase_file)
    if secret is None and passphrase:
        _require_terminal(out)
        secret = typer.prompt(
            "Passphrase", hide_input=True, confirmation_prompt="Passphrase again", err=True
        )
    elif not passphrase and passphrase_file is None:
        secret = None  # REGAUGE_PASSPHRASE may be set for another key
    key = generate_key(purpose.value)
    save_key(key, out, secret)
    info(
        f"wrote {out}: key {key.id} for "
        f"{key.purpose}{', protected by a passphrase' if secret else ''}; keep a copy in a safe "
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
                "passphrase": secret is not None,
            }
        )
    return 0


def read_key(path: Path, purpose: Purposes, passphrase_file: Path | None) -> Key:
    """Read a key file. Its passphrase is requested only if it has one."""
    from regauge.locking.keys import load_key

    return load_key(path, purpose, partial(_obtain_passphrase, path, passphrase_file))


def require_outside(key: Path, *places: Path) -> None:
    """Raise if a key lies in a folder that is published or written."""
    enclosing = find_enclosing(key, *places)
    if enclosing is not None:
        raise KeyFileError(
            f"the key {key} lies in {enclosing}, and would be published with it",
            hint="keep keys in a separate folder",
        )


def _obtain_passphrase(path: Path, passphrase_file: Path | None) -> str:
    """Return the passphrase of a file, of the environment, or of a prompt."""
    passphrase = _read_passphrase(passphrase_file)
    if passphrase is None:
        _require_terminal(path)
        passphrase = str(typer.prompt(escape(f"Passphrase of {path}"), hide_input=True, err=True))
    return passphrase


def _read_passphrase(file: Path | None) -> str | None:
    """Return the passphrase of a file or of the environment, or None."""
    if file is None:
        return os.environ.get("REGAUGE_PASSPHRASE") or None
    from regauge.locking.keys import read_private

    first = read_private(file, "passphrase file").split(b"\n")[0].removesuffix(b"\r")
    if not first or len(first) > _MAX_PASSPHRASE:
        raise PassphraseError(
            f"the first line of {file} must be a passphrase of 1 to {_MAX_PASSPHRASE} bytes, got "
            f"{len(first)}",
            hint="write the passphrase on the first line",
        )
    try:
        return first.decode("utf-8")
    except UnicodeDecodeError:
        raise PassphraseError(
            f"the passphrase in {file} must be UTF-8 text", hint="write it on the first line"
        ) from None


def _require_terminal(path: Path) -> None:
    """Raise unless stdin is a terminal for a passphrase prompt."""
    if not sys.stdin or not sys.stdin.isatty():
        raise PassphraseError(
            f"{path} needs a passphrase, and stdin is not a terminal",
            hint="set REGAUGE_PASSPHRASE or pass --passphrase-file",
        )

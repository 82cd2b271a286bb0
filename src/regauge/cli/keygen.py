"""`regauge keygen`, and the key reader of all commands. A passphrase comes from a prompt, a file or
the environment, never from an argument.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regauge.cli import options
from regauge.cli.console import escape, info, print_report, print_result
from regauge.errors import PassphraseError

if TYPE_CHECKING:
    from regauge.locking.keys import Key
    from regauge.locking.keys import Purpose as Purposes


class Purpose(StrEnum):
    """The use of a key."""

    lock = "lock"
    seal = "seal"
    receive = "receive"


def keygen(
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="KEY", help="New key file, readable by its owner only."
        ),
    ] = None,
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
            "--purpose",
            help="lock: obfuscate a model in use. seal: encrypt files at rest. receive: an "
            "identity, to open files that others seal to its public recipient.",
        ),
    ] = Purpose.lock,
    public: Annotated[
        Path | None,
        typer.Option(
            "--public",
            metavar="ID",
            help="Print the recipient of an identity (--purpose receive); create no key.",
        ),
    ] = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Create a key: 32 random bytes in a file.

    Only you can read the file. Keep a copy: a lost key cannot be recreated.
    """
    from regauge.locking.keys import create_key

    if public is not None:
        if out is not None or passphrase:
            raise typer.BadParameter("--public reads a key: it takes neither -o nor --passphrase")
        identity = read_key(public, "receive", passphrase_file)
        fields = {"id": identity.id, "purpose": identity.purpose, "recipient": identity.recipient}
        print_report("keygen", fields) if json else print_result(identity.recipient)
        return 0
    if out is None:
        raise typer.BadParameter("--output is required")
    secret = None
    if passphrase or passphrase_file is not None:  # REGAUGE_PASSPHRASE may be set for another key
        secret = partial(_obtain_passphrase, out, passphrase_file, new=True)
    key = create_key(out, purpose.value, secret)
    wrapped = ", protected by a passphrase" if secret is not None else ""
    info(f"wrote {out}: key {key.id} for {key.purpose}{wrapped}; keep a copy in a safe place")
    if json:
        fields = {"out": str(out), "id": key.id, "purpose": key.purpose}
        fields |= {"recipient": key.recipient} if key.purpose == "receive" else {}
        print_report("keygen", {**fields, "passphrase": secret is not None})
    elif key.purpose == "receive":
        info("the recipient, for those who send files to you, is public:")
        print_result(key.recipient)
    return 0


def read_key(path: Path, purpose: Purposes, passphrase_file: Path | None) -> Key:
    """Read a key file. Its passphrase is requested only if it has one."""
    from regauge.locking.keys import load_key

    return load_key(path, purpose, partial(_obtain_passphrase, path, passphrase_file))


def _obtain_passphrase(path: Path, passphrase_file: Path | None, *, new: bool = False) -> str:
    """Return the passphrase of a file, of the environment, or of a prompt."""
    from regauge.locking.keys import read_passphrase

    passphrase = read_passphrase(passphrase_file)
    if passphrase is not None:
        return passphrase
    if not sys.stdin or not sys.stdin.isatty():
        raise PassphraseError(
            f"{path} needs a passphrase, and stdin is not a terminal",
            hint="set REGAUGE_PASSPHRASE or pass --passphrase-file",
        )
    return str(
        typer.prompt(
            "Passphrase" if new else escape(f"Passphrase of {path}"),
            hide_input=True,
            confirmation_prompt="Passphrase again" if new else False,
            err=True,
        )
    )

"""`regauge seal` and `regauge open`: authenticated encryption of files at rest. A lock, in
contrast, is not encryption.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options
from regauge.cli.console import info, print_report
from regauge.cli.keygen import read_key


def seal(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="File, or folder with all its contents.")
    ],
    out: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="New sealed file.")],
    key: Annotated[
        Path | None,
        typer.Option("-k", "--key", metavar="KEY", help="Key file, made by regauge keygen."),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to",
            metavar="RECIPIENT",
            help="Seal to a recipient instead of with a key: its string, or a file of such "
            "strings. Repeatable.",
        ),
    ] = None,
    passphrase_file: options.PassphraseFile = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Encrypt a file or folder for storage, or for others.

    Encrypts with authentication, with a key (-k) or to public recipients (--to). `regauge open`
    decrypts it.
    """
    if (key is None) == (not to):
        raise typer.BadParameter("pass either -k KEY or --to RECIPIENT")
    started = time.monotonic()
    from regauge.checkpoints.files import format_bytes
    from regauge.locking.recipients import resolve_recipients
    from regauge.locking.seal import seal as run

    if key is not None:
        secret = read_key(key, "seal", passphrase_file)
        size = run(path, secret, out)
        by = f"by the key {secret.id}"
        fields: dict[str, object] = {"key": secret.id}
    else:
        recipients = list(resolve_recipients(to or ()))
        size = run(path, out=out, to=recipients)
        by = f"to {len(recipients)} recipient" + "s" * (len(recipients) > 1)
        fields = {"recipients": recipients}
    info(
        f"sealed {path} to {out}: {format_bytes(size)} in {time.monotonic() - started:.1f} s, "
        f"{by}; {path} is still there"
    )
    if json:
        print_report("seal", {"out": str(out), "bytes": size, **fields})
    return 0


def open_(
    path: Annotated[Path, typer.Argument(metavar="SEALED", help="Sealed file.")],
    key: options.KeyFile,
    out: Annotated[
        Path, typer.Option("-o", "--output", metavar="PATH", help="New file or folder.")
    ],
    passphrase_file: options.PassphraseFile = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Decrypt a sealed file or folder, with its key or an identity.

    The output appears only after all of it is authenticated.
    """
    started = time.monotonic()
    from regauge.locking.seal import open_sealed, purpose_of

    secret = read_key(key, purpose_of(path), passphrase_file)
    names = open_sealed(path, secret, out)
    info(f"opened {path} to {out}: {len(names)} files in {time.monotonic() - started:.1f} s")
    if json:
        print_report("open", {"out": str(out), "files": names, "key": secret.id})
    return 0

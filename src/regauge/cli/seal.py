"""`regauge seal` and `regauge open`: authenticated encryption of files at rest. A lock, in
contrast, is not encryption.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options
from regauge.cli.console import info, print_json
from regauge.cli.keygen import read_key

VERSION = 1


def seal(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="File, or folder with all its contents.")
    ],
    key: options.KeyFile,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="New sealed file.")],
    passphrase_file: options.PassphraseFile = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Encrypt a file or folder for storage.

    Encrypts with authentication. `regauge open` decrypts it.
    """
    started = time.monotonic()
    from regauge.checkpoints.files import format_bytes
    from regauge.locking.seal import seal as run

    secret = read_key(key, "seal", passphrase_file)
    size = run(path, secret, out)
    info(
        f"sealed {path} to {out}: {format_bytes(size)} in {time.monotonic() - started:.1f} s, "
        "by the "
        f"key {secret.id}; {path} is still there"
    )
    if json:
        print_json(
            {
                "version": VERSION,
                "command": "seal",
                "out": str(out),
                "bytes": size,
                "key": secret.id,
            }
        )
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
    """Decrypt a sealed file or folder.

    The output appears only after all of it is authenticated.
    """
    started = time.monotonic()
    from regauge.locking.seal import open_sealed

    secret = read_key(key, "seal", passphrase_file)
    names = open_sealed(path, secret, out)
    info(f"opened {path} to {out}: {len(names)} files in {time.monotonic() - started:.1f} s")
    if json:
        print_json(
            {
                "version": VERSION,
                "command": "open",
                "out": str(out),
                "files": names,
                "key": secret.id,
            }
        )
    return 0

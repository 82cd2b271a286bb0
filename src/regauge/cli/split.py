"""`regauge split certs` and `join`: certificates of server and clients, and the joining of trained
parts. `split_server` has the server's command, `split_client` the client's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options
from regauge.cli.console import info, print_report

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # regauge reports transport errors itself


def _check_each(option: str, check: str) -> Callable[[list[str] | None], list[str] | None]:
    """Return a callback of an option that checks each of its values."""

    def callback(values: list[str] | None) -> list[str] | None:
        from regauge.errors import CheckpointError
        from regauge.split.protocol import certificates

        try:
            return values and [getattr(certificates, check)(value) for value in values]
        except CheckpointError as error:
            raise typer.BadParameter(str(error), param_hint=option) from error

    return callback


def certs(
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="New folder for all files.")],
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="HOST",
            callback=_check_each("--name", "check_host_name"),
            help="Host name or address of the server. Repeatable. Default: this machine's.",
        ),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            "--client",
            metavar="NAME",
            callback=_check_each("--client", "check_client_name"),
            help="Name of a client. Repeatable. Default: client.",
        ),
    ] = None,
    days: Annotated[
        int, typer.Option("--days", min=1, max=3650, metavar="N", help="Days of validity.")
    ] = 365,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Create TLS certificates for a server and its clients.

    Creates a certificate authority, and certificates for the server and each client. The
    authority's key is not saved: another client needs new certificates for all.
    """
    from regauge.split import make_certificates

    clients, names = client or ["client"], name or ["localhost", "127.0.0.1", "::1"]
    created = make_certificates(to, names, clients, days)
    info(
        f"wrote {to}: certificates of the server ({', '.join(names)}) and of the clients "
        f"{', '.join(clients)}, valid for {days} days"
    )
    info(
        "the server needs authority.pem, server.pem, server.key and clients.txt; a client needs "
        "authority.pem and its own .pem and .key; keep .key files secret"
    )
    if json:
        files = {
            side: [str(t.authority), str(t.certificate), str(t.key)] for side, t in created.items()
        }
        print_report("split certs", {"to": str(to), "files": files})
    return 0


def join(
    edges: Annotated[
        str, typer.Argument(metavar="EDGES", help="Output of a client: embedding and head.")
    ],
    backbone: Annotated[str, typer.Argument(metavar="BACKBONE", help="Output of the server.")],
    out: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="OUT", help="New folder for the whole model."),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="D",
            help="float32, float16 or bfloat16. Default: unchanged.",
            rich_help_panel=options.ADVANCED,
        ),
    ] = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Join the trained parts of client and server into one model.

    The client has embedding and head, the server the backbone. Parts of a locked model give a
    locked model.
    """
    from regauge.split import join as join_parts

    key = join_parts(edges, backbone, out, dtype).key
    info(f"wrote {out}: the embedding and head of {edges}, the backbone of {backbone}")
    if key:
        info(
            f"it is locked by the key {key}; regauge unlock {out} -k KEY --retrained -o PLAIN "
            "unlocks it"
        )
    if json:
        print_report("split join", {"out": str(out), "key": key or None})
    return 0

"""`regauge split`: the backbone on a server; data, labels, embedding and head with the clients.

This module holds certificates and the joining of parts; `split_server` has the server's command,
`split_client` the client's.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from regauge.cli import options
from regauge.cli.console import info, print_json
from regauge.cli.split_client import predict, train
from regauge.cli.split_server import CLIENTS, serve

VERSION = 1
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # regauge reports transport errors itself

app = typer.Typer(
    name="split",
    help="Train and use a model whose backbone is on a server. Data, labels, embedding and head "
    "stay here.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Train and use a model whose backbone is on a server. Data, labels, embedding and head stay
    here.
    """


@app.command()
def certs(
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="New folder for all files.")],
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="HOST",
            help="Host name or address of the server. Repeatable. Default: this machine's.",
        ),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            "--client", metavar="NAME", help="Name of a client. Repeatable. Default: client."
        ),
    ] = None,
    days: Annotated[
        int, typer.Option("--days", min=1, max=3650, metavar="N", help="Days of validity.")
    ] = 365,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Create a certificate authority, and certificates for the server and each client. The
    authority's key is not saved: another client needs new certificates for all.
    """
    from regauge.checkpoints.files import wrap_write_errors, write_bytes
    from regauge.errors import CheckpointError
    from regauge.split.protocol.certificates import make_certificates

    clients, names = client or ["client"], name or ["localhost", "127.0.0.1", "::1"]
    for member in clients:
        if (
            not re.fullmatch(r"[\w][\w.@-]{0,63}", member)
            or len(member.encode()) > 64
            or member in ("server", "authority")
        ):
            raise typer.BadParameter(
                "must consist of letters, digits, . @ - and _, and not be server or authority, "
                f"got {member!r}",
                param_hint="--client",
            )
    for host in names:
        if not re.fullmatch(
            r"[A-Za-z0-9*][A-Za-z0-9.*_-]{0,252}|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*", host
        ):
            raise typer.BadParameter(
                f"must be a host name or address, got {host!r}; write names of other letters as "
                "xn--...",
                param_hint="--name",
            )
    if len(set(clients)) < len(clients):
        raise typer.BadParameter(f"must be unique, got {', '.join(clients)}", param_hint="--client")
    with wrap_write_errors(to):
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise CheckpointError(
                f"{to} must be new or empty",
                hint="certificates belong together: name a new folder",
            )
    existed = to.exists()
    try:
        created = make_certificates(to, names, clients, days)
        write_bytes(to / CLIENTS, "".join(f"{member}\n" for member in clients).encode(), 0o644)
    except BaseException:  # an incomplete set is useless; all files in the folder are new
        for path in to.glob("*"):
            path.unlink()
        if to.is_dir() and not existed:
            to.rmdir()
        raise
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
        print_json({"version": VERSION, "command": "split certs", "to": str(to), "files": files})
    return 0


app.command()(serve)
app.command()(train)
app.command()(predict)


@app.command()
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
            "--dtype", metavar="D", help="float32, float16 or bfloat16. Default: unchanged."
        ),
    ] = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Join a client's embedding and head and the server's backbone into one model. Parts of a
    locked model give a locked model.
    """
    from regauge.split.parts import join as join_parts

    key = join_parts(edges, backbone, out, dtype)
    info(f"wrote {out}: the embedding and head of {edges}, the backbone of {backbone}")
    if key:
        info(
            f"it is locked by the key {key}; regauge unlock {out} -k KEY --retrained -o PLAIN "
            "unlocks it"
        )
    if json:
        print_json(
            {"version": VERSION, "command": "split join", "out": str(out), "key": key or None}
        )
    return 0

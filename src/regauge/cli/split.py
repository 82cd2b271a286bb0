"""`regauge split`: the backbone on a server, data, labels, embedding and head with the clients.
Here are certificates, and what puts parts together; `serving` has the server's command, `clienting`
the client's.
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
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # the library's own lines say less than ours

app = typer.Typer(
    name="split",
    help="Train and use a model whose backbone is on a server, with data, labels, embedding and "
    "head kept here.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Train and use a model whose backbone is on a server, with data, labels, embedding and head
    kept here.
    """


@app.command()
def certs(
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="A new folder for all files.")],
    name: Annotated[
        list[str] | None,
        typer.Option(
            "--name",
            metavar="HOST",
            help="A name or address of the server. May be repeated. Default: this machine's.",
        ),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            "--client", metavar="NAME", help="A client. May be repeated. Default: client."
        ),
    ] = None,
    days: Annotated[
        int, typer.Option("--days", min=1, max=3650, metavar="N", help="How long they hold.")
    ] = 365,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Make a small authority, a certificate for the server and one for each client. The authority's
    key is thrown away: nobody can make more of them, and another client needs new ones for all.
    """
    from regauge.checkpoints.files import wrap_write_errors, write_bytes
    from regauge.errors import CheckpointError
    from regauge.split.protocol.certificates import make_certificates

    clients, names = client or ["client"], name or ["localhost", "127.0.0.1", "::1"]
    for one in clients:
        if (
            not re.fullmatch(r"[\w][\w.@-]{0,63}", one)
            or len(one.encode()) > 64
            or one in ("server", "authority")
        ):
            raise typer.BadParameter(
                f"{one!r} is no name for a client: letters, digits, . @ - and _, and not server "
                "or authority",
                param_hint="--client",
            )
    for one in names:
        if not re.fullmatch(
            r"[A-Za-z0-9*][A-Za-z0-9.*_-]{0,252}|[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*", one
        ):
            raise typer.BadParameter(
                f"{one!r} is no name or address of a machine; names of other letters are "
                "written as xn--...",
                param_hint="--name",
            )
    if len(set(clients)) < len(clients):
        raise typer.BadParameter("a client is named twice", param_hint="--client")
    with wrap_write_errors(to):
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise CheckpointError(
                f"{to} holds something already",
                hint="certificates belong together: name a new folder",
            )
    was_there = to.exists()
    try:
        made = make_certificates(to, names, clients, days)
        write_bytes(to / CLIENTS, "".join(f"{one}\n" for one in clients).encode(), 0o644)
    except (
        BaseException
    ):  # half a set is of no use to anybody; what is in the folder was made just now
        for path in to.glob("*"):
            path.unlink()
        if to.is_dir() and not was_there:
            to.rmdir()
        raise
    info(
        f"wrote {to}: a server that answers to {', '.join(names)}, and the clients "
        f"{', '.join(clients)}; they hold {days} days"
    )
    info(
        "the server needs authority.pem, server.pem, server.key and clients.txt; a client "
        "authority.pem and its own two; keys are for their owners"
    )
    if json:
        files = {who: [str(t.authority), str(t.certificate), str(t.key)] for who, t in made.items()}
        print_json({"version": VERSION, "command": "split certs", "to": str(to), "files": files})
    return 0


app.command()(serve)
app.command()(train)
app.command()(predict)


@app.command()
def join(
    edges: Annotated[
        str, typer.Argument(metavar="EDGES", help="What a client has written: embedding and head.")
    ],
    backbone: Annotated[
        str, typer.Argument(metavar="BACKBONE", help="What the server has written.")
    ],
    out: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="OUT", help="The new folder of the whole model."),
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="D", help="float32, float16 or bfloat16. Default: as they are."
        ),
    ] = None,
    json: options.Json = False,
    verbose: options.Verbose = 0,
) -> int:
    """Make one model of a client's embedding and head and the server's backbone. If they are parts
    of a locked model, it is locked.
    """
    from regauge.split.parts import join as joined

    key = joined(edges, backbone, out, dtype)
    info(f"wrote {out}: the embedding and head of {edges}, the backbone of {backbone}")
    if key:
        info(
            f"it is locked by the key {key}; regauge unlock {out} -k KEY --retrained -o PLAIN "
            "makes it plain"
        )
    if json:
        print_json(
            {"version": VERSION, "command": "split join", "out": str(out), "key": key or None}
        )
    return 0

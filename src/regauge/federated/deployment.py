"""Flower's real engine: a SuperLink, SuperNodes that may be anywhere, and a bundle that is
submitted to them.

Commands are made here as lists of words, so that the documentation, the example and the tests run
the same ones. All of them are Flower's own; none sends telemetry or installs anything at run time,
and all connections are TLS with an authority of one's own. Nodes prove who they are by a key that
was registered beforehand; a SuperLink with `--enable-supernode-auth` lets in no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from regauge.checkpoints.files import write_bytes
from regauge.errors import need
from regauge.federated.settings import FederatedError, Settings
from regauge.split.protocol.certificates import make_certificates

QUIET_ENV = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
CONNECTION = "regauge"  # of the connection in Flower's configuration
APP_MODULE = '''"""The apps that SuperLink and SuperNodes run, with a configuration of their own."""

from regauge.federated.flower import client_app, server_app

client = client_app()
server = server_app()
'''


def write_bundle(
    folder: Path,
    source: Mapping[str, Any],
    settings: Settings,
    out: Path,
    *,
    wait: float,
    gather: float,
    record: bool = False,
) -> None:
    """The folder that `flwr run` submits. `out` is the run's folder on the SuperLink's machine,
    `source` where the server finds model and tests.
    """
    from regauge import __version__

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "settings": json.dumps(settings.to_dict()),
        "source": json.dumps(dict(source)),
        "folder": str(out.absolute()),
    }
    lines = [
        f"{name} = {json.dumps(value)}" for name, value in config.items()
    ]  # a JSON string is a TOML string
    text = f"""[project]
name = "regauge-federated"
version = "{__version__}"
description = "regauge's federated learning"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "regauge"

[tool.flwr.app.components]
serverapp = "regauge_app:server"
clientapp = "regauge_app:client"

[tool.flwr.app.config]
{chr(10).join(lines)}
wait = {float(wait)}
gather = {float(gather)}
spy = {str(record).lower()}
"""
    write_bytes(folder / "pyproject.toml", text.encode())
    write_bytes(folder / "regauge_app.py", APP_MODULE.encode())


def make_node_key(path: Path) -> Path:
    """A node's key (P-384, OpenSSH's form) in a new file for its owner only; its public half is
    beside it. Returns the public one.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )

    key = ec.generate_private_key(ec.SECP384R1())
    write_bytes(
        path,
        key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
        mode=0o600,
        new=True,
    )
    public = path.with_name(f"{path.name}.pub")
    write_bytes(
        public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH), new=True
    )
    return public


def write_connection(home: Path, address: str, authority: Path) -> None:
    """Flower's configuration with one SuperLink in it, in a home of its own (FLWR_HOME)."""
    home.mkdir(parents=True, exist_ok=True)
    text = (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = '
        f'"{address}"\nroot-certificates = {json.dumps(str(authority.absolute()))}\n'
    )
    write_bytes(home / "config.toml", text.encode())


def find_program(name: str) -> str:
    """One of Flower's programs, beside this Python or on the path."""
    import shutil

    found = shutil.which(
        name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if found is None:
        need("flwr", "federated")
        raise FederatedError(f"{name} is not on the path", hint="pip install 'regauge[federated]'")
    return found


def build_environment(home: Path, **more: str) -> dict[str, str]:
    """Quiet, with Flower's programs on the path: they start each other by name."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **QUIET_ENV, "FLWR_HOME": str(home), "PATH": path, **more}


def superlink_command(
    certificates: Path, port: int, database: Path, host: str = "127.0.0.1"
) -> list[str]:
    given = {"certfile": "server.pem", "keyfile": "server.key", "ca-certfile": "authority.pem"}
    tls = [
        word for name, file in given.items() for word in (f"--ssl-{name}", str(certificates / file))
    ]
    more = [
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        "--database",
        str(database),
    ]
    return [find_program("flower-superlink"), "--host", host, "--port", str(port), *tls, *more]


def supernode_command(
    address: str, certificates: Path, key: Path, port: int, config: Mapping[str, str | int]
) -> list[str]:
    """`port` is for the node's own processes on its own machine."""
    told = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
    tls = ["--root-certificates", str(certificates / "authority.pem")]
    own = ["--host", "127.0.0.1", "--port", str(port), "--auth-supernode-private-key", str(key)]
    return [
        find_program("flower-supernode"),
        "--superlink",
        address,
        *tls,
        *own,
        "--node-config",
        told,
    ]


def register_command(public: Path, client: int) -> list[str]:
    return [
        find_program("flwr"),
        "supernode",
        "register",
        str(public),
        CONNECTION,
        "--name",
        f"client-{client}",
    ]


def submit_command(bundle: Path) -> list[str]:
    return [find_program("flwr"), "run", str(bundle), CONNECTION, "--stream"]


@dataclass
class Loopback:
    """A SuperLink and its SuperNodes on this machine, each a process of its own with a log in
    `folder`.
    """

    folder: Path
    port: int
    home: Path
    node_configs: Sequence[Mapping[str, str | int]]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start_link(self) -> None:
        self._start(
            "superlink",
            superlink_command(
                self.folder / "certificates", self.port, self.folder / "superlink.db"
            ),
        )
        self._await_port()

    def start_node(self, i: int) -> None:
        key, config = self.folder / f"node-{i}", self.node_configs[i]
        self._start(
            f"node-{i}",
            supernode_command(self.address, self.folder / "certificates", key, free_port(), config),
        )

    def kill(self, name: str) -> None:
        """End a process and all that it has started, at once. Flower's children have sessions of
        their own and would stay.
        """
        process = self.processes.pop(name)
        for pid in (process.pid, *descendants(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def run(self, bundle: Path, log: str = "run") -> subprocess.Popen[bytes]:
        """Submit a bundle; the process that follows it to its end."""
        return self._start(log, submit_command(bundle))

    def run_command(self, command: Sequence[str]) -> str:
        """A short command of Flower's; what it said."""
        done = subprocess.run(
            list(command),
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise FederatedError(
                f"{Path(command[0]).name} {command[1]} failed: "
                f"{(done.stderr or done.stdout).strip()[-500:]}"
            )
        return done.stdout

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _environment(self) -> dict[str, str]:
        return build_environment(
            self.home, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1")
        )  # nodes share the machine

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        log: IO[bytes] = (self.folder / f"{name}.log").open("ab")
        with log:
            made = subprocess.Popen(
                list(command),
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = made
        return made

    def _await_port(self, patience: float = 120.0) -> None:
        until = time.monotonic() + patience
        while time.monotonic() < until:
            if self.processes["superlink"].poll() is not None:
                break
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1),
            ):
                return
            time.sleep(0.2)
        raise FederatedError(f"the SuperLink did not come up:\n{self.log('superlink')[-1500:]}")


@contextlib.contextmanager
def loopback(folder: Path, node_configs: Sequence[Mapping[str, str | int]]) -> Iterator[Loopback]:
    """Certificates, keys, a SuperLink with TLS and node authentication, and registered nodes; all
    of it ends with the block.
    """
    folder.mkdir(parents=True, exist_ok=True)
    certificates = folder / "certificates"
    made = Loopback(folder, free_port(), folder / "flower-home", node_configs)
    make_certificates(certificates, clients=())
    write_connection(made.home, made.address, certificates / "authority.pem")
    try:
        made.start_link()
        for i in range(len(node_configs)):
            made.run_command(register_command(make_node_key(folder / f"node-{i}"), i))
            made.start_node(i)
        yield made
    finally:
        for name in list(made.processes):
            made.kill(name)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = {
        int(child): int(parent) for child, parent in (line.split() for line in listed.splitlines())
    }
    found, front = [], [pid]
    while front:
        front = [child for child, parent in parents.items() if parent in front]
        found += front
    return found


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])

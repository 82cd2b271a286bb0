"""Deployment on Flower: a SuperLink, SuperNodes on any machine, and the bundle to submit.

Commands are lists of words, so that documentation, example and tests run the same ones. All of them
are Flower's; none sends telemetry or installs anything at run time, and all connections use TLS
with a certificate authority of the deployment. Nodes authenticate by a registered key; a SuperLink
with `--enable-supernode-auth` rejects all others.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from regauge.checkpoints.files import write_bytes
from regauge.errors import FederatedError, need
from regauge.federated.outputs import FederatedRun, remote_run
from regauge.federated.runs import Source
from regauge.federated.settings import Settings
from regauge.split.protocol.certificates import make_certificates

QUIET_ENV = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
CONNECTION = "regauge"  # the connection in Flower's configuration
APP_MODULE = '''"""The apps of SuperLink and SuperNodes."""

from regauge.federated.flower import client_app, server_app

client = client_app()
server = server_app()
'''


@dataclass(frozen=True)
class FlowerOptions:
    """Options of the engines that run on Flower.

    Attributes:
        workers: The workers of a simulation; None: one for each core.
        wait: Seconds that a round waits for its clients.
        gather: Seconds to wait for clients to connect.
        superlink: The address of a deployment's SuperLink, HOST:PORT.
        authority: The certificate authority of the SuperLink, a PEM file.

    Example:
        >>> flower = regauge.federated.FlowerOptions(workers=2)
        >>> # regauge.federated.run("vit", "digits", ..., engine="simulation", flower=flower)
    """

    workers: int | None = None
    wait: float = 600.0
    gather: float = 60.0
    superlink: str | None = None
    authority: Path | None = None


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
    """Write the folder that `flwr run` submits.

    Args:
        folder: The folder of the bundle.
        source: Where the server finds model and test data (`Source.to_dict`).
        settings: The settings of the run.
        out: The folder of the run on the SuperLink's machine.
        wait: Seconds that a round waits for its clients.
        gather: Seconds that a round waits for clients that are not connected.
        record: Whether the server records what it receives.
    """
    from regauge import __version__

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "settings": json.dumps(settings.to_dict()),
        "source": json.dumps(dict(source)),
        "folder": str(out.absolute()),
    }
    # A JSON string is a TOML string.
    lines = [f"{name} = {json.dumps(value)}" for name, value in config.items()]
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
record = {str(record).lower()}
"""
    write_bytes(folder / "pyproject.toml", text.encode())
    write_bytes(folder / "regauge_app.py", APP_MODULE.encode())


def make_node_key(path: Path) -> Path:
    """Write a new node key (P-384, OpenSSH format), readable by its owner only.

    Returns:
        The path of the public key, in the same folder.
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
    """Write a Flower configuration with one SuperLink into a folder (FLWR_HOME)."""
    home.mkdir(parents=True, exist_ok=True)
    text = (
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = '
        f'"{address}"\nroot-certificates = {json.dumps(str(authority.absolute()))}\n'
    )
    write_bytes(home / "config.toml", text.encode())


def find_program(name: str) -> str:
    """Return the path of a Flower program, next to this Python or on the path."""
    import shutil

    path = shutil.which(
        name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if path is None:
        need("flwr", "federated")
        raise FederatedError(
            f"{name} must be on the path beside this Python, got none",
            hint="pip install 'regauge[federated]' into the environment of this Python",
        )
    return path


def build_environment(home: Path, **variables: str) -> dict[str, str]:
    """Return the environment of Flower's programs: no telemetry, and all of them on the path.

    They start one another by name.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **QUIET_ENV, "FLWR_HOME": str(home), "PATH": path, **variables}


def superlink_command(
    certificates: Path, port: int, database: Path, host: str = "127.0.0.1"
) -> list[str]:
    """Return the command of a SuperLink with TLS and node authentication."""
    files = {"certfile": "server.pem", "keyfile": "server.key", "ca-certfile": "authority.pem"}
    tls = [
        word for name, file in files.items() for word in (f"--ssl-{name}", str(certificates / file))
    ]
    options = [
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        "--database",
        str(database),
    ]
    return [find_program("flower-superlink"), "--host", host, "--port", str(port), *tls, *options]


def supernode_command(
    address: str, certificates: Path, key: Path, port: int, config: Mapping[str, str | int]
) -> list[str]:
    """Return the command of a SuperNode; `port` is for its own processes on its machine."""
    node_config = " ".join(f"{name}={json.dumps(value)}" for name, value in config.items())
    tls = ["--root-certificates", str(certificates / "authority.pem")]
    options = ["--host", "127.0.0.1", "--port", str(port), "--auth-supernode-private-key", str(key)]
    return [
        find_program("flower-supernode"),
        "--superlink",
        address,
        *tls,
        *options,
        "--node-config",
        node_config,
    ]


def register_command(public: Path, client: int) -> list[str]:
    """Return the command that registers a node's public key under the name client-N."""
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
    """Return the command that submits a bundle and follows the run."""
    return [find_program("flwr"), "run", str(bundle), CONNECTION, "--stream"]


def submit(
    source: Source,
    settings: Settings,
    folder: Path,
    options: FlowerOptions,
    *,
    record: bool = False,
) -> FederatedRun:
    """Submit a run to a SuperLink and follow it. Flower's output goes to stderr.

    Args:
        source: Where the server finds model and test data.
        settings: The settings of the run.
        folder: The folder of the run on the SuperLink's machine.
        options: The SuperLink, and the times to wait.
        record: Whether the server records what it receives.

    Raises:
        FederatedError: The SuperLink or its authority is missing, or Flower failed.
    """
    if options.superlink is None or options.authority is None:
        raise FederatedError(
            "superlink and authority must be set for a deployment, got None",
            hint="pass flower=FlowerOptions(superlink='HOST:PORT', authority=Path('PEM'))",
        )
    if not options.authority.is_file():
        raise FederatedError(f"authority must be an existing file, got {options.authority}")
    times = {"wait": options.wait, "gather": options.gather}
    with tempfile.TemporaryDirectory() as temporary:
        home, bundle = Path(temporary) / "home", Path(temporary) / "bundle"
        write_connection(home, options.superlink, options.authority)
        write_bundle(bundle, source.to_dict(), settings, folder, record=record, **times)
        code = subprocess.run(
            submit_command(bundle), env=build_environment(home), stdout=sys.stderr, check=False
        ).returncode
    if code:
        raise FederatedError(
            f"Flower exited with code {code}",
            hint="see its output above; the same command resumes from the last round",
        )
    return remote_run(source, settings, folder)


@dataclass
class Loopback:
    """A SuperLink and its SuperNodes on this machine, one process each, with logs in `folder`."""

    folder: Path
    port: int
    home: Path
    node_configs: Sequence[Mapping[str, str | int]]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """The address of the SuperLink."""
        return f"127.0.0.1:{self.port}"

    def start_link(self) -> None:
        """Start the SuperLink, and wait for its port."""
        self._start(
            "superlink",
            superlink_command(
                self.folder / "certificates", self.port, self.folder / "superlink.db"
            ),
        )
        self._await_port()

    def start_node(self, i: int) -> None:
        """Start a SuperNode."""
        key, config = self.folder / f"node-{i}", self.node_configs[i]
        self._start(
            f"node-{i}",
            supernode_command(self.address, self.folder / "certificates", key, free_port(), config),
        )

    def kill(self, name: str) -> None:
        """Kill a process and its descendants; Flower's children run in sessions of their own."""
        process = self.processes.pop(name)
        for pid in (process.pid, *descendants(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def run(self, bundle: Path, log: str = "run") -> subprocess.Popen[bytes]:
        """Submit a bundle, and return the process that follows it to its end."""
        return self._start(log, submit_command(bundle))

    def run_command(self, command: Sequence[str]) -> str:
        """Run a short command of Flower's, and return its output."""
        completed = subprocess.run(
            list(command),
            env=self._environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if completed.returncode:
            raise FederatedError(
                f"{Path(command[0]).name} {command[1]} failed: "
                f"{(completed.stderr or completed.stdout).strip()[-500:]}"
            )
        return completed.stdout

    def log(self, name: str) -> str:
        """Return the log of a process."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _environment(self) -> dict[str, str]:
        # All nodes share the cores of this machine.
        return build_environment(self.home, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))

    def _start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        log: IO[bytes] = (self.folder / f"{name}.log").open("ab")
        with log:
            process = subprocess.Popen(
                list(command),
                env=self._environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def _await_port(self, patience: float = 120.0) -> None:
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if self.processes["superlink"].poll() is not None:
                break
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1),
            ):
                return
            time.sleep(0.2)
        raise FederatedError(f"the SuperLink did not start:\n{self.log('superlink')[-1500:]}")


@contextlib.contextmanager
def loopback(folder: Path, node_configs: Sequence[Mapping[str, str | int]]) -> Iterator[Loopback]:
    """Start a SuperLink with TLS and node authentication, and registered nodes, for a block.

    Certificates and keys are written to `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    certificates = folder / "certificates"
    deployment = Loopback(folder, free_port(), folder / "flower-home", node_configs)
    make_certificates(certificates, clients=())
    write_connection(deployment.home, deployment.address, certificates / "authority.pem")
    try:
        deployment.start_link()
        for i in range(len(node_configs)):
            deployment.run_command(register_command(make_node_key(folder / f"node-{i}"), i))
            deployment.start_node(i)
        yield deployment
    finally:
        for name in list(deployment.processes):
            deployment.kill(name)


def descendants(pid: int) -> list[int]:
    """Return the child processes of a process, recursively."""
    listed = subprocess.run(
        ["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    parents = {
        int(child): int(parent) for child, parent in (line.split() for line in listed.splitlines())
    }
    result, generation = [], [pid]
    while generation:
        generation = [child for child, parent in parents.items() if parent in generation]
        result += generation
    return result


def free_port() -> int:
    """Return a free port on the loopback interface."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])

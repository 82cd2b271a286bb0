"""The client's journal: what it has asked, and what it was told, by number.

In memory it holds the requests that no checkpoint of the server covers yet, so that they can be
sent again. In a folder it also holds the replies, so that a client that was killed and starts again
from a checkpoint of its own is told again what it was told before. A request is written before it
is sent, and a reply before it is used. The folder is for its owner only: it holds what crossed the
wire, and the secret that rows were shuffled by.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from regauge.checkpoints.documents import CONFIG_BYTES, parse_json, read_document
from regauge.checkpoints.files import wrap_read_errors, write_bytes
from regauge.errors import RegaugeError
from regauge.split.protocol.frames import Bytes


class JournalError(RegaugeError):
    """A journal that cannot be read, or that belongs to another run."""


class MemoryJournal:
    """A journal for as long as the process lives."""

    is_persistent = False

    def __init__(self) -> None:
        self.session, self.secret = os.urandom(16).hex(), os.urandom(32)
        self.requests: dict[int, list[bytes]] = {}

    def request(self, n: int) -> list[bytes] | None:
        return self.requests.get(n)

    def reply(self, n: int) -> bytes | None:
        return None

    def put_request(self, n: int, data: list[bytes]) -> None:
        self.requests[n] = data

    def put_reply(self, n: int, data: Bytes) -> None:
        """It was used at once, and is not needed again."""

    def withdraw(self, n: int) -> None:
        """A request that was refused takes no number: another one may have it."""
        self.requests.pop(n, None)

    def abandon(self) -> None:
        """No server took the session: nothing is left of it."""

    def prune(self, saved: int, marked: int) -> None:
        """Drop requests that the server has kept (up to `saved`) and replies that the client's own
        checkpoint is past (up to `marked`).
        """
        for n in [n for n in self.requests if n <= saved]:
            del self.requests[n]


class FolderJournal:
    """A journal on the disk: a file for each request and for each reply."""

    is_persistent = True

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with wrap_read_errors(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = self.path / "session.json"
            self.is_new = not about.exists()
            if self.is_new:
                made = {
                    "regauge": "split journal",
                    "version": 1,
                    "session": os.urandom(16).hex(),
                    "secret": os.urandom(32).hex(),
                }
                write_bytes(about, json.dumps(made).encode(), mode=0o600)
            hint = "name an empty folder to start a new run"
            found = parse_json(
                read_document(about, CONFIG_BYTES, JournalError), about, JournalError, hint
            )
            try:
                if (found["regauge"], found["version"]) != ("split journal", 1):
                    raise ValueError("its kind or version is another")
                self.session, self.secret = found["session"], bytes.fromhex(found["secret"])
                if not isinstance(self.session, str) or not self.session or len(self.secret) != 32:
                    raise ValueError("its session or secret is not one")
            except (ValueError, KeyError, TypeError) as error:
                raise JournalError(f"{about} cannot be read: {error}", hint=hint) from error
        self.stored: dict[str, set[int]] = {"request": set(), "reply": set()}
        for file in self.path.iterdir():
            if file.stem.isdigit() and file.suffix[1:] in self.stored:
                self.stored[file.suffix[1:]].add(int(file.stem))

    def request(self, n: int) -> list[bytes] | None:
        found = self._read("request", n)
        return None if found is None else [found]

    def reply(self, n: int) -> bytes | None:
        return self._read("reply", n)

    def put_request(self, n: int, data: list[bytes]) -> None:
        self._write("request", n, b"".join(data))

    def put_reply(self, n: int, data: Bytes) -> None:
        self._write("reply", n, data)

    def withdraw(self, n: int) -> None:
        self._file_path("request", n).unlink(missing_ok=True)
        self.stored["request"].discard(n)

    def abandon(self) -> None:
        if self.is_new and not self.stored["request"]:
            (self.path / "session.json").unlink(missing_ok=True)

    def prune(self, saved: int, marked: int) -> None:
        # A request is held against what a repeated run asks, so that it stays as long as its reply
        # does.
        upto = {"request": min(saved, marked), "reply": marked}
        for kind, held in self.stored.items():
            for n in [n for n in held if n <= upto[kind]]:
                self._file_path(kind, n).unlink(missing_ok=True)
                held.discard(n)

    def _file_path(self, kind: str, n: int) -> Path:
        return self.path / f"{n:09d}.{kind}"

    def _read(self, kind: str, n: int) -> bytes | None:
        if n not in self.stored[kind]:
            return None
        with wrap_read_errors(self.path):
            return self._file_path(kind, n).read_bytes()

    def _write(self, kind: str, n: int, data: Bytes) -> None:
        write_bytes(self._file_path(kind, n), data, mode=0o600)
        self.stored[kind].add(n)


Journal = MemoryJournal | FolderJournal

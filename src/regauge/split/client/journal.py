"""The client's journal: its requests and their replies, by number.

In memory it holds the requests that no checkpoint of the server covers yet, for a replay after a
crash of the server. In a folder it also holds the replies, so that a client that was killed can
restart from its own checkpoint and receive the same replies again. A request is written before it
is sent, and a reply before it is used. The folder is readable by its owner only: it holds the
activations and gradients that crossed the network, and the secret of the row permutations.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from regauge.checkpoints.documents import CONFIG_BYTES, parse_json, read_document
from regauge.checkpoints.files import wrap_read_errors, write_bytes
from regauge.errors import JournalError
from regauge.split.protocol.frames import Bytes

VERSION = 2  # of the folder; the requests in those of version 1 are frames of version 2


class MemoryJournal:
    """A journal that ends with the process."""

    is_persistent = False

    def __init__(self) -> None:
        self.session, self.secret = os.urandom(16).hex(), os.urandom(32)
        self.requests: dict[int, list[bytes]] = {}

    def request(self, n: int) -> list[bytes] | None:
        """Return the bytes of request `n`, if they are still stored."""
        return self.requests.get(n)

    def reply(self, n: int) -> bytes | None:
        """Return the reply to request `n`, if it is stored."""
        return None

    def put_request(self, n: int, data: list[bytes]) -> None:
        """Store request `n`."""
        self.requests[n] = data

    def put_reply(self, n: int, data: Bytes) -> None:
        """Drop the reply: it is used at once, and never needed again in this process."""

    def withdraw(self, n: int) -> None:
        """Delete a rejected request, so that its number can be used again."""
        self.requests.pop(n, None)

    def abandon(self) -> None:
        """Discard a session that no server accepted."""

    def prune(self, saved: int, checkpointed: int) -> None:
        """Drop requests that the server has saved and replies that are no longer needed.

        Args:
            saved: Last request that a checkpoint of the server covers.
            checkpointed: Last request whose reply the client's own checkpoint includes.
        """
        for n in [n for n in self.requests if n <= saved]:
            del self.requests[n]


class FolderJournal:
    """A journal on disk: one file for each request and for each reply."""

    is_persistent = True

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with wrap_read_errors(self.path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            session_file = self.path / "session.json"
            self.is_new = not session_file.exists()
            if self.is_new:
                session = {
                    "regauge": "split journal",
                    "version": VERSION,
                    "session": os.urandom(16).hex(),
                    "secret": os.urandom(32).hex(),
                }
                write_bytes(session_file, json.dumps(session).encode(), mode=0o600)
            hint = "name an empty folder to start a new run"
            fields = parse_json(
                read_document(session_file, CONFIG_BYTES, JournalError),
                session_file,
                JournalError,
                hint,
            )
            try:
                if (fields["regauge"], fields["version"]) != ("split journal", VERSION):
                    raise ValueError(f"it must be a split journal of version {VERSION}")
                self.session, self.secret = fields["session"], bytes.fromhex(fields["secret"])
                if not isinstance(self.session, str) or not self.session or len(self.secret) != 32:
                    raise ValueError("its session must be a name, its secret 32 bytes in hex")
            except (ValueError, KeyError, TypeError) as error:
                raise JournalError(f"{session_file} cannot be read: {error}", hint=hint) from error
        self.stored: dict[str, set[int]] = {"request": set(), "reply": set()}
        for file in self.path.iterdir():
            if file.stem.isdigit() and file.suffix[1:] in self.stored:
                self.stored[file.suffix[1:]].add(int(file.stem))

    def request(self, n: int) -> list[bytes] | None:
        """Return the bytes of request `n`, if they are still stored."""
        data = self._read("request", n)
        return None if data is None else [data]

    def reply(self, n: int) -> bytes | None:
        """Return the reply to request `n`, if it is stored."""
        return self._read("reply", n)

    def put_request(self, n: int, data: list[bytes]) -> None:
        """Write request `n`."""
        self._write("request", n, b"".join(data))

    def put_reply(self, n: int, data: Bytes) -> None:
        """Write the reply to request `n`."""
        self._write("reply", n, data)

    def withdraw(self, n: int) -> None:
        """Delete a rejected request, so that its number can be used again."""
        self._file_path("request", n).unlink(missing_ok=True)
        self.stored["request"].discard(n)

    def abandon(self) -> None:
        """Delete a new session that no server accepted."""
        if self.is_new and not self.stored["request"]:
            (self.path / "session.json").unlink(missing_ok=True)

    def prune(self, saved: int, checkpointed: int) -> None:
        """Drop requests and replies that are no longer needed (see `MemoryJournal.prune`)."""
        # A repeated run compares its requests with the stored ones, which stay as long as the
        # replies.
        limits = {"request": min(saved, checkpointed), "reply": checkpointed}
        for kind, numbers in self.stored.items():
            for n in [n for n in numbers if n <= limits[kind]]:
                self._file_path(kind, n).unlink(missing_ok=True)
                numbers.discard(n)

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

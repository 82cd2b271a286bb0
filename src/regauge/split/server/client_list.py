"""The clients that a server accepts, as a file that may change while it runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from regauge.checkpoints.files import require_file, wrap_read_errors
from regauge.errors import CheckpointError, RegaugeError
from regauge.split.server.quotas import Quota, read_clients

POLL_SECONDS = 1.0
_MAX_BYTES = 1 << 20
_log = logging.getLogger("regauge.split")


class ClientFile:
    """A list of clients (a name on each line, with an optional quota) that is read again on change.

    A file that is damaged, empty or missing is logged, and the list that was read last stays valid.

    Args:
        path: The file, `clients.txt`.
        default: The quota of clients whose line has none.

    Raises:
        CheckpointError, QuotaError: The file cannot be read at the start.
    """

    def __init__(self, path: Path | str, default: Quota | None = None) -> None:
        self.path, self.default = Path(path), default or Quota()
        self._read_at = self._last = self._signature()
        self.quotas = self._read()
        self._wake, self._is_stopped = threading.Event(), False

    def follow(self, changed: Callable[[], None]) -> None:
        """Call `changed` from a thread of its own whenever a new list was read, until `stop`."""
        threading.Thread(
            target=self._follow, args=(changed,), name="regauge-split-clients", daemon=True
        ).start()

    def reload(self) -> None:
        """Read the file again soon, changed or not. Safe in a signal handler."""
        self._wake.set()

    def stop(self) -> None:
        self._is_stopped = True
        self._wake.set()

    def _follow(self, changed: Callable[[], None]) -> None:
        while True:
            is_asked = self._wake.wait(POLL_SECONDS)
            self._wake.clear()
            if self._is_stopped:
                return
            now = self._signature()
            # An editor may still be writing: a change counts when the file has not changed again.
            is_settled, self._last = now == self._last, now
            if not is_asked and (now == self._read_at or not is_settled):
                continue
            self._read_at = now
            try:
                self.quotas = self._read()
            except RegaugeError as error:
                _log.warning("the list of clients stays as it was: %s", error)
                continue
            changed()

    def _read(self) -> dict[str, Quota]:
        require_file(self.path)
        with wrap_read_errors(self.path), self.path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise CheckpointError(
                f"{self.path} must be at most {_MAX_BYTES:,} bytes, got more",
                hint="write a name on each line",
            )
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.path} must be UTF-8 text, got byte {data[error.start]:#x} at {error.start}",
                hint="write a name on each line",
            ) from error
        named = read_clients(text, self.default)
        if not named:
            raise CheckpointError(
                f"{self.path} names no client, so that nobody could come",
                hint="write a name on each line",
            )
        return named

    def _signature(self) -> tuple[int, ...]:
        try:
            found = self.path.stat()
        except OSError:
            return ()
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

"""The list of clients that a server accepts: a file that may change while the server runs."""

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
    """A file of clients, one name per line with an optional quota, that is reloaded on change.

    If it becomes damaged, empty or missing, this is logged and the last valid list stays in use.

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

    def follow(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` from a background thread after each reload, until `stop`."""
        threading.Thread(
            target=self._follow, args=(on_change,), name="regauge-split-clients", daemon=True
        ).start()

    def reload(self) -> None:
        """Reload the file soon, changed or not. Safe in a signal handler."""
        self._wake.set()

    def stop(self) -> None:
        """End the background thread."""
        self._is_stopped = True
        self._wake.set()

    def _follow(self, on_change: Callable[[], None]) -> None:
        while True:
            is_requested = self._wake.wait(POLL_SECONDS)
            self._wake.clear()
            if self._is_stopped:
                return
            signature = self._signature()
            # An editor may still be writing: wait until the file has stopped changing.
            is_stable, self._last = signature == self._last, signature
            if not is_requested and (signature == self._read_at or not is_stable):
                continue
            self._read_at = signature
            try:
                self.quotas = self._read()
            except RegaugeError as error:
                _log.warning("the list of clients was not reloaded: %s", error)
                continue
            on_change()

    def _read(self) -> dict[str, Quota]:
        """Read and parse the file."""
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
        quotas = read_clients(text, self.default)
        if not quotas:
            raise CheckpointError(
                f"{self.path} must name at least one client, got none",
                hint="write a name on each line",
            )
        return quotas

    def _signature(self) -> tuple[int, ...]:
        """Return what changes with the file's contents; () if it is missing."""
        try:
            stat = self.path.stat()
        except OSError:
            return ()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns

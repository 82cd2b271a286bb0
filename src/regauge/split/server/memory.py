"""Memory budgets of a split server: the bytes that its clients may hold at once.

A budget covers what clients use beyond the model and its training: open passes with their graphs,
generation caches, averaged copies of the backbone, the last replies, and the working memory of the
current request. A request is admitted before its payload is unpacked, by a cost estimated from its
declared shapes (`costs`). Requests are computed one at a time, so that working memory counts once,
as the largest of all open passes: an admitted pass can always have its backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from regauge.checkpoints.files import format_bytes, parse_bytes
from regauge.errors import BudgetError, FrameError, Hint
from regauge.split.protocol.frames import nbytes

if TYPE_CHECKING:
    from regauge.split.server.sessions import Session

# Of the available memory; the rest is for allocators, network buffers and other processes.
FRACTION = 0.5
MIN_BUDGET = 1 << 20  # bytes; less is a typing error
# A frame has at most a fourth of its client's budget: a pass needs several times its bytes.
FRAME_SHARE = 4


@dataclass(frozen=True)
class Cost:
    """Memory of a request in bytes.

    Attributes:
        held: Held until the backward pass.
        working: Needed while the request or its backward pass is computed.
    """

    held: int = 0
    working: int = 0


@dataclass(frozen=True)
class Budget:
    """Bytes for all clients together, and for each client with a certificate.

    Without TLS clients cannot be distinguished, and share the total.
    """

    total: int
    client: int

    def __post_init__(self) -> None:
        if self.total < MIN_BUDGET or not MIN_BUDGET <= self.client <= self.total:
            raise BudgetError(
                f"memory budgets must be at least {format_bytes(MIN_BUDGET)}, and a client's at "
                "most "
                "the server's, "
                f"got {format_bytes(self.client)} per client and {format_bytes(self.total)} for "
                "the server",
                hint=Hint(
                    "raise memory, or lower client_memory",
                    cli="raise --memory, or lower --client-memory",
                ),
            )

    @classmethod
    def with_defaults(
        cls,
        total: int | None = None,
        client: int | None = None,
        *,
        device: torch.device | None = None,
        reserved: int = 0,
    ) -> Budget:
        """Return a budget with defaults for what is None.

        Args:
            total: Bytes of all clients; by default half of the memory that is available on the
                device beyond `reserved`.
            client: Bytes of each client; by default half of the total.
            device: Device of the backbone.
            reserved: Bytes that the backbone and its training will need.
        """
        if total is None:
            total = max(
                MIN_BUDGET, int(FRACTION * (available_memory(device) - reserved)), client or 0
            )
        return cls(total, max(MIN_BUDGET, total // 2) if client is None else client)

    def share(self, peer: str) -> int:
        """Return the budget of a client."""
        return self.client if peer else self.total

    def require(
        self, peer: str, new: Cost, charges: Iterable[tuple[str, Cost]], label: str
    ) -> None:
        """Raise FrameError if a new cost exceeds the budget.

        Args:
            peer: Client of the request.
            new: Its cost.
            charges: Costs that clients hold already, by client.
            label: Name of the request, for the error.

        Raises:
            FrameError: "memory" if the client exceeds its own budget; "busy" if the others hold too
                much at the moment, after which the client retries automatically.
        """
        held, working, own_held, own_working = new.held, new.working, new.held, new.working
        for other, cost in charges:
            held, working = held + cost.held, max(working, cost.working)
            if other == peer:
                own_held, own_working = own_held + cost.held, max(own_working, cost.working)
        limit = self.share(peer)
        if own_held + own_working > limit:
            already_held = own_held - new.held
            beside = (
                f" beside {format_bytes(already_held)} held by open passes, caches and replies"
                if already_held
                else ""
            )
            raise FrameError(
                "memory",
                f"{label} needs about {format_bytes(new.held + own_working)}{beside}, and the "
                "memory "
                f"budget of a client is {format_bytes(limit)}",
                hint="use smaller batches or shorter texts, call backward() on open passes, "
                "or raise "
                f"{'--client-memory' if peer and self.client < self.total else '--memory'} on "
                "the server",
            )
        if held + working > self.total:
            raise FrameError(
                "busy",
                f"{label} needs about {format_bytes(new.held + new.working)}, and clients hold "
                f"{format_bytes(held - new.held)} of the server's memory budget of "
                f"{format_bytes(self.total)}",
                hint="try again later, or raise --memory on the server",
            )


def charges(
    sessions: Mapping[str, Session],
    *,
    copy_bytes: int = 0,
    departed: int = 0,
    exclude: tuple[Session | None, Sequence[object]] = (None, ()),
) -> Iterator[tuple[str, Cost]]:
    """Yield the costs that clients hold, by client.

    Args:
        sessions: All sessions, by name.
        copy_bytes: Bytes of a copy of the backbone with its optimizer.
        departed: Number of ended sessions whose weights the round's mean still needs; these are
            charged to no client.
        exclude: A session, and the numbers of its open passes that do not count.
    """
    for session in list(sessions.values()):  # metrics are read without the lock
        yield (
            session.peer,
            Cost(len(session.reply) + (0 if session.backbone is None else copy_bytes)),
        )
        for n, pending in list(session.pending.items()):
            if session is not exclude[0] or n not in exclude[1]:
                yield session.peer, pending.cost or Cost(nbytes(pending.request))
        for cache in list(session.caches.values()):
            yield session.peer, Cost(cache.held)
    if departed:
        yield "", Cost(departed * copy_bytes)


def available_memory(device: torch.device | None = None) -> int:
    """Return the bytes that this process can still allocate.

    On a GPU this is its free memory, elsewhere the least of the machine's and its cgroups'.
    """
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(
        _machine_memory(), *_cgroup_memory(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    )


def _machine_memory() -> int:
    """Return the machine's available memory, or else all of it."""
    import os

    try:
        match = re.search(
            r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE
        )
        if match:
            return int(match[1]) << 10
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 << 30


def _cgroup_memory(cgroup_file: Path, root: Path) -> list[int]:
    """Return the remaining bytes of each cgroup limit (version 2, and version 1's controller)."""
    try:
        lines = cgroup_file.read_text().splitlines()
    except OSError:
        return [1 << 62]
    remaining = [1 << 62]
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base, limit, usage = (
            (root, "memory.max", "memory.current")
            if not controllers
            else (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder != base and base not in folder.parents:
                break
            try:
                remaining.append(
                    max(0, int((folder / limit).read_text()) - int((folder / usage).read_text()))
                )
            except (OSError, ValueError):  # "max", or a path of another namespace
                continue
    return remaining


def read_size(text: str) -> int:
    """Parse a size such as 500M, 8G or 8GiB; return the bytes.

    Raises:
        BudgetError: The text is not a size.
    """
    size = parse_bytes(text)
    if size is None:
        raise BudgetError(
            f"a size must be a number of bytes with a unit, got {text[:40]!r}",
            hint="write 500M, 8G or 8GiB",
        )
    return size

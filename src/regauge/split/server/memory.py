"""Memory budgets of a split server: how many bytes its clients may hold at once.

A budget covers what clients cause beyond the model and its training: open passes with their graphs,
caches of generated texts, copies of the backbone that are averaged, the last replies, and the
working memory of the request that is computed. A request is admitted before its payload is
unpacked, by a cost estimated from its declared shapes (`costs`). Requests are computed one at a
time, so that working memory counts once, as the largest of all open passes: a pass that was
admitted can always have its backward pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from regauge.checkpoints.files import format_bytes
from regauge.errors import RegaugeError
from regauge.split.protocol.frames import FrameError, nbytes

if TYPE_CHECKING:
    from regauge.split.server.sessions import Session

FRACTION = (
    0.5  # of the available memory; the rest is for allocators, network buffers and other processes
)
MIN_BUDGET = 1 << 20  # bytes of a budget; less is a typing error
# a frame has at most a fourth of its client's budget, since a pass needs several times its bytes
FRAME_SHARE = 4
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class BudgetError(RegaugeError):
    """A memory budget that cannot be read or used."""


@dataclass(frozen=True)
class Cost:
    """Bytes that are held until the backward pass, and bytes that are needed while the request or
    its backward pass is computed.
    """

    held: int = 0
    working: int = 0


@dataclass(frozen=True)
class Budget:
    """Bytes for all clients together, and for each that is known by its certificate. Without TLS
    all clients are one, with the whole budget.
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
                hint="raise --memory, or lower --client-memory",
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
        """Return a budget; by default half of the memory that is available beyond `reserved` bytes,
        and half of that for each client.
        """
        if total is None:
            total = max(
                MIN_BUDGET, int(FRACTION * (available_memory(device) - reserved)), client or 0
            )
        return cls(total, max(MIN_BUDGET, total // 2) if client is None else client)

    def share(self, peer: str) -> int:
        return self.client if peer else self.total

    def require(self, peer: str, new: Cost, charges: Iterable[tuple[str, Cost]], what: str) -> None:
        """Admit a new cost beside what clients hold already, or raise a `FrameError`: "memory" if
        the client itself is over its budget, "busy" if the others hold too much at the moment, upon
        which a client tries again by itself.
        """
        held, working, own_held, own_working = new.held, new.working, new.held, new.working
        for other, cost in charges:
            held, working = held + cost.held, max(working, cost.working)
            if other == peer:
                own_held, own_working = own_held + cost.held, max(own_working, cost.working)
        limit = self.share(peer)
        if own_held + own_working > limit:
            used = own_held - new.held
            beside = (
                f" beside {format_bytes(used)} held by open passes, caches and replies"
                if used
                else ""
            )
            raise FrameError(
                "memory",
                f"{what} needs about {format_bytes(new.held + own_working)}{beside}, and the "
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
                f"{what} needs about {format_bytes(new.held + new.working)}, and clients hold "
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
    """Yield what clients hold, by client.

    Args:
        sessions: All sessions, by name.
        copy: Bytes of a copy of the backbone with its optimizer.
        left: How many sessions ended in a round whose mean still needs their weights; those are
        charged to no client.
        without: A session, and the numbers of its open passes that do not count.
    """
    for session in list(sessions.values()):  # metrics are read while requests are answered
        yield (
            session.peer,
            Cost(len(session.reply) + (0 if session.backbone is None else copy_bytes)),
        )
        for n, passed in list(session.pending.items()):
            if session is not exclude[0] or n not in exclude[1]:
                yield session.peer, passed.cost or Cost(nbytes(passed.request))
        for cache in list(session.caches.values()):
            yield session.peer, Cost(cache.held)
    if departed:
        yield "", Cost(departed * copy_bytes)


def available_memory(device: torch.device | None = None) -> int:
    """Return the bytes that this process can still allocate: on a GPU its free memory, elsewhere
    the least of the machine's and its cgroups'.
    """
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min(
        _machine_memory(), *_cgroup_memory(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    )


def _machine_memory() -> int:
    import os

    try:
        found = re.search(
            r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE
        )
        if found:
            return int(found[1]) << 10
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 4 << 30


def _cgroup_memory(listed: Path, root: Path) -> list[int]:
    """Return what is left below each limit of this process's cgroups (version 2, and the memory
    controller of version 1).
    """
    try:
        lines = listed.read_text().splitlines()
    except OSError:
        return [1 << 62]
    out = [1 << 62]
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base, limit, usage = (
            (root, "memory.max", "memory.current")
            if not controllers
            else (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            if folder != base and base not in folder.parents:
                break
            try:
                out.append(
                    max(0, int((folder / limit).read_text()) - int((folder / usage).read_text()))
                )
            except (OSError, ValueError):  # "max", or a path of another namespace
                continue
    return out


def read_size(text: str) -> int:
    """Return the bytes that a size names: 500M, 8G, 8GiB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip(), re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise BudgetError(
            f"a size must be a number of bytes with a unit, got {text[:40]!r}",
            hint="write 500M, 8G or 8GiB",
        )
    return int(float(found[1]) * (_BINARY if found[3] else _UNITS)[found[2].lower()])

"""Counters of the outcomes of mutated inputs, mutation of bytes, and the peak memory of child
processes.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from regauge.errors import RegaugeError

HANG_SECONDS = 10
MEMORY_FACTOR = 3.0


@dataclass(frozen=True)
class Outcome:
    """The counts of one scenario. `peak_mb` is the largest growth over the process's idle memory,
    `budget_mb` the scenario's limit.
    """

    name: str
    trials: int = 0
    rejected: int = 0  # a typed error
    accepted: int = 0  # the input was valid, and the result was checked
    untyped: int = 0  # any other exception, or a traceback in a child process
    hangs: int = 0  # longer than HANG_SECONDS
    lost: int = 0  # the result was wrong, or an earlier output was damaged
    seconds: float = 0.0
    peak_mb: float | None = None
    budget_mb: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        within = (
            self.peak_mb is None
            or self.budget_mb is None
            or self.peak_mb <= MEMORY_FACTOR * self.budget_mb
        )
        return self.trials > 0 and not (self.untyped or self.hangs or self.lost) and within

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


class HangError(BaseException):
    """Raised by the alarm. Not an `Exception`, so that no handler of the code under test swallows
    it.
    """


@dataclass
class Counter:
    """Collects trials into an `Outcome`.

    Example:
        count = Counter("key files")
        for data in mutants(good, seed=1, count=10_000):
            count.trial(lambda: parses_as_before(data), data)
        return count.outcome()
    """

    name: str
    hang_seconds: float = HANG_SECONDS
    _outcome: Outcome = field(init=False)
    _start: float = field(init=False)
    _noted: set[tuple[str, str]] = field(init=False, default_factory=set)  # one note for each place

    def __post_init__(self) -> None:
        self._outcome, self._start = Outcome(self.name), time.monotonic()

    def trial(self, run: Callable[[], bool], data: bytes = b"") -> None:
        """Run one trial on the main thread. `run` returns whether the result is right, or raises a
        typed error.
        """

        def stop(number: int, frame: FrameType | None) -> None:
            raise HangError

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, self.hang_seconds)
        what = place = ""
        try:
            kind = "accepted" if run() else "lost"
        except RegaugeError:
            kind = "rejected"
        except HangError as error:
            kind, place = "hangs", _place(error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in a Rust library is a BaseException
            kind, what, place = (
                "untyped",
                f"{type(error).__name__}: {str(error)[:200]}",
                _place(error),
            )
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        if kind in ("accepted", "rejected") or (kind, place) in self._noted:
            self.add(kind)
            return
        if place:
            self._noted.add((kind, place))
        self.add(kind, f"{kind}: {what} at {place or 'the result'}, input {data[:300]!r}")

    def add(self, kind: str, note: str | None = None) -> None:
        """Count one trial of a kind: accepted, rejected, untyped, hangs or lost."""
        o = self._outcome
        notes = o.notes if note is None or len(o.notes) >= 5 else (*o.notes, note)
        self._outcome = replace(o, trials=o.trials + 1, notes=notes, **{kind: getattr(o, kind) + 1})

    def peak(self, mb: float, budget_mb: float) -> None:
        """Record the peak memory of a trial. The largest ratio to its budget is reported."""
        o = self._outcome
        if o.peak_mb is None or o.budget_mb is None or mb / budget_mb > o.peak_mb / o.budget_mb:
            self._outcome = replace(o, peak_mb=mb, budget_mb=budget_mb)

    def outcome(self) -> Outcome:
        return replace(self._outcome, seconds=round(time.monotonic() - self._start, 1))


def _place(error: BaseException) -> str:
    """Return the innermost line of regauge in a traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/regauge/" in f.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"


WORDS = (
    b"0",
    b"9",
    b"-1",
    b"1e999",
    b"null",
    b"true",
    b'"',
    b"{",
    b"}",
    b"[",
    b",",
    b"\\u0000",
    b"\\ud800",
    b"\xff",
    b"99999999999999999999",
    b"NaN",
    b"\n",
)


def mutants(good: bytes, seed: int, count: int, focus: int | None = None) -> Iterator[bytes]:
    """Yield mutants: flip bits, change bytes, delete, duplicate, swap and truncate ranges, insert
    words; mostly within the first `focus` bytes.
    """
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            top = max(
                1, len(data) if focus is None or rng.random() < 0.3 else min(focus, len(data))
            )
            at, n = rng.randrange(top), rng.randrange(1, 9)
            match rng.randrange(7):
                case 0 if data:
                    data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)])
                case 1:
                    data[at : at + 1] = bytes([rng.randrange(256)])
                case 2:
                    del data[at : at + n]
                case 3:
                    data[at:at] = data[at : at + n]
                case 4:
                    data[at : at + rng.choice((0, 1, n))] = rng.choice(WORDS)
                case 5:
                    del data[at:]
                case 6:
                    other = rng.randrange(top)
                    data[at : at + n], data[other : other + n] = (
                        data[other : other + n],
                        data[at : at + n],
                    )
        yield bytes(data)


@dataclass(frozen=True)
class ChildRun:
    """The result of a child process: exit code, seconds, peak resident memory and output. `code` is
    None if it timed out.
    """

    code: int | None
    seconds: float
    peak_mb: float
    stdout: str
    stderr: str


# A forked child's ru_maxrss starts at the resident set of its parent, which has loaded torch. So a
# small process in between waits for the child.
_WAITER = """
import json, resource, subprocess, sys
command, out, err, seconds = json.loads(sys.argv[1])
with open(out, "wb") as o, open(err, "wb") as e:
    try:
        files = dict(stdin=subprocess.DEVNULL, stdout=o, stderr=e)
        code = subprocess.run(command, timeout=seconds, **files).returncode
    except subprocess.TimeoutExpired:
        code = None
print(json.dumps([code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]))
"""


def run_child(command: Sequence[str], folder: Path, seconds: float = 60) -> ChildRun:
    """Run a command with no standard input and measure its peak resident memory (Linux: ru_maxrss
    in kB).
    """
    out, err = folder / ".soak-stdout", folder / ".soak-stderr"
    start = time.monotonic()
    waiter = [
        sys.executable,
        "-c",
        _WAITER,
        json.dumps([list(command), str(out), str(err), seconds]),
    ]
    code, peak = json.loads(
        subprocess.run(waiter, capture_output=True, text=True, check=True).stdout
    )
    texts = [path.read_text(errors="replace") for path in (out, err)]
    for path in (out, err):
        path.unlink()
    return ChildRun(code, time.monotonic() - start, peak, *texts)


def table(outcomes: Sequence[Outcome]) -> str:
    """Format outcomes as the Markdown table that is printed and quoted in SECURITY.md."""
    lines = [
        (
            "| scenario | trials | rejected | accepted | untyped | hangs | lost | peak / budget "
            "(MB) | seconds | |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for o in outcomes:
        memory = "" if o.peak_mb is None else f"{o.peak_mb:,.0f} / {o.budget_mb:,.0f}"
        counts = " | ".join(
            f"{n:,}" for n in (o.trials, o.rejected, o.accepted, o.untyped, o.hangs, o.lost)
        )
        lines.append(
            f"| {o.name} | {counts} | {memory} | {o.seconds:,.0f} | "
            f"{'ok' if o.passed else 'FAILED'} |"
        )
    return "\n".join(lines)

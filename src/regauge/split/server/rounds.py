"""Rounds of averaging (SplitFed): a copy of the backbone per session, averaged after each round.

Without `average` there is one backbone for all sessions. With it, every session that trains has its
own copy and optimizer, and all copies become their mean after `average` steps of each. Sessions
then wait for each other: one that has taken its steps receives "busy" until the others have taken
theirs, so that the result does not depend on their speed. A session joins with its first training
request. It leaves when it ends, or after `away` seconds without a request while others wait; its
steps in the round then weigh by their number. Moments, accumulated gradients and the schedule stay
with each session and are not averaged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import torch

from regauge.errors import FrameError, Hint, TrainingError
from regauge.split.server.backbone import TrainableBackbone, weighted_mean
from regauge.split.server.sessions import Session

Tensor = torch.Tensor
_log = logging.getLogger("regauge.split")


class Rounds:
    """The backbones of a server: the main one, and the sessions' copies.

    Args:
        main: The main backbone.
        sessions: All sessions, by name; shared with the host.
        prepare: Called with each backbone before its first use.
        average: Steps of a round; 0 for no averaging.
        away: Seconds without a request after which a round no longer waits for a session.
        max_sessions: Largest number of departed sessions that a round includes.

    Raises:
        TrainingError: `average` is negative, or nothing is trained.
    """

    def __init__(
        self,
        main: TrainableBackbone,
        sessions: Mapping[str, Session],
        prepare: Callable[[TrainableBackbone], None],
        *,
        average: int,
        away: float,
        max_sessions: int,
    ) -> None:
        if average < 0 or (average and main.optimizer is None):
            raise TrainingError(
                f"average must be >= 0, and 0 without training, got {average}",
                hint=Hint(
                    "pass training=OptimizerConfig(...), or leave out average",
                    cli="train with --lr, or leave out --average",
                ),
            )
        self.main, self.sessions, self.prepare = main, sessions, prepare
        self.average, self.away, self.max_sessions = average, away, max_sessions
        # Steps and weights of sessions that ended in this round.
        self.departed: dict[str, tuple[int, dict[str, Tensor]]] = {}
        prepare(main)

    def backbone_of(self, session: Session) -> TrainableBackbone:
        """Return the backbone that a session uses."""
        return session.backbone or self.main

    def backbones(self) -> list[TrainableBackbone]:
        """Return the main backbone and all copies."""
        return [self.main, *(s.backbone for s in self.sessions.values() if s.backbone is not None)]

    def copy_main(self) -> TrainableBackbone:
        """Return a new, prepared copy of the main backbone."""
        backbone = self.main.copy()
        self.prepare(backbone)
        return backbone

    def invalidate_passes(self, backbone: TrainableBackbone) -> None:
        """Drop the graphs of open passes whose weights have changed.

        They are run again when their gradients arrive.
        """
        for session in self.sessions.values():
            if self.backbone_of(session) is backbone:
                for pending in session.pending.values():
                    pending.output, pending.inputs = None, {}

    def needs_copy(self, session: Session) -> bool:
        """Return whether `join` will create a copy for a session."""
        return (
            bool(self.average)
            and session.backbone is None
            and len(self.departed) < self.max_sessions
        )

    def join(self, session: Session) -> bool:
        """Give a session its own copy, if there is room; return whether it is new."""
        if not self.average:
            return False
        session.is_away = False
        if not self.needs_copy(session):
            return False
        session.backbone = self.copy_main()
        return True

    def require_turn(self, session: Session) -> bool:
        """Check that a session may take another step in this round.

        If all sessions that it would wait for are away, the round is closed instead.

        Returns:
            Whether the round was closed.

        Raises:
            FrameError: "busy" if the session has to wait for others.
        """
        if not self.average or (
            session.backbone is not None and session.backbone.steps_since_mean < self.average
        ):
            return False
        late = [
            s
            for s in self._members()
            if s.backbone is not None and s.backbone.steps_since_mean < self.average
        ]
        for other in late:
            other.is_away = time.monotonic() - other.last_seen > self.away
        if (late and not any(other.is_away for other in late)) or not self.try_close():
            raise FrameError(
                "busy",
                f"the round ends when {len(late)} more sessions have taken {self.average} steps",
                hint="retry later",
            )
        return True

    def leave(self, name: str, session: Session) -> None:
        """Remove a session that has ended; its steps still count in this round."""
        if session.backbone is not None and session.backbone.steps_since_mean:
            self.departed[name] = (
                session.backbone.steps_since_mean,
                {n: p.detach().clone() for n, p in session.backbone.masters.items()},
            )
        self.try_close()

    def try_close(self) -> bool:
        """Average all copies if every member has taken its steps; return whether it was done."""
        if not self.average or any(
            s.backbone.steps_since_mean < self.average
            for s in self._members()
            if s.backbone is not None
        ):
            return False
        try:
            mean = self.mean()
        except (RuntimeError, MemoryError) as error:
            # The step that completed the round stays valid; the next request tries again.
            _log.warning("the round's mean could not be computed: %s", type(error).__name__)
            return False
        if not mean:
            return False
        for backbone in self.backbones():
            backbone.set_masters(mean)
            backbone.steps_since_mean = 0
            self.invalidate_passes(backbone)
        self.departed = {}
        return True

    def mean(self) -> dict[str, Tensor]:
        """Return the mean of the round so far, or an empty dict if there were no steps.

        It is added up in the order of the sessions' names, so that it is reproducible.
        """
        contributions: dict[str, tuple[int, Mapping[str, Tensor]]] = dict(self.departed)
        contributions |= {
            n: (s.backbone.steps_since_mean, s.backbone.masters)
            for n, s in self.sessions.items()
            if s.backbone is not None and s.backbone.steps_since_mean
        }
        return (
            weighted_mean([contributions[name] for name in sorted(contributions)])
            if contributions
            else {}
        )

    def _members(self) -> list[Session]:
        """Return the sessions that the current round waits for."""
        return [s for s in self.sessions.values() if s.backbone is not None and not s.is_away]

"""Whose backbone learns: one for all, or a copy for each session, and all copies become their mean
at the end of a round (SplitFed).

With `average` every session that trains has a copy of the backbone and an optimizer of its own, and
all copies become their mean after so many steps of each. Here sessions do wait: one that has taken
its steps is told "busy" until the others have taken theirs, so that what comes out does not depend
on who was quick. The first request that a session trains with makes it a member; the end of it, or
a silence of `away` seconds while others wait, takes it out, and the steps that it has taken in the
round count by their number. Moments, waiting gradients and the schedule stay with each session, and
are not averaged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import torch

from regauge.split.protocol.frames import FrameError
from regauge.split.server.backbone import TrainableBackbone, weighted_mean
from regauge.split.server.optimizer_config import TrainingError
from regauge.split.server.sessions import Session

Tensor = torch.Tensor
_log = logging.getLogger("regauge.split")


class Rounds:
    """The learners of a server: `main`, and the copies of its `sessions`, at most `most` of them.
    `ready` is done to each.
    """

    def __init__(
        self,
        main: TrainableBackbone,
        sessions: Mapping[str, Session],
        ready: Callable[[TrainableBackbone], None],
        *,
        average: int,
        away: float,
        max_sessions: int,
    ) -> None:
        if average < 0 or (average and main.optimizer is None):
            raise TrainingError(
                "there is nothing to average where nothing is trained",
                hint="give the server an optimizer and a rate",
            )
        self.main, self.sessions, self.prepare = main, sessions, ready
        self.average, self.away, self.max_sessions = average, away, max_sessions
        self.departed: dict[
            str, tuple[int, dict[str, Tensor]]
        ] = {}  # what those who are gone have done in this round
        ready(main)

    def backbone_of(self, session: Session) -> TrainableBackbone:
        return session.backbone or self.main

    def backbones(self) -> list[TrainableBackbone]:
        return [self.main, *(s.backbone for s in self.sessions.values() if s.backbone is not None)]

    def copy_main(self) -> TrainableBackbone:
        learner = self.main.copy()
        self.prepare(learner)
        return learner

    def invalidate_passes(self, learner: TrainableBackbone) -> None:
        """The weights have changed: passes that are open are run again when their gradients
        come.
        """
        for session in self.sessions.values():
            if self.backbone_of(session) is learner:
                for passed in session.pending.values():
                    passed.output, passed.inputs = None, {}

    def needs_copy(self, session: Session) -> bool:
        """Return whether `join` will make a copy for a session."""
        return (
            bool(self.average)
            and session.backbone is None
            and len(self.departed) < self.max_sessions
        )

    def join(self, session: Session) -> bool:
        """Make a session a member if it is none and there is room. Is it new?"""
        if not self.average:
            return False
        session.is_away = False
        if not self.needs_copy(session):
            return False
        session.backbone = self.copy_main()
        return True

    def require_turn(self, session: Session) -> bool:
        """Let a session wait that has taken its steps of the round, unless those whom it waits for
        are away: then the round ends. Has it, by this?
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
                f"the round ends when {len(late)} more have taken {self.average} steps",
                hint="wait for them",
            )
        return True

    def leave(self, name: str, session: Session) -> None:
        """What a session that is no more has done in this round stays in the round."""
        if session.backbone is not None and session.backbone.steps_since_mean:
            self.departed[name] = (
                session.backbone.steps_since_mean,
                {n: p.detach().clone() for n, p in session.backbone.masters.items()},
            )
        self.try_close()

    def try_close(self) -> bool:
        """If all members have taken their steps, all copies become the mean."""
        if not self.average or any(
            s.backbone.steps_since_mean < self.average
            for s in self._members()
            if s.backbone is not None
        ):
            return False
        try:
            found = self.mean()
        except (
            RuntimeError,
            MemoryError,
            # the step that ended the round counts all the same; the next request tries again
        ) as error:
            _log.warning("the round's mean could not be computed: %s", type(error).__name__)
            return False
        if not found:
            return False
        for learner in self.backbones():
            learner.set_masters(found)
            learner.steps_since_mean = 0
            self.invalidate_passes(learner)
        self.departed = {}
        return True

    def mean(self) -> dict[str, Tensor]:
        """The mean of the round so far; empty where nothing was done in it. It is added up in the
        order of the sessions' names, always.
        """
        held: dict[str, tuple[int, Mapping[str, Tensor]]] = dict(self.departed)
        held |= {
            n: (s.backbone.steps_since_mean, s.backbone.masters)
            for n, s in self.sessions.items()
            if s.backbone is not None and s.backbone.steps_since_mean
        }
        return weighted_mean([held[name] for name in sorted(held)]) if held else {}

    def _members(self) -> list[Session]:
        return [s for s in self.sessions.values() if s.backbone is not None and not s.is_away]

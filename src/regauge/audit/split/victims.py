"""Victims: a client and a server of split learning in one process, through the same bytes as on a
wire, with all that the server sees written down.

    pair = stand(model, "low-pass=0.1+rows", Training("adamw", 1e-3), seed=0)
    pair.train(examples, Run(steps, batch))
    pair.measure(test, batch)                         # utility: the defences act in the test too
    pair.watch(images, batch)                         # what the server sees of these images, pass
    by pass

A combination of defences is a text, "pixel-noise=0.5+rows"; "none" is none.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from regauge.attacks.views import ServerPass
from regauge.data.tasks import Examples, logits_of
from regauge.defences.parser import NONE, split_combination
from regauge.defences.split import BatchShuffle, Defence, Rows, parse_defences
from regauge.split import Host, InProcess, OptimizerConfig, RemoteBackbone, connect
from regauge.split.client.train import Run, measure, train
from regauge.split.protocol.frames import Frame, Kind

Tensor = torch.Tensor


def parse_combination(combination: str) -> tuple[Defence, ...]:
    """The defences of a combination, in the order in which they act."""
    return () if combination == NONE else parse_defences([combination])


def is_shuffled(combination: str) -> bool:
    """Do tokens leave their places?"""
    return any(isinstance(d, Rows | BatchShuffle) for d in parse_combination(combination))


class RecordingHost:
    """A server that writes down what it is sent while `is_on`: the tensors of each pass, and the
    gradient that comes for it.
    """

    def __init__(self, host: Host) -> None:
        self.host, self.limits, self.is_recording = host, host.limits, False
        self.passes: list[ServerPass] = []
        self._open: dict[int, int] = {}

    def answer(self, frame: Frame, peer: str = "") -> bytes:
        if self.is_recording and frame.kind is Kind.FORWARD:
            tensors = {name: t.clone() for name, t in frame.tensors.items()}
            stream = next(
                b.stream
                for b in self.host.main.cut.boundaries
                if b.name == frame.values["boundary"]
            )
            self._open[frame.number] = len(self.passes)
            self.passes.append(ServerPass(tensors.pop(stream), tensors))
        if (
            self.is_recording
            and frame.kind is Kind.BACKWARD
            and frame.values.get("of") in self._open
        ):
            place = self._open[frame.values["of"]]  # type: ignore[index]
            seen = self.passes[place]
            self.passes[place] = ServerPass(
                seen.stream, seen.others, frame.tensors["stream"].clone()
            )
        return self.host.answer(frame, peer)


@dataclass(eq=False)
class Pair:
    """A client and its server. `training` is how both sides learn; without it they only serve."""

    model: torch.nn.Module
    server: RecordingHost
    link: RemoteBackbone
    combination: str
    training: OptimizerConfig | None
    losses: list[float] = field(default_factory=list)

    def train(
        self,
        examples: Examples,
        run: Run,
        on_step: Callable[[int, float], None] | None = None,
        record_first: int = 0,
    ) -> list[ServerPass]:
        """Train, and return what the server saw of the first `watch_first` steps."""
        assert self.training is not None

        def record(step: int, loss: float) -> None:
            self.server.is_recording = step < record_first
            if on_step is not None:
                on_step(step, loss)

        self.server.is_recording = record_first > 0
        self.losses = train(
            self.model,
            self.link,
            drop_singleton_batch(examples, run.batch_size),
            self.training,
            run,
            on_step=record,
        )
        return self._take_passes()

    def measure(self, examples: Examples, batch: int) -> dict[str, float]:
        """Loss and accuracy in use, with the defences."""
        self._seed_predictions("test")
        return measure(self.model, drop_singleton_batch(examples, batch), batch)

    def record_features(self, images: Tensor, batch: int, label: str) -> Tensor:
        """What the server sees of images, [images, tokens, channels], as it stands in the passes.
        `label` is what is drawn afresh by.
        """
        passes = self.record_passes(
            [{"pixel_values": part} for part in split_batches(images, batch)], label
        )
        return torch.cat([p.stream for p in passes]).float().cpu()

    def record_passes(self, inputs: Sequence[Mapping[str, Tensor]], label: str) -> list[ServerPass]:
        """What the server sees of predictions, pass by pass."""
        self._seed_predictions(label)
        self.model.eval()
        self.server.is_recording = True
        like = next(p for p in self.model.parameters() if p.is_floating_point())
        with torch.no_grad():
            for given in inputs:
                logits_of(
                    self.model,
                    {
                        k: v.to(like) if v.is_floating_point() else v.to(like.device)
                        for k, v in given.items()
                    },
                )
        return self._take_passes()

    def state(self) -> dict[str, Tensor]:
        """The whole model: the client's embedding and head, the server's backbone."""
        return {
            **{n: t.detach().clone() for n, t in self.model.state_dict().items()},
            **self.server.host.backbone(),
        }

    def _seed_predictions(self, label: str) -> None:
        """So that a measurement can be repeated: what a prediction draws is told by its label and
        its place, and not by the system's randomness.
        """
        count = itertools.count()
        self.link.make_nonce = lambda: f"{label}/{next(count)}"

    def _take_passes(self) -> list[ServerPass]:
        self.server.is_recording = False
        found, self.server.passes = self.server.passes, []
        return found


def drop_singleton_batch(examples: Examples, batch: int) -> Examples:
    """Examples whose last batch is not one example alone, which could change places with none: it
    is left out.
    """
    return (
        examples.only(range(len(examples) - 1))
        if batch > 1 and len(examples) % batch == 1
        else examples
    )


def split_batches(images: Tensor, batch: int) -> list[Tensor]:
    """Likewise, but all are in: the last two batches are one then."""
    found = list(torch.split(images, batch))
    return [*found[:-2], torch.cat(found[-2:])] if len(found) > 1 and len(found[-1]) == 1 else found


def make_split_pair(
    model: torch.nn.Module,
    combination: str,
    training: OptimizerConfig | None = None,
    *,
    seed: int = 0,
) -> Pair:
    """A client with this model, which is used and trained in place, and a server with a copy of its
    backbone. Drawn from the seed.
    """
    server = RecordingHost(Host(copy.deepcopy(model), training))
    link = connect(model, InProcess(server), defences=parse_combination(combination), secret=seed)  # type: ignore[arg-type]
    return Pair(model, server, link, combination, training)


def drop_shuffles(combination: str) -> str:
    """The same combination with all tokens in their places."""
    kept = [
        text
        for text in split_combination(combination)
        if text.partition("=")[0] not in ("rows", "batch-shuffle")
    ]
    return "+".join(kept) or NONE


def defend_images(combination: str, images: Tensor, batch: int) -> Tensor:
    """Images after the defences that act on them, drawn as an attacker draws who knows which they
    are.
    """
    from regauge.defences.split import KeyedRandom

    chosen: Sequence[Defence] = [d for d in parse_combination(combination) if d.stage == 0]
    for n, defence in enumerate(chosen):
        images = torch.cat(
            [
                defence.apply_to_images(part, KeyedRandom(bytes(32), f"{n}/{i}"))
                for i, part in enumerate(torch.split(images, batch))
            ]
        )
    return images

"""Victims: a client and a server of split learning in one process, with recorded passes.

They exchange the same bytes as over a network.

    pair = make_split_pair(model, "low-pass=0.1+rows", OptimizerConfig("adamw", 1e-3), seed=0)
    pair.train(examples, Run(steps, batch))
    pair.measure(test, batch)  # utility; the defences are active in the test too
    pair.record_features(images, batch, "label")  # the features that the server receives

A combination of defences is a text such as "pixel-noise=0.5+rows"; "none" has no defence.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from regauge.attacks.views import ServerPass
from regauge.audit.inputs import cast_inputs
from regauge.data.evaluate import evaluate_model
from regauge.data.tasks import Examples, logits_of
from regauge.defences.parser import NONE, split_combination
from regauge.defences.split import BatchShuffle, Defence, Rows, parse_defences
from regauge.split import Host, InProcess, OptimizerConfig, RemoteBackbone, connect
from regauge.split.client.train import Run, train
from regauge.split.protocol.frames import Frame, Kind

Tensor = torch.Tensor


def parse_combination(combination: str) -> tuple[Defence, ...]:
    """Return the defences of a combination, in the order in which they act."""
    return () if combination == NONE else parse_defences([combination])


def is_shuffled(combination: str) -> bool:
    """Return whether a combination shuffles tokens."""
    return any(isinstance(d, Rows | BatchShuffle) for d in parse_combination(combination))


def has_batch_shuffle(combination: str) -> bool:
    """Return whether a combination shuffles tokens between the samples of a batch."""
    return any(isinstance(d, BatchShuffle) for d in parse_combination(combination))


class RecordingHost:
    """A server that records, while `is_recording`, the tensors and the gradient of each pass."""

    def __init__(self, host: Host) -> None:
        self.host, self.limits, self.is_recording = host, host.limits, False
        self.passes: list[ServerPass] = []
        self._open: dict[int, int] = {}

    def answer(self, frame: Frame, peer: str = "") -> bytes:
        """Record a frame, and let the host answer it."""
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
            index = self._open[frame.values["of"]]  # type: ignore[index]
            recorded = self.passes[index]
            self.passes[index] = ServerPass(
                recorded.stream, recorded.others, frame.tensors["stream"].clone()
            )
        return self.host.answer(frame, peer)


@dataclass(eq=False)
class Pair:
    """A client and its server; without `training`, the optimizer of both, they only predict."""

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
        """Train, and return the recorded passes of the first `record_first` steps.

        Args:
            examples: The examples of the client.
            run: The number of steps, the batch size and the seed.
            on_step: Callback after each step, with its loss.
            record_first: The number of steps to record.
        """
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
        """Return loss and accuracy with the defences."""
        self._seed_predictions("test")
        return evaluate_model(self.model, drop_singleton_batch(examples, batch), batch)

    def record_features(self, images: Tensor, batch: int, label: str) -> Tensor:
        """Return the features that the server receives, [images, tokens, channels].

        Predictions with different labels have different noise and shuffles.
        """
        passes = self.record_passes(
            [{"pixel_values": part} for part in split_batches(images, batch)], label
        )
        return torch.cat([p.stream for p in passes]).float().cpu()

    def record_passes(self, inputs: Sequence[Mapping[str, Tensor]], label: str) -> list[ServerPass]:
        """Run predictions, and return the passes that the server receives."""
        self._seed_predictions(label)
        self.model.eval()
        self.server.is_recording = True
        with torch.no_grad():
            for batch in inputs:
                logits_of(self.model, cast_inputs(self.model, batch))
        return self._take_passes()

    def state(self) -> dict[str, Tensor]:
        """Return the full model: the client's embedding and head, the server's backbone."""
        return {
            **{n: t.detach().clone() for n, t in self.model.state_dict().items()},
            **self.server.host.backbone(),
        }

    def _seed_predictions(self, label: str) -> None:
        """Derive the randomness of predictions from a label and a counter, for repeatability."""
        count = itertools.count()
        self.link.make_nonce = lambda: f"{label}/{next(count)}"

    def _take_passes(self) -> list[ServerPass]:
        self.server.is_recording = False
        passes, self.server.passes = self.server.passes, []
        return passes


def drop_singleton_batch(examples: Examples, batch: int) -> Examples:
    """Drop the last example if it would be a batch by itself, which cannot be shuffled."""
    return (
        examples.only(range(len(examples) - 1))
        if batch > 1 and len(examples) % batch == 1
        else examples
    )


def split_batches(images: Tensor, batch: int) -> list[Tensor]:
    """Split images into batches; a last batch of one image is merged with the one before."""
    batches = list(torch.split(images, batch))
    return (
        [*batches[:-2], torch.cat(batches[-2:])]
        if len(batches) > 1 and len(batches[-1]) == 1
        else batches
    )


def make_split_pair(
    model: torch.nn.Module,
    combination: str,
    training: OptimizerConfig | None = None,
    *,
    seed: int = 0,
) -> Pair:
    """Return a client and a server for a model.

    Args:
        model: The client's model, which is trained in place; the server has a copy of its backbone.
        combination: The defences of the client.
        training: The optimizer of both sides; None: they only predict.
        seed: The secret of the client's defences.
    """
    server = RecordingHost(Host(copy.deepcopy(model), training))
    transport = InProcess(server)  # type: ignore[arg-type]
    link = connect(model, transport, defences=parse_combination(combination), secret=seed)
    return Pair(model, server, link, combination, training)


def drop_shuffles(combination: str) -> str:
    """Return a combination without its shuffles."""
    others = [
        text
        for text in split_combination(combination)
        if text.partition("=")[0] not in ("rows", "batch-shuffle")
    ]
    return "+".join(others) or NONE


def defend_images(combination: str, images: Tensor, batch: int) -> Tensor:
    """Apply the defences that act on images, with randomness of the attacker's own."""
    from regauge.defences.split import KeyedRandom

    defences: Sequence[Defence] = [d for d in parse_combination(combination) if d.stage == 0]
    for n, defence in enumerate(defences):
        images = torch.cat(
            [
                defence.apply_to_images(part, KeyedRandom(bytes(32), f"{n}/{i}"))
                for i, part in enumerate(torch.split(images, batch))
            ]
        )
    return images

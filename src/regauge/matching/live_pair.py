"""Two models in memory, run on data or on text that they generate."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from regauge.core.element import Element
from regauge.core.progress import Progress
from regauge.core.spec import Spec, stored_tensors
from regauge.data.sources import DataSource
from regauge.errors import MatchError
from regauge.matching.pairs import Pair

if TYPE_CHECKING:
    import torch

    from regauge.matching.refine import Refinement

    Batches: TypeAlias = Sequence[Mapping[str, torch.Tensor]]
    Inputs: TypeAlias = Batches | DataSource | str | Path | Literal["self"]

GENERATED = "self-written text"  # in the facts of `--json`
_BATCH_SIZE = 8


class LivePair:
    """Both models of a pair in memory, with the weights that are matched, folded or not.

    They are loaded on first use.

    Args:
        pair: the two models.
        samples: the number of examples to read, or of texts to generate.
        seed: the seed of both.
    """

    def __init__(self, pair: Pair, samples: int, seed: int) -> None:
        self.pair, self.samples, self.seed = pair, samples, seed

    def with_pair(self, pair: Pair) -> LivePair:
        """Return the same models with the weights of another pair, such as unfolded ones."""
        live = LivePair(pair, self.samples, self.seed)
        if "models" in vars(self):
            vars(live)["models"] = self.models
        return live

    @cached_property
    def models(self) -> list[torch.nn.Module]:
        """The modules."""
        from regauge.models.load import load_model

        return [
            load_model(side.checkpoint, "float32") if module is None else module
            for side, module in zip((self.pair.a, self.pair.b), self.pair.modules, strict=True)
        ]

    @cached_property
    def names(self) -> dict[str, str]:
        """The name in the modules of every tensor pattern of the pair's spec. Libraries rename
        tensors when they load a file; spaces, axes and order stay.
        """
        from regauge.core.fold import folded_spec
        from regauge.models.resolve import spec_of

        stored = self.pair.spec.tensors
        spec = spec_of(self.models[0])
        live = (folded_spec(spec) if self.pair.is_folded else spec).tensors
        if stored.keys() == live.keys():
            return {name: name for name in stored}
        if list(stored.values()) != list(live.values()):
            raise MatchError(
                f"{self.pair.a.checkpoint.path.name} and its module must have the same tensors",
                hint="pass modules in place of paths",
            )
        return dict(zip(stored, live, strict=True))

    @cached_property
    def spec(self) -> Spec:
        """The spec of the pair, with the names of the modules."""
        spec, names = self.pair.spec, self.names
        return replace(
            spec,
            tensors={names[n]: text for n, text in spec.tensors.items()},
            parts={names.get(n, n): part for n, part in spec.parts.items()},
            ties={names[n]: names[target] for n, target in spec.ties.items()},
            untied={names[n]: factor for n, factor in spec.untied.items()},
            fixed={names[n]: value for n, value in spec.fixed.items()},
            norms=(),
            scales=(),
        )

    @cached_property
    def states(self) -> list[dict[str, torch.Tensor]]:
        """The weights that are matched, in float32, with the names of the modules."""
        names = dict(zip(stored_tensors(self.pair.spec), stored_tensors(self.spec), strict=True))
        return [
            {names.get(n, n): v.float() if v.is_floating_point() else v for n, v in state.items()}
            for state in self.pair.states
        ]

    def read(self, inputs: Inputs | None) -> Batches | None:
        """Read inputs if they are named by a source, so that unreadable data fail at once.

        Returns:
            Batches of inputs: none if the models are to generate them, None without inputs.

        Raises:
            DataError: they do not exist, or do not fit model A.
            MatchError: they are of another type.
        """
        if inputs is None or inputs == "self":
            return None if inputs is None else ()
        source = DataSource(str(inputs)) if isinstance(inputs, str | Path) else inputs
        if isinstance(source, DataSource):
            from regauge.data.tasks import sample_batches
            from regauge.models.load import load_empty

            checkpoint, module = self.pair.a.checkpoint, self.pair.modules[0]
            examples, _ = source.read(
                load_empty(checkpoint) if module is None else module,
                checkpoint,
                labelled=False,
            )
            count = source.samples or self.samples
            return [x for x, _ in sample_batches(examples, count, self.seed, _BATCH_SIZE)]
        if not isinstance(source, Sequence) or not all(isinstance(x, Mapping) for x in source):
            raise MatchError(
                "data must be batches of inputs, the source of a dataset, or "
                f'"self", got {type(source).__name__}',
                hint='pass the path of a dataset, or "self" for language models',
            )
        return source

    def inputs(self, batches: Batches) -> list[dict[str, Any]]:
        """Return batches of inputs: those that were read, or text that the two models generate."""
        if batches:
            return [dict(batch) for batch in batches]
        from regauge.matching.activations import generate_text

        return generate_text(
            self.models, count=self.samples, seed=self.seed, batch_size=_BATCH_SIZE
        )

    def record_activations(self, batches: Batches) -> tuple[Any, Any]:
        """Record the activations of both models on the same inputs."""
        from regauge.matching.activations import record

        inputs = self.inputs(batches)
        stored = {live: name for name, live in self.names.items()}
        of_a, of_b = (
            record(model, state, self.spec, inputs)
            for model, state in zip(self.models, self.states, strict=True)
        )
        first, second = (
            replace(x, moments={stored.get(n, n): m for n, m in x.moments.items()})
            for x in (of_a, of_b)
        )
        return first, second

    def refine(
        self, g: Element, batches: Batches, steps: int, progress: Progress | None
    ) -> Refinement:
        """Refine an element by gradient descent on these inputs."""
        from regauge.matching.refine import Evaluation, refine

        def report(mark: Evaluation) -> None:
            if progress is not None:
                message = f"refinement: divergence from the ends {mark.held_out_loss:.4f}"
                progress(mark.step, steps, message if mark.step < steps else "")

        a, b = self.states
        refined = refine(
            self.spec,
            a,
            b,
            g,
            self.models[0],
            self.inputs(batches),
            steps=steps,
            seed=self.seed,
            on_mark=report,
        )
        return replace(refined, g=refined.g.to(self.pair.spec), h=refined.h.to(self.pair.spec))


def describe_inputs(inputs: Inputs | None) -> str:
    """Describe inputs in a fact of a report."""
    if inputs is None:
        return "weights"
    if isinstance(inputs, str | Path):
        return GENERATED if inputs == "self" else str(inputs)
    return inputs.uri if isinstance(inputs, DataSource) else f"{len(inputs)} batches of inputs"


def digest_of_inputs(batches: Batches | None) -> str:
    """Return a digest of inputs that were read."""
    from regauge.checkpoints.resume import Outcome

    if not batches:
        return str(batches)
    return hashlib.sha256(
        "".join(Outcome({}, batch).digest for batch in batches).encode()
    ).hexdigest()

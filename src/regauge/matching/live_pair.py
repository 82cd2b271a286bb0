"""Two models in memory, run on data or on text that they generate."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from regauge.core.element import Element
from regauge.core.progress import Progress
from regauge.core.spec import Spec, stored_tensors
from regauge.data.sources import DataSource
from regauge.errors import Hint, MatchError, RegaugeError
from regauge.matching.pairs import Pair

if TYPE_CHECKING:
    import torch

    from regauge.checkpoints.reader import Checkpoint
    from regauge.matching.activations import Activations
    from regauge.matching.paired import Judge
    from regauge.matching.refine import Refinement
    from regauge.matching.result import Match

    Batches: TypeAlias = Sequence[Mapping[str, torch.Tensor]]
    Inputs: TypeAlias = Batches | DataSource | str | Path | Literal["self", "noise", "auto"]

SAMPLES = 64  # examples of the data, by default
REFINE_STEPS = 200  # steps of a refinement, by default
# Inputs without data, by their names, as the facts of `--json` describe them.
GENERATED = {"self": "self-written text", "noise": "noise"}
# Noise is free and says less than data: examples of it for each sample, and their most values.
_NOISE_PER_SAMPLE, _MAX_NOISE_VALUES = 16, 1 << 25
_BATCH_SIZE = 8


@dataclass(frozen=True)
class Generated:
    """Inputs that are generated: text that both models write, or noise.

    Attributes:
        kind: "self" or "noise".
        samples: the number of texts or of examples of noise.
    """

    kind: str
    samples: int


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

    def default_inputs(self) -> Generated | None:
        """Return the inputs by which models that were trained apart are matched unless others are
        named: text that they generate, if both `writes_by_default`; otherwise None.
        """
        if self.pair.rows:
            return None
        try:
            from regauge.matching.activations import writes_by_default
            from regauge.models.load import load_empty

            sides = zip((self.pair.a, self.pair.b), self.pair.modules, strict=True)
            modules = [load_empty(s.checkpoint) if m is None else m for s, m in sides]
        except RegaugeError:  # no config, or a library is missing
            return None
        return Generated("self", self.samples) if all(map(writes_by_default, modules)) else None

    def read(self, inputs: Inputs | None) -> Batches | Generated | None:
        """Read inputs for both models, see `read_inputs`; None without inputs."""
        if inputs is None:
            return None
        return read_inputs(
            inputs, self.pair.a.checkpoint, self.pair.modules[0], self.samples, self.seed
        )

    def inputs(self, batches: Batches | Generated) -> list[dict[str, Any]]:
        """Return batches of inputs: those that were read, or generated ones."""
        if not isinstance(batches, Generated):
            return [dict(batch) for batch in batches]
        from regauge.matching.activations import generate_text, sample_noise

        if batches.kind == "noise":
            one = sample_noise(self.models[0], count=1)[0]
            limit = _MAX_NOISE_VALUES // max(x.numel() for x in one.values())
            count = max(batches.samples, min(_NOISE_PER_SAMPLE * batches.samples, limit))
            return sample_noise(self.models[0], count=count, seed=self.seed)
        how: Any = {"count": batches.samples, "seed": self.seed, "batch_size": _BATCH_SIZE}
        return [dict(batch) for batch in generate_text(self.models, **how)]

    def record_activations(self, inputs: Batches) -> tuple[Activations, Activations]:
        """Record the activations of both models on the same inputs."""
        from regauge.matching.activations import record

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

    def record(
        self, batches: Batches | Generated
    ) -> tuple[tuple[Activations, Activations], Judge | None]:
        """Record the activations of both models on the same inputs, and return them with what
        judges elements on these inputs: the divergence of the average of both from their
        predictions. None judges models whose outputs move with the element, or whose vocabularies
        differ.
        """
        inputs = self.inputs(batches)
        recorded = self.record_activations(inputs)
        if self.spec.visible or self.pair.rows:
            return recorded, None

        def judge(elements: Sequence[Element]) -> list[float]:
            from regauge.matching.refine import mixture_divergences

            a, b = self.states
            return mixture_divergences(self.spec, a, b, elements, self.models[0], inputs)

        return recorded, judge

    def refine_match(
        self, found: Match, batches: Batches | Generated, steps: int, progress: Progress | None
    ) -> tuple[Match, Refinement]:
        """Refine the element of a match by gradient descent on these inputs.

        Returns:
            The match with the refined element, and the refinement.
        """
        refined = self.refine(found.element, batches, steps, progress)
        return found.with_element(refined.g, self.pair.spec, *self.pair.states), refined

    def refine(
        self, g: Element, batches: Batches | Generated, steps: int, progress: Progress | None
    ) -> Refinement:
        """Refine an element by gradient descent on these inputs.

        Raises:
            MatchError: the vocabularies differ, so that no predictions can be compared.
        """
        from regauge.matching.refine import Evaluation, refine

        if self.pair.rows:
            raise MatchError(
                "refinement requires models with one vocabulary, got two",
                hint=Hint("leave refine out", cli="leave --refine out"),
            )

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


def read_inputs(
    inputs: Inputs,
    checkpoint: Checkpoint,
    module: torch.nn.Module | None = None,
    samples: int = SAMPLES,
    seed: int = 0,
) -> Batches | Generated:
    """Read inputs if they are named by a source, so that unreadable data fail at once.

    Args:
        inputs: the path or hub id of a dataset, a `DataSource`, batches of inputs, "self" for text
            that the models generate, or "noise".
        checkpoint: the model that reads them.
        module: the same, if it is a live module.
        samples: the number of examples of a source that names none.
        seed: the seed of the sample.

    Raises:
        DataError: they do not exist, or do not fit the model.
        MatchError: they are of another type.
        RecordError: the model cannot generate text.
    """
    source = DataSource(str(inputs)) if isinstance(inputs, str | Path) else inputs
    if isinstance(source, DataSource):
        from regauge.data.tasks import sample_batches
        from regauge.matching.activations import require_generation
        from regauge.models.load import load_empty

        count = source.samples or samples
        model = load_empty(checkpoint) if module is None else module
        if source.uri in GENERATED:
            if source.uri == "self":
                require_generation(model)
            return Generated(source.uri, count)
        examples, _ = source.read(model, checkpoint, labelled=False)
        return [x for x, _ in sample_batches(examples, count, seed, _BATCH_SIZE)]
    if not isinstance(source, Sequence) or not all(isinstance(x, Mapping) for x in source):
        raise MatchError(
            'data must be batches of inputs, the source of a dataset, "self" or "noise", got '
            f"{type(source).__name__}",
            hint='pass the path of a dataset, "self" for language models, or "noise"',
        )
    return source


def describe_inputs(inputs: Inputs | None) -> str:
    """Describe inputs in a fact of a report."""
    if inputs is None:
        return "weights"
    if isinstance(inputs, str | Path | DataSource):
        uri = inputs.uri if isinstance(inputs, DataSource) else str(inputs)
        return GENERATED.get(uri, uri)
    return f"{len(inputs)} batches of inputs"


def digest_of_inputs(batches: Batches | Generated | None) -> str:
    """Return a digest of inputs that were read."""
    from regauge.checkpoints.resume import Outcome

    if batches is None or isinstance(batches, Generated):
        return str(batches)
    return hashlib.sha256(
        "".join(Outcome({}, batch).digest for batch in batches).encode()
    ).hexdigest()

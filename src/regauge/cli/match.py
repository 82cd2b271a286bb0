"""`regauge match` and `regauge compare`: two models, and the description of the one that is nearest
to the other.
"""

from __future__ import annotations

import hashlib
import time
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, step_bar
from regauge.cli.match_results import (
    format_comparison,
    format_match,
    results_of_comparison,
    results_of_match,
)
from regauge.cli.pair import open_pair, parse_names, parse_weights
from regauge.cli.pair import parse_layers as read_layers
from regauge.cli.run import check_outputs, deliver, facts_of_run, set_threads
from regauge.errors import ElementError

if TYPE_CHECKING:
    from regauge.cli.pair import Pair
    from regauge.core.element import Element
    from regauge.matching.activations import Activations
    from regauge.matching.refine import Refinement

ModelA = Annotated[
    str,
    typer.Argument(
        metavar="A", help="The model that moves: a folder, a .safetensors file, or a hub id."
    ),
]
ModelB = Annotated[str, typer.Argument(metavar="B", help="The model that stays.")]
Spaces = Annotated[
    str | None,
    typer.Option(
        "--spaces",
        metavar="A,B",
        help="These spaces take part: stream, head, qk, vo, ffn, ... Default: all.",
    ),
]
Layers = Annotated[
    str | None,
    typer.Option("--layers", metavar="0-5,11", help="Of what belongs to a layer, these only."),
]
Group = Annotated[
    options.GroupKind,
    typer.Option("--group", help="How far members may go; orthogonal is paper 003's rotations."),
]
Fold = Annotated[
    bool,
    typer.Option(
        "--fold",
        help="Fold the norms of both first, which gives the stream its rotations. Needs "
        "--output-b.",
    ),
]
Fix = Annotated[
    str | None,
    typer.Option(
        "--fix",
        metavar="A,B",
        help="Fix gauges of both first: keys, values (biases that nobody sees), balance. Needs "
        "--output-b.",
    ),
]
Anchors = Annotated[
    str | None,
    typer.Option(
        "--anchors",
        metavar="A,B",
        help="Tensors to find a space by at first; * stands for anything.",
    ),
]
Weight = Annotated[
    list[str] | None,
    typer.Option(
        "--weight",
        metavar="NAME=W",
        help="How much a tensor counts, 1 otherwise; * stands for anything. May be repeated.",
    ),
]
Sweeps = Annotated[
    int,
    typer.Option(
        "--sweeps",
        min=0,
        metavar="N",
        help="How often all is fitted again after the first pass, at most.",
    ),
]
SharedTokens = Annotated[
    bool,
    typer.Option(
        "--shared-tokens", help="Match by the tokens that both have, where the vocabularies differ."
    ),
]


def match(
    a: ModelA,
    b: ModelB,
    out: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="OUT",
            help="The new folder: A, moved next to B, and match.json.",
        ),
    ],
    out_b: Annotated[
        Path | None,
        typer.Option(
            "--output-b",
            metavar="OUT_B",
            help="With --fold or --fix: B, likewise, which OUT is next to.",
        ),
    ] = None,
    spaces: Spaces = None,
    layers: Layers = None,
    group: Group = options.GroupKind.full,
    fold: Fold = False,
    fix: Fix = None,
    anchors: Anchors = None,
    weight: Weight = None,
    rescale: Annotated[
        bool,
        typer.Option(
            "--rescale", help="With --group orthogonal: one factor per head besides (paper 003)."
        ),
    ] = False,
    sweeps: Sweeps = 10,
    nearest: Annotated[
        bool,
        typer.Option(
            "--nearest/--anchored",
            help="Sweeps fit the stream again too; or leave one that tables of tokens determine "
            "where it was first put.",
        ),
    ] = True,
    shared_tokens: SharedTokens = False,
    self_written: sample.SelfWritten = False,
    sample_data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="URI",
            help="Match by what the two do on a sample of data. Default: by their weights.",
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            min=1,
            metavar="N",
            help="Examples of the sample, or texts that they write.",
        ),
    ] = 64,
    field: sample.Field = None,
    split: sample.Split = "test",
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    seed: Annotated[int, options.seed_option("The seed that draws the sample.")] = 0,
    refine: Annotated[
        str | None,
        typer.Option(
            "--refine",
            metavar="URI|self",
            help="Go on by learning, on unlabelled data or on text that they write: moves only "
            "the element.",
        ),
    ] = None,
    refine_steps: Annotated[
        int, typer.Option("--refine-steps", min=1, metavar="N", help="Steps of learning.")
    ] = 200,
    workers: Annotated[
        int,
        typer.Option("--workers", min=1, metavar="N", help="Search layers in this many processes."),
    ] = 1,
    save_element: Annotated[
        Path | None,
        typer.Option("--save-element", metavar="F", help="Save the element that was found here."),
    ] = None,
    spec: options.SpecFile = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run of the same match.")
    ] = False,
    dry_run: options.DryRun = False,
    json: options.JsonFile = None,
    report: options.Report = None,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Move A next to B: the same function as A, in the description that is nearest to B's. Any
    merging tool can take the result.
    """
    started = time.monotonic()
    fixed = parse_names(fix) or []
    if (fold or bool(fixed)) != (out_b is not None):
        raise typer.BadParameter(
            "--fold or --fix and --output-b belong together: a folded A is next to a folded B, "
            "and not to B itself"
        )
    if self_written and sample_data is not None:
        raise typer.BadParameter("either --data or --self-written")
    if out_b is not None and out_b.absolute() == out.absolute():
        raise typer.BadParameter("--output and --output-b are one folder: A and B need one each")
    check_outputs(json, report)
    from regauge.checkpoints.element_files import save_element as save
    from regauge.checkpoints.files import format_bytes
    from regauge.checkpoints.plan import check_new, check_target
    from regauge.cli.model import require_unlocked
    from regauge.cli.move import require_outside
    from regauge.cli.write import summary, write_moved
    from regauge.core.element import identity
    from regauge.matching import match as find
    from regauge.results.findings import to_json

    for new in (out, out_b or out):
        check_new(new)  # at once: fixing gauges reads both models
    set_threads(threads)
    pair = open_pair(a, b, spec, fold=fold, fix=fixed, shared_tokens=shared_tokens)
    for side in (pair.a, pair.b):
        require_unlocked(side.checkpoint)
    counted = parse_weights(weight)
    for target in (out, out_b):
        for source in (pair.a, pair.b):
            if target is not None:
                check_target(target, source.checkpoint.path)
    if save_element is not None:
        if save_element.exists():
            raise ElementError(f"{save_element} exists already", hint="name a new file")
        for target in (out, out_b or out):
            require_outside(save_element, target, pair.a.checkpoint.path)
    wishes = (
        spaces,
        layers,
        group.value,
        fold,
        fix,
        anchors,
        weight,
        rescale,
        shared_tokens,
        sample_data,
        self_written,
        samples,
        seed,
        nearest,
    )
    work = MatchState(out, pair, " ".join(map(str, wishes)))
    start, known = work.load() if resume else (None, None)
    seen, live, refined = None, None, None

    def _sample(uri: str | None) -> sample.Sample | None:
        return (
            None
            if uri in (None, "self")
            else sample.Sample(str(uri), field, split, tokenizer, length, mean, std)
        )

    lessons: list[dict[str, Any]] = []
    if (
        self_written or sample_data is not None or refine is not None
    ):  # before the search: what cannot be read is refused at once
        chosen = [_read_batches(pair, _sample(uri), samples, seed) for uri in (refine, sample_data)]
        live = LoadedPair(pair, samples, seed)
        lessons = live.batches_or_generated(chosen[0]) if refine is not None else []
        seen = (
            live.record_activations(live.batches_or_generated(chosen[1]))
            if self_written or sample_data is not None
            else None
        )
    if known:
        info(f"goes on with what the interrupted run found of {len(known)} spaces")
    with step_bar("match") as progress:
        found = find(
            pair.spec,
            pair.a.state,
            pair.b.state,
            spaces=parse_names(spaces),
            layers=read_layers(layers),
            within=group.value,
            rows=pair.rows,
            activations=seen,
            weights=counted,
            anchors=parse_names(anchors),
            sweeps=sweeps,
            nearest=nearest,
            rescale=rescale,
            workers=workers,
            start=start,
            known_spaces=known,
            save=None if dry_run else work.save,
            progress=progress,
        )
    if live is not None and lessons:
        refined = live.refine(found.element, lessons, refine_steps)
        found = found.with_element(refined.g, pair.spec, pair.a.state, pair.b.state)
        info(
            f"refined in {refined.best_step} of {refine_steps} steps: divergence from the ends "
            f"{refined.initial_loss:.4f}, now {refined.loss:.4f}"
        )
    results = results_of_match(
        pair,
        found,
        {
            **facts_of_run(),
            "a": a,
            "b": b,
            "folded": fold,
            "fixed": fixed,
            "group": group.value,
            "by": _describe_source(sample_data, self_written),
            **_refinement_facts(refine, refined),
        },
        by_weights=seen is None,
        refined=refined,
    )
    if not dry_run:
        thunks = pair.a.thunks(found.element)
        mode = pair.a.checkpoint.mode & pair.b.checkpoint.mode
        plan = pair.a.plan(
            out, found.element, thunks, mode=mode, match_json=to_json(results).encode()
        )
        written = write_moved(out, plan, thunks, "matching", resume, threads)
        info(
            f"wrote {out}: {format_bytes(written.bytes)} in {time.monotonic() - started:.1f} s; "
            "moves "
            f"{summary(found.element)}"
        )
        if out_b is not None:
            none = identity(pair.spec)
            thunks = pair.b.thunks(none)
            write_moved(
                out_b,
                pair.b.plan(out_b, none, thunks, mode=mode),
                thunks,
                "preparing B",
                resume,
                threads,
            )
            steps = (("folded", fold), ("with fixed gauges", fixed))
            info(f"wrote {out_b}: B, {' and '.join(name for name, wanted in steps if wanted)}")
        if save_element is not None:
            save(found.element, save_element, new=True)
        work.delete()
    return deliver(results, format_match(found, results), json, report)


def _describe_source(sample_data: str | None, self_written: bool) -> str:
    return "text that the two wrote" if self_written else sample_data or "weights"


def _refinement_facts(refine: str | None, refined: Refinement | None) -> dict[str, Any]:
    if refined is None:
        return {}
    about = {
        "data": "text that the two wrote" if refine == "self" else refine,
        "steps": refined.best_step,
        "seconds": round(refined.seconds, 1),
    }
    return {
        "refined": {
            **about,
            "divergence before": refined.initial_loss,
            "divergence after": refined.loss,
        }
    }


def _read_batches(
    pair: Pair, source: sample.Sample | None, count: int, seed: int
) -> list[dict[str, Any]] | None:
    """A sample of data, without labels, as A reads it."""
    from regauge.models.load import load_empty

    if source is None:
        return None
    examples, _ = source.read(load_empty(pair.a.checkpoint), pair.a.checkpoint, labelled=False)
    return sample.inputs_of(examples, count, seed, batch=8)


class LoadedPair:
    """Both models, loaded to be seen at work: with the weights that are matched, folded or not."""

    def __init__(self, pair: Pair, count: int, seed: int) -> None:
        from regauge.models.load import load_model

        info("loads both models, to see them at work")
        self.pair, self.count, self.seed = pair, count, seed
        self.models = [load_model(side.checkpoint, "float32") for side in (pair.a, pair.b)]
        self.states = [
            {n: v.float() if v.is_floating_point() else v for n, v in side.state.items()}
            for side in (pair.a, pair.b)
        ]

    def batches_or_generated(self, batches: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
        """These batches, or if there are none, text that the two write."""
        from regauge.matching.activations import generate_text

        return (
            generate_text(self.models, count=self.count, seed=self.seed, batch_size=8)
            if batches is None
            else batches
        )

    def record_activations(self, batches: list[dict[str, Any]]) -> tuple[Activations, Activations]:
        from regauge.matching.activations import record

        one, other = (
            record(model, state, self.pair.spec, batches)
            for model, state in zip(self.models, self.states, strict=True)
        )
        return one, other

    def refine(self, g: Element, batches: list[dict[str, Any]], steps: int) -> Refinement:
        from regauge.matching.refine import refine

        with step_bar("refine") as progress:
            return refine(
                self.pair.spec,
                self.states[0],
                self.states[1],
                g,
                self.models[0],
                batches,
                steps=steps,
                seed=self.seed,
                on_mark=lambda mark: progress(
                    mark.step,
                    steps,
                    f"divergence from the ends {mark.held_out_loss:.4f}"
                    if mark.step < steps
                    else "",
                ),
            )


class MatchState:
    """What a match has found so far, kept beside its output for `--resume`, until that is
    written.
    """

    def __init__(self, out: Path, pair: Pair, wishes: str) -> None:
        stamps = [
            (n, s.size, s.path.stat().st_mtime_ns)
            for side in (pair.a, pair.b)
            for n, s in side.checkpoint.files.items()
        ]
        self.spec, self.digest = (
            pair.spec,
            hashlib.sha256(f"{stamps} {wishes}".encode()).hexdigest(),
        )
        self.path, self.index = (
            out.with_name(f".{out.name}.match"),
            out.with_name(f".{out.name}.match.json"),
        )

    def save(self, g: Element, known: list[str]) -> None:
        from regauge.checkpoints.element_files import save_element
        from regauge.checkpoints.files import write_bytes

        save_element(g, self.path)
        write_bytes(self.index, dumps({"of": self.digest, "known": known}).encode(), mode=0o600)

    def load(self) -> tuple[Element | None, list[str] | None]:
        """The element so far and its spaces, or nothing if there is none, or none of this match."""
        from regauge.checkpoints.element_files import load_element
        from regauge.checkpoints.reader import read_json

        if not self.path.exists() or not self.index.exists():
            return None, None
        about = read_json(self.index)
        if about.get("of") != self.digest:
            info("what an interrupted run left is of another match, and is not used")
            return None, None
        g = load_element(self.path, self.spec)
        return g, [s for s in about["known"] if s in self.spec.spaces]

    def delete(self) -> None:
        for path in (self.path, self.index):
            path.unlink(missing_ok=True)


def compare(
    a: ModelA,
    b: ModelB,
    spaces: Spaces = None,
    fold: Annotated[
        bool,
        typer.Option(
            "--fold",
            help="Fold the norms of both first: rotations of the stream are then looked for as "
            "well.",
        ),
    ] = False,
    group: Group = options.GroupKind.full,
    sweeps: Sweeps = 3,
    shared_tokens: SharedTokens = False,
    spec: options.SpecFile = None,
    seed: Annotated[int, options.seed_option("The seed of the control.")] = 0,
    json: options.JsonFile = None,
    report: options.Report = None,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Do two models share a basis, as they stand or after a match? To be asked before any merge."""
    check_outputs(json, report)
    from regauge.matching.compare import compare as find

    pair = open_pair(a, b, spec, fold=fold, shared_tokens=shared_tokens)
    set_threads(threads)
    with step_bar("compare") as progress:
        found = find(
            pair.spec,
            pair.a.state,
            pair.b.state,
            seed=seed,
            rows=pair.rows,
            progress=progress,
            spaces=parse_names(spaces),
            within=group.value,
            sweeps=sweeps,
        )
    results = results_of_comparison(
        pair,
        found,
        {**facts_of_run(), "a": a, "b": b, "folded": fold, "group": group.value, "seed": seed},
    )
    return deliver(results, format_comparison(found, results), json, report)

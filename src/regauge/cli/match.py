"""`regauge match` and `regauge compare`: align one model with another, or measure whether they
share a basis.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options, sample
from regauge.cli.console import info, step_bar
from regauge.cli.pair import open_pair, parse_layers, parse_names, parse_weights
from regauge.cli.run import check_outputs, deliver, facts_of_run, set_threads
from regauge.errors import ElementError

if TYPE_CHECKING:
    from regauge.core.element import Element
    from regauge.matching.pairs import Pair
    from regauge.matching.refine import Refinement

ModelA = Annotated[
    str,
    typer.Argument(metavar="A", help="Model to align: a folder, a .safetensors file or a hub id."),
]
ModelB = Annotated[str, typer.Argument(metavar="B", help="Model to align to.")]
Spaces = Annotated[
    str | None,
    typer.Option(
        "--spaces",
        metavar="A,B",
        help="Spaces to match: stream, head, qk, vo, ffn, ... Default: all.",
    ),
]
Layers = Annotated[
    str | None,
    typer.Option(
        "--layers",
        metavar="0-5,11",
        help="Layers to match, of spaces that belong to a layer. Default: all.",
    ),
]
Group = Annotated[
    options.GroupKind,
    typer.Option("--group", help="Largest group to search; orthogonal is paper 003's rotations."),
]
Fold = Annotated[
    bool,
    typer.Option(
        "--fold",
        help="Fold the norms of both first, which allows rotations of the stream. Needs "
        "--output-b.",
    ),
]
Fix = Annotated[
    str | None,
    typer.Option(
        "--fix",
        metavar="A,B",
        help="Fix gauges of both first: keys, values (biases without effect), balance. "
        "Needs --output-b.",
    ),
]
Anchors = Annotated[
    str | None,
    typer.Option(
        "--anchors",
        metavar="A,B",
        help="Tensors for the first estimate of a space; * is a wildcard.",
    ),
]
Weight = Annotated[
    list[str] | None,
    typer.Option(
        "--weight",
        metavar="NAME=W",
        help="Weight of a tensor, 1 otherwise; * is a wildcard. Repeatable.",
    ),
]
Sweeps = Annotated[
    int,
    typer.Option(
        "--sweeps",
        min=0,
        metavar="N",
        help="Largest number of sweeps after the first pass.",
    ),
]
SharedTokens = Annotated[
    bool,
    typer.Option(
        "--shared-tokens", help="Match by the shared tokens of two different vocabularies."
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
            help="New folder for the aligned A and match.json.",
        ),
    ],
    out_b: Annotated[
        Path | None,
        typer.Option(
            "--output-b",
            metavar="OUT_B",
            help="With --fold or --fix: new folder for the prepared B, which OUT is aligned with.",
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
            "--rescale", help="With --group orthogonal: also one factor per head (paper 003)."
        ),
    ] = False,
    sweeps: Sweeps = 10,
    nearest: Annotated[
        bool,
        typer.Option(
            "--nearest/--anchored",
            help="Refit the stream in sweeps; or keep its first estimate where token tables "
            "determine it.",
        ),
    ] = True,
    shared_tokens: SharedTokens = False,
    self_written: sample.SelfWritten = False,
    sample_data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="URI",
            help="Match by activations on a sample of data. Default: by the weights.",
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            min=1,
            metavar="N",
            help="Examples of the sample, or texts to generate.",
        ),
    ] = 64,
    field: sample.Field = None,
    split: sample.Split = "test",
    tokenizer: sample.Tokenizer = None,
    length: sample.Length = None,
    mean: sample.Mean = None,
    std: sample.Std = None,
    seed: Annotated[int, options.seed_option("Seed of the sample.")] = 0,
    refine: Annotated[
        str | None,
        typer.Option(
            "--refine",
            metavar="URI|self",
            help="Refine the element by gradient descent on unlabelled data or, with self, on "
            "text that the models generate.",
        ),
    ] = None,
    refine_steps: Annotated[
        int, typer.Option("--refine-steps", min=1, metavar="N", help="Steps of the refinement.")
    ] = 200,
    workers: Annotated[
        int,
        typer.Option("--workers", min=1, metavar="N", help="Worker processes of the search."),
    ] = 1,
    save_element: Annotated[
        Path | None,
        typer.Option("--save-element", metavar="F", help="New file for the element."),
    ] = None,
    spec: options.SpecFile = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume an interrupted run of the same match.")
    ] = False,
    dry_run: options.DryRun = False,
    json: options.JsonFile = None,
    report: options.Report = None,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Align A with B: the same function as A, in the basis nearest to B. Any merging tool can take
    the result.
    """
    started = time.monotonic()
    gauges = parse_names(fix) or []
    if (fold or bool(gauges)) != (out_b is not None):
        raise typer.BadParameter(
            "--output-b requires --fold or --fix, and they require it: a folded A is aligned "
            "with a folded B, not with B itself"
        )
    if self_written and sample_data is not None:
        raise typer.BadParameter("pass either --data or --self-written, not both")
    if out_b is not None and out_b.absolute() == out.absolute():
        raise typer.BadParameter(
            f"--output and --output-b must be different folders, got {out} twice"
        )
    check_outputs(json, report)
    from regauge.checkpoints.element_files import save_element as save
    from regauge.checkpoints.files import format_bytes
    from regauge.checkpoints.plan import check_new, check_target
    from regauge.cli.write import summary, write_moved
    from regauge.core.element import identity
    from regauge.matching.api import MatchOptions, match_pair
    from regauge.models.sources import require_unlocked
    from regauge.models.transforms import require_outside

    for new_folder in (out, out_b or out):
        check_new(new_folder)  # before fixing gauges, which reads both models
    set_threads(threads)
    pair = open_pair(a, b, spec, fold=fold, fix=gauges, shared_tokens=shared_tokens)
    for side in (pair.a, pair.b):
        require_unlocked(side.checkpoint)
    tensor_weights = parse_weights(weight)
    for target in (out, out_b):
        for source in (pair.a, pair.b):
            if target is not None:
                check_target(target, source.checkpoint.path)
    if save_element is not None:
        if save_element.exists():
            raise ElementError(f"{save_element} exists already", hint="name a new file")
        for target in (out, out_b or out):
            require_outside(save_element, target, pair.a.checkpoint.path)
    settings = (
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
    state = MatchState(out, pair, " ".join(map(str, settings)))
    start, known_spaces = state.load() if resume else (None, None)

    def read_batches(uri: str | None) -> Any:
        """Read a sample before the search, so that unreadable data fail at once."""
        if uri is None or uri == "self":
            return uri
        source = sample.Sample(uri, field, split, tokenizer, length, mean, std)
        return _read_batches(pair, source, samples, seed)

    to_refine = read_batches(refine)
    to_match: Any = "self" if self_written else read_batches(sample_data)
    if to_refine is not None or to_match is not None:
        info("loading both models to record activations")
    if known_spaces:
        info(f"resuming with {len(known_spaces)} spaces that the interrupted run found")
    with step_bar("match") as progress:
        result = match_pair(
            pair,
            data=to_match,
            refine=to_refine,
            refine_steps=refine_steps,
            samples=samples,
            seed=seed,
            options=MatchOptions(
                spaces=parse_names(spaces),
                layers=parse_layers(layers),
                within=group.value,
                weights=tensor_weights,
                anchors=parse_names(anchors),
                sweeps=sweeps,
                nearest=nearest,
                rescale=rescale,
                workers=workers,
            ),
            start=start,
            known_spaces=known_spaces,
            save=None if dry_run else state.save,
            progress=progress,
        )
    refined = result.refined
    if refined is not None:
        info(
            f"refined in {refined.best_step} of {refine_steps} steps: divergence from the ends "
            f"{refined.initial_loss:.4f}, now {refined.loss:.4f}"
        )
    facts = {
        **facts_of_run(),
        "a": a,
        "b": b,
        "folded": fold,
        "fixed": gauges,
        "group": group.value,
        "by": _describe_source(sample_data, self_written),
        **_refinement_facts(refine, refined),
    }
    result = replace(result, facts=facts)
    if not dry_run:
        thunks = pair.a.thunks(result.element)
        mode = pair.a.checkpoint.mode & pair.b.checkpoint.mode
        plan = pair.a.plan(
            out, result.element, thunks, mode=mode, match_json=result.to_json().encode()
        )
        written = write_moved(out, plan, thunks, "matching", resume, threads)
        info(
            f"wrote {out}: {format_bytes(written.bytes)} in {time.monotonic() - started:.1f} s; "
            f"transforms {summary(result.element)}"
        )
        if out_b is not None:
            unchanged = identity(pair.spec)
            thunks = pair.b.thunks(unchanged)
            write_moved(
                out_b,
                pair.b.plan(out_b, unchanged, thunks, mode=mode),
                thunks,
                "preparing B",
                resume,
                threads,
            )
            preparations = (("folded", fold), ("with fixed gauges", gauges))
            applied = " and ".join(name for name, is_applied in preparations if is_applied)
            info(f"wrote {out_b}: B, {applied}")
        if save_element is not None:
            save(result.element, save_element, new=True)
        state.delete()
    return deliver(result.results, str(result), json, report)


def _describe_source(sample_data: str | None, self_written: bool) -> str:
    """Describe what two models were matched by."""
    return "self-written text" if self_written else sample_data or "weights"


def _refinement_facts(refine: str | None, refined: Refinement | None) -> dict[str, Any]:
    """Return the facts of a refinement."""
    if refined is None:
        return {}
    about = {
        "data": "self-written text" if refine == "self" else refine,
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


def _read_batches(pair: Pair, source: sample.Sample, count: int, seed: int) -> list[dict[str, Any]]:
    """Read a sample of data, without labels, as inputs of A."""
    from regauge.models.load import load_empty

    examples, _ = source.read(load_empty(pair.a.checkpoint), pair.a.checkpoint, labelled=False)
    return sample.inputs_of(examples, count, seed, batch=8)


class MatchState:
    """State of an unfinished match, saved beside its output for `--resume` until that
    is written.
    """

    def __init__(self, out: Path, pair: Pair, settings: str) -> None:
        stamps = [stamp for side in (pair.a, pair.b) for stamp in side.checkpoint.stamps]
        self.spec = pair.spec
        self.digest = hashlib.sha256(f"{stamps} {settings}".encode()).hexdigest()
        self.path = out.with_name(f".{out.name}.match")
        self.index = out.with_name(f".{out.name}.match.json")

    def save(self, g: Element, spaces: list[str]) -> None:
        """Save the element and the names of the spaces found so far."""
        from regauge.checkpoints.element_files import save_element
        from regauge.checkpoints.files import write_bytes

        save_element(g, self.path)
        write_bytes(self.index, dumps({"of": self.digest, "known": spaces}).encode(), mode=0o600)

    def load(self) -> tuple[Element | None, list[str] | None]:
        """Return the saved element and its spaces, or (None, None) if none is of this match."""
        from regauge.checkpoints.element_files import load_element
        from regauge.checkpoints.reader import read_json

        if not self.path.exists() or not self.index.exists():
            return None, None
        saved = read_json(self.index)
        if saved.get("of") != self.digest:
            info("ignoring the state of another match")
            return None, None
        g = load_element(self.path, self.spec)
        return g, [s for s in saved["known"] if s in self.spec.spaces]

    def delete(self) -> None:
        """Delete the saved state."""
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
            help="Fold the norms of both first, which allows rotations of the stream.",
        ),
    ] = False,
    group: Group = options.GroupKind.full,
    sweeps: Sweeps = 3,
    shared_tokens: SharedTokens = False,
    spec: options.SpecFile = None,
    seed: Annotated[int, options.seed_option("Seed of the control.")] = 0,
    json: options.JsonFile = None,
    report: options.Report = None,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Measure whether two models share a basis, directly or after matching. Check this before
    merging.
    """
    check_outputs(json, report)
    from regauge.matching.api import MatchOptions, compare_pair

    pair = open_pair(a, b, spec, fold=fold, shared_tokens=shared_tokens)
    set_threads(threads)
    with step_bar("compare") as progress:
        result = compare_pair(
            pair,
            options=MatchOptions(spaces=parse_names(spaces), within=group.value, sweeps=sweeps),
            seed=seed,
            facts={
                **facts_of_run(),
                "a": a,
                "b": b,
                "folded": fold,
                "group": group.value,
                "seed": seed,
            },
            progress=progress,
        )
    return deliver(result.results, str(result), json, report)

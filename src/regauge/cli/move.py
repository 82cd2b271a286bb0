"""`regauge move`: apply an element to a checkpoint."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regauge.cli import options
from regauge.cli.console import info, print_json, warn
from regauge.cli.run import find_enclosing, set_threads
from regauge.errors import ElementError, RegaugeError

if TYPE_CHECKING:
    from regauge.core.element import Element
    from regauge.core.spec import Spec

VERSION = 1


def move(
    model: options.Model,
    out: options.Out,
    element: Annotated[
        Path | None, typer.Option("-g", "--element", metavar="ELEMENT", help="Element file.")
    ] = None,
    invert: Annotated[
        bool, typer.Option("--invert", help="Apply the element's inverse: undo a move.")
    ] = False,
    random: Annotated[bool, typer.Option("--random", help="Sample a random element.")] = False,
    group: Annotated[
        options.GroupKind | None,
        typer.Option("--group", help="Subgroup to sample from. Default: permutation."),
    ] = None,
    spaces: Annotated[
        str | None,
        typer.Option(
            "--spaces", metavar="A,B", help="Spaces to transform; `ffn` is ffn.0, ffn.1, ..."
        ),
    ] = None,
    seed: options.Seed = None,
    save_element: Annotated[
        Path | None,
        typer.Option("--save-element", metavar="F", help="New file for the sampled element."),
    ] = None,
    part: Annotated[
        options.Part | None,
        typer.Option("--part", help="Part to transform; the parts then no longer fit each other."),
    ] = None,
    fold: Annotated[
        bool,
        typer.Option("--fold", help="Fold the norms first, which allows rotations of the stream."),
    ] = False,
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="ADAPTER",
            help="LoRA adapter of MODEL (PEFT folder or file) to transform instead of MODEL.",
        ),
    ] = None,
    spec: options.SpecFile = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume an interrupted run of the same move.")
    ] = False,
    dry_run: options.DryRun = False,
    json: options.Json = False,
    threads: options.Threads = None,
    verbose: options.Verbose = 0,
) -> int:
    """Apply an element to a checkpoint: the same function in another basis."""
    if random == (element is not None):
        raise typer.BadParameter("pass either -g ELEMENT or --random")
    if not random and (seed is not None or save_element is not None or group is not None):
        raise typer.BadParameter("--seed, --group and --save-element require --random")
    if random and invert:
        raise typer.BadParameter("--invert requires -g")
    if random and resume and seed is None:
        raise typer.BadParameter(
            "--resume requires the element of the interrupted run: pass it with -g, or sample it "
            "with --seed"
        )
    if random and adapter is not None:
        raise typer.BadParameter("--adapter requires the element of its model: pass it with -g")
    started = time.monotonic()

    from regauge.checkpoints.files import format_bytes, strictest_mode
    from regauge.checkpoints.plan import check_target, is_taken
    from regauge.checkpoints.transform import prepare_adapter, prepare_source
    from regauge.cli.model import open_model
    from regauge.cli.write import summary, write_moved
    from regauge.models.sources import require_fit, require_unlocked

    checkpoint, unfolded = open_model(model, spec)
    check_target(out, checkpoint.path)
    require_unlocked(checkpoint)
    if save_element is not None and os.path.lexists(save_element):
        raise ElementError(
            f"{save_element} exists already",
            hint="an element is a secret that cannot be recreated: name a new file",
        )
    if save_element is not None:
        require_outside(save_element, out, checkpoint.path)
    require_fit(checkpoint, unfolded)
    source = prepare_source(checkpoint, unfolded, fold)
    g = _load_or_sample(
        source.state_spec, element, (group or options.GroupKind.permutation).value, spaces, seed
    )
    g = ~g if invert else g
    if adapter is not None:
        source, g = prepare_adapter(adapter, g)
        check_target(out, source.checkpoint.path)
        fold = False  # the fold was for reading the element; an adapter has no norms

    from regauge.core.action import is_exact_on

    if fold or not is_exact_on(g):
        set_threads(threads)
    info(
        f"{source.state_spec.family}: transforms "
        f"{summary(g)}{' after folding' if fold else ''}{f', {part.value} only' if part else ''}"
    )
    part_name = part.value if part else None
    thunks = source.thunks(g, part_name)
    report: dict[str, Any] = {
        "version": VERSION,
        "command": "move",
        "adapter": adapter,
        "family": source.state_spec.family,
        "out": str(out),
        "moved": list(g.members),
        "folded": fold,
        "part": part_name,
        "tensors": len(thunks),
        "dry_run": dry_run,
    }
    mode = checkpoint.mode & strictest_mode([] if element is None else [element])
    plan = source.plan(out, g, thunks, part_name, mode)
    if dry_run:
        info(f"dry run: {len(thunks)} tensors would be written to {out}")
        if json:
            print_json(report)
        return 0
    if save_element is not None:
        from regauge.checkpoints.element_files import save_element as save

        save(g, save_element, new=True)
    try:
        written = write_moved(out, plan, thunks, "moving", resume, threads)
    except BaseException:
        if save_element is not None and not is_taken(out):  # a finished output needs its element
            save_element.unlink(missing_ok=True)
        raise
    seconds = time.monotonic() - started
    if random and seed is None and save_element is None:
        info("the element was not saved, so this move cannot be undone; --save-element saves it")
    info(
        f"wrote {out}: {format_bytes(written.bytes)} in {seconds:.1f} "
        f"s{f'; the element is in {save_element}' if save_element else ''}"
    )
    if json:
        details = {
            "bytes": written.bytes,
            "files": list(written.files),
            "nonfinite": list(written.nonfinite),
            "left": list(written.skipped),
        }
        print_json(
            report
            | details
            | {"element": str(save_element or element or ""), "seconds": round(seconds, 3)}
        )
    return 0


def require_outside(element: Path, out: Path, source: Path) -> None:
    """Raise if an element, which is a secret, lies in a published folder or in the output."""
    if find_enclosing(element, out, source) is not None:
        raise ElementError(
            f"{element} lies in the model or in the output, and would be published with it",
            hint="keep the element in a separate folder",
        )


def _load_or_sample(
    spec: Spec, file: Path | None, group: Any, spaces: str | None, seed: int | None
) -> Element:
    """Load the element of a file, or sample one."""
    from regauge.checkpoints.element_files import load_element
    from regauge.checkpoints.files import require_file
    from regauge.core.element import element

    space_names = (
        [s.strip() for s in spaces.split(",") if s.strip()] if spaces is not None else None
    )
    if file is not None:
        require_file(file)
        g = load_element(file, spec)
        g = g.only(*space_names) if space_names is not None else g
    else:
        if space_names is None and spec.visible:
            info(
                f"{', '.join(sorted(spec.visible))} unchanged, since visible at the outputs "
                f"({', '.join(spec.outputs)}); --spaces overrides"
            )
        sampled_spaces = (
            space_names
            if space_names is not None
            else [s for s in spec.spaces if s not in spec.visible]
        )
        g = element(
            spec,
            os.urandom(32) if seed is None else seed,
            within=group,
            spaces=_drop_visible_prefixes(spec, sampled_spaces)
            if space_names is None
            else sampled_spaces,
        )
    visible = sorted(spec.visible & g.members.keys())
    if visible:
        warn(
            f"{', '.join(visible)} {'is' if len(visible) == 1 else 'are'} visible at the outputs "
            f"({', '.join(spec.outputs)}), which are transformed too"
        )
    restricted = sorted(
        n
        for n in g.members
        if file is None and group in ("orthogonal", "full") and spec.spaces[n].folded is not None
    )
    if restricted:
        info(
            f"{', '.join(restricted)}: {spec.spaces[restricted[0]].group.within(group)} only; "
            "--fold allows rotations"
        )
    if not g.members:
        raise RegaugeError(
            "the element transforms nothing",
            hint="regauge inspect lists the spaces and their groups",
        )
    return g


def _drop_visible_prefixes(spec: Spec, names: list[str]) -> list[str]:
    """Drop names that would also select a longer, visible one."""
    hidden = {n for n in names if not any(v.startswith(n + ".") for v in spec.visible)}
    return [n for n in names if n in hidden]

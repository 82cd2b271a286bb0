"""Models of a merge, looked at on data before the first tensor is merged: as they will be merged,
moved into the basis of the merge or as they are.

Each is loaded on its own, with the weights that the merge will read, and what it shows is kept in a
file beside the output until that is written: one model's statistics are in memory at a time, and a
merge that was killed looks at no model twice.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from regauge.checkpoints.reader import LazyState
from regauge.checkpoints.tensor_files import write_tensors
from regauge.checkpoints.transform import recipe_digest
from regauge.core.members import Soft
from regauge.core.progress import Progress
from regauge.data.datasets import Data, open_data
from regauge.data.tasks import Examples, read_examples, sample_batches
from regauge.merging.basis import find_shared_rows, load_float
from regauge.merging.layout import Model
from regauge.merging.methods import METHODS, MergeError
from regauge.merging.recipes import DataConfig
from regauge.merging.state_store import MergeStateStore
from regauge.merging.statistics import Gram, activations, fisher, grams
from regauge.models.load import load_model

if TYPE_CHECKING:
    from regauge.merging.engine import Merge

BATCH_SIZE = 16
OpenedData = Mapping[str, tuple[DataConfig, Data]]


def open_samples(merge: Merge) -> OpenedData:
    """The data of every model that is looked at, so that what cannot be read is refused at once."""
    if not METHODS[merge.recipe.method].statistic:
        return {}
    if merge.tables is not None and METHODS[merge.recipe.method].is_transport:
        raise MergeError(
            f"{merge.recipe.method} compares what models do on the same tokens, and their "
            "vocabularies differ",
            hint="ot_wts compares weights",
        )
    out: dict[str, tuple[DataConfig, Data]] = {}
    known: dict[Any, Data] = {}
    for key in merge.models:
        how = merge.recipe.data_for(key)
        if how is None:
            continue
        if METHODS[merge.recipe.method].is_transport and out and how != next(iter(out.values()))[0]:
            raise MergeError(
                f"{merge.recipe.method} compares what models do on the same data, and {key} has "
                "its own",
                hint="write one data: for all",
            )
        place = (how.uri, how.fields, how.split)
        if place not in known:
            known[place] = open_data(how.uri, fields=dict(how.fields) or None, split=how.split)
        out[key] = how, known[place]
    return out


def collect_statistics(
    merge: Merge,
    opened: OpenedData,
    out: Path,
    store: MergeStateStore,
    progress: Progress | None = None,
) -> Merge:
    """The merge with what its method needs to know of each model; and for methods of transport,
    with its models transported.
    """
    method = METHODS[merge.recipe.method]
    found: dict[str, Mapping[str, Any]] = {}
    notes: list[str] = []
    for i, (key, model) in enumerate(merge.models.items()):
        if not method.statistic:
            break
        if progress:
            progress(i, len(merge.models), f"{method.statistic} of {key}")
        path = store.saved_statistics(key)
        if path is None:
            path = store.statistics_path(key)
            _save(_model_statistics(merge, model, opened[key], out), path)
            store.mark_statistics(key)
        found[key] = _load(path)
        if not method.is_transport:
            blank = [n for n in model.state if n not in found[key] and not model.is_buffer(n)]
            if method.statistic == "fisher" and blank:
                notes.append(
                    f"nothing is known of {len(blank)} tensors of {key}, which are averaged: "
                    f'"{blank[0]}", ...'
                )
    merge = replace(merge, notes=(*merge.notes, *notes))
    return (
        _transport_models(merge, found) if method.is_transport else replace(merge, statistics=found)
    )


def _model_statistics(
    merge: Merge, model: Model, opened: tuple[DataConfig, Data], out: Path
) -> dict[str, Any]:
    how, data = opened
    with _loaded_module(model, model.state, out) as module:
        folder = (
            model.checkpoint.path if model.checkpoint.is_folder else model.checkpoint.path.parent
        )
        anchor = merge.anchor.checkpoint.path
        beside = (
            folder
            if (folder / "tokenizer.json").exists()
            or (folder / "preprocessor_config.json").exists()
            else anchor
        )
        labelled = how.labels and METHODS[merge.recipe.method].statistic == "fisher"
        examples, _ = read_examples(
            module,
            data,
            beside=beside if beside.is_dir() else beside.parent,
            tokenizer=how.tokenizer,
            length=how.length,
            mean=list(how.mean) or None,
            std=list(how.std) or None,
            labelled=labelled,
        )
        found = compute_statistic(
            METHODS[merge.recipe.method].statistic,
            module,
            examples,
            how.samples,
            seed=merge.seed,
            labelled=labelled,
        )
        names = _stored_names(module, model, out)
    return {names[n]: value for n, value in found.items() if n in names}


def compute_statistic(
    statistic: str,
    module: torch.nn.Module,
    examples: Examples,
    count: int,
    *,
    state: Any = None,
    seed: int = 0,
    labelled: bool = False,
) -> Any:
    """One statistic of a model, on so many of the examples, drawn by the seed: the same ones for
    every model.
    """
    batches = sample_batches(examples, count, seed, BATCH_SIZE)
    inputs = [x for x, _ in batches]
    match statistic:
        case "fisher":
            labels = [y for _, y in batches] if labelled else None
            return fisher(module, state, inputs, labels, causal=examples.causal, seed=seed)
        case "gram":
            return grams(module, state, inputs)
        case "activations":
            return activations(module, state, inputs)
    raise AssertionError(statistic)


@contextmanager
def _loaded_module(model: Model, state: Mapping[str, Any], out: Path) -> Iterator[torch.nn.Module]:
    """The model, loaded with this state: the library reads it from a folder beside the output, as
    it would from the checkpoint.
    """
    if state is model.checkpoint and model.checkpoint.as_stored:
        yield load_model(model.checkpoint, "float32")
        return
    with tempfile.TemporaryDirectory(
        prefix=f".{out.name}.live-", dir=out.absolute().parent
    ) as temporary:
        folder = Path(temporary)
        save_file(
            {n: state[n].contiguous().clone() for n in state},
            folder / "model.safetensors",
            {"format": "pt"},
        )
        (folder / "config.json").write_text(
            json.dumps({**(model.checkpoint.config or {}), **model.config})
        )
        yield load_model(folder, "float32")


def _stored_names(module: torch.nn.Module, model: Model, out: Path) -> dict[str, str]:
    """For each parameter of the live model the stored tensor that it is. Where the library has
    other names than the file, a copy is loaded in which every tensor is filled with its own number,
    and shows where it went. What the library puts together from several tensors is left out.
    """
    live = [name for name, _ in module.named_parameters()]
    if all(model.stored_name(name) is not None for name in live):
        return {name: str(model.stored_name(name)) for name in live}
    stored = list(model.state)
    marked = LazyState(
        stored, lambda name: torch.full(model.shapes[name], float(stored.index(name)))
    )
    with _loaded_module(model, marked, out) as shown:
        values = {
            name: (float(p.detach().min()), float(p.detach().max()))
            for name, p in shown.named_parameters()
            if p.numel()
        }
    return {name: stored[int(low)] for name, (low, high) in values.items() if low == high}


def _transport_models(merge: Merge, seen: Mapping[str, Mapping[str, Any]]) -> Merge:
    """The merge with every model but the anchor transported next to it. Nothing is computed but the
    plans: tensors are moved as they are read.
    """
    from regauge.core.action import apply_lazily
    from regauge.merging.transport import fit_transport

    method, anchor, recipe = METHODS[merge.recipe.method], merge.anchor, merge.recipe
    models, verdicts = dict(merge.models), dict(merge.verdicts)
    soft = None
    if "regularization" in method.shared:
        soft = float(
            recipe.resolve_parameter(
                "regularization", recipe.slices[0], None, "", 0.0, method.shared["regularization"]
            )
        )
    for key, model in merge.models.items():
        if key == anchor.key:
            continue
        if model.spec is None or anchor.spec is None:
            raise MergeError(
                f"{(model if model.spec is None else anchor).key} is of no family that regauge "
                "describes, so that nothing can be transported",
                hint="linear merges it as it is",
            )
        pair = (seen[key], seen[anchor.key]) if method.statistic else None
        g = fit_transport(
            model.spec,
            model.state,
            anchor.state,
            regularization=soft,
            activations=pair,
            rows=find_shared_rows(model, anchor),
        )
        thunks = apply_lazily(
            g, LazyState(list(model.state), partial(load_float, model.state)), force=True
        )
        digest = recipe_digest(g, model.spec, (model.element_digest.hex(),), None)
        models[key] = replace(model, state=LazyState.from_thunks(thunks), element_digest=digest)
        by = "activations" if method.statistic else "weights"
        mixes = any(
            isinstance(m, Soft) for m in g.members.values()
        )  # the stream's map is a mean, and soft even if its plans are exact
        note = (
            f"transported next to {anchor.key} by {by}, "
            f"{'softly' if soft else 'exactly'}"
            f"{', which makes it another function' if mixes else ''}"
        )
        verdicts[key] = replace(
            verdicts[key], moved="; then ".join(t for t in (verdicts[key].moved, note) if t)
        )
    return replace(merge, models=models, donor=models[merge.donor.key], verdicts=verdicts)


def _save(found: Mapping[str, Any], path: Path) -> None:
    """Whole or not at all. A Gram matrix has the number of its axis before its name."""
    write_tensors(
        path,
        {
            f"{v.dim} {n}" if isinstance(v, Gram) else n: v.values if isinstance(v, Gram) else v
            for n, v in found.items()
        },
        {},
    )


def _load(path: Path) -> Mapping[str, Any]:
    """What was saved, read tensor by tensor when it is asked for."""
    with safe_open(path, framework="pt") as file:
        names = {name.rpartition(" ")[2]: name for name in file.keys()}  # noqa: SIM118 (not a dict)

    def read(name: str) -> Any:
        if name not in names:
            raise KeyError(name)
        with safe_open(path, framework="pt") as file:
            value = file.get_tensor(names[name])
        return value if names[name] == name else Gram(value, int(names[name].split(" ")[0]))

    return LazyState(names, read)

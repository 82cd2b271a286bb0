"""The pass over data before a merge: statistics of each model as it will be merged.

Each model is loaded on its own, with the weights that the merge will read, aligned or not. Its
statistics are saved beside the output until that is written: one model's statistics are in memory
at a time, and a merge that was killed computes none twice.
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
from safetensors.torch import save_file

from regauge.checkpoints.files import OWNER, make_folder
from regauge.checkpoints.reader import LazyState
from regauge.checkpoints.resume import StateStore
from regauge.checkpoints.transform import recipe_digest
from regauge.core.members import Soft
from regauge.core.progress import Progress
from regauge.data.datasets import Data
from regauge.data.sources import DataSource
from regauge.data.tasks import Examples, sample_batches
from regauge.errors import MergeError
from regauge.merging.basis import find_shared_rows, load_float
from regauge.merging.layout import Model
from regauge.merging.methods import METHODS
from regauge.merging.statistics import Gram, activations, fisher, grams
from regauge.models.load import load_model

if TYPE_CHECKING:
    from regauge.merging.engine import Merge

BATCH_SIZE = 16
SAMPLES = 256  # examples of the data, by default
_PREPROCESSOR = "preprocessor_config.json"
OpenedData = Mapping[str, tuple[DataSource, Data]]


def open_samples(merge: Merge) -> OpenedData:
    """Open the data of every model, so that unreadable data are rejected before any work."""
    if not METHODS[merge.recipe.method].statistic:
        return {}
    if merge.tables is not None and METHODS[merge.recipe.method].is_transport:
        raise MergeError(
            f"{merge.recipe.method} needs models with one vocabulary: it compares activations on "
            "the same tokens",
            hint="ot_wts compares weights",
        )
    opened: dict[str, tuple[DataSource, Data]] = {}
    data_by_source: dict[Any, Data] = {}
    for key in merge.models:
        config = merge.recipe.data_for(key)
        if config is None:
            continue
        if (
            METHODS[merge.recipe.method].is_transport
            and opened
            and config != next(iter(opened.values()))[0]
        ):
            raise MergeError(
                f"{merge.recipe.method} needs the same data for all models, but {key} has its own",
                hint="write one data: for all",
            )
        source = (config.uri, config.fields, config.split)
        if source not in data_by_source:
            data_by_source[source] = config.open()
        opened[key] = config, data_by_source[source]
    return opened


def collect_statistics(
    merge: Merge,
    opened: OpenedData,
    store: StateStore | None = None,
    progress: Progress | None = None,
) -> Merge:
    """Return the merge with the statistics that its method needs.

    For methods of transport the models are transported instead.

    Args:
        merge: the merge.
        opened: the data of each model.
        store: saved state of an interrupted merge; without it, all statistics are in memory.
        progress: the progress callback.
    """
    method = METHODS[merge.recipe.method]
    statistics: dict[str, Mapping[str, Any]] = {}
    notes: list[str] = []
    for i, (key, model) in enumerate(merge.models.items()):
        if not method.statistic:
            break
        if progress:
            progress(i, len(merge.models), f"{method.statistic} of {key}")
        saved = _load(store, key) if store else None
        if saved is None:
            saved = _model_statistics(merge, model, opened[key], store)
            if store:
                _save(saved, store, key)
                saved = _load(store, key)
        assert saved is not None, "it was just saved"
        statistics[key] = saved
        if not method.is_transport:
            unknown = [
                n for n in model.state if n not in statistics[key] and not model.is_buffer(n)
            ]
            if method.statistic == "fisher" and unknown:
                notes.append(
                    f"{len(unknown)} tensors of {key} have no Fisher information and are averaged: "
                    f'"{unknown[0]}", ...'
                )
    merge = replace(merge, notes=(*merge.notes, *notes))
    return (
        _transport_models(merge, statistics)
        if method.is_transport
        else replace(merge, statistics=statistics)
    )


def _model_statistics(
    merge: Merge, model: Model, opened: tuple[DataSource, Data], store: StateStore | None
) -> dict[str, Any]:
    """Compute the statistics of one model, by the names of its stored tensors."""
    config, data = opened
    with _loaded_module(model, model.state, store) as module:
        beside = next(
            (
                c
                for c in (model.checkpoint, merge.anchor.checkpoint)
                for folder in (c.path if c.is_folder else c.path.parent,)
                if c.sources
                and any((folder / n).exists() for n in ("tokenizer.json", _PREPROCESSOR))
            ),
            merge.anchor.checkpoint,
        )
        labelled = config.labels and METHODS[merge.recipe.method].statistic == "fisher"
        examples, _ = config.read(module, beside, labelled=labelled, data=data)
        values = compute_statistic(
            METHODS[merge.recipe.method].statistic,
            module,
            examples,
            config.samples or SAMPLES,
            seed=merge.seed,
            labelled=labelled,
        )
        names = _stored_names(module, model, store)
    return {names[n]: value for n, value in values.items() if n in names}


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
    """Compute one statistic of a model.

    Args:
        statistic: "fisher", "gram" or "activations".
        module: the model.
        examples: the examples to sample from.
        count: the number of examples; the same seed samples the same ones for every model.
        state: weights to use in place of the module's own.
        seed: the random seed.
        labelled: use the labels of the examples for the Fisher information.
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
def _loaded_module(
    model: Model, state: Mapping[str, Any], store: StateStore | None
) -> Iterator[torch.nn.Module]:
    """Load the model with this state.

    The library reads it from a temporary folder beside the output, like a checkpoint.
    """
    if state is model.checkpoint and model.checkpoint.as_stored:
        yield load_model(model.checkpoint, "float32")
        return
    if store:
        make_folder(store.folder, OWNER)
    with tempfile.TemporaryDirectory(
        prefix="live-", dir=store.folder if store else None
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


def _stored_names(
    module: torch.nn.Module, model: Model, store: StateStore | None
) -> dict[str, str]:
    """Return, for each parameter of the live model, the stored tensor that it was loaded from.

    If the library uses other names than the file, a copy is loaded in which every tensor is filled
    with its own number. Parameters that the library assembles from several tensors are left out.
    """
    live = [name for name, _ in module.named_parameters()]
    if all(model.stored_name(name) is not None for name in live):
        return {name: str(model.stored_name(name)) for name in live}
    stored = list(model.state)
    marked = LazyState(
        stored, lambda name: torch.full(model.shapes[name], float(stored.index(name)))
    )
    with _loaded_module(model, marked, store) as marked_module:
        values = {
            name: (float(p.detach().min()), float(p.detach().max()))
            for name, p in marked_module.named_parameters()
            if p.numel()
        }
    return {name: stored[int(low)] for name, (low, high) in values.items() if low == high}


def _transport_models(merge: Merge, activations: Mapping[str, Mapping[str, Any]]) -> Merge:
    """Return the merge with every model but the anchor transported to it.

    Only the plans are computed: tensors are transformed when they are read.
    """
    from regauge.core.action import apply_lazily
    from regauge.merging.transport import fit_transport

    method, anchor, recipe = METHODS[merge.recipe.method], merge.anchor, merge.recipe
    models, verdicts = dict(merge.models), dict(merge.verdicts)
    regularization = None
    if "regularization" in method.shared:
        regularization = float(
            recipe.resolve_parameter(
                "regularization", recipe.slices[0], None, "", 0.0, method.shared["regularization"]
            )
        )
    for key, model in merge.models.items():
        if key == anchor.key:
            continue
        if model.spec is None or anchor.spec is None:
            raise MergeError(
                f"{(model if model.spec is None else anchor).key} must be of a known family to be "
                "transported",
                hint="linear merges models of any family",
            )
        pair = (activations[key], activations[anchor.key]) if method.statistic else None
        g = fit_transport(
            model.spec,
            model.state,
            anchor.state,
            regularization=regularization,
            activations=pair,
            rows=find_shared_rows(model, anchor),
        )
        thunks = apply_lazily(
            g, LazyState(list(model.state), partial(load_float, model.state)), force=True
        )
        digest = recipe_digest(g, model.spec, (model.element_digest.hex(),), None)
        models[key] = replace(model, state=LazyState.from_thunks(thunks), element_digest=digest)
        source = "activations" if method.statistic else "weights"
        # The stream's map is a mean, and soft even if its plans are exact.
        mixes = any(isinstance(m, Soft) for m in g.members.values())
        note = (
            f"transported to {anchor.key} by {source}, "
            f"{'softly' if regularization else 'exactly'}"
            f"{', which changes its function' if mixes else ''}"
        )
        verdicts[key] = replace(
            verdicts[key], moved="; then ".join(t for t in (verdicts[key].moved, note) if t)
        )
    return replace(merge, models=models, donor=models[merge.donor.key], verdicts=verdicts)


def _save(statistics: Mapping[str, Any], store: StateStore, key: str) -> None:
    """Save the statistics of a model. The name of a Gram matrix is preceded by its axis."""
    tensors = {
        f"{v.dim} {n}" if isinstance(v, Gram) else n: v.values if isinstance(v, Gram) else v
        for n, v in statistics.items()
    }
    store.save(f"statistics {key}", {}, tensors)


def _load(store: StateStore, key: str) -> Mapping[str, Any] | None:
    """Return saved statistics, read tensor by tensor on access."""
    saved = store.open(f"statistics {key}")
    if saved is None:
        return None
    tensors = saved.tensors
    names = {name.rpartition(" ")[2]: name for name in tensors}

    def read(name: str) -> Any:
        stored = names[name]  # raises KeyError for a tensor without statistics
        value = tensors[stored]
        return value if stored == name else Gram(value, int(stored.split(" ")[0]))

    return LazyState(names, read)

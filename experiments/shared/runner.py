"""The lab: cache, assets, device and progress of one run of an experiment. It trains and scores
models, each once.

An experiment requests one cell after the other. With several `jobs` it first lists its independent
parts (`Lab.ahead`): other processes compute them with one thread each, and the experiment then
reads them from the cache.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.shared.cells import Cell, place, run
from experiments.shared.finetune_cells import SPEAK, TUNE
from experiments.shared.presets import PRESETS, From, Preset, Subject
from experiments.shared.pretrained import pretrained
from experiments.shared.train_cells import SCORE, TRAIN, Source, source_of
from regauge.checkpoints.environment import default_cache
from regauge.checkpoints.resume import Outcome
from regauge.data.datasets import Data, EncodedImages, open_data
from regauge.errors import DataError
from regauge.results.findings import Figure

Progress = Callable[[int, int, str], None]


def default_assets() -> Path:
    """Return $REGAUGE_ASSETS, or the folder beside the repository."""
    return Path(os.environ.get("REGAUGE_ASSETS") or "../shared/assets")


@dataclass
class Lab:
    """One run of an experiment."""

    preset_name: str = "small"
    seeds: int | None = None
    assets: Path = field(default_factory=default_assets)
    cache: Path = field(default_factory=default_cache)
    device: str = "cpu"
    progress: Progress | None = None
    jobs: int = 1
    total: int = 0
    done: int = 0
    seconds: float = 0.0
    made: dict[str, set[str]] = field(default_factory=dict)
    cells: set[Callable[..., Outcome]] = field(default_factory=set)  # functions of the cells run
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    pictures: list[Figure] = field(
        default_factory=list
    )  # only for the HTML page: they may show people, and the JSON is committed

    def __post_init__(self) -> None:
        presets = {**PRESETS, "pretrained": pretrained}
        if self.preset_name not in presets:
            raise DataError(
                f'preset must be small, pretrained or paper, got "{self.preset_name}"',
                hint="small, pretrained or paper",
            )
        self.preset: Preset = presets[self.preset_name]()
        self._opened: dict[str, Data] = {}

    @property
    def trials(self) -> int:
        return self.seeds or self.preset.seeds

    def trials_of(self, subject: Subject) -> int:
        """Return the number of trials: the seeds of a trained model, the sources of a given one."""
        return self.trials if subject.recipe is not None else len(subject.sources)

    def train(self, subject: Subject, trial: int, way: str) -> Outcome:
        """Train the subject's model in one way from one seed."""
        outcome = self.run(
            TRAIN,
            *self._training(subject, trial, way),
            f"train {subject.name}, {way}, seed {trial}",
        )
        self._note(subject, outcome, "trained on")
        return outcome

    def is_trained(self, subject: Subject, trial: int, way: str) -> bool:
        """Return whether a trained model is in the cache; trains nothing."""
        parameters, data = self._training(subject, trial, way)
        return place(TRAIN, parameters, self.cache, data).exists()

    def _training(
        self, subject: Subject, trial: int, way: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        assert subject.train is not None
        parameters = {
            "model": subject.model,
            "task": subject.task,
            "recipe": subject.recipe,
            "seed": trial,
            "way": way,
        }
        return parameters, {"train": self.open(subject.train), **self.sources(subject, 0)}

    def score(
        self,
        subject: Subject,
        trial: int,
        way: str,
        *,
        key: int = 0,
        weights: Outcome | None = None,
        dtype: str | None = None,
        trained: str = "",
    ) -> Outcome:
        """Score the subject's model with these weights on its test data."""
        data: dict[str, Any] = {"test": self.open(subject.test), **self.sources(subject, trial)}
        if weights is not None:
            data["weights"] = weights
        task = {**subject.task, **subject.tested}
        parameters = {
            "model": subject.model,
            "task": task,
            "dtype": dtype or subject.dtype,
            "way": way,
            "key": key,
            "batch": subject.batch,
        }
        outcome = self.run(
            SCORE,
            parameters,
            data,
            f"test {subject.name}, {f'trained with {trained}' if trained else way}, trial {trial}",
        )
        self._note(subject, outcome, "tested on")
        return outcome

    def begin(self, subject: Subject, trial: int) -> dict[str, Any]:
        """Return the start of a fine-tuning: another subject's trained model, or the source of this
        trial.
        """
        start = (
            {"start": self.train(subject.start, trial, "plain")}
            if subject.start is not None
            else {}
        )
        return {**start, **self.sources(replace(subject, recipe=None), trial)}

    def tune(self, subject: Subject, trial: int, way: str, begun: Mapping[str, Any]) -> Outcome:
        """Fine-tune the subject's model: pre-trained, locked with or without the key, or from
        scratch.
        """
        assert subject.train is not None
        shared = {
            "model": subject.model,
            "task": subject.task,
            "recipe": subject.recipe,
            "fresh": list(subject.fresh),
        }
        parameters = {
            **shared,
            "validated": {**subject.task, **subject.validated},
            "seed": trial,
            "way": way,
            "batch": subject.batch,
        }
        outcome = self.run(
            TUNE,
            parameters,
            {"train": self.open(subject.train), **begun},
            f"fine-tune {subject.name}, {way}, seed {trial}",
        )
        self._note(subject, outcome, "trained on")
        return outcome

    def tuned(self, subject: Subject, trial: int, way: str, weights: Outcome) -> Outcome:
        """Score a fine-tuned model on the test data."""
        assert subject.recipe is not None
        dtype = subject.recipe["dtype"]
        return self.score(
            replace(subject, recipe=None), trial, "plain", weights=weights, dtype=dtype, trained=way
        )

    def speak(
        self,
        subject: Subject,
        trial: int,
        way: str,
        begun: Mapping[str, Any],
        generation: Mapping[str, Any],
    ) -> Outcome:
        """Generate text with the subject's model, and score its loss on the test data."""
        task = {**subject.task, **subject.tested}
        parameters = {
            "model": subject.model,
            "task": task,
            "said": generation,
            "seed": trial,
            "way": way,
            "batch": subject.batch,
        }
        outcome = self.run(
            SPEAK,
            parameters,
            {"test": self.open(subject.test), **begun},
            f"generate with {subject.name}, {way}, trial {trial}",
        )
        self._note(subject, outcome, "tested on")
        return outcome

    def ahead(self, work: Callable[[Lab, Any], object], items: Sequence[Any]) -> None:
        """Compute `work` on these items in `jobs` processes, in any order, to fill the cache.

        With one job this does nothing: the experiment requests each cell itself. `work` is a
        function of a module, and items can be pickled.
        """
        jobs = min(self.jobs, len(items))
        if jobs < 2:
            return
        given = (self.preset_name, self.seeds, self.assets, self.cache, self.device)
        others = multiprocessing.active_children()
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _one_thread)
        try:
            waiting = [pool.submit(_work, given, work, item) for item in items]
            detail = f"independent parts, in {jobs} processes"
            if self.progress:
                self.progress(0, len(items), detail)
            for n, done in enumerate(as_completed(waiting)):
                done.result()
                if self.progress:
                    self.progress(n + 1, len(items), detail if n + 1 < len(items) else "")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            ours = [child for child in multiprocessing.active_children() if child not in others]
            for child in ours:
                child.terminate()
            for child in ours:
                # the pool's own thread may join it too, and the second join returns without a
                # result
                while child.is_alive():
                    child.join(0.01)
            raise
        pool.shutdown()

    def run(
        self, cell: Cell, parameters: Mapping[str, Any], data: Mapping[str, Any], now: str
    ) -> Outcome:
        if self.progress:
            self.progress(self.done, self.total, now)
        outcome = run(cell, parameters, self.cache, data, device=self.device)
        self.done += 1
        self.cells.add(cell.compute)
        self.seconds += outcome.seconds
        for name, version in outcome.versions.items():
            self.made.setdefault(name, set()).add(version)
        if self.progress and self.done == self.total:
            self.progress(self.done, self.total, "")
        return outcome

    def open(self, source: From) -> Data:
        """Open the data of a source: of the assets, its substitute, or of the hub."""
        key = repr(source)
        if key not in self._opened:
            self._opened[key] = self._open(source)
        return self._opened[key]

    def _open(self, source: From) -> Data:
        path = self.assets / source.uri
        local = source.uri != "digits" and path.exists()
        if source.otherwise is not None and not local:
            return self.open(source.otherwise)
        if source.hub:
            return self._of_hub(source)
        if not local and source.uri != "digits":
            raise DataError(
                f"{path} does not exist",
                hint="set --assets DIR or REGAUGE_ASSETS to the folder that contains it",
            )
        if source.maps is not None:
            return self._with_maps(source)
        fields = dict(source.fields) or None
        found = open_data(
            path if local else source.uri,
            fields=fields,
            split=source.split,
            config=source.config,
            size=source.size,
        )
        return found.take(source.rows, seed=0)

    def _of_hub(self, source: From) -> Data:
        """Open a dataset of the hub: from a folder of its name in the assets, or from the hub."""
        places = [self.assets / source.uri, self.assets / source.uri.rpartition("/")[2]]
        folder = next((p for p in places if p.is_dir()), None)
        how: dict[str, Any] = {"split": source.split, "config": source.config, "size": source.size}
        if folder is None:
            try:
                found = open_data(source.uri, fields=dict(source.fields) or None, **how)
            except DataError as error:
                hint = f"connect, or put it into {places[0]} as it is distributed"
                raise DataError(str(error), hint=hint) from error
            return found.take(source.rows, seed=0)
        found = open_data(folder, **how)
        # an ImageFolder has no names of the hub's own, such as "img"
        fields = {
            name: found[name if column not in found.fields else column]
            for name, column in source.fields.items()
        }
        return replace(found, fields=fields or found.fields).take(source.rows, seed=0)

    def _with_maps(self, source: From) -> Data:
        for folder in (source.uri, str(source.maps)):
            if not (self.assets / folder).is_dir():
                raise DataError(
                    f"{self.assets / folder} does not exist",
                    hint="set --assets DIR or REGAUGE_ASSETS to the folder that contains it",
                )
        images, maps = (
            open_data(self.assets / folder, size=source.size)
            for folder in (source.uri, str(source.maps))
        )
        if images["name"] != maps["name"]:
            raise DataError(
                f"the images of {source.uri} and the maps of {source.maps} have different names"
            )
        pictures: EncodedImages = maps["image"]
        return Data(
            images.name,
            {"image": images["image"], "map": replace(pictures, nearest=True)},
            images.digest + maps.digest,
        )

    def sources(self, subject: Subject, trial: int) -> dict[str, Source]:
        """Return the tokenizer and the pre-trained model of a subject, if it has them."""
        found = {}
        if subject.tokenizer is not None:
            found["tokenizer"] = self.source(subject.tokenizer)
        if subject.sources:
            found["source"] = self.source(
                subject.sources[trial % len(subject.sources) if subject.recipe is None else 0]
            )
        elif "timm" in subject.model and (self.assets / "timm" / subject.model["timm"]).exists():
            found["source"] = self.source(f"timm/{subject.model['timm']}")
        return found

    def source(self, uri: str) -> Source:
        """Return a tokenizer or a model, of the assets or of the hub."""
        path = self.assets / uri
        if not path.exists() and (Path(uri).suffix or self.preset_name != "paper"):
            raise DataError(
                f"{path} does not exist",
                hint="set --assets DIR or REGAUGE_ASSETS to the folder that contains it",
            )
        return source_of(path if path.exists() else uri)

    def facts(self, name: str, seeds: Any, **more: Any) -> dict[str, Any]:
        """Return the facts of a run. `seeds` is the number of seeds, or one number per subject."""
        if isinstance(seeds, Mapping) and len(set(seeds.values())) == 1:
            seeds = next(iter(seeds.values()))
        detail = {
            "experiment": name,
            "preset": self.preset_name,
            "seeds": seeds,
            **more,
            "models": self.sizes,
            "device": self.device,
        }
        versions = {
            library: ", ".join(sorted(found)) for library, found in sorted(self.made.items())
        }
        return {**detail, "minutes of computing": round(self.seconds / 60, 1), "versions": versions}

    def _note(self, subject: Subject, outcome: Outcome, what: str) -> None:
        about = self.sizes.setdefault(subject.name, {"parameters": outcome.values["parameters"]})
        about[what] = (
            f"{outcome.values['examples']:,} of "
            f"{self.open((what == 'trained on' and subject.train) or subject.test).name}"
        )


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _work(given: tuple[Any, ...], work: Callable[[Lab, Any], object], item: Any) -> None:
    preset, seeds, assets, cache, device = given
    work(Lab(preset, seeds, assets, cache, device), item)

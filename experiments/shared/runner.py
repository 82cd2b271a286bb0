"""Where experiments run: the cache, the assets, the device, and how far it is. Models are trained
and scored here, each once.

An experiment asks for one cell after the other. With several `jobs` it first says which parts of it
do not wait for each other (`Lab.ahead`): other processes compute them, with one thread each, and
then all of it lies in the cache.
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
from experiments.shared.train_cells import SCORE, TRAIN, Source, source_of
from regauge.checkpoints.environment import default_cache
from regauge.checkpoints.resume import Outcome
from regauge.data.datasets import Data, EncodedImages, open_data
from regauge.errors import DataError
from regauge.results.findings import Figure

Progress = Callable[[int, int, str], None]


def default_assets() -> Path:
    """$REGAUGE_ASSETS, or the folder beside the repository."""
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
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)
    pictures: list[Figure] = field(
        default_factory=list
    )  # for the user's page alone: they may show people, and JSON is committed

    def __post_init__(self) -> None:
        if self.preset_name not in PRESETS:
            raise DataError(f'there is no preset "{self.preset_name}"', hint="small or paper")
        self.preset: Preset = PRESETS[self.preset_name]()
        self._opened: dict[str, Data] = {}

    @property
    def trials(self) -> int:
        return self.seeds or self.preset.seeds

    def trials_of(self, subject: Subject) -> int:
        """A model that is trained here has a trial for each seed; one that is used as it is, for
        each of its sources.
        """
        return self.trials if subject.recipe is not None else len(subject.sources)

    def train(self, subject: Subject, trial: int, way: str) -> Outcome:
        """The subject's model, trained in one way from one seed."""
        outcome = self.run(
            TRAIN,
            *self._training(subject, trial, way),
            f"train {subject.name}, {way}, seed {trial}",
        )
        self._note(subject, outcome, "trained on")
        return outcome

    def is_trained(self, subject: Subject, trial: int, way: str) -> bool:
        """Is that model in the cache? Asking does not train it."""
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
        """The subject's model, with these weights, used in one way on all of its test data."""
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
        """What a subject's fine-tuning starts from: the model that another subject's training ended
        with, or its source of this trial.
        """
        start = (
            {"start": self.train(subject.start, trial, "plain")}
            if subject.start is not None
            else {}
        )
        return {**start, **self.sources(replace(subject, recipe=None), trial)}

    def tune(self, subject: Subject, trial: int, way: str, begun: Mapping[str, Any]) -> Outcome:
        """The subject's pre-trained model, fine-tuned plainly, locked with or without the key, or
        not pre-trained at all.
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
        """What a fine-tuned model is worth on the test data."""
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
        said: Mapping[str, Any],
    ) -> Outcome:
        """What the subject's pre-trained model writes, and its loss on the test data."""
        task = {**subject.task, **subject.tested}
        parameters = {
            "model": subject.model,
            "task": task,
            "said": said,
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
        """Have `jobs` processes do `work` on these items, in any order: what they compute is in the
        cache when it is asked for. One job does nothing here, since the experiment asks for each in
        its turn. `work` is a function of a module, items can be pickled.
        """
        jobs = min(self.jobs, len(items))
        if jobs < 2:
            return
        given = (self.preset_name, self.seeds, self.assets, self.cache, self.device)
        others = multiprocessing.active_children()
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _one_thread)
        try:
            waiting = [pool.submit(_work, given, work, item) for item in items]
            detail = f"parts that do not wait for each other, in {jobs} processes"
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
                # the pool's own thread may be waiting for it too: who comes second is told nothing,
                # and asks again
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
        self.seconds += outcome.seconds
        for name, version in outcome.versions.items():
            self.made.setdefault(name, set()).add(version)
        if self.progress and self.done == self.total:
            self.progress(self.done, self.total, "")
        return outcome

    def open(self, source: From) -> Data:
        """The data of a source: a file of the assets, a hub id, or what stands in for it."""
        key = repr(source)
        if key not in self._opened:
            self._opened[key] = self._open(source)
        return self._opened[key]

    def _open(self, source: From) -> Data:
        path = self.assets / source.uri
        local = source.uri != "digits" and path.exists()
        if source.otherwise is not None and not local:
            return self.open(source.otherwise)
        if not local and Path(source.uri).suffix:
            raise DataError(
                f"{path} is not here",
                hint="--assets DIR or REGAUGE_ASSETS names the folder that holds it",
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

    def _with_maps(self, source: From) -> Data:
        for folder in (source.uri, str(source.maps)):
            if not (self.assets / folder).is_dir():
                raise DataError(
                    f"{self.assets / folder} is not here",
                    hint="--assets DIR or REGAUGE_ASSETS names the folder that holds it",
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
        """The tokenizer and the pre-trained model that a subject's cells read, if it has such."""
        found = {}
        if subject.tokenizer is not None:
            found["tokenizer"] = self.source(subject.tokenizer)
        if subject.sources:
            found["source"] = self.source(
                subject.sources[trial % len(subject.sources) if subject.recipe is None else 0]
            )
        return found

    def source(self, uri: str) -> Source:
        """A tokenizer or a model: of the assets, or of the hub."""
        path = self.assets / uri
        if not path.exists() and (Path(uri).suffix or self.preset_name != "paper"):
            raise DataError(
                f"{path} is not here",
                hint="--assets DIR or REGAUGE_ASSETS names the folder that holds it",
            )
        return source_of(path if path.exists() else uri)

    def facts(self, name: str, seeds: Any, **more: Any) -> dict[str, Any]:
        """What a run says of itself. `seeds` is how many were run: a number, or where subjects
        differ, one for each.
        """
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

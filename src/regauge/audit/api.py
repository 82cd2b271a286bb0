"""The public audits: of locks, of split learning, of gradients, and of recorded federated runs."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from regauge.attacks import theft
from regauge.audit import gradient_audit, lock_audit, split_audit
from regauge.audit.engine import resolve_attacks
from regauge.audit.gradient_audit import attempts as gradient_attempts
from regauge.audit.gradient_audit.engine import default_attacks
from regauge.audit.inputs import (
    AuditData,
    align_names,
    divide_examples,
    load_examples,
    load_plain_model,
    name_of,
)
from regauge.audit.report import AuditReport
from regauge.audit.resume import digest_files, open_store
from regauge.audit.split_audit import attempts as split_attempts
from regauge.audit.split_audit.text_audit import TEXT_ATTACKS
from regauge.audit.split_audit.victims import parse_combination
from regauge.checkpoints.resume import StateStore
from regauge.core.fold import fold_norms
from regauge.core.names import items_of
from regauge.core.options import require_at_least, require_device, resolve_options
from regauge.core.progress import Progress
from regauge.core.threads import within_threads
from regauge.data.train import train_snapshots
from regauge.defences.gradients import parse_plan
from regauge.defences.parser import NONE
from regauge.errors import AuditError, need
from regauge.locking.keys import KeySource, resolve_key
from regauge.locking.lock import LOCKS, element_spec, locked_element, require_locked
from regauge.locking.locked_checkpoints import check_files
from regauge.models.load import load_model
from regauge.models.resolve import spec_of
from regauge.models.sources import resolve
from regauge.results.findings import Results
from regauge.results.metrics import Lpips
from regauge.split import OptimizerConfig
from regauge.split.client.train import Run

if TYPE_CHECKING:
    from regauge.core.spec import Spec
    from regauge.data.tasks import Examples
    from regauge.models.sources import Model, Source

OnLoaded: TypeAlias = Callable[[str, str], None]  # "images" or "texts", and the sizes of the parts
SPLIT_SHARES = (0.5, 0.3)  # the client's, the attacker's; the rest is the test set
ATTACKER_SHARE = 0.5  # the rest belongs to the clients
IMAGE_DEFENCES = (
    "rows",
    "no-positions",
    "no-positions=sent",
    "mjp=0.5,shuffle=false",
    "mjp=0.5,unknown=false",
    "mjp=0.5",
    "mjp=0.9",
    "steps=4",
    "batch=8",
    "clients=8",
    "prune=0.9",
    "noise=0.1",
    "private=1.0",
    "withhold=positions",
    "freeze=embedding",
    "freeze=embedding,first",
    "freeze=matrices",
    "mjp=0.5+freeze=embedding",
)
TEXT_DEFENCES = (
    "dropout",
    "batch=4",
    "clients=4",
    "steps=4",
    "prune=0.9",
    "noise=0.1",
    "private=1.0",
    "freeze=embedding",
    "freeze=embedding,first",
)


@dataclass(frozen=True)
class LockOptions:
    """Options of `lock`.

    Attributes:
        labels: Numbers of labels that a thief has; one theft for each.
        budget: The training budget of a thief.
        samples: The largest number of test examples.
        attacks: Names of attacks, or one name; None for all.

    Example:
        >>> _ = regauge.lock("model", regauge.generate_key()).save("locked")
        >>> options = regauge.audit.LockOptions(labels=[50], attacks=["public base"])
        >>> report = regauge.audit.lock("locked", base="model", options=options)
    """

    labels: Sequence[int] = lock_audit.LABEL_COUNTS
    budget: theft.Budget = field(default_factory=lambda: theft.Budget(lrs=(3e-4, 3e-3)))
    samples: int = 1000
    attacks: Sequence[str] | None = None

    def __post_init__(self) -> None:
        require_at_least(AuditError, 1, samples=self.samples)


@dataclass(frozen=True)
class SampleOptions:
    """Options of the model and data of an audit.

    Attributes:
        attacks: Names of attacks, or one name; "all" for all, empty for the defaults.
        samples: The number of examples to use; None for all.
        fresh: Whether to start from newly initialized weights.
        resize: Whether images of another size than the model's are resized.
        mean: Channel means of the normalization of images, unless a `DataSource` sets them; empty:
            those of preprocessor_config.json, or 0 for `Examples`.
        std: Its channel deviations; empty: likewise, or 1 for `Examples`.
        lpips: The weights of AlexNet with the LPIPS heads, for LPIPS and F-SIM.
        gallery: The number of images to show with their reconstructions.
        device: The device to compute on.
    """

    attacks: Sequence[str] = ()
    samples: int | None = None
    fresh: bool = False
    resize: bool = True
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    lpips: Path | None = None
    gallery: int = 6
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_at_least(AuditError, 1, samples=self.samples)
        require_at_least(AuditError, 0, gallery=self.gallery)


@dataclass(frozen=True)
class SplitOptions(SampleOptions):
    """Options of `split`, besides those of `SampleOptions`.

    Attributes:
        epochs: Training epochs of client and server.
        batch_size: Their batch size.
        lr: Their learning rate, of AdamW with a cosine schedule.
        attacked: The number of test examples to attack.
        budget: The training budget of the attacker's decoder.
        noises: Noise levels of the default combinations.
        radii: Low-pass radii of the default combinations.

    Example:
        >>> options = regauge.audit.SplitOptions(["least squares"], epochs=1, attacked=4)
        >>> report = regauge.audit.split(vit, images, ["rows"], options=options)
    """

    epochs: int = 10
    batch_size: int = 32
    lr: float = 1e-3
    attacked: int = 64
    budget: split_attempts.Budget = field(default_factory=split_attempts.Budget)
    noises: Sequence[float] = (0.3, 1.0)
    radii: Sequence[float] = (0.1, 0.2)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {"epochs": self.epochs, "batch_size": self.batch_size, "attacked": self.attacked}
        require_at_least(AuditError, 1, **sizes)

    def combinations(self, is_text: bool = False) -> list[str]:
        """Return the defaults: Table 6 of permutation equivariance, without and with rows."""
        images = [*(f"low-pass={r:g}" for r in self.radii), "batch-shuffle=0.5"]
        levels = ["none", *(f"noise={s:g}" for s in self.noises), *([] if is_text else images)]
        return [text for c in levels for text in (c, "rows" if c == "none" else f"{c}+rows")]


@dataclass(frozen=True)
class GradientOptions(SampleOptions):
    """Options of `gradients`, besides those of `SampleOptions`.

    Attributes:
        updates: The number of updates to attack under each combination.
        batch_size: Samples in an update, unless a combination sets it.
        steps: Local steps in an update, unless a combination sets them.
        lr: The learning rate of local steps.
        batches: Further batch sizes, without a defence, for a curve.
        train_steps: Train for these numbers of steps and attack again, for a curve.
        budget: The budget of attacks that optimize or learn; its seed is that of the audit.
        optimized: The number of updates on which slow attacks are run.

    Example:
        >>> options = regauge.audit.GradientOptions(["labels"], updates=2, batches=())
        >>> report = regauge.audit.gradients(vit, images, ["noise=1"], options=options)
    """

    updates: int = 8
    batch_size: int = 1
    steps: int = 1
    lr: float = 0.01
    batches: Sequence[int] = (1, 2, 4, 8)
    train_steps: Sequence[int] = ()
    budget: gradient_attempts.Budget = field(default_factory=gradient_attempts.Budget)
    optimized: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("updates", "batch_size", "steps")
        require_at_least(AuditError, 1, **{name: getattr(self, name) for name in names})

    def combinations(self, is_text: bool = False) -> tuple[list[str], list[str]]:
        """Return the default combinations, and the reasons for those left out.

        `private` is left out for updates of several steps: it is defined for gradients of one
        batch.
        """
        table = TEXT_DEFENCES if is_text else IMAGE_DEFENCES
        skipped = [c for c in table if self.steps > 1 and c.startswith("private")]
        reason = f"applies to gradients of one batch; updates have {self.steps} steps"
        return [c for c in table if c not in skipped], [f"{c}: {reason}" for c in skipped]


@within_threads
def lock(
    locked: Source,
    *,
    key: KeySource | None = None,
    base: Source | None = None,
    data: AuditData | None = None,
    options: LockOptions | None = None,
    fail_above: float | None = None,
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    on_loaded: OnLoaded | None = None,
    state: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> AuditReport:
    """Measure what a lock is worth: run every applicable attack, and score it.

    Args:
        locked: The locked model.
        key: Its key, or its file, to score the attacks with. Attacks never receive it.
        base: A public model that it may descend from.
        data: Examples of its task, for theft, features and accuracies.
        options: Labels and budget of a thief, and the names of the attacks.
        fail_above: Fail a finding if its attack gets further than this share of the way from
            baseline to upper bound.
        seed: The random seed of samples and training.
        facts: Facts of the run, for the report.
        on_loaded: Called when model and data are loaded, with their sizes.
        state: The folder in which finished steps are saved, a new one. They stay until
            `AuditReport.delete_state`, to be called once the report is written.
        resume: Whether to go on from what an interrupted audit has saved there.
        progress: Progress callback, in steps; its message estimates the time left.

    Returns:
        The score of each attack, and the verdict.

    Raises:
        LockError: The model is not locked, or its files do not match its record.
        KeyFileError: The key has another purpose, or its file is not usable.
        AuditError: No attack is applicable, or weights are not finite.

    Example:
        >>> key = regauge.generate_key()
        >>> _ = regauge.lock("model", key).save("locked")
        >>> report = regauge.audit.lock("locked", key=key, base="model")
        >>> report.to_html("page.html")
    """
    started, options = time.monotonic(), resolve_options(options, LockOptions())
    secret = None if key is None else resolve_key(key, "lock")
    model = resolve(locked)
    record = require_locked(model.checkpoint, name_of(locked))
    if model.module is None:
        check_files(model.checkpoint)
    module, spec, weights = _load_weights(model, with_module=data is not None)
    plain_spec = element_spec(spec, record.folded)
    base_state = None
    if base is not None:
        _, base_spec, base_state = _load_weights(resolve(base), with_module=module is not None)
        if record.folded:
            base_state = fold_norms(base_spec, base_state)[1]
        base_state = align_names(plain_spec, dict(base_state), name_of(base))
    train = test = None
    if data is not None and module is not None:
        path = model.checkpoint.path
        beside = path if model.checkpoint.is_folder else path.parent
        examples, task = load_examples(data, module, beside, split="test")
        order = np.random.default_rng(seed).permutation(len(examples))
        middle = min(max(options.labels), len(examples) // 2)
        train = examples.only(np.sort(order[:middle]))
        test = examples.only(np.sort(order[middle : middle + options.samples]))
        if on_loaded is not None:
            sizes = f"{len(train)} training examples for a thief, {len(test)} test examples"
            on_loaded(task["kind"], sizes)
    case = lock_audit.LockCase(
        plain_spec,
        weights,
        LOCKS[record.group].within,
        None if secret is None else locked_element(spec, record, secret),
        base_state,
        model=module,
        train=train,
        test=test,
        record=record,
        key=secret,
    )
    store = open_store(
        state,
        resume,
        "lock",
        weights,
        base_state,
        module,
        train,
        test,
        record,
        options,
        seed,
        secret is not None,
    )
    results = lock_audit.audit_lock(
        case,
        labels=options.labels,
        budget=replace(options.budget, seed=seed),
        seed=seed,
        fail_above=fail_above,
        attacks=options.attacks,
        progress=progress,
        store=store,
    )
    about = {
        "model": name_of(locked),
        "against": None if base is None else name_of(base),
        "data": None if data is None else name_of(data),
        "family": record.family,
        "group": record.group,
        "key": record.key,
        "scored by the key": key is not None,
    }
    return _report("lock", results, started, facts, about, store, {"seed": seed})


@within_threads
def split(
    model: Source,
    data: AuditData,
    defences: Sequence[str] | None = None,
    *,
    options: SplitOptions | None = None,
    fail_above: float | None = None,
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    on_loaded: OnLoaded | None = None,
    state: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> AuditReport:
    """Measure what the server of split learning learns about a client's images or texts.

    The model is trained through the split with each combination of defences, and the features and
    gradients that the server receives are attacked.

    Args:
        model: The unlocked model that client and server start from.
        data: Images or texts with labels. Half belong to the client, 30 % to the attacker.
        defences: Combinations of defences, such as "rows" or "noise=0.5+rows"; by default noise,
            low-pass and batch shuffle, each with and without rows. An empty list attacks only
            undefended features.
        options: Options of model, training and attacks.
        fail_above: Fail a finding on defended features if its attack gets further than this share
            of the way from baseline to upper bound.
        seed: The random seed of samples, training and noise.
        facts: Facts of the run, for the report.
        on_loaded: Called when model and data are loaded, with "images" or "texts" and their sizes.
        state: The folder in which finished steps are saved, a new one. They stay until
            `AuditReport.delete_state`, to be called once the report is written.
        resume: Whether to go on from what an interrupted audit has saved there.
        progress: Progress callback, in steps; its message estimates the time left.

    Returns:
        The score of each attack on each combination, and the verdict.

    Raises:
        AuditError: The case cannot be audited, or an attack is unknown.
        DefenceError: A defence is unknown or has a wrong value.
        LockError: The model is locked.

    Example:
        >>> options = regauge.audit.SplitOptions(["least squares"], epochs=1, attacked=4)
        >>> report = regauge.audit.split("vit", images, ["rows"], options=options)
        >>> report.to_html("page.html")
    """
    started, options = time.monotonic(), resolve_options(options, SplitOptions())
    require_device(options.device)
    chosen = None if defences is None else items_of(defences) or [NONE]
    for combination in chosen or options.combinations():
        parse_combination(combination)
    every = (*split_attempts.ATTACKS, *TEXT_ATTACKS)
    resolve_attacks(options.attacks, every, every, "images or texts")
    module, examples, task, lpips = _load_sample(model, data, options, seed)
    is_text = task["kind"] != "images"
    kind = "texts" if is_text else "images"
    table = TEXT_ATTACKS if is_text else split_attempts.ATTACKS
    attacks = resolve_attacks(options.attacks, table, table, kind)
    if not is_text:
        need("torchmetrics", "audit")
    train, own, test = divide_examples(examples, SPLIT_SHARES, options.samples, seed)
    if on_loaded is not None:
        on_loaded(
            kind,
            f"{len(train)} client {kind}, {len(own)} attacker {kind}, {len(test)} test {kind}; "
            f"{min(options.attacked, len(test))} to attack",
        )
    steps = math.ceil(len(train) / options.batch_size) * options.epochs
    optimizer = OptimizerConfig(
        "adamw",
        options.lr,
        weight_decay=0.01,
        schedule="cosine",
        warmup=max(1, steps // 10),
        steps=steps + 1,
    )
    case = split_audit.SplitCase(
        module.to(options.device),
        train,
        own,
        test,
        task.get("mean", ()),
        task.get("std", ()),
        optimizer,
        Run(steps, options.batch_size, seed),
        options.attacked,
        Path(name_of(data)).stem,
    )
    combinations = chosen or options.combinations(is_text)
    store = open_store(state, resume, "split", module, examples, options, combinations, seed)
    if is_text:
        results = split_audit.audit_texts(
            case,
            combinations,
            attacks=attacks,
            fail_above=fail_above,
            progress=progress,
            store=store,
        )
    else:
        results = split_audit.audit_split(
            case,
            combinations,
            attacks=attacks,
            budget=options.budget,
            lpips=lpips,
            pictures=options.gallery,
            fail_above=fail_above,
            progress=progress,
            store=store,
        )
    about = {
        "model": name_of(model),
        "weights": "random" if options.fresh else "the model's",
        "data": name_of(data),
        "tested on": len(test),
        f"client's {kind}": len(train),
        f"attacker's {kind}": len(own),
        "epochs": options.epochs,
        "batch": options.batch_size,
        "lr": options.lr,
        **({} if is_text else {"attacker": options.budget.to_dict()}),
        "seed": seed,
    }
    return _report("split learning", results, started, facts, about, store)


@within_threads
def gradients(
    model: Source,
    data: AuditData,
    defences: Sequence[str] | None = None,
    *,
    options: GradientOptions | None = None,
    fail_above: float | None = None,
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    on_loaded: OnLoaded | None = None,
    state: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> AuditReport:
    """Measure what the updates of federated training leak about the samples behind them.

    Updates are computed as a client does, with each combination of defences, and attacked.

    Args:
        model: The unlocked model that clients train.
        data: Samples of its task. Half belong to the clients, half to the attacker.
        defences: Combinations of defences, such as "mjp=0.5"; by default one of each kind. An
            empty list attacks only undefended updates.
        options: Options of model, updates and attacks.
        fail_above: Fail a finding on defended updates if its attack gets further than this share
            of the way from baseline to upper bound.
        seed: The random seed of samples, random numbers and attacks.
        facts: Facts of the run, for the report.
        on_loaded: Called when model and data are loaded, with "images" or "texts" and their sizes.
        state: The folder in which finished steps are saved, a new one. They stay until
            `AuditReport.delete_state`, to be called once the report is written.
        resume: Whether to go on from what an interrupted audit has saved there.
        progress: Progress callback, in steps; its message estimates the time left.

    Returns:
        The score of each attack on each combination, and the verdict.

    Raises:
        AuditError: The case cannot be audited, or an attack is unknown.
        DefenceError: A defence is unknown or has a wrong value.
        LockError: The model is locked.

    Example:
        >>> options = regauge.audit.GradientOptions(["labels"], updates=2, batches=())
        >>> report = regauge.audit.gradients("vit", images, ["mjp=0.5"], options=options)
        >>> report.to_html("page.html")
    """
    started, options = time.monotonic(), resolve_options(options, GradientOptions())
    require_device(options.device)
    chosen = None if defences is None else items_of(defences) or [NONE]
    need("torchmetrics", "audit")
    for combination in chosen or options.combinations()[0]:
        parse_plan(combination, options.batch_size, options.steps, options.lr)
    module, examples, task, lpips = _load_sample(model, data, options, seed)
    is_text = task["kind"] != "images"
    kind = "texts" if is_text else "images"
    combinations, skipped = (chosen, []) if chosen else options.combinations(is_text)
    own, victims = divide_examples(examples, (ATTACKER_SHARE,), options.samples, seed)
    table = gradient_attempts.TEXT_ATTACKS if is_text else gradient_attempts.ATTACKS
    attacks = resolve_attacks(options.attacks, table, default_attacks(is_text), kind)
    if on_loaded is not None:
        on_loaded(
            kind,
            f"{len(victims)} client {kind}, {len(own)} attacker {kind}; {options.updates} updates "
            "to attack per combination",
        )
    module = module.to(options.device)
    case = gradient_audit.GradientCase(
        module,
        victims,
        own,
        task.get("mean", ()),
        task.get("std", ()),
        options.updates,
        options.batch_size,
        options.steps,
        options.lr,
        seed,
        Path(name_of(data)).stem,
    )
    store = open_store(state, resume, "gradients", module, examples, options, combinations, seed)
    snapshots = {} if is_text else train_snapshots(module, victims, options.train_steps, seed)
    results = gradient_audit.audit_gradients(
        replace(case, stages={f"{n} steps": m for n, m in snapshots.items()}),
        combinations,
        attacks=attacks,
        budget=replace(options.budget, seed=seed),
        optimized=options.optimized,
        batches=() if is_text else options.batches,
        lpips=lpips,
        pictures=options.gallery,
        fail_above=fail_above,
        progress=progress,
        store=store,
    )
    about: dict[str, Any] = {
        "model": name_of(model),
        "weights": "random" if options.fresh else "the model's",
        "data": name_of(data),
        f"clients' {kind}": len(victims),
        f"attacker's {kind}": len(own),
        "updates": options.updates,
        "batch": options.batch_size,
        "steps": options.steps,
        "lr": options.lr,
        "seed": seed,
        "granted": {a.title: a.threat.describe() for a in attacks},
    }
    results = replace(results, unchecked=(*results.unchecked, *skipped))
    return _report("gradients", results, started, facts, about, store, tables=1 if is_text else 2)


@within_threads
def recorded(
    run: str | Path,
    *,
    rounds: Sequence[int] = (),
    clients: Sequence[int] = (),
    attacks: Sequence[str] = (),
    budget: gradient_attempts.Budget | None = None,
    gallery: int = 4,
    facts: Mapping[str, Any] | None = None,
    on_loaded: OnLoaded | None = None,
    state: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> AuditReport:
    """Attack the contributions of a recorded federated run, round by round.

    Args:
        run: The folder of a run that was recorded.
        rounds: The rounds to attack, counted from 1; empty for all.
        clients: The clients to attack; empty for all.
        attacks: Names of attacks, or one name; "all" for all, empty for all but the slow ones.
        budget: The budget of attacks that optimize or learn; by default with the seed of the run.
        gallery: The number of images of an update in the gallery.
        facts: Facts of the run, for the report.
        on_loaded: Called when model and data are loaded, with "images" or "texts".
        state: The folder in which finished steps are saved, a new one. They stay until
            `AuditReport.delete_state`, to be called once the report is written.
        resume: Whether to go on from what an interrupted audit has saved there.
        progress: Progress callback, in steps; its message estimates the time left.

    Returns:
        Accuracy and leakage over rounds.

    Raises:
        FederatedError: Nothing was recorded for these rounds and clients.
        UpdateError: An attack is unknown or does not apply.

    Example:
        >>> how = {"folder": "run", "record": True, "mean": [0.3], "std": [0.4]}
        >>> _ = regauge.federated.run("vit", "digits", clients=2, rounds=1, **how)
        >>> report = regauge.audit.recorded("run", clients=[0], attacks=["labels"])
        >>> report.to_html("page.html")
    """
    from regauge.audit.recorded_audit import engine  # it imports federated training

    started = time.monotonic()
    opened = engine.open_run(Path(run), [n - 1 for n in rounds], clients)
    if on_loaded is not None:
        on_loaded("images" if opened.task["kind"] == "images" else "texts", "")
    files = digest_files(engine.files_of(opened))
    inputs = [opened.settings, opened.source, opened.targets, files, opened.test]
    inputs += [opened.model, *opened.parts]
    store = open_store(state, resume, "recorded", *inputs, list(attacks), budget, gallery)
    results = engine.audit_recorded(
        opened, attacks=attacks, budget=budget, pictures=gallery, progress=progress, store=store
    )
    return _report("recorded run", results, started, facts, {}, store)


def _load_sample(
    model: Source, data: AuditData, options: SampleOptions, seed: int
) -> tuple[torch.nn.Module, Examples, dict[str, Any], Lpips | None]:
    """Return the model, its examples, how it reads them, and the LPIPS network."""
    lpips = None if options.lpips is None else Lpips(options.lpips)
    module, beside = load_plain_model(model, options.fresh, seed)
    pixels = options.mean, options.std
    examples, task = load_examples(data, module, beside, resize=options.resize, pixels=pixels)
    return module, examples, task, lpips


def _load_weights(
    model: Model, with_module: bool
) -> tuple[torch.nn.Module | None, Spec, dict[str, torch.Tensor]]:
    """Return a live model if one is needed, its spec, and its weights.

    Names in memory may differ from those in the file.
    """
    if with_module:
        module = (
            load_model(model.checkpoint, "float32")
            if model.module is None
            else copy.deepcopy(model.module).float().eval()  # its weights are overwritten
        )
        return module, spec_of(module), dict(module.state_dict())
    tensors = {name: model.checkpoint[name] for name in model.checkpoint}
    state = {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}
    return None, model.spec, state


def _report(
    subject: str,
    results: Results,
    started: float,
    facts: Mapping[str, Any] | None,
    about: Mapping[str, Any],
    store: StateStore | None,
    after: Mapping[str, Any] | None = None,
    tables: int = 1,
) -> AuditReport:
    """Return the report of an audit, with the facts of its run."""
    seconds = round(time.monotonic() - started, 1)
    every = {**(facts or {}), **about, **results.facts, **(after or {}), "seconds": seconds}
    return AuditReport(subject, replace(results, facts=every), tables, store)

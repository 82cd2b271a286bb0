"""Red-team attacks on locks: which group resists which attack, for `docs/threat-model.md`.

Three models are locked and attacked: a ViT that is trained here, a GPT-2 of the assets, and a Llama
with grouped queries. Drift stands in for fine-tuning between the public base and the locked model:
noise of a share of each tensor's standard deviation, on every tensor.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from experiments.paper_003.pair_models import PAIRS
from experiments.shared.cells import Cell
from experiments.shared.models import build
from experiments.shared.presets import Subject
from experiments.shared.runner import Lab
from regauge.attacks.theft import Budget
from regauge.audit.lock_audit import LockCase, audit_lock
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.core.action import apply
from regauge.core.element import element
from regauge.core.fold import fold_norms
from regauge.core.spec import Spec
from regauge.data.tasks import prepare
from regauge.models.load import load_model
from regauge.models.resolve import spec_of
from regauge.results.findings import Finding, Results, Table, spread_of

State = dict[str, torch.Tensor]

# The groups of a lock: the kind of its members, and whether norms are folded first.
GROUPS: dict[str, tuple[str, bool]] = {
    "permutation": ("permutation", False),
    "signed": ("signed", False),
    "rotation": ("orthogonal", True),
    "general linear": ("full", False),
}
DRIFTS = {"small": (0.01, 0.1, 1.0), "paper": (0.01, 0.1, 1.0), "pico": (0.1,)}
LABELS = {"small": (50, 200, 1000), "paper": (50, 200, 1000), "pico": (20,)}
# How a thief trains: shortly with all numbers of labels, and patiently with the most of them.
SHORT: dict[str, dict[str, Any]] = {
    "small": {"steps": 300, "rates": [1e-3, 3e-3]},
    "paper": {"steps": 300, "rates": [1e-3, 3e-3]},
    "pico": {"steps": 5, "rates": [3e-3]},
}
LONG: dict[str, dict[str, Any]] = {
    "small": {"steps": 1000, "rates": [3e-3]},
    "paper": {"steps": 3000, "rates": [1e-3, 3e-3]},
    "pico": {"steps": 10, "rates": [3e-3]},
}
LLAMA = "llama_stories260K.safetensors"
TUNED = (
    "MiniLM, fine-tuned",
    "minilm-tuned",
    "minilm",
)  # a real fine-tune: its name, where it lies, and its base
KNOWN = 0.99


def attacks(lab: Lab) -> Results:
    """Locks of every group under every attack: a public base with drift, features, hidden states,
    and theft with few labels.
    """
    image, play = lab.preset.tables["table2"]["image"], lab.preset.tables["table4"]["shakespeare"]
    keys = range(1 if lab.preset_name == "pico" else 2)
    drifts, trials = DRIFTS[lab.preset_name], range(lab.trials)
    has_llama = (lab.assets / LLAMA).exists()
    models: dict[str, Subject | str] = {
        play.name: play,
        image.name: image,
        **({"Llama, 260 K": LLAMA} if has_llama else {}),
    }
    cells = {
        name: 1 if isinstance(one, str) or one.recipe is None else 2 for name, one in models.items()
    }  # with its training
    lab.total = len(keys) * (
        len(GROUPS) * len(drifts) * sum(cells.values()) + 3 * (cells[play.name] + cells[image.name])
    )
    lab.total += 3 * len(trials) * cells[image.name] + len(keys) * (
        sum(cells.values()) + (len(play.sources) > 1)
    )
    held = {
        seed: reader
        for reader in [PAIRS[lab.preset_name]()["gpt2"]]
        for seed in (0, 1)
        if lab.is_trained(reader, seed, "plain")
    }
    lab.total += 2 * len(keys) * len(held)
    base: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for name, subject in models.items():
        for group in GROUPS:
            for drift in drifts:
                found = [
                    _audit(lab, name, subject, "base", group, key, drift=drift) for key in keys
                ]
                base[name, group, drift] = found
    tuned_name, tuned, root = TUNED
    real: dict[str, list[dict[str, Any]]] = {}
    if all((lab.assets / one).exists() for one in (tuned, root)):
        lab.total += 3 * len(keys)
        for group in ("permutation", "signed", "rotation"):
            real[group] = [
                _audit(lab, tuned_name, tuned, "base", group, key, root=root) for key in keys
            ]
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for subject in (play, image):
        for group in ("permutation", "signed", "rotation"):
            seen[subject.name, group] = [
                _audit(lab, subject.name, subject, "features", group, key) for key in keys
            ]
    labels = LABELS[lab.preset_name]
    stolen = {
        group: [
            _audit(
                lab,
                image.name,
                image,
                "theft",
                group,
                t,
                trial=t,
                labels=labels,
                **SHORT[lab.preset_name],
            )
            for t in trials
        ]
        for group in ("permutation", "rotation")
    }
    patient = [
        _audit(
            lab,
            image.name,
            image,
            "theft",
            "permutation",
            t,
            trial=t,
            labels=labels[-1:],
            **LONG[lab.preset_name],
        )
        for t in trials
    ]
    alone = {
        name: [_audit(lab, name, one, "edges", "permutation", key) for key in keys]
        for name, one in models.items()
    }
    if len(play.sources) > 1:  # another model of the same training
        alone[f"{play.name} of another seed"] = [
            _audit(lab, play.name, play, "edges", "permutation", key, trial=1) for key in keys
        ]
    for seed, reader in held.items():  # models on which the attack was not tuned
        name = f"{reader.name} trained here, seed {seed}"
        alone[name] = [
            _audit(lab, name, reader, "edges", "permutation", key, trial=seed) for key in keys
        ]
    judged = lab.preset_name != "pico"  # weights that learned next to nothing have little to tell
    findings = [
        *_of_bases(base, judged),
        *_of_real(tuned_name, real),
        *_of_edges(alone),
        *_of_features(seen, judged),
        *_of_theft("theft", stolen),
        *_of_theft("patience", {"permutation": patient}),
    ]
    of_bases = [_bases_table(base, drifts), *([_real_table(tuned_name, real)] if real else [])]
    tables = (*of_bases, _edges_table(alone), _features_table(seen), _theft_table(stolen))
    facts = lab.facts("lock/attacks", len(trials), keys=len(keys))
    missing = [] if has_llama else [f"a Llama with grouped queries ({LLAMA} is not in the assets)"]
    if not real:
        missing.append(f"a real fine-tune and its base ({tuned} and {root} are not in the assets)")
    if not held:
        missing.append(
            "the locked file alone, of models that the attack was not tuned on (python -m "
            "experiments 003/pairs trains them)"
        )
    return Results("Red-team attacks on locks", tuple(findings), tables, (), facts, tuple(missing))


def _audit(
    lab: Lab,
    name: str,
    subject: Subject | str,
    what: str,
    group: str,
    key: int,
    *,
    trial: int = 0,
    drift: float = 0.0,
    root: str = "",
    **more: Any,
) -> dict[str, Any]:
    """Run an audit: [floor, value, ceiling] and seconds, by attack."""
    within, fold = GROUPS[group]
    parameters: dict[str, Any] = {
        "what": what,
        "within": within,
        "fold": fold,
        "key": key,
        "drift": drift,
        **more,
    }
    data: dict[str, Any] = {}
    if isinstance(subject, str):
        parameters["model"] = "stored"
        data |= {"source": lab.source(subject), **({"base": lab.source(root)} if root else {})}
    else:
        parameters |= {"model": subject.model, "task": {**subject.task, **subject.tested}}
        data |= (
            lab.sources(subject, trial)
            if subject.recipe is None
            else {"weights": lab.train(subject, trial, "plain")}
        )
        if subject.tokenizer is not None:
            data["tokenizer"] = lab.source(subject.tokenizer)
        if what != "base":
            data["test"] = lab.open(subject.test)
        if what == "theft":
            assert subject.train is not None
            data["train"] = lab.open(
                subject.train
            )  # a thief's examples are the owner's own here: the best that a thief can have
            parameters["learned"] = dict(subject.task)
    now = f"{what}: {name}, {group}{f', drift {drift}' if drift else ''}, key {key}"
    return dict(lab.run(CELLS[what], parameters, data, now).values["found"])


def _compute(p: Mapping[str, Any], data: Mapping[str, Any], work: ResumeState) -> Outcome:
    source = data["source"].uri if "source" in data else None
    if p["model"] == "stored":
        model = _stored(str(source))
    else:
        model = build(p["model"], 0, source)
        if "weights" in data:
            model.load_state_dict(data["weights"].tensors)
    model = model.float().eval()
    spec, state = spec_of(model), _state(model)
    tokenizer = data["tokenizer"].uri if "tokenizer" in data else None
    test = prepare(p["task"], data["test"], tokenizer) if "test" in data else None
    if p["what"] == "features":  # what enters the blocks does not depend on how they were locked
        case = LockCase(spec, state, p["within"], model=model, test=test)
        return Outcome({"found": _found(case, p)})
    if p["fold"]:
        spec, state = fold_norms(spec, state)
    tuned = drifted(spec, state, float(p["drift"]), int(p["key"]))
    g = element(spec, int(p["key"]), within=p["within"])
    locked = apply(g, tuned, "backbone")
    if p["what"] == "base":
        base = _state(_stored(data["base"].uri)) if "base" in data else None
        base = state if base is None else fold_norms(spec_of(model), base)[1] if p["fold"] else base
        return Outcome({"found": _found(LockCase(spec, locked, p["within"], g, base), p)})
    model.load_state_dict(locked)
    if p["what"] == "edges":
        some = test.only(np.arange(min(64, len(test)))) if test is not None else None
        return Outcome(
            {"found": _found(LockCase(spec, locked, p["within"], g, model=model, test=some), p)}
        )
    train = prepare(p["learned"], data["train"], tokenizer)
    assert test is not None
    some = test.only(np.arange(min(1000, len(test))))
    return Outcome(
        {
            "found": _found(
                LockCase(spec, locked, p["within"], g, model=model, train=train, test=some), p
            )
        }
    )


CELLS = {
    "base": Cell("audit", 1, _compute),
    "features": Cell("audit-features", 1, _compute),
    "theft": Cell("audit", 1, _compute),
    "edges": Cell("audit-edges", 1, _compute),
}
TRIED = {
    "base": ("public base", "lineage"),
    "features": ("known inputs", "seen features", "vocabulary"),
    "theft": ("theft",),
    "edges": ("public edges",),
}


def _found(case: LockCase, p: Mapping[str, Any]) -> dict[str, Any]:
    budget = Budget(
        int(p.get("steps", 300)), lrs=tuple(p.get("rates", (1e-3,))), seed=int(p["key"])
    )
    results = audit_lock(
        case,
        labels=tuple(p.get("labels", ())),
        budget=budget,
        seed=int(p["key"]),
        attacks=TRIED[p["what"]],
    )
    seconds = {row[0]: row[-1] for row in results.tables[0].rows}
    return {
        f.id.removeprefix("lock/"): [f.floor, f.value, f.ceiling, seconds[f.id], f.sentence]
        for f in results.findings
    }


def _stored(source: str) -> torch.nn.Module:
    from regauge.checkpoints.reader import open_checkpoint

    return load_model(open_checkpoint(source), "float32")


def _state(model: torch.nn.Module) -> State:
    return {n: v.detach().clone() for n, v in model.state_dict().items()}


def drifted(spec: Spec, state: Mapping[str, torch.Tensor], drift: float, seed: int) -> State:
    """The state as fine-tuning of this size would leave it: noise of a share of each tensor's
    spread. What must be constant stays.
    """
    draw = torch.Generator().manual_seed(1000 + seed)
    out: State = {}
    for name, value in state.items():
        moves = value.is_floating_point() and name not in spec.fixed and value.numel() > 1
        out[name] = (
            value
            + drift
            * float(value.std())
            * torch.randn(value.shape, generator=draw, dtype=value.dtype)
            if moves
            else value
        )
    return out | {
        alias: out[target] for alias, target in spec.ties.items() if alias in out and target in out
    }


def _mean(found: Sequence[Mapping[str, Any]], attack: str, place: int = 1) -> float:
    values = [f[attack][place] for f in found if attack in f and f[attack][place] is not None]
    return float(statistics.fmean(values)) if values else math.nan


def _spread(found: Sequence[Mapping[str, Any]], attack: str) -> float | None:
    return spread_of([f[attack][1] for f in found if attack in f])


def _finding(
    name: str,
    statement: str,
    found: Sequence[Mapping[str, Any]],
    attack: str,
    sentence: str,
    holds: bool | None = None,
    measure: str = "share of the key",
) -> Finding:
    """One attack, over keys or trials."""
    floor, value, ceiling = (_mean(found, attack, place) for place in range(3))
    return Finding(
        name,
        statement,
        holds,
        value,
        floor,
        ceiling,
        sentence,
        measure=measure,
        spread=_spread(found, attack),
        trials=len(found),
    )


def _of_bases(
    base: Mapping[tuple[str, str, float], Sequence[Mapping[str, Any]]], judge: bool
) -> list[Finding]:
    out = []
    for (name, group, drift), found in base.items():
        share = _mean(found, "public base")
        judged = judge and drift <= 0.1 and group == "permutation"
        said = f"{share:.1%} of the key in {_mean(found, 'public base', 3):.1f} s"
        statement = f"A public base reveals {group} keys of {name}, at a drift of {drift}"
        out.append(
            _finding(
                f"base/{name}/{group}/{drift}",
                statement,
                found,
                "public base",
                said,
                share >= KNOWN if judged else None,
            )
        )
    return out


def _of_real(name: str, real: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Finding]:
    out = []
    for group, found in real.items():
        share = _mean(found, "public base")
        said = f"{share:.1%} of the key in {_mean(found, 'public base', 3):.1f} s"
        statement = f"{name}, locked by {group}, is undone by its public base"
        out.append(
            _finding(
                f"fine-tune/{name}/{group}", statement, found, "public base", said, share >= KNOWN
            )
        )
    return out


def _real_table(name: str, real: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    rows: list[tuple[str | float | None, ...]] = []
    for group, found in real.items():
        rows.append(
            (
                name,
                group,
                _mean(found, "public base"),
                _mean(found, "public base", 3),
                _mean(found, "lineage"),
            )
        )
    note = (
        "Share of the key that the public base of the fine-tune reveals; lineage: by how much the "
        "base is nearer than an unrelated model in the invariants."
    )
    return Table(
        "A real fine-tune and its public base",
        ("model", "lock", "share of the key", "seconds", "lineage"),
        tuple(rows),
        note,
    )


def _of_edges(alone: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Finding]:
    out = []
    for name, found in alone.items():
        said = (
            f"{_mean(found, 'public edges'):.1%} of the order of the stream in "
            f"{_mean(found, 'public edges', 3):.1f} s"
        )
        statement = f"The locked file of {name} alone reveals the order of the stream"
        out.append(
            _finding(
                f"edges/{name}/permutation",
                statement,
                found,
                "public edges",
                said,
                measure="share of the stream's order",
            )
        )
    return out


def _edges_table(alone: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    rows: list[tuple[str | float | None, ...]] = []
    for name, found in alone.items():
        used = [_mean(found, "public edges, used", place) for place in (0, 1, 2)]
        rows.append(
            (
                name,
                *(_mean(found, "public edges", place) for place in (0, 1)),
                *(None if math.isnan(v) else v for v in used),
            )
        )
    note = (
        "Order found: the share of the stream's permutation that the locked file reveals, from its "
        "embedding and head. The last three columns are accuracies, or for language models minus "
        "the loss per token in nats."
    )
    return Table(
        "The locked file alone",
        (
            "model",
            "random guess",
            "order found",
            "locked model",
            "with the order found",
            "owner's model",
        ),
        tuple(rows),
        note,
    )


# the keys of attacks on features in the cells, and their names in findings
FEATURES = {"known inputs": "known inputs", "seen features": "unknown inputs", "vocabulary": "text"}


def _of_features(
    seen: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], judge: bool
) -> list[Finding]:
    out = []
    for (name, group), found in seen.items():
        for attack in (a for a in FEATURES if a in found[0]):
            text = attack == "vocabulary"
            statement = (
                f"{FEATURES[attack].capitalize()} reveal {'the text' if text else f'{group} keys'} "
                f"of {name}"
            )
            judged = judge and (attack == "known inputs" or group == "permutation")
            holds = _mean(found, attack) >= KNOWN if judged else None
            measure = "share of tokens" if text else "share of the key"
            out.append(
                _finding(
                    f"features/{name}/{group}/{FEATURES[attack]}",
                    statement,
                    found,
                    attack,
                    str(found[0][attack][4]),
                    holds,
                    measure,
                )
            )
    return out


def _of_theft(what: str, stolen: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Finding]:
    out = []
    for group, found in stolen.items():
        for attack in (a for a in found[0] if a.startswith("theft/")):
            floor, value, ceiling = (_mean(found, attack, place) for place in range(3))
            said = (
                f"{value:.3f}, where the locked model gives {floor:.3f} and the owner's "
                f"{ceiling:.3f}"
            )
            name = f"{what}/{group}/{attack.removeprefix('theft/')}"
            out.append(
                _finding(
                    name,
                    "Accuracy of a thief without a base",
                    found,
                    attack,
                    said,
                    measure="accuracy",
                )
            )
    return out


def _bases_table(
    base: Mapping[tuple[str, str, float], Sequence[Mapping[str, Any]]], drifts: Sequence[float]
) -> Table:
    rows: list[tuple[str | float | None, ...]] = []
    for name, group in dict.fromkeys((n, g) for n, g, _ in base):
        shares = [round(_mean(base[name, group, d], "public base"), 4) for d in drifts]
        first = base[name, group, drifts[0]]
        vectors = _mean(first, "norm vectors")
        detail = None if math.isnan(vectors) else round(vectors, 4)
        rows.append(
            (
                name,
                group,
                *shares,
                detail,
                round(_mean(first, "lineage"), 3),
                round(_mean(first, "public base", 3), 1),
            )
        )
    heads = (
        "model",
        "lock",
        *(f"drift {d:g}" for d in drifts),
        "gains and biases alone",
        "lineage",
        "seconds",
    )
    note = (
        "Drift columns: the share of the key that an adversary with the base recovers, by drift. "
        "The other columns are at the smallest drift: the share recovered from gains and biases "
        "alone; by how much the base is nearer than an unrelated model in the invariants (1 means "
        "equal invariants); and the seconds of the attack. Rows of rotations and of general linear "
        "members count as recovered if every entry is within 0.1."
    )
    return Table("A public base", heads, tuple(rows), note)


def _features_table(seen: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> Table:
    rows: list[tuple[str | float | None, ...]] = []
    for (name, group), found in seen.items():
        text, enough = _mean(found, "vocabulary"), str(found[0]["known inputs"][4])
        detail = None if math.isnan(text) else text
        rows.append(
            (
                name,
                group,
                _mean(found, "known inputs"),
                enough,
                _mean(found, "seen features"),
                detail,
            )
        )
    note = (
        "Shares recovered. Known inputs: features before and after the key. Unknown inputs: "
        "transformed features of one half of the test examples, and features of the other half "
        "through the public embedding. Text: its tokens, from hidden states in the middle of the "
        "open model."
    )
    return Table(
        "Transformed features",
        ("model", "key", "known inputs", "known tokens needed", "unknown inputs", "text"),
        tuple(rows),
        note,
    )


def _theft_table(stolen: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    rows: list[tuple[str | float | None, ...]] = []
    for group, found in stolen.items():
        for labels in sorted(
            {a.rsplit(" ", 1)[1] for a in found[0] if a.startswith("theft/")}, key=int
        ):
            ways = [
                _mean(found, f"theft/{way} {labels}") for way in ("new edges", "tuned", "scratch")
            ]
            limits = [_mean(found, f"theft/tuned {labels}", place) for place in (0, 2)]
            rows.append((group, int(labels), *ways, *limits))
    note = (
        "Accuracies: a new embedding and head on the frozen backbone; the whole model fine-tuned; "
        "a model trained from scratch on the same labels; the locked model unchanged; the owner's. "
        "A thief trains for 300 steps of 32 examples, at the better of two learning rates."
    )
    return Table(
        "Theft without a base",
        (
            "lock",
            "labels",
            "new embedding and head",
            "fine-tuned",
            "from scratch",
            "locked, unchanged",
            "owner's model",
        ),
        tuple(rows),
        note,
    )

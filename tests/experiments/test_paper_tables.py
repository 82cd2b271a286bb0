"""Experiments: every table through the same code as the real runs, on pico models; a wrong element
is noticed; the docs are what was found.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import operator
import os
import random
import re
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
import torch

from experiments import EXPERIMENTS
from experiments.__main__ import main
from experiments.catalog import PAGES
from experiments.document import build_pages, fill
from experiments.figure_catalog import FIGURES
from experiments.figures import figure_of, render_svg
from experiments.former_words import load_renamed, rename_results, renamed
from experiments.paper_000 import locked_finetune
from experiments.paper_000.claims import distance, outputs_of
from experiments.paper_000.permutation import PAPER
from experiments.paper_002 import accuracy, positions
from experiments.paper_003 import pair_cells, pair_models
from experiments.shared import finetune_cells, models, presets, runner, train_cells
from experiments.shared.presets import PRESETS, From
from experiments.shared.pretrained import pretrained_experiments
from experiments.shared.runner import Lab
from experiments.split import defence_recipes
from regauge.checkpoints.resume import ResumeState
from regauge.data import datasets, tasks
from regauge.data.tasks import Examples
from regauge.errors import DataError
from regauge.matching.barriers import score
from regauge.models.load import load_model
from regauge.results.findings import Results, load_results
from regauge.results.report import format_number
from support import forks, stand_ins

DOCS = Path(__file__).parents[2] / "docs"
GOOD, BAD = ["fine", "bright", "lovely", "superb"], ["dull", "grim", "stale", "clumsy"]


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of assets like the real one, with sentences that are easy to tell apart and a GPT-2
    of random weights.
    """
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("assets")
    draw = random.Random(0)

    def sentence(label: int) -> str:
        words = [
            draw.choice(["the", "a", "film", "plot", "and", "scene"])
            for _ in range(draw.randint(1, 6))
        ]
        return " ".join([*words, draw.choice((BAD, GOOD)[label]), draw.choice(["film", "plot"])])

    for name, field, count in (("train", "sentence", 300), ("dev", "content", 80)):
        rows = [f"{i % 2}\t{sentence(i % 2)}\n" for i in range(count)]
        (folder / f"sst2_{name}.tsv").write_text(f"label\t{field}\n" + "".join(rows))
    text = "\n".join(sentence(i % 2) for i in range(600))
    (folder / "tinyshakespeare.txt").write_text(text)
    for name in ("test", "valid"):
        (folder / f"wikitext2_{name}.txt").write_text(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    (folder / "gpt2_pair").mkdir()
    tokenizer.save(str(folder / "gpt2_pair" / "tokenizer.json"))
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=32,
        vocab_size=1024,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "gpt2_pair" / "seed1")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _here(cache: Path, assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders, and less effort where a file of its own tests an experiment at full length:
    `test_paper_003`, `test_defence_recipes`.
    """
    monkeypatch.setenv("REGAUGE_CACHE", str(cache))
    monkeypatch.setenv("REGAUGE_ASSETS", str(assets))
    monkeypatch.setitem(pair_cells.EFFORT, "pico", {**pair_cells.EFFORT["pico"], "steps": 5})
    scene = replace(defence_recipes.PICO, recipes=defence_recipes.PICO.recipes[::2])
    monkeypatch.setitem(defence_recipes.SCENES, "pico", (scene,))


def reproduce(name: str, folder: Path, *more: str) -> tuple[int, Results]:
    code = main([name, "--preset", "pico", "--json", str(folder / "r.json"), *more])
    return code, load_results(folder / "r.json")


# Of each paper a table whose page is drawn too, with all kinds of figures among them.
DRAWN = (
    "000/table2",
    "000/figure7",
    "002/figure1",
    "003/figure4",
    "federated/fusion",
    "split/leaks",
)
# Slow even on pico models; their parts are tested in files of their own.
LONG = (
    "000/table6",
    "003/table2",
    "003/figure3",
    "003/barriers",
    "federated/fusion",
    "federated/training",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in EXPERIMENTS]
)
def test_every_table_runs_and_holds(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = ("--report", str(tmp_path / "page.html")) if name in (*DRAWN, *LONG) else ()
    code, results = reproduce(name, tmp_path, *draw)
    said = capsys.readouterr()
    assert not [(f.id, f.value, f.sentence) for f in results.failed]
    assert code == 0
    assert "findings hold" in said.out
    steps = said.err.splitlines()
    assert all(line.startswith("regauge: ") for line in steps)  # nobody else talks
    done, total = next(
        found for line in reversed(steps) if (found := re.search(r" (\d+)/(\d+): ", line))
    ).groups()
    assert done == total  # as many cells as were announced
    assert not draw or results.title in (tmp_path / "page.html").read_text()
    assert results.facts["experiment"] == name
    assert rename_results(results) == results  # a fresh run prints no former words
    assert str(tmp_path.parent) not in json.dumps(
        {**results.facts, "command": ""}
    )  # no machine's paths
    paper, _, table = name.partition("/")
    if paper != "000":
        return
    if table in ("table6", "figure7"):
        assert not any(
            f.kind == "images" for f in results.figures
        )  # they may show people: on the user's page alone
        assert "data:image/png" in (tmp_path / "page.html").read_text()
        claims = [f for f in results.findings if f.id.startswith("claim/")]
        assert claims
        assert {f.holds for f in claims} == {None}  # one seed judges nothing
        return
    if table not in PAPER:
        exact = [f for f in results.findings if "/with key" in f.id]
        assert {f.holds for f in exact} <= {
            True,
            None,
        }  # of long runs in float32, losses and weights are only told
        assert sum(f.holds is True for f in exact) > len(exact) / 2
        assert all(
            f.value < f.ceiling / 20
            for f in exact
            if f.id.endswith(("/losses", "/weights", "/text"))
        )
        return
    assert {f.id for f in results.findings if f.holds} >= {
        f"{key}/columns/outputs" for key in PAPER[table]
    }
    shown = {
        column: [row[i] for row in results.tables[0].rows]
        for i, column in enumerate(results.tables[0].columns)
    }
    plain = next(values for column, values in shown.items() if "accuracy" in column)
    assert plain[0] == plain[1]


def test_a_model_without_its_key_drops_to_a_guess(tmp_path: Path) -> None:
    for name, key in (("000/table2", "image"), ("000/table4", "bert")):
        found = {f.id: f for f in reproduce(name, tmp_path)[1].findings}
        assert found[f"{key}/columns"].value > 0.8
        for way in ("no key", "wrong key"):
            assert found[f"{key}/{way}"].holds
            assert found[f"{key}/{way}"].value < found[f"{key}/{way}"].floor + 0.16
            assert found[f"{key}/{way}"].trials == 3


def test_training_agrees_to_rounding_and_another_seed_does_not(tmp_path: Path) -> None:
    found = {f.id: f for f in reproduce("000/table5", tmp_path, "--seeds", "2")[1].findings}
    for what in ("outputs", "weights"):
        one = found[f"bert/columns/{what}"]
        assert one.holds
        assert one.trials == 2
        assert one.value < 1e-9
        assert one.ceiling > 0.1


def only(table: str, key: str, cache: Path) -> Results:
    """One subject of a table, with a cache of its own."""
    lab = Lab("pico", cache=cache)
    lab.preset = replace(lab.preset, tables={table: {key: lab.preset.tables[table][key]}})
    return EXPERIMENTS[f"000/{table}"](lab)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["000/table6", "002/table5"])
def test_parts_in_several_processes_are_the_same(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What other processes put into the cache is all that the experiment asks for, and is what it
    would have computed.
    """
    out = tmp_path / "2.json"
    command = [sys.executable, "-m", "experiments", name, "--preset", "pico", "--json", str(out)]
    ran = subprocess.run(  # processes of this one would lack the operators of torchvision
        [*command, "--jobs", "2", "--threads", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "REGAUGE_CACHE": str(tmp_path / "cache-2")},
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert ran.returncode == 0, ran.stderr
    assert "in 2 processes" in ran.stderr
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "cache-1"))
    code, alone = reproduce(name, tmp_path, "--jobs", "1", "--threads", "1")
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "in 2 processes" not in said.err
    found = {"2": load_results(out), "1": alone}
    parts, whole = (
        {p.name for p in (tmp_path / f"cache-{jobs}").rglob("*.safetensors")} for jobs in ("2", "1")
    )
    assert parts == whole
    assert [(f.id, f.value) for f in found["2"].findings] == [
        (f.id, f.value) for f in found["1"].findings
    ]


def test_a_part_that_fails_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forks.context())
    with pytest.raises(TypeError, match="not subscriptable"):
        Lab("pico", cache=tmp_path, jobs=2).ahead(operator.getitem, [1, 2])
    assert not multiprocessing.active_children()


def test_a_wrong_element_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = models.used
    monkeypatch.setattr(
        train_cells,
        "used",
        lambda model, way, seed: right(model, "wrong" if way == "columns" else way, seed),
    )
    results = only("table2", "image", tmp_path)
    assert {f.id for f in results.failed} == {"image/columns", "image/columns/outputs"}
    wrong = next(f for f in results.failed if f.id == "image/columns")
    assert wrong.value < wrong.floor + 0.16 < wrong.ceiling


def test_training_with_a_wrong_element_ends_with_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "other"))
    right = models.used
    monkeypatch.setattr(
        train_cells,
        "used",
        lambda model, way, seed: right(model, "wrong" if way == "columns" else way, seed),
    )
    code, results = reproduce("000/table5", tmp_path)
    assert code == 3
    assert {"bert/columns/outputs", "gpt2/columns/weights"} <= {f.id for f in results.failed}
    assert "FAILED" in capsys.readouterr().out


def test_training_with_rows_that_are_not_put_back_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regauge.locking import permuted

    right = permuted.run_permuted

    def wrong(crossing: Any, *, columns: Any = None, shuffle: Any = None) -> Any:
        z = right(crossing, columns=columns, shuffle=shuffle)
        return z if shuffle is None else crossing.restore(shuffle, z)

    monkeypatch.setattr(permuted, "run_permuted", wrong)
    failed = {f.id for f in only("table3", "text", tmp_path).failed}
    assert {"text/rows/outputs", "text/rows/weights"} <= failed
    assert not any("columns" in name for name in failed)


@pytest.fixture
def wrong_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edges by another key than the lock's."""
    right = finetune_cells.locked_element
    monkeypatch.setattr(
        finetune_cells,
        "locked_element",
        lambda spec, record, key: right(spec, replace(record, digest="0" * 64), key, tags=False),
    )


@pytest.mark.usefixtures("wrong_key")
def test_fine_tuning_with_a_wrong_key_is_noticed(tmp_path: Path) -> None:
    failed = {f.id for f in only("table7", "image", tmp_path).failed}
    assert {"image/with key/losses", "image/with key/weights"} <= failed
    spoken = {f.id: f for f in EXPERIMENTS["000/figure6"](Lab("pico", cache=tmp_path)).findings}
    assert spoken["shakespeare/with key/text"].holds is False
    assert spoken["shakespeare/with key"].holds is False


def test_a_locked_model_stands_between(tmp_path: Path) -> None:
    """What is lost without the key, and that the controls begin with what they should."""
    found = {f.id: f for f in reproduce("000/figure6", tmp_path)[1].findings}
    locked = found["shakespeare/without key"]
    assert locked.ceiling < 0.5 * min(
        locked.value, locked.floor
    )  # the plain model has learned something, and the locked one shows little of it
    lab = Lab("pico")
    subject = lab.preset.tables["table7"]["bert"]
    data = {"train": lab.open(subject.train), **lab.begin(subject, 0)}
    states = {}
    for way in finetune_cells.WAYS:
        p = {"model": subject.model, "way": way, "seed": 0, "fresh": list(subject.fresh)}
        model, put_back = finetune_cells.begun(p, data, torch.float64, "cpu")
        states[way] = put_back(dict(model.state_dict()))
    table, inside, head = (
        "bert.embeddings.word_embeddings.weight",
        "bert.encoder.layer.0.output.dense.weight",
        "classifier.weight",
    )
    start = data["start"].tensors
    same = {
        (way, name)
        for way in finetune_cells.WAYS
        for name in (table, inside, head)
        if torch.equal(states[way][name], start[name])
    }
    assert same == {
        ("plain", table),
        ("plain", inside),
        ("authorized", table),
        ("authorized", inside),
        ("unauthorized", table),
        ("edges", table),
    }
    assert (
        len({float(states[way][head].sum()) for way in finetune_cells.WAYS}) == 1
    )  # one new head for all
    moved, plain = states["unauthorized"][inside], start[inside]
    assert torch.equal(
        moved.flatten().sort().values, plain.flatten().sort().values
    )  # a lock moves numbers, and changes none


def test_what_is_fine_tuned_on_was_not_trained_on() -> None:
    small = PRESETS["small"]().tables
    order = np.random.default_rng(0).permutation(67_349)
    before = set(order[: small["table4"]["bert"].train.rows].tolist())
    for name in ("bert", "gpt2"):
        tuned = small["table7"][name]
        rows = tasks._select_part(tuned.task, 67_349)
        kept = tasks._select_part({**tuned.task, **tuned.validated}, 67_349)
        assert len(rows) == 2000
        assert len(kept) == 500
        assert not before & {*rows.tolist(), *kept.tolist()}
        assert not set(rows.tolist()) & set(kept.tolist())


def test_looks_go_on_after_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab("pico")
    subject = lab.preset.tables["table7"]["image"]
    data = {"train": lab.open(subject.train), **lab.begin(subject, 0)}
    p = {
        "model": subject.model,
        "task": subject.task,
        "recipe": subject.recipe,
        "fresh": list(subject.fresh),
        "batch": 120,
        "seed": 0,
    }
    p |= {"validated": {**subject.task, **subject.validated}, "way": "authorized"}
    whole = finetune_cells.tune(p, data, ResumeState(tmp_path / "a"))
    right, calls = finetune_cells.mean_loss, []

    def stops(*args: Any) -> float:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return right(*args)

    monkeypatch.setattr(finetune_cells, "mean_loss", stops)
    work = ResumeState(tmp_path / "b", every=0.0)
    with pytest.raises(KeyboardInterrupt):
        finetune_cells.tune(p, data, work)
    assert finetune_cells.tune(p, data, work).digest == whole.digest
    assert [step for step, _ in whole.values["seen"]] == [round(i * 40 / 6) for i in range(7)]
    assert len(calls) == 4 + 4  # the three looks that were over are not taken again


def test_samples_are_shown_in_one_line() -> None:
    assert (
        locked_finetune.shown("to be,\nor | not\ufffd <b> /x\x00 é") == "to be,¶or · not· ·b· ·x· é"
    )


def test_a_test_in_float64_sees_differences_in_float64(tmp_path: Path) -> None:
    lab = Lab("pico", cache=tmp_path)
    subject = lab.preset.tables["table3"]["text"]
    plain = lab.train(subject, 0, "plain")
    other = replace(plain, tensors={name: t * (1 + 1e-10) for name, t in plain.tensors.items()})
    a, b = (
        lab.score(subject, 0, "plain", weights=weights, dtype="float64")
        for weights in (plain, other)
    )
    assert 1e-12 < distance(outputs_of(a), outputs_of(b)) < 1e-7


@pytest.mark.parametrize("way", models.WAYS)
def test_the_ways_of_a_dense_model(way: str) -> None:
    """The dense head stays outside: its ViT is what moves, and comes back."""
    about = {**PRESETS["pico"]().tables["table2"]["scene"].model}
    model = models.build(about, 0).double().eval()
    x = torch.randn(2, 1, 16, 16, dtype=torch.float64)
    before, state = model(x), {k: v.clone() for k, v in model.state_dict().items()}
    assert before.shape == (2, 11, 16, 16)
    moved = models.used(model, way, 5).eval()
    error = float((moved(x) - before).norm() / before.norm())
    assert error < 1e-9 if way not in ("moved", "wrong") else error > 0.1
    if way not in ("moved", "wrong"):
        back = models.plain(moved).state_dict()
        assert all(torch.equal(back[k], state[k]) for k in state)


def test_ends_of_pairs_are_loaded_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab("pico", cache=tmp_path)
    assert pair_models.finished(lab) == {"gpt2": [], "llama": [], "vit": [], "bert": []}
    assert not list(tmp_path.glob("*"))  # asking does not train
    a, b = (pair_models.model(lab, "gpt2", seed) for seed in (0, 1))
    assert pair_models.finished(lab)["gpt2"] == [0, 1]
    assert not torch.equal(a.lm_head.weight, a.transformer.wte.weight)
    assert not torch.equal(a.lm_head.weight, b.lm_head.weight)
    pair_models.save(lab, "gpt2", 0, tmp_path / "a")
    again = load_model(tmp_path / "a")
    assert all(torch.equal(x, again.state_dict()[n]) for n, x in a.state_dict().items())
    assert (tmp_path / "a" / "tokenizer.json").exists()
    train, validation, test = (
        pair_models.examples(lab, "gpt2", which) for which in ("train", "validation", "test")
    )
    assert len(train) > 10 * len(test) > 0
    assert len(validation) == pytest.approx(len(test), abs=2)
    scored = lab.score(
        pair_models.subject(lab, "gpt2"),
        0,
        "plain",
        weights=lab.train(pair_models.subject(lab, "gpt2"), 0, "plain"),
    )
    assert score(a, a.state_dict(), test).loss == pytest.approx(
        scored.values["measures"]["nats"], rel=1e-5
    )  # two ways to the same number


def test_what_is_kept_for_validation_is_not_trained_on() -> None:
    lab = Lab("pico")
    for name in ("vit", "bert"):
        train, validation = (
            pair_models.examples(lab, name, which) for which in ("train", "validation")
        )
        whole = len(lab.open(pair_models.subject(lab, name).train))
        assert len(train) + len(validation) == whole
        assert len(validation) == pytest.approx(whole / 20, abs=1)
    train, validation = (
        pair_models.examples(lab, "vit", which).batch(np.arange(50))[0]["pixel_values"]
        for which in ("train", "validation")
    )
    assert not any(torch.equal(a, b) for a in train for b in validation)


def test_the_bigram_that_ends_are_compared_with() -> None:
    draw = np.random.default_rng(0)
    follow = draw.dirichlet(np.full(8, 0.3), size=8)
    ids = [0]
    for _ in range(40_000):
        ids.append(int(draw.choice(8, p=follow[ids[-1]])))
    windows = torch.tensor(ids[:40_000]).view(-1, 20)
    whole = Examples(len(windows), 8, lambda rows: ({}, windows[rows]), causal=True)
    share = np.bincount(ids, minlength=8) / len(ids)
    true = float(-(share[:, None] * follow * np.log(np.maximum(follow, 1e-300))).sum())
    assert pair_models.bigram(
        whole.only(np.arange(1500)), whole.only(np.arange(1500, 2000))
    ) == pytest.approx(true, rel=0.03)


def test_a_bigram_of_a_large_vocabulary_fits_in_memory() -> None:
    """A table of all pairs of 50,257 tokens would take 20 GB; pairs that never occurred count 0."""
    draw = torch.Generator().manual_seed(0)
    classes = 50_257
    windows = torch.randperm(classes, generator=draw)[torch.randint(0, 9, (60, 33), generator=draw)]
    seen, asked = windows[:50], windows[50:]

    def examples(ids: torch.Tensor) -> Examples:
        return Examples(len(ids), classes, lambda rows: ({}, ids[rows]), causal=True)

    pairs, firsts, single = Counter[Any](), Counter[int](), Counter(seen.flatten().tolist())
    for row in seen.tolist():
        pairs.update(itertools.pairwise(row))
        firsts.update(row[:-1])
    nats = [
        statistics.fmean(
            -math.log(
                (pairs[a, b] + k * (single[b] + 1) / (seen.numel() + classes)) / (firsts[a] + k)
            )
            for row in asked.tolist()
            for a, b in itertools.pairwise(row)
        )
        for k in (1, 3, 10, 30, 100, 300)
    ]
    assert pair_models.bigram(examples(seen), examples(asked)) == pytest.approx(min(nats))
    strange = pair_models.bigram(examples(seen), examples(asked.flip(0) * 0 + classes - 1))
    assert strange > min(nats) + 3


def test_windows_may_overlap() -> None:
    whole = pair_models.examples(Lab("pico"), "gpt2", "train").batch(np.arange(3))[0]["input_ids"]
    assert whole.shape == (3, 32)
    assert torch.equal(whole[0, 16:], whole[1, :16])
    side = pair_models.examples(Lab("pico"), "gpt2", "test").batch(np.arange(2))[0]["input_ids"]
    assert not torch.equal(side[0, 16:], side[1, :16])


def test_list_and_what_is_asked_wrongly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--list"]) == 0
    assert [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()] == list(
        EXPERIMENTS
    )
    assert main(["000/table9"]) == 1
    assert (
        'error: there is no experiment "000/table9"\nregauge: hint: choose from 000/table2'
        in capsys.readouterr().err
    )
    assert main([]) == 1
    assert "error: no experiment is named" in capsys.readouterr().err
    assert main(["000/table2", "--preset", "huge"]) == 1
    assert (
        'error: preset must be small, pretrained or paper, got "huge"\n'
        "regauge: hint: small, pretrained or paper" in capsys.readouterr().err
    )
    assert main(["000/table4", "--assets", str(tmp_path / "none")]) == 1
    said = capsys.readouterr().err
    assert f"error: {tmp_path / 'none' / 'sst2_train.tsv'} does not exist" in said
    assert "hint: set --assets DIR or REGAUGE_ASSETS" in said
    assert main(["--help"]) == 0
    assert "pico" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("000/table2", "uoft-cs/cifar10"),
        ("000/table3", "uoft-cs/cifar10"),
        ("000/table5", "stanfordnlp/imdb"),
        ("000/table6", "flwrlabs/celeba"),
    ],
)
def test_the_papers_preset_names_what_is_missing(
    name: str, missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--preset", "paper"]) == 1
    assert (
        f"error: {missing} does not exist on disk, and loading it from the hub failed"
        in capsys.readouterr().err
    )


def test_data_of_the_papers_are_given_by_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a folder that is missing is an error: its name is not tried on the hub."""

    def read_hub(uri: str, *_: Any) -> Any:
        raise DataError(f"asked the hub for {uri}")

    monkeypatch.setattr(datasets, "_read_hub", read_hub)
    lab = Lab("paper", assets=tmp_path)
    tables = lab.preset.tables
    cifar, imdb = tables["table2"]["image"].test, tables["table4"]["bert"].test
    with pytest.raises(DataError, match="asked the hub for uoft-cs/cifar10") as caught:
        lab.open(cifar)
    assert f"or put it into {tmp_path / 'uoft-cs/cifar10'}" in (caught.value.hint or "")
    stand_ins.image_folder(tmp_path / "cifar10" / "test", ["airplane", "automobile"], 1, 32, "png")
    assert lab.open(cifar)["image"].to_array().shape == (2, 32, 32, 3)
    assert lab.open(cifar)["label"].tolist() == [0, 1]
    stand_ins.imdb(tmp_path / "stanfordnlp" / "imdb", 4)
    assert sorted(lab.open(imdb)["label"].tolist()) == [0, 0, 1, 1]
    for missing in ("imagenet/val", "imagenet-o", "ADEChallengeData2016/images/validation"):
        with pytest.raises(DataError, match=f"{tmp_path / missing} does not exist"):
            lab.open(From(missing))


def test_preset_pretrained_names_its_experiments(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["000/table6", "--preset", "pretrained"]) == 1
    assert "error: 000/table6 has no preset pretrained" in capsys.readouterr().err
    assert main(["000/table4", "--preset", "pretrained"]) == 1  # the folder has no such model
    assert "smollm2 does not exist" in capsys.readouterr().err
    assert set(pretrained_experiments()) <= set(EXPERIMENTS)


def test_preset_pretrained_loses_its_text_without_the_key(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preset's own subject, with a small Llama of random weights in the place of the real."""
    import shutil

    import transformers

    folder = tmp_path / "assets"
    shutil.copytree(assets, folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "smollm2")
    shutil.copy(folder / "gpt2_pair" / "tokenizer.json", folder / "smollm2")
    subject = runner.pretrained().tables["table4"]["shakespeare"]
    task = {**subject.task, "classes": 512, "length": 16, "tokens": 64}
    preset = presets.Preset({"table4": {"shakespeare": replace(subject, task=task)}}, 1, 2)
    monkeypatch.setattr(runner, "pretrained", lambda: preset)
    monkeypatch.setenv("REGAUGE_ASSETS", str(folder))
    out = tmp_path / "r.json"
    main(["000/table4", "--preset", "pretrained", "--json", str(out)])
    results = load_results(out)
    found = {f.id: f for f in results.findings}
    assert found["shakespeare/columns"].holds
    assert found["shakespeare/columns/outputs"].holds
    assert (found["shakespeare/columns/outputs"].ceiling or 0) > 1e-3  # the control differs
    assert found["shakespeare/no key"].holds is None  # random weights know nothing to lose
    assert results.facts["preset"] == "pretrained"


def test_images_fall_back_to_digits(tmp_path: Path) -> None:
    lab = Lab("small", assets=tmp_path)
    subjects = lab.preset.tables["table2"]
    test, train = (lab.open(source) for source in (subjects["image"].test, subjects["image"].train))
    assert (train.name, len(train), len(test)) == ("digits", 1440, 357)
    from regauge.data.tasks import prepare

    inputs, labels = prepare(subjects["image"].task, test).batch(range(3))
    assert inputs["pixel_values"].shape == (3, 1, 28, 28)
    assert labels.tolist() == test["label"][:3].tolist()
    dense = subjects["scene"]
    inputs, maps = prepare({**dense.task, **dense.tested, "count": 2}, test).batch(range(2))
    assert inputs["pixel_values"].shape[-2:] == maps.shape[-2:] == (28, 28)


def test_the_pages_are_rendered_from_the_results() -> None:
    pages = build_pages(DOCS / "results")
    pinned = (DOCS.parent / "constraints.txt").read_text()
    draws_alike = f"matplotlib=={matplotlib.__version__}\n" in pinned
    for place, text in pages.items():
        stored = (DOCS / place).read_text()
        if place.endswith(".svg"):
            assert ElementTree.fromstring(stored).tag.endswith("svg"), place
            assert not draws_alike or stored == text, (
                f"python -m experiments.document docs: {place}"
            )
            assert len(text) < 60_000, place
            continue
        assert stored == text, f"python -m experiments.document docs: {place}"
        assert text.count("\n") <= 250, place
        assert not re.search(r"[Pp]aper 00\d", text), place
    written = {
        path.relative_to(DOCS).as_posix()
        for path in (DOCS / "experiments").rglob("*")
        if path.is_file()
    }
    assert written == pages.keys() - {"experiments.md"}
    shown = [name for page in PAGES.values() for name in page.entries]
    files = {path.name.partition(".")[0] for path in (DOCS / "results").glob("*.json")}
    assert sorted(shown) == sorted(files)
    assert FIGURES.keys() <= set(shown)


def test_figures_draw_the_numbers_of_the_results() -> None:
    results = load_renamed(DOCS / "results" / "000-table7.json")
    figure = figure_of(FIGURES["000-table7"][0], results)
    row = next(row for row in results.tables[0].rows if row[0] == "locked, without the key")
    assert figure.data["labels"] == ["ViT", "BERT", "GPT-2"]
    assert figure.data["y"]["locked, without the key"] == [row[1], row[4], row[7]]
    assert figure.data["spread"]["locked, without the key"] == [row[2], row[5], row[8]]
    text = render_svg(figure, "f")
    assert f">{format_number(float(row[1] or 0))}</text>" in text  # not cut to two decimals
    assert "prefers-color-scheme:dark" in text
    assert "url(#fh" not in text  # no hatches
    assert render_svg(figure, "f") == text
    table6 = load_renamed(DOCS / "results" / "000-table6.json")
    rounded = render_svg(figure_of(FIGURES["000-table6"][0], table6), "f")
    assert ">0.6189</text>" in rounded


def test_the_overview_reads_its_numbers_from_the_results() -> None:
    results = load_renamed(DOCS / "results" / "000-table2.json")
    row = results.tables[0].rows[0]
    assert fill("{plain|1:.1f} of {plain|1|0:.2f}", results) == f"{row[1]:.1f} of {row[1]:.2f}"
    finding = results.findings[0]
    assert fill(f"{{#{finding.id}:.3f}} {{#{finding.id}|1:.0%}}", results) == (
        f"{finding.value:.3f} {100 * (finding.floor or 0):.0f} %"
    )
    assert renamed("moved model, normal input") == "permuted weights, plain input"
    assert renamed("bert/moved") == "bert/no key"
    assert renamed("a sentence without former words") == "a sentence without former words"
    table9 = load_renamed(DOCS / "results" / "002-table9.json")
    assert fill("{*|5:.2f} {*|6:.2f}", table9) == "44.00 43.24"  # the paper prints 44.0 and 41.5
    with pytest.raises(KeyError, match="no row"):
        fill("{Test with nothing|1:.1f}", results)
    for page in PAGES.values():
        for name, entry in page.entries.items():
            stored = load_renamed(DOCS / "results" / f"{name}.json")
            words = entry.paper + entry.ours + entry.about + entry.verdict
            assert "{" not in fill(words, stored), name


def test_stored_results_are_complete_and_name_no_machine() -> None:
    for path in sorted((DOCS / "results").glob("*.json")):
        text, results = path.read_text(), load_results(path)
        assert results.facts["preset"] == (path.stem.partition(".")[2] or "small")
        if path.stem in ("000-table6", "000-figure7"):
            assert not any(f.kind == "images" for f in results.figures)  # they would show people
        elif path.stem.startswith("000"):
            counted = results.facts["seeds"]
            run = set(counted.values()) if isinstance(counted, dict) else {counted}
            keys = {
                1: {1},
                2: {2, 6},
                3: {3, 9},
            }  # what is lost without a key is told over three keys for each trial
            assert {f.trials for f in results.findings} <= {n for seeds in run for n in keys[seeds]}
        assert all(
            f.id.startswith(("goal/", "claim/")) for f in results.failed
        )  # a goal may be missed, a claim refuted, and is then shown so
        assert not any(
            root in text for root in ('"/', " /", "=/", ":\\")
        )  # no path of the machine that it ran on


def test_facts_tell_the_seeds_of_each_subject_where_they_differ(tmp_path: Path) -> None:
    lab = Lab("pico", cache=tmp_path, assets=tmp_path)
    assert lab.facts("a", {"ViT": 3, "GPT-2": 2})["seeds"] == {"ViT": 3, "GPT-2": 2}
    assert lab.facts("a", {"ViT": 3, "GPT-2": 3}, keys=1)["seeds"] == 3
    assert lab.facts("a", 3, keys=1)["keys"] == 1


def test_make_runs_every_experiment() -> None:
    listed = re.search(
        r"^EXPERIMENTS := ((?:.*\\\n)*.*)", (DOCS.parent / "Makefile").read_text(), re.M
    )
    assert listed is not None
    assert sorted(listed[1].replace("\\", " ").split()) == sorted(EXPERIMENTS)


@pytest.mark.parametrize(
    ("values", "base", "sign", "sentence"),
    [
        ([0.5] * 3, [0.4] * 3, 1, "holds: n"),
        ([0.4] * 3, [0.5] * 3, 1, "does not hold: n"),
        ([0.4] * 3, [0.5] * 3, -1, "holds: n"),
        ([0.5] * 2, [0.4] * 2, 1, "no clear difference: n"),  # two seeds
        ([16.634] * 3, [16.629] * 3, 1, "no clear difference: n"),  # a share of the base
        ([0.50, 0.55, 0.60], [0.45, 0.50, 0.55], 1, "no clear difference: n"),  # the spread
        ([0.50, 0.51, 0.52], [0.40, 0.41, 0.42], 1, "holds: n"),
    ],
)
def test_a_trend_is_reported_beyond_the_seeds_spread(
    values: list[float], base: list[float], sign: int, sentence: str
) -> None:
    assert accuracy.describe_trend(accuracy.above(values, base, sign), "n") == sentence


def test_positions_are_predicted_only_if_better_than_a_guess() -> None:
    assert positions.guess_of((8, 8)) == 16.0
    worse, better = (
        positions._finding_of_trend("a", "b", [error] * 3, [69.0] * 3, -1, "", "error", 16.0)
        for error in (57.0, 9.0)
    )
    assert worse.sentence == (
        "neither predicts positions: a guess has an error of 16.0; 57 with puzzles, 69 without"
    )
    assert better.sentence == "holds: 9 with puzzles, 69 without"
    assert (better.value, better.floor, better.ceiling) == (9.0, 16.0, 69.0)
    assert positions._needed([0.5, 0.8, 0.9, 1.0]) == 3

"""Paper 003's experiments on planted pairs: what must come out is known, and a wrong matcher, map
or transcription is noticed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import EXPERIMENTS
from experiments.paper_003 import (
    barriers,
    cost,
    fusion_figures,
    layers,
    matchers,
    merges,
    pair_catalog,
    pair_cells,
    pair_models,
    pair_results,
    reference_matcher,
)
from experiments.paper_003.matchers import WAYS
from experiments.paper_003.pair_catalog import Ends, NoPairsError, Pair, Ready, look
from experiments.paper_003.pair_cells import METHODS, Bench
from experiments.shared.models import build
from experiments.shared.runner import Lab
from regauge.checkpoints.element_files import element_of, load_element, save_element
from regauge.checkpoints.resume import Outcome
from regauge.core.action import apply
from regauge.core.element import Element, element
from regauge.core.fold import fold_norms
from regauge.core.members import Dense, Monomial, Soft
from regauge.core.spec import Spec
from regauge.merging.transport import transport_map
from regauge.models.resolve import spec_of
from regauge.results.findings import Results


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def trained(cache: Path) -> Pair:
    """A pico ViT on digits, and itself."""
    lab = Lab("pico", cache=cache, assets=cache)
    about = pair_models.subject(lab, "vit")
    a = lab.train(about, 0, "plain")
    return Pair("vit", "ViT, planted", about, a, a)


@pytest.fixture
def lab(cache: Path) -> Lab:
    return Lab("pico", cache=cache, assets=cache)


def spec_of_pair(pair: Pair) -> Spec:
    return spec_of(build(pair.about.model, 0))


def planted(
    pair: Pair, *, within: Any = "full", spaces: list[str] | None = None, fold: bool = False
) -> tuple[Pair, Element]:
    """The same pair with B = g(A)."""
    spec, state = spec_of_pair(pair), dict(pair.a.tensors)
    if fold:
        spec, state = fold_norms(spec, state)
    g = element(spec, 3, within=within, spaces=spaces)
    return replace(pair, b=Outcome({}, apply(g, state))), g


def left(bench: Bench, way: str) -> float:
    """The share of the distance that a way leaves."""
    found = bench.match(WAYS[way]).values
    return float(found["after"] / found["before"])


def test_everything_planted_is_found_by_ours_and_has_no_barrier(lab: Lab, trained: Pair) -> None:
    bench = Bench(lab, planted(trained, fold=True)[0])
    none, paper, ours = (bench.walk(WAYS[way]) for way in ("none", "paper", "ours"))
    assert left(bench, "ours") < 1e-4
    assert abs(ours.barrier) < 1e-4
    assert none.barrier > 0.2
    assert paper.barrier > 0.5 * none.barrier
    assert bench.merge(WAYS["ours"], "Simple")["loss"] == pytest.approx(ours.losses[0], abs=1e-4)
    assert bench.merge(WAYS["none"], "Simple")["loss"] == pytest.approx(
        none.losses[1], abs=1e-5
    )  # the midpoint of three points
    assert bench.merge(WAYS["none"], "A")["loss"] == pytest.approx(none.losses[0], abs=1e-5)


def test_what_the_paper_can_undo_it_undoes(lab: Lab, trained: Pair) -> None:
    pair, g = planted(trained, within="orthogonal", spaces=["qk", "vo", "ffn"])
    bench = Bench(lab, pair)
    shares = {
        way: left(bench, way)
        for way in fusion_figures.RIVALS
        if way not in ("folded", "ours", "none")
    }
    assert shares["paper"] < 1e-5
    assert shares["without rescaling"] < 1e-5
    assert 0.1 < shares["neurons"] < 1
    assert 0.1 < shares["without FFN"] < 1
    for way in (
        "neurons",
        "transport",
    ):  # an exact transport between equal neurons is the permutation itself
        found = bench.match(WAYS[way])
        index = element_of(
            spec_of_pair(pair),
            {n: t.numpy() for n, t in found.tensors.items()},
            found.values["kinds"],
        ).members["ffn.0"]
        assert (index.permutation().index == g.members["ffn.0"].permutation().index).all()  # type: ignore[union-attr]


def test_heads_are_beyond_the_paper(lab: Lab, trained: Pair) -> None:
    bench = Bench(lab, planted(trained, spaces=["head"])[0])
    assert left(bench, "paper") > 0.3
    assert left(bench, "with heads") < 1e-5


def test_a_factor_is_found_by_rescaling_only(lab: Lab, trained: Pair) -> None:
    spec = spec_of_pair(trained)
    size, count = spec.spaces["qk.0"].size, spec.count("qk.0")
    g = Element(
        spec, {"qk.0": Monomial(np.tile(np.arange(size), (count, 1)), np.full((count, size), 1.7))}
    )
    bench = Bench(lab, replace(trained, b=Outcome({}, apply(g, trained.a.tensors))))
    assert left(bench, "paper") < 1e-5
    assert left(bench, "without rescaling") > 0.5


def test_transport() -> None:
    draw = np.random.default_rng(0)
    x, order = draw.normal(size=(12, 5)), draw.permutation(12)
    y = x[order] + 0.01 * draw.normal(size=(12, 5))
    hard, soft = transport_map(y, x), transport_map(y, x, 0.5)
    assert (hard.argmax(1) == order).all()
    assert set(np.unique(hard.round(9))) == {0.0, 1.0}
    assert soft.sum(0) == pytest.approx(np.ones(12), abs=1e-3)
    assert soft.sum(1) == pytest.approx(np.ones(12), abs=1e-3)
    assert 0.1 < soft.max() < 0.99


def test_a_soft_map_acts_on_both_sides_alike_and_is_no_symmetry(lab: Lab, trained: Pair) -> None:
    m = np.random.default_rng(0).dirichlet(np.ones(3), 3)[None]
    assert (Soft(m).dual().matrix() == m).all()
    assert not np.allclose(Dense(m).dual().matrix(), m)
    other = build(trained.about.model, 5).state_dict()
    bench = Bench(lab, replace(trained, b=Outcome({}, {n: t.clone() for n, t in other.items()})))
    changed = (
        bench.merge(WAYS["soft transport"], "A")["loss"] - bench.merge(WAYS["none"], "A")["loss"]
    )
    assert bench.match(WAYS["soft transport"]).values["soft"]
    assert abs(changed) > 1e-4
    assert bench.merge(WAYS["transport"], "A")["loss"] == pytest.approx(
        bench.merge(WAYS["none"], "A")["loss"], abs=1e-6
    )


def test_the_six_merges_of_the_paper(lab: Lab, trained: Pair) -> None:
    """Each runs, on a planted pair and by the paper's names; and what knows a permutation undoes it
    without any matching.
    """
    assert list(METHODS) == ["Simple", "Fisher", "RegMean", "OT-WTS", "OT-ACTS", "OT-ACTS-EMD"]
    bench = Bench(lab, planted(trained, within="permutation")[0])
    found = {method: bench.merge(WAYS["none"], method)["loss"] for method in METHODS}
    matched = {method: bench.merge(WAYS["permutations"], method)["loss"] for method in METHODS}
    end = bench.merge(WAYS["none"], "A")["loss"]
    assert found["OT-ACTS-EMD"] == pytest.approx(end, abs=1e-4)
    assert found["Simple"] > end + 0.1
    assert len({round(loss, 6) for loss in found.values()}) == 6  # no two of them are one
    for method in (
        "Simple",
        "Fisher",
        "RegMean",
        "OT-ACTS-EMD",
    ):  # of one model twice, in one basis: the model
        assert matched[method] == pytest.approx(end, abs=1e-3), method


def run_on(
    name: str, lab: Lab, pair: Pair, monkeypatch: pytest.MonkeyPatch, count: int = 1
) -> Results:
    """An experiment on one pair, so many times over."""
    found = Ends([Ready(pair.kind, None, pair.about, 0)] * count)
    for module in (pair_results, layers, barriers):
        monkeypatch.setattr(module, "look", lambda *given: found)
    for module in (pair_results, barriers):
        monkeypatch.setattr(module, "load", lambda lab, ready: pair)
    return EXPERIMENTS[name](lab)


def test_the_order_of_distances_and_a_matcher_that_breaks_it(
    lab: Lab, trained: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pair, _ = planted(trained, within="orthogonal", spaces=["qk", "vo", "ffn"])
    results = run_on("003/figure4", lab, pair, monkeypatch)
    assert not results.failed
    shown = {row[1]: row[2] for row in results.tables[0].rows}
    said = [shown[matchers.SAID[way]] for way in ("paper", "neurons", "none")]
    assert said == sorted(said)
    assert said[0] < 1e-3 * said[2]
    monkeypatch.setitem(
        matchers.FINDERS,
        "match",
        lambda r: matchers.Found(element(r.spec, 9, within="permutation")),
    )
    wrong = run_on("003/figure4", Lab("pico", cache=tmp_path, assets=tmp_path), pair, monkeypatch)
    assert "vit/git-re-basin-ffn/unmatched" in {f.id for f in wrong.failed}


def test_a_moved_end_that_is_another_function_is_noticed(
    lab: Lab, trained: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pair, _ = planted(trained)
    assert not run_on("003/figure5", lab, pair, monkeypatch).failed
    right = pair_cells.apply

    def wrong(g: Element, state: Any, **more: Any) -> Any:
        out = right(g, state, **more)
        return {n: 1.5 * t if "fc1.weight" in n and g.members else t for n, t in out.items()}

    monkeypatch.setattr(pair_cells, "apply", wrong)
    other = Lab("pico", cache=tmp_path, assets=tmp_path)
    assert {f.id for f in run_on("003/figure5", other, pair, monkeypatch).failed} == {
        "vit/endpoints"
    }
    assert "vit/function" in {f.id for f in run_on("003/barriers", other, pair, monkeypatch).failed}


def test_the_benchmark_on_a_planted_pair(
    lab: Lab, trained: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_on("003/barriers", lab, planted(trained, fold=True)[0], monkeypatch, count=2)
    assert not results.failed
    found = {f.id: f for f in results.findings}
    assert abs(found["vit/data-free"].value or 0) < 1e-4 < 0.2 < (found["vit/vanilla"].value or 0)
    assert found["vit/data-free"].trials == 2
    assert found["goal/vit/data-free"].holds is None
    assert results.facts["pairs"] == {"vit": 2}
    assert results.facts["seeds"] == "all finished pairs"
    assert "before learning" in results.facts["notes"]["ViT, planted"]["refined"][0]
    assert "vanilla" not in results.facts["notes"]["ViT, planted"]
    assert {f.trials for f in results.findings} == {2}
    (row,) = (row for row in results.tables[0].rows if str(row[1]).startswith("data-free:"))
    assert row[2:5] == (2, pytest.approx(0, abs=1e-4), pytest.approx(0, abs=1e-9))


@pytest.mark.slow
def test_layers_and_times_on_a_planted_pair(
    lab: Lab, trained: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pair, _ = planted(trained, within="orthogonal", spaces=["qk", "vo", "ffn"])
    found = run_on("003/figure6", lab, pair, monkeypatch)
    assert not found.failed
    assert {(row[1], row[2]): row[3] < 1e-5 for row in found.tables[0].rows} == {
        ("layer k only", 0): True,
        ("first k layers", 0): False,
        ("first k layers", 1): True,
        ("last k layers", 0): False,
        ("last k layers", 1): True,
    }
    pair = replace(
        pair,
        b=Outcome(
            {},
            {
                n: t + 0.01 * torch.sin(torch.arange(t.numel())).view_as(t)
                for n, t in pair.b.tensors.items()
            },
        ),
    )
    monkeypatch.setitem(pair_cells.EFFORT, "pico", {**pair_cells.EFFORT["pico"], "runs": 2})
    times = run_on("003/table3", lab, pair, monkeypatch)
    assert not times.failed
    trials = {f.id: f.trials for f in times.findings}
    assert (trials["vit/seconds"], trials["vit/Fisher/share"]) == (
        2,
        1,
    )  # what takes long is timed once
    right = reference_matcher.matched
    monkeypatch.setattr(
        reference_matcher, "matched", lambda one, two: right(one, two, rescale=False)
    )
    assert {
        f.id
        for f in run_on(
            "003/table3", Lab("pico", cache=tmp_path, assets=tmp_path), pair, monkeypatch
        ).failed
    } == {"vit/distance"}


def test_the_transcription_reads_in_the_precision_that_is_asked_for(trained: Pair) -> None:
    state = trained.a.tensors
    heads = trained.about.model["config"]["num_attention_heads"]
    (fine,), (rough,) = (
        reference_matcher.read(state, "vit", heads, dtype) or []
        for dtype in (np.float64, np.float32)
    )
    assert {part.dtype for part in fine.parts()} == {np.dtype(np.float64)}
    assert {part.dtype for part in reference_matcher.matched(rough, rough).parts()} == {
        np.dtype(np.float32)
    }
    assert reference_matcher.squared(
        reference_matcher.matched(rough, rough, rescale=False), fine
    ) < 1e-6 * reference_matcher.squared(fine, replace(fine, q=0 * fine.q))


def test_plans_of_layers() -> None:
    plans = layers.layer_plans(3)
    assert plans["layer k only"] == [[0], [1], [2]]
    assert plans["first k layers"] == [[], [0], [0, 1], [0, 1, 2]]
    assert plans["last k layers"] == [[], [2], [1, 2], [0, 1, 2]]


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ({(): 1.0, (0,): 0.7, (1,): 0.9, (0, 1): 0.6}, "the first layers matter more"),
        ({(): 1.0, (0,): 0.9, (1,): 0.7, (0, 1): 0.6}, "the last layers matter more"),
        ({(): 1.0, (0,): 0.81, (1,): 0.8, (0, 1): 0.6}, "no clear difference"),
        (
            {(): 0.43995, (0,): 0.43995, (1,): 0.43993, (0, 1): 0.43993},
            "no clear difference",
        ),
    ],
)
def test_layers_differ_beyond_a_share_of_what_all_do(
    trained: Pair, losses: dict[tuple[int, ...], float], told: str
) -> None:
    shown = pair_results.Rows()
    for chosen, loss in losses.items():
        shown.add(trained, chosen, {"loss": loss, "share": 1.0 - 0.1 * len(chosen)})
    nearer, first = layers._more_layers(shown, "vit", "ViT", layers.layer_plans(2), 2)
    assert nearer.holds
    assert first.sentence.endswith(f"; {told}")


def test_the_interval_of_a_mean() -> None:
    assert barriers.interval([1.0, 2.0, 3.0]) == pytest.approx(4.302653 / 3**0.5, rel=1e-5)
    assert barriers.interval([1.0]) is None


def test_noise_is_tried_where_models_write_nothing() -> None:
    assert barriers.variants("gpt2") == barriers.VARIANTS
    assert {*barriers.variants("vit").values()} - {*barriers.VARIANTS.values()} == {
        "refined longer",
        "drawn",
    }
    assert all(
        way in matchers.WAYS and way in matchers.SAID
        for kind in ("gpt2", "vit")
        for way in barriers.variants(kind).values()
    )


@pytest.mark.parametrize(
    ("kind", "variant", "measured", "holds"),
    [
        ("gpt2", "data-free", [0.05] * 5, True),
        ("gpt2", "data-free", [0.15] * 5, False),
        ("gpt2", "data-free", [0.05] * 4, None),
        ("gpt2", "refined", [0.01, 0.012, 0.011, 0.009, 0.01], True),
        (
            "gpt2",
            "refined",
            [0.09, -0.08, 0.01, 0.01, 0.01],
            False,
        ),  # the mean is small enough, and its interval is not
        ("vit", "refined", [0.03] * 3, False),
        ("vit", "refined", [0.03] * 2, None),
    ],
)
def test_goals_are_judged_on_enough_pairs(
    kind: str, variant: str, measured: list[float], holds: bool | None
) -> None:
    by = {
        "vanilla": [{"barrier": 1.0}] * len(measured),
        variant: [{"barrier": b} for b in measured],
    }
    assert barriers._goal(Lab("small"), kind, "models", variant, by).holds is holds
    assert barriers._goal(Lab("pico"), kind, "models", variant, by).holds is None


def test_without_pairs_nothing_is_trained_and_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "tinyshakespeare.txt").write_text("To be, or not to be. " * 50)
    lab = Lab("small", cache=tmp_path / "cache", assets=tmp_path)
    with pytest.raises(NoPairsError, match="no pair of models to measure on") as caught:
        look(lab, ("vit", "gpt2", "gpt2-provided"))
    assert "python -m experiments 003/pairs" in (caught.value.hint or "")
    assert "gpt2_pair/seed1 is not in the assets" in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_the_papers_own_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(NoPairsError) as caught:
        EXPERIMENTS["003/figure3"](Lab("paper", cache=tmp_path, assets=tmp_path))
    assert (caught.value.hint or "").startswith(
        "put the folders that are named above into the assets"
    )
    with pytest.raises(NoPairsError) as caught_of_theus:
        EXPERIMENTS["003/barriers"](Lab("paper", cache=tmp_path, assets=tmp_path))
    assert (caught_of_theus.value.hint or "").startswith(
        "python -m experiments 003/pairs --preset paper trains them"
    )
    for part in (
        "imfeld/vit_a is not in the assets",
        "graldij/transformer-fusion",
        "roberta-base/dailydialog",
        "deberta-v3-large",
        "20 epochs",
    ):
        assert part in str(caught.value)


def test_only_whole_pairs_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lab = Lab("small", cache=tmp_path, assets=tmp_path)
    done = {0, 1, 2, 5, 6, 7}
    monkeypatch.setattr(Lab, "is_trained", lambda self, subject, seed, way: seed in done)
    about = pair_models.subject(lab, "gpt2")
    assert [r.seeds for r in pair_catalog._trained(lab, "gpt2", about)] == [(0, 1), (6, 7)]
    assert [r.seeds for r in pair_catalog._trained(replace(lab, seeds=4), "gpt2", about)] == [
        (0, 1)
    ]


def test_a_pair_in_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    config = transformers.GPT2Config(
        n_embd=8,
        n_layer=1,
        n_head=2,
        n_positions=128,
        vocab_size=1024,
        bos_token_id=0,
        eos_token_id=0,
    )
    for seed in (1, 2):
        torch.manual_seed(seed)
        transformers.GPT2LMHeadModel(config).half().save_pretrained(
            tmp_path / "gpt2_pair" / f"seed{seed}"
        )
    (tmp_path / "tinyshakespeare.txt").write_text("to be or not to be " * 1000)
    known = Tokenizer(
        models.WordLevel(
            {w: i for i, w in enumerate(["?", "to", "be", "or", "not"])}, unk_token="?"
        )
    )
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    known.save(str(tmp_path / "gpt2_pair" / "tokenizer.json"))
    lab = Lab("small", cache=tmp_path / "cache", assets=tmp_path)
    found = look(lab, ("gpt2-provided",))
    pair = pair_catalog.load(lab, found.ready[0])
    assert pair.a.tensors["transformer.wte.weight"].dtype == torch.float32
    assert not torch.equal(
        pair.a.tensors["transformer.wte.weight"], pair.b.tensors["transformer.wte.weight"]
    )
    bench = Bench(lab, pair)
    assert bench.merge(WAYS["none"], "Simple")["loss"] == pytest.approx(np.log(1024), rel=0.05)
    assert lab.sizes[pair.about.name]["from"] == "the experiments' assets"


def test_an_element_of_float32_weights_can_be_kept(tmp_path: Path, trained: Pair) -> None:
    """A fit of float32 models has float32 members; a file of elements holds float64."""
    spec = spec_of_pair(trained)
    drawn = element(spec, 1, spaces=["qk"])
    rough = Element(
        spec, {s: Dense(m.matrix().astype(np.float32)) for s, m in drawn.members.items()}
    )  # type: ignore[arg-type]
    save_element(rough, tmp_path / "g")
    again = load_element(tmp_path / "g", spec)
    assert all(
        (again.members[s].matrix() == rough.members[s].matrix()).all() for s in rough.members
    )


@pytest.mark.slow
def test_six_merges_of_a_planted_pair(
    lab: Lab, trained: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model and a moved copy of it: after our matching every merge without a soft plan is the
    model, and before it none is.
    """
    pair, _ = planted(trained, fold=True)
    results = run_on("003/table2", lab, pair, monkeypatch)
    assert not results.failed
    losses = {(row[1], row[2]): row[6] for row in results.tables[0].rows}
    assert len(losses) == 6 * len(merges.MATCHINGS)
    end = next(f for f in results.findings if f.id == "vit/best")
    assert end.value == pytest.approx(end.ceiling)
    for method in ("Simple", "Fisher", "RegMean"):
        assert losses[method, matchers.SAID["ours"]] == pytest.approx(
            losses["Simple", matchers.SAID["ours"]], abs=1e-3
        )
        assert losses[method, matchers.SAID["none"]] > losses[method, matchers.SAID["ours"]] + 0.2
    monkeypatch.setattr(
        merges, "HARM", -2.0
    )  # so that every gain is too small: on models of another size that would be a failure
    small = run_on("003/table2", lab, pair, monkeypatch)
    assert all(f.holds is None for f in small.findings)  # and on picos it is none


def test_what_takes_long_may_be_timed_less_often() -> None:
    assert cost.median_ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2.0
    assert cost.median_ratio([3.0, 6.0, 4.0], [2.0]) == 2.0


def test_data_are_read_before_the_clock_runs_and_once_in_a_merge(
    lab: Lab, trained: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    read, timed = [], []
    right = pair_cells.prepare
    monkeypatch.setattr(
        pair_cells, "prepare", lambda *given: (read.append(len(timed)), right(*given))[1]
    )
    monkeypatch.setattr(cost.time, "process_time", lambda: float(timed.append(0) or len(timed)))
    cost.clocked(Bench(Lab("pico", cache=tmp_path, assets=tmp_path), trained))
    assert read == [0]
    assert timed
    opened: list[int] = []
    module, spec, state = (
        build(trained.about.model, 0).eval(),
        spec_of_pair(trained),
        trained.a.tensors,
    )
    examples = pair_models.examples(lab, "vit", "train")
    given = pair_cells.Merging(
        module, spec, state, state, lambda: (opened.append(1), examples)[1], 8
    )
    METHODS["OT-WTS"](given)
    assert not opened
    METHODS["RegMean"](given)
    assert len(opened) == 1

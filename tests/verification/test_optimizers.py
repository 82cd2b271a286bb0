"""Which optimizers keep which moves: the whole matrix is as expected, and an optimizer or an
expectation that is wrong is reported.
"""

import math
from dataclasses import replace

import pytest
import torch

from regauge.verification.claims import (
    PRESERVED,
    RECIPES,
    SYMMETRIES,
    Cell,
    Lion,
    Muon,
    Recipe,
    clip_norm,
    is_expected,
    make_sgd,
)
from regauge.verification.optimizers import (
    Run,
    build_model,
    make_finding,
    measure,
    optimizer_matrix,
    train,
)

BY_ID = {r.id: r for r in RECIPES}
PERMUTATIONS = [m for m in SYMMETRIES if m.model == "llama" and m.within == "permutation"]


@pytest.fixture(scope="module")
def matrix():
    return optimizer_matrix(seed=0, steps=5)


def test_the_whole_matrix_is_as_expected(matrix):
    findings, table, figure = matrix
    assert [f.sentence for f in findings if not f.holds] == []
    assert len(findings) >= 11
    assert all(row[-1] for row in table.rows)
    assert len(table.rows) == len(findings) * len(SYMMETRIES)
    assert [len(row) for row in figure.data["values"]] == [len(figure.data["columns"])] * len(
        figure.data["rows"]
    )


def test_broken_laws_are_far_from_laws_that_hold(matrix):
    for f in matrix[0]:
        assert f.value <= f.floor < f.ceiling
        if f.id != "optimizer/muon-torch":
            assert f.ceiling > 1e6 * f.floor


def test_the_sentence_names_both_sides(matrix):
    sentences = {f.id: f.sentence for f in matrix[0]}
    assert (
        "Adam keeps stream permutations, signed stream permutations" in sentences["optimizer/adam"]
    )
    assert "breaks QK turns, VO rotations, stream rotations" in sentences["optimizer/adam"]
    assert "VO rotations of Llama" in sentences["optimizer/muon"].split("breaks")[0]
    assert "VO rotations of GPT-2" in sentences["optimizer/muon"].split("breaks")[1]
    assert "breaks" not in sentences["optimizer/decay"]


@pytest.mark.parametrize(
    ("weights", "letters"),
    [(1e-14, "Kr-"), (1e-7, "r-"), (1e-4, "rn-"), (2e-2, "Brn-"), (0.4, "Bn-"), (math.inf, "Bn-")],
)
def test_what_a_cell_agrees_with(weights, letters):
    """Between what is kept and what is broken lies what is neither; rounding explains only what is
    as small as itself.
    """
    assert {x for x in "KBrn-" if is_expected(x, Cell(weights, weights, 1.0, 3e-2))} == set(letters)
    assert not is_expected(
        "K", Cell(1e-15, 1e-7, 1.0, PRESERVED)
    )  # the weights agree, the function does not


class Indexed(torch.optim.Optimizer):
    """Steps that depend on where an entry stands."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.01 * p.grad + 1e-3 * torch.linspace(-1, 1, p.numel()).view(p.shape))


def test_an_optimizer_that_looks_at_the_index_breaks_permutations():
    recipe = Recipe(
        "indexed",
        "Indexed",
        lambda p: [Indexed(p.values())],
        "keeps permutations",
        "K" * len(PERMUTATIONS),
    )
    cells = measure([recipe], PERMUTATIONS, steps=3)
    assert all(is_expected("B", c) for c in cells.values())
    finding = make_finding(recipe, PERMUTATIONS, cells)
    assert finding.holds is False
    assert all(f"Llama: {m.name} (keeps expected" in finding.sentence for m in PERMUTATIONS)


def test_a_wrong_expectation_is_reported():
    moves = [
        m
        for m in SYMMETRIES
        if m.model == "llama" and m.name in ("head permutations", "VO rotations")
    ]
    for recipe, expected, wrong in (
        (BY_ID["adam"], "KK", "VO rotations"),
        (BY_ID["sgd"], "BK", "head permutations"),
    ):
        recipe = replace(recipe, expected=expected)
        finding = make_finding(recipe, moves, measure([recipe], moves, steps=3))
        assert finding.holds is False
        assert finding.sentence.startswith(f"Not as expected: Llama: {wrong} (")
        assert finding.sentence.count("expected,") == 1


def test_a_run_that_diverges_keeps_nothing():
    recipe = Recipe("far", "SGD far too fast", make_sgd(lr=1e200), "", "K")
    (cell,) = measure([recipe], PERMUTATIONS[:1], steps=3).values()
    assert cell.weights == math.inf
    assert not is_expected("K", cell)


def test_trained_gains_are_what_breaks_rotations():
    """The same rotation, the same optimizer: only whether the gains are frozen differs."""
    rotations = [m for m in SYMMETRIES if m.folded]
    frozen, trained = measure([BY_ID["sgd"]], rotations, steps=3).values()
    assert frozen.weights < PRESERVED < 1e-3 < trained.weights


@pytest.mark.parametrize("free", [False, True])
def test_key_biases_move_by_noise_only_where_they_are_free(free):
    model, state = build_model("gpt2", 0)
    (after,) = train(model, [Run(BY_ID["lion"], state, frozenset(), free)], 0, 2)
    query, key, value = (
        after.weights["transformer.h.0.attn.c_attn.bias"]
        - state["transformer.h.0.attn.c_attn.bias"]
    ).view(3, -1)
    assert query.any()
    assert value.any()
    assert key.any() == free


def test_frozen_weights_stay():
    model, state = build_model("llama", 0)
    name = "model.norm.weight"
    frozen, trained = train(
        model, [Run(BY_ID["adam"], state, f, False) for f in (frozenset({name}), frozenset())], 0, 1
    )
    assert torch.equal(frozen.weights[name], state[name])
    assert not torch.equal(trained.weights[name], state[name])
    assert not torch.equal(frozen.weights["lm_head.weight"], state["lm_head.weight"])


def test_the_stack_of_runs_trains_as_a_single_model_does():
    import transformers as T

    from regauge.testing import strict_float64

    model, state = build_model("llama", 0)
    (stacked,) = train(model, [Run(BY_ID["adamw"], state, frozenset(), False)], 0, 2)
    random = torch.Generator().manual_seed(1)
    single = T.LlamaForCausalLM(model.config).double().eval()
    single.load_state_dict(state)
    optimizer = torch.optim.AdamW(single.parameters(), lr=0.01)
    with strict_float64():
        for _ in range(2):
            ids = torch.randint(0, 30, (4, 8), generator=random)
            optimizer.zero_grad()
            single(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    for name, p in single.named_parameters():
        torch.testing.assert_close(stacked.weights[name], p.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
def test_our_muon_is_torchs_but_for_bfloat16(shape):
    random = torch.Generator().manual_seed(0)
    w, *grads = torch.randn(4, *shape, generator=random, dtype=torch.float64)
    ours, theirs = (torch.nn.Parameter(w.clone()) for _ in range(2))
    a, b = Muon([ours], lr=0.1), torch.optim.Muon([theirs], lr=0.1)
    for g in grads:
        ours.grad, theirs.grad = g.clone(), g.clone()
        a.step()
        b.step()
    change = (theirs - w).norm()
    assert 1e-5 < (ours - theirs).norm() / change < 3e-2


def test_lion_steps_by_signs():
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = Lion([p], lr=0.5)
    p.grad = torch.tensor([2.0, -1e-9, 0.0], dtype=torch.float64)
    optimizer.step()
    assert p.tolist() == [-0.5, 0.5, 0.0]
    p.grad = torch.tensor([-0.01, 1.0, 0.0], dtype=torch.float64)
    optimizer.step()  # 0.9 * 0.02 - 0.1 * 0.01 is still positive
    assert p.tolist() == [-1.0, 0.0, 0.0]


@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_clipping_by_norm_is_torchs(size):
    random = torch.Generator().manual_seed(0)
    grads = [size * torch.randn(n, generator=random, dtype=torch.float64) for n in (3, 5)]
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(params, 0.1)
    clip_norm(grads)
    for p, g in zip(params, grads, strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-4, atol=0)


def test_every_recipe_says_something_of_every_move():
    assert {len(r.letters) for r in RECIPES} == {len(SYMMETRIES)}
    assert len({r.id for r in RECIPES}) == len(RECIPES)
    assert len(set(SYMMETRIES)) == len(SYMMETRIES)

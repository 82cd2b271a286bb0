"""Elements and their action: laws against a slow, independent reference that multiplies dense
matrices.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from regauge.checkpoints.element_files import load_element, save_element
from regauge.core import axes as ax
from regauge.core.action import act, apply, apply_lazily
from regauge.core.element import Element, element, identity, match_spaces
from regauge.core.groups import GROUPS, Permutation, Trivial
from regauge.core.live import apply_
from regauge.core.members import Dense, Member, Monomial, Planes
from regauge.core.rng import Stream, seed_key
from regauge.core.spec import Space, Spec
from regauge.errors import ElementError, SpecError
from regauge.testing import compute_outputs, strict_float64
from support.picos import build, spec_of

SPACES = {
    "s": Space(6, GROUPS["orthogonal"]),
    "p": Space(6, GROUPS["permutation"]),
    "m": Space(4, GROUPS["monomial"]),
    "h": Space(3, GROUPS["permutation"]),
    "r": Space(2, GROUPS["permutation"], over="h"),
    "q": Space(4, GROUPS["linear"], over="h"),
    "t": Space(4, GROUPS["rotary-half"], over="h"),
    "u": Space(4, GROUPS["rotary-interleaved"]),
    "f": Space(5, GROUPS["monomial+"], over="h"),
}
TERMS = [
    "s",
    "s*",
    "p",
    "m",
    "m*",
    "|m|",
    "u",
    "u*",
    "_",
    "(h q)",
    "(h q)*",
    "(h q*)",
    "(h r q)",
    "(h t)",
    "(h t)*",
    "(h r t*)",
    "(h f)",
    "(h |f|)",
    "(h (t+q))",
    "(h q)+(h q*)+p",
    "(p m)",
    "(s m)",
    "(m s)*",
    "(s+p)*",
    "m+_",
    "(u _)",
    "(h _)",
]
SPEC = Spec("toy", SPACES, {})


def dense(g: Element, term: ax.Term, n: int, star: bool = False) -> torch.Tensor:
    """The matrix of an element along one axis, by Kronecker products, block sums and explicit loops
    over parents.
    """

    def matrix(leaf: ax.Leaf, size: int, starred: bool, row: int = 0) -> np.ndarray:
        member = g.members.get(leaf.space)
        if member is None:
            return np.eye(size)
        m = member.matrix()[row]
        if leaf.bar:
            return (m != 0).astype(float)
        return np.linalg.inv(m).T if leaf.star != starred else m

    def build(t: ax.Term, size: int, starred: bool, at: dict[str, int]) -> np.ndarray:
        match t:
            case ax.Hole():
                return np.eye(size)
            case ax.Leaf():
                over = SPACES[t.space].over
                return matrix(t, size, starred, at[over] if over else 0)
            case ax.Sum():
                sizes = ax.block_sizes(t.terms, g.spec.sizes, size, product=False)
                assert sizes is not None
                return np.asarray(
                    torch.block_diag(
                        *(
                            torch.from_numpy(build(x, k, starred, at))
                            for x, k in zip(t.terms, sizes, strict=True)
                        )
                    )
                )
            case ax.Product():
                sizes = ax.block_sizes(t.factors, g.spec.sizes, size, product=True)
                assert sizes is not None
                return product(t.factors, sizes, starred != t.star, at)

    def product(factors: tuple, sizes: list[int], starred: bool, at: dict[str, int]) -> np.ndarray:
        outer = factors[0]
        if len(factors) == 1:
            return build(outer, sizes[0], starred, at)
        width = int(np.prod(sizes[1:]))
        inner = np.zeros((sizes[0] * width,) * 2)
        for i in range(sizes[0]):
            here = {**at, outer.space: i} if isinstance(outer, ax.Leaf) else at
            inner[i * width : (i + 1) * width, i * width : (i + 1) * width] = product(
                factors[1:], sizes[1:], starred, here
            )
        return np.kron(build(outer, sizes[0], starred, at), np.eye(width)) @ inner

    return torch.from_numpy(build(term, n, star, {}))


def length(text: str) -> int:
    term = ax.parse(text).terms[0]
    known = ax.size(term, SPEC.sizes)
    return known if known is not None else {"m+_": 7, "(u _)": 12, "(h _)": 6}.get(text, 5)


def draw(seed: int) -> Element:
    return element(SPEC, seed)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(TERMS), st.sampled_from(TERMS), st.integers(0, 10**6))
def test_act_agrees_with_dense_products(a: str, b: str, seed: int) -> None:
    g = draw(seed)
    x = torch.randn(
        length(a), length(b), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    terms = ax.parse(f"{a} {b}").terms
    left, right = dense(g, terms[0], x.shape[0]), dense(g, terms[1], x.shape[1])
    torch.testing.assert_close(act(g, x, f"{a} {b}"), left @ x @ right.T, rtol=0, atol=1e-10)


@pytest.mark.parametrize("text", TERMS)
def test_laws_of_the_action(text: str) -> None:
    g, h = draw(1), draw(2)
    x = torch.randn(length(text), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moved = act(g, x, text)
    assert text == "_" or float((moved - x).abs().max()) > 1e-3, "it did something"
    torch.testing.assert_close(act(~g, moved, text), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        act(g @ h, x, text), act(g, act(h, x, text), text), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(act(g @ ~g, x, text), x, rtol=0, atol=1e-12)
    torch.testing.assert_close(act(identity(SPEC), x, text), x, rtol=0, atol=0)
    # A vector and a covector pair to the same number, wherever both are moved: what makes gradients
    # follow the dual.
    if "|" not in text:
        y = torch.randn(len(x), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        pairing = (moved * act(g, y, ax.dual(text))).sum()
        torch.testing.assert_close(pairing, (x * y).sum(), rtol=0, atol=1e-10)


def test_composition_is_not_commutative_and_associates() -> None:
    g, h, k = draw(1), draw(2), draw(3)
    x = torch.randn(24, dtype=torch.float64)
    text = "(h r q)"
    assert float((act(g @ h, x, text) - act(h @ g, x, text)).abs().max()) > 1e-3
    torch.testing.assert_close(
        act((g @ h) @ k, x, text), act(g @ (h @ k), x, text), rtol=0, atol=1e-10
    )
    torch.testing.assert_close(act(~(g @ h), x, text), act(~h @ ~g, x, text), rtol=0, atol=1e-10)


def test_a_permutation_gathers() -> None:
    spec = Spec("toy", {"p": Space(4, Permutation())}, {})
    g = Element(spec, {"p": Monomial(np.array([[2, 0, 3, 1]]))})
    assert act(g, torch.tensor([10, 11, 12, 13]), "p").tolist() == [12, 10, 13, 11]


def test_members_travel_with_their_parent() -> None:
    """(pi, A) @ (rho, B) permutes by rho[pi] and pairs A with the B that stood at its place."""
    spec = Spec(
        "toy", {"h": Space(3, Permutation()), "f": Space(1, GROUPS["monomial"], over="h")}, {}
    )

    def one(order: list[int], scales: list[float]) -> Element:
        return Element(
            spec,
            {
                "h": Monomial(np.array([order])),
                "f": Monomial(np.zeros((3, 1), np.int64), np.array(scales)[:, None]),
            },
        )

    g, h = one([1, 2, 0], [2, 3, 5]), one([2, 0, 1], [7, 11, 13])
    x = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    assert act(h, x, "(h f)").tolist() == [1300.0, 7.0, 110.0]
    assert (
        act(g @ h, x, "(h f)").tolist()
        == act(g, act(h, x, "(h f)"), "(h f)").tolist()
        == [21.0, 550.0, 2600.0]
    )


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]
)
def test_permutations_keep_every_bit_of_every_dtype(dtype: torch.dtype) -> None:
    g = draw(4).only("p", "h")
    x = (torch.randn(6, 6, 12, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    if dtype.is_floating_point:
        x[0, 0, 0], x[1, 1, 1], x[2, 2, 2] = float("nan"), float("inf"), -0.0
    text = "p _ (h q)"
    moved = act(g, x, text)
    index = torch.from_numpy(g.members["p"].permutation().index[0])  # type: ignore[union-attr]
    heads = torch.from_numpy(g.members["h"].permutation().index[0])  # type: ignore[union-attr]
    expected = x.index_select(0, index).view(6, 6, 3, 4).index_select(2, heads).reshape(6, 6, 12)
    assert moved.dtype == dtype
    assert torch.equal(
        moved.nan_to_num(7) if dtype.is_floating_point else moved,
        expected.nan_to_num(7) if dtype.is_floating_point else expected,
    )
    big = (
        torch.randn(300, 400).to(dtype)
        if dtype.is_floating_point
        else torch.ones(300, 400, dtype=dtype)
    )
    wide = Spec("wide", {"a": Space(300, Permutation()), "b": Space(400, Permutation())}, {})
    w = element(wide, 1)
    rows, columns = (torch.from_numpy(w.members[s].permutation().index[0]) for s in "ab")
    assert torch.equal(act(w, big, "a b*"), big[rows][:, columns])


def test_half_precision_rounds_once() -> None:
    g = draw(5)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    exact = act(g, x.double(), "s (u u)")
    spec = Spec("toy", SPACES, {"w": "s (u u)"})
    assert torch.equal(
        apply(Element(spec, g.members), {"w": x})["w"],
        act(g, x.float(), "s (u u)").to(torch.bfloat16),
    )
    assert float((act(g, x, "s (u u)").double() - exact).abs().max()) < 0.05
    single = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        apply(Element(spec, g.members), {"w": single})["w"],
        act(g, single.double(), "s (u u)").float(),
    )


def test_act_is_differentiable_and_its_gradient_follows_the_dual() -> None:
    g = draw(6)
    x = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    y = torch.randn(6, 12, dtype=torch.float64)
    (act(g, x, "p (h q)") * y).sum().backward()
    torch.testing.assert_close(x.grad, act(~g, y, ax.dual("p (h q)")), rtol=0, atol=1e-10)


def test_masks_and_samples() -> None:
    """Token shuffles: one for all, P M P^T on a mask; and one per sample, as a space over the
    batch.
    """
    one = Spec("rows", {"token": Space(5, Permutation())}, {})
    g = element(one, 1)
    mask = torch.tril(torch.ones(2, 1, 5, 5))
    p = torch.from_numpy(g.members["token"].permutation().index[0])  # type: ignore[union-attr]
    assert torch.equal(act(g, mask, "_ _ token token*"), mask[:, :, p][:, :, :, p])
    each = Spec(
        "rows", {"batch": Space(3, Trivial()), "token": Space(5, Permutation(), over="batch")}, {}
    )
    h = element(each, 2)
    x = torch.randn(3, 5, 4)
    index = h.members["token"].permutation().index  # type: ignore[union-attr]
    expected = torch.stack([x[b][torch.from_numpy(index[b])] for b in range(3)])
    moved = act(h, x, "batch token _")
    assert torch.equal(moved, expected)
    assert torch.equal(act(~h, moved, "batch token _"), x)


def test_experts_on_one_tensor_and_on_many_agree() -> None:
    spaces = {
        "e": Space(3, Permutation()),
        "f": Space(4, GROUPS["monomial"], over="e"),
        "s": Space(5, GROUPS["signed"]),
    }
    fused = Spec("fused", spaces, {"up": "e |f|+f s*", "down": "e s f*"})
    separate = Spec(
        "apart", spaces, {"x.{e}.gate": "e |f| s*", "x.{e}.up": "e f s*", "x.{e}.down": "e s f*"}
    )
    g = element(fused, 3)
    up, down = torch.randn(3, 8, 5, dtype=torch.float64), torch.randn(3, 5, 4, dtype=torch.float64)
    whole = apply(g, {"up": up, "down": down})
    parts = apply(
        g.to(separate),
        {f"x.{i}.gate": up[i, :4] for i in range(3)}
        | {f"x.{i}.up": up[i, 4:] for i in range(3)}
        | {f"x.{i}.down": down[i] for i in range(3)},
    )
    for i in range(3):
        torch.testing.assert_close(
            torch.cat([parts[f"x.{i}.gate"], parts[f"x.{i}.up"]]),
            whole["up"][i],
            rtol=0,
            atol=1e-12,
        )
        torch.testing.assert_close(parts[f"x.{i}.down"], whole["down"][i], rtol=0, atol=1e-12)
    assert float((whole["up"] - up).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("s", (5,), 'in the space "s" must have size 6, got 5'),
        ("s s", (6,), "have 2 terms, but the tensor of shape"),
        ("nowhere", (3,), 'no space "nowhere"'),
        ("(nowhere _)", (6,), 'no space "nowhere"'),
        ("s+nowhere _", (6, 1), 'no space "nowhere"'),
        ("q", (4,), "which must be an axis of the tensor too"),
        ("(h q)", (13,), "cannot be split into"),
        ("|s|", (6,), "needs a permutation"),
    ],
)
def test_misfits_are_named(text: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises((SpecError, ElementError), match=message.replace("|", r"\|")):
        act(draw(1), torch.ones(*shape), text)


@pytest.mark.parametrize(
    ("name", "member"),
    [
        ("s", Dense(np.zeros((1, 6, 6)))),
        ("m", Monomial(np.arange(4)[None], np.array([[1.0, 0, 1, 1]]))),
        ("u", Planes(np.array([[1j, 0]]), "interleaved")),
    ],
)
def test_singular_members_have_no_inverse_and_are_not_saved(
    name: str, member: Member, tmp_path
) -> None:
    flat = {n: Space(s.size, GROUPS["linear"]) for n, s in SPACES.items()}
    for spec in (SPEC, Spec("flat", flat, {})):
        g = Element(spec, {name: member})
        with pytest.raises(ElementError, match=f'on "{name}" the element is singular'):
            ~g  # noqa: B018 (it raises)
        with pytest.raises(ElementError, match=f'on "{name}"'):
            save_element(g, tmp_path / "g.safetensors")
        assert not (tmp_path / "g.safetensors").exists()
    with pytest.raises(ElementError, match=f'on "{name}" the element is singular'):
        act(g, torch.ones(member.size), f"{name}*")


def test_views_that_are_negated_or_conjugated_move_by_value() -> None:
    spec = Spec("views", {"p": SPACES["p"]}, {"w": "p"})
    g, p = element(spec, 1), element(spec, 1).members["p"].matrix()[0].argmax(1)
    z = torch.randn(6, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.complex64, torch.complex128):
        for w in (
            z.to(dtype),
            z.to(dtype).conj(),
            z.to(dtype).conj().imag,
            torch._neg_view(z.to(dtype).real),
        ):
            assert torch.equal(apply(g, {"w": w})["w"], w[p])
    assert z.conj().is_conj()
    assert z.conj().imag.is_neg()


def test_restriction() -> None:
    g = draw(1)
    assert set(g.only("h", "q").members) == {"h", "q"}
    assert "s" not in g.without("s").members
    assert set(element(SPEC, 1, spaces=["h"]).members) == {"h"}
    np.testing.assert_array_equal(
        element(SPEC, 1, spaces=["s"]).members["s"].matrix(), g.members["s"].matrix()
    )
    layered = Spec("l", {f"ffn.{i}": Space(2, Permutation()) for i in range(3)}, {})
    assert match_spaces(layered, ["ffn"]) == {"ffn.0", "ffn.1", "ffn.2"}
    with pytest.raises(ElementError, match="no space"):
        g.only("nowhere")


def test_apply_is_pure_and_moves_one_part_alone() -> None:
    model = build("gpt2")
    spec, state = spec_of(model), model.state_dict()
    original = {k: v.clone() for k, v in state.items()}
    g = element(spec, 1)
    moved = apply(g, state, part="backbone")
    assert all(torch.equal(state[k], original[k]) for k in state)
    for name in state:
        assert torch.equal(moved[name], state[name]) == (spec.parts[name] != "backbone"), name
    with pytest.raises(SpecError, match=r'part must be one of .*, got "tail"'):
        apply(g, state, part="tail")
    with pytest.raises(SpecError, match='"stranger"'):
        apply(g, {**state, "stranger": torch.ones(1)})


def test_buffers_pass_as_they_are() -> None:
    model = build("gpt2")
    mask = torch.ones(1, 1, 16, 16).tril()
    state = {**model.state_dict(), "transformer.h.0.attn.bias": mask}
    assert apply(element(spec_of(model), 1), state)["transformer.h.0.attn.bias"] is mask


def test_lazy_thunks_read_nothing_until_called() -> None:
    class RecordingDict(dict):
        reads = 0

        def __getitem__(self, name: str) -> torch.Tensor:
            self.reads += 1
            return super().__getitem__(name)

    model = build("gpt2")
    state = RecordingDict(model.state_dict())
    thunks = apply_lazily(element(spec_of(model), 1), state)
    assert state.reads == 0
    thunks["transformer.wte.weight"]()
    assert state.reads == 1


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
        lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, 0.003, centered=True, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, 0.02),
        lambda p: torch.optim.Rprop(p, 0.003),
    ],
    ids=["sgd", "adamw", "rmsprop", "adagrad", "rprop"],
)
def test_training_resumes_across_a_move(name: str, make) -> None:
    """Train, move model and optimizer, train on: the same as training on and moving at the end.
    Moving the weights alone is not the same.
    """
    ids = torch.randint(0, 30, (2, 6), generator=torch.Generator().manual_seed(0))

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        with strict_float64():
            for _ in range(steps):
                optimizer.zero_grad()
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()

    def run(move: str) -> torch.Tensor:
        model = build(name)
        g = element(spec_of(model), 5, within="signed")
        optimizer = make(model.parameters())
        train(model, optimizer, 3)
        if move == "both":
            apply_(g, model, optimizer=optimizer)
        elif move == "weights":
            apply_(g, model)
        train(model, optimizer, 3)
        return compute_outputs(model, {"input_ids": ids})["logits"]

    plain = run("none")
    assert float((run("both") - plain).abs().max()) < 1e-7
    assert float((run("weights") - plain).abs().max()) > 1e-4


def test_optimizers_that_cannot_follow_are_refused() -> None:
    model = build("gpt2")
    optimizer = torch.optim.Adam(model.parameters())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ElementError, match="signed permutations only"):
        apply_(element(spec_of(model), 1, within="orthogonal"), model, optimizer=optimizer)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), (
        "a refused move changes nothing"
    )
    model(input_ids=torch.zeros(1, 3, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    optimizer.state[next(iter(model.parameters()))]["odd"] = torch.ones(7)
    with pytest.raises(ElementError, match='"odd"'):
        apply_(element(spec_of(model), 1, within="permutation"), model, optimizer=optimizer)


def test_moving_between_backward_and_step_moves_the_gradients() -> None:
    def run(move: bool) -> torch.Tensor:
        model = build("llama")
        g = element(spec_of(model), 5, within="signed")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with strict_float64():
            model(input_ids=torch.arange(12).view(2, 6)).logits.square().mean().backward()
        if move:
            apply_(g, model, optimizer=optimizer)
        optimizer.step()
        return compute_outputs(model, {"input_ids": torch.arange(12).view(2, 6)})["logits"]

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=1e-9)


class Experts(torch.nn.Module):
    """A list of experts, one tensor each, summed with weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.e = torch.nn.ModuleList(
            [torch.nn.Linear(4, 5, bias=False, dtype=torch.float64) for _ in range(3)]
        )
        self.router = torch.nn.Parameter(torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(torch.tanh(e(x)).sum(-1) * r for e, r in zip(self.e, self.router, strict=True))


def test_stacks_take_their_optimizer_state_and_gradients_along() -> None:
    spaces = {"e": Space(3, Permutation()), "f": Space(5, Permutation(), over="e")}
    spec = Spec("experts", spaces, {"e.{e}.weight": "e f _", "router": "e"})
    x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def run(move: bool) -> torch.Tensor:
        torch.manual_seed(1)
        model = Experts()
        optimizer = torch.optim.Adam(model.parameters(), 0.05)
        for step in range(6):
            optimizer.zero_grad()
            (model(x) - x[:, 0]).square().sum().backward()
            if move and step == 3:
                apply_(element(spec, 3), model, optimizer=optimizer)
            optimizer.step()
        return model(x)

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=1e-10)


def test_adapters_are_refused() -> None:
    model = build("llama")
    model.model.layers[0].self_attn.q_proj.lora = torch.nn.Linear(2, 2)
    with pytest.raises(SpecError, match=r"q_proj\.lora\.weight"):
        apply_(element(spec_of(build("llama")), 1), model)


def test_a_wrapped_module_and_a_strange_optimizer_are_refused() -> None:
    model = build("llama")
    g = element(spec_of(model), 5, within="signed")
    wrapped = torch.nn.ModuleDict({"module": model})
    with pytest.raises(SpecError, match=r'no "model\.embed_tokens\.weight"'):
        apply_(g, wrapped)
    with pytest.raises(ElementError, match="the module does not have"):
        apply_(g, model, optimizer=torch.optim.Adam(build("llama").parameters()))


class Pair(torch.nn.Module):
    """Two tensors, the second of another shape or dtype than the spec of the test below has in
    mind.
    """

    def __init__(self, second: torch.Tensor) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.arange(6.0))
        self.register_buffer("b", second)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (torch.ones(5), 'axis 0 s of "b" has size 5, expected 6'),
        (torch.ones(6, 1), r'"b" has 2 axes \[6, 1\], expected 1'),
        (torch.ones(6, dtype=torch.int32), '"b" is torch.int32, which can only be permuted'),
        (
            torch.ones(6, dtype=torch.complex64),
            '"b" is torch.complex64, which can only be permuted',
        ),
    ],
)
def test_a_module_that_does_not_fit_is_left_as_it_is(second: torch.Tensor, message: str) -> None:
    spec = Spec("pair", {"s": SPACES["s"]}, {"a": "s", "b": "s"})
    model = Pair(second)
    with pytest.raises(SpecError, match=message):
        apply_(element(spec, 1), model)
    assert torch.equal(model.a, torch.arange(6.0))
    fits = Pair(torch.ones(6))
    apply_(element(spec, 1), fits)
    assert not torch.equal(fits.a, torch.arange(6.0))


@pytest.mark.parametrize(
    ("w", "message"),
    [
        (torch.ones(5), '^"b": an axis in the space "s" must have size 6, got 5'),
        (torch.ones(6, 1), '^"b": axes .s. have 1 terms, but the tensor'),
        (
            torch.ones(6, dtype=torch.int32),
            '^"b": a tensor of torch.int32 can only be permuted',
        ),
    ],
)
def test_apply_names_the_tensor_that_does_not_fit(w: torch.Tensor, message: str) -> None:
    spec = Spec("pair", {"s": SPACES["s"]}, {"a": "s", "b": "s"})
    with pytest.raises((SpecError, ElementError), match=message):
        apply(element(spec, 1), {"a": torch.ones(6), "b": w})


def test_a_stack_with_a_gap_is_refused() -> None:
    spec = Spec("experts", {"e": Space(3, Permutation())}, {"e.{e}.weight": "e _"})
    g = Element(spec, {"e": Monomial(np.array([[1, 2, 0]]))})
    with pytest.raises(
        SpecError,
        match=r'"e\.0\.weight" is computed from "e\.1\.weight", which is not in the state',
    ):
        apply(g, {"e.0.weight": torch.ones(2), "e.2.weight": torch.ones(2)})


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_only_permutations_act_on_non_real_dtypes(dtype: torch.dtype) -> None:
    with pytest.raises(ElementError, match="can only be permuted"):
        act(draw(1), torch.ones(6).to(dtype), "s")
    assert act(draw(1), torch.ones(6).to(dtype), "p").dtype == dtype


def test_act_composes_with_transforms_of_torch() -> None:
    g, x = draw(3), torch.randn(4, 6, dtype=torch.float64)
    assert torch.equal(torch.func.vmap(lambda row: act(g, row, "p"))(x), act(g, x, "_ p"))
    _, tangent = torch.func.jvp(lambda t: act(g, t, "_ p"), (x,), (x,))
    assert torch.equal(tangent, act(g, x, "_ p"))


@pytest.mark.parametrize("key", [b"", b"short", True, "text", 1.5, None])
def test_invalid_keys_are_rejected(key: object) -> None:
    with pytest.raises(ElementError, match="a key must be 32 bytes"):
        element(SPEC, key)  # type: ignore[arg-type]


def test_a_reason_with_the_word_size_is_not_a_size_error() -> None:
    spec = Spec("toy", {"p": Space(3, Permutation(), why="the size of the gain")}, {"w": "p"})
    g = Element(spec, {"p": GROUPS["orthogonal"].sample(3, 1, Stream(seed_key(0), "x"))})
    assert g.to(spec).members
    with pytest.raises(ElementError) as refused:
        g.require()
    assert "another model" not in str(refused.value.hint)


def test_apply_in_place_moves_tied_tensors_once() -> None:
    model = build("gpt2")
    expected = apply(element(spec_of(model), 2), model.state_dict())
    apply_(element(spec_of(model), 2), model)
    assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())
    assert model.lm_head.weight is model.transformer.wte.weight


def test_elements_are_saved_and_loaded(tmp_path) -> None:
    g = draw(9)
    path = tmp_path / "g.safetensors"
    save_element(g, path)
    assert path.stat().st_mode & 0o777 == 0o600
    loaded = load_element(path, SPEC)
    assert loaded.members.keys() == g.members.keys()
    for name in g.members:
        np.testing.assert_array_equal(loaded.members[name].matrix(), g.members[name].matrix())


def test_elements_of_another_model_are_refused(tmp_path) -> None:
    path = tmp_path / "g.safetensors"
    save_element(draw(9), path)
    smaller = Spec("other", {**SPACES, "s": Space(5, GROUPS["orthogonal"])}, {})
    with pytest.raises(ElementError, match='"s"'):
        load_element(path, smaller)
    with pytest.raises(ElementError, match="another model"):
        draw(9).to(smaller)
    with pytest.raises(ElementError, match="different models"):
        draw(9) @ element(smaller, 1)
    stricter = Spec("other", {**SPACES, "s": Space(6, GROUPS["permutation"])}, {})
    with pytest.raises(ElementError, match="rotation"):
        load_element(path, stricter)


@pytest.mark.parametrize(
    "damage", ["truncate", "text", "newer", "other", "older", "list", "deep", "scale", "flat"]
)
def test_damaged_element_files_are_refused(tmp_path, damage: str) -> None:
    path = tmp_path / "g.safetensors"
    save_element(draw(9), path)
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:100])
    elif damage == "text":
        path.write_text("hello")
    elif damage == "newer":
        save_file({}, path, {"regauge": "element", "version": "99", "members": "{}"})
    elif damage == "older":
        save_file({}, path, {"regauge": "element", "version": "-1", "members": "{}"})
    elif damage == "list":
        save_file({}, path, {"regauge": "element", "version": "1", "members": "[1]"})
    elif damage == "deep":
        save_file({}, path, {"regauge": "element", "version": "1", "members": "[" * 100_000})
    elif damage == "scale":
        arrays = {"m:index": np.arange(4)[None], "m:scale": np.ones((1, 3))}
        save_file(
            arrays, path, {"regauge": "element", "version": "1", "members": '{"m": "monomial"}'}
        )
    elif damage == "flat":
        save_file(
            {"m:index": np.arange(4)},
            path,
            {"regauge": "element", "version": "1", "members": '{"m": "monomial"}'},
        )
    else:
        save_file({"x": np.ones(1)}, path)
    with pytest.raises(ElementError) as refused:
        load_element(path, SPEC)
    assert refused.value.hint


def test_a_wrong_member_names_the_space_and_the_reason() -> None:
    spec = Spec(
        "toy", {"p": Space(3, Permutation(), why="GELU follows permutations only")}, {"w": "p"}
    )
    g = Element(
        spec, {"p": Dense(GROUPS["orthogonal"].sample(3, 1, Stream(seed_key(0), "x")).matrix())}
    )
    with pytest.raises(
        ElementError,
        match=r'on "p" the element is a rotation .* the group there is permutation \(GELU',
    ):
        apply(g, {"w": torch.ones(3)})
    assert apply(g, {"w": torch.ones(3)}, force=True)


def test_an_ill_conditioned_element_is_rejected(tmp_path) -> None:
    g = draw(9)
    wild = Element(
        SPEC, {**g.members, "m": Monomial(np.arange(4)[None], np.array([[1e-60, 1.0, 1.0, 2.0]]))}
    )
    with pytest.raises(
        ElementError,
        match=r'on "m" the element stretches by factors from 1e-60 to 2, .* a ratio of 1000; '
        r"the group there is monomial",
    ):
        apply(wild, {})
    path = tmp_path / "g.safetensors"
    save_element(g, path)
    arrays, metadata = _read(path)
    arrays["q:matrix"][1] = np.diag([1e12, 1, 1, 1])
    save_file(arrays, path, metadata)
    with pytest.raises(
        ElementError, match=r'on "q" the element stretches by factors from 1 to 1e\+12'
    ):
        load_element(path, SPEC)


def _read(path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    with safe_open(path, framework="numpy") as file:
        # not a dict
        return {k: file.get_tensor(k).copy() for k in file.keys()}, file.metadata()  # noqa: SIM118


def test_an_element_of_a_folded_spec_is_refused_on_weights_that_were_not_folded() -> None:
    from regauge.core.fold import fold_norms

    model = build("gpt2-untied")
    spec, folded = fold_norms(spec_of(model), model.state_dict())
    g = element(spec, 1)
    assert apply(g, folded)
    with pytest.raises(SpecError, match=r"the state must be folded.*\n.*ln_1\.weight"):
        apply(g, model.state_dict())
    with pytest.raises(SpecError, match="the state must be folded"):
        apply_(g, model)


def test_kinds_and_spaces_are_checked() -> None:
    with pytest.raises(ElementError, match=r'within must be one of .*, got "rotation"'):
        element(SPEC, 1, within="rotation")  # type: ignore[arg-type]
    assert set(element(SPEC, 1, spaces="h").members) == {"h"}


def test_the_rotation_of_one_head() -> None:
    """`g["qk.1"].matrix(head=2)` is what multiplies the queries of that head."""
    model = build("gpt2")
    spec = spec_of(model)
    g = element(spec, 3, spaces=["qk.1"])
    rotation = torch.from_numpy(g["qk.1"].matrix(head=2))
    name = "transformer.h.1.attn.c_attn.weight"
    before, after = (
        state[name][:, 8:12] for state in (model.state_dict(), apply(g, model.state_dict()))
    )
    torch.testing.assert_close(after, before @ rotation.T)
    assert (g["stream"].matrix() == np.eye(12)).all(), "the identity where it has no member"
    with pytest.raises(ElementError, match=r"head must be from 0 to 2 for qk\.1, got None"):
        g["qk.1"].matrix()
    with pytest.raises(ElementError, match="got 3"):
        g["qk.1"].matrix(head=3)
    with pytest.raises(ElementError, match="several spaces"):
        g["qk"]
    with pytest.raises(ElementError, match="no space"):
        g["nothing"]

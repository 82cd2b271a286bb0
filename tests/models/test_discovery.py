"""Discovery, rule by rule: the smallest module that shows it, with the group that must be found,
and one beside it that must not have it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regauge
from regauge.core.check import check
from regauge.core.element import element
from regauge.core.spec import Spec
from regauge.errors import SpecError
from regauge.models.discovery import Discovery, DiscoveryError, discovery_of, proof
from regauge.models.discovery.cache import cache_key
from regauge.models.discovery.terms import Atom, Product, Sum, cut, leaves, unify
from regauge.models.summary import explain_space
from regauge.testing import assert_symmetry, symmetry_error
from support.own_modules_hidden import Hidden

ROWS = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(0))


def groups(spec: Spec) -> dict[str, str]:
    return {n: str(s.group) + (f" over {s.over}" if s.over else "") for n, s in spec.spaces.items()}


@pytest.mark.parametrize(
    ("function", "group"),
    [
        (F.gelu, "permutation"),
        (F.relu, "monomial+"),
        (torch.tanh, "signed"),
        (lambda x: x, "linear"),
        (lambda x: x + 1, "orthogonal-ones"),
        (lambda x: F.relu(x).square(), "permutation"),
        (lambda x: F.normalize(x, dim=-1), "orthogonal"),
        (lambda x: F.layer_norm(x, (10,)), "orthogonal-ones"),
        (lambda x: x * torch.sigmoid(1.7 * x), "permutation"),
        (lambda x: x.softmax(-1), "permutation"),
    ],
)
def test_an_activation_leaves_its_group_and_no_larger_one(
    function: Callable[[torch.Tensor], torch.Tensor], group: str
) -> None:
    spec = regauge.discover(Hidden(function), ROWS)
    assert groups(spec) == {"up": group}
    assert spec.tensors == {
        "up.weight": "up _6",
        "up.bias": "up",
        "down.weight": "_3 up*",
        "down.bias": "_3",
    }
    larger = {
        "permutation": "signed",
        "signed": "orthogonal",
        "monomial+": "monomial",
        "orthogonal-ones": "orthogonal",
        "orthogonal": "linear",
    }
    if group in larger:
        from dataclasses import replace

        from regauge.core.groups import GROUPS

        wider = replace(
            spec, spaces={"up": replace(spec.spaces["up"], group=GROUPS[larger[group]])}
        )
        model = proof.randomized_copy(Hidden(function))
        assert symmetry_error(model, wider, element(wider, 1), {"x": ROWS.double()}) > 1e-3


@pytest.mark.parametrize(
    "turned",
    [
        lambda x: x.movedim(0, 2).movedim(2, 0),
        lambda x: torch.moveaxis(torch.moveaxis(x, (0, 1), (2, 0)), (2, 0), (0, 1)),
        lambda x: x.swapaxes(0, 2).swapdims(0, 2),
        lambda x: x.permute(2, 0, 1).permute(1, 2, 0),
        lambda x: x.mT.mT,
    ],
)
def test_axes_are_followed_through_transpositions(
    turned: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    assert groups(regauge.discover(Hidden(lambda x: F.gelu(turned(x))), TOKENS)) == {
        "up": "permutation"
    }
    assert groups(regauge.discover(Hidden(lambda x: F.gelu(turned(x)).cumsum(-1)), TOKENS)) == {}


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 10), nn.Linear(6, 10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_a_gate_is_barred_and_what_it_gates_is_scaled() -> None:
    spec = regauge.discover(Gated(), ROWS)
    assert groups(spec) == {"gate": "monomial"}
    assert (
        spec.tensors["gate.weight"],
        spec.tensors["up.weight"],
        spec.tensors["down.weight"],
    ) == ("|gate| _6", "gate _6", "_3 gate*")


class Heads(nn.Module):
    """Attention: fused or not, grouped, with norms and rotary positions on queries and keys."""

    def __init__(
        self,
        fused: str = "",
        kv: int = 2,
        norm: bool = False,
        rotary: str = "",
        einsum: bool = False,
    ) -> None:
        super().__init__()
        self.fused, self.kv, self.rotary, self.einsum = fused, kv, rotary, einsum
        if fused:
            self.qkv = nn.Linear(6, 16 if fused == "rows" else 24)
        else:
            self.q, self.k, self.v = nn.Linear(6, 8), nn.Linear(6, 4 * kv), nn.Linear(6, 4 * kv)
        self.norm = nn.RMSNorm(4) if norm else None
        self.out = nn.Linear(8, 3)

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * torch.tensor(
            [1.0, 0.1], dtype=x.dtype
        )
        if self.rotary == "half":
            angle = torch.cat([angle, angle], -1)
            return x * angle.cos() + torch.cat([-x[..., 2:], x[..., :2]], -1) * angle.sin()
        angle = angle.repeat_interleave(2, -1)
        return (
            x * angle.cos()
            + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * angle.sin()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused == "outer":  # three, heads, width
            q, k, v = self.qkv(x).reshape(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        elif self.fused == "inner":  # heads, three, width
            q, k, v = self.qkv(x).view(2, 5, 2, 12).transpose(1, 2).chunk(3, -1)
        elif self.fused == "rows":  # two queries, a key and a value, chosen by number
            rows = self.qkv(x).view(2, 5, 4, 4)
            rows = rows if self.norm is None else self.norm(rows)
            q, k, v = (
                t.transpose(1, 2)
                for t in (rows[..., :-2, :], rows[..., [-2], :], rows[..., [-1], :])
            )
        else:
            q, k, v = (
                layer(x).unflatten(-1, (-1, 4)).transpose(1, 2)
                for layer in (self.q, self.k, self.v)
            )
        if self.norm is not None and self.fused != "rows":
            q, k = self.norm(q), self.norm(k)
        if self.rotary:
            q, k = self.turn(q), self.turn(k)
        if self.einsum:
            a = torch.einsum("bhnd,bhmd->bhnm", q, k).softmax(-1)
            return self.out(torch.einsum("bhnm,bmhd->bnhd", a, v.transpose(1, 2)).flatten(2))
        return self.out(
            F.scaled_dot_product_attention(q, k, v, enable_gqa=self.kv != 2)
            .transpose(1, 2)
            .flatten(2)
        )


HEADS = {
    "plain": (Heads(), {"head": "permutation", "qk": "linear over head", "vo": "linear over head"}),
    "einsum": (
        Heads(einsum=True),
        {"head": "permutation", "qk": "linear over head", "vo": "linear over head"},
    ),
    "fused, outer": (
        Heads("outer"),
        {"head": "permutation", "qk": "linear over head", "vo": "linear over head"},
    ),
    "fused, inner": (
        Heads("inner"),
        {"head": "permutation", "qk": "linear over head", "vo": "linear over head"},
    ),
    "fused, rows": (Heads("rows", kv=1), {"head": "permutation", "qk": "linear", "vo": "linear"}),
    "fused, rows, normed as one": (
        Heads("rows", kv=1, norm=True),
        {"head": "permutation", "vo": "signed"},
    ),
    "one key": (Heads(kv=1), {"head": "permutation", "qk": "linear", "vo": "linear"}),
    "normed": (Heads(norm=True), {"head": "permutation", "qk": "signed", "vo": "linear over head"}),
    "rotary": (
        Heads(rotary="half"),
        {"head": "permutation", "qk": "rotary-half over head", "vo": "linear over head"},
    ),
    "rotary, interleaved": (
        Heads(rotary="interleaved"),
        {"head": "permutation", "qk": "rotary-interleaved over head", "vo": "linear over head"},
    ),
    "normed, rotary": (
        Heads(norm=True, rotary="half"),
        {"head": "permutation", "qk": "signs-half over head", "vo": "linear over head"},
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads(name: str) -> None:
    module, expected = HEADS[name]
    spec = regauge.discover(module, TOKENS)
    found = {n.replace("v", "vo") if n == "v" else n: g for n, g in groups(spec).items()}
    assert found == expected
    assert not spec.notes


class Registers(nn.Module):
    """Three learned tokens in front of the others, and one place that is read by its number."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.registers = place, nn.Parameter(torch.randn(1, 3, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.cat([self.registers.expand(len(x), -1, -1), x], 1)
        return ((z @ z.mT).softmax(-1) @ z)[:, self.place]


@pytest.mark.parametrize(("place", "axes"), [(3, "free"), (0, "_1+free"), (1, "_3")])
def test_places_that_are_not_read_by_number_come_in_any_order(place: int, axes: str) -> None:
    spec = regauge.discover(Registers(place), TOKENS)
    (name,) = spec.spaces or ("free",)
    assert spec.tensors["registers"].replace(name, "free") == f"_1 {axes} _6"


class Convolutions(nn.Module):
    """A plain network of convolutions with BatchNorm, a skip and a channel-wise layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.n1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.n2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.third, self.depth = nn.Conv2d(8, 12, 1), nn.Conv2d(12, 12, 3, groups=12, padding=1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.n1(self.first(x)))
        x = F.max_pool2d(F.relu(x + self.n2(self.second(x))), 2)
        return self.head(F.gelu(self.depth(self.third(x))).mean((2, 3)))


def test_convolutions_with_batch_norm() -> None:
    """In front of a BatchNorm the stored statistics hold the scale; its gain carries the one
    behind.
    """
    module = Convolutions()
    spec = regauge.discover(module, IMAGES)
    assert groups(spec) == {"first": "monomial+", "third": "permutation"}
    assert spec.tensors["second.weight"] == "|first| first* _3 _3"
    assert spec.tensors["n1.running_var"] == "|first|"
    assert check(spec, module.state_dict()) == []


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            nn.Conv2d(3, 8, 1),
            nn.Conv2d(8, 12, 1, groups=2),
            nn.Conv2d(12, 4, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.second(F.relu(self.first(x)))))


def test_grouped_convolutions() -> None:
    spec = regauge.discover(Grouped(), IMAGES)
    assert groups(spec) == {
        "group": "permutation",
        "first": "monomial+",
        "second": "monomial+ over group",
    }


class Experts(nn.Module):
    """The best two of three experts for each token, each with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(3, 10, 6)),
            nn.Parameter(torch.randn(3, 6, 10)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(2)
        each = x.repeat_interleave(2, 0)[..., None]
        hidden = F.relu(torch.bmm(self.up[chosen.flatten()], each))
        out = torch.bmm(self.down[chosen.flatten()], hidden).squeeze(-1) * weight.flatten()[:, None]
        return out.view(-1, 2, 6).sum(1)


def test_experts_come_in_any_order_each_with_neurons_of_its_own() -> None:
    spec = regauge.discover(Experts(), ROWS)
    assert sorted(groups(spec).values()) == [
        "monomial+ over " + next(n for n, g in groups(spec).items() if g == "permutation"),
        "permutation",
    ]
    assert spec.tensors["router.weight"].split()[0] == spec.tensors["up"].split()[0]


class Stream(nn.Module):
    """A residual stream with a norm, and something in its way."""

    def __init__(self, way: str = "", tied: bool = False) -> None:
        super().__init__()
        self.way = way
        self.table = nn.Embedding(20, 8)
        self.register_buffer("fixed", torch.randn(8, 8))
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 20, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        z = self.table(ids)
        if self.way == "projection":
            z = z + z @ self.fixed.to(z.dtype)
        if self.way == "gate":
            z = z * torch.sigmoid(torch.arange(8, dtype=z.dtype))
        if self.way == "even gate":
            z = z * (torch.arange(8) >= 0).to(z.dtype)
        if self.way == "positions":
            z = z + torch.arange(5, dtype=z.dtype)[:, None].sin()
        return self.head(z + self.down(F.gelu(self.up(self.norm(z)))))


def stream_of(discovery: Discovery) -> str | None:
    return next(
        (n for n in discovery.spec.spaces if n in discovery.spec.tensors["table.weight"]), None
    )


def test_a_stream_is_found_and_folds() -> None:
    spec = regauge.discover(Stream(), IDS)
    assert [str(s.folded) for s in spec.spaces.values()] == ["orthogonal-ones", "None"]
    assert [n.readers for n in spec.norms] == [(("up.weight", "up.bias"),)]


def test_a_tied_head_is_one_tensor_with_two_names() -> None:
    spec = regauge.discover(Stream(tied=True), IDS)
    assert spec.ties == {"head.weight": "table.weight"}
    assert spec.tensors["head.weight"] == spec.tensors["table.weight"] + "*"


@pytest.mark.parametrize(
    ("way", "culprit", "code"),
    [("projection", "matmul", "@ self.fixed"), ("gate", "arange", "torch.arange(8")],
)
def test_an_asymmetric_module_loses_its_stream_and_nothing_else(
    way: str, culprit: str, code: str
) -> None:
    discovery = discovery_of(Stream(way), IDS)
    assert stream_of(discovery) is None
    assert groups(discovery.spec) == {"up": "permutation"}  # the hidden layer keeps what it had
    explanation = explain_space(discovery, "table.weight[1]")
    assert explanation["group"] == "nothing acts"
    source = Path(__file__).read_text().splitlines()
    lines = [
        p
        for r in explanation["reasons"]
        for p in r["places"]
        if r["operator"] == culprit or code in p["code"]
    ]
    assert lines, explanation
    assert all(
        p["file"] == "models/test_discovery.py" and code in source[p["line"] - 1] for p in lines
    )


@pytest.mark.parametrize("way", ["positions", "even gate"])
def test_the_same_number_at_every_channel_takes_nothing_away(way: str) -> None:
    """Positions that are the same for all channels, and a gate that does not differ: the norm's own
    restriction is the larger one.
    """
    discovery = discovery_of(Stream(way), IDS)
    name = stream_of(discovery)
    assert name is not None
    assert str(discovery.spec.spaces[name].group) == "permutation"


def test_explanations_of_a_groups_limits_name_lines() -> None:
    discovery = discovery_of(Stream(), IDS)
    explanation = explain_space(discovery, stream_of(discovery) or "")
    norm = next(
        r for r in explanation["reasons"] if r["operator"] == "layer_norm" and "mean" in r["does"]
    )
    line = Path(__file__).read_text().splitlines()[norm["places"][0]["line"] - 1]
    assert "self.norm(z)" in line
    assert (
        f"`layer_norm` at line {norm['places'][0]['line']} of models/test_discovery.py takes "
        "the mean" in norm["text"]
    )
    with pytest.raises(SpecError, match='got "nothing"'):
        explain_space(discovery, "nothing")


def test_an_operator_without_a_rule_freezes_what_it_touches_and_is_named() -> None:
    spec = regauge.discover(Hidden(torch.special.bessel_j0), ROWS)
    assert spec.spaces == {}
    assert spec.notes == ("no rule for special_bessel_j0: nothing acts on axes that they touch",)


def test_wrong_inferences_are_dropped_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that lies: GELU would keep signs."""
    from regauge.models.discovery import elementwise
    from regauge.models.discovery.rules import RULES

    monkeypatch.setitem(RULES, "gelu", elementwise.pointwise("odd"))
    discovery = discovery_of(Hidden(F.gelu), ROWS)
    assert groups(discovery.spec) == {"up": "permutation"}
    assert discovery.dropped == ('"up" has the group permutation, not signed as inferred',)
    monkeypatch.setitem(RULES, "cos", elementwise.neg)
    discovery = discovery_of(Hidden(lambda x: torch.cos(x).cumsum(-1)), ROWS)
    assert discovery.spec.spaces == {}


def test_inputs_may_be_positional_and_untraceable_modules_are_reported() -> None:
    assert groups(regauge.discover(Hidden(F.gelu), (ROWS,))) == {"up": "permutation"}
    with pytest.raises(DiscoveryError, match="takes 1 arguments, got 2"):
        regauge.discover(Hidden(F.gelu), (ROWS, ROWS))
    with pytest.raises(DiscoveryError, match=r"torch\.export cannot trace Hidden"):
        regauge.discover(Hidden(lambda x: x if float(x.sum()) > 0 else -x), ROWS)


def test_unification() -> None:
    frozen: list[object] = []
    whole, heads = Atom(12), Product((Atom(3), Atom(4)))
    unify(whole, heads, frozen.append)
    assert [a.size for a in leaves(whole)] == [3, 4]
    unify(whole, Product((Atom(6), Atom(2))), frozen.append)
    assert [a.size for a in leaves(whole)] == [3, 2, 2]
    first, rest = cut(whole, 4) or (None, None)
    assert first is not None
    assert rest is not None
    assert (first.size, rest.size) == (4, 8)
    assert cut(Product((Atom(3), Atom(4))), 5) is None
    assert not frozen
    unify(Sum((Atom(5), Atom(7))), Product((Atom(3), Atom(4))), frozen.append)
    assert frozen


# The transformers library.


def test_a_model_that_no_family_knows_goes_the_whole_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """inspect falls back to discovery; the spec is kept; a moved checkpoint loads and agrees."""
    from regauge.cli.app import run
    from regauge.models.load import load_model
    from support.further_models import FURTHER

    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path / "cache" / "experiments"))
    torch.manual_seed(0)
    FURTHER["opt"]().save_pretrained(tmp_path / "opt")
    assert run(["inspect", str(tmp_path / "opt"), "--json"]) == 0
    captured = capsys.readouterr()
    assert (
        "no family describes this model: its symmetry was inferred from its graph" in captured.err
    )
    facts = json.loads(captured.out)
    assert {s["name"]: s["group"] for s in facts["spaces"]}["ffn.0..1"] == "monomial+"
    assert len(list((tmp_path / "cache" / "discovered").iterdir())) == 1
    assert run(["inspect", str(tmp_path / "opt"), "--explain", "ffn.0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ffn.0: monomial+ on 24\n  `relu` at line ")
    assert (
        run(
            [
                "move",
                str(tmp_path / "opt"),
                "--random",
                "--seed",
                "1",
                "-o",
                str(tmp_path / "moved"),
            ]
        )
        == 0
    )
    before, after = (load_model(tmp_path / n, "float64") for n in ("opt", "moved"))
    with torch.no_grad():
        a, b = before(input_ids=IDS).logits, after(input_ids=IDS).logits
    assert float((a - b).abs().max()) < 1e-4  # it was stored in float32
    assert any(
        not torch.equal(p, q) for p, q in zip(before.parameters(), after.parameters(), strict=True)
    )


def test_a_large_model_is_discovered_without_memory_and_verified_on_a_twin(tmp_path: Path) -> None:
    import transformers as T

    from regauge.models.discovery.twins import build, example_inputs

    config = T.Starcoder2Config(
        num_hidden_layers=3,
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=1024,
    )
    module = build({**config.to_dict(), "architectures": ["Starcoder2ForCausalLM"]}, "meta")
    inputs = example_inputs(module)
    discovery = discovery_of(module, inputs, cache=tmp_path)
    assert discovery.verified_on.startswith("a twin of ")
    assert any("verified on a twin" in note for note in discovery.spec.notes)
    assert discovery.spec.spaces["kv.2"].size == 2
    assert str(discovery.spec.spaces["qk.2"].group) == "rotary-half"
    cached = discovery_of(module, inputs, cache=tmp_path)
    assert cached.spec == discovery.spec
    assert cached.reasons == discovery.reasons
    assert cache_key(Hidden(F.gelu), {"x": ROWS}) is None
    other = build(
        {**config.to_dict(), "hidden_act": "relu", "architectures": ["Starcoder2ForCausalLM"]},
        "meta",
    )
    assert cache_key(other, inputs) != cache_key(module, inputs)
    assert cache_key(module, {**inputs, "use_cache": True}) == cache_key(
        module, {**inputs, "use_cache": True}
    )
    assert cache_key(module, {**inputs, "use_cache": True}) != cache_key(
        module, {**inputs, "use_cache": False}
    )


WITHOUT_MEMORY = {
    # keys and values are taken by numbers in a list, which must keep their values
    "falcon": (
        "FalconForCausalLM",
        {"hidden_size": 64, "num_attention_heads": 8, "ffn_hidden_size": 96},
    ),
    # words narrower than the stream
    "opt": (
        "OPTForCausalLM",
        {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "ffn_dim": 96,
            "word_embed_proj_dim": 48,
            "do_layer_norm_before": False,
        },
    ),
    # rotary frequencies are buffers, experts are run as one
    "mixtral": (
        "MixtralForCausalLM",
        {
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 96,
        },
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "falcon" else pytest.mark.slow) for n in WITHOUT_MEMORY],
)
def test_without_memory_as_much_is_found(name: str) -> None:
    import transformers as T

    from regauge.models.discovery.twins import build, example_inputs

    kind, sizes = WITHOUT_MEMORY[name]
    config = {
        **T.AutoConfig.for_model(name, num_hidden_layers=3, vocab_size=99, **sizes).to_dict(),
        "architectures": [kind],
    }
    empty, here = build(config, "meta"), build(config)
    discovery, whole = (discovery_of(m, example_inputs(m)) for m in (empty, here))
    assert discovery.verified_on.startswith("a twin of ")
    assert whole.verified_on == "the module itself"
    assert discovery.spec.tensors == whole.spec.tensors
    assert discovery.spec.spaces == whole.spec.spaces
    assert "head.0" in discovery.spec.spaces or "kv.0" in discovery.spec.spaces
    assert all(t.is_meta for t in empty.parameters())  # as it was given


def test_what_stands_for_a_large_tensor_is_not_copied() -> None:
    from regauge.models.discovery.stored_names import _NoClone

    large = torch.arange(8).view(8, 1, 1).expand(8, 1 << 20, 1 << 20)  # eight numbers, for 64 TB
    with _NoClone():
        half = large.chunk(2, 1)[0].contiguous()
    assert half.shape == (8, 1 << 19, 1 << 20)
    assert half.untyped_storage().nbytes() == 8 * 8


def test_a_discovered_spec_is_an_ordinary_one() -> None:
    from regauge.checkpoints.spec_files import dump_spec, parse_spec
    from support.picos import PICOS, build

    model = build("gpt2")
    spec = regauge.discover(model, PICOS["gpt2"].inputs)
    assert parse_spec(dump_spec(spec)) == spec
    assert_symmetry(model, spec, element(spec, 3), PICOS["gpt2"].inputs)
    assert set(spec.spaces) == {
        "stream",
        *(f"{n}.{i}" for n in ("head", "qk", "vo", "ffn") for i in range(2)),
    }


def test_models_unknown_to_timm_are_reported() -> None:
    from regauge.models.discovery.twins import build

    with pytest.raises(DiscoveryError, match="timm cannot build a vit_of_no_kind"):
        build({"architecture": "vit_of_no_kind"}, "meta")
    assert (
        build(
            {"architecture": "vit_tiny_patch16_224", "model_args": None, "num_classes": 3}, "meta"
        ).num_classes
        == 3
    )

"""Locks: undone bit for bit, refused when the key or the model is not the one, and worth nothing
where nothing joins the parts.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from regauge.core.action import act, apply, is_exact_on
from regauge.core.element import Element, element
from regauge.core.fold import fold_norms
from regauge.core.groups import PlaneSigns
from regauge.core.rng import Stream, seed_key
from regauge.core.spec import Space, Spec
from regauge.errors import (
    ElementError,
    KeyFileError,
    LockError,
    SpecError,
    TamperedModelError,
    WrongKeyError,
)
from regauge.locking.keys import Key
from regauge.locking.lock import (
    LOCKS,
    Record,
    lock_state,
    locked_element,
    read_record,
    record_of,
    require_locked,
    require_plain,
    unlock_state,
)
from support.picos import PICOS, build, spec_of

KEY, OTHER = Key(seed_key(1)), Key(seed_key(2))

# One of each family, and those whose spaces are unlike: experts, a sign for each plane, scaled
# neurons, several streams.
NAMES = (
    *("vit", "dinov2", "bert", "deberta-v3", "gpt2", "llama", "qwen3", "gemma2", "mixtral"),
    *("bart", "t5", "swin", "clip", "timm-vit", "timm-swin"),
)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


def signed_zeros(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same state with zeros of both signs, infinities and NaN in places: what a product would
    not keep.
    """
    out = {}
    for i, (name, t) in enumerate(state.items()):
        t = t.clone()
        if t.is_floating_point() and t.numel() > 4:
            t.view(-1)[: 4 + i % 2] = torch.tensor([0.0, -0.0, float("inf"), -float("nan"), -0.0])[
                : 4 + i % 2
            ].to(t.dtype)
        out[name] = t
    return out


@pytest.mark.parametrize("group", ["permutation", "signed"])
@pytest.mark.parametrize("name", NAMES)
def test_unlocking_gives_every_bit_back(name: str, group: str) -> None:
    model = build(name)
    spec = spec_of(model)
    plain = signed_zeros({n: t.detach() for n, t in model.half().state_dict().items()})
    locked = lock_state(spec, plain, KEY, group=group)
    changed = [n for n in plain if not same_bits(plain[n], locked.state[n])]
    assert changed
    assert all(spec.parts.get(n, "backbone") == "backbone" for n in changed), (
        "embedding and head are left as they are"
    )
    back = unlock_state(spec, locked.state, locked.record, KEY)
    assert all(same_bits(back[n], plain[n]) for n in plain)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_rotations_come_back_to_rounding_and_keep_the_function(name: str) -> None:
    model = build(name)
    spec, state = spec_of(model), model.state_dict()
    locked = lock_state(spec, state, KEY, group="rotation")
    assert locked.record.folded == bool(spec.norms)
    expected = fold_norms(spec, state)[1] if spec.norms else state
    back = unlock_state(spec, locked.state, locked.record, KEY)
    assert max(float((back[n] - expected[n]).abs().max()) for n in expected) < 1e-12
    assert max(float((locked.state[n] - expected[n]).abs().max()) for n in expected) > 0.1


@pytest.mark.parametrize("group", LOCKS)
def test_a_locked_model_computes_something_else(group: str) -> None:
    model = build("gpt2")
    inputs = PICOS["gpt2"].inputs
    with torch.no_grad():
        right = model(**inputs).logits
        locked = lock_state(spec_of(model), model.state_dict(), KEY, group=group)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # folding unties it
        model.load_state_dict(locked.state)
        wrong = model(**inputs).logits
    assert float((right - wrong).abs().mean()) > 0.3 * float(right.std())


def test_one_key_locks_models_by_unrelated_elements() -> None:
    model = build("gpt2")
    spec, state = spec_of(model), model.state_dict()
    a = lock_state(spec, state, KEY)
    b = lock_state(
        spec, {**state, "transformer.ln_f.bias": state["transformer.ln_f.bias"] + 1}, KEY
    )
    c = lock_state(spec, state, OTHER)
    again = lock_state(spec, state, KEY)
    samples = [
        locked_element(spec, x.record, k).members["stream"].index.tolist()
        for x, k in ((a, KEY), (b, KEY), (c, OTHER), (again, KEY))
    ]  # type: ignore[union-attr]
    assert samples[0] == samples[3]
    assert len({str(d) for d in samples}) == 3
    assert a.record == again.record


def test_wrong_keys() -> None:
    model = build("gpt2")
    spec, locked, record = lock_state(spec_of(model), model.state_dict(), KEY)
    with pytest.raises(WrongKeyError, match=f"locked by the key {KEY.id}, got {OTHER.id}"):
        unlock_state(spec, locked, record, OTHER)
    with pytest.raises(KeyFileError, match='must be "lock", got "seal"'):
        unlock_state(spec, locked, record, Key(seed_key(1), "seal"))
    with pytest.raises(KeyFileError, match='must be "lock", got "seal"'):
        lock_state(spec, model.state_dict(), Key(seed_key(1), "seal"))
    with pytest.raises(TamperedModelError, match="record was changed"):
        unlock_state(spec, locked, replace(record, key=OTHER.id), OTHER)


@pytest.mark.parametrize(
    ("name", "group"), [("gpt2", "permutation"), ("gpt2", "signed"), ("llama", "rotation")]
)
def test_a_record_is_what_the_page_says(name: str, group: str) -> None:
    """Made by nothing but docs/formats-keys.md: a change of labels, salts or messages would leave
    older locks closed.
    """
    model = build(name).float()
    state = model.state_dict()
    spec, locked, record = lock_state(spec_of(model), state, KEY, group=group)

    def digest_of(data: Any) -> str:
        return hashlib.sha256(text(data)).hexdigest()

    def text(data: Any) -> bytes:
        return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()

    def listed(of: dict[str, torch.Tensor]) -> list[Any]:
        kinds = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}
        return [
            [
                n,
                kinds[t.dtype],
                list(t.shape),
                hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest(),
            ]
            for n, t in sorted(of.items())
        ]

    assert record.digest == digest_of({"regauge": "model", "version": 1, "tensors": listed(state)})
    g = locked_element(spec, record, KEY)
    within = {"permutation": "permutation", "signed": "signed", "rotation": "orthogonal"}[group]
    spaces = sorted(
        [s, spec.spaces[s].size, spec.spaces[s].over, str(spec.spaces[s].group.within(within))]
        for s in g.members
    )  # type: ignore[arg-type]
    assert record.layout == digest_of(spaces)
    assert (
        len({row[3] for row in spaces}) == {"permutation": 1, "signed": 2, "rotation": 4}[group]
    ), "the group that is sampled, space by space"
    plain: dict[str, Any] = {
        "version": 2,
        "scheme": "backbone",
        "family": name,
        "group": group,
        "spaces": None,
        "folded": group == "rotation",
        "key": KEY.id,
    }
    plain |= {
        "digest": record.digest,
        "layout": record.layout,
        "files": None,
        "plain": "0" * 64 if group == "rotation" else record.digest,
    }
    path = {"gpt2": "transformer.h.", "llama": "model.layers."}[name]
    structure = sorted(
        [n.removeprefix(path), dtype, shape]
        for n, dtype, shape, _ in listed(locked)
        if n.startswith(path)
    )
    for tag, message in (("record", None), ("structure", structure), ("data", listed(locked))):
        derived = HKDF(
            SHA256(), 32, bytes.fromhex(record.digest), b"regauge/1/lock/" + tag.encode()
        ).derive(seed_key(1))
        assert record.tags[tag] == hmac.digest(derived, text([plain, message]), "sha256").hex(), tag


CHANGES: dict[str, Any] = {
    "family": "llama",
    "group": "permutation",
    "digest": "0" * 64,
    "layout": "0" * 64,
    "spaces": ("stream",),
    "folded": True,
    "files": {"adapter_config.json": "0" * 64},
    "plain": "1" * 64,
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_record_is_found(field: str) -> None:
    model = build("gpt2")
    spec, locked, record = lock_state(spec_of(model), model.state_dict(), KEY)
    with pytest.raises(TamperedModelError, match="record was changed"):
        unlock_state(spec, locked, replace(record, **{field: CHANGES[field]}), KEY)


def test_changed_data_is_detected_and_distinguished_from_training() -> None:
    model = build("gpt2")
    spec, locked, record = lock_state(spec_of(model), model.state_dict(), KEY)
    g = locked_element(spec, record, KEY)
    for name in (
        "transformer.h.0.mlp.c_fc.weight",
        "transformer.wte.weight",
        "transformer.ln_f.bias",
    ):
        changed = {**locked, name: locked[name].clone()}
        changed[name].view(-1)[0] += 1e-9
        with pytest.raises(TamperedModelError, match="data were changed") as refused:
            unlock_state(spec, changed, record, KEY)
        assert "--retrained" in str(refused.value.cli_hint)
        back = unlock_state(spec, changed, record, KEY, retrained=True)
        assert same_bits(back[name], apply(~g, changed, "backbone")[name])


def test_a_changed_structure_is_found_even_after_training() -> None:
    model = build("llama")
    spec, locked, record = lock_state(spec_of(model), model.state_dict(), KEY)
    q, up = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.up_proj.weight"
    for changed in (
        {**locked, q: locked[q][:-1]},
        {**locked, q: locked[q].half()},
        {n: t for n, t in locked.items() if n != up},
    ):
        for retrained in (False, True):
            with pytest.raises(TamperedModelError, match="names, shapes or dtypes"):
                unlock_state(spec, changed, record, KEY, retrained=retrained)
    halved = {n: t.half() for n, t in locked.items()}  # all of it: trained in another precision
    assert unlock_state(spec, halved, record, KEY, retrained=True)[q].dtype == torch.float16
    with pytest.raises(TamperedModelError, match="names, shapes or dtypes"):
        unlock_state(spec, halved, record, KEY)


def test_another_head_and_another_path_are_no_change_of_the_backbone() -> None:
    """A base model, locked, then trained with a classifier: new names for the same blocks, and a
    new head.
    """
    base, classifier = (
        build("gpt2-base"),
        build("gpt2-classifier") if "gpt2-classifier" in PICOS else build("gpt2"),
    )
    locked = lock_state(spec_of(base), base.state_dict(), KEY)
    state = {**classifier.state_dict(), **{f"transformer.{n}": t for n, t in locked.state.items()}}
    back = unlock_state(spec_of(classifier), state, locked.record, KEY, retrained=True)
    assert all(same_bits(back[f"transformer.{n}"], t) for n, t in base.state_dict().items())


def test_another_layout_is_found() -> None:
    """Twice the heads in config.json: every shape still fits, but the element would be another
    one.
    """
    model = build("gpt2")
    spec, locked, record = lock_state(spec_of(model), model.state_dict(), KEY)
    heads = {
        n: replace(s, size=1 if n.startswith("head") else 12)
        if n.split(".")[0] in ("head", "qk", "vo")
        else s
        for n, s in spec.spaces.items()
    }
    with pytest.raises(TamperedModelError, match="other spaces than its config"):
        unlock_state(replace(spec, spaces=heads), locked, record, KEY, retrained=True)


def test_a_config_without_sense_is_found() -> None:
    model = build("gpt2")
    spec, locked, record = lock_state(spec_of(model), model.state_dict(), KEY)
    spaces: Any = {
        n: replace(s, size=float("nan")) if n == "ffn.0" else s for n, s in spec.spaces.items()
    }
    with pytest.raises(SpecError, match="positive whole number"):
        unlock_state(replace(spec, spaces=spaces), locked, record, KEY)


def test_spaces() -> None:
    model = build("gpt2")
    spec, state = spec_of(model), model.state_dict()
    locked = lock_state(spec, state, KEY, spaces=["stream", "ffn"])
    g = locked_element(spec, locked.record, KEY)
    assert set(g.members) == {"stream", "ffn.0", "ffn.1"}
    everything = locked_element(spec, lock_state(spec, state, KEY).record, KEY)
    assert set(everything.members) == set(spec.spaces)
    assert all(
        same_bits(t, unlock_state(spec, locked.state, locked.record, KEY)[n])
        for n, t in state.items()
    )
    with pytest.raises(
        LockError, match=r"the lock would have no effect: ffn\.0, ffn\.1 can be transformed"
    ) as refused:
        lock_state(spec, state, KEY, spaces=["ffn"])
    assert refused.value.hint == "lock a space that the parts share: stream"
    with pytest.raises(ElementError, match='no space "nothing"'):
        lock_state(spec, state, KEY, spaces=["nothing"])
    with pytest.raises(LockError, match='rotation, got "linear"'):
        lock_state(spec, state, KEY, group="linear")


def test_spaces_of_the_head_do_not_move() -> None:
    """BERT's pooler has a space of its own, which no tensor of the backbone has."""
    name = next(n for n in PICOS if n.startswith("bert") and "pool" in spec_of(build(n)).spaces)
    model = build(name)
    spec, state = spec_of(model), model.state_dict()
    assert "pool" not in locked_element(spec, lock_state(spec, state, KEY).record, KEY).members


def test_records_are_read_strictly() -> None:
    model = build("gpt2")
    record = lock_state(spec_of(model), model.state_dict(), KEY).record
    good = record.to_dict()
    assert read_record(json.loads(json.dumps(good))) == record
    assert record_of({"regauge_lock": good}) == record
    assert record_of({"model_type": "gpt2"}) is None
    with pytest.raises(LockError, match="format version 3"):
        read_record({**good, "version": 3})
    for bad in (
        None,
        7,
        [],
        {},
        {**good, "extra": 1},
        {**good, "version": 0},
        {**good, "version": 1},
        {**good, "version": True},
        {**good, "files": []},
        {**good, "files": {"a": 1}},
        {**good, "files": {"": "0" * 64}},
        {**good, "plain": None},
        {**good, "scheme": "all"},
        {**good, "group": "none"},
        {**good, "folded": 0},
        {**good, "spaces": "stream"},
        {**good, "spaces": [1]},
        {**good, "key": "A" * 16},
        {**good, "digest": 7},
        {**good, "tags": {}},
        {**good, "tags": {**good["tags"], "more": "0" * 64}},
        {n: v for n, v in good.items() if n != "layout"},
    ):
        with pytest.raises(TamperedModelError, match="record is damaged"):
            read_record(bad)
    with pytest.raises(LockError, match="is not locked"):
        require_locked({}, "it")
    with pytest.raises(LockError, match="is locked already") as refused:
        require_plain({"regauge_lock": good}, "it")
    assert "rekey" in str(refused.value.hint)


def test_a_live_module_carries_its_record(tmp_path: Path) -> None:
    """transformers keeps what it does not know in a config, through saving and loading."""
    import transformers

    model: Any = build("gpt2")
    _, state, record = lock_state(spec_of(model), model.state_dict(), KEY)
    model.load_state_dict(state)
    model.config.regauge_lock = record.to_dict()
    model.save_pretrained(tmp_path / "a")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    again.save_pretrained(tmp_path / "b")
    assert record_of(again) == record
    assert record_of(json.loads((tmp_path / "b" / "config.json").read_text())) == record
    assert set(locked_element(spec_of(again), record, KEY).members) == set(spec_of(model).spaces)
    assert isinstance(record, Record)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_signs_of_planes_move_bits(layout: Any) -> None:
    """One sign per 2-plane, as bits and as numbers: zeros keep theirs."""
    spec = Spec("x", {"qk": Space(8, PlaneSigns(layout))}, {"w": "qk _"})
    g = Element(spec, {"qk": PlaneSigns(layout).sample(8, 1, Stream(seed_key(1), "x"))})
    assert is_exact_on(g)
    x = torch.tensor([[0.0, -0.0, 1.5]] * 8)
    signs = torch.from_numpy(np.diagonal(g.members["qk"].matrix()[0]).copy()).float()
    assert set(signs.tolist()) == {1.0, -1.0}
    expected = x * signs[:, None]
    assert same_bits(act(g, x, "qk _"), expected)
    assert same_bits(torch.from_numpy(act(g, x.numpy(), "qk _")), expected)
    assert same_bits(torch.from_numpy(act(g, x.numpy().view("u4"), "qk _").view("f4")), expected)


def test_signs_on_bits_are_signs_on_numbers() -> None:
    """The blocked path for large matrices, against the plain product."""
    from regauge.core.groups import SignedPermutation

    spec = Spec(
        "x",
        {"a": Space(300, SignedPermutation()), "b": Space(400, SignedPermutation())},
        {"w": "a b*"},
    )
    g = element(spec, 3)
    x = torch.randn(300, 400, generator=torch.Generator().manual_seed(0))
    a, b = (torch.from_numpy(g.members[s].matrix()[0]).float() for s in "ab")
    assert same_bits(apply(g, {"w": x})["w"], a @ x @ b.T)
    with pytest.raises(ElementError, match="can only be permuted"):
        apply(g, {"w": torch.ones(300, 400, dtype=torch.int32)})

"""Texts from what crosses, against the truth: through the embeddings of the real classes, rows
shuffled and columns moved.
"""

from __future__ import annotations

import pytest
import torch
import transformers as T

from regauge.attacks.features import GROUPS, vocabulary_search
from regauge.attacks.texts import embedding_search, order_leak
from regauge.attacks.views import EmbeddedText, HiddenStates, ServerPass
from regauge.core.groups import Kind
from regauge.core.rng import Stream, seed_key
from regauge.defences.split import KeyedRandom, Rows
from regauge.models.cut import cut
from support.picos import build, gpt2

TEXT = torch.tensor([[3, 17, 17, 5, 29, 8, 11, 3]])
KINDS: list[Kind | None] = [None, "permutation", "signed", "orthogonal"]


def model_of(name: str) -> torch.nn.Module:
    """Wide enough that states differ as in a real model; norms with gains."""
    torch.manual_seed(1)
    if name == "gpt2":
        return T.GPT2LMHeadModel(gpt2(n_embd=48, n_head=4)).double().eval()
    size = {
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 20,
        "vocab_size": 30,
    }
    model = T.BertModel(T.BertConfig(**size, max_position_embeddings=16)).double().eval()
    for p in model.embeddings.LayerNorm.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return model


def apply_element(x: torch.Tensor, kind: Kind | None) -> torch.Tensor:
    if kind is None:
        return x
    return (
        x
        @ torch.from_numpy(
            GROUPS[kind].sample(x.shape[-1], 1, Stream(seed_key(4), "test")).matrix()[0]
        ).T
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_tokens_and_places_whatever_the_shuffle_and_the_key(name: str, kind: Kind | None) -> None:
    model = model_of(name)
    with torch.no_grad():
        stream = cut(model).embed(input_ids=TEXT).stream[0]
    order = torch.randperm(len(stream), generator=torch.Generator().manual_seed(2))
    tokens, places = embedding_search(EmbeddedText(apply_element(stream[order], kind), model, kind))
    assert torch.equal(tokens, TEXT[0, order])
    assert torch.equal(places, order)
    tokens, places = embedding_search(
        EmbeddedText(apply_element(stream, kind), model, kind, shuffled=False)
    )
    assert torch.equal(tokens, TEXT[0])
    assert torch.equal(places, torch.arange(len(stream)))


def test_another_embedding_tells_nothing() -> None:
    torch.manual_seed(5)
    other = T.GPT2LMHeadModel(gpt2(n_embd=48, n_head=4)).double().eval()
    with torch.no_grad():
        stream = cut(other).embed(input_ids=TEXT).stream[0]
    tokens, _ = embedding_search(EmbeddedText(stream, model_of("gpt2")))
    assert int((tokens == TEXT[0]).sum()) <= 2


@pytest.mark.parametrize("kind", ["permutation", "orthogonal"])
def test_deeper_states_in_no_order(kind: Kind) -> None:
    model = build("gpt2").eval()
    with torch.no_grad():
        states = model(input_ids=TEXT, output_hidden_states=True).hidden_states[1][0]
    order = torch.randperm(len(states), generator=torch.Generator().manual_seed(2))
    assert (
        vocabulary_search(
            HiddenStates(apply_element(states[order], kind), model, 1, kind, shuffled=True),
            batch=16,
        )
        == TEXT[0].tolist()
    )
    assert (
        vocabulary_search(
            HiddenStates(apply_element(states[order], kind), model, 1, kind), batch=16
        )
        != TEXT[0].tolist()
    ), "taken in the order in which they came"


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_what_crosses_beside_the_stream_tells_the_order(name: str) -> None:
    model = build(name).eval()
    model.set_attn_implementation("eager")
    crossing = cut(model).embed(input_ids=TEXT)
    there, _ = Rows("batch").apply_to_crossing(crossing, KeyedRandom(bytes(32), "1"))
    others = {
        k: v[0] if isinstance(v, tuple) else v
        for k, v in there.tensors.items()
        if k != crossing.boundary.stream
    }
    leak = order_leak(
        ServerPass(
            there.stream.detach(), {k: v for k, v in others.items() if isinstance(v, torch.Tensor)}
        )
    )
    if name == "bert":
        assert leak is None, "nothing but the stream has the order"
        return
    assert leak is not None
    there_of = (there.stream[0][:, None] == crossing.stream[0][None]).all(-1)
    assert all(bool(there_of[i, int(p)]) for i, p in enumerate(leak[0]))
    assert sorted(leak[0].tolist()) == list(range(TEXT.shape[1]))

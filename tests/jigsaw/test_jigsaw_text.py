"""Puzzles for texts: spans to a ratio, specials and padding that stay, one unknown position, and a
model that learns.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from experiments.paper_002.text_jigsaw import evaluate, puzzles_of
from regauge.data.tasks import Examples
from regauge.errors import DataError
from regauge.jigsaw import JigsawError, TextJigsaw
from regauge.jigsaw.text import sample_span_masks

SIZE: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 40,
}
STILL: dict[str, Any] = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "num_labels": 2,
    "initializer_range": 0.3,
}


def bert() -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZE, **STILL, pad_token_id=0, max_position_embeddings=24)
    )


def roberta() -> Any:
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        **SIZE, **STILL, pad_token_id=1, bos_token_id=0, eos_token_id=2, max_position_embeddings=24
    )
    return transformers.RobertaForSequenceClassification(config)


def distilbert() -> Any:
    torch.manual_seed(0)
    config = transformers.DistilBertConfig(
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=32,
        vocab_size=40,
        max_position_embeddings=24,
        dropout=0.0,
        initializer_range=0.5,
    )
    return transformers.DistilBertForSequenceClassification(config)


MODELS = {"BERT": bert, "RoBERTa": roberta, "DistilBERT": distilbert}
LABELS = torch.tensor([0, 1, 1])


def texts(pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(5, 40, (3, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, 12:], mask[1, 12:] = pad, 0
    return ids, mask


def test_spans_reach_the_ratio_within_what_is_free() -> None:
    free = np.ones((200, 60), bool)
    free[:, 0] = free[:, 50:] = False
    masks = sample_span_masks(free, 0.4, 3, np.random.default_rng(0))
    assert not (masks & ~free).any()
    assert (masks.sum(1) == int(0.4 * 49)).all()
    runs = np.diff(masks.astype(int), axis=1) == 1
    assert (
        runs.sum(1).mean()
        < sample_span_masks(free, 0.4, 1, np.random.default_rng(0)).sum(1).mean() * 0.8
    )  # they hang together


@pytest.mark.parametrize("has_mask", [True, False], ids=["with a mask", "by padding"])
def test_the_ends_of_a_text_stay(has_mask: bool) -> None:
    """BERT's config names no CLS and no SEP: they are what stands first and last."""
    wrapped = TextJigsaw(bert(), ratio=0.9)
    assert wrapped.special == (0,)
    ids, attention = texts(0)
    taken = torch.stack(
        [wrapped.sample(ids, attention if has_mask else None, seed)[0] for seed in range(50)]
    ).any(0)
    lengths = attention.sum(1)
    for row, length in zip(taken, lengths, strict=True):
        assert not row[0]
        assert not row[length - 1 :].any()
        assert row[1 : length - 1].all(), "all others are"


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnop"]
MARKS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
PAIR = torch.tensor([[2, 5, 6, 4, 7, 3, 8, 4, 9, 10, 1, 3, 0, 0]])  # two texts, a mask in each
TYPES = torch.tensor([[0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]])


def tokenizer_of(kind: str, folder: Path) -> Any:
    plain = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    plain.add_special_tokens(list(MARKS.values()))
    full = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **MARKS)
    full.save_pretrained(folder)
    return {
        "transformers": full,
        "tokenizers": plain,
        "file": folder / "tokenizer.json",
        "folder": str(folder),
    }[kind]


def ever_taken(wrapped: TextJigsaw, types: torch.Tensor | None = None) -> list[int]:
    masks = [
        wrapped.sample(PAIR, None, seed, 0.9, token_type_ids=types)[0][0] for seed in range(100)
    ]
    return torch.stack(masks).any(0).nonzero().flatten().tolist()


@pytest.mark.parametrize("kind", ["transformers", "tokenizers", "file", "folder"])
def test_all_special_tokens_of_a_tokenizer_stay(kind: str, tmp_path: Path) -> None:
    wrapped = TextJigsaw(bert(), tokenizer=tokenizer_of(kind, tmp_path))
    assert wrapped.special == (0, 1, 2, 3, 4)
    assert ever_taken(wrapped) == ever_taken(wrapped, TYPES) == [1, 2, 4, 6, 8, 9]


def test_without_a_tokenizer_a_pair_keeps_what_parts_it() -> None:
    wrapped = TextJigsaw(bert())
    assert ever_taken(wrapped, TYPES) == [1, 2, 3, 4, 6, 7, 8, 9, 10], "the mask is not known"
    assert (
        ever_taken(wrapped) == ever_taken(wrapped, torch.zeros_like(TYPES)) == list(range(1, 11))
    ), "nor the SEP, where nothing tells of two texts"
    wrapped = TextJigsaw(bert(), 0.9, probability=1.0, seed=3).train()
    recorded: list[torch.Tensor] = []
    wrapped.model.bert.embeddings.word_embeddings.register_forward_pre_hook(
        lambda _, args: recorded.append(args[0])
    )
    for _ in range(20):
        wrapped(PAIR, token_type_ids=TYPES)
    assert all(ids[0, 5] == 3 for ids in recorded), "in training too"
    assert not all(ids[0, 6] == 8 for ids in recorded)


def test_ids_by_hand_join_the_tokenizers(tmp_path: Path) -> None:
    assert TextJigsaw(bert(), special=[7]).special == (7,)
    assert TextJigsaw(
        bert(), special=[7], tokenizer=tokenizer_of("tokenizers", tmp_path)
    ).special == (0, 1, 2, 3, 4, 7)


def test_a_file_without_a_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(JigsawError, match="must be a tokenizer, got int"):
        TextJigsaw(bert(), tokenizer=3)
    for name, says in (
        ("none", "the tokenizer .*none cannot be loaded"),
        ("none.json", r"none\.json cannot be read as a tokenizer"),
    ):
        with pytest.raises(DataError, match=says):
            TextJigsaw(bert(), tokenizer=tmp_path / name)


def test_a_probability_outside_0_and_1_is_rejected() -> None:
    with pytest.raises(JigsawError, match=r"probability must be in .*got 1\.5"):
        TextJigsaw(bert(), probability=1.5)


@pytest.mark.parametrize("name", MODELS)
def test_ratio_0_is_the_plain_model_and_evaluation_is_too(name: str) -> None:
    plain = MODELS[name]().train()
    ids, mask = texts(plain.config.pad_token_id)
    wrapped = TextJigsaw(copy.deepcopy(plain), 0.0).train()
    torch.manual_seed(2)
    one = plain(input_ids=ids, attention_mask=mask, labels=LABELS)
    torch.manual_seed(2)
    other = wrapped(ids, mask, labels=LABELS)
    assert torch.equal(one.loss, other.loss)
    plain.eval()
    some = TextJigsaw(copy.deepcopy(plain), 0.5).eval()
    assert torch.equal(some(ids, mask).logits, plain(input_ids=ids, attention_mask=mask).logits)
    blank = (torch.zeros_like(ids, dtype=torch.bool), torch.arange(20).expand(3, 20))
    assert torch.allclose(
        some(ids, mask, puzzle=blank).logits,
        plain(input_ids=ids, attention_mask=mask).logits,
        atol=1e-6,
    )  # places are the model's
    assert not torch.allclose(
        some(ids, mask, puzzle=some.sample(ids, mask, 0)).logits,
        plain(input_ids=ids, attention_mask=mask).logits,
        atol=1e-3,
    )


@pytest.mark.parametrize("name", MODELS)
def test_only_shuffled_places_are_unknown(name: str) -> None:
    wrapped = TextJigsaw(MODELS[name](), 0.5).eval()
    ids, mask = texts(wrapped.model.config.pad_token_id)
    chosen, order = wrapped.sample(ids, mask, 3)
    assert chosen.any()
    assert not chosen[:, 0].any()
    assert not (chosen & (mask == 0)).any()
    assert torch.equal(order[~chosen], torch.arange(20).expand(3, 20)[~chosen])
    wrapped(ids[:1], mask[:1], puzzle=(chosen[:1], order[:1])).logits.square().sum().backward()
    felt = wrapped.model.get_parameter(wrapped.table).grad.abs().sum(1) > 0
    assert torch.equal(felt[wrapped.offset : wrapped.offset + 20], ~chosen[0])
    assert wrapped.unknown.grad.abs().sum() > 0


@pytest.mark.parametrize("head", ["BertForTokenClassification", "BertForMaskedLM"])
def test_labels_of_tokens_go_with_their_tokens(head: str) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, head)(
        transformers.BertConfig(**SIZE, **STILL, pad_token_id=0, max_position_embeddings=24)
    )
    wrapped = TextJigsaw(model, 0.5).eval()
    ids, mask = texts(0)
    labels = torch.where(mask.bool(), ids % 2 if "Token" in head else ids, -100)
    labels[:, ::3] = -100
    original = labels.clone()
    chosen, order = wrapped.sample(ids, mask, 3)
    outputs = wrapped(ids, mask, labels=labels, puzzle=(chosen, order))
    by_hand = [
        torch.nn.functional.cross_entropy(outputs.logits.flatten(0, 1), at.flatten())
        for at in (labels.gather(1, order), labels)
    ]
    assert torch.allclose(outputs.loss, by_hand[0])
    assert not torch.allclose(outputs.loss, by_hand[1], atol=1e-4), (
        "the labels of the places are others"
    )
    assert torch.equal(labels, original)


def test_labels_of_texts_stay() -> None:
    """Of one class per text, and of as many classes as tokens."""
    wrapped = TextJigsaw(bert(), 0.5).eval()
    ids, mask = texts(0)
    puzzle = wrapped.sample(ids, mask, 3)
    outputs = wrapped(ids, mask, labels=LABELS, puzzle=puzzle)
    assert torch.allclose(outputs.loss, torch.nn.functional.cross_entropy(outputs.logits, LABELS))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        **SIZE,
        **{**STILL, "num_labels": 20},
        pad_token_id=0,
        problem_type="multi_label_classification",
    )
    wrapped = TextJigsaw(transformers.BertForSequenceClassification(config), 0.5).eval()
    labels = (ids % 2).float()
    outputs = wrapped(ids, mask, labels=labels, puzzle=puzzle)
    assert torch.allclose(
        outputs.loss, torch.nn.functional.binary_cross_entropy_with_logits(outputs.logits, labels)
    )


@pytest.mark.parametrize("name", MODELS)
def test_explicit_positions_are_unchanged_without_a_shuffle(name: str) -> None:
    wrapped = TextJigsaw(MODELS[name](), 0.5).eval()
    ids, mask = texts(wrapped.model.config.pad_token_id)
    ids, mask = ids[:1], mask[:1]
    chosen, order = wrapped.sample(ids, mask, 3)
    turned = torch.arange(20).flip(0)[None] + 3
    wrapped(ids, mask, position_ids=turned, puzzle=(chosen, order)).logits.square().sum().backward()
    assert wrapped.unknown.grad.abs().sum() > 0
    felt = wrapped.model.get_parameter(wrapped.table).grad.abs().sum(1) > 0
    assert felt.nonzero().flatten().tolist() == sorted(turned[~chosen].tolist())
    plain = wrapped.model(input_ids=ids, attention_mask=mask, position_ids=turned).logits
    blank = (torch.zeros_like(chosen), torch.arange(20)[None])
    assert torch.allclose(
        wrapped(ids, mask, position_ids=turned, puzzle=blank).logits, plain, atol=1e-6
    )
    assert not torch.allclose(wrapped(ids, mask, puzzle=blank).logits, plain, atol=1e-3), (
        "its own places are others"
    )


def test_a_row_of_places_serves_all_texts_and_none_is_none() -> None:
    wrapped = TextJigsaw(bert(), 0.5).eval()
    ids, mask = texts(0)
    puzzle = wrapped.sample(ids, mask, 3)
    outputs = wrapped(ids, mask, puzzle=puzzle).logits
    assert torch.equal(
        wrapped(ids, mask, position_ids=torch.arange(20)[None], puzzle=puzzle).logits, outputs
    )
    assert torch.equal(
        wrapped(ids, mask, position_ids=None, token_type_ids=None, puzzle=puzzle).logits, outputs
    )


def test_the_unknown_position_cannot_be_passed() -> None:
    wrapped = TextJigsaw(bert(), 0.5, probability=1.0).train()
    ids, mask = texts(0)
    with pytest.raises(
        JigsawError, match=r'position_ids must be rows of "\S+", from 0 to 23, got 24'
    ):
        wrapped(ids, mask, position_ids=torch.arange(5, 25)[None])
    assert wrapped.passes == 0, "a rejected call is not a pass"
    wrapped(ids, mask, position_ids=torch.arange(4, 24)[None])


def test_two_shuffles_of_one_mask_are_one_to_the_model() -> None:
    wrapped = TextJigsaw(bert(), 0.5).eval()
    ids, mask = texts(0)
    chosen, order = wrapped.sample(ids, mask, 3)
    plain = torch.arange(20).expand(3, 20)
    assert torch.allclose(
        wrapped(ids, mask, puzzle=(chosen, order)).logits,
        wrapped(ids, mask, puzzle=(chosen, plain)).logits,
        atol=1e-5,
    )
    known = TextJigsaw(bert(), 0.5, unknown=False).eval()
    assert not torch.allclose(
        known(ids, mask, puzzle=(chosen, order)).logits,
        known(ids, mask, puzzle=(chosen, plain)).logits,
        atol=1e-3,
    )


def test_it_trains_and_unwraps() -> None:
    wrapped = TextJigsaw(bert(), 0.5, probability=1.0).train()
    ids, mask = texts(0)
    optimizer = torch.optim.Adam(wrapped.parameters(), 1e-2)
    losses = []
    for _ in range(15):
        loss = wrapped(ids, mask, labels=LABELS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert wrapped.passes == 15
    assert wrapped.unwrap() is wrapped.model


@pytest.mark.parametrize("name", MODELS)
def test_texts_longer_than_the_table_are_refused(name: str) -> None:
    wrapped = TextJigsaw(MODELS[name](), 0.5, probability=1.0).train()
    room = 24 - wrapped.offset
    ids = torch.randint(5, 40, (2, room + 1), generator=torch.Generator().manual_seed(1))
    assert wrapped(ids[:, :room]).logits.shape == (2, 2)
    with pytest.raises(
        JigsawError,
        match=rf"at most {room} tokens, the rows of "
        rf'"\S+position_embeddings\.weight", got {room + 1}',
    ):
        wrapped(ids)
    with pytest.raises(JigsawError, match=f"at most {room} tokens"):
        wrapped.eval()(ids)


def test_padding_takes_no_place_in_roberta() -> None:
    wrapped = TextJigsaw(roberta(), 0.5, probability=1.0).train()
    ids = torch.randint(5, 40, (2, 24), generator=torch.Generator().manual_seed(1))
    ids[:, 22:] = 1
    assert wrapped(ids, (ids != 1).long()).logits.shape == (2, 2)


def test_models_without_such_a_table_are_refused() -> None:
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=40,
    )
    with pytest.raises(
        JigsawError, match="one table of learned absolute positions of tokens, got 0"
    ):
        TextJigsaw(transformers.LlamaForCausalLM(config))
    for options in ({"ratio": 1.0}, {"span": 0}):
        with pytest.raises(JigsawError):
            TextJigsaw(bert(), **options)


def test_a_texts_puzzle_is_its_own_whatever_the_batch() -> None:
    wrapped = TextJigsaw(bert(), 0.5)
    ids, there = texts(0)
    mask, order = puzzles_of(np.arange(3), wrapped, ids, there, 0.5)
    short = puzzles_of(np.array([1]), wrapped, ids[1:2, :12], there[1:2, :12], 0.5)
    assert torch.equal(short[0][0], mask[1, :12])
    assert torch.equal(short[1][0], order[1, :12])
    assert not mask[1, 12:].any()
    other = puzzles_of(np.array([2]), wrapped, ids[1:2], there[1:2], 0.5)
    assert not torch.equal(other[1][0], order[1]), "another number has another"


def test_consistency_is_of_answers_with_and_without_shuffled_spans() -> None:
    wrapped = TextJigsaw(bert(), 0.5)
    ids, there = texts(0)
    examples = Examples(
        3, 2, lambda rows: ({"input_ids": ids[rows], "attention_mask": there[rows]}, LABELS[rows])
    )
    accuracy, scores = evaluate(wrapped, examples, 0.5, 2)
    plain = wrapped(ids, there).logits.argmax(-1)
    shuffled = wrapped(
        ids, there, puzzle=puzzles_of(np.arange(3), wrapped, ids, there, 0.5)
    ).logits.argmax(-1)
    assert accuracy == pytest.approx((plain == LABELS).float().mean().item())
    assert scores["consistency"] == pytest.approx((plain == shuffled).float().mean().item())
    assert scores["norm"] > 0
    still = evaluate(wrapped, examples, 0.0, 2)[1]
    assert still["consistency"] == 1
    assert still["norm"] < 1e-5

"""Texts from updates: exactly by spans, from BERT and GPT-2; nothing where there are more tokens
than channels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from regauge.attacks.subspaces import (
    exact_search,
    find_text_layers,
    span_candidates,
    tag,
    token_membership,
)
from regauge.attacks.tables import locate_words
from regauge.attacks.updates import Granted, SentUpdate
from regauge.audit.gradient_audit.clients import contribute, prepare_model
from regauge.audit.text_scores import rouge, rouge_l, score_texts
from regauge.cli import main
from regauge.data.tasks import Examples
from regauge.defences.gradients import parse_plan
from regauge.errors import UpdateError
from regauge.results.findings import load_results

ASSETS = Path(__file__).parents[3] / "shared" / "assets"
WIDE = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def gpt2(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 16,
        "initializer_range": 0.1,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **WIDE, **more}))


def bert(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 16,
        "num_labels": 2,
    }
    drops = {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.1,
    }
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**{**sizes, **drops, **WIDE, **more})
    )


def texts(count: int, length: int, seed: int = 0, words: int = 60) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(3, words, (count, length)))


def make_update(model: Any, ids: torch.Tensor, combination: str = "", **granted: Any) -> SentUpdate:
    causal = "LMHead" in type(model).__name__
    labels = ids if causal else torch.arange(len(ids)) % 2
    data = Examples(
        len(ids), 60 if causal else 2, lambda i: ({"input_ids": ids[i]}, labels[i]), causal=causal
    )
    plan = parse_plan(f"batch={len(ids)}{combination}")
    there = prepare_model(model, plan)
    update, _ = contribute(there, plan, data, {"input_ids": ids}, labels)
    return SentUpdate(
        there, update, (), Granted(**{"batch": len(ids), "length": ids.shape[1], **granted})
    )


def bag(rows: Any) -> set[tuple[int, ...]]:
    return {tuple(int(v) for v in row) for row in rows}


@pytest.mark.parametrize("length", [8, 16])
def test_two_tables_give_a_text_whatever_comes_after_them(length: int) -> None:
    """Dropout blurs what layers are given, and stops the search; rows of words and places get the
    same gradient all the same. Words may repeat.
    """
    ids = texts(1, length, words=12)
    assert len(set(ids[0].tolist())) < length
    view = make_update(
        bert(
            hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.1, num_hidden_layers=3
        ).double(),
        ids,
        "+dropout",
    )
    assert bag(locate_words(view)) == bag(ids)
    recovered = bag(exact_search(view))
    assert recovered != bag(ids)


def test_two_tables_tell_words_of_several_texts_by_place() -> None:
    ids = texts(3, 8)
    recovered = locate_words(make_update(bert().double(), ids))
    assert len(recovered[0]) == 8
    located = {(p, int(w)) for text in recovered if len(text) == 8 for p, w in enumerate(text)}
    true = {(p, int(w)) for text in ids for p, w in enumerate(text)}
    assert len(located & true) > 0.6 * len(
        located
    )  # 24 tokens in 48 channels are not quite apart; a guess gets one in twenty
    assert bag(recovered) != bag(ids)  # the grouping into texts is not revealed


def test_two_tables_need_both() -> None:
    with pytest.raises(UpdateError, match="position table"):
        locate_words(make_update(bert(), texts(1, 8), "+withhold=positions"))
    with pytest.raises(UpdateError, match="must have zero rows"):
        locate_words(make_update(gpt2(), texts(1, 8)))
    with pytest.raises(UpdateError, match="must have zero rows"):
        locate_words(make_update(bert(), texts(1, 8), "+noise=0.1"))


@pytest.mark.parametrize(("model", "count"), [(gpt2, 1), (gpt2, 3), (bert, 1), (bert, 2)])
def test_the_search_gives_every_text_exactly(model: Any, count: int) -> None:
    ids = texts(count, 8)
    read = (
        ids[:, :-1] if model is gpt2 else ids
    )  # the last word of a causal model is a label: no layer reads it
    assert bag(exact_search(make_update(model().double(), ids))) == bag(read)
    assert bag(exact_search(make_update(model().double(), texts(count, 8, seed=1)))) != bag(read)


def test_the_search_does_without_the_embedding_and_without_the_length() -> None:
    ids = texts(2, 8)
    assert bag(
        exact_search(make_update(gpt2().double(), ids, "+freeze=embedding", length=None))
    ) == bag(ids[:, :-1])


def test_more_tokens_than_channels_say_nothing() -> None:
    with pytest.raises(UpdateError, match="fewer tokens than the model has channels"):
        exact_search(make_update(gpt2(n_embd=16).double(), texts(4, 8)))


def test_zero_rows_reveal_the_words_of_a_batch_unless_the_head_is_tied_or_noisy() -> None:
    ids = texts(3, 8)
    membership = token_membership(make_update(bert(), ids))
    assert set(membership.nonzero()[:, 0].tolist()) == set(ids.flatten().tolist())
    for view in (make_update(gpt2(), ids), make_update(bert(), ids, "+noise=0.1")):
        with pytest.raises(UpdateError, match="must have zero rows"):
            token_membership(view)
    with pytest.raises(UpdateError, match="word_embeddings"):
        token_membership(make_update(bert(), ids, "+freeze=embedding"))


def test_noise_hides_texts_from_the_search() -> None:
    ids = texts(1, 8)
    noisy = make_update(gpt2().double(), ids, "+noise=0.3")
    try:
        recovered = bag(exact_search(noisy))
    except UpdateError:
        recovered = set()
    assert recovered != bag(ids[:, :-1])


@pytest.mark.slow
def test_tag_recovers_some_words_and_more_than_a_guess() -> None:
    ids = texts(1, 4)
    recovered = tag(make_update(bert(initializer_range=0.3).double(), ids), steps=150)
    assert len(set(recovered[0].tolist()) & set(ids[0].tolist())) >= 1
    with pytest.raises(UpdateError, match="length of the texts"):
        tag(make_update(bert(), ids, length=None))


def test_models_without_the_layers_are_rejected() -> None:
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=20,
    )
    with pytest.raises(UpdateError, match="must have a word table"):
        find_text_layers(transformers.LlamaForCausalLM(config))


@pytest.mark.skipif(not (ASSETS / "gpt2_pair").exists(), reason="the shared assets are not here")
def test_real_weights_give_real_text_away() -> None:
    from tokenizers import Tokenizer

    model = transformers.GPT2LMHeadModel.from_pretrained(
        ASSETS / "gpt2_pair" / "seed1", dtype=torch.float32
    )
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(model.config, name, 0.0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    reader = Tokenizer.from_file(str(ASSETS / "gpt2_pair" / "tokenizer.json"))
    ids = torch.tensor(
        reader.encode((ASSETS / "tinyshakespeare.txt").read_text()[-4000:]).ids[:32]
    ).view(2, 16)
    view = make_update(model, ids)
    assert all(
        int(ids[b, i]) in c.tolist()
        for i, c in enumerate(span_candidates(view, length=16))
        for b in range(2)
    )
    assert bag(exact_search(view)) == bag(ids[:, :-1])


def test_rouge_is_what_it_says() -> None:
    assert (
        rouge([1, 2, 3], [1, 2, 3], 1)
        == rouge([1, 2, 3], [1, 2, 3], 2)
        == rouge_l([1, 2, 3], [1, 2, 3])
        == 1
    )
    assert rouge([3, 2, 1], [1, 2, 3], 1) == 1
    assert rouge([3, 2, 1], [1, 2, 3], 2) == 0
    assert rouge_l([3, 2, 1], [1, 2, 3]) == pytest.approx(1 / 3)
    assert rouge_l([], [1]) == 0
    scores = score_texts([[4, 5], [1, 2, 9]], [[1, 2, 3], [4, 5]])
    assert scores["exact"] == [0, 1]
    assert scores["in place"] == [pytest.approx(2 / 3), 1]


def test_the_audit_of_texts_tells_what_is_given_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = ["[UNK]", *"abcdefghijklmnopqrstuvwxyz"]
    reader = Tokenizer(models.WordLevel({w: i + 3 for i, w in enumerate(names)}, unk_token="[UNK]"))
    reader.pre_tokenizer = pre_tokenizers.Whitespace()
    model = bert(hidden_dropout_prob=0.1)
    model.save_pretrained(tmp_path / "bert")
    reader.save(str(tmp_path / "bert" / "tokenizer.json"))
    draw = np.random.default_rng(0)
    lines = [f"{' '.join(draw.choice(names[1:], 8, replace=False))}\t{i % 2}" for i in range(12)]
    (tmp_path / "data.tsv").write_text("\n".join(["text\tlabel", *lines]))
    options = [
        "audit",
        "gradients",
        str(tmp_path / "bert"),
        "--data",
        str(tmp_path / "data.tsv"),
        "--updates",
        "2",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert (
        main(
            [
                *options,
                *(
                    a
                    for d in ("dropout", "private=1", "freeze=embedding")
                    for a in ("--defence", d)
                ),
            ]
        )
        == 0
    )
    by = {f.id.removeprefix("data/"): f.value for f in load_results(tmp_path / "r.json").findings}
    assert by["none/search"] == by["freeze=embedding/search"] == 1
    assert by["private=1/search"] < 0.5
    assert by["dropout/search"] < 1
    assert (
        "Texts are revealed under no defence, dropout, freeze=embedding" in capsys.readouterr().out
    )
    assert main([*options, "--attacks", "fog"]) == 2
    tables = [*options, "--attacks", "tables", "--fail-above", "0.1"]
    assert (
        main([*tables, "--defence", "dropout"]) == 3
    )  # a gate that fails where words come back, and passes where they do not
    assert "FAILS  data/dropout/tables: ROUGE-L" in capsys.readouterr().out
    assert main([*tables, "--defence", "private=1"]) == 0
    for option, value in (
        ("--batches", "1"),
        ("--train", "2"),
        ("--budget", "3,1"),
        ("--practice", "20"),
        ("--gallery", "2"),
    ):
        assert main([*options, option, value]) == 2
        assert f"{option} requires a model of images" in " ".join(capsys.readouterr().err.split())
    assert main([*options, "--attacks", "words", "--steps", "2"]) == 0
    assert "not measured: private=1.0: applies to gradients of one batch" in capsys.readouterr().out

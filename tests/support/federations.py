"""What tests of federated learning share: a pico ViT and bright quarters, a pico BERT and good or
bad words, and runs of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from regauge.data.tasks import Examples
from regauge.federated import InProcess, Settings, partition_examples, prepare_model, state_of
from regauge.federated import rounds as federated_rounds
from regauge.federated.runs import Source
from regauge.federated.state_store import RunState

SIZE = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.2,
}


def vit(seed: int = 0, **more: Any) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = transformers.ViTConfig(
            **{**SIZE, "image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 4, **more}
        )
        return transformers.ViTForImageClassification(config).eval()


def bars(count: int = 48, seed: int = 1) -> Examples:
    """Images of a bright quarter each, and which one it is."""
    draw = np.random.default_rng(seed)
    labels = torch.from_numpy(draw.integers(0, 4, count))
    images = torch.from_numpy(draw.normal(0, 0.3, (count, 1, 8, 8))).float()
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, 4 * (label // 2) :, 4 * (label % 2) :][:4, :4] += 1.5
    return Examples(count, 4, lambda rows: ({"pixel_values": images[rows]}, labels[rows]))


def run_rounds(
    settings: Settings, examples: Examples | None = None, folder: Path | None = None, **more: Any
) -> RunState:
    """A run in this process."""
    model = prepare_model(vit(), settings)
    return federated_rounds.run_rounds(
        InProcess(model, partition_examples(examples or bars(), settings), settings),
        state_of(model),
        settings,
        folder=folder,
        **more,
    )


def reader(folder: Path, count: int = 160, **more: Any) -> Source:
    """A pico BERT for texts with its tokenizer, and texts of ten words, one of which says which of
    two kinds they are. Dropout is on.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "good", "bad", *(f"w{i}" for i in range(20))]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {
            **SIZE,
            "vocab_size": len(words),
            "max_position_embeddings": 16,
            "pad_token_id": 0,
            "num_labels": 2,
            **more,
        }
        transformers.BertForSequenceClassification(
            transformers.BertConfig(**sizes)
        ).save_pretrained(folder / "bert")
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "bert" / "tokenizer.json"))
    draw = np.random.default_rng(2)
    rows = []
    for _ in range(count):
        label, text = int(draw.integers(2)), [words[i] for i in draw.integers(4, len(words), 10)]
        text[int(draw.integers(10))] = ("bad", "good")[label]
        rows.append(json.dumps({"text": " ".join(text), "label": label}))
    (folder / "texts.jsonl").write_text("\n".join(rows))
    return Source(str(folder / "bert"), str(folder / "texts.jsonl"))

"""Small tokenizers and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from regauge.data.tasks import Examples

WORDS = [f"w{i}" for i in range(30)]


def spoken(model: Any, count: int = 24, length: int = 12, seed: int = 0) -> torch.Tensor:
    """Texts that a language model itself says, so that its loss on them is small."""
    ids = torch.randint(3, 30, (count, 1), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        while ids.shape[1] < length:
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids


def readings(ids: torch.Tensor) -> Examples:
    return Examples(len(ids), 30, lambda rows: ({"input_ids": ids[rows]}, ids[rows]), causal=True)


def words(folder: Path) -> Path:
    """A tokenizer with marks and a mask."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    names = ["[PAD]", "[CLS]", "[SEP]", *WORDS[3:29], "[MASK]"]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken("[MASK]", special=True)])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"

"""Embedding tables of models with different vocabularies: every table is remapped to the output's
rows.

As in mergekit, a token that a model lacks takes the row of the base, if the base has it, else of
the one model that has it, else the mean of those that do. The tokenizer of a union is the base's,
with the tokens of the others added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regauge.checkpoints.plan import existing_files
from regauge.checkpoints.reader import read_json
from regauge.checkpoints.vocabulary import read_vocabulary
from regauge.errors import MergeError
from regauge.merging.layout import Model
from regauge.merging.recipes import Recipe

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_HINT = "leave tokenizer_source: out, where all models have the tokens of the base"


@dataclass(frozen=True, eq=False)
class TokenTables:
    """The rows of the output tables.

    Attributes:
        rows: the number of rows.
        used: the number of rows with a token.
        rows_by_model: for each model its row of each output row, -1 if it has none.
        base: the key of the base model.
        files: small files of the output, by name.
        copies: files to copy, by name.
    """

    rows: int
    used: int
    rows_by_model: Mapping[str, np.ndarray[Any, np.dtype[np.int64]]]
    base: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)

    def remap(self, keys: Sequence[str], tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return these models' tables in the rows of the output, in float32."""
        return [torch.from_numpy(t) for t in self._remap(keys, [t.float().numpy() for t in tables])]

    def _remap(self, keys: Sequence[str], tables: Sequence[Any]) -> list[Any]:
        """Remap numpy arrays."""
        shape = (self.rows, *tables[0].shape[1:])
        has_row = np.stack([self.rows_by_model[key] >= 0 for key in keys])
        count = has_row.sum(0)
        default, total = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for i, (key, table) in enumerate(zip(keys, tables, strict=True)):
            rows = self.rows_by_model[key]
            total[has_row[i]] += table[rows[has_row[i]]]
        is_present = count > 0
        default[is_present] = total[is_present] / count[is_present].reshape(
            -1, *[1] * (len(shape) - 1)
        )
        if self.base in keys:
            i = keys.index(self.base)
            default[has_row[i]] = tables[i][self.rows_by_model[self.base][has_row[i]]]
        remapped = []
        for i, (key, table) in enumerate(zip(keys, tables, strict=True)):
            remapped_table = default.copy()
            remapped_table[has_row[i]] = table[self.rows_by_model[key][has_row[i]]]
            remapped_table[self.used :] = remapped_table[: self.used].mean(0)
            remapped.append(remapped_table)
        return remapped


def plan_token_tables(
    recipe: Recipe, models: Mapping[str, Model], donor: Model
) -> TokenTables | None:
    """Return the rows that the recipe requires; None if it does not change the tokenizer."""
    config = recipe.tokens
    if config is None:
        return None
    vocabularies = {
        key: read_vocabulary(model.checkpoint.path, _HINT) for key, model in models.items()
    }
    sizes = {key: _table_rows(model) for key, model in models.items()}
    vocabularies = {
        key: {token: row for token, row in tokens.items() if row < sizes[key]}
        for key, tokens in vocabularies.items()
    }
    files: dict[str, bytes] = {}
    folder = donor.checkpoint.path
    if config.source == "union":
        tokens, files = _union(vocabularies, models, donor)
    elif config.source == "base":
        tokens = vocabularies[donor.key]
    else:
        folder = (
            models[config.source].checkpoint.path
            if config.source in models
            else Path(config.source).expanduser()
        )
        tokens = vocabularies.get(config.source) or read_vocabulary(folder, _HINT)
    used = max(tokens.values()) + 1
    rows = -(-used // config.pad_multiple) * config.pad_multiple if config.pad_multiple else used
    rows_by_model = {}
    for key, vocabulary in vocabularies.items():
        row_of = np.full(rows, -1, np.int64)
        for token, row in tokens.items():
            row_of[row] = vocabulary.get(token, -1)
        rows_by_model[key] = row_of
    copies = {
        path.name: path
        for path in existing_files(folder, TOKENIZER_FILES)
        if path.name not in files
    }
    return TokenTables(rows, used, rows_by_model, donor.key, files, copies)


def _table_rows(model: Model) -> int:
    """Return the number of rows of the smallest token table."""
    tables = model.token_tables & model.shapes.keys()
    if not tables:
        raise MergeError(f"{model.key} must have a known token table", hint=_HINT)
    return min(model.shapes[name][0] for name in tables)


def _union(
    vocabularies: Mapping[str, Mapping[str, int]], models: Mapping[str, Model], donor: Model
) -> tuple[dict[str, int], dict[str, bytes]]:
    """Return the base's tokens followed by those of the others, and the tokenizer.json of the
    union.
    """
    tokens = dict(vocabularies[donor.key])
    missing = [
        token
        for model_key in vocabularies
        for token in sorted(vocabularies[model_key], key=vocabularies[model_key].__getitem__)
        if token not in tokens
    ]
    added = {token: max(tokens.values()) + 1 + i for i, token in enumerate(dict.fromkeys(missing))}
    if not added:
        return tokens, {}
    path = donor.checkpoint.path / "tokenizer.json"
    if not path.is_file():
        raise MergeError(
            f"{donor.key} needs a tokenizer.json to add {len(added)} tokens of the others to",
            hint=_HINT,
        )
    tokenizer = read_json(path)
    added_entries: dict[str, Any] = {}  # as the others define their added tokens
    for model in models.values():
        other_path = model.checkpoint.path / "tokenizer.json"
        added_entries |= {
            e["content"]: e
            for e in (
                read_json(other_path).get("added_tokens") or [] if other_path.is_file() else []
            )
        }
    defaults = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": True,
        "special": False,
    }
    entries = [
        {**defaults, **added_entries.get(token, {}), "id": row, "content": token}
        for token, row in added.items()
    ]
    tokenizer["added_tokens"] = [*(tokenizer.get("added_tokens") or []), *entries]
    return tokens | added, {
        "tokenizer.json": (json.dumps(tokenizer, indent=2, ensure_ascii=False) + "\n").encode()
    }

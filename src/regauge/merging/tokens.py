"""Tables with a row for each token, where models have different tokens: every table is written in
the rows of the output first.

As in mergekit: a token that a model lacks takes the row of the base, if the base has it, else of
the one model that has it, else the mean of those that do. The tokenizer of a union is the base's,
with what the others have added to it.
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
from regauge.merging.layout import Model
from regauge.merging.methods import MergeError
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
    """The rows of the output: `rows` of them, of which `used` have a token. `places` says for each
    model where its row for each is, -1 if nowhere.
    """

    rows: int
    used: int
    rows_by_model: Mapping[str, np.ndarray[Any, np.dtype[np.int64]]]
    base: str
    files: Mapping[str, bytes] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)

    def remap(self, keys: Sequence[str], tables: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """These models' tables in the rows of the output, in float32."""
        return [torch.from_numpy(t) for t in self._remap(keys, [t.float().numpy() for t in tables])]

    def _remap(self, keys: Sequence[str], tables: Sequence[Any]) -> list[Any]:
        shape = (self.rows, *tables[0].shape[1:])
        has = np.stack([self.rows_by_model[key] >= 0 for key in keys])
        count = has.sum(0)
        default, total = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        for i, (key, table) in enumerate(zip(keys, tables, strict=True)):
            rows = self.rows_by_model[key]
            total[has[i]] += table[rows[has[i]]]
        several = count > 0
        default[several] = total[several] / count[several].reshape(-1, *[1] * (len(shape) - 1))
        if self.base in keys:
            i = keys.index(self.base)
            default[has[i]] = tables[i][self.rows_by_model[self.base][has[i]]]
        out = []
        for i, (key, table) in enumerate(zip(keys, tables, strict=True)):
            new = default.copy()
            new[has[i]] = table[self.rows_by_model[key][has[i]]]
            new[self.used :] = new[: self.used].mean(0)
            out.append(new)
        return out


def plan_token_tables(
    recipe: Recipe, models: Mapping[str, Model], donor: Model
) -> TokenTables | None:
    """What the recipe's tokenizer asks for, or None if it asks for nothing."""
    asked = recipe.tokens
    if asked is None:
        return None
    found = {key: read_vocabulary(model.checkpoint.path, _HINT) for key, model in models.items()}
    sizes = {key: _table_rows(model) for key, model in models.items()}
    found = {
        key: {token: row for token, row in tokens.items() if row < sizes[key]}
        for key, tokens in found.items()
    }
    small: dict[str, bytes] = {}
    folder = donor.checkpoint.path
    if asked.source == "union":
        tokens, small = _union(found, models, donor)
    elif asked.source == "base":
        tokens = found[donor.key]
    else:
        folder = (
            models[asked.source].checkpoint.path
            if asked.source in models
            else Path(asked.source).expanduser()
        )
        tokens = found.get(asked.source) or read_vocabulary(folder, _HINT)
    used = max(tokens.values()) + 1
    rows = -(-used // asked.pad_multiple) * asked.pad_multiple if asked.pad_multiple else used
    places = {}
    for key, own in found.items():
        where = np.full(rows, -1, np.int64)
        for token, row in tokens.items():
            where[row] = own.get(token, -1)
        places[key] = where
    copies = {
        path.name: path
        for path in existing_files(folder, TOKENIZER_FILES)
        if path.name not in small
    }
    return TokenTables(rows, used, places, donor.key, small, copies)


def _table_rows(model: Model) -> int:
    tables = model.token_tables & model.shapes.keys()
    if not tables:
        raise MergeError(f"{model.key} has no table of tokens that regauge knows", hint=_HINT)
    return min(model.shapes[name][0] for name in tables)


def _union(
    found: Mapping[str, Mapping[str, int]], models: Mapping[str, Model], donor: Model
) -> tuple[dict[str, int], dict[str, bytes]]:
    """The base's tokens, then what the others have besides, in their order; and the tokenizer.json
    that says so.
    """
    tokens = dict(found[donor.key])
    new = [
        t
        for key in found
        for t in sorted(found[key], key=found[key].__getitem__)
        if t not in tokens
    ]
    added = {token: max(tokens.values()) + 1 + i for i, token in enumerate(dict.fromkeys(new))}
    if not added:
        return tokens, {}
    path = donor.checkpoint.path / "tokenizer.json"
    if not path.is_file():
        raise MergeError(
            f"{donor.key} has no tokenizer.json, which the {len(added)} tokens of the others "
            "would be added to",
            hint=_HINT,
        )
    whole = read_json(path)
    known: dict[str, Any] = {}  # how the others treat the tokens that were added to them
    for model in models.values():
        theirs = model.checkpoint.path / "tokenizer.json"
        known |= {
            e["content"]: e
            for e in (read_json(theirs).get("added_tokens") or [] if theirs.is_file() else [])
        }
    plain = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": True,
        "special": False,
    }
    entries = [
        {**plain, **known.get(token, {}), "id": row, "content": token}
        for token, row in added.items()
    ]
    whole["added_tokens"] = [*(whole.get("added_tokens") or []), *entries]
    return tokens | added, {
        "tokenizer.json": (json.dumps(whole, indent=2, ensure_ascii=False) + "\n").encode()
    }

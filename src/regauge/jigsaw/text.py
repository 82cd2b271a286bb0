"""Masked jigsaw puzzles for texts: spans of tokens are shuffled and carry one unknown position, for
BERT and its like.

Spans of up to `span` tokens are chosen until a share `ratio` of a text's own tokens is covered; the
tokens of all chosen places are shuffled among each other. Special tokens and padding stay where
they are and keep their positions, as CLS does in images. The table of positions gets one row more
for the length of one call, and the chosen places are given its number.

    wrapped = TextJigsaw(model, ratio=0.3, tokenizer=tokenizer)
    wrapped(input_ids, attention_mask, labels=labels).loss.backward()
    model = wrapped.unwrap()
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.func import functional_call

from regauge.data.tokenizers import open_tokenizer
from regauge.jigsaw.masks import JigsawError, check_probability, check_ratio, sample_shuffles
from regauge.jigsaw.wrapper import Output, distributed_rank

Tensor = torch.Tensor


def sample_span_masks(free: Any, ratio: float, span: int, draw: np.random.Generator) -> Any:
    """Masks [texts, tokens] of spans within `free` [texts, tokens], to a share of each text's free
    tokens and never more.
    """
    masks = np.zeros(free.shape, bool)
    for mask, open_ in zip(masks, free, strict=True):
        places = np.flatnonzero(open_)
        missing = int(check_ratio(ratio) * len(places))
        for start in draw.permutation(len(places)):
            if missing <= 0:
                break
            chosen = places[start : start + min(int(draw.integers(1, span + 1)), missing)]
            missing -= int((~mask[chosen]).sum())
            mask[chosen] = True
    return masks


class TextJigsaw(torch.nn.Module):
    """A BERT-class model of the transformers library (learned absolute positions, `position_ids`)
    in training with shuffled spans.

    A `tokenizer` (of transformers or tokenizers, a tokenizer.json, a folder or a hub id) names the
    tokens that never move: all its special ones, the mask and the unknown word among them. Without
    it these stay: `special` ids, by default those that the config names of pad, bos, eos, cls and
    sep (BERT's names pad alone); what stands first and last in a text (CLS and SEP); and with
    `token_type_ids` what stands last in the first text of a pair. The mask is not known then, nor
    the SEP between two texts of a model without token types (DistilBERT): they move as words do.

    With `unknown` false only tokens are shuffled. Draws, `probability` and `warmup` are those of
    `MaskedJigsaw`; every text has its own puzzle.

    Labels of tokens (integers [texts, tokens]) go with their tokens, and logits of tokens come in
    the shuffled order. Token types and given `position_ids` stay with their places, but a shuffled
    place is unknown.
    """

    accepts_loss_kwargs = False

    def __init__(
        self,
        model: torch.nn.Module,
        ratio: float = 0.1,
        *,
        span: int = 3,
        unknown: bool = True,
        probability: float = 0.5,
        warmup: int = 0,
        seed: int = 0,
        special: Sequence[int] | None = None,
        tokenizer: Any = None,
    ) -> None:
        super().__init__()
        self.ratio, self.span, self.probability, self.warmup, self.seed, self.passes = (
            check_ratio(ratio),
            span,
            probability,
            warmup,
            seed,
            0,
        )
        if span < 1:
            raise JigsawError(f"a span of {span} tokens is none", hint="1 or more")
        check_probability(probability)
        found = [
            n
            for n, m in model.named_modules()
            if n.rpartition(".")[2] == "position_embeddings" and isinstance(m, torch.nn.Embedding)
        ]
        if len(found) != 1:
            raise JigsawError(
                f"{type(model).__name__} has {'no' if not found else 'more than one'} table of "
                "learned absolute positions for tokens",
                hint="BERT, RoBERTa, DistilBERT, ELECTRA have one; with rotary or relative "
                "positions there is no row to replace",
            )
        self.table = f"{found[0]}.weight"
        self.model = model
        embedding: Any = model.get_submodule(found[0])
        self.offset = (
            0 if embedding.padding_idx is None else embedding.padding_idx + 1
        )  # RoBERTa counts from behind its padding
        config = model.config
        named = [
            getattr(config, f"{name}_token_id", None)
            for name in ("pad", "bos", "eos", "cls", "sep")
        ]
        kept = {i for i in named if isinstance(i, int)} if special is None else set(special)
        self.has_tokenizer = tokenizer is not None
        self.special = tuple(
            sorted(kept | set(special_token_ids(tokenizer) if self.has_tokenizer else ()))
        )
        weight = embedding.weight.detach()
        self.unknown = (
            torch.nn.Parameter(weight[self.offset :].mean(0).clone())
            if unknown and ratio > 0
            else None
        )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        puzzle: tuple[Tensor, Tensor] | None = None,
        **more: Any,
    ) -> Output:
        """Tokens, and what else the model takes. A `puzzle` (mask and order, [texts, tokens]) is
        put to them in evaluation too.
        """
        places = self._position_ids(input_ids, more.get("position_ids"))
        drawn = (
            self._next_puzzle(input_ids, attention_mask, more.get("token_type_ids"))
            if self.training and puzzle is None
            else puzzle
        )
        mask = (
            torch.zeros_like(input_ids, dtype=torch.bool)
            if drawn is None
            else drawn[0].to(input_ids.device)
        )
        ids = input_ids if drawn is None else input_ids.gather(1, drawn[1].to(input_ids.device))
        given = {**more, "attention_mask": attention_mask}
        labels = more.get("labels")
        if (
            drawn is not None
            and labels is not None
            and labels.shape == input_ids.shape
            and not labels.is_floating_point()
        ):
            given["labels"] = labels.gather(
                1, drawn[1].to(labels.device)
            )  # of tokens: they go where their tokens go
        if self.unknown is None or not (self.training or drawn is not None):
            found = self.model(input_ids=ids, **given)
        else:
            table = self.model.get_parameter(self.table)
            whole = torch.cat([table, self.unknown.to(table.dtype)[None]])
            places = torch.where(mask, len(table), places)
            if given.get("token_type_ids") is None:
                given["token_type_ids"] = torch.zeros_like(
                    ids
                )  # BERT would look its own up by the place
            if "token_type_ids" not in _forward_parameters(self.model):
                given.pop("token_type_ids")
            found = functional_call(
                self.model,
                {self.table: whole},
                (),
                {**given, "input_ids": ids, "position_ids": places},
            )
        return Output({k: v for k, v in found.items() if v is not None})

    def unwrap(self) -> torch.nn.Module:
        """The plain model; the unknown embedding stays behind."""
        return self.model

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.passes)

    def set_extra_state(self, state: Tensor) -> None:
        self.passes = int(state)

    def sample(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        seed: Any,
        ratio: float | None = None,
        *,
        token_type_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mask and order for texts, from a seed."""
        ids = input_ids.cpu().numpy()
        there = (
            np.ones(ids.shape, bool)
            if attention_mask is None
            else attention_mask.cpu().numpy().astype(bool)
        )
        free = there & ~np.isin(ids, self.special)
        padding = getattr(self.model.config, "pad_token_id", None)
        ends = there & (ids != padding) if isinstance(padding, int) else there
        free[np.cumsum(ends, 1) == 1] = False  # what is read off: CLS
        free[_last_true(ends)] = False  # and SEP
        if token_type_ids is not None and not self.has_tokenizer:
            types = np.broadcast_to(token_type_ids.cpu().numpy(), ids.shape)
            pairs = (ends & (types != 0)).any(1, keepdims=True)
            free[_last_true(ends & (types == 0)) & pairs] = False  # the SEP between two texts
        draw = np.random.default_rng(seed)
        masks = sample_span_masks(free, self.ratio if ratio is None else ratio, self.span, draw)
        return torch.from_numpy(masks), torch.from_numpy(sample_shuffles(masks, draw))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _next_puzzle(
        self, input_ids: Tensor, attention_mask: Tensor | None, types: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        seeds = [self.seed, distributed_rank(), self.passes]
        shuffled = (
            self.ratio > 0
            and self.passes >= self.warmup
            and np.random.default_rng([*seeds, 0]).random() < self.probability
        )
        self.passes += 1
        return (
            self.sample(input_ids, attention_mask, [*seeds, 1], token_type_ids=types)
            if shuffled
            else None
        )

    def _position_ids(self, input_ids: Tensor, given: Tensor | None) -> Tensor:
        """The given places, or the model's own; one behind the table's last row would be taken for
        the unknown one.
        """
        rows = len(self.model.get_parameter(self.table))
        if given is not None:
            if int(given.max()) >= rows:
                raise JigsawError(
                    f'position_ids go to {int(given.max())}, the rows of "{self.table}" to '
                    f"{rows - 1}",
                    hint="give rows of the table: shuffled places get the unknown one by "
                    "themselves",
                )
            return given.expand_as(input_ids)
        if self.offset:
            there = (input_ids != self.offset - 1).long()
            places = torch.cumsum(there, 1) * there + self.offset - 1
        else:
            places = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        room = rows - self.offset
        if input_ids.shape[1] > room and (longest := int(places.max()) + 1 - self.offset) > room:
            raise JigsawError(
                f'a text has {longest} tokens, the table of positions "{self.table}" is of {room}',
                hint="cut texts to that length (a tokenizer's truncation=True, max_length), or "
                "take a model with more positions",
            )
        return places


def special_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """The ids of all special tokens of a tokenizer: of transformers or tokenizers, a
    tokenizer.json, a folder or a hub id.
    """
    known = open_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    if hasattr(known, "all_special_ids"):
        return tuple(sorted(set(known.all_special_ids)))
    if hasattr(known, "get_added_tokens_decoder"):
        return tuple(
            sorted(i for i, token in known.get_added_tokens_decoder().items() if token.special)
        )
    raise JigsawError(
        f"{type(tokenizer).__name__} is no tokenizer",
        hint="one of transformers or tokenizers, a tokenizer.json, a folder or a hub id",
    )


def _last_true(there: Any) -> Any:
    """The last true place of each row."""
    return there & (np.cumsum(there[:, ::-1], 1)[:, ::-1] == 1)


def _forward_parameters(model: torch.nn.Module) -> Any:
    import inspect

    return inspect.signature(model.forward).parameters

"""Masked jigsaw puzzles for texts: shuffled spans of tokens with one unknown position, for BERT and
similar models.

Spans of up to `span` tokens are sampled until a share `ratio` of a text's ordinary tokens is
covered; the tokens of all these spans are shuffled together. Special tokens and padding keep their
places and positions, as CLS does in images. During one call the position table has an additional
row for the unknown position, which the shuffled places get.

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
from regauge.errors import JigsawError
from regauge.jigsaw.masks import check_probability, check_ratio, sample_shuffles
from regauge.jigsaw.wrapper import Output, distributed_rank

Tensor = torch.Tensor


def sample_span_masks(movable: Any, ratio: float, span: int, rng: np.random.Generator) -> Any:
    """Sample masks of spans [texts, tokens] that cover at most a share of the movable tokens.

    Args:
        movable: Whether a token may move [texts, tokens].
        ratio: The share of movable tokens to cover in each text.
        span: The longest span.
        rng: The random generator.
    """
    masks = np.zeros(movable.shape, bool)
    for mask, is_movable in zip(masks, movable, strict=True):
        places = np.flatnonzero(is_movable)
        missing = int(check_ratio(ratio) * len(places))
        for start in rng.permutation(len(places)):
            if missing <= 0:
                break
            chosen = places[start : start + min(int(rng.integers(1, span + 1)), missing)]
            missing -= int((~mask[chosen]).sum())
            mask[chosen] = True
    return masks


class TextJigsaw(torch.nn.Module):
    """A BERT-class model of transformers in training with shuffled spans of tokens.

    The model needs learned absolute positions and `position_ids`. Every text has its own puzzle.

    The special tokens of the `tokenizer` never move, the mask and the unknown word among them.
    Without a tokenizer these tokens stay: `special` ids, by default pad, bos, eos, cls and sep of
    the config (BERT's config defines only pad); the first and the last token of a text (CLS and
    SEP); and with `token_type_ids` the last token of the first text of a pair. The mask is then
    unknown, as is the SEP between two texts of a model without token types (DistilBERT): both move
    like words.

    Labels of tokens (integers [texts, tokens]) move with their tokens, and logits of tokens are in
    the shuffled order. Token types and given `position_ids` stay in their places, except that the
    position of a shuffled place is unknown.

    Args:
        model: The model to train.
        ratio: The share of tokens to shuffle.
        span: The longest span.
        unknown: Whether shuffled places get the unknown position, or keep their own.
        probability: The share of passes that are shuffled.
        warmup: The number of first passes without a shuffle.
        seed: The random seed, as in `MaskedJigsaw`.
        special: The ids of tokens that do not move.
        tokenizer: A tokenizer of transformers or tokenizers, a tokenizer.json, a folder or a hub
            id.

    Raises:
        JigsawError: An option is invalid, or the model cannot be trained with shuffled tokens.

    Example:
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        >>> bert = BertForSequenceClassification(BertConfig(hidden_size=8, vocab_size=30, **sizes))
        >>> wrapped = regauge.jigsaw.TextJigsaw(bert, ratio=0.3)
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
            raise JigsawError(f"the span must be >= 1 token, got {span}")
        check_probability(probability)
        tables = [
            n
            for n, m in model.named_modules()
            if n.rpartition(".")[2] == "position_embeddings" and isinstance(m, torch.nn.Embedding)
        ]
        if len(tables) != 1:
            raise JigsawError(
                f"{type(model).__name__} must have one table of learned absolute positions of "
                f"tokens, got {len(tables)}",
                hint="BERT, RoBERTa, DistilBERT and ELECTRA have one; rotary and relative "
                "positions have no rows to replace",
            )
        self.table = f"{tables[0]}.weight"
        self.model = model
        embedding: Any = model.get_submodule(tables[0])
        # RoBERTa's positions start after its padding index
        self.offset = 0 if embedding.padding_idx is None else embedding.padding_idx + 1
        config = model.config
        token_ids = [
            getattr(config, f"{name}_token_id", None)
            for name in ("pad", "bos", "eos", "cls", "sep")
        ]
        fixed = {i for i in token_ids if isinstance(i, int)} if special is None else set(special)
        self.has_tokenizer = tokenizer is not None
        if self.has_tokenizer:
            fixed |= set(special_token_ids(tokenizer))
        self.special = tuple(sorted(fixed))
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
        **kwargs: Any,
    ) -> Output:
        """Run the model on shuffled tokens.

        Args:
            input_ids: Tokens [texts, tokens].
            attention_mask: 1 for tokens, 0 for padding.
            puzzle: Mask and order [texts, tokens]; by default sampled in training, and none in
                evaluation.
            kwargs: Further arguments of the model.
        """
        positions = self._position_ids(input_ids, kwargs.get("position_ids"))
        if self.training and puzzle is None:
            token_types = kwargs.get("token_type_ids")
            puzzle = self._next_puzzle(input_ids, attention_mask, token_types)
        mask = (
            torch.zeros_like(input_ids, dtype=torch.bool)
            if puzzle is None
            else puzzle[0].to(input_ids.device)
        )
        ids = input_ids if puzzle is None else input_ids.gather(1, puzzle[1].to(input_ids.device))
        arguments = {**kwargs, "attention_mask": attention_mask}
        labels = kwargs.get("labels")
        if (
            puzzle is not None
            and labels is not None
            and labels.shape == input_ids.shape
            and not labels.is_floating_point()
        ):  # labels of tokens move with their tokens
            arguments["labels"] = labels.gather(1, puzzle[1].to(labels.device))
        if self.unknown is None or not (self.training or puzzle is not None):
            output = self.model(input_ids=ids, **arguments)
        else:
            table = self.model.get_parameter(self.table)
            extended = torch.cat([table, self.unknown.to(table.dtype)[None]])
            positions = torch.where(mask, len(table), positions)
            if arguments.get("token_type_ids") is None:
                # BERT would look up its default token types by position
                arguments["token_type_ids"] = torch.zeros_like(ids)
            if "token_type_ids" not in _forward_parameters(self.model):
                arguments.pop("token_type_ids")
            output = functional_call(
                self.model,
                {self.table: extended},
                (),
                {**arguments, "input_ids": ids, "position_ids": positions},
            )
        return Output({k: v for k, v in output.items() if v is not None})

    def unwrap(self) -> torch.nn.Module:
        """Return the plain model, without the unknown embedding."""
        return self.model

    def get_extra_state(self) -> Tensor:
        """Return the number of passes, for `state_dict`."""
        return torch.tensor(self.passes)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the number of passes."""
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
        """Sample mask and order of texts [texts, tokens] from a seed.

        Args:
            input_ids: Tokens [texts, tokens].
            attention_mask: 1 for tokens, 0 for padding.
            seed: The random seed.
            ratio: The share of tokens to shuffle; by default that of training.
            token_type_ids: The text of a pair that a token belongs to.
        """
        ids = input_ids.cpu().numpy()
        attended = (
            np.ones(ids.shape, bool)
            if attention_mask is None
            else attention_mask.cpu().numpy().astype(bool)
        )
        movable = attended & ~np.isin(ids, self.special)
        padding = getattr(self.model.config, "pad_token_id", None)
        tokens = attended & (ids != padding) if isinstance(padding, int) else attended
        movable[np.cumsum(tokens, 1) == 1] = False  # CLS
        movable[_last_true(tokens)] = False  # SEP
        if token_type_ids is not None and not self.has_tokenizer:
            types = np.broadcast_to(token_type_ids.cpu().numpy(), ids.shape)
            pairs = (tokens & (types != 0)).any(1, keepdims=True)
            movable[_last_true(tokens & (types == 0)) & pairs] = False  # the SEP between two texts
        rng = np.random.default_rng(seed)
        masks = sample_span_masks(movable, self.ratio if ratio is None else ratio, self.span, rng)
        return torch.from_numpy(masks), torch.from_numpy(sample_shuffles(masks, rng))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _next_puzzle(
        self, input_ids: Tensor, attention_mask: Tensor | None, types: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Sample the puzzle of this pass, if it has one."""
        seeds = [self.seed, distributed_rank(), self.passes]
        is_shuffled = (
            self.ratio > 0
            and self.passes >= self.warmup
            and np.random.default_rng([*seeds, 0]).random() < self.probability
        )
        self.passes += 1
        return (
            self.sample(input_ids, attention_mask, [*seeds, 1], token_type_ids=types)
            if is_shuffled
            else None
        )

    def _position_ids(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        """Return the given position ids, or the model's own.

        One beyond the last row of the table would be the unknown position, and is an error.
        """
        rows = len(self.model.get_parameter(self.table))
        if position_ids is not None:
            if int(position_ids.max()) >= rows:
                raise JigsawError(
                    f'position_ids must be rows of "{self.table}", from 0 to {rows - 1}, got '
                    f"{int(position_ids.max())}",
                    hint="shuffled places get the unknown position automatically",
                )
            return position_ids.expand_as(input_ids)
        if self.offset:
            is_token = (input_ids != self.offset - 1).long()
            positions = torch.cumsum(is_token, 1) * is_token + self.offset - 1
        else:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
            positions = positions.expand_as(input_ids)
        room = rows - self.offset
        if input_ids.shape[1] > room and (longest := int(positions.max()) + 1 - self.offset) > room:
            raise JigsawError(
                f'texts must have at most {room} tokens, the rows of "{self.table}", got {longest}',
                hint="truncate texts (a tokenizer's truncation=True, max_length), or use a model "
                "with more positions",
            )
        return positions


def special_token_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of all special tokens of a tokenizer.

    Args:
        tokenizer: One of transformers or tokenizers, a tokenizer.json, a folder or a hub id.
    """
    opened = open_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    if hasattr(opened, "all_special_ids"):
        return tuple(sorted(set(opened.all_special_ids)))
    if hasattr(opened, "get_added_tokens_decoder"):
        return tuple(
            sorted(i for i, token in opened.get_added_tokens_decoder().items() if token.special)
        )
    raise JigsawError(
        f"tokenizer must be a tokenizer, got {type(tokenizer).__name__}",
        hint="give one of transformers or tokenizers, a tokenizer.json, a folder or a hub id",
    )


def _last_true(mask: Any) -> Any:
    """Return a mask of the last true entry of each row."""
    return mask & (np.cumsum(mask[:, ::-1], 1)[:, ::-1] == 1)


def _forward_parameters(model: torch.nn.Module) -> Any:
    import inspect

    return inspect.signature(model.forward).parameters

"""Texts from an update: tokens by the spans of the first layers' gradients, put together by the
second layer's, exactly; and by optimisation.

For BERT and its like, and GPT-2: learned absolute positions, a norm, then query, key and value
weights.
"""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call

from regauge.attacks.classes import label_counts, labels_from
from regauge.attacks.passes import plain_attention, twice
from regauge.attacks.spans import Span, span_of
from regauge.attacks.updates import SentUpdate
from regauge.errors import UpdateError

Tensor = torch.Tensor
CLOSE = 0.15  # of the middle distance: what is nearer to a span than this lies in it
MOST = 4096  # sequences that are tried whole


@dataclass(frozen=True, eq=False)
class TextLayers:
    """Where a language model has what the search reads. `readers` are, by layer, the names of
    query, key and value weights. Where `is_causal` (GPT-2) tokens read those before them, and the
    three are one weight, [in, out].
    """

    words: str
    positions: str
    kinds: str | None
    norm: torch.nn.Module
    readers: tuple[tuple[str, ...], ...]
    is_causal: bool
    offset: int = 0


def text_layers(model: torch.nn.Module) -> TextLayers:
    names = [n for n, _ in model.named_parameters()]

    def one(*ends: str) -> str | None:
        return next((n for n in names for e in ends if n.endswith(e)), None)

    words, positions = (
        one("word_embeddings.weight", "wte.weight"),
        one("position_embeddings.weight", "wpe.weight"),
    )
    if words is None or positions is None:
        missing = "table of words" if words is None else "table of learned positions"
        raise UpdateError(
            f"{type(model).__name__} has no {missing}, which the search starts from",
            hint="BERT, DistilBERT, RoBERTa, GPT-2 have one",
        )
    causal = words.endswith("wte.weight")
    pattern = (
        r"(.*\.h\.|h\.)(\d+)\.attn\.c_attn\.weight$"
        if causal
        else r"(.*\.layer\.)(\d+)\.attention\.(?:self\.)?"
        r"(?:query|key|value|q_lin|k_lin|v_lin)\.weight$"
    )
    layers: dict[int, list[str]] = {}
    for n in names:
        found = re.match(pattern, n)
        if found:
            layers.setdefault(int(found[2]), []).append(n)
    if not layers:
        raise UpdateError(
            f"{type(model).__name__} has no attention whose query weights are known here",
            hint="BERT, DistilBERT, RoBERTa, GPT-2",
        )
    base = (
        words.rpartition("wte.weight")[0]
        if causal
        else words.rpartition("word_embeddings.weight")[0]
    )
    norm = model.get_submodule(f"{base}h.0.ln_1" if causal else f"{base}LayerNorm")
    table: Any = model.get_submodule(positions.rpartition(".")[0])
    pad = getattr(table, "padding_idx", None)
    kinds = one("token_type_embeddings.weight")
    return TextLayers(
        words,
        positions,
        kinds,
        norm,
        tuple(tuple(layers[i]) for i in sorted(layers)),
        causal,
        0 if pad is None else pad + 1,
    )


def token_membership(view: SentUpdate) -> Tensor:
    """Which words of the vocabulary an update was made of: [vocabulary], yes or no.

    Sees: the gradient by the table of words. Recovers: the bag of words. Why it works: rows of
    words that no text had are zero. What stops it: a head tied to the table (language models: every
    word has a gradient there); that gradient withheld; noise. Floor: none of them. Ceiling: all,
    exactly. References: Melis et al. 2019 (1805.04049). Cost: none.
    """
    layers = text_layers(view.model)
    table = view.slope(layers.words, "the gradient by the table of words").detach().double()
    size = table.norm(dim=1)
    found: Tensor = size > 1e-9 * size.max().clamp(min=1e-300)
    if bool(found.all()):
        raise UpdateError(
            "every word of the vocabulary has a gradient: the head is tied to the table, or "
            "noise was added",
            hint="try the search",
        )
    return found.cpu()


def span_candidates(
    view: SentUpdate, *, among: Tensor | None = None, length: int | None = None
) -> list[Tensor]:
    """For each position the words that may have stood there: those whose embedding lies in the span
    of the first layer's gradient.
    """
    layers = text_layers(view.model)
    span = _span(view, layers, 0)
    state = {
        n: p.detach().double()
        for n, p in view.model.named_parameters()
        if n in (layers.words, layers.positions, layers.kinds)
    }
    words = torch.arange(len(state[layers.words])) if among is None else among
    norm = copy.deepcopy(layers.norm).double()
    out = []
    most = length or len(state[layers.positions]) - layers.offset
    for place in range(most):
        z = state[layers.words][words] + state[layers.positions][place + layers.offset]
        z = z if layers.kinds is None else z + state[layers.kinds][0]
        with torch.no_grad():
            away = span.away(norm(z).cpu())
        near = (
            words[away < CLOSE * away.median().clamp(max=1.0)]
            if len(words) > 8
            else words[away < CLOSE * 0.5]
        )
        if not len(near):
            break
        out.append(near)
    return out


def exact_search(
    view: SentUpdate, *, among: Tensor | None = None, most: int = MOST
) -> list[Tensor]:
    """The texts that an update was made of, whole: a list of token sequences.

    Sees: the gradients by the first two layers' query, key and value weights; batch size, and
    length if it is granted. Recovers: every text, exactly, while all texts together have fewer
    tokens than the model has channels; of a causal model all but the last word, which is a label
    and is read by no layer. Why it works: rows of the first layer's gradient span the embeddings of
    (word, position) pairs, so that each position's words are told one by one; rows of the second
    layer's span what the first makes of a whole text, so that only true combinations lie in it:
    grown word by word in causal models, tried whole or word by word in others. What stops it: more
    tokens than channels; noise; the first two layers withheld. Floor: none. Ceiling: all.
    References: DAGER (2405.15586). Cost: a product of the vocabulary with the span for each
    position, and a pass through one block for each combination that is tried. `among` are the words
    that may be there (`token_membership`).
    """
    layers = text_layers(view.model)
    if among is None:
        try:
            among = token_membership(view).nonzero()[:, 0]
        except UpdateError:
            among = None
    found = span_candidates(view, among=among, length=view.granted.length)
    if not found:
        return []
    if len(layers.readers) < 2:
        raise UpdateError(
            f"{type(view.model).__name__} has one layer, and the second tells which words "
            "belong together"
        )
    span = _span(view, layers, 1)
    count = view.granted.batch or 1
    if all(len(c) == 1 for c in found) and count == 1:
        return [torch.cat(found)]
    tested = _Second(view.model, layers, span)
    return _grown(found, tested, count) if layers.is_causal else _whole(found, tested, count, most)


def _grown(found: list[Tensor], tested: _Second, count: int) -> list[Tensor]:
    """Texts of a causal model, word by word: a beginning is kept if what the first layer makes of
    its last word lies in the second's span.
    """
    texts: list[Tensor] = [torch.tensor([], dtype=torch.long)]
    done: list[Tensor] = []
    for words in found:
        tried = [torch.cat([t, w[None]]) for t in texts for w in words]
        away = tested.away(torch.stack(tried))[:, -1]
        near = away < CLOSE * 0.5 if len(away) < 4 else away < max(CLOSE * float(away.max()), 1e-3)
        kept = [t for t, is_near in zip(tried, near.tolist(), strict=True) if is_near]
        done += [
            t for t in texts if len(t) and not any(torch.equal(k[:-1], t) for k in kept)
        ]  # what nothing continues has ended
        order = away[near].argsort()
        texts = [kept[i] for i in order[: 4 * count]]
        if not texts:
            break
    return sorted([*texts, *done], key=lambda t: -len(t))[:count]


def _whole(found: list[Tensor], tested: _Second, count: int, most: int) -> list[Tensor]:
    """Texts of a model that reads both ways: all combinations where they are few, else each
    position's word in turn, again and again.
    """
    total = 1
    for words in found:
        total *= len(words)
    if total <= most:
        tried = torch.stack([torch.stack(list(c)) for c in itertools.product(*found)])
        order = tested.away(tried).mean(1).argsort()
        return [tried[i] for i in order[:count]]
    draw = torch.Generator().manual_seed(0)
    texts: dict[tuple[int, ...], float] = {}
    for _ in range(8 * count):
        now = torch.stack([w[int(torch.randint(len(w), (1,), generator=draw))] for w in found])
        worth = float(tested.away(now[None]).mean())
        for _ in range(4):
            before = worth
            for place in torch.randperm(len(found), generator=draw).tolist():
                if len(found[place]) == 1:
                    continue
                options = now.repeat(len(found[place]), 1)
                options[:, place] = found[place]
                away = tested.away(options).mean(1)
                now, worth = options[int(away.argmin())], float(away.min())
            if worth >= before:
                break
        texts[tuple(now.tolist())] = worth
    return [torch.tensor(t) for t in sorted(texts, key=lambda t: texts[t])[:count]]


class _Second:
    """How far what the second layer's attention is given, of texts [count, length], lies from the
    span of its gradient: [count, length].
    """

    def __init__(self, model: torch.nn.Module, layers: TextLayers, span: Span) -> None:
        self.model, self.span = copy.deepcopy(model).eval(), span
        self.reader = self.model.get_submodule(layers.readers[1][0].rpartition(".")[0])

    def away(self, texts: Tensor, step: int = 64) -> Tensor:
        seen: list[Tensor] = []

        def note(module: Any, given: Any) -> None:
            seen.append(given[0].detach())
            raise _Seen

        hook = self.reader.register_forward_pre_hook(note)
        try:
            with torch.no_grad():
                for part in torch.split(texts.to(next(self.model.parameters()).device), step):
                    try:
                        self.model(input_ids=part)
                    except _Seen:
                        continue
        finally:
            hook.remove()
        return torch.cat([self.span.away(s.cpu()) for s in seen])


class _Seen(Exception):  # noqa: N818 (no error: it only ends a pass)
    """The pass has come as far as was wanted."""


def _span(view: SentUpdate, layers: TextLayers, layer: int) -> Span:
    slopes = [
        view.slope(n, "the gradient by the first attention layers") for n in layers.readers[layer]
    ]
    if layers.is_causal:
        slopes = [part for s in slopes for part in s.T.chunk(3)]
    tokens = (
        None
        if view.granted.batch is None or view.granted.length is None
        else view.granted.batch * view.granted.length
    )
    span = span_of(slopes)
    if tokens is not None and tokens < len(span.basis):
        span = Span(span.basis[:tokens], span.sizes)
    if span.is_all:
        raise UpdateError(
            "the batch has at least as many tokens as the model has channels "
            f"({span.basis.shape[1]}): its span says nothing"
        )
    return span


def tag(
    view: SentUpdate, *, steps: int = 200, rate: float = 0.05, absolute: float = 0.01, seed: int = 0
) -> list[Tensor]:
    """Texts whose gradients are nearest to the update's: embeddings are optimised, and the nearest
    words taken.

    Sees: the update, batch size, length; of classifiers labels are read off the head first, of
    language models they are optimised too. Recovers: words, some in their places. Why it works: as
    DLG for images; large gradients of early layers count by absolute distance too. What stops it:
    batches, long texts, noise. Floor: words at random. Ceiling: all. References: Deng et al. 2021
    (TAG, 2103.06819). Cost: as many double backward passes as steps.
    """
    layers = text_layers(view.model)
    batch, length = view.granted.batch or 1, view.granted.length
    if length is None:
        raise UpdateError(
            "how long the texts are is not granted, and nothing can be optimised without",
            hint="Threat(length=True)",
        )
    model: Any = copy.deepcopy(view.model).eval()
    plain_attention(model)
    state = {n: p.detach() for n, p in model.named_parameters()}
    tied = layers.words  # its gradient would need the words themselves
    target = {n: t.detach().to(state[n]) for n, t in view.slopes.items() if n != tied}
    words = state[layers.words]
    draw = torch.Generator().manual_seed(seed)
    x = words.mean(0) + words.std() * torch.randn(batch, length, words.shape[1], generator=draw).to(
        words
    )
    causal = type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))
    held = [x.requires_grad_(True)]
    labels = None
    if causal:
        held.append(
            (0.1 * torch.randn(batch, length, len(words), generator=draw))
            .to(words)
            .requires_grad_(True)
        )
    else:
        labels = (
            view.granted.labels
            if view.granted.labels is not None
            else labels_from(label_counts(view, model.config.num_labels))
        )
    optimizer = torch.optim.Adam(held, rate)
    leaves = {n: state[n].clone().requires_grad_(True) for n in target}
    with twice():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - step / steps)
            logits = functional_call(model, {**state, **leaves}, (), {"inputs_embeds": x}).logits
            if causal:
                loss = torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1), held[1][:, 1:].softmax(-1).flatten(0, 1)
                )
            else:
                assert labels is not None
                loss = torch.nn.functional.cross_entropy(logits, labels)
            found = torch.autograd.grad(
                loss, list(leaves.values()), create_graph=True, allow_unused=True
            )
            off = [
                (g - target[n], target[n])
                for n, g in zip(leaves, found, strict=True)
                if g is not None
            ]
            total = sum(
                (d.square().sum() + absolute * d.abs().sum() for d, _ in off), torch.zeros(())
            )
            slopes = torch.autograd.grad(total, held, allow_unused=True)
            for p, g in zip(held, slopes, strict=True):
                p.grad = g
            optimizer.step()
    unit = torch.nn.functional.normalize
    with torch.no_grad():
        near = (
            (unit(x.flatten(0, 1) - words.mean(0), dim=1) @ unit(words - words.mean(0), dim=1).T)
            .argmax(1)
            .view(batch, length)
        )
    return list(near.cpu())

"""Texts from an update, by spans of gradients or by optimization.

Spans of the first layer's gradients give the tokens; those of the second layer combine them
exactly.

Supported are BERT and similar models, and GPT-2: learned absolute positions, a norm, then query,
key and value weights.
"""

from __future__ import annotations

import copy
import itertools
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call

from regauge.attacks.classes import expand_counts, label_counts
from regauge.attacks.passes import disable_fused_attention, double_backward
from regauge.attacks.spans import Span, gradient_span
from regauge.attacks.updates import SentUpdate
from regauge.errors import UpdateError

Tensor = torch.Tensor
CLOSE = 0.15  # relative to the median distance: nearer vectors lie in the span
MAX_COMBINATIONS = 4096  # maximum number of sequences tried in full


@dataclass(frozen=True, eq=False)
class TextLayers:
    """Names of the layers of a language model that the search uses.

    `readers` are the names of query, key and value weights by layer. If `is_causal` (GPT-2), tokens
    attend to previous ones, and the three are one weight, [in, out].
    """

    words: str
    positions: str
    kinds: str | None
    norm: torch.nn.Module
    readers: tuple[tuple[str, ...], ...]
    is_causal: bool
    offset: int = 0


def find_text_layers(model: torch.nn.Module) -> TextLayers:
    """Find the layers that the search uses; raise UpdateError if the model has none."""
    names = [name for name, _ in model.named_parameters()]

    def find_name(*suffixes: str) -> str | None:
        return next((name for name in names for suffix in suffixes if name.endswith(suffix)), None)

    words, positions = (
        find_name("word_embeddings.weight", "wte.weight"),
        find_name("position_embeddings.weight", "wpe.weight"),
    )
    if words is None or positions is None:
        missing = "word table" if words is None else "table of learned positions"
        raise UpdateError(
            f"the model must have a {missing}, got {type(model).__name__} without one",
            hint="use BERT, DistilBERT, RoBERTa or GPT-2",
        )
    causal = words.endswith("wte.weight")
    pattern = (
        r"(.*\.h\.|h\.)(\d+)\.attn\.c_attn\.weight$"
        if causal
        else r"(.*\.layer\.)(\d+)\.attention\.(?:self\.)?"
        r"(?:query|key|value|q_lin|k_lin|v_lin)\.weight$"
    )
    layers: dict[int, list[str]] = {}
    for name in names:
        match = re.match(pattern, name)
        if match:
            layers.setdefault(int(match[2]), []).append(name)
    if not layers:
        raise UpdateError(
            f"the model must have a known attention layout, got {type(model).__name__}",
            hint="use BERT, DistilBERT, RoBERTa or GPT-2",
        )
    base = (
        words.rpartition("wte.weight")[0]
        if causal
        else words.rpartition("word_embeddings.weight")[0]
    )
    norm = model.get_submodule(f"{base}h.0.ln_1" if causal else f"{base}LayerNorm")
    table: Any = model.get_submodule(positions.rpartition(".")[0])
    pad = getattr(table, "padding_idx", None)
    kinds = find_name("token_type_embeddings.weight")
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
    """Recover the words of the vocabulary in an update: [vocabulary], a boolean each.

    Sees: the gradient of the word table.
    Recovers: the bag of words.
    Why it works: rows of words that no text contains are zero.
    What stops it: a head tied to the table (language models: every word has a gradient there);
        withholding that gradient; noise.
    Floor: no word.
    Ceiling: all, exactly.
    References: Melis et al. 2019 (1805.04049).
    Cost: negligible.
    """
    layers = find_text_layers(view.model)
    table = view.grad(layers.words, "the gradient of the word table").detach().double()
    norms = table.norm(dim=1)
    is_present: Tensor = norms > 1e-9 * norms.max().clamp(min=1e-300)
    if bool(is_present.all()):
        raise UpdateError(
            "the word table must have zero rows in its gradient, got none: the head is tied to the "
            "table, or noise was added",
            hint="use the exact search",
        )
    return is_present.cpu()


def span_candidates(
    view: SentUpdate, *, among: Tensor | None = None, length: int | None = None
) -> list[Tensor]:
    """Return, for each position, the words whose embedding lies in the span of the first layer's
    gradient.

    Args:
        view: The model and the update.
        among: The words to consider; all if None.
        length: The length of the texts; found if None.
    """
    layers = find_text_layers(view.model)
    span = _span(view, layers, 0)
    state = {
        n: p.detach().double()
        for n, p in view.model.named_parameters()
        if n in (layers.words, layers.positions, layers.kinds)
    }
    words = torch.arange(len(state[layers.words])) if among is None else among
    norm = copy.deepcopy(layers.norm).double()
    candidates = []
    max_length = length or len(state[layers.positions]) - layers.offset
    for position in range(max_length):
        z = state[layers.words][words] + state[layers.positions][position + layers.offset]
        z = z if layers.kinds is None else z + state[layers.kinds][0]
        with torch.no_grad():
            distance = span.distance(norm(z).cpu())
        nearest = (
            words[distance < CLOSE * distance.median().clamp(max=1.0)]
            if len(words) > 8
            else words[distance < CLOSE * 0.5]
        )
        if not len(nearest):
            break
        candidates.append(nearest)
    return candidates


def exact_search(
    view: SentUpdate, *, among: Tensor | None = None, max_combinations: int = MAX_COMBINATIONS
) -> list[Tensor]:
    """Recover the texts behind an update in full: a list of token sequences.

    Sees: the gradients of the first two layers' query, key and value weights; batch size, and
        length if granted.
    Recovers: every text, exactly, while all texts together have fewer tokens than the model has
        channels; for a causal model all but the last word, which is only a label.
    Why it works: rows of the first layer's gradient span the embeddings of (word, position) pairs,
        which gives the words of each position; rows of the second layer's gradient span the first
        layer's output for whole texts, so that only true combinations lie in it: grown word by word
        in causal models, tried in full or word by word in others.
    What stops it: more tokens than channels; noise; withholding the first two layers.
    Floor: none.
    Ceiling: all.
    References: DAGER (2405.15586).
    Cost: for each position a product of the vocabulary with the span, and for each combination a
        pass through one block.

    Args:
        view: The model and the update.
        among: The words to consider (`token_membership`); found if None.
        max_combinations: Maximum number of combinations tried in full.
    """
    layers = find_text_layers(view.model)
    if among is None:
        try:
            among = token_membership(view).nonzero()[:, 0]
        except UpdateError:
            among = None
    candidates = span_candidates(view, among=among, length=view.granted.length)
    if not candidates:
        return []
    if len(layers.readers) < 2:
        raise UpdateError(
            "the model must have at least 2 layers to combine words, got 1 "
            f"({type(view.model).__name__})"
        )
    span = _span(view, layers, 1)
    count = view.granted.batch or 1
    if all(len(words) == 1 for words in candidates) and count == 1:
        return [torch.cat(candidates)]
    second_layer = _SecondLayer(view.model, layers, span)
    return (
        _grow_texts(candidates, second_layer, count)
        if layers.is_causal
        else _search_texts(candidates, second_layer, count, max_combinations)
    )


def _grow_texts(candidates: list[Tensor], second_layer: _SecondLayer, count: int) -> list[Tensor]:
    """Grow texts of a causal model word by word: keep a prefix if the first layer's output for its
    last word lies in the second layer's span.
    """
    texts: list[Tensor] = [torch.tensor([], dtype=torch.long)]
    finished: list[Tensor] = []
    for words in candidates:
        extended = [torch.cat([text, word[None]]) for text in texts for word in words]
        distance = second_layer.distance(torch.stack(extended))[:, -1]
        is_near = (
            distance < CLOSE * 0.5
            if len(distance) < 4
            else distance < max(CLOSE * float(distance.max()), 1e-3)
        )
        accepted = [text for text, flag in zip(extended, is_near.tolist(), strict=True) if flag]
        finished += [
            text
            for text in texts
            if len(text) and not any(torch.equal(prefix[:-1], text) for prefix in accepted)
        ]  # a text without a continuation has ended
        order = distance[is_near].argsort()
        texts = [accepted[i] for i in order[: 4 * count]]
        if not texts:
            break
    return sorted([*texts, *finished], key=lambda text: -len(text))[:count]


def _search_texts(
    candidates: list[Tensor], second_layer: _SecondLayer, count: int, max_combinations: int
) -> list[Tensor]:
    """Search texts of a bidirectional model: all combinations if they are few, else coordinate
    descent over positions.
    """
    total = 1
    for words in candidates:
        total *= len(words)
    if total <= max_combinations:
        combinations = torch.stack(
            [torch.stack(list(combination)) for combination in itertools.product(*candidates)]
        )
        order = second_layer.distance(combinations).mean(1).argsort()
        return [combinations[i] for i in order[:count]]
    generator = torch.Generator().manual_seed(0)
    texts: dict[tuple[int, ...], float] = {}
    for _ in range(8 * count):
        current = torch.stack(
            [
                choices[int(torch.randint(len(choices), (1,), generator=generator))]
                for choices in candidates
            ]
        )
        score = float(second_layer.distance(current[None]).mean())
        for _ in range(4):
            previous = score
            for position in torch.randperm(len(candidates), generator=generator).tolist():
                if len(candidates[position]) == 1:
                    continue
                options = current.repeat(len(candidates[position]), 1)
                options[:, position] = candidates[position]
                distance = second_layer.distance(options).mean(1)
                current, score = options[int(distance.argmin())], float(distance.min())
            if score >= previous:
                break
        texts[tuple(current.tolist())] = score
    return [torch.tensor(text) for text in sorted(texts, key=lambda text: texts[text])[:count]]


class _SecondLayer:
    """Distance of the second attention's inputs, for texts [count, length], from the span of its
    gradient: [count, length].
    """

    def __init__(self, model: torch.nn.Module, layers: TextLayers, span: Span) -> None:
        self.model, self.span = copy.deepcopy(model).eval(), span
        self.reader = self.model.get_submodule(layers.readers[1][0].rpartition(".")[0])

    def distance(self, texts: Tensor, step: int = 64) -> Tensor:
        inputs: list[Tensor] = []

        def capture(module: Any, args: Any) -> None:
            inputs.append(args[0].detach())
            raise _StopPassError

        hook = self.reader.register_forward_pre_hook(capture)
        try:
            with torch.no_grad():
                for batch in torch.split(texts.to(next(self.model.parameters()).device), step):
                    try:
                        self.model(input_ids=batch)
                    except _StopPassError:
                        continue
        finally:
            hook.remove()
        return torch.cat([self.span.distance(captured.cpu()) for captured in inputs])


class _StopPassError(Exception):
    """The forward pass has reached the layer of interest."""


def _span(view: SentUpdate, layers: TextLayers, layer: int) -> Span:
    """Return the span of a layer's query, key and value gradients; raise UpdateError if it is
    uninformative.
    """
    grads = [
        view.grad(name, "the gradient of the first attention layers")
        for name in layers.readers[layer]
    ]
    if layers.is_causal:
        grads = [part for grad in grads for part in grad.T.chunk(3)]
    tokens = (
        None
        if view.granted.batch is None or view.granted.length is None
        else view.granted.batch * view.granted.length
    )
    span = gradient_span(grads)
    if tokens is not None and tokens < len(span.basis):
        span = Span(span.basis[:tokens], span.sizes)
    if span.is_full:
        raise UpdateError(
            "the batch must have fewer tokens than the model has channels "
            f"({span.basis.shape[1]}), got at least as many: its span is the whole space"
        )
    return span


def tag(
    view: SentUpdate, *, steps: int = 200, lr: float = 0.05, absolute: float = 0.01, seed: int = 0
) -> list[Tensor]:
    """Recover texts by optimizing embeddings until their gradients match the update, then taking
    the nearest words.

    Sees: the update, batch size, length; labels of classifiers are read from the head first, those
        of language models are optimized too.
    Recovers: words, some in their positions.
    Why it works: as DLG for images; large gradients of early layers also count by absolute
        distance.
    What stops it: batches; long texts; noise.
    Floor: random words.
    Ceiling: all.
    References: Deng et al. 2021 (TAG, 2103.06819).
    Cost: as many double backward passes as steps.

    Args:
        view: The model and the update.
        steps: Number of optimizer steps.
        lr: Peak learning rate.
        absolute: Weight of the absolute distance.
        seed: Random seed.
    """
    layers = find_text_layers(view.model)
    batch, length = view.granted.batch or 1, view.granted.length
    if length is None:
        raise UpdateError(
            "the length of the texts must be granted for an optimization attack, got none",
            hint="pass Threat(length=True)",
        )
    model: Any = copy.deepcopy(view.model).eval()
    disable_fused_attention(model)
    state = {n: p.detach() for n, p in model.named_parameters()}
    tied = layers.words  # its gradient would need the words themselves
    target = {n: t.detach().to(state[n]) for n, t in view.grads.items() if n != tied}
    words = state[layers.words]
    generator = torch.Generator().manual_seed(seed)
    x = words.mean(0) + words.std() * torch.randn(
        batch, length, words.shape[1], generator=generator
    ).to(words)
    is_causal = type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))
    variables = [x.requires_grad_(True)]
    labels = None
    if is_causal:
        variables.append(
            (0.1 * torch.randn(batch, length, len(words), generator=generator))
            .to(words)
            .requires_grad_(True)
        )
    else:
        labels = (
            view.granted.labels
            if view.granted.labels is not None
            else expand_counts(label_counts(view, model.config.num_labels))
        )
    optimizer = torch.optim.Adam(variables, lr)
    leaves = {n: state[n].clone().requires_grad_(True) for n in target}
    with double_backward():
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = lr * (1 - step / steps)
            logits = functional_call(model, {**state, **leaves}, (), {"inputs_embeds": x}).logits
            if is_causal:
                loss = torch.nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1), variables[1][:, 1:].softmax(-1).flatten(0, 1)
                )
            else:
                assert labels is not None
                loss = torch.nn.functional.cross_entropy(logits, labels)
            grads = torch.autograd.grad(
                loss, list(leaves.values()), create_graph=True, allow_unused=True
            )
            differences = [
                (grad - target[n], target[n])
                for n, grad in zip(leaves, grads, strict=True)
                if grad is not None
            ]
            total = sum(
                (d.square().sum() + absolute * d.abs().sum() for d, _ in differences),
                torch.zeros(()),
            )
            updates = torch.autograd.grad(total, variables, allow_unused=True)
            for variable, update in zip(variables, updates, strict=True):
                variable.grad = update
            optimizer.step()
    unit = torch.nn.functional.normalize
    with torch.no_grad():
        nearest = (
            (unit(x.flatten(0, 1) - words.mean(0), dim=1) @ unit(words - words.mean(0), dim=1).T)
            .argmax(1)
            .view(batch, length)
        )
    return list(nearest.cpu())

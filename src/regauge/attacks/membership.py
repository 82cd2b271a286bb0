"""Which patches were in a batch, by an attacker that has practised: on updates of its own it learns
which layer to ask, and how softly.

The span of a layer's gradient is a yes or no, and noise or a larger batch blurs it. Here a patch is
asked for its likelihood under the gradient's own second moments, at several levels of noise, next
to what it gets under updates that it was surely not in. Which layer and which level tell most is
seen on rehearsals.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.func import functional_call

from regauge.attacks.inversion import to_patches
from regauge.attacks.spans import candidates_at
from regauge.attacks.updates import Rehearsal, SentUpdate
from regauge.errors import UpdateError
from regauge.jigsaw.layers import Layers, Readers, inner_of, layers_of, readers_of

Tensor = torch.Tensor
LEVELS = (
    1e-14,
    1e-12,
    1e-10,
    1e-8,
    1e-6,
    1e-4,
    1e-2,
)  # of the largest second moment: what counts as noise
PASSES = 1024  # images that are put through the model for one question, at most
BLOCKS = 2  # the first blocks in the update: what comes after is further from the pixels
OTHERS = 48  # patches that were in no update, to practise on


@dataclass(frozen=True, eq=False)
class Moments:
    """The directions [channels, channels] of what a layer was given, and how much of each is in its
    gradient.
    """

    basis: Tensor
    sizes: Tensor

    def unlikely(self, features: Tensor) -> Tensor:
        """For features [..., channels] the log of their length by these moments, at each level:
        [levels, ...].
        """
        unit = torch.nn.functional.normalize(features.double(), dim=-1)
        parts = (unit @ self.basis).square()
        return torch.stack(
            [(parts / (self.sizes + level * self.sizes.max())).sum(-1).log() for level in LEVELS]
        )


@dataclass(frozen=True, eq=False)
class Practised:
    """What rehearsals taught: the layer to ask, the level of noise, whether to compare with other
    updates; and the AUC that it had on them.
    """

    layer: str
    level: int
    compared: bool
    auc: float
    others: tuple[Moments, ...]


def practise(view: SentUpdate) -> Practised:
    """Try every layer and level on the rehearsals, whose patches are known, and keep what told
    most.
    """
    layers, rehearsals = layers_of(view.model, view.shape), view.granted.rehearsals
    images = view.granted.images
    if len(rehearsals) < 2 or images is None:
        raise UpdateError(
            "there is nothing to practise on: other images and updates of them are not granted",
            hint="Threat(images=True)",
        )
    draw = torch.Generator().manual_seed(0)
    used = sum(len(r.read) for r in rehearsals)
    apart = to_patches(images[used:] if len(images) > used else images, layers.patch[0]).flatten(
        0, 1
    )
    apart = apart[torch.randperm(len(apart), generator=draw)[:OTHERS]]
    best: Practised | None = None
    refused: UpdateError | None = None
    for name in asked_layers(view, layers):
        try:
            _given(view, layers, name, apart[:1], rehearsals[:1])
        except (
            UpdateError
        ) as error:  # of windows, or of patches that were merged: the layers before them are left
            refused = error
            continue
        moments = [moments_of(replace(view, update=r.update), layers, name) for r in rehearsals]
        told: dict[tuple[int, bool], list[float]] = {}
        for n, one in enumerate(rehearsals):
            inside = to_patches(one.read.cpu(), layers.patch[0]).flatten(0, 1)
            inside = inside[torch.randperm(len(inside), generator=draw)[:OTHERS]]
            rest = [m for i, m in enumerate(moments) if i != n]
            contexts = [r for i, r in enumerate(rehearsals) if i != n]
            plain, beside = _scores(
                view,
                layers,
                name,
                torch.cat([inside, apart.to(inside)]),
                contexts,
                moments[n],
                rest,
            )
            for level in range(len(LEVELS)):
                for compared, scores in ((False, plain[level]), (True, beside[level])):
                    told.setdefault((level, compared), []).append(
                        auc(scores[: len(inside)], scores[len(inside) :])
                    )
        for (level, compared), values in told.items():
            mean = sum(values) / len(values)
            if best is None or mean > best.auc:
                best = Practised(name, level, compared, mean, tuple(moments))
    if best is None:
        assert refused is not None
        raise refused
    return best


def practised_membership(
    view: SentUpdate, candidates: Tensor, learned: Practised | None = None
) -> Tensor:
    """For each patch [count, values] a score: the higher, the more surely it was in an image that
    the update was made of.

    Sees: the gradients by the patch embedding and by the query, key and value weights of the first
    two blocks that are sent; batch size; other images of the kind, and what the client's code makes
    of them. Recovers: is this patch in the batch. Why it works: a layer's gradient is a sum over
    what the layer was given, so that its second moments favour that; a patch's own share in them
    stands out against updates that it was not in. Of deeper blocks it is guessed what they were
    given, by putting the patch into other images. Layer, noise level and comparison are chosen on
    rehearsals. What stops it: batches of many more tokens than channels; noise; few layers sent.
    Floor: AUC 0.5. Ceiling: 1. References: DAGER (2405.15586), for spans; Carlini et al. 2022
    (LiRA), for scores next to those of models or updates without the sample. Cost: an eigenvalue
    decomposition, and of deeper blocks up to a thousand forward passes.
    """
    learned = learned or practise(view)
    layers = layers_of(view.model, view.shape)
    own = moments_of(view, layers, learned.layer)
    plain, beside = _scores(
        view, layers, learned.layer, candidates, view.granted.rehearsals, own, learned.others
    )
    return (beside if learned.compared else plain)[learned.level]


def asked_layers(view: SentUpdate, layers: Layers) -> list[str]:
    """What is sent of the patch embedding and of the first blocks: "patches", "block 0", ..."""
    found = ["patches"] if layers.weight in view.slopes else []
    blocks = [
        n for n, r in blocks_of(view.model).items() if all(name in view.slopes for name in r.names)
    ]
    found += [f"block {n}" for n in blocks[:BLOCKS]]
    if not found:
        raise UpdateError(
            "neither the patch embedding's gradient nor that of any attention is in the update",
            hint="all were withheld or frozen",
        )
    return found


def moments_of(view: SentUpdate, layers: Layers, name: str) -> Moments:
    if name == "patches":
        slopes = [view.slope(layers.weight, "the gradient by the patch embedding").flatten(1)]
    else:
        found = blocks_of(view.model)[int(name.split()[1])]
        slopes = [view.slope(n, "the gradient by an attention") for n in found.names]
        slopes = [s.T if found.is_conv1d else s for s in slopes]
    parts = [s.detach().double().cpu() for s in slopes]
    whole = torch.cat([p / p.norm() for p in parts if bool(p.any())] or parts)
    if not bool(whole.any()):
        raise UpdateError(f"the gradient of {name} is zero", hint="was the layer trained?")
    sizes, basis = torch.linalg.eigh(whole.T @ whole)
    return Moments(basis, sizes.clamp(min=0))


def _scores(
    view: SentUpdate,
    layers: Layers,
    name: str,
    candidates: Tensor,
    contexts: Sequence[Rehearsal],
    own: Moments,
    others: Sequence[Moments],
) -> tuple[Tensor, Tensor]:
    """Scores [levels, candidates] by an update's own moments, and less what the moments of others
    give.
    """
    seen = _given(view, layers, name, candidates, contexts)  # [places, candidates, channels]
    plain = -own.unlikely(seen)
    beside = (
        plain if not others else plain + torch.stack([m.unlikely(seen) for m in others]).mean(0)
    )
    return plain.max(1).values, beside.max(1).values


def _given(
    view: SentUpdate, layers: Layers, name: str, candidates: Tensor, contexts: Sequence[Rehearsal]
) -> Tensor:
    """What a layer is given of each candidate, at each place that it may have had: exactly, but of
    deeper layers among other patches.
    """
    if name == "patches":
        return candidates[None].cpu()
    found = blocks_of(view.model)[int(name.split()[1])]
    if name == "block 0":
        return torch.stack(candidates_at(view, layers, found, candidates))
    return among(view, layers, found, candidates, contexts)


def among(
    view: SentUpdate,
    layers: Layers,
    found: Readers,
    candidates: Tensor,
    contexts: Sequence[Rehearsal],
) -> Tensor:
    """The candidates put into other images, at places in turn, as a deeper norm gives them on:
    [places, candidates, channels], in the mean over images. Under MJP those have their own puzzle,
    and its places the unknown embedding.
    """
    model = copy.deepcopy(view.model).eval()
    inner, lead = inner_of(model)
    norm = inner.get_submodule(_name_of(inner_of(view.model)[0], found.norm))
    state = {n: p.detach() for n, p in inner.named_parameters()}
    most = max(1, PASSES // len(candidates))
    used = list(contexts[: max(1, min(len(contexts), most // layers.cells))])
    places = (
        torch.linspace(0, layers.cells - 1, min(layers.cells, max(1, most // len(used))))
        .round()
        .long()
    )
    (p, q), (_, width) = layers.patch, layers.grid
    like = next(iter(state.values()))
    patches = candidates.to(like).view(len(candidates), view.shape[0], p, q)
    total: Tensor | None = None
    with torch.no_grad():
        for one in used:
            given = _table(view, layers, state, one, lead)
            rows = []
            for place in places.tolist():
                x = one.read[:1].to(like).repeat(len(candidates), 1, 1, 1)
                r, c = place // width * p, place % width * q
                x[:, :, r : r + p, c : c + q] = patches
                read = _read_off(inner, norm, given, x)
                if read.ndim != 3 or read.shape[:2] != (len(x), layers.prefix + layers.cells):
                    raise UpdateError(
                        "a block that is sent does not read one token for each patch",
                        hint="windows and merged patches, as Swin has them",
                    )
                rows.append(read[:, layers.prefix + place].cpu())
            part = torch.stack(rows)
            total = part if total is None else total + part
    assert total is not None
    return total / len(used)


def _table(
    view: SentUpdate, layers: Layers, state: Mapping[str, Tensor], one: Rehearsal, lead: str
) -> dict[str, Tensor]:
    if one.mask is None or layers.unknown is None or layers.positions is None:
        return dict(state)
    name = layers.positions.removeprefix(lead)
    mask = torch.nn.functional.pad(one.mask[:1], (layers.prefix, 0))[..., None].to(
        state[name].device
    )
    return {
        **state,
        name: torch.where(mask, view.model.get_parameter(layers.unknown).detach(), state[name]),
    }


def _read_off(
    inner: torch.nn.Module, norm: torch.nn.Module, state: Mapping[str, Tensor], x: Tensor
) -> Tensor:
    seen: list[Tensor] = []
    hook = norm.register_forward_hook(lambda module, args, out: seen.append(out))
    try:
        functional_call(inner, dict(state), (x,))
    finally:
        hook.remove()
    return seen[0]


def blocks_of(model: torch.nn.Module) -> dict[int, Readers]:
    found: dict[int, Readers] = {}
    while True:
        try:
            found[len(found)] = readers_of(model, len(found))
        except UpdateError:
            return found


def _name_of(model: torch.nn.Module, module: torch.nn.Module | None) -> str:
    name: str = next(n for n, m in model.named_modules() if m is module)
    return name


def auc(inside: Tensor, outside: Tensor) -> float:
    """How often something inside has the higher score than something outside; a tie is half."""
    from scipy.stats import rankdata

    ranks = rankdata(torch.cat([inside, outside]).double().numpy())
    n, m = len(inside), len(outside)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))

"""Patch membership by a calibrated attacker.

The attacker learns on its own updates which layer to use, and at which noise level.

The span of a layer's gradient gives a binary answer, which noise or a larger batch blurs. Here a
patch is scored by its likelihood under the second moments of the gradient, at several noise levels,
relative to its likelihood under updates that did not contain it. Rehearsals show which layer and
which level reveal most.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.func import functional_call

from regauge.attacks.inversion import to_patches
from regauge.attacks.spans import candidate_inputs
from regauge.attacks.updates import Rehearsal, SentUpdate
from regauge.errors import UpdateError
from regauge.jigsaw.layers import Layers, Readers, find_layers, find_readers, unwrap_model

Tensor = torch.Tensor
LEVELS = (
    1e-14,
    1e-12,
    1e-10,
    1e-8,
    1e-6,
    1e-4,
    1e-2,
)  # noise levels, relative to the largest second moment
MAX_PASSES = 1024  # maximum number of forward passes per query
BLOCKS = 2  # number of first blocks to use: later ones are further from the pixels
SAMPLES = 48  # patches per rehearsal, inside and outside the update


@dataclass(frozen=True, eq=False)
class Moments:
    """Directions [channels, channels] of a layer's inputs, and their power in the layer's
    gradient.
    """

    basis: Tensor
    sizes: Tensor

    def log_distance(self, features: Tensor) -> Tensor:
        """Return the log Mahalanobis length of features [..., channels] at each noise level:
        [levels, ...].
        """
        directions = torch.nn.functional.normalize(features.double(), dim=-1)
        power = (directions @ self.basis).square()
        return torch.stack(
            [(power / (self.sizes + level * self.sizes.max())).sum(-1).log() for level in LEVELS]
        )


@dataclass(frozen=True, eq=False)
class Calibration:
    """What rehearsals determine.

    Attributes:
        layer: The layer to use.
        level: The index of the noise level.
        compared: Whether to subtract the score under other updates.
        auc: The AUC on the rehearsals.
        others: The moments of the rehearsals.
    """

    layer: str
    level: int
    compared: bool
    auc: float
    others: tuple[Moments, ...]


def calibrate(view: SentUpdate) -> Calibration:
    """Try every layer and noise level on rehearsals with known patches, and return the best.

    Raises:
        UpdateError: Other images and their updates are not granted, or no layer can be used.
    """
    layers, rehearsals = find_layers(view.model, view.shape), view.granted.rehearsals
    images = view.granted.images
    if len(rehearsals) < 2 or images is None:
        raise UpdateError(
            f"the number of rehearsals must be >= 2, with other images, got {len(rehearsals)}",
            hint="pass Threat(images=True)",
        )
    generator = torch.Generator().manual_seed(0)
    used = sum(len(r.inputs) for r in rehearsals)
    outside = to_patches(images[used:] if len(images) > used else images, layers.patch[0]).flatten(
        0, 1
    )
    outside = outside[torch.randperm(len(outside), generator=generator)[:SAMPLES]]
    best: Calibration | None = None
    failure: UpdateError | None = None
    for name in available_layers(view, layers):
        try:
            _layer_inputs(view, layers, name, outside[:1], rehearsals[:1])
        except UpdateError as error:  # windows or merged patches: use the layers before them
            failure = error
            continue
        moments = [
            gradient_moments(replace(view, update=r.update), layers, name) for r in rehearsals
        ]
        aucs: dict[tuple[int, bool], list[float]] = {}
        for index, rehearsal in enumerate(rehearsals):
            inside = to_patches(rehearsal.inputs.cpu(), layers.patch[0]).flatten(0, 1)
            inside = inside[torch.randperm(len(inside), generator=generator)[:SAMPLES]]
            others = [m for i, m in enumerate(moments) if i != index]
            contexts = [r for i, r in enumerate(rehearsals) if i != index]
            plain, relative = _scores(
                view,
                layers,
                name,
                torch.cat([inside, outside.to(inside)]),
                contexts,
                moments[index],
                others,
            )
            for level in range(len(LEVELS)):
                for compared, scores in ((False, plain[level]), (True, relative[level])):
                    aucs.setdefault((level, compared), []).append(
                        auc(scores[: len(inside)], scores[len(inside) :])
                    )
        for (level, compared), values in aucs.items():
            mean = sum(values) / len(values)
            if best is None or mean > best.auc:
                best = Calibration(name, level, compared, mean, tuple(moments))
    if best is None:
        assert failure is not None
        raise failure
    return best


def calibrated_membership(
    view: SentUpdate, candidates: Tensor, calibration: Calibration | None = None
) -> Tensor:
    """Score patches [count, values]: the higher, the more likely they were in an image behind the
    update.

    Sees: the gradients of the patch embedding and of the query, key and value weights of the first
        two blocks sent; batch size; other images of the kind, and their updates by the client's
        code.
    Recovers: whether a patch is in the batch.
    Why it works: a layer's gradient is a sum over its inputs, so that its second moments favour
        them; a patch stands out against updates that did not contain it. Inputs of deeper blocks
        are estimated by inserting the patch into other images. Layer, noise level and comparison
        are chosen on rehearsals.
    What stops it: batches with many more tokens than channels; noise; few layers sent.
    Floor: AUC 0.5.
    Ceiling: 1.
    References: DAGER (2405.15586), for spans; Carlini et al. 2022 (LiRA), for scores relative to
        those of models or updates without the sample.
    Cost: an eigenvalue decomposition, and for deeper blocks up to a thousand forward passes.
    """
    calibration = calibration or calibrate(view)
    layers = find_layers(view.model, view.shape)
    moments = gradient_moments(view, layers, calibration.layer)
    plain, relative = _scores(
        view,
        layers,
        calibration.layer,
        candidates,
        view.granted.rehearsals,
        moments,
        calibration.others,
    )
    return (relative if calibration.compared else plain)[calibration.level]


def available_layers(view: SentUpdate, layers: Layers) -> list[str]:
    """Return the usable layers that are sent: "patches", "block 0", ..."""
    names = ["patches"] if layers.weight in view.grads else []
    blocks = [
        block
        for block, readers in attention_blocks(view.model).items()
        if all(weight in view.grads for weight in readers.names)
    ]
    names += [f"block {block}" for block in blocks[:BLOCKS]]
    if not names:
        raise UpdateError(
            "the update must contain the gradient of the patch embedding or an attention, got none",
            hint="all were withheld or frozen",
        )
    return names


def gradient_moments(view: SentUpdate, layers: Layers, name: str) -> Moments:
    """Return the second moments of a layer's gradient."""
    if name == "patches":
        grads = [view.grad(layers.weight, "the gradient of the patch embedding").flatten(1)]
    else:
        readers = attention_blocks(view.model)[int(name.split()[1])]
        grads = [view.grad(n, "the gradient of an attention") for n in readers.names]
        grads = [grad.T if readers.is_conv1d else grad for grad in grads]
    parts = [grad.detach().double().cpu() for grad in grads]
    stacked = torch.cat([p / p.norm() for p in parts if bool(p.any())] or parts)
    if not bool(stacked.any()):
        raise UpdateError(
            f"the gradient of {name} must not be zero", hint="check that the layer was trained"
        )
    sizes, basis = torch.linalg.eigh(stacked.T @ stacked)
    return Moments(basis, sizes.clamp(min=0))


def _scores(
    view: SentUpdate,
    layers: Layers,
    name: str,
    candidates: Tensor,
    contexts: Sequence[Rehearsal],
    moments: Moments,
    others: Sequence[Moments],
) -> tuple[Tensor, Tensor]:
    """Return scores [levels, candidates] under an update's moments, plain and relative to the
    moments of others.
    """
    features = _layer_inputs(
        view, layers, name, candidates, contexts
    )  # [positions, candidates, channels]
    plain = -moments.log_distance(features)
    relative = (
        plain
        if not others
        else plain + torch.stack([m.log_distance(features) for m in others]).mean(0)
    )
    return plain.max(1).values, relative.max(1).values


def _layer_inputs(
    view: SentUpdate, layers: Layers, name: str, candidates: Tensor, contexts: Sequence[Rehearsal]
) -> Tensor:
    """Return a layer's input for each candidate at each possible position: exact for the first
    layers, in the context of other patches for deeper ones.
    """
    if name == "patches":
        return candidates[None].cpu()
    readers = attention_blocks(view.model)[int(name.split()[1])]
    if name == "block 0":
        return torch.stack(candidate_inputs(view, layers, readers, candidates))
    return features_in_context(view, layers, readers, candidates, contexts)


def features_in_context(
    view: SentUpdate,
    layers: Layers,
    readers: Readers,
    candidates: Tensor,
    contexts: Sequence[Rehearsal],
) -> Tensor:
    """Return the output of a deeper norm for candidates inserted into other images.

    Under MJP the images keep their own puzzle and the unknown embedding at its positions.

    Returns:
        [positions, candidates, channels], averaged over images.
    """
    model = copy.deepcopy(view.model).eval()
    inner, lead = unwrap_model(model)
    norm = inner.get_submodule(_name_of(unwrap_model(view.model)[0], readers.norm))
    state = {n: p.detach() for n, p in inner.named_parameters()}
    max_images = max(1, MAX_PASSES // len(candidates))
    chosen_contexts = list(contexts[: max(1, min(len(contexts), max_images // layers.cells))])
    positions = (
        torch.linspace(
            0, layers.cells - 1, min(layers.cells, max(1, max_images // len(chosen_contexts)))
        )
        .round()
        .long()
    )
    (p, q), (_, width) = layers.patch, layers.grid
    like = next(iter(state.values()))
    patches = candidates.to(like).view(len(candidates), view.shape[0], p, q)
    total: Tensor | None = None
    with torch.no_grad():
        for context in chosen_contexts:
            parameters = _masked_state(view, layers, state, context, lead)
            rows = []
            for position in positions.tolist():
                x = context.inputs[:1].to(like).repeat(len(candidates), 1, 1, 1)
                r, c = position // width * p, position % width * q
                x[:, :, r : r + p, c : c + q] = patches
                output = _norm_output(inner, norm, parameters, x)
                if output.ndim != 3 or output.shape[:2] != (len(x), layers.prefix + layers.cells):
                    raise UpdateError(
                        "blocks must read one token per patch, got windows or merged patches",
                        hint="models like Swin are not supported",
                    )
                rows.append(output[:, layers.prefix + position].cpu())
            stacked = torch.stack(rows)
            total = stacked if total is None else total + stacked
    assert total is not None
    return total / len(chosen_contexts)


def _masked_state(
    view: SentUpdate, layers: Layers, state: Mapping[str, Tensor], rehearsal: Rehearsal, lead: str
) -> dict[str, Tensor]:
    """Return the parameters with the unknown embedding at the masked positions of a rehearsal."""
    if rehearsal.mask is None or layers.unknown is None or layers.positions is None:
        return dict(state)
    name = layers.positions.removeprefix(lead)
    mask = torch.nn.functional.pad(rehearsal.mask[:1], (layers.prefix, 0))[..., None].to(
        state[name].device
    )
    return {
        **state,
        name: torch.where(mask, view.model.get_parameter(layers.unknown).detach(), state[name]),
    }


def _norm_output(
    inner: torch.nn.Module, norm: torch.nn.Module, state: Mapping[str, Tensor], x: Tensor
) -> Tensor:
    """Run the model and return the output of one of its norms."""
    outputs: list[Tensor] = []
    hook = norm.register_forward_hook(lambda module, args, out: outputs.append(out))
    try:
        functional_call(inner, dict(state), (x,))
    finally:
        hook.remove()
    return outputs[0]


def attention_blocks(model: torch.nn.Module) -> dict[int, Readers]:
    """Return the query, key and value weights of each block, by number."""
    blocks: dict[int, Readers] = {}
    while True:
        try:
            blocks[len(blocks)] = find_readers(model, len(blocks))
        except UpdateError:
            return blocks


def _name_of(model: torch.nn.Module, module: torch.nn.Module | None) -> str:
    """Return the name of a submodule."""
    name: str = next(n for n, m in model.named_modules() if m is module)
    return name


def auc(inside: Tensor, outside: Tensor) -> float:
    """Return the probability that an inside score exceeds an outside one; ties count half."""
    from scipy.stats import rankdata

    ranks = rankdata(torch.cat([inside, outside]).double().numpy())
    n, m = len(inside), len(outside)
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))

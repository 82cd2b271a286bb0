"""Images from the gradients of the embedding, in closed form, on unmodified ViTs.

A token is z_n = W x_n + b + p_n, so that the gradient by its position, g_n = dL/dp_n, is the one by
the token, and dL/dW = sum over n of g_n x_n^T: as many linear equations for the patches as W has
rows. At batch 1 that is all there is to it; the blocks, the norms and the loss do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from regauge.attacks.inversion import to_images, to_patches
from regauge.attacks.updates import Rehearsal, SentUpdate
from regauge.errors import UpdateError
from regauge.jigsaw.layers import Layers, layers_of
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor
SILENT = 1e-9  # of the largest row: a row of gradients as small as this was not used
TRUSTED = 1e-10  # of the largest singular value: what is smaller carries rounding alone
EXACT = 1e-4  # a factor as near to 1 is 1
REACH = 1 / 8  # of the side: how far the pixels of images look alike, where nothing else is known


@dataclass(frozen=True, eq=False)
class Solved:
    """What least squares found: the patches [cells, values], which of them have equations of their
    own (`known`), and how well it stood: the `rank` of as many unknown rows (`unknowns`), their
    condition number, the share of the gradient that no patches explain, and how much of the answer
    is the prior.
    """

    patches: Tensor
    known: Tensor
    rank: int
    unknowns: int
    condition: float
    residual: float
    assumed: float


@dataclass(frozen=True, eq=False)
class Prior:
    """What is expected of patches before anything is seen: `mean` [cells, values], how cells go
    together [cells, cells], and the values of a patch.
    """

    mean: Tensor
    cells: Tensor
    values: Tensor


def embedding_least_squares(view: SentUpdate, *, plain: bool = False) -> tuple[Tensor, Solved]:
    """The image that an update was made of, [1, channels, height, width] in the model's units, by
    one least squares.

    Sees: the gradients by the patch embedding and by the table of positions; other images of the
    kind, and what the client's code makes of them, if they are granted. Recovers: at batch 1 the
    image, to rounding, on any ViT that is as wide as it has patches; of several images the mixture
    that their gradients make of them; under MJP the patches that kept their positions, and of the
    others a mean. Why it works: dL/dW is the sum of g_n x_n^T, and g_n is the gradient by position
    n. Where equations are too few or noisy, a Gaussian prior says what images are like; how far to
    trust it against the equations is learned from rehearsals (a Wiener filter), or else read off
    the equations (evidence). `plain` leaves all that out. What stops it: one of the two gradients
    not sent; noise; larger batches. Local steps on one image do not: both gradients add up over
    them alike. Floor: the mean image. Ceiling: exact. References: APRIL (2112.14087), for positions
    that give tokens' gradients away; MacKay
    1992. Cost: one SVD.
    """
    layers = layers_of(view.model, view.shape)
    prior = prior_of(view.granted.images, layers, view.shape[0])
    system = system_of(view, layers, prior)
    if plain:
        found = least_squares(system.rows, system.whole)
    else:
        spectrum = spectrum_of(system)
        rehearsed = [_rehearsed(view, layers, prior, one) for one in view.granted.rehearsals]
        gain = wiener(rehearsed, spectrum) if rehearsed else evidence_gain(spectrum)
        found = solved_by(spectrum, gain)
    patches, count = prior.mean.clone(), int(system.known.sum())
    patches[system.known] = found.patches[:count]
    if count < len(found.patches):
        patches[~system.known] = found.patches[count:].expand(layers.cells - count, -1)
    solved = replace(found, patches=patches, known=system.known)
    return as_image(patches, layers, view.shape[0]).to(next(view.model.parameters()).dtype), solved


@dataclass(frozen=True, eq=False)
class System:
    """The equations rows^T X = whole, and what is expected of X. `known` are the cells that have a
    row of their own; `mean_of` says which patches of an image each row of X is the mean of, [rows,
    cells].
    """

    rows: Tensor
    whole: Tensor
    prior: Prior
    known: Tensor
    mean_of: Tensor


def system_of(view: SentUpdate, layers: Layers, prior: Prior) -> System:
    """The equations that an update gives. Rows of the table that no patch used are out; under MJP
    their patches share one row, that of their mean.
    """
    if layers.positions is None:
        name = type(layers.inner).__name__
        raise UpdateError(
            f"{name} has no table of absolute positions, whose gradient this attack needs",
            hint="try span membership",
        )
    whole = (
        view.slope(layers.weight, "the gradient by the patch embedding")
        .detach()
        .double()
        .flatten(1)
        .cpu()
    )
    rows = position_slopes(view, layers)
    silent = silent_rows(rows)
    if view.granted.mask is not None and layers.unknown is not None:
        silent = silent | view.granted.mask[0].cpu()
    if bool(silent.all()):
        raise UpdateError(
            "the gradient by the table of positions is zero in every row",
            hint="it was frozen, or every patch had the unknown one",
        )
    at = torch.eye(layers.cells, dtype=torch.float64)[~silent]
    used = rows[~silent]
    together = (
        None
        if layers.unknown is None or not bool(silent.any())
        else view.slopes.get(layers.unknown)
    )
    if together is not None and bool(together.any()):
        used = torch.cat([used, together.detach().double().cpu()[None]])
        at = torch.cat([at, silent.double()[None] / silent.sum()])
    return System(
        used, whole, Prior(at @ prior.mean, at @ prior.cells @ at.T, prior.values), ~silent, at
    )


@dataclass(frozen=True, eq=False)
class Spectrum:
    """A system in the basis in which the prior and the equations are diagonal: what is `seen`
    [rank, values] is s times the unknown coefficients, and noise. `rest` is what no X explains.
    """

    system: System
    left: Tensor
    s: Tensor
    right: Tensor
    root: Tensor
    basis: Tensor
    scale: Tensor
    seen: Tensor
    rest: float

    def coefficients(self, patches: Tensor) -> Tensor:
        """Patches [rows, values] in this basis."""
        out: Tensor = (
            self.right
            @ torch.linalg.solve(self.root, patches - self.system.prior.mean)
            @ self.basis
        )
        return out


def spectrum_of(system: System) -> Spectrum:
    scale, basis = torch.linalg.eigh(system.prior.values)
    root = _root(system.prior.cells)
    left, s, right = torch.linalg.svd(system.rows.T @ root, full_matrices=False)
    centred = (system.whole - system.rows.T @ system.prior.mean) @ basis
    seen = left.T @ centred
    rest = float((centred - left @ seen).square().sum())
    return Spectrum(
        system,
        left,
        s.clamp(min=1e-300),
        right,
        root,
        basis,
        scale.clamp(min=1e-9 * float(scale[-1])),
        seen,
        rest,
    )


def solved_by(spectrum: Spectrum, gain: Tensor) -> Solved:
    """X with coefficients gain * seen / s."""
    system = spectrum.system
    patches = (
        system.prior.mean
        + spectrum.root
        @ (spectrum.right.T @ (gain * spectrum.seen / spectrum.s[:, None]))
        @ spectrum.basis.T
    )
    plain = torch.linalg.svdvals(system.rows)
    kept = plain > TRUSTED * plain[0]
    left = spectrum.rest**0.5 / float(system.whole.norm().clamp(min=1e-300))
    return Solved(
        patches,
        system.known,
        int(kept.sum()),
        len(system.rows),
        float(plain[0] / plain[-1]),
        left,
        float((1 - gain).mean()),
    )


def evidence_gain(spectrum: Spectrum) -> Tensor:
    """How far to trust what is seen, read off itself: the sizes of prior and noise under which it
    is most likely.
    """
    s, scale, system = spectrum.s, spectrum.scale, spectrum.system
    kept = s > TRUSTED * s[0]
    more = (system.whole.shape[0] - int(kept.sum())) * system.whole.shape[1]
    if more and spectrum.rest < EXACT**2 * float(
        system.whole.square().sum()
    ):  # patches explain all but rounding, and the rest says how large that is
        amount, noise = 1.0, spectrum.rest / more
    else:
        amount, noise = evidence(spectrum.seen[kept], s[kept], scale)
    power = amount * scale[None] * s[:, None].square()
    return torch.where(kept[:, None], power / (power + noise), torch.zeros_like(power))


def _rehearsed(
    view: SentUpdate, layers: Layers, prior: Prior, one: Rehearsal
) -> tuple[Spectrum, Tensor]:
    """A rehearsal's equations, and the coefficients that were to be found in them: of the mean of
    the images that it was made of.
    """
    granted = replace(
        view.granted, mask=one.mask if view.granted.mask is not None else None, rehearsals=()
    )
    spectrum = spectrum_of(
        system_of(replace(view, update=one.update, granted=granted), layers, prior)
    )
    patches = to_patches(one.read.double().cpu(), layers.patch[0]).mean(0)
    return spectrum, spectrum.coefficients(spectrum.system.mean_of @ patches)


def wiener(
    rehearsed: Sequence[tuple[Spectrum, Tensor]],
    spectrum: Spectrum,
    *,
    bands: tuple[int, int] = (24, 12),
) -> Tensor:
    """For each coefficient the factor by which what is seen should be taken, in the mean over
    rehearsals: coefficients are pooled in bands of alike singular values and alike eigenvalues of
    the prior.
    """
    count = [spectrum.seen.shape[0], spectrum.seen.shape[1]]
    shape = tuple(min(b, n) for b, n in zip(bands, count, strict=True))
    both, power = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for one, true in rehearsed:
        told = one.seen / one.s[:, None]
        told = torch.where((one.s > TRUSTED * one.s[0])[:, None], told, torch.zeros_like(told))
        for sums, values in ((both, told * true), (power, told.square())):
            sums += _pooled(values, shape)
    gain = (both / power.clamp(min=1e-300)).clamp(0, 1)
    gain = torch.where(gain > 1 - EXACT, torch.ones_like(gain), gain)
    whole = gain[_band(count[0], shape[0])][:, _band(count[1], shape[1])]
    return torch.where(
        (spectrum.s > TRUSTED * spectrum.s[0])[:, None], whole, torch.zeros_like(whole)
    )


def _pooled(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    rows = torch.zeros(shape[0], values.shape[1], dtype=values.dtype).index_add_(
        0, _band(values.shape[0], shape[0]), values
    )
    return torch.zeros(shape[0], shape[1], dtype=values.dtype).index_add_(
        1, _band(values.shape[1], shape[1]), rows
    )


def _band(count: int, bands: int) -> Tensor:
    return torch.arange(count) * bands // count


def as_image(patches: Tensor, layers: Layers, channels: int) -> Tensor:
    """One image of patches [cells, values]."""
    (h, w), (p, q) = layers.grid, layers.patch
    if h == w and p == q:
        return to_images(patches[None], p, channels)
    return (
        patches.view(1, h, w, channels, p, q)
        .permute(0, 3, 1, 4, 2, 5)
        .reshape(1, channels, h * p, w * q)
    )


def position_slopes(view: SentUpdate, layers: Layers) -> Tensor:
    """The gradients by the patches' positions [cells, width], less what MJP's regression of
    positions has in them, which the server computes itself.
    """
    assert layers.positions is not None
    table = (
        view.slope(layers.positions, "the gradient by the table of positions")
        .detach()
        .double()
        .cpu()
    )
    table = layers.slopes_as_used(table)
    model = view.model
    if not isinstance(model, MaskedJigsaw) or model.localizer is None:
        return table
    own = (
        model.get_parameter(layers.positions)
        .detach()[0, layers.prefix :]
        .clone()
        .requires_grad_(True)
    )
    mask = torch.zeros(1, layers.cells, dtype=torch.bool)
    if (
        model.variant.unknown
    ):  # rows under the unknown embedding are not regressed: they are granted, or zero
        mask = (table == 0).all(1)[None] if view.granted.mask is None else view.granted.mask.cpu()
    loss = model.weight_at(0) * model.regression(mask, own)
    (known,) = torch.autograd.grad(loss, own)
    found: Tensor = table - known.double().cpu()
    return found


def silent_rows(rows: Tensor) -> Tensor:
    """The rows of a table that no input used: their gradients are zero, next to the others'."""
    size: Tensor = torch.linalg.vector_norm(rows, dim=1)
    silent: Tensor = size <= SILENT * size.max().clamp(min=1e-300)
    return silent


def least_squares(rows: Tensor, whole: Tensor) -> Solved:
    """X of rows^T X = whole by a truncated SVD, with nothing assumed."""
    a, s, bt = torch.linalg.svd(rows.T, full_matrices=False)
    kept = s > TRUSTED * s[0]
    coordinates = a.T @ whole
    patches = bt.T @ (torch.where(kept, 1 / s, torch.zeros_like(s))[:, None] * coordinates)
    return Solved(
        patches,
        torch.ones(len(rows), dtype=torch.bool),
        int(kept.sum()),
        len(rows),
        float(s[0] / s[-1]),
        _left(whole, a, kept),
        0.0,
    )


def evidence(seen: Tensor, s: Tensor, scale: Tensor, *, steps: int = 24) -> tuple[float, float]:
    """How large the prior is, and the variance of the noise: coordinates `seen` [rank, values] have
    the variance amount * s^2 * scale + noise.
    """
    expected = s[:, None].square() * scale[None]
    power = float(seen.square().mean()) + 1e-300

    def worth(amount: float, noise: float) -> float:
        variance = amount * expected + noise
        return -float((variance.log() + seen.square() / variance).sum())

    noises = torch.logspace(-16, 1, steps=steps, dtype=torch.float64) * power
    amounts = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0)
    best = max(((a, float(n)) for a in amounts for n in noises), key=lambda pair: worth(*pair))
    for factor in (2.0, 1.3):  # finer, around the best
        best = max(
            (
                (best[0] * factor**i, best[1] * factor**j)
                for i in (-1, 0, 1)
                for j in (-2, -1, 0, 1, 2)
            ),
            key=lambda pair: worth(*pair),
        )
    return best


def prior_of(images: Tensor | None, layers: Layers, channels: int) -> Prior:
    """Of images of the kind, their own mean and covariances; of none, that pixels look alike the
    nearer they are, and channels more or less.
    """
    if images is not None and len(images) > 1:
        return _learned(to_patches(images.double().cpu(), layers.patch[0]))
    (h, w), (p, q) = layers.grid, layers.patch
    reach = REACH * max(h * p, w * q)
    cells = _alike(h, w, float(p), reach)
    colours = torch.full((channels, channels), 0.9, dtype=torch.float64).fill_diagonal_(1.0)
    return Prior(
        torch.zeros(h * w, channels * p * q, dtype=torch.float64),
        cells,
        torch.kron(colours, _alike(p, q, 1.0, reach)),
    )


def _learned(patches: Tensor) -> Prior:
    mean = patches.mean(0)
    centred = patches - mean
    cells = torch.einsum("nip,njp->ij", centred, centred) / centred.shape[0] / centred.shape[2]
    values = torch.einsum("nip,niq->pq", centred, centred) / centred.shape[0] / centred.shape[1]
    cells = cells / cells.diagonal().mean()
    cells, values = (
        m + 1e-3 * m.diagonal().mean() * torch.eye(len(m), dtype=m.dtype) for m in (cells, values)
    )
    return Prior(mean, cells, values)


def _alike(h: int, w: int, step: float, reach: float) -> Tensor:
    """exp(-distance / reach) between the cells of a grid."""
    y, x = torch.meshgrid(
        torch.arange(h, dtype=torch.float64), torch.arange(w, dtype=torch.float64), indexing="ij"
    )
    at = torch.stack([y.flatten(), x.flatten()], 1) * step
    found: Tensor = (-torch.cdist(at, at) / reach).exp()
    return found


def _root(m: Tensor) -> Tensor:
    values, basis = torch.linalg.eigh(m)
    found: Tensor = basis * values.clamp(min=1e-12 * float(values[-1])).sqrt() @ basis.T
    return found


def _left(whole: Tensor, a: Tensor, kept: Tensor) -> float:
    inside = a[:, kept] @ (a[:, kept].T @ whole)
    return float((whole - inside).norm() / whole.norm().clamp(min=1e-300))

"""Images from the gradients of the embedding, in closed form, on unmodified ViTs.

A token is z_n = W x_n + b + p_n, so that the gradient of its position, g_n = dL/dp_n, is the
gradient of the token, and dL/dW = sum over n of g_n x_n^T: as many linear equations for the patches
as W has rows. At batch size 1 this suffices; the blocks, the norms and the loss do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from regauge.attacks.inversion import to_images, to_patches
from regauge.attacks.updates import Rehearsal, SentUpdate
from regauge.errors import UpdateError
from regauge.jigsaw.layers import Layers, find_layers
from regauge.jigsaw.wrapper import MaskedJigsaw

Tensor = torch.Tensor
UNUSED = 1e-9  # relative to the largest row: rows with smaller gradients were not used
TRUSTED = 1e-10  # relative to the largest singular value: smaller ones are rounding
EXACT = 1e-4  # a factor this near to 1 is taken as 1
REACH = 1 / 8  # of the image side: default correlation length of pixels


@dataclass(frozen=True, eq=False)
class LeastSquaresResult:
    """The solution of the least squares.

    Attributes:
        patches: The patches, [cells, values].
        known: Which of them have equations of their own.
        rank: Numerical rank of the equations.
        unknowns: Number of unknown rows.
        condition: Condition number.
        residual: Share of the gradient that no patches explain.
        assumed: Share of the solution that comes from the prior.
    """

    patches: Tensor
    known: Tensor
    rank: int
    unknowns: int
    condition: float
    residual: float
    assumed: float


@dataclass(frozen=True, eq=False)
class PatchPrior:
    """A Gaussian prior of patches: `mean` [cells, values], covariance of `cells`, and covariance of
    the `values` in a patch.
    """

    mean: Tensor
    cells: Tensor
    values: Tensor


def embedding_least_squares(
    view: SentUpdate, *, plain: bool = False
) -> tuple[Tensor, LeastSquaresResult]:
    """Recover the image behind an update by solving one least-squares problem.

    The image has the shape [1, channels, height, width], in the model's units.

    Sees: the gradients of the patch embedding and of the position table; in some threat
        models also other images of the kind, and their updates by the client's code.
    Recovers: at batch size 1 the image, to rounding, on any ViT at least as wide as its number of
        patches; for several images the mixture that their gradients form; under MJP the patches
        that kept their positions, and the mean of the others.
    Why it works: dL/dW is the sum of g_n x_n^T, and g_n is the gradient of position n. Where
        equations are too few or noisy, a Gaussian prior describes the images; its weight against
        the equations is learned from rehearsals (a Wiener filter) or estimated from the equations
        (evidence). `plain` leaves out the prior.
    What stops it: withholding one of the two gradients; noise; larger batches. Local steps on one
        image do not: both gradients accumulate alike.
    Floor: the mean image.
    Ceiling: the image itself.
    References: APRIL (2112.14087), where position gradients reveal those of tokens; MacKay 1992.
    Cost: one SVD.
    """
    layers = find_layers(view.model, view.shape)
    prior = build_prior(view.granted.images, layers, view.shape[0])
    system = build_system(view, layers, prior)
    if plain:
        solution = solve_least_squares(system.rows, system.total)
    else:
        spectrum = diagonalize(system)
        rehearsals = [
            _rehearsal_system(view, layers, prior, rehearsal)
            for rehearsal in view.granted.rehearsals
        ]
        gain = fit_wiener_gain(rehearsals, spectrum) if rehearsals else estimate_gain(spectrum)
        solution = solve_with_gain(spectrum, gain)
    patches, count = prior.mean.clone(), int(system.known.sum())
    patches[system.known] = solution.patches[:count]
    if count < len(solution.patches):
        patches[~system.known] = solution.patches[count:].expand(layers.cells - count, -1)
    result = replace(solution, patches=patches, known=system.known)
    return assemble_image(patches, layers, view.shape[0]).to(
        next(view.model.parameters()).dtype
    ), result


@dataclass(frozen=True, eq=False)
class LinearSystem:
    """The equations rows^T X = total, and the prior of X.

    `known` are the cells with a row of their own. `mean_of` [rows, cells] gives the patches whose
    mean each row of X is.
    """

    rows: Tensor
    total: Tensor
    prior: PatchPrior
    known: Tensor
    mean_of: Tensor


def build_system(view: SentUpdate, layers: Layers, prior: PatchPrior) -> LinearSystem:
    """Build the equations that an update gives.

    Rows of the table that no patch used are left out; under MJP their patches share one row, that
    of their mean.
    """
    if layers.positions is None:
        name = type(layers.inner).__name__
        raise UpdateError(
            f"the model must have a table of absolute positions, got {name} without one",
            hint="use span membership instead",
        )
    total = (
        view.grad(layers.weight, "the gradient of the patch embedding")
        .detach()
        .double()
        .flatten(1)
        .cpu()
    )
    rows = position_grads(view, layers)
    is_unused = unused_rows(rows)
    if view.granted.mask is not None and layers.unknown is not None:
        is_unused = is_unused | view.granted.mask[0].cpu()
    if bool(is_unused.all()):
        raise UpdateError(
            "the gradient of the position table must have a nonzero row, got none",
            hint="the table was frozen, or every patch had the unknown embedding",
        )
    mean_of = torch.eye(layers.cells, dtype=torch.float64)[~is_unused]
    used = rows[~is_unused]
    unknown_grad = (
        None
        if layers.unknown is None or not bool(is_unused.any())
        else view.grads.get(layers.unknown)
    )
    if unknown_grad is not None and bool(unknown_grad.any()):
        used = torch.cat([used, unknown_grad.detach().double().cpu()[None]])
        mean_of = torch.cat([mean_of, is_unused.double()[None] / is_unused.sum()])
    return LinearSystem(
        used,
        total,
        PatchPrior(mean_of @ prior.mean, mean_of @ prior.cells @ mean_of.T, prior.values),
        ~is_unused,
        mean_of,
    )


@dataclass(frozen=True, eq=False)
class Spectrum:
    """A system in the basis in which the prior and the equations are diagonal.

    `observed` [rank, values] is s times the unknown coefficients, plus noise. `rest` is the squared
    norm of the part that no X explains.
    """

    system: LinearSystem
    left: Tensor
    s: Tensor
    right: Tensor
    root: Tensor
    basis: Tensor
    scale: Tensor
    observed: Tensor
    rest: float

    def coefficients(self, patches: Tensor) -> Tensor:
        """Return patches [rows, values] in this basis."""
        out: Tensor = (
            self.right
            @ torch.linalg.solve(self.root, patches - self.system.prior.mean)
            @ self.basis
        )
        return out


def diagonalize(system: LinearSystem) -> Spectrum:
    """Diagonalize the prior and the equations of a system."""
    scale, basis = torch.linalg.eigh(system.prior.values)
    root = _root(system.prior.cells)
    left, s, right = torch.linalg.svd(system.rows.T @ root, full_matrices=False)
    centred = (system.total - system.rows.T @ system.prior.mean) @ basis
    observed = left.T @ centred
    rest = float((centred - left @ observed).square().sum())
    return Spectrum(
        system,
        left,
        s.clamp(min=1e-300),
        right,
        root,
        basis,
        scale.clamp(min=1e-9 * float(scale[-1])),
        observed,
        rest,
    )


def solve_with_gain(spectrum: Spectrum, gain: Tensor) -> LeastSquaresResult:
    """Return the X with coefficients gain * observed / s."""
    system = spectrum.system
    patches = (
        system.prior.mean
        + spectrum.root
        @ (spectrum.right.T @ (gain * spectrum.observed / spectrum.s[:, None]))
        @ spectrum.basis.T
    )
    singular_values = torch.linalg.svdvals(system.rows)
    is_used = singular_values > TRUSTED * singular_values[0]
    residual = spectrum.rest**0.5 / float(system.total.norm().clamp(min=1e-300))
    return LeastSquaresResult(
        patches,
        system.known,
        int(is_used.sum()),
        len(system.rows),
        float(singular_values[0] / singular_values[-1]),
        residual,
        float((1 - gain).mean()),
    )


def estimate_gain(spectrum: Spectrum) -> Tensor:
    """Estimate the gain of each coefficient from the system itself: the most likely scales of prior
    and noise.
    """
    s, scale, system = spectrum.s, spectrum.scale, spectrum.system
    is_used = s > TRUSTED * s[0]
    surplus = (system.total.shape[0] - int(is_used.sum())) * system.total.shape[1]
    # Patches explain all but rounding: the rest measures its size.
    if surplus and spectrum.rest < EXACT**2 * float(system.total.square().sum()):
        amount, noise = 1.0, spectrum.rest / surplus
    else:
        amount, noise = maximize_evidence(spectrum.observed[is_used], s[is_used], scale)
    power = amount * scale[None] * s[:, None].square()
    return torch.where(is_used[:, None], power / (power + noise), torch.zeros_like(power))


def _rehearsal_system(
    view: SentUpdate, layers: Layers, prior: PatchPrior, rehearsal: Rehearsal
) -> tuple[Spectrum, Tensor]:
    """Return a rehearsal's equations and its true coefficients: those of the mean of its images."""
    granted = replace(
        view.granted, mask=rehearsal.mask if view.granted.mask is not None else None, rehearsals=()
    )
    spectrum = diagonalize(
        build_system(replace(view, update=rehearsal.update, granted=granted), layers, prior)
    )
    patches = to_patches(rehearsal.inputs.double().cpu(), layers.patch[0]).mean(0)
    return spectrum, spectrum.coefficients(spectrum.system.mean_of @ patches)


def fit_wiener_gain(
    rehearsals: Sequence[tuple[Spectrum, Tensor]],
    spectrum: Spectrum,
    *,
    bands: tuple[int, int] = (24, 12),
) -> Tensor:
    """Fit the gain of each coefficient on rehearsals (a Wiener filter).

    Coefficients are pooled in bands of similar singular values and similar eigenvalues of the
    prior.

    Args:
        rehearsed: Systems of rehearsals with their true coefficients.
        spectrum: The system to solve.
        bands: Number of bands of singular values and of eigenvalues.

    Returns:
        The gain of each coefficient, in [0, 1].
    """
    count = [spectrum.observed.shape[0], spectrum.observed.shape[1]]
    shape = tuple(min(b, n) for b, n in zip(bands, count, strict=True))
    cross, power = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for rehearsal, truth in rehearsals:
        estimate = rehearsal.observed / rehearsal.s[:, None]
        estimate = torch.where(
            (rehearsal.s > TRUSTED * rehearsal.s[0])[:, None], estimate, torch.zeros_like(estimate)
        )
        for sums, values in ((cross, estimate * truth), (power, estimate.square())):
            sums += _pool(values, shape)
    gain = (cross / power.clamp(min=1e-300)).clamp(0, 1)
    gain = torch.where(gain > 1 - EXACT, torch.ones_like(gain), gain)
    expanded = gain[_band(count[0], shape[0])][:, _band(count[1], shape[1])]
    return torch.where(
        (spectrum.s > TRUSTED * spectrum.s[0])[:, None], expanded, torch.zeros_like(expanded)
    )


def _pool(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sum values over bands of rows and columns."""
    rows = torch.zeros(shape[0], values.shape[1], dtype=values.dtype).index_add_(
        0, _band(values.shape[0], shape[0]), values
    )
    return torch.zeros(shape[0], shape[1], dtype=values.dtype).index_add_(
        1, _band(values.shape[1], shape[1]), rows
    )


def _band(count: int, bands: int) -> Tensor:
    """Return the band of each index."""
    return torch.arange(count) * bands // count


def assemble_image(patches: Tensor, layers: Layers, channels: int) -> Tensor:
    """Assemble one image from patches [cells, values]."""
    (h, w), (p, q) = layers.grid, layers.patch
    if h == w and p == q:
        return to_images(patches[None], p, channels)
    return (
        patches.view(1, h, w, channels, p, q)
        .permute(0, 3, 1, 4, 2, 5)
        .reshape(1, channels, h * p, w * q)
    )


def position_grads(view: SentUpdate, layers: Layers) -> Tensor:
    """Return the gradients of the patch positions [cells, width] without the part of MJP's position
    regression, which the server computes itself.
    """
    assert layers.positions is not None
    table = (
        view.grad(layers.positions, "the gradient of the position table").detach().double().cpu()
    )
    table = layers.used_position_grads(table)
    model = view.model
    if not isinstance(model, MaskedJigsaw) or model.localizer is None:
        return table
    positions = (
        model.get_parameter(layers.positions)
        .detach()[0, layers.prefix :]
        .clone()
        .requires_grad_(True)
    )
    mask = torch.zeros(1, layers.cells, dtype=torch.bool)
    if model.variant.unknown:  # rows under the unknown embedding are not regressed
        mask = (table == 0).all(1)[None] if view.granted.mask is None else view.granted.mask.cpu()
    loss = model.weight_at(0) * model.regression(mask, positions)
    (regression_grad,) = torch.autograd.grad(loss, positions)
    remaining: Tensor = table - regression_grad.double().cpu()
    return remaining


def unused_rows(rows: Tensor) -> Tensor:
    """Return the rows of a table that no input used: their gradients are zero next to the
    others.
    """
    size: Tensor = torch.linalg.vector_norm(rows, dim=1)
    is_unused: Tensor = size <= UNUSED * size.max().clamp(min=1e-300)
    return is_unused


def solve_least_squares(rows: Tensor, total: Tensor) -> LeastSquaresResult:
    """Solve rows^T X = total by a truncated SVD, without a prior."""
    a, s, bt = torch.linalg.svd(rows.T, full_matrices=False)
    is_used = s > TRUSTED * s[0]
    coordinates = a.T @ total
    patches = bt.T @ (torch.where(is_used, 1 / s, torch.zeros_like(s))[:, None] * coordinates)
    return LeastSquaresResult(
        patches,
        torch.ones(len(rows), dtype=torch.bool),
        int(is_used.sum()),
        len(rows),
        float(s[0] / s[-1]),
        _residual(total, a, is_used),
        0.0,
    )


def maximize_evidence(
    observed: Tensor, s: Tensor, scale: Tensor, *, steps: int = 24
) -> tuple[float, float]:
    """Find the scale of the prior and the variance of the noise that maximize the evidence.

    Coordinates `observed` [rank, values] have the variance amount * s^2 * scale + noise.
    """
    expected = s[:, None].square() * scale[None]
    power = float(observed.square().mean()) + 1e-300

    def log_evidence(amount: float, noise: float) -> float:
        variance = amount * expected + noise
        return -float((variance.log() + observed.square() / variance).sum())

    noises = torch.logspace(-16, 1, steps=steps, dtype=torch.float64) * power
    amounts = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0)
    best = max(
        ((a, float(n)) for a in amounts for n in noises), key=lambda pair: log_evidence(*pair)
    )
    for factor in (2.0, 1.3):  # finer, around the best
        best = max(
            (
                (best[0] * factor**i, best[1] * factor**j)
                for i in (-1, 0, 1)
                for j in (-2, -1, 0, 1, 2)
            ),
            key=lambda pair: log_evidence(*pair),
        )
    return best


def build_prior(images: Tensor | None, layers: Layers, channels: int) -> PatchPrior:
    """Return the mean and covariances of the images; without images, covariances that decay with
    the distance of pixels.
    """
    if images is not None and len(images) > 1:
        return _empirical_prior(to_patches(images.double().cpu(), layers.patch[0]))
    (h, w), (p, q) = layers.grid, layers.patch
    length = REACH * max(h * p, w * q)
    cells = _distance_kernel(h, w, float(p), length)
    channel_covariance = torch.full((channels, channels), 0.9, dtype=torch.float64).fill_diagonal_(
        1.0
    )
    return PatchPrior(
        torch.zeros(h * w, channels * p * q, dtype=torch.float64),
        cells,
        torch.kron(channel_covariance, _distance_kernel(p, q, 1.0, length)),
    )


def _empirical_prior(patches: Tensor) -> PatchPrior:
    """Return the mean and covariances of patches [images, cells, values]."""
    mean = patches.mean(0)
    centred = patches - mean
    cells = torch.einsum("nip,njp->ij", centred, centred) / centred.shape[0] / centred.shape[2]
    values = torch.einsum("nip,niq->pq", centred, centred) / centred.shape[0] / centred.shape[1]
    cells = cells / cells.diagonal().mean()
    cells, values = (
        m + 1e-3 * m.diagonal().mean() * torch.eye(len(m), dtype=m.dtype) for m in (cells, values)
    )
    return PatchPrior(mean, cells, values)


def _distance_kernel(h: int, w: int, step: float, length: float) -> Tensor:
    """Return exp(-distance / length) between the cells of a grid."""
    y, x = torch.meshgrid(
        torch.arange(h, dtype=torch.float64), torch.arange(w, dtype=torch.float64), indexing="ij"
    )
    positions = torch.stack([y.flatten(), x.flatten()], 1) * step
    kernel: Tensor = (-torch.cdist(positions, positions) / length).exp()
    return kernel


def _root(m: Tensor) -> Tensor:
    """Return the symmetric square root of a positive matrix."""
    values, basis = torch.linalg.eigh(m)
    root: Tensor = basis * values.clamp(min=1e-12 * float(values[-1])).sqrt() @ basis.T
    return root


def _residual(total: Tensor, a: Tensor, is_used: Tensor) -> float:
    """Return the share of the total outside the used directions."""
    explained = a[:, is_used] @ (a[:, is_used].T @ total)
    return float((total - explained).norm() / total.norm().clamp(min=1e-300))

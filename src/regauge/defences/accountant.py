"""The accountant of differential privacy: epsilons by dp-accounting, never by hand."""

from __future__ import annotations

from typing import Literal

from regauge.errors import need

Neighbours = Literal["ADD_OR_REMOVE_ONE", "REPLACE_ONE"]


def gaussian_epsilon(
    multiplier: float, releases: int, delta: float, neighbours: Neighbours
) -> float:
    """Compute the epsilon of repeated Gaussian releases with a Renyi accountant.

    Args:
        multiplier: The standard deviation of the noise, in units of the sensitivity.
        releases: How often the same sample or client is released.
        delta: The probability with which the guarantee may fail.
        neighbours: The relation between the data sets that are compared, by dp-accounting's name.

    Returns:
        Epsilon without amplification by sampling, and 0 without a release.
    """
    need("dp_accounting", "privacy")
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SelfComposedDpEvent
    from dp_accounting.rdp import RdpAccountant

    if not releases:
        return 0.0
    accountant = RdpAccountant(neighboring_relation=NeighboringRelation[neighbours])
    accountant.compose(SelfComposedDpEvent(GaussianDpEvent(multiplier), releases))
    return float(accountant.get_epsilon(delta))

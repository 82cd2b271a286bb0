"""Figures that audits share."""

from __future__ import annotations

from regauge.audit.tables import plot_lock
from regauge.results.findings import Finding


def finding(name: str, value: float, measure: str = "share of the key") -> Finding:
    return Finding(f"lock/{name}", "s", None, value, 0.1, 1.0, measure=measure)


def test_the_picture_of_a_lock_shows_shares_alone() -> None:
    (figure,) = plot_lock([finding("public base", 0.5), finding("theft", 3.5, "loss")])
    assert figure.data["labels"] == ["public base"]
    assert figure.data["y"] == {"attack": [0.5], "no knowledge": [0.1], "owner": [1.0]}
    assert plot_lock([finding("theft", 3.5, "loss")]) == ()

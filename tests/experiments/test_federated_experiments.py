"""The experiments of federated learning, through the same code as the real runs, on pico models."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import EXPERIMENTS
from experiments.federated.fedavg import FUSED, PARTS, WAYS
from experiments.shared.runner import Lab


@pytest.mark.slow
def test_training_tells_accuracy_and_leakage_of_every_way(tmp_path: Path) -> None:
    found = EXPERIMENTS["federated/training"](Lab("pico", cache=tmp_path))
    (table,) = found.tables
    assert [(row[0], row[1]) for row in table.rows] == [
        (way, part) for part in PARTS for way in WAYS
    ]
    rows = {(row[0], row[1]): row for row in table.rows}
    plain, frozen = rows[("FedAvg", "IID")], rows[("FedAvg + MJP, embedding frozen", "IID")]
    assert plain[4] > plain[6] + 10  # an update of one image gives the image away
    assert (
        frozen[4] < frozen[6] + 3
    )  # what the closed form needs is not sent, and what is learned from ten updates is little
    assert rows[("FedAvg + MJP, embedding kept local", "non-IID")][4] is not None  # but it is tried
    assert {f.id for f in found.findings} >= {
        "IID/FedAvg/accuracy",
        "IID/FedAvg/leak",
        "non-IID/FedAvg + MJP/accuracy",
    }


def test_fusion_tells_both_ways(tmp_path: Path) -> None:
    lab = Lab("pico", cache=tmp_path)
    found = EXPERIMENTS["federated/fusion"](lab)
    assert [(row[0], len(row)) for row in found.tables[0].rows] == [(way, 4) for way in FUSED]
    assert {f.id for f in found.findings} == {
        f"goal/{way}/{what}" for way in list(FUSED)[1:] for what in ("better", "works")
    }
    again = Lab("pico", cache=tmp_path)
    assert EXPERIMENTS["federated/fusion"](again).tables == found.tables

"""`merge` with `align` and `refine`: the alignment of `match` with `refine`, in one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import regauge
import support.picos as picos
from regauge.errors import DataError, MergeError, RecordError
from regauge.matching.live_pair import LivePair
from regauge.merging import basis

OPTIONS = regauge.MergeOptions(refine_steps=20)
FORCED = regauge.MergeOptions(force=True)


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two ViTs of different random seeds."""
    root = tmp_path_factory.mktemp("strangers")
    for name, seed in (("a", 0), ("b", 1)):
        picos.build("vit", seed).float().save_pretrained(root / name)
    return root / "a", root / "b"


def test_it_is_the_refined_match_and_the_merge(
    strangers: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = strangers
    matched = regauge.match(b, a, refine="noise", options=regauge.MatchOptions(refine_steps=20))
    assert matched.refined is not None
    assert matched.refined.best_step > 0
    matched.save(tmp_path / "aligned")
    wanted = regauge.merge([a, tmp_path / "aligned"], options=FORCED).state()
    out = tmp_path / "out"
    merged = regauge.merge([a, b], align=True, refine="noise", options=OPTIONS, out=out)
    state = merged.state()
    assert state.keys() == wanted.keys()
    assert all(torch.allclose(state[n], wanted[n], atol=1e-6) for n in wanted)
    plain = regauge.merge([a, b], align=True).state()
    assert not all(torch.allclose(state[n], plain[n], atol=1e-4) for n in wanted), "the control"
    (verdict,) = merged.verdicts
    assert verdict.divergence == matched.refined.loss
    assert "20 steps: divergence from the ends" in verdict.moved
    assert "refine_steps: 20" in merged.recipe.text

    def never(*arguments: object, **more: object) -> None:
        raise AssertionError("it was found already")

    monkeypatch.setattr(basis, "match_pair", never)
    monkeypatch.setattr(LivePair, "refine", never)
    again = regauge.merge([a, b], align=True, refine="noise", options=OPTIONS, out=out)
    assert again.verdicts == merged.verdicts
    assert all(torch.equal(value, state[n]) for n, value in again.state().items())
    with pytest.raises(AssertionError):  # other settings are another merge
        regauge.merge([a, b], align=True, refine="noise", resume=False)


def test_bad_data_fail_before_any_work(
    strangers: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object, **more: object) -> Any:
        raise AssertionError("work was done")

    monkeypatch.setattr("regauge.merging.engine.check_basis", never)
    models = list(strangers)
    with pytest.raises(DataError):
        regauge.merge(models, align=True, refine="missing.npz")
    with pytest.raises(RecordError, match="cannot generate text"):
        regauge.merge(models, align=True, refine="self")
    with pytest.raises(MergeError, match="refine requires an alignment"):
        regauge.merge(models, refine="noise")


def test_a_measured_divergence_replaces_the_warning_by_the_cosine() -> None:
    apart = basis.Verdict("b", "a", False, "", "", 0.0, "a sample", "aligned", 0.4)
    assert "--refine learns a better alignment" in apart.warning
    for divergence, warns in ((0.05, False), (0.9, True)):
        refined = basis.Verdict(
            "b", "a", False, "", "", 0.0, "a sample", "aligned", 0.4, divergence
        )
        assert bool(refined.warning) is warns
        assert ("diverge from them by 0.90" in refined.warning) is warns

"""Stored results: those older than their code are listed, with the reason, and no others."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments import EXPERIMENTS, stale
from experiments.__main__ import main
from experiments.shared.train_cells import score, train
from experiments.stale import code_of, compare_digests, compare_history, find_stale, modules_of
from regauge.checkpoints.files import write_bytes
from regauge.results.findings import Results, load_results, to_json

TABLE = EXPERIMENTS["000/table2"]


def store(folder: Path, name: str, **facts: object) -> None:
    write_bytes(folder / f"{name}.json", to_json(Results(name, facts=facts)).encode())


def test_a_result_is_stale_if_a_digest_of_its_code_differs(tmp_path: Path) -> None:
    code = code_of(TABLE, {train, score})
    assert set(code) == {
        "experiments.paper_000.permutation.table2",
        "experiments.shared.train_cells.score",
        "experiments.shared.train_cells.train",
    }
    changed = {**code, "experiments.shared.train_cells.train": "0" * 16}
    store(tmp_path, "fresh", experiment="000/table2", code=code)
    store(tmp_path, "changed", experiment="000/table2", code=changed)
    store(tmp_path, "gone", experiment="000/table1", code=code)
    found = {one.name: one.reason for one in find_stale(tmp_path, EXPERIMENTS)}
    assert set(found) == {"changed", "gone"}
    assert found["changed"].startswith("experiments.shared.train_cells.train has digest ")
    assert found["gone"] == "experiment 000/table1 no longer exists"
    assert "paint no longer exists" in compare_digests({"experiments.shared.train_cells.paint": ""})


def test_strict_fails_only_on_stale_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store(tmp_path, "fresh", experiment="000/table2", code=code_of(TABLE, ()))
    assert stale.main([str(tmp_path), "--strict"]) == 0
    assert capsys.readouterr().out.startswith("0 of 1 results are older")
    store(tmp_path, "old", experiment="000/table2")
    assert stale.main([str(tmp_path)]) == 0
    assert stale.main([str(tmp_path), "--strict"]) == 1
    assert "old: stored without digests of its code, and not in" in capsys.readouterr().out


@pytest.fixture
def commit(tmp_path: Path) -> Callable[[str], object]:
    """A repository with a module and a result, and a function that commits all changes."""

    def git(*arguments: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "gc.auto=0"]
        subprocess.run(["git", "-C", str(tmp_path), *author, *arguments], check=True)

    def commit(message: str) -> None:
        git("add", ".")
        git("commit", "-qm", message)

    git("init", "-q")
    (tmp_path / "cell.py").write_text('"""A cell."""\n\n\ndef compute():\n    return 1\n')
    (tmp_path / "r.json").write_text("{}")
    commit("cell: compute")
    return commit


def test_history_tells_results_without_digests(
    tmp_path: Path, commit: Callable[[str], object]
) -> None:
    result, cell = tmp_path / "r.json", tmp_path / "cell.py"
    assert compare_history(result, ["cell.py"], tmp_path) == ""
    cell.write_text('"""Another text."""\n\n\ndef compute():  # a comment\n    return 1\n')
    commit("cell: word the docstring")
    assert compare_history(result, ["cell.py"], tmp_path) == ""
    cell.write_text("def compute():\n    return 2\n")
    (tmp_path / "other.py").write_text("x = 1\n")
    commit("cell: compute 2")
    stale._FORMER.clear()
    reason = compare_history(result, ["cell.py", "other.py"], tmp_path)
    assert "older than 2 of the 2 modules" in reason
    assert reason.endswith("cell: compute 2")
    result.write_text("{ }")
    commit("results: compute again")
    assert compare_history(result, ["cell.py", "other.py"], tmp_path) == ""


def test_modules_of_an_experiment_are_those_it_uses() -> None:
    modules = modules_of(TABLE)
    assert {"experiments/shared/train_cells.py", "src/regauge/data/train.py"} <= set(modules)
    assert not any(path.startswith("experiments/paper_003") for path in modules)


def test_a_run_stores_the_digests_of_what_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGAUGE_CACHE", str(tmp_path))
    monkeypatch.setenv("REGAUGE_ASSETS", str(tmp_path))
    main(["000/table2", "--preset", "pico", "--json", str(tmp_path / "r.json")])
    assert load_results(tmp_path / "r.json").facts["code"] == code_of(TABLE, {train, score})

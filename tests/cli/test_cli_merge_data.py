"""`regauge merge` with data: what it computes is what the functions on states compute, whatever
moved the models before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regauge import load_model
from regauge.data.tasks import read_examples, sample_batches
from regauge.demo.move import GPT2, LLAMA, make_checkpoint
from regauge.merging import merge_states
from regauge.merging.statistics import activations, fisher, grams
from regauge.models.resolve import spec_of
from support.cli_runs import Run
from support.merges import digests, finetune, interrupting, kill_and_resume, near, reader, state_of
from support.picos import build

METHODS = {
    "fisher": "fisher",
    "regmean": "gram",
    "ot_wts": "",
    "ot_acts": "activations",
    "ot_acts_emd": "activations",
}
COMPUTE: dict[str, Callable[..., Any]] = {
    "fisher": fisher,
    "gram": grams,
    "activations": activations,
}


@pytest.fixture
def a(tmp_path: Path) -> Path:
    return reader(make_checkpoint(tmp_path / "a", LLAMA, 0))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    draw = torch.Generator().manual_seed(0)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"t{int(i)}" for i in torch.randint(0, 256, (400,), generator=draw)))
    return path


def count_reads(
    kind: str, folder: Path, text: Path, samples: int, length: int, labelled: bool = False
) -> Any:
    """What a model shows, by the functions themselves."""
    from regauge.data.datasets import open_data

    module = load_model(folder, "float32")
    examples, _ = read_examples(
        module, open_data(str(text)), beside=folder, length=length, labelled=labelled
    )
    batches = sample_batches(examples, samples, 0)
    inputs = [x for x, _ in batches]
    if kind == "fisher":
        return fisher(
            module,
            None,
            inputs,
            [y for _, y in batches] if labelled else None,
            causal=examples.causal,
        )
    return COMPUTE[kind](module, None, inputs)


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_is_what_its_function_does(
    run: Run, a: Path, text: Path, tmp_path: Path, method: str
) -> None:
    kind = METHODS[method]
    b = (
        reader(make_checkpoint(tmp_path / "b", LLAMA, 9))
        if method.startswith("ot_")
        else finetune(a, tmp_path / "b", 1)
    )  # transport needs no relative
    options = ["--data", text, "--samples", 12, "--length", 16] if kind else []
    result = run(
        "merge",
        a,
        b,
        "--method",
        method,
        "--weight",
        1,
        "--weight",
        0.5,
        *options,
        "-o",
        tmp_path / "out",
        "--json",
    )
    assert result.code == 0, result.err
    known = [count_reads(kind, m, text, 12, 16) for m in (a, b)] if kind else None
    wanted = merge_states(
        [state_of(a), state_of(b)], method, statistics=known, spec=spec_of(a), weight=[1, 0.5]
    )
    mean = merge_states([state_of(a), state_of(b)], weight=[1, 0.5])
    merged_state = state_of(tmp_path / "out")
    assert all(near(value, wanted[name], 1e-4) for name, value in merged_state.items())
    assert not all(near(value, mean[name], 1e-3) for name, value in merged_state.items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "out", "text.txt"]
    again = run(
        "merge", tmp_path / "out" / "recipe.yaml", "-o", tmp_path / "again"
    )  # the recipe is the merge, its data too
    assert again.code == 0, again.err
    assert (
        digests(tmp_path / "again")["model.safetensors"]
        == digests(tmp_path / "out")["model.safetensors"]
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert (f"statistics on 12 examples of {text}" in card) is bool(kind)
    assert ("transported to" in card) is method.startswith("ot_")
    assert ("changes its function" in card) is method.startswith("ot_")


def test_the_labels_of_the_data(run: Run, a: Path, text: Path, tmp_path: Path) -> None:
    b = finetune(a, tmp_path / "b", 1)
    how = ["--method", "fisher", "--data", text, "--samples", 12, "--length", 16]
    assert run("merge", a, b, *how, "--labels", "-o", tmp_path / "out").code == 0
    assert run("merge", a, b, *how, "-o", tmp_path / "drawn").code == 0
    wanted = merge_states(
        [state_of(a), state_of(b)],
        "fisher",
        statistics=[count_reads("fisher", m, text, 12, 16, True) for m in (a, b)],
    )
    merged_state, other = state_of(tmp_path / "out"), state_of(tmp_path / "drawn")
    assert all(near(value, wanted[name], 1e-4) for name, value in merged_state.items())
    assert not all(near(value, other[name], 1e-4) for name, value in merged_state.items())
    assert "with their labels" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("method", ["fisher", "regmean"])
def test_models_are_looked_at_after_they_were_moved(
    run: Run, a: Path, text: Path, tmp_path: Path, method: str
) -> None:
    """A merge with a secretly permuted relative is the merge with the relative itself: nothing was
    seen in the wrong basis.
    """
    b = finetune(a, tmp_path / "b", 1)
    assert (
        run(
            "move", b, "--random", "--group", "permutation", "--seed", 3, "-o", tmp_path / "moved"
        ).code
        == 0
    )
    how = ["--method", method, "--data", text, "--samples", 12, "--length", 16]
    assert run("merge", a, b, *how, "-o", tmp_path / "plain").code == 0
    (tmp_path / "r.yaml").write_text(
        f"merge_method: {method}\nalign: {{group: permutation}}\ndata: "
        f"{{uri: {text}, samples: 12, length: 16}}\n"
        f"models:\n- model: {a}\n- model: {tmp_path / 'moved'}\n"
    )
    result = run("merge", tmp_path / "r.yaml", "-o", tmp_path / "out")
    assert result.code == 0, result.err
    wanted = state_of(tmp_path / "plain")
    assert all(
        near(value, wanted[name], 1e-3) for name, value in state_of(tmp_path / "out").items()
    )
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_folded_models(run: Run, a: Path, text: Path, tmp_path: Path) -> None:
    """Folding unties and changes what layers read: the model that is looked at is the folded
    one.
    """
    tied = reader(make_checkpoint(tmp_path / "gpt2", GPT2, 0))
    assert (
        run(
            "move",
            tied,
            "--random",
            "--fold",
            "--group",
            "orthogonal",
            "--seed",
            4,
            "-o",
            tmp_path / "turned",
        ).code
        == 0
    )
    (tmp_path / "r.yaml").write_text(
        f"merge_method: regmean\nparameters: {{alpha: 0.5}}\nalign: {{to: {tied}, fold: true}}\n"
        f"data: {{uri: {text}, samples: 12, length: 16}}\nmodels:\n- model: {tied}\n- model: "
        f"{tmp_path / 'turned'}\n"
    )
    result = run("merge", tmp_path / "r.yaml", "-o", tmp_path / "out")
    assert result.code == 0, result.err
    ids = torch.arange(12).view(1, 12) * 7 % 250
    with torch.no_grad():
        loaded, wanted = (load_model(p)(input_ids=ids).logits for p in (tmp_path / "out", tied))
    assert float((loaded - wanted).norm() / wanted.norm()) < 1e-3


@pytest.mark.parametrize("method", ["ot_wts", "ot_acts_emd"])
def test_transport_needs_no_common_basis(
    run: Run, a: Path, text: Path, tmp_path: Path, method: str
) -> None:
    assert (
        run(
            "move", a, "--random", "--group", "permutation", "--seed", 3, "-o", tmp_path / "moved"
        ).code
        == 0
    )
    options = (
        ["--data", text, "--samples", 12, "--length", 16]
        if METHODS[method]
        else ["--set", "regularization=0"]
    )
    result = run(
        "merge", a, tmp_path / "moved", "--method", method, *options, "-o", tmp_path / "out"
    )
    assert result.code == 0, result.err
    assert "exactly" in result.err
    assert "changes its function" not in result.err
    wanted = state_of(a)
    assert all(
        near(value, wanted[name], 1e-4) for name, value in state_of(tmp_path / "out").items()
    )


def test_models_with_data_of_their_own(run: Run, a: Path, text: Path, tmp_path: Path) -> None:
    b = finetune(a, tmp_path / "b", 1)
    (tmp_path / "other.txt").write_text(" ".join(text.read_text().split()[::-1]))
    data = "{{uri: {}, samples: 12, length: 16}}"
    (tmp_path / "r.yaml").write_text(
        f"merge_method: regmean\ndata: {data.format(text)}\nmodels:\n- model: {a}\n- "
        f"{{model: {b}, data: {data.format(tmp_path / 'other.txt')}}}\n"
    )
    assert run("merge", tmp_path / "r.yaml", "-o", tmp_path / "out").code == 0
    known = [
        count_reads("gram", a, text, 12, 16),
        count_reads("gram", b, tmp_path / "other.txt", 12, 16),
    ]
    wanted = merge_states([state_of(a), state_of(b)], "regmean", statistics=known)
    assert all(
        near(value, wanted[name], 1e-4) for name, value in state_of(tmp_path / "out").items()
    )


def test_a_classifier_of_texts(run: Run, tmp_path: Path) -> None:
    """Texts of different lengths: padding counts nowhere, and labels are not even looked for."""
    build("bert-classifier").float().save_pretrained(tmp_path / "a")
    reader(tmp_path / "a", 30)
    b = finetune(tmp_path / "a", tmp_path / "b", 1, 0.05)
    (tmp_path / "dev.tsv").write_text(
        "sentence\n"
        + "\n".join(" ".join(f"t{(3 * i + j) % 30}" for j in range(2 + i % 7)) for i in range(20))
        + "\n"
    )
    for method in ("fisher", "regmean"):
        result = run(
            "merge",
            tmp_path / "a",
            b,
            "--method",
            method,
            "--data",
            tmp_path / "dev.tsv",
            "--field",
            "text=sentence",
            "-o",
            tmp_path / method,
        )
        assert result.code == 0, result.err
        assert load_model(tmp_path / method) is not None
        assert not near(
            state_of(tmp_path / method)["classifier.weight"],
            (state_of(tmp_path / "a")["classifier.weight"] + state_of(b)["classifier.weight"]) / 2,
        )


def test_a_file_with_names_of_its_own(run: Run, a: Path, text: Path, tmp_path: Path) -> None:
    """The library renames tensors as it loads them; what it saw is found again under the names of
    the file.
    """
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.merging.data_pass import _stored_names
    from regauge.merging.engine import open_model

    model = open_model(str(a))
    module = load_model(open_checkpoint(a), "float32")
    assert _stored_names(module, model, None) == {n: n for n, _ in module.named_parameters()}
    renamed = dict(module.named_parameters())

    class Other(torch.nn.Module):
        def named_parameters(self, *args: Any, **more: Any) -> Any:
            return iter([("new." + n, p) for n, p in renamed.items()])

    shown = _stored_names(
        Other(), model, None
    )  # the names differ, so a marked copy is loaded, under the library's names
    assert shown == {n: n for n in renamed}


def test_what_is_missing_or_wrong_is_one_error(
    run: Run, a: Path, text: Path, tmp_path: Path
) -> None:
    b = finetune(a, tmp_path / "b", 1)
    base = f"merge_method: regmean\nmodels:\n- model: {a}\n- model: {b}\n"
    recipes = {
        "typo": f"{base}data: {{uri: {text}, sample: 3}}\n",
        "none": base,
        "nowhere": f"{base}data: {{samples: 3}}\n",
        "count": f"{base}data: {{uri: {text}, samples: 0.5}}\n",
        "labels": f"{base}data: {{uri: {text}, labels: 3}}\n",
        "fields": f"{base}data: {{uri: {text}, fields: [text]}}\n",
        "own": base.replace("regmean", "ot_acts").replace(
            f"model: {b}", f"{{model: {b}, data: {a}}}"
        )
        + f"data: {text}\n",
    }
    for name, content in recipes.items():
        (tmp_path / f"{name}.yaml").write_text(content)
    before = sorted(p.name for p in tmp_path.iterdir())
    for arguments, words in (
        ((a, b, "--method", "fisher"), "fisher needs data for"),
        ((a, b, "--method", "regmean", "--data", tmp_path / "none.txt"), "none.txt"),
        ((a, b, "--method", "regmean", "--data", text, "--field", "text=words"), "words"),
        ((tmp_path / "typo.yaml",), 'line 5: data has no "sample"'),
        (
            (tmp_path / "none.yaml",),
            f"line 3: regmean needs data for {a}",
        ),
        ((tmp_path / "nowhere.yaml",), "line 5: data: must have uri:"),
        ((tmp_path / "count.yaml",), "line 5: samples must be an integer >= 1, got 0.5"),
        ((tmp_path / "labels.yaml",), "line 5: labels must be true or false"),
        ((tmp_path / "fields.yaml",), "line 5: fields must map"),
        ((tmp_path / "own.yaml",), "has its own"),
    ):
        result = run("merge", *arguments, "-o", tmp_path / "out")
        assert result.code == 1, (arguments, result.err)
        assert words in result.err, (arguments, result.err)
        assert result.err.count("error: ") == 1
        assert sorted(p.name for p in tmp_path.iterdir()) == before
    for arguments in (
        (a, b, "--samples", 3),
        (a, b, "--labels"),
        (tmp_path / "none.yaml", "--data", text),
    ):
        assert run("merge", *arguments, "-o", tmp_path / "out").code == 2, arguments
    result = run("merge", a, b, "--data", text, "-o", tmp_path / "out")
    assert result.code == 0
    assert "linear needs no data: data: only measures the result" in result.err
    lines = [line.split() for line in result.out.splitlines()]
    measured = [line[0] for line in lines if line and Path(line[0]) in (a, b, tmp_path / "out")]
    assert measured[:3] == [str(a), str(b), str(tmp_path / "out")], result.out


def test_a_model_without_a_head_has_no_fisher(run: Run, text: Path, tmp_path: Path) -> None:
    build("bert-base").float().save_pretrained(tmp_path / "a")
    reader(tmp_path / "a", 30)
    b = finetune(tmp_path / "a", tmp_path / "b", 1, 0.05)
    (tmp_path / "texts.txt").write_text("t1 t2 t3\nt4 t5\n")
    result = run(
        "merge",
        tmp_path / "a",
        b,
        "--method",
        "fisher",
        "--data",
        tmp_path / "texts.txt",
        "-o",
        tmp_path / "out",
    )
    assert result.code == 1
    assert "gives no logits" in result.err
    assert (
        run(
            "merge",
            tmp_path / "a",
            b,
            "--method",
            "regmean",
            "--data",
            tmp_path / "texts.txt",
            "-o",
            tmp_path / "out",
        ).code
        == 0
    )


def test_a_dry_run_looks_at_nothing(run: Run, a: Path, text: Path, tmp_path: Path) -> None:
    b = finetune(a, tmp_path / "b", 1)
    before = sorted(p.name for p in tmp_path.iterdir())
    result = run(
        "merge",
        a,
        b,
        "--method",
        "regmean",
        "--data",
        text,
        "-o",
        tmp_path / "out",
        "--dry-run",
        "--json",
    )
    assert result.code == 0
    assert json.loads(result.out)["dry_run"] is True
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_killed_merge_gives_the_same_bytes(run: Run, a: Path, text: Path, tmp_path: Path) -> None:
    b = finetune(a, tmp_path / "b", 1)
    how = [
        "--method",
        "fisher",
        "--data",
        text,
        "--samples",
        8,
        "--length",
        16,
        "--shard-size",
        "100kB",
    ]
    kill_and_resume(run, tmp_path, ["merge", a, b, *how], 2, 1, True)


def test_nothing_is_looked_at_twice(
    run: Run, a: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regauge.merging import data_pass

    b = finetune(a, tmp_path / "b", 1)
    arguments = [
        "merge",
        a,
        b,
        "--method",
        "regmean",
        "--data",
        text,
        "--samples",
        12,
        "--length",
        16,
    ]
    end = interrupting(monkeypatch, 3)
    assert run(*arguments, "-o", tmp_path / "out").code == 130
    end()

    def never(*args: object, **more: object) -> None:
        raise AssertionError("it was seen already")

    with monkeypatch.context() as patched:
        patched.setattr(data_pass, "load_model", never)
        assert run(*arguments, "-o", tmp_path / "out").code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "out", "text.txt"]
    assert run(*arguments, "-o", tmp_path / "whole").code == 0
    assert (
        digests(tmp_path / "out")["model.safetensors"]
        == digests(tmp_path / "whole")["model.safetensors"]
    )


def test_other_data_are_another_merge(
    run: Run, a: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an interrupted merge has seen on other data is not used."""
    b = finetune(a, tmp_path / "b", 1)
    arguments = [
        "merge",
        a,
        b,
        "--method",
        "regmean",
        "--data",
        text,
        "--samples",
        12,
        "--length",
        16,
    ]
    end = interrupting(monkeypatch, 3)
    assert run(*arguments, "-o", tmp_path / "out").code == 130
    end()
    text.write_text(" ".join(text.read_text().split()[::-1]))
    assert run(*arguments, "-o", tmp_path / "out").code == 0
    assert run(*arguments, "-o", tmp_path / "whole").code == 0
    assert (
        digests(tmp_path / "out")["model.safetensors"]
        == digests(tmp_path / "whole")["model.safetensors"]
    )
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]

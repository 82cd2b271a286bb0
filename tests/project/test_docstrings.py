"""Docstrings of public names: their sections, and examples that run.

Examples run in a folder with the models "model" and "vit". They also use what a user has: `model`
and `vit`, live modules, and `images`, labelled examples for `vit`.
"""

from __future__ import annotations

import copy
import dataclasses
import doctest
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import regauge
from regauge import errors
from regauge.data.tasks import Examples

PACKAGES = (
    "regauge",
    "regauge.audit",
    "regauge.federated",
    "regauge.jigsaw",
    "regauge.split",
)
PUBLIC = {
    f"{package}.{name}": value
    for package in PACKAGES
    for name in importlib.import_module(package).__all__
    if callable(value := getattr(importlib.import_module(package), name))
}
NEEDED = {"regauge.audit": "torchmetrics", "regauge.split": "grpc"}  # optional dependencies
TITLES = ("Args", "Attributes", "Returns", "Raises", "Example")


def sections_of(doc: str) -> dict[str, str]:
    """Return the sections of a docstring by title; the summary has the title ""."""
    pieces = re.split(rf"^({'|'.join(TITLES)}):\n", inspect.cleandoc(doc), flags=re.M)
    return {"": pieces[0].strip()} | dict(zip(pieces[1::2], pieces[2::2], strict=True))


def entries_of(section: str) -> set[str]:
    return {
        name.strip("*")
        for line in re.findall(r"^    (\S[^:]*):", section, re.M)
        for name in line.split(", ")
    }


def find_faults(value: Any) -> list[str]:
    """Return the faults of the docstring of a function or class."""
    sections = sections_of(value.__doc__ or "")
    faults = [] if re.match(r"[A-Z].*?[.:]", sections[""], re.S) else ["no summary"]
    is_class = inspect.isclass(value)
    if is_class and (issubclass(value, Exception) or getattr(value, "_is_protocol", False)):
        return faults
    if not re.match(r"\s*>>> [^#]", sections.get("Example", "")):
        faults.append("no Example")
    if is_class and not {"__init__", "__post_init__"} & vars(value).keys():
        return faults
    if "Attributes" in sections and not dataclasses.is_dataclass(value):
        return faults  # made by another function, which describes the parameters
    signature = inspect.signature(value)
    names = set(signature.parameters)
    described = entries_of(sections.get("Args", ""))
    for base in inspect.getmro(value) if is_class else ():
        described |= entries_of(sections_of(base.__doc__ or "").get("Attributes", ""))
    faults += [f"{name} is not described" for name in sorted(names - described)]
    if not is_class:
        faults += [f"{name} is not a parameter" for name in sorted(described - names)]
        if signature.return_annotation not in (None, "None") and "Returns" not in sections:
            faults.append("no Returns")
    raised = (
        set(re.findall(r"raise (?:\w+\.)?(\w+Error)\(", source_of(value))) & vars(errors).keys()
    )
    faults += [
        f"{name} is not in Raises"
        for name in sorted(raised - entries_of(sections.get("Raises", "")))
    ]
    return faults


def source_of(value: Any) -> str:
    """Return the source of a function, or of what runs when a class is called."""
    if not inspect.isclass(value):
        return inspect.getsource(inspect.unwrap(value))
    is_generated = dataclasses.is_dataclass(value)
    function = vars(value).get("__post_init__" if is_generated else "__init__")
    return inspect.getsource(function) if function else ""


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name: str) -> None:
    assert find_faults(PUBLIC[name]) == []


def test_missing_sections_are_found() -> None:
    def documented(a: int, b: int) -> int:
        """Add.

        Args:
            a: a number.
            c: another.

        Example:
            >>> # documented(1, 2)
        """
        raise errors.SpecError("too large")

    assert find_faults(documented) == [
        "no Example",
        "b is not described",
        "c is not a parameter",
        "no Returns",
        "SpecError is not in Raises",
    ]


def test_the_reference_lists_every_public_name() -> None:
    pages = (Path(__file__).parents[2] / "docs" / "reference").glob("*.md")
    listed = [name for page in pages for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)]
    homes = {f"{value.__module__}.{value.__name__}" for value in PUBLIC.values()}
    assert homes <= set(listed)
    assert len(listed) == len(set(listed))


def make_model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=12, n_layer=2, n_head=3, vocab_size=30, n_positions=16)
    config.update({"bos_token_id": 1, "eos_token_id": 2})
    return transformers.GPT2LMHeadModel(config).eval()


def make_vit() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3}
    config = transformers.ViTConfig(
        **sizes, intermediate_size=20, image_size=8, patch_size=2, num_channels=1, num_labels=10
    )
    return transformers.ViTForImageClassification(config).eval()


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    pixels = torch.rand(100, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(100) % 10
    return {
        "model": make_model(),
        "vit": make_vit(),
        "images": Examples(100, 10, lambda rows: ({"pixel_values": pixels[rows]}, labels[rows])),
    }


@pytest.mark.parametrize("name", PUBLIC)
def test_examples_run(
    name: str, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library := NEEDED.get(name.rpartition(".")[0]):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    doc = inspect.cleandoc(PUBLIC[name].__doc__ or "")
    for model in ("model", "vit"):
        if f'"{model}"' in doc:
            names[model].save_pretrained(tmp_path / model)
    used = {key: value for key, value in names.items() if key in doc}
    scope = {"regauge": regauge, "torch": torch, **copy.deepcopy(used)}
    test = doctest.DocTestParser().get_doctest(doc, scope, name, None, None)
    output: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=output.append)
    assert not output, "".join(output)

"""The chat template of a merge: chosen as mergekit does, and written where tokenizers read it."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest
import torch
from safetensors.torch import save_file

import regauge
from regauge.errors import MergeError
from regauge.merging.chat_template import CHATML, read_template

MESSAGES = [{"role": "user", "content": "Hello"}]


def model(folder: Path, template: str | None, *, in_config: bool = False) -> Path:
    """A model of one tensor, with the files of a tokenizer."""
    folder.mkdir()
    save_file({"w": torch.ones(2, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if template is not None and in_config:
        config["chat_template"] = template
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """The first has a template of its own, the others share one, stored in two ways."""
    return [
        model(tmp_path / "a", "A {{ messages }}", in_config=True),
        model(tmp_path / "b", "B {{ messages }}"),
        model(tmp_path / "c", "B {{ messages }}\n", in_config=True),
    ]


def merged(models: list[Path], out: Path, chat_template: str | None) -> Path:
    options = regauge.MergeOptions(chat_template=chat_template, force=True)
    regauge.merge(models, options=options).save(out)
    return out


def test_the_most_common_template_is_chosen(models: list[Path], tmp_path: Path) -> None:
    assert read_template(merged(models, tmp_path / "plain", None)) == "A {{ messages }}"
    out = merged(models, tmp_path / "auto", "auto")
    assert (out / "chat_template.jinja").read_text() == "B {{ messages }}"
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert config == {"tokenizer_class": "PreTrainedTokenizerFast"}  # no second template


def test_a_template_by_name_file_or_text(models: list[Path], tmp_path: Path) -> None:
    out = merged(models, tmp_path / "chatml", "chatml")
    text = jinja2.Template((out / "chat_template.jinja").read_text()).render(
        messages=MESSAGES, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    (tmp_path / "own.jinja").write_text(CHATML + "{# own #}")
    out = merged(models, tmp_path / "file", str(tmp_path / "own.jinja"))
    assert (out / "chat_template.jinja").read_text().endswith("{# own #}")
    out = merged(models, tmp_path / "text", "{{ messages[0].content }}")
    assert read_template(out) == "{{ messages[0].content }}"


def test_models_without_a_template(tmp_path: Path) -> None:
    models = [model(tmp_path / name, None) for name in "ab"]
    out = merged(models, tmp_path / "out", "auto")
    assert not (out / "chat_template.jinja").exists()
    with pytest.raises(MergeError, match="must be auto, chatml"):
        merged(models, tmp_path / "wrong", "llama3")
    assert not (tmp_path / "wrong").exists()

"""Code of a checkpoint is never run: not for "y" on standard input, not by any command, model,
tokenizer, processor or timm config.
"""

from __future__ import annotations

import ast
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import support.federations as fed
import support.hostile_folders as hostile
import support.picos as picos
from regauge.checkpoints.reader import open_checkpoint
from regauge.cli import main
from regauge.data.tokenizers import encode, open_tokenizer
from regauge.errors import (
    CheckpointError,
    CustomCodeError,
    DataError,
    RegaugeError,
    UnknownModelError,
)
from regauge.models.load import build_timm, load_empty, load_model
from regauge.models.resolve import spec_of
from regauge.models.trust import code_disabled, library_class, without_code

ROOT = Path(__file__).parents[2]
DIGITS = ["--data", "digits", "--mean", "0.3", "--std", "0.38"]
COMMANDS: dict[str, list[str]] = {
    "verify": ["verify", "MODEL"],
    "split serve": ["split", "serve", "MODEL", "--listen", "127.0.0.1:0"],
    "split predict": ["split", "predict", "MODEL", *DIGITS, "--server", "127.0.0.1:9"],
    "split train": [
        "split",
        "train",
        "MODEL",
        *DIGITS,
        "--server",
        "127.0.0.1:9",
        "--steps",
        "1",
        "-o",
        "OUT",
    ],
    "jigsaw train": ["jigsaw", "train", "MODEL", *DIGITS, "-o", "OUT"],
    "jigsaw evaluate": ["jigsaw", "evaluate", "MODEL", *DIGITS],
    "audit split": ["audit", "split", "MODEL", *DIGITS],
    "audit gradients": ["audit", "gradients", "MODEL", *DIGITS],
    "barrier": ["barrier", "MODEL", "MODEL", *DIGITS],
    "federate": ["federate", "MODEL", *DIGITS, "--clients", "2", "--rounds", "1", "-o", "OUT"],
    "match": ["match", "MODEL", "MODEL", *DIGITS, "-o", "OUT"],
    "inspect": ["inspect", "MODEL"],
}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard input that says yes to everything."""
    stdin = io.StringIO("y\n" * 20)
    monkeypatch.setattr("sys.stdin", stdin)
    return stdin


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trust") / "good"
    fed.vit(num_labels=10).save_pretrained(folder)  # type: ignore[operator]
    return folder


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


def change_folder(
    good: Path, tmp_path: Path, change: Callable[[Path, Path], None], marker: Path
) -> Path:
    folder = tmp_path / "MODEL"
    shutil.copytree(good, folder)
    change(folder, marker)
    return folder


@pytest.mark.parametrize("kind", hostile.MODELS)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_of_a_model(
    command: str,
    kind: str,
    good: Path,
    tmp_path: Path,
    marker: Path,
    answers: io.StringIO,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if command == "inspect" and kind in ("auto_class_of_known_type", "custom_class"):
        pytest.skip("the family describes these weights, and nothing is loaded")
    folder = change_folder(good, tmp_path, hostile.MODELS[kind], marker)
    places = {"MODEL": str(folder), "OUT": str(tmp_path / "OUT")}
    assert main([places.get(a, a) for a in COMMANDS[command]]) == 1
    output = capsys.readouterr().err
    assert "error: " in output
    assert kind == "nested_auto_map" or (
        "custom code, which regauge never runs" in output and "hint: load it in Python" in output
    )
    assert answers.tell() == 0, "standard input was read"
    assert not marker.exists()
    assert not (tmp_path / "OUT").exists()


@pytest.mark.parametrize("kind", hostile.TOKENIZERS)
def test_no_command_runs_code_of_a_tokenizer(
    kind: str,
    tmp_path: Path,
    marker: Path,
    answers: io.StringIO,
    capsys: pytest.CaptureFixture[str],
) -> None:
    picos.build("gpt2").float().save_pretrained(tmp_path / "MODEL")
    (tmp_path / "book.txt").write_text("a b c d " * 50)
    (tmp_path / "tokenizer").mkdir()
    hostile.TOKENIZERS[kind](tmp_path / "tokenizer", marker)
    options = ["--data", str(tmp_path / "book.txt"), "--tokenizer", str(tmp_path / "tokenizer")]
    model = str(tmp_path / "MODEL")
    for command in (
        ["split", "predict", model, *options, "--server", "127.0.0.1:9"],
        ["barrier", model, model, *options],
    ):
        assert main(command) == 1
        output = capsys.readouterr().err
        if (
            kind == "tokenizer_of_config"
        ):  # the library goes on without the config, and finds no tokenizer
            assert "cannot be loaded" in output
        else:
            assert (
                "needs custom code, which regauge never runs\nregauge: hint: give a tokenizer.json"
                in output
            )
    with pytest.raises(DataError if kind == "tokenizer_of_config" else CustomCodeError):
        open_tokenizer(tmp_path / "tokenizer")
    assert answers.tell() == 0
    assert not marker.exists()


def test_a_class_of_the_library_loads_and_the_code_beside_it_does_not_run(
    good: Path, tmp_path: Path, marker: Path, answers: io.StringIO
) -> None:
    folder = change_folder(good, tmp_path, hostile.unused_code, marker)
    loaded, plain = load_model(folder), load_model(good)
    assert type(loaded) is transformers.ViTForImageClassification
    assert all(
        torch.equal(a, b)
        for a, b in zip(loaded.state_dict().values(), plain.state_dict().values(), strict=True)
    )
    assert not hasattr(loaded.config, "auto_map")
    assert loaded.config.name_or_path == str(folder)
    assert isinstance(load_empty(folder), transformers.ViTForImageClassification)
    assert main(["verify", str(folder), "--steps", "0", "--no-general"]) == 0
    hostile.change(folder / "config.json", model_type="vit", architectures=["LlamaForCausalLM"])
    with pytest.raises(UnknownModelError, match="model_type"):
        load_model(folder)
    assert answers.tell() == 0
    assert not marker.exists()


def test_a_tokenizer_of_the_library_opens_and_the_code_beside_it_does_not_run(
    tmp_path: Path, marker: Path, answers: io.StringIO
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({str(i): i for i in range(30)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    hostile.code(tmp_path, marker)
    hostile.change(
        tmp_path / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        auto_map=hostile.auto_map(),
    )
    assert encode(tmp_path, ["7 8 9"]) == [[7, 8, 9]]
    assert answers.tell() == 0
    assert not marker.exists()


def test_transformers_would_have_prompted(
    good: Path, tmp_path: Path, marker: Path, answers: io.StringIO
) -> None:
    """The control: the same folder runs its code if the library is left to ask, and inside
    `code_disabled` it does not.
    """
    folder = change_folder(good, tmp_path, hostile.auto_class, marker)
    with pytest.raises(ValueError, match="trust_remote_code"), code_disabled():
        transformers.AutoConfig.from_pretrained(folder)
    assert answers.tell() == 0
    assert not marker.exists()
    transformers.AutoConfig.from_pretrained(folder)
    assert answers.tell() > 0
    assert marker.exists()


def test_nested_uses_restore_the_library() -> None:
    from transformers import dynamic_module_utils as dynamic

    before = dynamic.TIME_OUT_REMOTE_CODE
    assert before > 0
    with code_disabled():
        with code_disabled():
            pass
        assert dynamic.TIME_OUT_REMOTE_CODE == 0
    assert before == dynamic.TIME_OUT_REMOTE_CODE


@pytest.mark.parametrize(
    "name", ["AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoConfig", "AutoBackbone"]
)
def test_auto_classes_are_custom_code(name: str) -> None:
    with pytest.raises(
        CustomCodeError, match=f'"architectures" must name one model class, got {name}'
    ):
        library_class({"architectures": [name]}, "MODEL")


@pytest.mark.parametrize(
    "name",
    [
        "logging",
        "PreTrainedModel",
        "Trainer",
        "pipeline",
        "BertConfig",
        "BertTokenizer",
        "__name__",
        "models.bert",
        "Evil",
        "",
    ],
)
def test_classes_that_are_not_models_of_transformers(name: str) -> None:
    with pytest.raises(UnknownModelError) as caught:
        library_class({"architectures": [name]}, "MODEL")
    assert not isinstance(caught.value, CustomCodeError)
    assert library_class({"architectures": ["BertModel"]}, "MODEL") is transformers.BertModel


def test_a_class_that_code_registered_is_not_of_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Foreign(transformers.BertModel):
        pass

    monkeypatch.setattr(transformers, "Foreign", Foreign, raising=False)
    with pytest.raises(UnknownModelError):
        library_class({"architectures": ["Foreign"]}, "MODEL")


def test_what_selects_code_is_removed_at_any_depth() -> None:
    config = {
        "auto_map": {"AutoModel": "evil.Evil"},
        "attn_implementation": "owner/kernel",
        "_attn_implementation": "eager",
        "transformers_weights": "adapter_model.bin",
        "hidden_size": 4,
        "vision_config": {
            "auto_map": {},
            "experts_implementation": "owner/kernel",
            "layers": [{"auto_map": 1, "n": 2}],
        },
    }
    assert without_code(config) == {
        "_attn_implementation": "eager",
        "hidden_size": 4,
        "vision_config": {"layers": [{"n": 2}]},
    }
    assert "auto_map" in config, "the config itself is left as it is"
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"part": deep}
    with pytest.raises(CheckpointError, match="nested too deeply"):
        without_code(deep)


def test_a_config_is_read_without_code(tmp_path: Path, marker: Path, answers: io.StringIO) -> None:
    """`regauge.spec_of(config)` and discovery build classes too."""
    hostile.code(tmp_path, marker)
    custom = {
        "model_type": "vit",
        "auto_map": hostile.auto_map(tmp_path),
        "_name_or_path": str(tmp_path),
    }
    for name in ("AutoModelForCausalLM", "EvilModel"):
        with pytest.raises(CustomCodeError):
            spec_of({**custom, "architectures": [name]})
    with pytest.raises(CustomCodeError):
        spec_of(
            {
                "model_type": "evil",
                "auto_map": hostile.auto_map(tmp_path),
                "architectures": ["EvilModel"],
            }
        )
    plain = picos.vit().to_dict() | {"architectures": ["ViTModel"]}
    assert spec_of({**plain, **custom}).tensors == spec_of(plain).tensors
    assert answers.tell() == 0
    assert not marker.exists()


TIMM = {
    "architecture": "vit_tiny_patch16_224",
    "num_classes": 3,
    "model_args": {"img_size": 32, "depth": 1, "embed_dim": 24, "num_heads": 2},
}


@pytest.mark.parametrize(
    "name",
    [
        "hf_hub:owner/name",
        "hf-hub:owner/name",
        "local-dir:FOLDER",
        "FOLDER",
        "../model",
        "C:\\model",
        "",
        "a b",
    ],
)
@pytest.mark.parametrize("key", ["architecture", "backbone"])
def test_a_config_names_no_other_folder(key: str, name: str, tmp_path: Path) -> None:
    name = name.replace("FOLDER", str(tmp_path))
    for config in ({key: name}, {"model_type": "timm_wrapper", "backbone_config": {key: name}}):
        with pytest.raises(
            CheckpointError, match=f'"{key}" in the config of MODEL must be the name'
        ):
            without_code(config, "MODEL")
    assert without_code({key: "vit_tiny_patch16_224.augreg_in21k"}, "MODEL")


@pytest.mark.parametrize(
    "key",
    [
        "checkpoint_path",
        "pretrained",
        "pretrained_cfg",
        "pretrained_cfg_overlay",
        "cache_dir",
        "pretrained_strict",
    ],
)
def test_arguments_of_timm_name_no_file(
    key: str, tmp_path: Path, marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("timm")
    from safetensors.torch import save_file

    folder = tmp_path / "MODEL"
    folder.mkdir()
    hostile.bomb(tmp_path / "bomb.pth", marker)
    value: Any = (
        {"file": str(tmp_path / "bomb.pth")} if "cfg" in key else str(tmp_path / "bomb.pth")
    )
    config = {**TIMM, "model_args": {**TIMM["model_args"], key: value}}  # type: ignore[dict-item]
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"norm.weight": torch.ones(4)}, folder / "model.safetensors")
    assert main(["verify", str(folder)]) == 1
    assert f'"model_args" in the config of {folder} must not set {key}' in capsys.readouterr().err
    for read in (load_empty, load_model, lambda _: build_timm(config)):
        with pytest.raises(RegaugeError, match="must not set"):
            read(folder)
    assert not marker.exists()


def test_good_arguments_of_timm_still_build() -> None:
    pytest.importorskip("timm")
    assert build_timm(TIMM).head.out_features == 3  # type: ignore[union-attr]


def test_only_the_weights_and_the_config_are_shown_to_the_library(
    good: Path, tmp_path: Path, marker: Path
) -> None:
    """Shards load, and an adapter or a pickle beside them does not."""
    folder = change_folder(
        good,
        tmp_path,
        lambda folder, marker: hostile.bomb(folder / "adapter_model.bin", marker),
        marker,
    )
    load_model(good).save_pretrained(folder, max_shard_size="5KB")
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder)})
    )
    hostile.change(folder / "config.json", transformers_weights="adapter_model.bin")
    assert len(open_checkpoint(folder).files) > 1
    state = load_model(folder).state_dict()
    assert all(
        torch.equal(state[name], tensor) for name, tensor in load_model(good).state_dict().items()
    )
    assert not marker.exists()


def test_every_call_of_the_library_that_may_run_code_says_no() -> None:
    """Each `from_pretrained` and `from_config` in the package passes trust_remote_code=False, or a
    dictionary of arguments that does.
    """
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr not in ("from_pretrained", "from_config"):
                continue
            passed = {k.arg: ast.unparse(k.value) for k in node.keywords}
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            is_disabled = passed.get("trust_remote_code") == "False" or (
                None in passed and '"trust_remote_code": False' in path.read_text()
            )
            assert is_disabled, where

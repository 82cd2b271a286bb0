"""Model folders whose code writes a marker if it is ever run. Each builder takes a good folder and
a path for the marker, and changes the folder.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

AUTO = (
    "AutoConfig",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoImageProcessor",
    "AutoProcessor",
    "AutoFeatureExtractor",
)


def change(path: Path, **more: Any) -> None:
    """Change fields of a JSON file, which need not exist."""
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | more))


def code(folder: Path, marker: Path, name: str = "evil.py") -> None:
    """Write a module that creates the marker when it is imported."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (
        f"from pathlib import Path\nPath({str(marker)!r}).write_text('code of the checkpoint "
        "was run')\n"
    )
    for kind, base in (
        ("Config", "PreTrainedConfig"),
        ("Model", "PreTrainedModel"),
        ("Tokenizer", "PreTrainedTokenizerFast"),
    ):
        text += f"from transformers import {base}\nclass Evil{kind}({base}):\n    pass\n"
    path.write_text(
        text + "EvilModel.config_class = EvilConfig\ndef generate(*args, **kwargs):\n    pass\n"
    )


def auto_map(folder: Path | None = None) -> dict[str, Any]:
    """Return an auto_map that names the code of a folder, or of the folder that it lies in."""
    start = "" if folder is None else f"{folder}--"
    models = {
        name: f"{start}evil.Evil{'Config' if name == 'AutoConfig' else 'Model'}" for name in AUTO
    }
    return models | {"AutoTokenizer": [None, f"{start}evil.EvilTokenizer"]}


def auto_class(folder: Path, marker: Path) -> None:
    """`architectures` names AutoModel, the model_type is custom."""
    code(folder, marker)
    change(
        folder / "config.json", architectures=["AutoModel"], model_type="evil", auto_map=auto_map()
    )


def auto_class_of_known_type(folder: Path, marker: Path) -> None:
    """`architectures` names an Auto class that has no class for the model_type, which the library
    knows.
    """
    code(folder, marker)
    change(folder / "config.json", architectures=["AutoModelForCausalLM"], auto_map=auto_map())


def custom_class(folder: Path, marker: Path) -> None:
    """`architectures` names a class that only the code of the folder has."""
    code(folder, marker)
    change(folder / "config.json", architectures=["EvilModel"], auto_map=auto_map())


def nested_auto_map(folder: Path, marker: Path) -> None:
    """The config of a part of a model has an auto_map, and the library builds that part by an Auto
    class without passing trust_remote_code.
    """
    code(folder, marker)
    tiny = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    parts = {
        "encoder": {"model_type": "bert", **tiny},
        "decoder": {
            "model_type": "vit",
            "auto_map": auto_map(),
            "_name_or_path": str(folder),
            **tiny,
        },
    }
    change(
        folder / "config.json",
        architectures=["EncoderDecoderModel"],
        model_type="encoder-decoder",
        **parts,
    )


MODELS: dict[str, Callable[[Path, Path], None]] = {
    f.__name__: f for f in (auto_class, auto_class_of_known_type, custom_class, nested_auto_map)
}


def tokenizer(folder: Path, marker: Path) -> None:
    """A tokenizer whose class is in the code of the folder."""
    code(folder, marker)
    (folder / "tokenizer.json").unlink(missing_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    change(folder / "tokenizer_config.json", tokenizer_class="EvilTokenizer", auto_map=auto_map())


def tokenizer_of_config(folder: Path, marker: Path) -> None:
    """A folder without a tokenizer's config: the library looks at the model's, which has code."""
    code(folder, marker)
    (folder / "tokenizer.json").unlink(missing_ok=True)
    change(folder / "config.json", model_type="evil", auto_map=auto_map())


def tokenizer_of_tokenizers(folder: Path, marker: Path) -> None:
    """A tokenizer made of two others, which the library opens without passing trust_remote_code."""
    (folder / "tokenizer.json").unlink(missing_ok=True)
    part = {"model_type": "vit"}  # has no tokenizer of its own
    (folder / "config.json").write_text(
        json.dumps({"model_type": "rag", "question_encoder": part, "generator": part})
    )
    change(folder / "tokenizer_config.json", tokenizer_class="RagTokenizer")
    code(folder, marker)
    for name in ("question_encoder_tokenizer", "generator_tokenizer"):
        (folder / name).mkdir()
        change(
            folder / name / "tokenizer_config.json",
            tokenizer_class="EvilTokenizer",
            auto_map=auto_map(folder),
        )


TOKENIZERS: dict[str, Callable[[Path, Path], None]] = {
    f.__name__: f for f in (tokenizer, tokenizer_of_config, tokenizer_of_tokenizers)
}


def unused_code(folder: Path, marker: Path) -> None:
    """A class that the library has itself, with code beside it for everything: the model loads, the
    code does not run.
    """
    code(folder, marker)
    code(folder, marker, "custom_generate/generate.py")
    change(folder / "config.json", auto_map=auto_map(), trust_remote_code=True)
    for name in ("preprocessor_config.json", "processor_config.json", "generation_config.json"):
        change(folder / name, auto_map=auto_map(), trust_remote_code=True)


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.write_text, (self.marker, "a pickle of the checkpoint was run")


def bomb(path: Path, marker: Path) -> None:
    """Write a pickle that creates the marker when it is read."""
    path.write_bytes(pickle.dumps(_Bomb(marker)))

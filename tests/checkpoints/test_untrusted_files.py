"""Files from others, defect by defect: one typed error with a way out, at once.
`tests/project/test_soak.py` mutates them at random.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from regauge.checkpoints.adapted import open_adapted
from regauge.checkpoints.reader import open_checkpoint
from regauge.checkpoints.spec_files import load_spec, parse_spec
from regauge.core.check import check
from regauge.core.spec import Spec
from regauge.errors import CheckpointError, RegaugeError, SpecError
from regauge.merging.recipe_yaml import parse_recipe, read_recipe
from regauge.models.load import load_model
from regauge.models.resolve import spec_of
from regauge.results.findings import from_json
from soak.harness import Counter
from support.picos import build

HEAD = 'regauge = 1\nfamily = "own"\n[spaces]\ns = { size = 2, group = "permutation" }\n'


def assert_rejected(run: Callable[[], Any], match: str = ".") -> None:
    with pytest.raises(RegaugeError, match=match) as caught:
        run()
    assert len(str(caught.value)) < 5000


def save_file_bytes(folder: Path, name: str, **changes: Any) -> Path:
    model = build(name)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def inspect_file(folder: Path) -> None:
    opened = open_checkpoint(folder)
    faults = check(spec_of(opened), opened.entries)
    if faults:
        raise SpecError(str(faults[0]))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {"model_type": "unknown", "architectures": 1.5}),
        ("gpt2", {"model_type": "unknown", "architectures": {"a": 1}}),
        ("mixtral", {"num_local_experts": [3]}),
        ("llama", {"intermediate_size": [20]}),
        ("llama", {"hidden_size": "16"}),
        ("gpt2", {"activation_function": "gelu\ud800"}),
    ],
)
def test_configs_of_the_wrong_types(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    inspect_file(save_file_bytes(tmp_path / "good", name))
    assert_rejected(lambda: inspect_file(save_file_bytes(tmp_path / "bad", name, **changes)))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": 1.5}, "names no class|names the class|architectures"),
        ({"initializer_range": True}, "cannot be loaded"),
        ({"n_layer": 100_000}, "n_layer"),
        (
            {"vocab_size": 100_000_000},
            "describes a GPT2LMHeadModel of .* parameters, but the checkpoint has",
        ),
    ],
)
def test_configs_that_no_class_can_be_built_from(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    assert load_model(save_file_bytes(tmp_path / "good", "gpt2")) is not None
    assert_rejected(lambda: load_model(save_file_bytes(tmp_path / "bad", "gpt2", **changes)), match)


def adapter(folder: Path, shapes: dict[str, tuple[int, ...]], **config: Any) -> str:
    save_file_bytes(folder / "model", "gpt2")
    (folder / "adapter").mkdir()
    layer = "base_model.model.transformer.h.0.attn.c_proj"
    tensors = {f"{layer}.{kind}": torch.ones(shape) for kind, shape in shapes.items()}
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "fan_in_fan_out": True, **config}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    return f"{folder / 'model'}+{folder / 'adapter'}"


GOOD = {"lora_A.weight": (2, 12), "lora_B.weight": (12, 2), "lora_magnitude_vector": (12,)}


@pytest.mark.parametrize(
    ("shapes", "config"),
    [
        ({"lora_A.weight": (0, 12), "lora_B.weight": (12, 0)}, {}),
        ({"lora_A.weight": (12,)}, {}),
        ({"lora_A.weight": ()}, {}),
        ({"lora_B.weight": (12,)}, {}),
        ({"lora_magnitude_vector": (5,)}, {}),
        ({}, {"lora_alpha": float("nan")}),
        ({}, {"alpha_pattern": {"(": 1}}),
        ({}, {"alpha_pattern": {"(?=c)c_proj": 1}}),
        ({}, {"alpha_pattern": {str(i): 1 for i in range(1001)}}),
    ],
)
def test_adapters_of_odd_shapes_and_scales(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, Any]
) -> None:
    def read(source: str) -> None:
        opened = open_adapted(source)
        assert all(bool(torch.isfinite(opened[n]).all()) for n in opened)

    read(adapter(tmp_path / "good", GOOD, alpha_pattern={r".*\.h\.[01]\.attn\.c_(proj|attn)": 8}))
    assert_rejected(lambda: read(adapter(tmp_path / "bad", GOOD | shapes, **config)))


def test_a_pattern_gives_a_layer_its_own_scale(tmp_path: Path) -> None:
    plain = {k: v for k, v in GOOD.items() if "magnitude" not in k}
    one, other = (
        open_adapted(adapter(tmp_path / key, plain, alpha_pattern={key: 8}))[
            "transformer.h.0.attn.c_proj.weight"
        ]
        for key in ("^transformer.h.0.attn.c_proj", "c_fc")
    )
    assert torch.allclose(
        one - other, torch.full((12, 12), 4.0, dtype=one.dtype)
    )  # (8 - 4) / 2 of ones that add up to 2


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(.*a){20}b"])
def test_patterns_that_backtrack_do_not_hang(tmp_path: Path, pattern: str) -> None:
    count = Counter("patterns", hang_seconds=3)
    spec = Spec("own", {}, {}, buffers=(pattern,))
    count.trial(lambda: not spec.is_buffer("a" * 60))
    source = adapter(tmp_path, GOOD, alpha_pattern={f"[a-z_.0-9]*({pattern}|c_proj)": 1})
    count.trial(lambda: open_adapted(source) is not None)
    assert count.outcome().accepted == 2, count.outcome().notes


def sparse(path: Path, size: int, start: bytes = b"") -> Path:
    with path.open("wb") as file:
        file.write(start)
        file.truncate(size)
    return path


def test_files_beyond_their_limits_are_rejected_by_the_limit(tmp_path: Path) -> None:
    length = (30_000_000).to_bytes(8, "little")
    assert_rejected(
        lambda: open_checkpoint(sparse(tmp_path / "x.safetensors", 30_000_008, length)),
        "at most 25.0 MB, got 30.0 MB",
    )
    assert_rejected(
        lambda: load_spec(sparse(tmp_path / "spec.toml", 5_000_000)), "at most 4.0 MB, got 5.0 MB"
    )
    assert_rejected(
        lambda: read_recipe(sparse(tmp_path / "recipe.yaml", 300_000)),
        "at most 250.0 kB, got 300.0 kB",
    )
    folder = save_file_bytes(tmp_path / "model", "gpt2")
    sparse(folder / "config.json", 9_000_000)
    assert_rejected(lambda: open_checkpoint(folder), "at most 8.0 MB, got 9.0 MB")


def test_short_texts_that_stand_for_long_ones_are_rejected() -> None:
    tensors = "".join(f'"t{i}.{{i}}.{{j}}" = "s"\n' for i in range(10))
    text = (
        HEAD.replace("[spaces]", "repeat = { i = 1000, j = 50 }\n[spaces]")
        + f"[tensors.backbone]\n{tensors}"
    )
    assert_rejected(lambda: parse_spec(text), "at most 400,000 names")
    assert len(parse_spec(text.replace("1000", "10")).tensors) == 5000
    models = "\n".join(f"  - {{model: m{i}, parameters: *p}}" for i in range(200))
    weights = ", ".join(["1"] * 1000)
    recipe = f"merge_method: linear\nparameters: &p {{weight: [{weights}]}}\nmodels:\n"
    assert_rejected(lambda: parse_recipe(f"{recipe}{models}"), "at most 100,000 values")
    assert len(parse_recipe(f"{recipe}  - {{model: m, parameters: *p}}").models) == 1
    assert_rejected(
        lambda: parse_recipe(f"{recipe}  - {{model: m, parameters: {{weight: {'1' * 400}}}}}"),
        "a number is required",
    )


def test_documents_that_cannot_be_written_again_are_rejected(tmp_path: Path) -> None:
    from regauge.split.client.journal import FolderJournal

    deep = "[" * 500 + "]" * 500
    folder = save_file_bytes(tmp_path / "model", "gpt2")
    config = (folder / "config.json").read_text()
    FolderJournal(tmp_path / "journal")
    for value, match in (
        (deep, "nested at most 100 deep"),
        ('"\\ud800"', "lone surrogate"),
        ("[" * 100_000, "is not JSON"),
    ):
        (folder / "config.json").write_text(config.replace("{", f'{{"a": {value},', 1))
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(folder)
        (tmp_path / "journal" / "session.json").write_text(f'{{"a": {value}}}')
        assert_rejected(lambda: FolderJournal(tmp_path / "journal"), match)
        if "ud800" not in value:  # a page replaces what is not valid Unicode
            assert_rejected(lambda value=value: from_json(f'{{"a": {value}}}'), match)
    (folder / "config.json").write_text(
        config.replace("{", '{"a": "\\ud83d\\ude00",', 1)
    )  # a pair is one character
    assert open_checkpoint(folder).config["a"] == "\U0001f600"


def test_a_panic_of_the_tokenizers_library_is_an_error(tmp_path: Path) -> None:
    from regauge.data.tokenizers import encode, special_tokens
    from soak.files import tokenizer

    tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    assert len(special_tokens(path)) == 3
    good = json.loads(path.read_text())
    good["post_processor"]["special_tokens"].pop("[CLS]")
    path.write_text(json.dumps(good))
    assert_rejected(
        lambda: encode(path, ["a"], add_special_tokens=True), "cannot be read as a tokenizer"
    )
    path.write_bytes(b'{"added_tokens": "\xff"}')
    assert_rejected(lambda: special_tokens(path))


def test_a_federated_run_without_settings(tmp_path: Path) -> None:
    from regauge.federated.settings import Settings
    from regauge.federated.state_store import begin, load_about

    begin(tmp_path / "run", Settings(clients=2, rounds=1), "0" * 64, {})
    path = tmp_path / "run" / "run.json"
    good = load_about(tmp_path / "run")
    for bad in ({**good, "settings": [1]}, {k: v for k, v in good.items() if k != "layout"}):
        path.write_text(json.dumps(bad))
        assert_rejected(lambda: load_about(tmp_path / "run"), "must have settings and a layout")
    path.write_text("[" * 100_000)
    assert_rejected(lambda: load_about(tmp_path / "run"), "is not JSON")


def test_a_key_file_with_a_non_text_id(tmp_path: Path) -> None:
    from regauge.core.rng import seed_key
    from regauge.locking.keys import Key, load_key, save_key

    save_key(Key(seed_key(1)), tmp_path / "key", None)
    good = json.loads((tmp_path / "key").read_text())
    (tmp_path / "key").write_text(json.dumps({**good, "id": "\ud800"}))
    assert_rejected(lambda: load_key(tmp_path / "key", "lock"))


def test_results_of_the_wrong_types() -> None:
    good = {
        "regauge": "results",
        "version": 1,
        "title": "t",
        "findings": [],
        "tables": [],
        "figures": [],
        "facts": {},
        "unchecked": [],
    }
    assert from_json(json.dumps(good)).title == "t"
    assert_rejected(lambda: from_json(json.dumps({**good, "findings": ["a"]})), "is damaged")

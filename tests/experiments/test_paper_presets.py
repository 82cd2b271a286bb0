"""The paper presets, end to end: the papers' own data formats and model ids, on stand-ins.

Data are written as their authors distribute them; hub ids of models are folders of the assets with
small models. Sizes and the number of steps are cut, everything else is that of the preset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import EXPERIMENTS
from experiments.__main__ import main
from experiments.paper_000 import locked_finetune
from experiments.paper_002 import jigsaw_cells, positions
from experiments.paper_003 import pair_models
from experiments.shared import models, presets
from experiments.shared.presets import CELEBA, From, Preset, Subject
from regauge.results.findings import Results, load_results
from support import stand_ins

SIDE, STEPS = 32, 2
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": SIDE,
    "patch_size": 8,
}
TOKENS = 32


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("assets")
    for part, each in (("train", 3), ("val", 2)):
        stand_ins.image_folder(folder / "imagenet" / part, stand_ins.WNIDS, each, SIDE)
    stand_ins.image_folder(folder / "imagenet-o", stand_ins.WNIDS[:2], 2, SIDE)
    stand_ins.celeba(folder / "flwrlabs" / "celeba", CELEBA, [0] * 8 + [2] * 250, SIDE)
    stand_ins.ade20k(folder / "ADEChallengeData2016", 4, SIDE)
    stand_ins.imdb(folder / "stanfordnlp" / "imdb", 40)
    stand_ins.snli(folder / "snli", 12)
    lines = [f"{line}\n" for line in stand_ins.wiki_lines(200)]
    stand_ins.saved(
        folder / "Salesforce" / "wikitext" / "wikitext-2-raw-v1",
        {split: {"text": lines} for split in ("train", "validation", "test")},
    )
    for split, count in (("train", 40), ("test", 10)):
        columns = {"img": stand_ins.encoded(count, 32), "label": [i % 10 for i in range(count)]}
        stand_ins.parquet(
            folder / "uoft-cs" / "cifar10" / "plain_text" / split / "0.parquet", columns
        )
    (folder / "tinyshakespeare.txt").write_text("".join(lines) * 4)
    _models(folder)
    return folder


def _models(folder: Path) -> None:
    """Write small models under the hub's ids."""
    import transformers as t
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    vocabulary = {f"[{i}]": i for i in range(103)}
    words = "the film is and plot of a . = fine bright lovely dull grim stale The"
    vocabulary |= {w: 103 + i for i, w in enumerate([*words.split(" "), *map(str, range(200))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[100]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    bert = t.BertConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=len(vocabulary),
        max_position_embeddings=512,
    )
    gpt2 = t.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=512)  # 50,257 tokens
    for name, model in (
        ("google-bert/bert-base-uncased", t.BertModel(bert)),
        ("openai-community/gpt2", t.GPT2LMHeadModel(gpt2)),
        ("google/vit-base-patch16-224-in21k", t.ViTModel(t.ViTConfig(**VIT))),
    ):
        model.save_pretrained(folder / name)
        t.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / name)


def cut(subject: Subject) -> Subject:
    """Return a subject of smaller inputs, of a small model if it is built from a config, and with
    two steps of training.
    """
    task, model = dict(subject.task), dict(subject.model)
    if "size" in task:
        task["size"] = min(task["size"], SIDE)
    if task["classes"] == 1000:
        task["classes"] = len(stand_ins.WNIDS)
    if task.get("length", 0) > TOKENS:
        task["length"] = TOKENS
    config = dict(model.get("config", {}))
    for name, value in {**VIT, "num_labels": task["classes"]}.items():
        if name in config and (config.get("model_type") == "vit" or name == "num_labels"):
            config[name] = value
    kind = config.get("model_type")
    if kind == "swin":
        config |= {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2}
        config |= {"image_size": SIDE}
    if kind == "resnet":
        config |= {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    if kind == "bert":
        config |= {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    if kind in ("gpt2", "llama"):
        config |= {"n_embd": 16, "n_layer": 1} if kind == "gpt2" else {"hidden_size": 16}
        config |= {} if kind == "gpt2" else {"num_hidden_layers": 1, "intermediate_size": 16}
    model = {**model, **({"config": config} if config else {})}
    recipe, plan = subject.recipe, dict(subject.plan)
    if recipe is not None:
        recipe = {**recipe, "batch": 4, "epochs": 1, "steps": STEPS}
    if "budget" in plan:
        del recipe["steps"]  # of split learning: two batches of four
        plan["budget"] = {**plan["budget"], "hidden": 32, "depth": 1, "epochs": STEPS}
    if "combinations" in plan:  # with rows and without, of two defences
        plan["combinations"] = [*plan["combinations"][:2], *plan["combinations"][-2:]]
    tested = {n: v for n, v in subject.tested.items() if n != "patch"}
    tested |= {"patch": VIT["patch_size"]} if "patch" in subject.tested else {}

    def small(source: From) -> From:
        return source if source.size is None else replace(source, size=SIDE)

    return replace(
        subject,
        model=model,
        task=task,
        recipe=recipe,
        plan=plan,
        tested=tested,
        test=small(subject.test),
        train=None if subject.train is None else small(subject.train),
        start=None if subject.start is None else cut(subject.start),
        batch=4,
    )


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, assets: Path) -> None:
    whole = presets.PRESETS["paper"]

    def preset() -> Preset:
        found = whole()
        tables = {k: {n: cut(s) for n, s in t.items()} for k, t in found.tables.items()}
        return replace(found, tables=tables)

    def all_of(subjects: Callable[[], Mapping[str, Subject]]) -> Callable[[], dict[str, Subject]]:
        return lambda: {name: cut(subject) for name, subject in subjects().items()}

    monkeypatch.setitem(presets.PRESETS, "paper", preset)
    monkeypatch.setitem(jigsaw_cells._PRESETS, "paper", all_of(jigsaw_cells._PRESETS["paper"]))
    monkeypatch.setitem(pair_models.PAIRS, "paper", all_of(pair_models.PAIRS["paper"]))
    monkeypatch.setattr(locked_finetune, "GENERATION", locked_finetune.SHORT)
    monkeypatch.setattr(models, "_of_timm", of_timm)
    monkeypatch.setattr(positions, "find_spec", lambda name: None)  # UMAP compiles for minutes
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def of_timm(about: Mapping[str, Any], source: str | None, pretrained: bool = True) -> Any:
    """A ViT with the interface of timm's where timm is installed, else that of transformers."""
    if find_spec("timm") is not None:
        import timm

        return timm.create_model(
            about["timm"],
            num_classes=about["classes"],
            img_size=SIDE,
            embed_dim=12 * 4,
            depth=1,
        )
    import transformers as t

    return t.ViTForImageClassification(t.ViTConfig(**VIT, num_labels=about["classes"]))


def reproduce(name: str, folder: Path, assets: Path, *more: str) -> Results:
    path = folder / "r.json"
    code = main([name, "--preset", "paper", "--assets", str(assets), "--json", str(path), *more])
    assert code in (0, 3)  # two steps of training need not hold what the paper finds
    return load_results(path)


NAMES = [name for name in EXPERIMENTS if name.startswith(("000/", "002/"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_paper_preset_runs(
    name: str, tmp_path_factory: pytest.TempPathFactory, assets: Path, monkeypatch: Any
) -> None:
    cache = tmp_path_factory.getbasetemp() / "paper-cache"
    monkeypatch.setenv("REGAUGE_CACHE", str(cache))
    folder = tmp_path_factory.mktemp("run")
    first = reproduce(name, folder, assets)
    assert first.facts["preset"] == "paper"
    assert first.findings or first.figures
    again = reproduce(name, folder, assets)  # from the cache, to the same numbers
    assert [f.value for f in again.findings] == [f.value for f in first.findings]

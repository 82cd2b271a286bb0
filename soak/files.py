"""Mutated files of every kind that regauge reads. Each must raise a typed error or give a valid
result, and leave no output behind.

Half of the mutants change bytes (`harness.mutants`). The other half change values and keep the
syntax (`documents`), if the kind of file has one.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from regauge.errors import RegaugeError
from soak.documents import header_mutants, json_mutants, mutate, to_toml
from soak.harness import Counter, Outcome, mutants

MUTANTS = 10_000  # per kind at scale 1
BUDGET_MB = 100  # growth of memory by reading one of these files; each is smaller than 100 kB

Mutants = Callable[[int, int], Iterator[bytes]]  # (seed, count)


@dataclass(frozen=True)
class Kind:
    """One valid file and its reader.

    Args:
        good: The valid bytes. Bytes are changed mostly within the first `focus` of them.
        read: Writes bytes to the file and reads it. Returns whether the result is right, or raises
            a typed error if it rejects the file.
        documents: Mutants that keep the syntax, or None.
        folder: Must contain the same names before and after a file is rejected.
    """

    good: bytes
    read: Callable[[bytes], bool]
    documents: Mutants | None = None
    focus: int | None = None
    folder: Path | None = None

    def mutants(self, seed: int, count: int) -> Iterator[bytes]:
        if self.documents is None:
            yield from mutants(self.good, seed, count, self.focus)
            return
        yield from mutants(self.good, seed, count // 2, self.focus)
        yield from self.documents(seed, count - count // 2)

    def trial(self, data: bytes) -> bool:
        before = _names(self.folder)
        try:
            return self.read(data)
        except RegaugeError:
            if _names(self.folder) != before:
                return False  # counted as lost: a rejected file has left an output behind
            raise


def _names(folder: Path | None) -> list[str]:
    return [] if folder is None else sorted(p.name for p in folder.iterdir())


def _json(path: Path, read: Callable[[], bool]) -> Kind:
    """Return the kind of a JSON file at a path, to which mutants are written before each read."""
    good = path.read_bytes()
    return Kind(good, partial(_place, path, read), partial(json_mutants, json.loads(good)))


def _tensors(path: Path, read: Callable[[], bool], folder: Path | None = None) -> Kind:
    """Return the kind of a safetensors file at a path."""
    good = path.read_bytes()
    length = 8 + int.from_bytes(good[:8], "little")
    return Kind(good, partial(_place, path, read), partial(header_mutants, good), length, folder)


def _place(path: Path, read: Callable[[], bool], data: bytes) -> bool:
    path.write_bytes(data)
    return read()


def _save(folder: Path, name: str = "gpt2", half: bool = False) -> Path:
    """Save a pico-model as a checkpoint."""
    from safetensors.torch import save_file

    from support.picos import build, config_of

    model = build(name)
    model = model.half() if half else model
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        folder.mkdir()
        save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config_of(model)))
    return folder


FAMILIES = (
    "gpt2",
    "llama",
    "mixtral",
    "gemma2",
    "qwen3",
    "bert",
    "distilbert",
    "deberta-v3",
    "vit",
    "dinov2",
    "bart",
    "t5",
    "swin",
    "clip",
)


def config(folder: Path) -> list[Kind]:
    """Prepare config.json as `inspect` and `move` read it, for every family."""
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.core.check import check
    from regauge.models.resolve import spec_of
    from regauge.models.summary import format_summary, summarize

    def inspected(model: Path) -> bool:
        opened = open_checkpoint(model)
        spec = spec_of(opened, discover=False)
        faults = check(spec, opened if spec.fixed else opened.entries)
        return bool(faults) or bool(format_summary(summarize(opened, spec), []))

    kinds = []
    for name in FAMILIES:
        saved = _save(folder / name, name)
        kinds.append(_json(saved / "config.json", partial(inspected, saved)))
    return kinds


def loaded(folder: Path) -> list[Kind]:
    """Prepare config.json as `verify` and `split` read it: the class is built and the weights are
    loaded.
    """
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.models.load import load_empty, load_model

    def built(model: Path) -> bool:
        opened = open_checkpoint(model)
        load_empty(opened)
        return load_model(opened) is not None

    kinds = []
    for name in ("gpt2", "llama", "vit"):
        saved = _save(folder / name, name)
        kinds.append(_json(saved / "config.json", partial(built, saved)))
    return kinds


def discovered(folder: Path) -> list[Kind]:
    """Prepare config.json of a model that no family describes: its class is built and traced."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from regauge.checkpoints.reader import open_checkpoint
    from regauge.models.resolve import spec_of

    small = {
        "hidden_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "intermediate_size": 20,
        "vocab_size": 30,
    }
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**small, max_position_embeddings=16))
    model.save_pretrained(folder / "model")

    def traced() -> bool:
        return bool(spec_of(open_checkpoint(folder / "model")).spaces)

    return [_json(folder / "model" / "config.json", traced)]


def weights(folder: Path) -> list[Kind]:
    """Prepare model.safetensors. Every tensor of an accepted file must have its declared shape."""
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.core.check import check
    from regauge.models.resolve import spec_of

    saved = _save(folder / "model", half=True)

    def read() -> bool:
        opened = open_checkpoint(saved)
        check(spec_of(opened), opened.entries)
        return all(
            tuple(opened[n].shape) == e.shape == opened.bits[n].shape
            for n, e in opened.entries.items()
        )

    return [_tensors(saved / "model.safetensors", read)]


def index(folder: Path) -> list[Kind]:
    """Prepare model.safetensors.index.json of a sharded folder."""
    from regauge.checkpoints.reader import open_checkpoint
    from support.picos import build

    build("gpt2").save_pretrained(folder / "model", max_shard_size="10KB")
    right = set(open_checkpoint(folder / "model"))

    def read() -> bool:
        return set(open_checkpoint(folder / "model")) == right

    return [_json(folder / "model" / "model.safetensors.index.json", read)]


def key(folder: Path, passphrase: str | None) -> list[Kind]:
    """Prepare a key file. An accepted one must hold the same key."""
    from regauge.core.rng import seed_key
    from regauge.locking.keys import Key, load_key, save_key

    right, path = Key(seed_key(1)), folder / "key"
    save_key(right, path, passphrase, scrypt={"n": 16, "r": 8, "p": 1})
    kind = _json(path, lambda: load_key(path, "lock", passphrase) == right)
    return [Kind(kind.good, kind.read, kind.documents, folder=folder)]


def locked(folder: Path, where: str) -> list[Kind]:
    """Prepare a locked model. Unlocking an accepted one must give the plain weights bit for bit."""
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.core.rng import seed_key
    from regauge.locking.keys import Key
    from regauge.locking.locked_checkpoints import plan_lock, plan_unlock
    from regauge.models.resolve import spec_of

    secret = Key(seed_key(1))
    plain = open_checkpoint(_save(folder / "plain", half=True))
    path, out = folder / ("locked.safetensors" if where == "file" else "locked"), folder / "out"
    plan_lock(plain, spec_of(plain), path, secret, group="signed").write()
    right = {n: plain.bits[n].tobytes() for n in plain}

    def unlocked() -> bool:
        opened = open_checkpoint(path)
        plan_unlock(opened, spec_of(opened), out, secret).write()
        written = open_checkpoint(out)
        same = {n: written.bits[n].tobytes() for n in written} == right
        shutil.rmtree(out)
        return same

    if where == "config":
        kind = _json(path / "config.json", unlocked)
        return [Kind(kind.good, kind.read, kind.documents, folder=folder)]
    return [_tensors(path if where == "file" else path / "model.safetensors", unlocked, folder)]


def sealed(folder: Path) -> list[Kind]:
    """Prepare a sealed file. Opening an accepted one must give the plain bytes."""
    from regauge.core.rng import seed_key
    from regauge.locking.keys import Key
    from regauge.locking.seal import open_sealed, seal

    out, right = folder / "out", bytes(range(256)) * 20
    (folder / "in").write_bytes(right)
    secret = Key(seed_key(1), "seal")
    identity, other = (Key(seed_key(n), "receive") for n in (1, 2))
    seal(folder / "in", secret, folder / "sealed")
    seal(folder / "in", out=folder / "sent", to=[identity.recipient, other.recipient])

    def opened(path: Path, key: Key) -> bool:
        open_sealed(path, key, out)
        same = out.read_bytes() == right
        out.unlink()
        return same

    return [
        Kind(
            path.read_bytes(),
            partial(_place, path, partial(opened, path, key)),
            focus=focus,
            folder=folder,
        )
        for path, key, focus in (
            (folder / "sealed", secret, 250),
            (folder / "sent", identity, 400),
        )
    ]


def element(folder: Path) -> list[Kind]:
    """Prepare an element file. An accepted one must have an inverse that restores the state."""
    import torch

    from regauge.checkpoints.element_files import load_element, save_element
    from regauge.core.action import apply
    from regauge.core.element import element as drawn
    from support.picos import build, spec_of

    kinds = []
    for name, within in (("gpt2", None), ("llama", None), ("gpt2", "permutation")):
        model = build(name)
        spec, state = spec_of(model), model.state_dict()
        path = folder / f"{name}-{within}"
        save_element(drawn(spec, 1, **({} if within is None else {"within": within})), path)

        def read(path: Path = path, spec: Any = spec, state: Any = state) -> bool:
            g = load_element(path, spec)
            back = apply(~g, apply(g, state))
            return all(torch.allclose(back[n], t, rtol=1e-5, atol=1e-5) for n, t in state.items())

        kinds.append(_tensors(path, read))
    return kinds


def spec_file(folder: Path) -> list[Kind]:
    """Prepare a spec file (TOML). An accepted one can be written and read again, and matches long
    names in bounded time.
    """
    from regauge.checkpoints.spec_files import dump_spec, load_spec, parse_spec
    from support.picos import build, spec_of

    example = (
        'regauge = 1\nfamily = "own"\nrepeat = { i = 3 }\nbuffers = ["mask\\\\.\\\\d+", '
        '".*(a|b)?\\\\.ids"]\nnotes = ["a note"]\n'
        '[spaces]\nstream = { size = 12, group = "permutation", folded = "orthogonal-ones" '
        '}\n"ffn.{i}" = { size = 8, group = "monomial+" }\n'
        '[tensors.embed]\n"pos" = "_ _ stream"\n[tensors.backbone]\n"n.{i}.weight" = '
        '"|stream|"\n"up.{i}.weight" = "ffn.{i} stream*"\n'
        '[outputs]\nlogits = "_ _"\n[[norms]]\ngain = "n.{i}.weight"\nreaders = '
        '[["up.{i}.weight"]]\n[fixed]\n[config]\na = 1\n'
    )
    path = folder / "spec.toml"

    def read() -> bool:
        spec = load_spec(path)
        spec.is_buffer("a" * 40 + "!")
        return parse_spec(dump_spec(spec)) == spec

    texts = (example, dump_spec(spec_of(build("mixtral"))))
    return [
        Kind(text.encode(), partial(_place, path, read), partial(_tomls, tomllib.loads(text)))
        for text in texts
    ]


def _tomls(document: dict[str, Any], seed: int, count: int) -> Iterator[bytes]:
    return (
        to_toml(mutant) if isinstance(mutant, dict) else b""
        for mutant in mutate(document, seed, count)
    )


def adapter(folder: Path, what: str) -> list[Kind]:
    """Prepare a LoRA adapter (adapter_config.json or adapter_model.safetensors). An accepted one is
    added to its model and transformed.
    """
    from safetensors.torch import save_file

    from regauge.checkpoints.adapted import open_adapted
    from regauge.checkpoints.transform import prepare_adapter
    from regauge.core.element import element as drawn
    from support.lora import ALPHA, CASES, RANK, adapter_tensors, add_adapters
    from support.picos import build, spec_of

    kinds = []
    for name, options in (("gpt2", {}), ("llama", {"dora": True})):
        model, place = build(name), folder / name
        _save(place / "model", name)
        (place / "adapter").mkdir()
        save_file(
            adapter_tensors(add_adapters(model, *CASES[name], **options)),
            place / "adapter" / "adapter_model.safetensors",
        )
        patterns = {
            "h.0.attn.c_attn": 4,
            r"^transformer\.h\.[12]\.mlp\.(c_fc|c_proj)": 8,
            ".*q_proj": 2,
        }
        config = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": ALPHA,
            "fan_in_fan_out": name == "gpt2",
            "alpha_pattern": patterns,
        }
        config |= {
            "use_rslora": False,
            "rank_pattern": {},
            "target_modules": ".*(q|v)_proj",
            "layers_pattern": None,
            "bias": "none",
        }
        (place / "adapter" / "adapter_config.json").write_text(json.dumps(config))
        g = drawn(spec_of(model), 3, within="permutation")

        def read(place: Path = place, g: Any = g) -> bool:
            opened = open_adapted(f"{place / 'model'}+{place / 'adapter'}")
            complete = all(tuple(opened[n].shape) == e.shape for n, e in opened.entries.items())
            moved, h = prepare_adapter(str(place / "adapter"), g)
            return (
                complete
                and {n: make() for n, make in moved.thunks(h).items()}.keys()
                == moved.checkpoint.entries.keys()
            )

        path = place / "adapter" / what
        kinds.append(_json(path, read) if what.endswith(".json") else _tensors(path, read))
    return kinds


RECIPES = (
    {
        "merge_method": "ties",
        "base_model": "A",
        "models": [
            {"model": "A", "parameters": {"weight": [0, 0.5, 1], "density": 0.5}},
            {
                "model": "B",
                "parameters": {"weight": [{"filter": "mlp", "value": [0.5, 1]}, {"value": 0}]},
            },
        ],
        "parameters": {"normalize": True, "int8_mask": False},
        "dtype": "float32",
        "out_dtype": "bfloat16",
        "align": {
            "spaces": ["ffn.*"],
            "layers": [0, 1],
            "group": "permutation",
            "sweeps": 2,
            "nearest": False,
        },
        "tokenizer": {"source": "union", "pad_to_multiple_of": 8},
        "data": {
            "uri": "dev.tsv",
            "samples": 256,
            "fields": {"text": "sentence"},
            "mean": [0.5],
            "std": 0.5,
            "labels": True,
        },
    },
    {
        "merge_method": "passthrough",
        "slices": [
            {"sources": [{"model": "A", "layer_range": [0, 1]}]},
            {"sources": [{"model": "B", "layer_range": [0, 2]}]},
        ],
        "dtype": "float16",
    },
    {
        "merge_method": "slerp",
        "base_model": "A",
        "models": [{"model": "A"}, {"model": "B"}],
        "parameters": {"t": 0.3},
    },
)


def recipe(folder: Path) -> list[Kind]:
    """Prepare a merge recipe (YAML). An accepted one of the two models is planned."""
    import yaml

    from regauge.merging.engine import open_merge, plan_merge
    from regauge.merging.recipe_yaml import read_recipe

    models = [str(_save(folder / name)) for name in ("A", "B")]
    path = folder / "recipe.yaml"

    def read() -> bool:
        parsed = read_recipe(path)
        if set(parsed.models) <= set(models) and parsed.data is None:
            plan, thunks = plan_merge(open_merge(parsed, force=True), folder / "out")
            return len(thunks) == sum(len(f.tensors) for f in plan.files)
        return parsed.origin == str(path)

    kinds = []
    for document in RECIPES:
        text = (
            json.dumps(document)
            .replace('"A"', json.dumps(models[0]))
            .replace('"B"', json.dumps(models[1]))
        )
        good = yaml.safe_dump(json.loads(text), sort_keys=False).encode()
        kinds.append(
            Kind(good, partial(_place, path, read), partial(json_mutants, json.loads(text)))
        )
    return kinds


def results(folder: Path) -> list[Kind]:
    """Prepare a results file, read and rendered as a page."""
    from regauge.results.findings import (
        Figure,
        Finding,
        Results,
        Table,
        from_json,
        load_results,
        to_json,
    )
    from regauge.results.report import page

    images = [{"label": "a", "images": [[[0.0, 1.0], [0.5, 0.2]]]}]
    figures = {
        "lines": {"x": [1, 2], "y": {"a": [1.0, 2.0]}, "xlabel": "x", "ylabel": "y", "log": False},
        "points": {"series": {"a": [[1, 2, "b"]]}, "xlabel": "x", "ylabel": "y"},
        "bars": {"labels": ["a", "b"], "y": {"c": [1, 2]}, "ylabel": "y"},
        "images": {"columns": ["x"], "rows": images},
        "matrix": {"rows": ["a"], "columns": ["b"], "values": [[1.0]], "log": True},
        "plane": {
            "x": [0, 1],
            "y": [0, 1],
            "values": [[1, 2], [3, 4]],
            "points": {"A": [0, 0]},
            "joined": [],
            "xlabel": "",
            "ylabel": "",
            "unit": "",
        },
        "net": {"lines": {"a": [[0, 0], [1, 1]]}},
    }
    path, kinds = folder / "results.json", []

    def read() -> bool:
        loaded = load_results(path)
        page(loaded)
        return to_json(from_json(to_json(loaded))) == to_json(loaded)

    for name, data in figures.items():
        example = Results(
            "a title",
            (
                Finding(
                    "a/b",
                    "it holds",
                    True,
                    1e-9,
                    1e-6,
                    1.0,
                    "yes",
                    "here",
                    "relative error",
                    "h.0",
                    0.1,
                    3,
                ),
                Finding("c", "not", None),
            ),
            (Table("t", ("a", "b"), (("x", 1.5), (None, True)), "note"),),
            (Figure("f", name, data, "caption"),),
            {"command": ["regauge", "verify"], "seed": 1, "nested": {"a": [1, 2]}},
            ("left out",),
        )
        text = to_json(example).encode()
        kinds.append(
            Kind(text, partial(_place, path, read), partial(json_mutants, json.loads(text)))
        )
    return kinds


def server(folder: Path) -> list[Kind]:
    """Prepare the checkpoint of a split server, from which a server restarts."""
    import torch

    from regauge.split import Host, InProcess, connect
    from regauge.split.server.checkpoint import FILE
    from support.split_pairs import ADAMW, batch, make_model, optimizer_of, train

    host = Host(make_model("gpt2"), ADAMW, folder=folder, save_every=1)
    mine = make_model("gpt2")
    with connect(mine, InProcess(host)):
        train("gpt2", mine, optimizer_of(mine), range(2))
        mine(**batch("gpt2", 3))  # a pass that stays open
        host.save()
        started = make_model("gpt2")

        def read() -> bool:
            restarted = Host(started, ADAMW, folder=folder)
            finite = all(bool(torch.isfinite(t).all()) for t in restarted.backbone().values())
            restarted.save()  # a server can save what it has restored
            return finite

        return [_tensors(folder / FILE, read)]


def journal(folder: Path) -> list[Kind]:
    """Prepare the session of a split client's journal."""
    from regauge.split.client.journal import FolderJournal

    FolderJournal(folder / "journal")
    return [
        _json(
            folder / "journal" / "session.json",
            lambda: len(FolderJournal(folder / "journal").session) > 0,
        )
    ]


def federated(folder: Path) -> list[Kind]:
    """Prepare run.json and global.safetensors of a federated run."""
    import torch

    from regauge.federated.aggregation import Memory
    from regauge.federated.settings import Settings, read_settings
    from regauge.federated.state_store import (
        STATE_FILE,
        Round,
        RunState,
        begin,
        load,
        load_about,
        save,
    )

    run = folder / "run"
    begin(run, Settings(clients=3, rounds=4), "0" * 64, {"model": "m"})
    done = Round(0, (0, 1), {"2": "gone"}, 0.5, {"accuracy": 0.25}, 1.0)
    save(run, RunState({"a": torch.ones(3)}, Memory({"m/a": torch.zeros(3)}, 1), (done,)))

    def described() -> bool:
        return read_settings(load_about(run)["settings"]).clients > 0

    def restored() -> bool:
        saved = load(run)
        return saved is not None and isinstance(saved.history, tuple)

    return [_json(run / "run.json", described), _tensors(run / STATE_FILE, restored)]


def tokenizer(folder: Path) -> list[Kind]:
    """Prepare tokenizer.json: its vocabulary, tokens and mask token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    from regauge.checkpoints.vocabulary import read_vocabulary
    from regauge.data.tokenizers import decode, encode, special_tokens

    words = {w: i for i, w in enumerate(("[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "film"))}
    word_level = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    word_level.add_special_tokens(["[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    word_level.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    path = folder / "tokenizer.json"
    word_level.save(str(path))

    def read() -> bool:
        vocab = read_vocabulary(folder)
        ids = encode(path, ["a good film"])[0]
        return (
            isinstance(decode(path, ids), str) and len(special_tokens(path)) == 3 and len(vocab) > 0
        )

    return [_json(path, read)]


def pickled(folder: Path) -> list[Kind]:
    """Prepare a pickled checkpoint as `convert` reads it, zipped and in the older format."""
    import torch

    from regauge.checkpoints.convert import open_pickles
    from support.picos import build

    state = build("gpt2-classifier").half().state_dict()
    kinds = []
    for zipped in (True, False):
        path = folder / f"{zipped}.bin"
        torch.save(state, path, _use_new_zipfile_serialization=zipped)

        def read(path: Path = path) -> bool:
            opened = open_pickles(path)
            return all(
                t.bits() is not None for tensors in opened.files.values() for t in tensors.values()
            )

        kinds.append(Kind(path.read_bytes(), partial(_place, path, read), focus=4000))
    return kinds


def data(folder: Path, ending: str) -> list[Kind]:
    """Prepare a data file. Every row of an accepted one is read."""
    import numpy as np

    from regauge.data.datasets import open_data

    path = folder / f"data{ending}"
    documents: Mutants | None = None
    images = np.arange(4 * 8 * 8, dtype=np.uint8).reshape(4, 8, 8)
    match ending:
        case ".npz":
            np.savez(path, image=images, label=np.arange(4))
        case ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            encoded = [{"bytes": _png(image), "path": None} for image in images]
            pq.write_table(
                pa.table({"text": ["a", "b", "c", "d"], "label": [0, 1, 0, 1], "image": encoded}),
                path,
            )
        case ".jsonl":
            rows = [{"text": f"row {i}", "label": i, "more": [i]} for i in range(4)]
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
            documents = partial(_lines, rows)
        case _:
            path.write_text(
                "text\tlabel\na film\t1\nanother\t0\n".replace(
                    "\t", "," if ending == ".csv" else "\t"
                )
            )

    def read() -> bool:
        opened = open_data(path)
        return all(
            len(opened[field]) == len(opened) and opened[field][0] is not None for field in opened
        )

    return [Kind(path.read_bytes(), partial(_place, path, read), documents)]


def _lines(rows: list[Any], seed: int, count: int) -> Iterator[bytes]:
    for line in json_mutants(rows[0], seed, count):
        yield line + b"\n" + b"\n".join(json.dumps(row).encode() for row in rows[1:])


def _png(image: Any, ending: str = "PNG") -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, ending)
    return file.getvalue()


def image(folder: Path) -> list[Kind]:
    """Prepare images in a folder. Accepted ones are decoded."""
    import numpy as np

    from regauge.data.datasets import open_data

    pixels = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
    kinds = []
    for ending in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"):
        path = folder / ending / f"a.{ending.lower()}"
        path.parent.mkdir()

        def read(path: Path = path) -> bool:
            return len(open_data(path.parent, size=8)["image"].to_array().shape) >= 3

        kinds.append(Kind(_png(pixels, ending), partial(_place, path, read)))
    return kinds


KINDS: dict[str, Callable[[Path], list[Kind]]] = {
    "config.json, inspected": config,
    "config.json, loaded": loaded,
    "config.json, discovered": discovered,
    "model.safetensors": weights,
    "index.json": index,
    "key file": partial(key, passphrase=None),
    "key file with passphrase": partial(key, passphrase="word"),
    "locked folder, weights": partial(locked, where="folder"),
    "locked folder, config": partial(locked, where="config"),
    "locked file": partial(locked, where="file"),
    "sealed file": sealed,
    "element file": element,
    "spec file": spec_file,
    "adapter_config.json": partial(adapter, what="adapter_config.json"),
    "adapter_model.safetensors": partial(adapter, what="adapter_model.safetensors"),
    "merge recipe": recipe,
    "results file": results,
    "split server checkpoint": server,
    "split client journal": journal,
    "federated run": federated,
    "tokenizer.json": tokenizer,
    "pickle": pickled,
    "npz": partial(data, ending=".npz"),
    "parquet": partial(data, ending=".parquet"),
    "jsonl": partial(data, ending=".jsonl"),
    "csv": partial(data, ending=".csv"),
    "image": image,
}
# Kinds that build or trace a model, or render a page, for each mutant: a fraction of the mutants.
SLOW = {"config.json, loaded": 0.1, "config.json, discovered": 0.02, "results file": 0.1}


def fuzz(name: str, count: int, seed: int = 1) -> Outcome:
    """Read `count` mutants of one kind of file, divided among its variants."""
    counter = Counter(name)
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kinds = KINDS[name](Path(temporary))
        for kind in kinds:
            if not kind.read(kind.good):
                raise AssertionError(f"{name}: the valid file is read wrong")
        idle = _resident()
        for i, kind in enumerate(kinds):
            share = count // len(kinds) + (i < count % len(kinds))
            for mutant in kind.mutants(seed + i, share):
                counter.trial(partial(kind.trial, mutant), mutant)
                if kind.folder is not None:
                    shutil.rmtree(kind.folder / "out", ignore_errors=True)
        peak = _resident("VmHWM") - idle
        counter.peak(max(0.0, peak), BUDGET_MB)
    return counter.outcome()


def _resident(field: str = "VmRSS") -> float:
    """Return the resident memory (and reset its peak), or its peak, in MB; 0 where the system does
    not report it.
    """
    try:
        if field == "VmRSS":
            Path("/proc/self/clear_refs").write_text("5")
        line = next(
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(field)
        )
    except (OSError, StopIteration):
        return 0.0
    return int(line.split()[1]) / 1024


def files(scale: float) -> Iterator[Outcome]:
    """Fuzz every kind of file."""
    with tempfile.TemporaryDirectory(prefix="soak-") as cache:
        before = os.environ.get("REGAUGE_CACHE")
        os.environ["REGAUGE_CACHE"] = str(Path(cache) / "cache")
        try:
            for name in KINDS:
                yield fuzz(name, max(5, round(MUTANTS * scale * SLOW.get(name, 1.0))))
        finally:
            os.environ.pop("REGAUGE_CACHE") if before is None else os.environ.update(
                REGAUGE_CACHE=before
            )

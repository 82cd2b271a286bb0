"""What the command line prints for bad input: `error:` names the thing and both values, `hint:` the
way out, in the terms of the caller.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import pickle
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from regauge.cli import main
from regauge.cli.app import build_app, leaves_of
from regauge.demo.move import LLAMA, make_checkpoint
from regauge.errors import Hint, MissingExtraError, RegaugeError, need
from support.cli_runs import Run, run

__all__ = ["run"]

COMMANDS = dict(leaves_of(typer.main.get_command(build_app([]))))

# command line: exit code, parts of the error, parts of the hint
BAD = {
    # usage
    "nonsense": (2, 'no command "nonsense"', "regauge --help lists its commands"),
    "audit lok": (2, 'regauge audit has no command "lok"', "did you mean regauge audit lock?"),
    "fingerprint": (2, "MODEL is required", "regauge fingerprint --help shows examples"),
    "keygen": (2, "--output is required", "regauge keygen --help"),
    "merge A B -o X --weigth 2": (2, "no option --weigth", "did you mean --weight?"),
    "merge A B -o X --lr 3": (2, "no option --lr", "regauge merge --help lists its options"),
    "merge A B -o X --set density": (2, "--set must be NAME=VALUE, got 'density'", "--set"),
    "verify M --dtype f": (
        2,
        "--dtype must be one of float64, float32",
        "--help describes --dtype",
    ),
    "verify M --steps -1": (2, "--steps must be a whole number >= 0, got '-1'", "--steps"),
    "verify M --steps=x": (2, "--steps must be a whole number >= 0, got 'x'", "--steps"),
    "split serve B --momentum 2": (2, "--momentum must be a number from 0 to 1, got '2'", ""),
    "verify M N": (2, "unexpected argument: N", "regauge verify --help"),
    "merge A B -o": (2, "-o requires a value", "--help"),
    "move M -o X": (2, "pass either -g ELEMENT or --random", "regauge move --help"),
    "merge llama -o X": (2, "pass two or more models, or a recipe", "regauge merge --help"),
    "audit gradients M --data D --lr 0": (2, "--lr must be > 0 and finite, got 0.0", "--lr"),
    # models
    "inspect nowhere": (1, "nowhere does not exist", "a model is a folder with safetensors files"),
    "inspect empty": (1, "empty is empty", "a model folder has model.safetensors"),
    "inspect KEY": (1, "KEY is damaged: it does not start like", "pass a model's folder"),
    "inspect PICKLED": (1, "is a pickle, which can run code", "regauge convert PICKLED -o OUT"),
    "inspect odd": (
        1,
        "has size 32, expected 16",
        "use the config.json that belongs to the weights",
    ),
    "verify odd": (1, "[32, 64], expected [16, 64]", "use the config.json that belongs to the"),
    "inspect strange": (
        1,
        "type 'nonesuch'; known are bart",
        "original config.json, or pass a spec",
    ),
    "verify llama --device cuda:99": (1, 'the device "cuda:99"', "regauge doctor lists"),
    # moves, matches and merges
    "move llama --random -o other": (1, "the output other exists already", "pass a new path"),
    "move llama -g KEY -o X": (1, "KEY cannot be read as an element", "--save-element FILE writes"),
    "move llama --random --spaces no -o X": (1, 'no space "no"', "its spaces are ffn, kv, qk"),
    "move LOCKED --random -o X": (1, "LOCKED is locked by the key", "regauge unlock LOCKED -k KEY"),
    "merge llama other -o X": (1, "does not share a basis with llama", "--align"),
    "merge llama other --method no -o X": (
        1,
        'known method, got "no"',
        "choose from linear, slerp",
    ),
    "merge llama other --method fisher -o X": (1, "fisher needs data", "pass --data FILE"),
    "merge bad.yaml -o X": (1, "bad.yaml, line 2: not valid YAML", "check indentation"),
    "convert llama -o X": (1, "has safetensors files already", "it needs no conversion"),
    # keys, locks and seals
    "lock llama -k SEALKEY -o X": (1, 'must be "lock", got "seal"', "keygen --purpose lock -o KEY"),
    "lock llama -k nokey -o X": (1, "nokey cannot be read", "regauge keygen -o KEY"),
    "lock LOCKED -k KEY -o X": (1, "LOCKED is locked already", "lock LOCKED -k KEY --reseal"),
    "unlock llama -k KEY -o X": (1, "llama is not locked", "regauge lock MODEL -k KEY -o OUT"),
    "unlock LOCKED -k OTHERKEY -o X": (1, "was locked by the key", "pass the key that locked it"),
    "unlock TAMPERED -k KEY -o X": (1, "extra.py was added", "regauge lock --reseal"),
    "open llama -k SEALKEY -o X": (1, "llama is not a regular file", "pass a sealed file"),
    "keygen -o KEY": (1, "KEY exists already", "name a new file"),
    "audit lock LOCKED": (1, "no attack is applicable", "pass --against BASE, or --data"),
    # data, training and pages
    "evaluate llama --data nowhere": (1, "nowhere does not exist", "a folder of images, a hub id"),
    "evaluate llama --data book.txt": (1, "needs a tokenizer", "pass --tokenizer"),
    "federate llama --data book.txt --clients 0 --rounds 1 -o X": (
        1,
        "clients must be >= 1, got 0",
        "regauge federate --help",
    ),
    "audit gradients --from llama": (1, "llama is not a run", "regauge federate"),
    "audit split llama --data book.txt --defence no": (1, 'unknown defence "no"', "choose from"),
    "split serve llama --listen nonsense": (1, "HOST:PORT, got 'nonsense'", "127.0.0.1:7000"),
    "split serve llama --listen 0.0.0.0:7999": (1, "without TLS", "pass --tls FOLDER"),
    "split serve llama --tls nowhere": (1, "a folder of certificates", "regauge split certs --to"),
    "split predict llama --data book.txt --server 127.0.0.1:1 --patience 1": (1, "", ""),
    "report KEY -o X": (1, "not a results file", "pass a file that --json wrote"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, keys and files of every kind that a command may be given wrongly."""
    here = tmp_path_factory.mktemp("place")
    for name, seed in (("llama", 0), ("other", 1), ("odd", 0), ("strange", 0)):
        make_checkpoint(here / name, LLAMA, seed)
    for name, change in (
        ("odd", {"num_attention_heads": 2 * LLAMA["num_attention_heads"]}),
        ("strange", {"model_type": "nonesuch"}),
    ):
        (here / name / "config.json").write_text(json.dumps(LLAMA | change))
    (here / "PICKLED").mkdir()
    (here / "PICKLED" / "config.json").write_text(json.dumps(LLAMA))
    (here / "PICKLED" / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    (here / "empty").mkdir()
    (here / "bad.yaml").write_text("merge_method: [\n")
    (here / "book.txt").write_text("word " * 100)
    for line in (
        f"keygen -o {here}/KEY",
        f"keygen -o {here}/OTHERKEY",
        f"keygen -o {here}/SEALKEY --purpose seal",
        f"lock {here}/llama -k {here}/KEY -o {here}/LOCKED",
    ):
        assert main(line.split()) == 0
    shutil.copytree(here / "LOCKED", here / "TAMPERED")
    (here / "TAMPERED" / "extra.py").write_text("")
    return here


@pytest.mark.parametrize("line", BAD)
def test_bad_input(line: str, place: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    code, error, hint = BAD[line]
    result = run(*line.split())
    assert (result.code, result.out) == (code, ""), result.err
    assert all(x.startswith("regauge: ") for x in result.err.splitlines())
    text, _, way_out = result.err.rpartition("regauge: hint: ")
    assert error in text.partition("regauge: error: ")[2]
    assert hint in way_out.rstrip("\n")
    assert "\n" not in way_out.rstrip("\n"), "one line"
    assert way_out.strip()
    assert not re.search(r"\b[a-z_]+=[A-Z({\"']|regauge\.[a-z]", way_out), "not Python"
    assert not (place / "X").exists()


def test_missing_libraries_are_named_as_on_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'^POT \(imported as ot\).*extra "transport"') as e:
        need("ot", "transport")
    assert e.value.hint == "pip install 'regauge[transport]'"
    with pytest.raises(MissingExtraError, match="Flower") as e:
        need("flwr", "federated")
    assert "typer < 0.21" in str(e.value.hint)
    assert "python -m venv flower" in str(e.value.hint)


# The two forms of a hint


def test_a_hint_has_a_form_for_each_caller(capsys: pytest.CaptureFixture[str]) -> None:
    error = RegaugeError("it fails", hint=Hint("pass align=True", cli="pass --align"))
    assert (error.hint, error.cli_hint) == ("pass align=True", "pass --align")
    assert traceback.format_exception(error)[-1] == "hint: pass align=True\n"
    assert RegaugeError("it fails", hint="pass B").cli_hint == "pass B"
    assert RegaugeError("it fails").cli_hint is None
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.hint, copied.cli_hint, str(copied)) == (
        "pass align=True",
        "pass --align",
        "it fails",
    )


def test_python_shows_the_hint_below_the_message(place: Path) -> None:
    code = f"import regauge; regauge.unlock({str(place / 'llama')!r}, regauge.generate_key())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-2:] == [
        f"regauge.errors.LockError: {place / 'llama'} is not locked",
        "hint: regauge.lock(model, key) locks one",
    ]


def hints() -> Iterator[tuple[str, str, bool]]:
    """Yield every hint of the library: place, text, and whether it is the form for commands."""
    source = Path(__file__).parents[2] / "src" / "regauge"
    for file in sorted(source.rglob("*.py")):
        if "cli" in file.relative_to(source).parts[:1]:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            where = f"{file.relative_to(source)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Hint":
                for words in (k for k in node.keywords if k.arg == "cli"):
                    yield where, ast.unparse(words.value), True
                yield where, ast.unparse(node.args[0]), False
            elif isinstance(node, ast.Call):
                for words in (k for k in node.keywords if k.arg == "hint"):
                    if not any(getattr(n, "id", "") == "Hint" for n in ast.walk(words.value)):
                        yield where, ast.unparse(words.value), False


HINTS = list(hints())
OPTIONS = {o for c in COMMANDS.values() for p in c.params for o in (*p.opts, *p.secondary_opts)}
# Faults of files that only commands write, and of nodes that other programs start.
FOR_OTHERS = ("flower-supernode", "on the server")


def test_hints_for_python_name_no_options() -> None:
    assert len(HINTS) > 600
    found = [
        (where, text)
        for where, text, is_cli in HINTS
        if not is_cli
        and not any(words in text for words in FOR_OTHERS)
        and re.search(
            r"(?<![\w-])--[a-z]|(?<![\w/])-[gko]\b|regauge (?!client|file)[a-z]+ [A-Z-]", text
        )
    ]
    assert found == []


def test_hints_for_commands_name_commands_and_options_that_exist() -> None:
    faults = []
    for where, text, is_cli in HINTS:
        if is_cli:
            options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - {"--help"}
            faults += [(where, option) for option in options - OPTIONS]
            for words in re.findall(r"regauge ((?:audit|split|jigsaw) \w+|\w+)", text):
                if words not in COMMANDS and not re.match(r"that |lists", words):
                    faults.append((where, words))
    assert faults == []

"""Structure-aware mutants: documents that still parse, with a value of another type, size or name
somewhere inside.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

DEEP: Any = None
for _ in range(200):
    DEEP = [DEEP]

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        7,
        1.5,
        -0.0,
        1e-300,
        1e308,
        float("nan"),
        float("inf"),
        -float("inf"),
    ),
    *(2**31, 2**32 + 1, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(
        "",
        " ",
        "a",
        "0",
        "nan",
        "../x",
        "/",
        "a/b",
        "\x00",
        "\ud800",
        "a\udfffb",
        "\x1b[31m",
        "é",
        "x" * 5000,
        "(a+)+$",
        "(",
        "*",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [1, "a"],
        [1] * 300,
        {"a": 1},
        {"": None},
        [{}],
        {"a": {"a": {"a": []}}},
        DEEP,
    ),
)
# Tokens that `json.dumps` does not write. The middle one nests deeper than a parser's stack.
RAW = ("1" * 5000, "[" * 100_000, "[" * 3000 + "]" * 3000, "1e999", "-0", '"\\ud83d"', "")
_MARK = "raw token "
_RAW_BY_MARK = {f"{_MARK}{i}": token for i, token in enumerate(RAW)}


def json_mutants(document: Any, seed: int, count: int) -> Iterator[bytes]:
    """Yield JSON documents with one to three changes. Text that is JSON is changed inside."""
    for changed in mutate(document, seed, count):
        yield to_json(changed)


def mutate(document: Any, seed: int, count: int) -> Iterator[Any]:
    """Yield copies of a document of dicts, lists and scalars with one to three changes."""
    rng = random.Random(seed)
    for _ in range(count):
        out = copy.deepcopy(document)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            out = _change(out, rng)
        yield out


def to_json(document: Any) -> bytes:
    text = json.dumps(document)
    for mark, token in _RAW_BY_MARK.items():
        text = text.replace(json.dumps(mark), token)
    return text.encode("utf-8", "surrogatepass")


def to_toml(document: dict[str, Any]) -> bytes:
    """Write a document as TOML: top-level keys on lines of their own, everything else inline."""
    return "\n".join(
        f"{json.dumps(key)} = {_inline(value)}" for key, value in document.items()
    ).encode("utf-8", "surrogatepass")


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, str) and value in _RAW_BY_MARK:
        return _RAW_BY_MARK[value]
    return (
        str(value) if isinstance(value, float) else json.dumps(value)
    )  # nan and inf are words of TOML; null is not, and must be rejected


def header_mutants(file: bytes, seed: int, count: int) -> Iterator[bytes]:
    """Yield safetensors files with a changed header of the right length. The tensors are
    unchanged.
    """
    length = int.from_bytes(file[:8], "little")
    for header in json_mutants(json.loads(file[8 : 8 + length]), seed, count):
        yield len(header).to_bytes(8, "little") + header + file[8 + length :]


def _change(document: Any, rng: random.Random) -> Any:
    """Change the value at a random place."""
    if isinstance(document, str) and document[:1] in ("{", "[") and rng.random() < 0.8:
        try:
            return to_json(_change(json.loads(document), rng)).decode("utf-8", "surrogatepass")
        except ValueError:
            return document[:-1]
    inner: list[Any] = (
        list(document)
        if isinstance(document, dict)
        else list(range(len(document)))
        if isinstance(document, list)
        else []
    )
    if not inner or rng.random() < 0.15:
        return _replace(document, rng)
    key = rng.choice(inner)
    match rng.randrange(12):
        case 0:
            del document[key]
        case 1:
            other = rng.choice(inner)
            document[key], document[other] = document[other], document[key]
        case 2 if isinstance(document, dict):
            document[
                rng.choice(("", "a", "\ud800", "x" * 300, "..", f"{key} ", str(key).upper()))
            ] = document.pop(key)
        case 3 if isinstance(document, list):
            document += copy.deepcopy(document[: 1 + rng.randrange(3)]) * rng.choice((1, 2, 50))
        case _:
            document[key] = _change(document[key], rng)
    return document


def _replace(value: Any, rng: random.Random) -> Any:
    if isinstance(value, int | float) and abs(value) < 1e300 and rng.random() < 0.4:
        return rng.choice(
            (-value, value + 1, value - 1, value * 2, value * 1000, value / 2, [value], str(value))
        )
    match rng.randrange(8):
        case 0:
            return f"{_MARK}{rng.randrange(len(RAW))}"
        case 1:
            return [value]
        case 2:
            return {"a": value}
        case 3 if isinstance(value, str):
            return rng.choice(
                (
                    value + value,
                    value[:-1],
                    value.upper(),
                    f"{value}\ud800",
                    value.swapcase(),
                    value.replace("a", "(a+)+"),
                )
            )
        case _:
            return copy.deepcopy(rng.choice(VALUES))

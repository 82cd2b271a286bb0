"""Pages of the documentation that are made from the code: families from their specs, attacks from
their docstrings, commands from their help, the API from its docstrings. `python scripts/pages.py`
writes them, `--check` says which would change; a test runs the latter.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = "<!-- Made by scripts/pages.py from the code: change that. -->\n"

# A small model of the real class for each kind that a family knows, from tests/picos.py.
SHOWN = {
    "vit": ("vit", "deit"),
    "dinov2": ("dinov2", "dinov2-swiglu"),
    "bert": ("bert", "roberta", "distilbert"),
    "deberta": ("deberta-v3", "deberta-v2"),
    "gpt2": ("gpt2",),
    "llama": ("llama", "qwen2", "qwen3"),
    "gemma2": ("gemma2",),
    "mixtral": ("mixtral",),
    "bart": ("bart",),
    "t5": ("t5", "t5-gated-unscaled"),
    "swin": ("swin",),
    "clip": ("clip",),
    "timm-vit": ("timm-vit", "timm-vit-swiglu"),
    "timm-swin": ("timm-swin",),
}
TITLES = (
    "Sees",
    "Recovers",
    "Why it works",
    "What stops it",
    "Floor",
    "Ceiling",
    "References",
    "Cost",
)


def families() -> str:
    """Every family with its spaces, their groups, and why they are not larger."""
    sys.path.insert(0, str(ROOT / "tests"))
    import support.picos as picos
    from regauge.models.families import FAMILIES

    lines = [
        MADE,
        "# Families, and what holds for each",
        "",
        (
            "For each family: the models that it describes, the spaces of a model, the group that "
            "acts on each, and what keeps it from being larger. *Folded* is the group once the "
            "norms' gains"
        ),
        (
            "are folded into the next layers (`fold_norms`, `--fold`). `ffn.*` is one space for "
            "each layer; *over* another means one member for each place of that one. `regauge "
            "inspect MODEL`"
        ),
        (
            "shows the same for a model of yours, with sizes; [the notation](notation.md) says how "
            "groups act, and [adding a model](adding-a-model.md) how to describe one that is "
            "not here."
        ),
        "",
        "| group | is | left by |",
        "| --- | --- | --- |",
        "| `permutation` | reorder | LayerNorm's gains, GELU |",
        "| `signed` | reorder, flip signs | RMSNorm's gains |",
        (
            "| `monomial+`, `monomial` | reorder, scale (positive, or any but zero) | ReLU; the "
            "two "
            "sides of a gated FFN |"
        ),
        (
            "| `orthogonal`, `orthogonal-ones` | rotate (keeping the all-ones vector) | RMSNorm, "
            "LayerNorm without gains |"
        ),
        (
            "| `linear` | every invertible matrix | a product of two matrices: queries and keys, "
            "values and outputs |"
        ),
        "| `rotary-half`, `rotary-interleaved` | turn and scale each 2-plane | rotary positions |",
        "| `signs-half`, `signs-interleaved` | flip each 2-plane | QK-norm with rotary positions |",
        "",
    ]
    for family in FAMILIES:
        module = importlib.import_module(inspect.getmodule(family.spec).__name__)  # type: ignore[union-attr]
        told = " ".join((module.__doc__ or "").split())
        kinds = [f"`{t}`" for t in family.model_types] + [
            f"timm's `{a}*`" for a in family.architectures
        ]
        lines += [
            f"## {family.name}",
            "",
            f"{told}",
            "",
            (
                f"For {', '.join(kinds)}. Described in "
                f"`families/{module.__name__.rpartition('.')[2]}.py`."
            ),
            "",
        ]
        before: list[tuple[str, ...]] = []
        for name in SHOWN[family.name]:
            spec = picos.spec_of(picos.build(name))
            rows = list(spaces(spec))
            if rows == before:
                lines += [f"`{name}`: the same.", ""]
                continue
            before = rows
            lines += [
                f"`{name}` (as {type(picos.build(name)).__name__}):",
                "",
                "| space | group | folded | over | why not more |",
                "| --- | --- | --- | --- | --- |",
            ]
            lines += ["| " + " | ".join(row) + " |" for row in rows] + [""]
            lines += [f"- {note}" for note in spec.notes] + [""] * bool(spec.notes)
    return "\n".join(lines)


def spaces(spec: Any) -> Iterator[tuple[str, ...]]:
    """Rows of the table of one spec: spaces that are alike in all but their number are one row."""
    from regauge.core.fold import folded_spec

    folded, seen = folded_spec(spec), set()
    for name, space in spec.spaces.items():
        over = re.sub(r"\d+", "*", space.over) if space.over else ""
        later = folded.spaces[name].group
        row = (
            f"`{re.sub(r'[0-9]+', '*', name)}`",
            f"`{space.group}`",
            "" if later == space.group else f"`{later}`",
            over and f"`{over}`",
            space.why,
        )
        if row not in seen:
            seen.add(row)
            yield row


def is_attack(found: Any) -> bool:
    return inspect.isfunction(found) and "Sees:" in (found.__doc__ or "")


def attacks() -> dict[str, str]:
    """A page for each attack, by the name of its file, and an index."""
    import regauge.attacks as package

    pages: dict[str, str] = {}
    index = [
        MADE,
        "# Attacks",
        "",
        *textwrap.dedent(package.__doc__ or "").strip().splitlines(),
        "",
    ]
    index += [
        (
            "Each page is the attack's docstring: what it sees, what it recovers, why it works, "
            "what stops it, and between which floor and ceiling it is scored."
        ),
        "",
    ]
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        found = [
            f for f in vars(module).values() if is_attack(f) and f.__module__ == module.__name__
        ]
        if not found:
            continue
        index += [
            f"## {(module.__doc__ or '').strip().splitlines()[0]}",
            "",
            "| attack | sees | recovers |",
            "| --- | --- | --- |",
        ]
        for function in sorted(found, key=lambda f: f.__code__.co_firstlineno):
            name = f"{info.name}-{function.__name__}"
            first, parts = told(function)
            pages[f"attacks/{name}.md"] = page(info.name, function, first, parts)
            index.append(
                f"| [{words(function.__name__)}]({name}.md) | {parts.get('Sees', '')} | "
                f"{parts.get('Recovers', '')} |"
            )
        index.append("")
    pages["attacks/index.md"] = "\n".join(index)
    return pages


def told(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """An attack's docstring: what stands before the template, and the template's parts."""
    doc = re.split(r"\n\s*(?:Args|Returns|Raises):\n", inspect.getdoc(function) or "")[0]
    text = " ".join(doc.split())
    text = re.sub(
        r"(;|,)? ?facts(/\w+| on permutation locks)[ \d.]*(\([^)]*\))?", "", text
    )  # notes that are no part of this repository
    pieces = re.split(rf"(?:^|(?<=[.;:)\s]))({'|'.join(TITLES)}): ", text)
    return pieces[0].strip(), {
        title: body.strip(" ;.,") + "."
        for title, body in zip(pieces[1::2], pieces[2::2], strict=True)
        if body.strip(" ;.,")
    }


def words(name: str) -> str:
    return name.replace("_", " ")


def page(module: str, function: Callable[..., Any], first: str, parts: dict[str, str]) -> str:
    lines = [
        MADE,
        f"# {words(function.__name__)[0].upper()}{words(function.__name__)[1:]}",
        "",
        first,
        "",
        "| | |",
        "| --- | --- |",
    ]
    lines += [
        f"| **{title}** | {parts[title].replace('|', chr(92) + '|')} |"
        for title in TITLES
        if title in parts
    ]
    view = next(iter(inspect.signature(function).parameters.values()), None)
    given = (
        f", of the view `{view.annotation}`"
        if view is not None and isinstance(view.annotation, str) and view.annotation[:1].isupper()
        else ""
    )
    lines += [
        "",
        (
            f"`regauge.attacks.{module}.{function.__name__}`{given}. [All attacks](index.md) · "
            "[threat model](../threat-model.md)"
        ),
        "",
    ]
    return "\n".join(lines)


def commands() -> str:
    """Every command with its options, and its example."""
    import typer

    from regauge.cli.app import build_app
    from regauge.cli.menu import EXAMPLES, PANELS

    found: dict[str, Any] = {}

    def walk(prefix: str, command: Any) -> None:
        for name, below in command.commands.items():
            full = f"{prefix} {name}".strip()
            if hasattr(below, "commands"):
                walk(full, below)
            else:
                found[full] = below

    walk("", typer.main.get_command(build_app([])))
    lines = [
        MADE,
        "# Commands",
        "",
        "What all of them do alike, and exit codes: [the command line](cli.md).",
        "",
    ]
    for panel, names in PANELS.items():
        lines += [f"## {panel}", ""]
        for full, command in found.items():
            if full.split()[0] in names:
                lines += [
                    f"### regauge {full}",
                    "",
                    " ".join((command.callback.__doc__ or command.help or "").split()),
                    "",
                    "```",
                    EXAMPLES.get(full, ""),
                    "```",
                    "",
                ]
                lines += [
                    "| | |",
                    "| --- | --- |",
                    *(row(p) for p in command.params if p.name not in ("verbose",)),
                    "",
                ]
    return "\n".join(lines)


def row(parameter: Any) -> str:
    names = (
        ", ".join(f"`{o}`" for o in [*parameter.opts, *parameter.secondary_opts])
        if parameter.param_type_name == "option"
        else f"`{parameter.metavar or parameter.name}`"
    )
    default = parameter.default
    shown = (
        ""
        if callable(default) or default in (None, False, True, "", ()) or parameter.required
        else f" Default: `{getattr(default, 'value', default)}`."
    )
    text = (parameter.help or "").replace("|", "\\|")
    return f"| {names} | {text}{'' if 'Default' in text else shown} |"


def reference() -> str:
    """The public names, for mkdocstrings to fill in."""
    import regauge

    groups = {
        "Models and specs": (
            "spec_of",
            "load_spec",
            "discover",
            "check",
            "Spec",
            "Space",
            "load_model",
            "open_checkpoint",
            "cut",
        ),
        "Elements": (
            "element",
            "identity",
            "Element",
            "save_element",
            "load_element",
            "parse",
            "dual",
        ),
        "Acting": ("act", "apply", "apply_", "fold_norms", "move_adapter", "invariants"),
        "Verify": ("verify", "Permuted"),
        "Match and merge": ("match", "merge"),
        "Lock and seal": (
            "Key",
            "generate_key",
            "save_key",
            "load_key",
            "lock",
            "unlock",
            "authorize",
            "deauthorize",
            "seal",
            "open_sealed",
        ),
        "Errors": ("RegaugeError",),
    }
    rest = set(regauge.__all__) - {name for names in groups.values() for name in names}
    if rest:
        groups["More"] = tuple(sorted(rest))
    lines = [
        MADE,
        "# API reference",
        "",
        (
            "All names of `regauge.__all__`. `import regauge` loads none of them before it is "
            "used. "
            "[What is public](policy.md)."
        ),
        "",
    ]
    for title, names in groups.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += [f"::: {getattr(regauge, name).__module__}.{name}", ""]
    lines += [
        "## For your own tests",
        "",
        "::: regauge.testing.symmetry_error",
        "",
        "::: regauge.testing.assert_symmetry",
        "",
    ]
    lines += [
        "## Masked jigsaw puzzles",
        "",
        "::: regauge.jigsaw.wrapper.MaskedJigsaw",
        "",
        "## Data",
        "",
        "::: regauge.data.datasets.open_data",
        "",
    ]
    return "\n".join(lines)


def made(*, only_quick: bool = False) -> dict[str, str]:
    """All pages, by their place below docs/. The page of families builds models, which takes a
    while.
    """
    pages = {**attacks(), "commands.md": commands(), "reference.md": reference()}
    return pages if only_quick else {**pages, "families.md": families()}


def stale(pages: dict[str, str]) -> list[str]:
    """Pages that are not as they would be made, and pages of attacks that are no more."""
    wrong = [
        name
        for name, text in pages.items()
        if not (DOCS / name).exists() or (DOCS / name).read_text() != text
    ]
    return wrong + [
        str(p.relative_to(DOCS))
        for p in sorted((DOCS / "attacks").glob("*.md"))
        if str(p.relative_to(DOCS)) not in pages
    ]


def main() -> int:
    pages = made()
    wrong = stale(pages)
    if "--check" in sys.argv[1:]:
        sys.stdout.write("".join(f"{name} would change\n" for name in wrong))
        return 1 if wrong else 0
    for name in wrong:
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(pages[name]) if name in pages else path.unlink()
    sys.stdout.write(f"{len(pages)} pages, {len(wrong)} new or changed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

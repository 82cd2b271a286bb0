"""The documentation: pages that are made from the code are as it makes them, links lead somewhere,
and the code of the concepts page runs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "scripts"))
import drawings  # noqa: E402
import layout  # noqa: E402
import pages  # noqa: E402


def test_pages_are_as_the_code_makes_them() -> None:
    assert pages.find_stale(pages.build_pages(only_quick=True)) == [], "run python scripts/pages.py"


@pytest.mark.slow
def test_the_page_of_families_is_as_the_specs_make_it() -> None:
    rendered = pages.render_families()
    for name, text in rendered.items():
        assert (DOCS / name).read_text() == text, "run python scripts/pages.py"
    listed = {str(p.relative_to(DOCS)) for p in (DOCS / "families").glob("*.md")}
    assert listed == rendered.keys() - {"families.md"}


def test_every_family_is_shown() -> None:
    from regauge.models.families import FAMILIES

    assert set(pages.EXAMPLE_MODELS) == {family.name for family in FAMILIES}
    text = (DOCS / "families.md").read_text()
    for family in FAMILIES:
        assert f"](families/{family.name}.md)" in text
        assert (DOCS / "families" / f"{family.name}.md").exists()
        assert all(f"`{t}`" in text for t in family.model_types)


def test_every_attack_fills_in_the_template() -> None:
    """What it sees, recovers and is stopped by, why it works, and between which bounds it is
    scored.
    """
    import importlib
    import pkgutil

    import regauge.attacks

    for info in pkgutil.iter_modules(regauge.attacks.__path__):
        module = importlib.import_module(f"regauge.attacks.{info.name}")
        for member in vars(module).values():
            if pages.is_attack(member) and member.__module__ == module.__name__:
                first, parts = pages.parse_docstring(member)
                assert first, member
                assert {
                    "Sees",
                    "Recovers",
                    "Why it works",
                    "What stops it",
                    "Floor",
                    "Ceiling",
                } <= parts.keys(), member


def test_the_pictures_are_as_their_scripts_make_them(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, ROOT / "scripts" / "picture.py", tmp_path / "picture.svg"], check=True
    )
    assert (tmp_path / "picture.svg").read_bytes() == (DOCS / "picture.svg").read_bytes()
    for name, draw in drawings.DRAWINGS.items():
        assert (DOCS / name).read_text() == draw().svg(), f"run python scripts/drawings.py: {name}"


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.svg")), ids=lambda p: p.name)
def test_pictures_have_two_palettes_and_text_that_a_phone_shows(path: Path) -> None:
    svg = path.read_text()
    assert "prefers-color-scheme:dark" in svg
    root = re.search(r"<svg [^>]*>", svg)
    assert root
    width = re.search(r' width="(\d+)"', root[0])
    assert width
    assert float(width[1]) <= 560, "shown at less than 64 % on 390 pixels"
    sizes = [float(size) for size in re.findall(r"font-size:([\d.]+)px", svg)]
    assert min(sizes, default=14) >= 14


def test_tables_of_the_site_scroll_in_themselves() -> None:
    style = (DOCS / "site.css").read_text()
    rule = re.search(r"\.md-typeset table:not\(\[class\]\) \{(.*?)\}", style)
    assert rule
    assert "overflow-x: auto" in rule[1]
    assert "max-width: 100%" in rule[1]


def test_columns_of_numbers_are_aligned() -> None:
    head = "<tr>\n<th>model</th>\n<th>loss</th>\n<th>verdict</th>\n</tr>"
    row = "<tr>\n<td>{}</td>\n<td>{}</td>\n<td>{}</td>\n</tr>"
    rows = row.format("1", "0.26 ± 0.02", "holds") + row.format("2", "", "5 %")
    marked = layout.on_page_content(f"<table>{head}{rows}</table>")
    assert marked.count('class="number"') == 3
    assert '<th class="number">loss</th>' in marked
    assert '<td class="number"></td>' in marked
    assert marked.replace(' class="number"', "").replace("\N{NO-BREAK SPACE}", " ") == (
        f"<table>{head}{rows}</table>"
    )


def test_escaped_pipes_in_tables_are_shown_as_pipes() -> None:
    table = "<table><tr>\n<td><code>--a b\\|c</code></td>\n</tr></table>"
    assert "b|c</code>" in layout.on_page_content(table)
    assert "a\\|b" in layout.on_page_content("<p>a\\|b</p>")


def test_options_and_units_are_not_broken_over_lines() -> None:
    page = "<p>88.2 % with <code>merge --align -o A-B</code></p>"
    page += "<pre><code>a --data 5 %</code></pre>"
    marked = layout.on_page_content(page)
    assert "88.2\N{NO-BREAK SPACE}% with" in marked
    assert '<span class="option">--align</span> <span class="option">-o</span> A-B' in marked
    assert marked.endswith("<pre><code>a --data 5 %</code></pre>")
    assert "<code>regauge.<wbr>match_<wbr>all</code>" in layout.on_page_content(
        "<code>regauge.match_all</code>"
    )


def test_text_in_columns_is_not_wrapped() -> None:
    block = '<div class="language-text highlight"><pre><code>{}</code></pre></div>'
    columns, prose = block.format("t of\na  1\n\nb  2\n"), block.format("one line\n  another\n")
    marked = layout.on_page_content(columns)
    assert 'highlight columns">' in marked
    assert '<code><span class="prose">t of</span>\na  1\n\nb  2\n</code>' in marked
    assert layout.on_page_content(prose) == prose


def links(text: str) -> list[str]:
    return [
        target
        for target in re.findall(
            r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S)
        )
        if "://" not in target
    ]


PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target in links(path.read_text()):
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", found.read_text(), re.M)
            slugs = {
                re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", t.replace("`", "")).strip().lower())
                for t in titles
            }
            assert anchor in slugs, target


def test_every_page_is_in_the_site() -> None:
    listed = (ROOT / "mkdocs.yml").read_text()
    for path in DOCS.rglob("*.md"):
        name = str(path.relative_to(DOCS))
        assert f" {name}\n" in listed or re.fullmatch(
            r"attacks/\w+-\w+\.md|families/[\w-]+\.md|experiments/details/[\w-]+\.md", name
        ), name


def test_the_code_of_the_concepts_runs(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {}
    snippets = re.findall(r"```python\n(.*?)```", (DOCS / "concepts.md").read_text(), re.S)
    assert len(snippets) == 3
    for snippet in snippets:
        exec(snippet, scope)
    assert capsys.readouterr().out == "(kv.0 rep.0 qk.0) stream*\n"


def test_options_in_the_guides_exist() -> None:
    import typer

    from regauge.cli.app import build_app, leaves_of

    leaves = leaves_of(typer.main.get_command(build_app([])))
    options = {
        option
        for _, command in leaves
        for parameter in command.params
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    assert {"--align", "--data"} <= options
    options |= {"--database"}  # Flower's
    for path in [*(DOCS / "guides").glob("*.md"), DOCS / "faq.md"]:
        for line in path.read_text().splitlines():
            if line.startswith((" ", "flower-", "python ")):  # other programs' commands
                continue
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", line))
            assert named <= options, (path.name, named - options)


def is_there(path: str) -> bool:
    """Whether a dotted name below regauge is a module or a name in one."""
    import importlib

    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: object = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            if not hasattr(value, name):
                return False
            value = getattr(value, name)
        return True
    return False


def test_names_in_the_guides_exist() -> None:
    assert not is_there("regauge.mach")
    assert not is_there("regauge.audit.knot")
    for path in [*(DOCS / "guides").glob("*.md"), DOCS / "faq.md"]:
        text = path.read_text()
        names = set(re.findall(r"(?<![/\w])regauge(?:\.\w+)+(?![\w/])", text))
        for module, imported in re.findall(r"^from (regauge[\w.]*) import (.+)$", text, re.M):
            names |= {f"{module}.{name.strip()}" for name in imported.split(",")}
        for name in names:
            if not name.startswith("regauge.federated.flower"):  # needs Flower
                assert is_there(name), (path.name, name)


def test_nothing_of_the_machine_is_in_the_pages() -> None:
    places = [str(Path.home()), str(DOCS.parent), tempfile.gettempdir()]
    for path in [*PAGES, *DOCS.rglob("*.svg")]:
        assert not any(f"{place}/" in path.read_text() for place in places), path

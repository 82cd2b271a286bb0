"""Notebooks of the tutorial: `python scripts/notebooks.py [FILE]` runs them and stores outputs.

mkdocs loads this file as a hook, which converts the stored notebooks to pages: no kernel, no
plugin, and nothing that a reader's browser fetches.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial"


def load_notebook(path: Path) -> dict[str, Any]:
    """Read a notebook."""
    notebook: dict[str, Any] = json.loads(path.read_text())
    return notebook


def code_of(cell: dict[str, Any]) -> str:
    """Return the source of a cell."""
    return "".join(cell["source"])


def run_cells(notebook: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Run the code cells in one namespace; yield each with its outputs: text and figures."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            yield cell, _run_cell(code_of(cell), scope)


def _run_cell(source: str, scope: dict[str, Any]) -> list[dict[str, Any]]:
    import matplotlib.pyplot as plt

    body = ast.parse(source)
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    printed, outputs = io.StringIO(), []
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        exec(compile(body, "<cell>", "exec"), scope)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), scope)
    text = printed.getvalue() + ("" if value is None else f"{value!r}\n")
    if text.strip():
        outputs.append({"output_type": "stream", "name": "stdout", "text": text})
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, dpi=110, bbox_inches="tight", metadata={"Software": ""})
        data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return outputs


@contextlib.contextmanager
def tutorial_folder() -> Iterator[None]:
    """Work in a temporary folder, from which the modules of the tutorial can be imported."""
    import matplotlib

    matplotlib.use("Agg")
    previous = Path.cwd()
    sys.path.insert(0, str(TUTORIAL))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(previous)
            sys.path.remove(str(TUTORIAL))


def convert(notebook: dict[str, Any]) -> str:
    """Return a notebook as Markdown, with the outputs that are stored in it."""
    parts = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(code_of(cell).replace(".ipynb)", ".md)"))
            continue
        parts.append(f"```python\n{code_of(cell)}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                parts.append(f"![Output](data:image/png;base64,{output['data']['image/png']})")
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, *, config: Any) -> Any:
    """Replace each notebook of the site by a page (a hook of mkdocs)."""
    from mkdocs.structure.files import File

    for file in [f for f in files if f.src_uri.endswith(".ipynb")]:
        files.remove(file)
        page = convert(load_notebook(Path(file.abs_src_path)))
        files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=page))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point links to notebooks at their pages (a hook of mkdocs)."""
    return markdown.replace(".ipynb)", ".md)")


def main(names: list[str]) -> int:
    """Run notebooks and store their outputs; all of the tutorial by default."""
    for path in [Path(n).resolve() for n in names] or sorted(TUTORIAL.glob("*.ipynb")):
        notebook = load_notebook(path)
        with tutorial_folder():
            for number, (cell, outputs) in enumerate(run_cells(notebook), 1):
                cell |= {"outputs": outputs, "execution_count": number}
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        sys.stdout.write(f"{path.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The chat template of a merged model: the most common one of its models, or one that the recipe
gives.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from regauge.checkpoints.documents import CONFIG_BYTES, read_document
from regauge.checkpoints.reader import read_json
from regauge.errors import MergeError

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def resolve_template(choice: str, folders: Iterable[Path]) -> str | None:
    """Return the text of the chat template that a recipe chooses.

    Args:
        choice: "auto" (the most common template of the models; of equally common ones the first),
            "chatml", a .jinja file, or the text itself.
        folders: the folders of the models, in the recipe's order.

    Returns:
        The template; None for "auto" if no model has one.

    Raises:
        MergeError: if the choice is none of these.
    """
    if choice == "auto":
        counts = Counter(t for folder in folders if (t := read_template(folder)) is not None)
        return counts.most_common(1)[0][0] if counts else None
    if choice == "chatml":
        return CHATML
    if "{" in choice:
        return choice
    path = Path(choice).expanduser()
    if path.suffix == ".jinja" and path.is_file():
        return _read_text(path)
    raise MergeError(
        f'chat_template must be auto, chatml, a .jinja file or the template itself, got "{choice}"',
        hint="save the template as FILE.jinja, and write chat_template: FILE.jinja",
    )


def read_template(folder: Path) -> str | None:
    """Return the chat template beside a model: of several, the default one; None without any."""
    if (folder / TEMPLATE_FILE).is_file():
        return _read_text(folder / TEMPLATE_FILE).strip()
    if not (folder / CONFIG_FILE).is_file():
        return None
    template = read_json(folder / CONFIG_FILE).get("chat_template")
    if isinstance(template, list):
        template = next(
            (
                entry.get("template")
                for entry in template
                if isinstance(entry, dict) and entry.get("name") == "default"
            ),
            None,
        )
    return template.strip() if isinstance(template, str) and template.strip() else None


def template_files(template: str, config: bytes | None) -> dict[str, bytes]:
    """Return the files of a tokenizer that hold its template.

    Args:
        template: the template.
        config: the tokenizer_config.json, whose own template is removed, if there is one.
    """
    files = {TEMPLATE_FILE: template.encode()}
    if config is not None:
        fields = json.loads(config)
        if fields.pop("chat_template", None) is not None:
            files[CONFIG_FILE] = (json.dumps(fields, indent=2, ensure_ascii=False) + "\n").encode()
    return files


def _read_text(path: Path) -> str:
    """Read a template file."""
    try:
        return read_document(path, CONFIG_BYTES).decode()
    except UnicodeDecodeError as error:
        raise MergeError(
            f"{path} must be UTF-8 text: {error}", hint="save the template as UTF-8"
        ) from error

"""The model card of a merge: its models, recipe, versions and the results of the basis check."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from regauge.merging.data_pass import SAMPLES
from regauge.merging.methods import METHODS

if TYPE_CHECKING:
    from regauge.merging.engine import Merge


def model_card(merge: Merge, name: str) -> str:
    """Return README.md. It has no date: the same merge has the same card."""
    import numpy
    import torch

    from regauge import __version__

    recipe = merge.recipe
    front_matter = [
        "---",
        "library_name: transformers",
        "tags:",
        "- merge",
        "- regauge",
        "---",
        "",
        f"# {name}",
        "",
    ]
    description = METHODS[recipe.method].description
    body = [
        f"A merge by `{recipe.method}` ({description}), made with regauge.",
        "",
        "## Models",
        "",
    ]
    for key in merge.models:
        roles = [
            role
            for role, holds in (
                ("base", key == recipe.base),
                ("config, tokenizer", key == merge.donor.key),
            )
            if holds
        ]
        body.append(f"- {key}" + (f" ({', '.join(roles)})" if roles else ""))
    body += ["", "## Do they share a basis?", ""]
    for verdict in merge.verdicts.values():
        body.append(
            f"- {verdict.model} and {verdict.anchor}, by {verdict.seen}: *{verdict.verdict}*. "
            f"{verdict.words}"
        )
        if verdict.moved:
            body.append(f"  It was {verdict.moved}.")
        elif not verdict.shared:
            body.append("  It was merged as it is, by force.")
    if not merge.verdicts:
        body.append("There is one model only.")
    if METHODS[recipe.method].statistic:
        body += ["", "## Data", ""]
        for key in merge.models:
            data = recipe.data_for(key)
            if data is not None:
                body.append(
                    f"- {key}: statistics on {data.samples or SAMPLES} examples of "
                    f"{data.uri}{', with their labels' if data.labels else ''}"
                )
    versions = (
        f"regauge {__version__}, torch {torch.__version__}, numpy {numpy.__version__}, "
        f"python {platform.python_version()}; seed {merge.seed}"
    )
    tail = ["", "## Recipe", "", "```yaml", recipe.text.rstrip(), "```", "", versions, ""]
    return "\n".join([*front_matter, *body, *tail])

"""Masked Jigsaw Puzzle training (arXiv:2205.12551) of image and text models, with its studies.

Names are imported on first use: attacks, which import puzzles, must not reach results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.core.lazy import lazy_names

if TYPE_CHECKING:
    from regauge.errors import JigsawError as JigsawError
    from regauge.jigsaw.api import JigsawOptions as JigsawOptions
    from regauge.jigsaw.api import evaluate as evaluate
    from regauge.jigsaw.api import study as study
    from regauge.jigsaw.api import train as train
    from regauge.jigsaw.masks import Puzzle as Puzzle
    from regauge.jigsaw.masks import block_masks as block_masks
    from regauge.jigsaw.masks import sample_puzzle as sample_puzzle
    from regauge.jigsaw.text import TextJigsaw as TextJigsaw
    from regauge.jigsaw.variants import VARIANTS as VARIANTS
    from regauge.jigsaw.variants import Variant as Variant
    from regauge.jigsaw.wrapper import MaskedJigsaw as MaskedJigsaw
    from regauge.jigsaw.wrapper import Output as Output
    from regauge.jigsaw.wrapper import reference_weight as reference_weight

_HOME = {
    "JigsawError": "errors",
    "JigsawOptions": "jigsaw.api",
    "MaskedJigsaw": "jigsaw.wrapper",
    "Output": "jigsaw.wrapper",
    "Puzzle": "jigsaw.masks",
    "TextJigsaw": "jigsaw.text",
    "VARIANTS": "jigsaw.variants",
    "Variant": "jigsaw.variants",
    "block_masks": "jigsaw.masks",
    "evaluate": "jigsaw.api",
    "reference_weight": "jigsaw.wrapper",
    "sample_puzzle": "jigsaw.masks",
    "study": "jigsaw.api",
    "train": "jigsaw.api",
}

__all__ = sorted(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)

"""Masked Jigsaw Puzzle training (paper 002) of image and text models, with its studies."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regauge.errors import JigsawError as JigsawError
from regauge.jigsaw.masks import Puzzle as Puzzle
from regauge.jigsaw.masks import block_masks as block_masks
from regauge.jigsaw.masks import sample_puzzle as sample_puzzle
from regauge.jigsaw.text import TextJigsaw as TextJigsaw
from regauge.jigsaw.variants import VARIANTS as VARIANTS
from regauge.jigsaw.variants import Variant as Variant
from regauge.jigsaw.wrapper import MaskedJigsaw as MaskedJigsaw
from regauge.jigsaw.wrapper import Output as Output
from regauge.jigsaw.wrapper import reference_weight as reference_weight

if TYPE_CHECKING:
    from regauge.jigsaw.api import JigsawOptions as JigsawOptions
    from regauge.jigsaw.api import evaluate as evaluate
    from regauge.jigsaw.api import study as study
    from regauge.jigsaw.api import train as train


def __getattr__(name: str) -> Any:
    """Import the functions on models and data on first use: attacks, which import puzzles, must not
    reach results.
    """
    if name in ("JigsawOptions", "evaluate", "study", "train"):
        return getattr(import_module("regauge.jigsaw.api"), name)
    raise AttributeError(f"module 'regauge.jigsaw' has no attribute {name!r}")

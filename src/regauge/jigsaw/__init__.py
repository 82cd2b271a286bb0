"""Masked Jigsaw Puzzle training (paper 002) of image and text models, with its studies."""

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

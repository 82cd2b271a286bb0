"""Published matching methods by name, as options of `match`."""

from __future__ import annotations

from regauge.core.options import require_choice
from regauge.errors import MatchError
from regauge.matching.api import MatchOptions

PRESETS: dict[str, MatchOptions] = {
    # Ainsworth et al., arXiv:2209.04836: permutations of everything that can be permuted.
    "git-re-basin": MatchOptions(within="permutation"),
    # Zhang et al., arXiv:2502.00264: rotations of heads as stored with one factor each, and
    # neurons. Each part is solved on its own, so no sweep follows.
    "rotation-symmetry": MatchOptions(
        spaces=("qk", "vo", "ffn"), within="orthogonal", rescale=True, whole=True, sweeps=0
    ),
}


def preset(name: str) -> MatchOptions:
    """Return the options of a published matching method.

    Args:
        name: "git-re-basin" or "rotation-symmetry".

    Raises:
        MatchError: there is no such preset.

    Example:
        >>> from regauge.matching.presets import preset
        >>> m = regauge.match(model, "model", options=preset("rotation-symmetry"))
        >>> m.pair.is_folded
        False
    """
    require_choice(MatchError, "preset", name, tuple(PRESETS))
    return PRESETS[name]

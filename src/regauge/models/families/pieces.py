"""Building blocks of families: layers as {tensor name: axes}, and the spaces of attention and
feed-forward blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regauge.core.groups import (
    GeneralLinear,
    Group,
    Permutation,
    PlaneSigns,
    Rotary,
    Scaling,
    SignedPermutation,
)
from regauge.core.spec import Norm, Scale, Shaped, Space, Spec
from regauge.errors import SpecError

Tensors = dict[str, str]


class Config:
    """A model's config.json with access by attribute; `config("name", default)` for fields that
    older files omit.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self.values:
            raise SpecError(
                f'config.json has no "{name}"',
                hint=f"a {self.values.get('model_type', 'model')} requires it",
            )
        return self.values[name]

    def __call__(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def axis(self, name: str, extra: int = 0) -> str:
        """Return an axis on which nothing acts, of the size in this field plus `extra`, or of any
        size if it is missing.
        """
        return hole(self(name, None), name, extra)

    def patch_axes(self) -> str:
        """Return the axes of a patch: channels, height and width."""
        height, width = _height_and_width(self("patch_size", None))
        return (
            f"{self.axis('num_channels')} {hole(height, 'patch_size')} {hole(width, 'patch_size')}"
        )

    def position_rows(self, extra: int) -> str:
        """Return the axis of a table with one row per patch, and `extra` further rows."""
        h, w, p, q = (
            _positive_int(side, name)
            for name in ("image_size", "patch_size")
            for side in _height_and_width(self(name, None))
        )
        return f"_{(h // p) * (w // q) + extra}" if h and w and p and q else "_"

    @property
    def architecture(self) -> str:
        """Return the class that the checkpoint was saved from, or an empty string."""
        return str((self.values.get("architectures") or [""])[0])


class Names:
    """The tensor names of a model, which distinguish naming schemes, heads and options; with shapes
    if built from a mapping to tensors or shapes.
    """

    def __init__(self, names: Iterable[str] | Mapping[str, Shaped | Sequence[int]]) -> None:
        self.names = frozenset(names)
        self.shapes: dict[str, tuple[int, ...]] = {}
        if isinstance(names, Mapping):
            self.shapes = {
                n: tuple(t if isinstance(t, Sequence) else t.shape) for n, t in names.items()
            }

    def has(self, fragment: str) -> bool:
        """Return whether any name contains a fragment."""
        return any(fragment in n for n in self.names)

    def has_prefix(self, prefix: str) -> bool:
        """Return whether any name starts with a prefix."""
        return any(n.startswith(prefix) for n in self.names)

    def prefix(self, prefix: str) -> str:
        """Return the prefix if any name has it, else an empty string: base models are saved
        without.
        """
        return prefix if self.has_prefix(prefix) else ""

    def count(self, prefix: str) -> int:
        """Return the number of modules in the list with this prefix, where no config has it."""
        return len({n[len(prefix) :].split(".")[0] for n in self.names if n.startswith(prefix)})

    def size(self, name: str, dim: int) -> int:
        """Return the size of one axis of a tensor, where no config has it.

        Raises:
            SpecError: the shapes are unknown.
        """
        if name not in self.shapes:
            raise SpecError(
                f'the shape of "{name}" is unknown',
                hint="build the spec from a mapping of names to tensors, or of names to shapes",
            )
        return int(self.shapes[name][dim])


def hole(size: Any, name: str, extra: int = 0) -> str:
    """Return an axis on which nothing acts, of a config's size plus `extra`, or of any size."""
    n = _positive_int(size, name)
    return "_" if n is None else f"_{n + extra}"


def _positive_int(size: Any, name: str) -> int | None:
    if size is None or (type(size) is int and size > 0):
        return size
    raise SpecError(
        f'"{name}" in config.json must be a positive integer, got {size!r}',
        hint="compare it with the original config.json",
    )


def _height_and_width(side: Any) -> Sequence[Any]:
    """Return height and width, where a config has one number for both, or two."""
    return side if isinstance(side, list | tuple) and len(side) == 2 else (side, side)


def star(term: str) -> str:
    """Return the dual of a term."""
    if term.startswith("_"):
        return term
    return f"({term})*" if "+" in term else f"{term}*"


def linear(name: str, out: str, into: str, bias: bool = True) -> Tensors:
    """Return the tensors of torch's Linear: weight [out, in]."""
    return {f"{name}.weight": f"{out} {star(into)}", **({f"{name}.bias": out} if bias else {})}


def conv1d(name: str, out: str, into: str) -> Tensors:
    """Return the tensors of GPT-2's Conv1D: weight [in, out]."""
    return {f"{name}.weight": f"{star(into)} {out}", f"{name}.bias": out}


def norm(name: str, space: str = "stream", bias: bool = True) -> Tensors:
    """Return the tensors of a norm: its gain follows only the permutation part; its bias is an
    ordinary vector.
    """
    return {f"{name}.weight": f"|{space}|", **({f"{name}.bias": space} if bias else {})}


def layer_pairs(
    names: Mapping[str, str] | Iterable[str], *layers: str
) -> tuple[tuple[str, str | None], ...]:
    """Return the (weight, bias) pairs of layers, with the biases that exist."""
    return tuple(
        (f"{layer}.weight", f"{layer}.bias" if f"{layer}.bias" in names else None)
        for layer in layers
    )


def foldable_norm(
    tensors: Mapping[str, str], name: str, *readers: str, padded: bool = False
) -> Norm:
    """Return a norm that folds into these layers."""
    return Norm(
        f"{name}.weight",
        f"{name}.bias" if f"{name}.bias" in tensors else None,
        layer_pairs(tensors, *readers),
        padded=padded,
    )


def foldable_scale(tensors: Mapping[str, str], gain: str, *writers: str) -> Scale:
    """Return a LayerScale that folds backwards into these layers."""
    return Scale(gain, layer_pairs(tensors, *writers))


def use_old_norm_names(tensors: Tensors, names: Names) -> Tensors:
    """Rename LayerNorm tensors to gamma and beta, as in checkpoints converted from TensorFlow;
    transformers renames them on loading.
    """
    if not names.has("LayerNorm.gamma"):
        return tensors
    return {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): a
        for n, a in tensors.items()
    }


def qa_logits() -> dict[str, str]:
    """Return the outputs of question-answering models: for each token, its score as the start or
    end of the answer.
    """
    return {"start_logits": "_ _", "end_logits": "_ _"}


LAYER_NORM = "LayerNorm gains and the mean follow permutations only"
RMS_NORM = "RMSNorm gains follow signed permutations only"
POST_NORM = "LayerNorm gains act on the stream itself and cannot be folded"

_ACTIVATIONS: dict[str, tuple[Group, str]] = {
    "relu": (Scaling(positive=True), "ReLU keeps positive scales"),
    "leaky_relu": (Scaling(positive=True), "leaky ReLU keeps positive scales"),
    "tanh": (SignedPermutation(), "tanh is odd"),
    "linear": (GeneralLinear(), "nothing non-linear"),
}


def neurons(size: int, activation: str, *, gated: bool = False, over: str | None = None) -> Space:
    """Return the hidden space of a feed-forward block or a pooler."""
    if gated:
        return Space(
            size,
            Scaling(positive=False),
            over,
            why="the gate's activation commutes with permutations; up and down may be scaled "
            "against each other",
        )
    group, why = _ACTIVATIONS.get(
        activation, (Permutation(), f"{activation} follows permutations only")
    )
    return Space(size, group, over, why=why)


@dataclass(frozen=True)
class Attention:
    """The spaces of one attention layer, and the axes of its query, key and value outputs and of
    the input of its output projection.
    """

    spaces: dict[str, Space]
    q: str
    k: str
    v: str
    o: str


def attention(
    label: str | int,
    heads: int,
    size: int,
    *,
    kv: int | None = None,
    qk: Group | None = None,
    shared: str | None = None,
    dot_product_only: bool = True,
) -> Attention:
    """Build multi-head attention, or grouped queries if there are fewer key-value heads.

    Args:
        label: the layer, as the suffix of its spaces.
        heads: the number of heads.
        size: the size of a head.
        kv: the number of key-value heads, by default `heads`.
        qk: the group of queries and keys, by default all invertible matrices.
        shared: a head space that several layers share.
        dot_product_only: keys meet nothing but the queries, so that the softmax is invariant to
            their bias.

    Raises:
        SpecError: the number of heads is not a multiple of the number of key-value heads.
    """
    kv = kv or heads
    if heads % kv:
        raise SpecError(
            f"the number of heads must be a multiple of {kv} key-value heads, got {heads}",
            hint="config.json: num_attention_heads, num_key_value_heads",
        )
    group = qk or GeneralLinear()
    why = _QK_WHY.get(
        type(group), "a dot product is invariant under inverse changes of basis of both sides"
    )
    qk_space, vo_space = f"qk.{label}", f"vo.{label}"
    if kv == heads:
        head = shared or f"head.{label}"
        spaces = (
            {} if shared else {head: Space(heads, Permutation(), why="heads are summed: any order")}
        )
        outer = head
        q, o = f"({head} {qk_space})", f"({head} {vo_space})"
    else:
        outer = f"kv.{label}"
        spaces = {
            outer: Space(
                kv, Permutation(), why="key-value heads come in any order, with their queries"
            ),
            f"rep.{label}": Space(
                heads // kv,
                Permutation(),
                over=outer,
                why="queries of one key-value head come in any order",
            ),
        }
        q, o = f"({outer} rep.{label} {qk_space})", f"({outer} rep.{label} {vo_space})"
    constant = "unseen" if dot_product_only and isinstance(group, GeneralLinear) else ""
    spaces[qk_space] = Space(size, group, over=outer, why=why, constant=constant)
    mixed = "values are mixed linearly between two linear layers"
    spaces[vo_space] = Space(size, GeneralLinear(), over=outer, why=mixed, constant="passed")
    return Attention(spaces, q=q, k=f"({outer} {qk_space}*)", v=f"({outer} {vo_space})", o=o)


_QK_WHY: dict[type[Group], str] = {
    Rotary: "rotary positions rotate every 2-plane by its own angle: one rotation and one scale "
    "each are left",
    PlaneSigns: "QK-norm gains and rotary positions leave one sign for each 2-plane",
}


@dataclass
class Draft:
    """A spec under construction: the dictionaries that a family fills, part by part."""

    family: str
    spaces: dict[str, Space] = field(default_factory=dict)
    embed: Tensors = field(default_factory=dict)
    backbone: Tensors = field(default_factory=dict)
    head: Tensors = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    untied: dict[str, float] = field(default_factory=dict)
    untied_config: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    norms: list[Norm] = field(default_factory=list)
    scales: list[Scale] = field(default_factory=list)
    buffers: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    def spec(self) -> Spec:
        """Build the spec, without spaces that no tensor uses."""
        from regauge.core.axes import spaces

        tensors = {**self.embed, **self.backbone, **self.head}
        parts = {
            name: part for part in ("embed", "backbone", "head") for name in getattr(self, part)
        }
        used: set[str] = set().union(*(spaces(a) for a in tensors.values())) if tensors else set()
        return Spec(
            family=self.family,
            spaces={n: s for n, s in self.spaces.items() if n in used},
            tensors=tensors,
            parts=parts,
            ties=self.ties,
            untied=self.untied,
            untied_config=self.untied_config,
            outputs=self.outputs,
            norms=tuple(self.norms),
            scales=tuple(self.scales),
            buffers=self.buffers,
            notes=tuple(self.notes),
        )

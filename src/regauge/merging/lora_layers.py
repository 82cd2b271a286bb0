"""The tensors of a LoRA extraction by what an adapter can hold, and the adapter's config.

PEFT names layers by the modules of the loaded model, and finds them by suffixes of those names. A
checkpoint of a bare model ("h.0.attn.c_attn.weight") lacks the prefix of its modules
("transformer."), which `module_prefix` returns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from regauge.checkpoints.adapters import is_input_axis
from regauge.core import axes as ax
from regauge.core.spec import stored_tensors
from regauge.errors import Hint, MergeError
from regauge.merging.layout import Model

MAX_PATTERNS = 1000  # ranks that differ from the adapter's; `open_adapted` accepts no more
_EMBEDDING = re.compile(
    r"(^|[._])(emb|embed|embeddings?|embed_\w+|\w+_embeddings?|wte|wpe)([._]|$)"
)


@dataclass(frozen=True)
class Layers:
    """The layers that an adapter can hold.

    Attributes:
        names: the modules of the targeted linear layers, as stored.
        others: the other linear layers, each with the reason why it is not targeted.
        is_transposed: whether their weights are stored [in, out], as by GPT-2's Conv1D.
    """

    names: tuple[str, ...]
    others: Mapping[str, str]
    is_transposed: bool


def find_layers(base: Model, target: Sequence[str] | None) -> Layers:
    """Return the linear layers of a model, and those that `target` names by suffixes.

    Raises:
        MergeError: the model has no linear layer, or a suffix matches no layer.
    """
    is_transposed = {name: flag for name in base.state if (flag := _layout(base, name)) is not None}
    # PEFT has one flag for all layers: the few of the other layout are left to `modules_to_save`
    majority = Counter(is_transposed.values()).most_common(1)
    layers, others = [], {}
    for name, flag in is_transposed.items():
        if flag == majority[0][0]:
            layers.append(name.removesuffix(".weight"))
        else:
            others[name.removesuffix(".weight")] = "stored in another layout than most layers"
    if not layers:
        raise MergeError(
            f"{base.key} must have linear layers (floating-point 2-D weights), got none",
            hint="quantised models must be converted to full precision first",
        )
    if target is None:
        return Layers(tuple(layers), others, majority[0][0])
    for suffix in target:
        if not any(_has_suffix(name, suffix) for name in layers):
            known = sorted({name.rpartition(".")[2] for name in layers})
            raise MergeError(
                f'target must name linear layers of {base.key}, got "{suffix}"',
                hint=f"choose from {', '.join(known)}",
            )
    chosen = tuple(n for n in layers if any(_has_suffix(n, suffix) for suffix in target))
    others |= dict.fromkeys(set(layers) - set(chosen), "not a target")
    return Layers(chosen, others, majority[0][0])


def _has_suffix(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith(f".{suffix}")


def _layout(base: Model, name: str) -> bool | None:
    """Return whether a weight is stored [in, out]; None if it is not that of a linear layer."""
    shape = base.shapes[name]
    if len(shape) != 2 or 0 in shape or not name.endswith(".weight") or base.is_buffer(name):
        return None
    if base.spec is None:
        return None if _EMBEDDING.search(name.removesuffix(".weight")) else False
    if is_tied(base, name):  # merged into one of two tied tensors, an adapter changes both
        return None
    entry = stored_tensors(base.spec).get(name)
    if entry is None or entry.parent is not None:
        return None
    first, second = (is_input_axis(term) for term in ax.parse(entry.axes).terms)
    return first if first != second else None


def is_tied(model: Model, name: str) -> bool:
    """Return whether a tensor has the values of another one."""
    ties = model.spec.ties if model.spec is not None else {}
    return name in ties or name in ties.values()


def tied_name(model: Model, name: str) -> str:
    """Return the tensor that a tensor is tied to, or itself."""
    return model.spec.ties.get(name, name) if model.spec is not None else name


def savable_module(base: Model, name: str, layers: Collection[str]) -> str:
    """Return the reason why PEFT cannot save the module of a tensor as a whole; empty if it can."""
    module, _, leaf = name.rpartition(".")
    if name not in base.state:
        return "tied in the base"
    if leaf not in ("weight", "bias"):
        return "not the weight or bias of a module"
    if module in layers:
        return "in a LoRA layer"
    if is_tied(base, name):
        return "tied to another tensor"
    if any(n.startswith(f"{module}.") and n.count(".") > name.count(".") for n in base.state):
        return "its module contains others"
    entry = stored_tensors(base.spec).get(name) if base.spec is not None else None
    return "one of a stack of experts" if entry is not None and entry.parent is not None else ""


def module_prefix(base: Model) -> str:
    """Return the prefix of the loaded model's modules that the stored names lack."""
    config = base.checkpoint.config or {}
    architecture = next(iter(config.get("architectures") or ()), None)
    if architecture is None or find_spec("transformers") is None:
        return ""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    bare = MODEL_MAPPING_NAMES.get(config.get("model_type", ""))
    prefix = getattr(getattr(transformers, architecture, None), "base_model_prefix", "")
    is_bare = architecture in ((bare,) if isinstance(bare, str) else bare or ())
    has_prefix = any(name.startswith(f"{prefix}.") for name in base.state)
    return "" if not prefix or is_bare or has_prefix else f"{prefix}."


def adapter_config(
    base: Model,
    ranks: Mapping[str, int],
    *,
    is_transposed: bool,
    modules_to_save: Sequence[str],
    has_bias: bool,
) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Args:
        base: the base model.
        ranks: the rank of each layer.
        is_transposed: whether the weights are stored [in, out].
        modules_to_save: modules that the adapter holds as a whole.
        has_bias: whether it holds changes of the biases of all layers.

    Raises:
        MergeError: the ranks of too many layers differ.
    """
    prefix = module_prefix(base)
    rank = Counter(ranks.values()).most_common(1)[0][0] if ranks else 1
    patterns = {re.escape(name): r for name, r in ranks.items() if r != rank}
    # a name that ends in another one, behind a dot, is matched first
    patterns = dict(sorted(patterns.items(), key=lambda item: -len(item[0])))
    if any(_match_rank(patterns, name, rank) != r for name, r in ranks.items()):
        ordered = sorted(ranks.items(), key=lambda item: -len(item[0]))
        patterns = {re.escape(name): r for name, r in ordered}
    if len(patterns) > MAX_PATTERNS:
        raise MergeError(
            f"the layers with a rank of their own must be at most {MAX_PATTERNS}, got "
            f"{len(patterns)}",
            hint=Hint(
                "pass rank= without energy=, or name layers with target=",
                cli="pass --rank without --energy, or name layers with --target",
            ),
        )
    architecture = next(iter((base.checkpoint.config or {}).get("architectures") or ()), "")
    is_causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    path = base.checkpoint.path
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if is_causal else None,
        "base_model_name_or_path": base.key if path.exists() else None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": is_transposed,
        "target_modules": _short_names(base, ranks, prefix),
        "rank_pattern": patterns,
        "alpha_pattern": patterns,
        "modules_to_save": [prefix + name for name in modules_to_save] or None,
    }
    return {**config, "lora_bias": True} if has_bias else config


def _match_rank(patterns: Mapping[str, int], name: str, default: int) -> int:
    """Return the rank that PEFT chooses for a layer."""
    found = (r for pattern, r in patterns.items() if re.match(rf"(.*\.)?({pattern})$", name))
    return next(found, default)


def _short_names(base: Model, layers: Collection[str], prefix: str) -> list[str]:
    """Return the last parts of the names of layers, where every module with that last part is one
    of them, and whole names otherwise.
    """
    modules: set[str] = set()
    for name in base.state:
        parts = name.split(".")[:-1]
        modules |= {".".join(parts[: i + 1]) for i in range(len(parts))}
    taken = {name.rpartition(".")[2] for name in modules if name not in layers}
    return sorted({prefix + n if (last := n.rpartition(".")[2]) in taken else last for n in layers})

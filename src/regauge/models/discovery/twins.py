"""Modules to discover: the class that a config names, example inputs, and a small twin of a module
that is too large to verify.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from regauge.errors import DiscoveryError, RegaugeError, UnknownModelError, need
from regauge.models.families import check_counts
from regauge.models.load import build_timm, quiet
from regauge.models.trust import code_disabled, library_class, without_code

# A verification holds about four copies in float64: five gigabytes at this many parameters.
MAX_PARAMETERS = 150_000_000
_ROWS, _LENGTH = 2, 7

# Upper bounds for a small twin; its width is the number of heads times their size.
_HEADS, _WIDTH, _INNER, _LAYERS, _VOCAB, _POSITIONS, _EXPERTS = 4, 8, 24, 2, 64, 32, 4
_HEAD_KEYS = (
    "num_attention_heads",
    "n_head",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "n_heads",
)
_SMALL_SIZES = {
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "ffn_hidden_size",
            "n_inner",
            "d_ff",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "hidden_dim",
            "moe_intermediate_size",
        ),
        _INNER,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
            "num_decoder_layers",
        ),
        _LAYERS,
    ),
    **dict.fromkeys(("vocab_size", "type_vocab_size"), _VOCAB),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"),
        _POSITIONS,
    ),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), _EXPERTS),
    **dict.fromkeys(("head_dim", "d_kv", "projection_dim"), _WIDTH),
}
_WIDTH_KEYS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim")
# The width of the word embeddings, before a projection.
_EMBED_KEYS = ("word_embed_proj_dim", "embedding_size")


def build(config: Mapping[str, Any], device: str = "cpu") -> torch.nn.Module:
    """Build the module that a config describes, with newly initialized weights, or without
    (`meta`).

    Raises:
        DiscoveryError: the library cannot build it.
    """
    check_counts(config)
    if "model_type" not in config and "architecture" in config:
        try:
            with torch.device(device):
                return build_timm(config)
        except RegaugeError:
            raise
        except Exception as error:  # timm raises exceptions of any type
            message = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DiscoveryError(
                f"timm cannot build a {config['architecture']} from the config: {message}",
                hint="compare it with the original config.json",
            ) from error
    need("transformers", "models")
    import transformers

    model_class = library_class(config, "the model to discover")
    fields = {k: v for k, v in without_code(config).items() if k != "architectures"}
    try:
        with quiet(), code_disabled(), torch.device(device):
            module: torch.nn.Module = model_class(transformers.AutoConfig.for_model(**fields))
    except Exception as error:  # transformers raises exceptions of any type
        message = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]
        raise DiscoveryError(
            f"transformers cannot build a {model_class.__name__} from the config: {message}",
            hint="compare it with the original config.json",
        ) from error
    module.float()
    return module.eval()


def example_inputs(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return inputs for a model of transformers or timm: tokens, images or audio features, by the
    parameters of its forward.

    Raises:
        DiscoveryError: the inputs of the model are unknown.
    """
    device = torch.device("cpu") if is_on_meta(module) else next(module.parameters()).device
    generator = torch.Generator().manual_seed(1)
    config = getattr(module, "config", None)
    if config is None:
        size = (
            getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None) or {}
        ).get("input_size", (3, 224, 224))
        parameter = next(iter(inspect.signature(module.forward).parameters))
        return {parameter: torch.randn(_ROWS, *size, generator=generator).to(device)}
    names = inspect.signature(module.forward).parameters
    text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
    inputs: dict[str, torch.Tensor] = {}
    if (
        "input_ids" in names
        and hasattr(text, "vocab_size")
        and getattr(module, "main_input_name", "input_ids") in ("input_ids", "pixel_values")
    ):
        inputs["input_ids"] = torch.randint(
            3, min(100, text.vocab_size), (_ROWS, _LENGTH), generator=generator
        )
    if "pixel_values" in names:
        side = getattr(vision, "image_size", 224)
        height, width = side if isinstance(side, list | tuple) else (side, side)
        inputs["pixel_values"] = torch.randn(
            _ROWS, getattr(vision, "num_channels", 3), height, width, generator=generator
        )
        if "bool_masked_pos" in names and any(
            "mask_token" in n for n, _ in module.named_parameters()
        ):
            patch = getattr(vision, "patch_size", 16)
            patch_height, patch_width = patch if isinstance(patch, list | tuple) else (patch, patch)
            inputs["bool_masked_pos"] = (
                torch.arange(_ROWS * (height // patch_height) * (width // patch_width)) % 3 == 0
            ).view(_ROWS, -1)
    if "input_features" in names and hasattr(config, "num_mel_bins"):
        length = 2 * getattr(config, "max_source_positions", 1500)
        inputs["input_features"] = torch.randn(
            _ROWS, config.num_mel_bins, length, generator=generator
        )
    if "decoder_input_ids" in names and hasattr(text, "vocab_size"):
        inputs["decoder_input_ids"] = torch.randint(
            3, min(100, text.vocab_size), (_ROWS, _LENGTH), generator=generator
        )
    if not inputs:
        raise DiscoveryError(
            f"the inputs of {type(module).__name__} are unknown",
            hint="call regauge.discover(module, example_inputs) in Python",
        )
    return {k: v.to(device) for k, v in inputs.items()}


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers of a module. Those of an empty transformers module (rotary frequencies,
    masks) are computed from its config, without memory for its parameters.
    """
    config: Any = getattr(module, "config", None)
    if is_on_meta(module) and hasattr(config, "to_dict"):
        try:
            with _meta_parameters():
                module = build({**config.to_dict(), "architectures": [type(module).__name__]})
        except (DiscoveryError, UnknownModelError):  # a custom class: its constants stay unknown
            return {}
    return {n: b for n, b in module.named_buffers() if not b.is_meta}


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Put parameters on the meta device as they are registered; buffers keep their values."""
    register = torch.nn.Module.register_parameter

    def register_on_meta(
        self: torch.nn.Module, name: str, param: torch.nn.Parameter | None
    ) -> None:
        register(
            self,
            name,
            None if param is None else torch.nn.Parameter(param.to("meta"), param.requires_grad),
        )

    torch.nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def count_parameters(module: torch.nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(p.numel() for p in module.parameters())


def is_on_meta(module: torch.nn.Module) -> bool:
    """Return whether a module has parameters on the meta device."""
    return any(p.is_meta for p in module.parameters())


def make_twin(module: torch.nn.Module) -> torch.nn.Module:
    """Build a small module of the same class, with the same parts.

    Raises:
        DiscoveryError: the module has no config, or its class cannot be built smaller.
    """
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise DiscoveryError(
            f"{type(module).__name__} has {count_parameters(module):,} parameters, too many to "
            "verify, and no config from which to build a smaller twin",
            hint="discover a smaller module of the same class",
        )
    fields = {**config.to_dict(), "architectures": [type(module).__name__]}
    try:
        return build(shrink_config(fields))
    except DiscoveryError as error:
        raise DiscoveryError(
            f"cannot build a small twin of {type(module).__name__}: {error}",
            hint="discover a smaller module of the same class",
        ) from error


def shrink_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a small model with the same parts: fewer layers, heads and words,
    smaller widths. Counts of one and equal counts stay so.
    """
    shrunk = dict(config)
    heads = next((shrunk[k] for k in _HEAD_KEYS if isinstance(shrunk.get(k), int)), None)
    kv_heads = shrunk.get("num_key_value_heads")
    for key, limit in _SMALL_SIZES.items():
        if isinstance(shrunk.get(key), int):
            shrunk[key] = min(shrunk[key], limit)
    if heads is not None:
        small_heads = min(heads, _HEADS)
        for key in _HEAD_KEYS:
            if isinstance(shrunk.get(key), int):
                shrunk[key] = min(shrunk[key], _HEADS)
        if isinstance(kv_heads, int):
            shrunk["num_key_value_heads"] = (
                small_heads
                if kv_heads == heads
                else 1
                if kv_heads == 1
                else max(1, small_heads // 2)
            )
        width = next((shrunk[k] for k in _WIDTH_KEYS if isinstance(shrunk.get(k), int)), None)
        for key in _WIDTH_KEYS:
            if isinstance(shrunk.get(key), int):
                shrunk[key] = small_heads * _WIDTH
        for key in _EMBED_KEYS:
            if isinstance(shrunk.get(key), int):
                shrunk[key] = small_heads * _WIDTH if shrunk[key] == width else _WIDTH
    patch = shrunk.get("patch_size")
    if isinstance(patch, int) and isinstance(shrunk.get("image_size"), int):
        shrunk["image_size"] = 2 * patch
    for key in ("layer_types", "attention_layers", "layer_type_list", "mlp_layer_types"):
        if isinstance(shrunk.get(key), list):
            shrunk[key] = shrunk[key][:_LAYERS]
    for key in (
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "decoder_start_token_id",
        "sep_token_id",
        "cls_token_id",
    ):
        if isinstance(shrunk.get(key), int) and shrunk[key] >= _VOCAB:
            shrunk[key] = _VOCAB - 1
    return {
        k: shrink_config(v) if k.endswith("_config") and isinstance(v, Mapping) else v
        for k, v in shrunk.items()
    }

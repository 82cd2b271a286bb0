"""Small checkpoints, and their transforms by valid and invalid elements.

The checkpoints have the shapes of Llama and GPT-2, and random weights, norm gains and biases.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regauge.core.rng import Stream, seed_key
from regauge.results.findings import Table

if TYPE_CHECKING:
    import torch

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_inner": 256,
    "n_positions": 128,
    "vocab_size": 256,
    "activation_function": "gelu_new",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_checkpoint(folder: Path, config: Mapping[str, Any], seed: int) -> Path:
    """Write a checkpoint of random weights for a config, unless the folder exists.

    Args:
        folder: The folder of the checkpoint.
        config: Its config.json, of a Llama or GPT-2.
        seed: The seed of the weights.

    Returns:
        The folder.
    """
    import torch

    from regauge.checkpoints.plan import File, Plan
    from regauge.checkpoints.writer import write_plan

    shapes = _shapes(config)
    if folder.exists():
        return folder

    def sample(name: str) -> torch.Tensor:
        shape = shapes[name]
        values = Stream(seed_key(seed), f"demo/{name}").normals(int(np.prod(shape))).reshape(shape)
        values = 1 + 0.2 * values if _is_gain(name) else 0.2 * values
        return torch.from_numpy(values.astype(np.float32))

    file = File(
        "model.safetensors",
        tuple((name, "F32", shape) for name, shape in shapes.items()),
        {"format": "pt"},
    )
    thunks = {name: (lambda name=name: sample(name)) for name in shapes}
    write_plan(
        folder, Plan((file,), {"config.json": json.dumps(dict(config), indent=2).encode()}), thunks
    )
    return folder


def _is_gain(name: str) -> bool:
    return name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight"))


def _shapes(c: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a config."""
    out: dict[str, tuple[int, ...]] = {}
    if c["model_type"] == "llama":
        d, ffn, kv = (
            c["hidden_size"],
            c["intermediate_size"],
            c["hidden_size"] * c["num_key_value_heads"] // c["num_attention_heads"],
        )
        out["model.embed_tokens.weight"] = (c["vocab_size"], d)
        for i in range(c["num_hidden_layers"]):
            at = f"model.layers.{i}."
            out |= {f"{at}self_attn.{x}_proj.weight": (kv if x in "kv" else d, d) for x in "qkvo"}
            out |= {
                f"{at}mlp.gate_proj.weight": (ffn, d),
                f"{at}mlp.up_proj.weight": (ffn, d),
                f"{at}mlp.down_proj.weight": (d, ffn),
            }
            out |= {
                f"{at}input_layernorm.weight": (d,),
                f"{at}post_attention_layernorm.weight": (d,),
            }
        return out | {"model.norm.weight": (d,), "lm_head.weight": (c["vocab_size"], d)}
    d, ffn = c["n_embd"], c["n_inner"]
    out |= {
        "transformer.wte.weight": (c["vocab_size"], d),
        "transformer.wpe.weight": (c["n_positions"], d),
    }
    for i in range(c["n_layer"]):
        at = f"transformer.h.{i}."
        layers = {
            "attn.c_attn": (d, 3 * d),
            "attn.c_proj": (d, d),
            "mlp.c_fc": (d, ffn),
            "mlp.c_proj": (ffn, d),
        }
        for name, (into, width) in layers.items():
            out |= {f"{at}{name}.weight": (into, width), f"{at}{name}.bias": (width,)}
        out |= {f"{at}{norm}.{x}": (d,) for norm in ("ln_1", "ln_2") for x in ("weight", "bias")}
    return out | {"transformer.ln_f.weight": (d,), "transformer.ln_f.bias": (d,)}


def describe_spaces(folder: Path) -> Table:
    """Return the symmetry of a small Llama: its spaces and their groups."""
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.models.families import spec_from
    from regauge.models.summary import summarize

    checkpoint = open_checkpoint(folder)
    facts = summarize(checkpoint, spec_from(LLAMA, checkpoint.names))
    return Table(
        "Which parts of a small Llama can change basis",
        ("space", "size", "group", "why it is not larger"),
        tuple((s["name"], s["size"], s["group"], s["why"]) for s in facts["spaces"]),
        f"about 10^{facts['bits'] * np.log10(2):.0f} equivalent weights, and "
        f"{facts['dimensions']} continuous directions",
    )


def try_elements(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Transform a checkpoint by several elements and back; the last element is invalid.

    Args:
        folder: The checkpoint.
        seed: The seed of the elements.

    Returns:
        For each element its name, whether it is valid, the share of the weights that it changed,
        the error of moving back, the relative difference of the logits, and the logits.
    """
    from dataclasses import replace

    from regauge.checkpoints.reader import open_checkpoint
    from regauge.core.action import apply
    from regauge.core.element import Element, element
    from regauge.core.fold import fold_norms
    from regauge.core.groups import Orthogonal
    from regauge.models.families import spec_from

    checkpoint = open_checkpoint(folder)
    state = dict(checkpoint)
    assert checkpoint.config is not None
    spec = spec_from(checkpoint.config, checkpoint.names)
    folded_spec, folded = fold_norms(spec, state)
    free = replace(
        spec, spaces={**spec.spaces, "stream": replace(spec.spaces["stream"], group=Orthogonal())}
    )
    cases = [
        ("permutation", spec, state, element(spec, seed, within="permutation"), False),
        ("full", spec, state, element(spec, seed), False),
        (
            "rotation, norms folded",
            folded_spec,
            folded,
            element(folded_spec, seed, within="orthogonal"),
            False,
        ),
        (
            "wrong, forced",
            spec,
            state,
            Element(spec, element(free, seed, spaces=["stream"]).members),
            True,
        ),
    ]
    out = []
    for label, case_spec, before, g, force in cases:
        g = Element(_ignore_norm_gains(case_spec) if force else case_spec, g.members)
        after = apply(g, before, force=force)
        back = apply(~g, after, force=force)
        total = sum(t.numel() for t in before.values())
        pairs = _compute_logits(checkpoint.config, state, after, case_spec.config)
        out.append(
            {
                "element": label,
                "valid": not force,
                "moved": sum(int((after[n] != t).sum()) for n, t in before.items()) / total,
                "back": max(float((back[n] - t).abs().max()) for n, t in before.items()),
                "logits": None
                if pairs is None
                else float((pairs[0] - pairs[1]).abs().max() / pairs[0].abs().max()),
                "pairs": None if pairs is None else [p.flatten().tolist() for p in pairs],
            }
        )
    return out


def _ignore_norm_gains(spec: Any) -> Any:
    """Return a spec that omits norm gains from the action, as if they had been forgotten."""
    from dataclasses import replace

    return replace(
        spec,
        tensors={name: "_" if text == "|stream|" else text for name, text in spec.tensors.items()},
    )


def _compute_logits(
    config: Mapping[str, Any],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    changes: Mapping[str, Any],
) -> list[torch.Tensor] | None:
    """Return the logits of two states, or None if transformers is not installed."""
    import torch

    try:
        import transformers

        model_class = getattr(transformers, config["architectures"][0])
    except Exception:  # missing, or broken by another library
        return None
    logits = []
    for state, updates in ((before, {}), (after, changes)):
        model = model_class(transformers.AutoConfig.for_model(**{**config, **updates})).eval()
        model.load_state_dict(dict(state), strict=False)
        model.tie_weights()
        with torch.no_grad():
            logits.append(model(torch.arange(48).view(2, 24) * 5 % 256).logits)
    return logits

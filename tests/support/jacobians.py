"""The dimension of a model's symmetry group by its Jacobian."""

from __future__ import annotations

import torch
import transformers as T

from regauge.core.spec import Spec
from regauge.testing import strict_float64
from support.picos import gpt2, vit

D, F, L, V, POSITIONS = 8, 12, 1, 40, 7


LLAMA = {
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": L,
    "vocab_size": V,
    "num_attention_heads": 2,
}


def generic(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    model.set_attn_implementation("eager")  # the fused kernel has no batched backward pass
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.5 + (1.0 if p.dim() == 1 else 0.0))
    return model


def jacobian(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """d outputs / d parameters, on a random choice of them, some rows at a time: torch.func.jacrev
    keeps what all of them computed on the way.
    """
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    with strict_float64():
        logits = model(**inputs).logits.reshape(-1)
        chosen = logits[
            torch.randperm(len(logits), generator=torch.Generator().manual_seed(6))[
                : count * 3 // 2
            ]
        ]
        rows = []
        for basis in torch.eye(len(chosen)).split(64):
            parts = torch.autograd.grad(
                chosen,
                parameters,
                basis,
                retain_graph=True,
                is_grads_batched=True,
                materialize_grads=True,
            )
            rows.append(torch.cat([p.reshape(len(basis), -1) for p in parts], dim=1))
    return torch.cat(rows)


def nullity(j: torch.Tensor) -> int:
    values = torch.linalg.svdvals(j)
    rank = int((values > 1e-10 * values[0]).sum())
    assert values[rank - 1] > 1e3 * values[rank], (
        "no clear gap between what is seen and what is not"
    )
    return j.shape[1] - rank


def group_dimension(spec: Spec) -> int:
    return sum(
        space.group.dim(space.size) * spec.count(name) for name, space in spec.spaces.items()
    )


def ids(vocabulary: int, length: int, rows: int) -> dict[str, torch.Tensor]:
    """Random sequences in which every token occurs: a row that is never read is free, and no
    symmetry.
    """
    samples = torch.randint(
        0, vocabulary, (rows * length,), generator=torch.Generator().manual_seed(3)
    )
    samples[:vocabulary] = torch.arange(vocabulary)
    return {
        "input_ids": samples[
            torch.randperm(rows * length, generator=torch.Generator().manual_seed(5))
        ].view(rows, length)
    }


# Flat directions that are not a change of basis. Per layer of a pre-norm model with biases:
PRE_NORM_LAYER = {
    "key bias: softmax ignores what it adds": D,
    "value bias: attention rows sum to one, so the output bias can take it": D,
    "two norm gains: the readers can take them": 2 * D,
    "two norm biases: the readers' biases can take them": 2 * D,
    "attention output along the ones vector: the next norm removes it": D + 1,
    "FFN output along the ones vector": F + 1,
    "query, key, value weights along 1/gain: constant on normalised vectors": 3 * D,
    "FFN input weights along 1/gain": F,
}


def _gpt2(tied: bool):
    model = generic(
        T.GPT2LMHeadModel(
            gpt2(
                n_embd=D,
                n_layer=L,
                n_head=2,
                n_inner=F,
                vocab_size=V,
                n_positions=POSITIONS,
                tie_word_embeddings=tied,
            )
        )
    )
    extras = {**PRE_NORM_LAYER, "position rows along the ones vector": POSITIONS}
    if not tied:
        extras |= {
            "token rows along the ones vector": V,
            "a vector moved from all tokens to all positions": D - 1,
            "final norm gain: the head takes it": D,
            "final norm bias against the head along 1/gain": D,
        }
    return model, ids(V, POSITIONS, 40), extras, not tied


def _llama(kv: int, tied: bool):
    model = generic(
        T.LlamaForCausalLM(T.LlamaConfig(**LLAMA, num_key_value_heads=kv, tie_word_embeddings=tied))
    )
    extras = {"two norm gains per layer": 2 * D * L}
    if not tied:
        extras["final norm gain"] = D
    return model, ids(V, POSITIONS, 30), extras, not tied


def _vit():
    labels, layers = (
        8,
        2,
    )  # with one layer the class token alone asks, and most of the first block is never seen
    config = vit(
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=layers,
        num_attention_heads=2,
        image_size=4,
        patch_size=2,
        num_labels=labels,
        layer_norm_eps=1e-3,
    )
    model = generic(T.ViTForImageClassification(config))
    patches, pixels = 4, 12
    extras = {
        **{name: layers * n for name, n in PRE_NORM_LAYER.items()},
        "position rows along the ones vector": patches + 1,
        "class token and patch bias along the ones vector": 2,
        "patch kernel along the ones vector": pixels,
        "a vector moved from the class token, or from the patch bias, to the positions": 2
        * (D - 1),
        "final norm gain and bias": 2 * D,
        "classifier weights along 1/gain": labels,
    }
    images = torch.randn(
        200, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)
    )
    return model, {"pixel_values": images}, extras, True


def _bert():
    config = T.BertConfig(
        hidden_size=D,
        num_hidden_layers=L,
        num_attention_heads=2,
        intermediate_size=F,
        vocab_size=V,
        max_position_embeddings=POSITIONS,
        layer_norm_eps=1e-3,
        pad_token_id=None,
    )
    model = generic(T.BertForMaskedLM(config))
    extras = {
        "position rows along the ones vector": POSITIONS,
        "segment rows along the ones vector": 2,
        "a vector moved from the positions to the segments": D - 1,
        "all tokens along 1/gain of the transform's norm: the decoder's bias and the positions "
        "take it": 1,
        "embedding norm bias and two norm biases per layer: the next biases take them": (1 + 2 * L)
        * D,
        "last norm gain, transform weights along 1/gain, transform norm bias": 3 * D,
        "key bias": D,
        "value bias": D,
        "attention output along the ones vector": D + 1,
        "FFN output along the ones vector": F + 1,
        "query, key, value weights along 1/gain": 3 * D,
        "FFN input weights along 1/gain": F,
    }
    inputs = ids(V, POSITIONS, 40)
    inputs["token_type_ids"] = torch.randint(
        0, 2, inputs["input_ids"].shape, generator=torch.Generator().manual_seed(4)
    )
    return model, inputs, extras, False


CASES = {
    "gpt2 tied": lambda: _gpt2(True),
    "gpt2 untied": lambda: _gpt2(False),
    "llama multi-head": lambda: _llama(2, False),
    "llama grouped queries": lambda: _llama(1, False),
    "llama tied": lambda: _llama(2, True),
    "vit": _vit,
    "bert": _bert,
}

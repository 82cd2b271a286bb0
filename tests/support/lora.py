"""LoRA adapters for pico-models."""

from __future__ import annotations

import copy

import torch

RANK, ALPHA = 3, 6


class Lora(torch.nn.Module):
    """PEFT's layer around a Linear, Conv1D or Embedding, as far as it matters here: names, shapes,
    and what they compute.
    """

    def __init__(self, base: torch.nn.Module, bias: bool = False, dora: bool = False) -> None:
        super().__init__()
        self.base_layer, self.scaling = base, ALPHA / RANK
        n, m = base.weight.shape
        self.table = isinstance(base, torch.nn.Embedding)
        self.turned = type(base).__name__ == "Conv1D"
        if self.table:
            self.lora_embedding_A = torch.nn.ParameterDict(
                {"default": torch.randn(RANK, n, dtype=torch.float64)}
            )
            self.lora_embedding_B = torch.nn.ParameterDict(
                {"default": torch.randn(m, RANK, dtype=torch.float64)}
            )
            if dora:
                self.lora_magnitude_vector = torch.nn.ParameterDict(
                    {"default": torch.rand(m, dtype=torch.float64) + 0.5}
                )
            return
        out, into = (m, n) if self.turned else (n, m)
        self.lora_A = torch.nn.ModuleDict(
            {"default": torch.nn.Linear(into, RANK, bias=False, dtype=torch.float64)}
        )
        self.lora_B = torch.nn.ModuleDict(
            {"default": torch.nn.Linear(RANK, out, bias=bias, dtype=torch.float64)}
        )
        if dora:
            self.lora_magnitude_vector = torch.nn.ParameterDict(
                {"default": torch.rand(out, dtype=torch.float64) + 0.5}
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table:
            a, b = self.lora_embedding_A["default"], self.lora_embedding_B["default"]
            whole = self.base_layer.weight + (b @ a).T * self.scaling
            if hasattr(self, "lora_magnitude_vector"):
                whole = self.lora_magnitude_vector["default"] * whole / whole.norm(dim=0)
            return torch.nn.functional.embedding(x, whole)
        a, b = self.lora_A["default"], self.lora_B["default"]
        if not hasattr(self, "lora_magnitude_vector"):
            return self.base_layer(x) + b(a(x)) * self.scaling
        weight = self.base_layer.weight.T if self.turned else self.base_layer.weight
        whole = weight + b.weight @ a.weight * self.scaling
        whole = (
            self.lora_magnitude_vector["default"][:, None] * whole / whole.norm(dim=1, keepdim=True)
        )
        return torch.nn.functional.linear(x, whole, self.base_layer.bias)


def add_adapters(
    model: torch.nn.Module, *targets: str, seed: int = 5, **options: bool
) -> torch.nn.Module:
    """The model with adapters on every layer whose name ends in one of these, with random
    tensors.
    """
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if name.endswith(targets):
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Lora(layer, **options))
    return model


def adapter_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What PEFT saves: the adapter's tensors, without its name, under the prefix of its
    wrappers.
    """
    state = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    return {"base_model.model." + n.replace(".default", ""): p for n, p in state.items()}


CASES = {
    "gpt2": ("c_attn", "c_proj", "c_fc", "wte"),  # Conv1D, fused qkv, square and not; an embedding
    "llama": (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "lm_head",
    ),
    "bert-classifier": ("query", "key", "dense", "classifier"),
    "vit": ("q_proj", "o_proj", "fc1", "fc2"),
}

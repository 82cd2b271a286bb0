"""Preset `pretrained`: public pre-trained models of the assets, on a part of real test data.

Its results are stored beside those of preset small, as docs/results/ID.pretrained.json.
"""

from __future__ import annotations

from experiments.shared.presets import From, Preset, Subject


def pretrained() -> Preset:
    """Return the subjects of preset pretrained: windows of text that take minutes on one core."""
    smollm2 = Subject(
        "SmolLM2-135M-Instruct",
        {"class": "LlamaForCausalLM"},
        {"kind": "text", "classes": 49_152, "length": 512, "tokens": 1_024},
        test=From("wikitext2_test.txt"),
        tokenizer="smollm2",
        sources=("smollm2",),
        batch=1,
    )
    return Preset({"table4": {"shakespeare": smollm2}}, seeds=1, keys=1)


def pretrained_experiments() -> list[str]:
    """Return the ids of the experiments with subjects in preset pretrained."""
    return [f"000/{table}" for table in pretrained().tables]

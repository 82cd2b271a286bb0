"""regauge in your own test-suite: a model of yours, held to its symmetry. Run by pytest, or as it
is.

pytest examples/verify_in_tests.py       # some seconds
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import regauge
from regauge.testing import assert_symmetry, symmetry_error

INPUTS = {"input_ids": torch.arange(10)[None]}


def my_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return (
        GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=3))
        .double()
        .eval()
    )


def test_every_description_is_the_same_function() -> None:
    model = my_model()
    spec = regauge.spec_of(model)
    for key in range(3):
        assert_symmetry(model, spec, regauge.element(spec, key), INPUTS)


def test_it_would_fail_if_a_layer_looked_at_the_order_of_its_neurons() -> None:
    """The negative beside the positive: a fault is found."""
    model = my_model()
    spec = regauge.spec_of(model)
    model.transformer.h[0].mlp.c_fc.register_forward_hook(
        lambda module, given, out: out * torch.arange(out.shape[-1])
    )
    assert symmetry_error(model, spec, regauge.element(spec, 1, spaces=["ffn.0"]), INPUTS) > 1e-3


def test_the_laws_of_the_papers() -> None:
    """Forward, backward and trained, rows and columns, each beside a control."""
    results = regauge.verify(my_model(), INPUTS)
    assert [finding.id for finding in results.failed] == []
    assert sum(finding.holds is True for finding in results.findings) > 10


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"passed: {name.replace('_', ' ')}")

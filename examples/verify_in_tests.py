"""regauge in your own test suite: tests of a model's symmetry. Run with pytest or directly.

pytest examples/verify_in_tests.py       # some seconds
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import regauge
from regauge.testing import assert_symmetry, symmetry_error

INPUTS = {"input_ids": torch.arange(10)[None]}


def my_model() -> GPT2LMHeadModel:
    """Return a small model with random weights."""
    torch.manual_seed(0)
    return (
        GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=3))
        .double()
        .eval()
    )


def test_every_basis_gives_the_same_function() -> None:
    """A random element leaves the outputs unchanged."""
    model = my_model()
    spec = regauge.spec_of(model)
    for key in range(3):
        assert_symmetry(model, spec, regauge.element(spec, key), INPUTS)


def test_a_layer_that_depends_on_the_order_of_its_neurons_fails() -> None:
    """The negative control: the checker detects a broken symmetry."""
    model = my_model()
    spec = regauge.spec_of(model)
    model.transformer.h[0].mlp.c_fc.register_forward_hook(
        lambda module, inputs, out: out * torch.arange(out.shape[-1])
    )
    assert symmetry_error(model, spec, regauge.element(spec, 1, spaces=["ffn.0"]), INPUTS) > 1e-3


def test_the_laws_of_the_papers() -> None:
    """Forward, backward and training, rows and columns, each with a control."""
    results = regauge.verify(my_model(), INPUTS)
    assert [finding.id for finding in results.failed] == []
    assert sum(finding.holds is True for finding in results.findings) > 10


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"passed: {name.replace('_', ' ')}")

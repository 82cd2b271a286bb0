"""Theorem 4.7 holds operator by operator in every dtype, the controls are far away, and an operator
that does not commute is caught.
"""

import math
from dataclasses import replace

import pytest
import torch

from regauge.verification.operators import (
    MULTIPLE,
    OPERATORS,
    TOLERANCE,
    Operator,
    check_dropout_law,
    check_operator,
    check_operators,
)

NAMES = {op.name: op for op in OPERATORS}
FAR = {torch.float64: 1e6, torch.float32: 1e3, torch.bfloat16: 10, torch.float16: 10}


@pytest.mark.parametrize("dtype", FAR, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_statement_holds_and_every_control_is_far_above_the_tolerance(dtype, seed):
    findings = check_operators(dtype, seed)
    assert [f.id for f in findings if not f.holds] == []
    exact = [f for f in findings if f.id != "operator/dropout/law"]
    assert [f.id for f in exact if not f.ceiling >= FAR[dtype] * f.floor] == []
    if dtype == torch.float64:
        assert {f.floor for f in exact} == {TOLERANCE}


def test_one_finding_per_operator_and_direction():
    ids = [f.id for f in check_operators()]
    assert len(set(ids)) == len(ids) == 1 + sum(len(op.directions) for op in OPERATORS)
    assert "operator/layernorm/rows" in ids


def bad(name, run, **more):
    return replace(NAMES[name], run=run, **more)


WRONG = {
    "a sum along the tokens": (
        Operator("cumsum", "A running sum", "", lambda t: t["z"].cumsum(1)),
        {"rows", "both"},
    ),
    "a sum along the channels": (
        Operator("cumsum", "A running sum", "", lambda t: t["z"].cumsum(2)),
        {"columns", "both"},
    ),
    "a mask that stays": (
        bad("masked-attention", NAMES["masked-attention"].run, constants={"mask": "place place"}),
        {"rows", "both"},
    ),
    "a dropout mask that stays": (
        bad("dropout", NAMES["dropout"].run, constants={"kept": "batch place channel"}),
        {"rows", "columns", "both"},
    ),
    "weights that stay": (
        bad(
            "linear", NAMES["linear"].run, weights={"weight": "channel channel", "bias": "channel"}
        ),
        {"columns", "both"},
    ),
    "running statistics that stay": (
        bad(
            "batchnorm",
            NAMES["batchnorm"].run,
            constants={"mean": "channel", "log variance": "channel"},
        ),
        {"columns", "both"},
    ),
    # Forward it commutes; only the gradient of one weight is not the one that the weight's axes
    # promise.
    "a wrong gradient": (
        bad("linear", lambda t: NAMES["linear"].run(t | {"bias": FirstOnly.apply(t["bias"])})),
        {"columns", "both"},
    ),
    "nan": (
        Operator("nan", "Nothing", "", lambda t: t["z"] * torch.nan),
        {"rows", "columns", "both"},
    ),
}


class FirstOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * (torch.arange(len(grad)) < 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", WRONG)
def test_an_operator_that_does_not_commute_is_caught(case, dtype):
    op, wrong = WRONG[case]
    findings = {f.id.split("/")[-1]: f for f in check_operator(op, dtype)}
    assert {d for d, f in findings.items() if not f.holds} == wrong
    for direction in wrong:
        assert "not commute" in findings[direction].sentence
        assert findings[direction].value > findings[direction].floor
    if case == "a wrong gradient":
        assert findings["columns"].where == "gradient of bias"
    if case == "nan":
        assert findings["rows"].value == math.inf


def test_the_convolution_is_the_counter_example_and_a_kernel_of_one_is_none():
    rows, columns = check_operator(NAMES["convolution"])
    assert rows.holds
    assert rows.value > 0.1
    assert "does not commute with permutations of the tokens" in rows.statement
    assert columns.holds
    assert columns.value < TOLERANCE
    pointwise = bad(
        "convolution", lambda t: NAMES["linear"].run(t | {"weight": t["weight"][:, :, 0]})
    )
    assert [f.holds for f in check_operator(pointwise)] == [
        False,
        True,
    ]  # it commutes, so the statement that it does not is false


def test_pooling_keeps_weight_gradients_and_permutes_feature_gradients():
    rows = next(check_operator(NAMES["pma"]))
    assert rows.holds
    assert rows.ceiling > 0.1
    assert "is unchanged by permutations of the tokens" in rows.statement
    # What the paper says instead: the features' gradients stay where they are.
    papers = bad("pma", lambda t: NAMES["pma"].run(t | {"z": Unmoved.apply(t["z"])}))
    assert next(check_operator(papers)).holds is False


class Unmoved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.clone()

    @staticmethod
    def backward(ctx, grad):
        """In the order of the first channel: the same, however the tokens came."""
        (z,) = ctx.saved_tensors
        return grad.gather(1, z[..., :1].argsort(1).expand_as(grad))


def test_dropout_agrees_in_law_only():
    findings = check_dropout_law()
    assert findings.holds
    assert findings.ceiling > 10 * findings.floor > 10 * findings.value


def test_the_tolerance_is_a_multiple_of_the_operators_own_rounding():
    floors = [f.floor for f in check_operator(NAMES["mlp"], torch.bfloat16)]
    assert all(MULTIPLE * torch.finfo(torch.bfloat16).eps <= floor < 0.2 for floor in floors)

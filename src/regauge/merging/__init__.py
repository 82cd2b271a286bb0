"""Merging: several models of one architecture into one.

    merge_states(states, "ties", base=base, weight=[0.5, 0.5], density=0.4)
    merge_states(states, "regmean", statistics=[grams(module, s, batches) for s in states])
    merge_states(states, "ot_acts", spec=spec,
                 statistics=[activations(module, s, batches) for s in states])

State dicts go in, a new state dict comes out.

    methods          the merge of one tensor, and the registry of methods
    sparsify         the selection of task-vector entries (TIES, DARE, DELLA)
    recipes          a merge as data; `recipe_yaml` parses mergekit's YAML
    layout           which input tensors each output tensor is made of
    engine           checkpoints streamed through all of it, from a recipe to a folder
    basis            the check that models share a basis, and their alignment
    products         averages of the products inside attention heads
    statistics       Fisher information, Gram matrices and activations; `data_pass` computes them
    api              `merge` of what users hold
    transport        optimal transport between two models
    tokens           embedding tables of models with different vocabularies
    card             the model card
    lora             the difference of two models as a LoRA adapter; `lora_layers` finds its layers
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from regauge.core.spec import Spec

    State = Mapping[str, torch.Tensor]

__all__ = ["merge_states", "merge_tensors"]


def merge_states(
    states: Sequence[State],
    method: str = "linear",
    *,
    base: State | None = None,
    seed: int = 0,
    statistics: Sequence[Mapping[str, Any]] | None = None,
    spec: Spec | None = None,
    **parameters: Any,
) -> dict[str, torch.Tensor]:
    """Merge state dicts that share names, shapes and basis, tensor by tensor.

    Tensors that are not floating-point are copied from the base, or from the first state.

    Args:
        states: the state dicts.
        method: a key of `regauge.merging.methods.METHODS`.
        base: the base model, for methods that need one.
        seed: the random seed.
        statistics: one mapping for each state, for methods that need data. It must be computed by
            `regauge.merging.statistics` from the state as passed here, not from the same model in
            another basis.
        spec: the spec of the models, for methods of transport, which align all states with the
            first, and for the parameters `keep_norms` and `products`.
        parameters: the method's parameters. Per-model ones are a number, or a list with a number
            for each state; weights are equal by default.

    Raises:
        MergeError: if names, shapes or parameters do not fit.
    """
    from regauge.errors import MergeError
    from regauge.merging.methods import METHODS

    if not states:
        raise MergeError("states must not be empty", hint="pass at least one")
    chosen = METHODS.get(method)
    if (
        chosen is not None
        and chosen.statistic
        and (statistics is None or len(statistics) != len(states))
    ):
        raise MergeError(
            f"{method} needs statistics ({chosen.statistic}) of {len(states)} states, got "
            f"{len(statistics or ())}",
            hint="pass statistics= with one mapping for each state, by regauge.merging.statistics",
        )
    if chosen is not None and chosen.is_transport:
        states, parameters = _transport_states(method, states, spec, statistics, parameters)
        method, statistics = "linear", None
    structural = [key for key in ("keep_norms", "products") if parameters.get(key)]
    if structural and spec is None:
        raise MergeError(
            f"{' and '.join(structural)} need the spec of the models",
            hint="pass spec=regauge.spec_of(model)",
        )
    reference, reference_name = (states[0], "state 0") if base is None else (base, "the base")
    for i, state in enumerate(states):
        extra = next((name for name in state if name not in reference), None)
        if extra is not None:
            raise MergeError(
                f'state {i} has "{extra}", which {reference_name} lacks',
                hint="all states must have the same tensor names",
            )
    merged = {}
    for name, value in reference.items():
        absent = next((i for i, state in enumerate(states) if name not in state), None)
        if absent is not None:
            raise MergeError(
                f'state {absent} lacks "{name}"', hint="all states must have the same tensor names"
            )
        if not value.is_floating_point():
            merged[name] = value.clone()
            continue
        tensors = [state[name] for state in states]
        tensor_statistics = None if statistics is None else [s.get(name) for s in statistics]
        merged[name] = merge_tensors(
            method,
            tensors,
            base=None if base is None else base[name],
            name=name,
            seed=seed,
            statistics=tensor_statistics,
            structure=_structure(states, name, spec, parameters) if structural else None,
            **parameters,
        )
    return merged


def _structure(
    states: Sequence[State], name: str, spec: Spec | None, parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what the parameters `keep_norms` and `products` of one tensor need of the spec."""
    from regauge.merging.engine import reading_axes
    from regauge.merging.methods import normalized_weights
    from regauge.merging.products import Products

    if spec is None:
        return {}
    structure: dict[str, Any] = {"reading": reading_axes(spec, name)}
    if parameters.get("products"):
        weight = parameters.get("weight", 1.0)
        each = list(weight) if isinstance(weight, list | tuple) else [weight] * len(states)
        structure["products"] = Products().entries(
            [spec] * len(states),
            states,
            [name] * len(states),
            normalized_weights(parameters, [{"weight": w} for w in each]),
        )
    return structure


def _transport_states(
    method: str,
    states: Sequence[State],
    spec: Spec | None,
    activations: Sequence[Mapping[str, Any]] | None,
    parameters: dict[str, Any],
) -> Any:
    """Return the states transported to the first, and the parameters of their weighted mean."""
    from regauge.core.action import apply
    from regauge.errors import MergeError
    from regauge.merging.methods import METHODS
    from regauge.merging.transport import fit_transport

    if spec is None:
        raise MergeError(
            f"{method} needs the spec of the models", hint="pass spec=regauge.spec_of(model)"
        )
    chosen = METHODS[method]
    mean_parameters = {"weight": chosen.per_model["weight"], **parameters}
    regularization = (
        mean_parameters.pop("regularization", chosen.shared["regularization"])
        if "regularization" in chosen.shared
        else None
    )
    transported = [states[0]]
    for i, state in enumerate(states[1:], 1):
        pair = (
            (activations[i], activations[0])
            if activations is not None and chosen.statistic
            else None
        )
        transported.append(
            apply(
                fit_transport(
                    spec, state, states[0], regularization=regularization, activations=pair
                ),
                state,
                force=True,
            )
        )
    return transported, mean_parameters


def merge_tensors(
    method: str,
    tensors: Sequence[torch.Tensor],
    *,
    base: torch.Tensor | None = None,
    name: str = "",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    statistics: Sequence[Any] | None = None,
    structure: Mapping[str, Any] | None = None,
    **parameters: Any,
) -> torch.Tensor:
    """Merge corresponding tensors of several models.

    Args:
        method: a key of `regauge.merging.methods.METHODS`; not a method of transport.
        tensors: one tensor of each model.
        base: the tensor of the base model, for methods that need one.
        name: the name of the tensor; seeds random choices and appears in errors.
        seed: the random seed.
        dtype: the dtype of the result; by default that of the base, or of the first tensor.
        statistics: for methods that need it, the Fisher of each tensor (of its shape), or its Gram.
        structure: further fields of `MergeInput`, from the spec.
        parameters: the method's parameters; `lambda` may be passed as `lambda_`.

    Raises:
        MergeError: if the method, shapes or parameters do not fit.
    """
    from regauge.checkpoints.blocks import materialize
    from regauge.errors import MergeError
    from regauge.merging.methods import METHODS, REQUIRED, MergeInput

    if method not in METHODS:
        raise MergeError(
            f'method must be one of {", ".join(METHODS)}, got "{method}"',
        )
    chosen = METHODS[method]
    if chosen.is_transport:
        raise MergeError(
            f"{method} transports whole models and cannot merge single tensors",
            hint="pass whole states and their spec to merge_states",
        )
    named = {key.rstrip("_"): value for key, value in parameters.items()}
    for key in named:
        if key not in chosen.shared and key not in chosen.per_model:
            raise MergeError(
                f'{method} has no parameter "{key}"',
                hint=f"it has {', '.join((*chosen.shared, *chosen.per_model)) or 'none'}",
            )
    if chosen.needs_base and base is None:
        raise MergeError(f"{method} needs a base", hint="pass base=")
    if not chosen.uses_base and base is not None:
        raise MergeError(
            f"{method} takes no base", hint="pass the base as one of the models, or leave it out"
        )
    inputs = [*tensors] if base is None else [base, *tensors]
    shapes = {tuple(t.shape) for t in inputs}
    if len(shapes) > 1:
        raise MergeError(
            f'"{name}" has different shapes: {", ".join(str(list(s)) for s in sorted(shapes))}',
            hint="all models must have the same size",
        )
    shared = {key: named.get(key, default) for key, default in chosen.shared.items()}
    per_model: list[dict[str, Any]] = [{} for _ in tensors]
    for key, default in chosen.per_model.items():
        # A recipe must state weights; here they are equal by default.
        value = named.get(key, 1.0 if key == "weight" else default)
        values = list(value) if isinstance(value, list | tuple) else [value] * len(tensors)
        if len(values) != len(tensors):
            raise MergeError(
                f'"{key}" must have {len(tensors)} values, one for each model, got {len(values)}',
                hint="or pass one number for all",
            )
        for values_of_model, number in zip(per_model, values, strict=True):
            values_of_model[key] = number
    missing = next(
        (
            k
            for k, v in [
                *shared.items(),
                *(item for values_of_one in per_model for item in values_of_one.items()),
            ]
            if v is REQUIRED
        ),
        None,
    )
    if missing is not None:
        raise MergeError(f'{method} needs the parameter "{missing}"', hint=f"pass {missing}=")
    per_input, base_index = ([*per_model], None) if base is None else ([{}, *per_model], 0)
    return materialize(
        chosen.merge(
            MergeInput(
                inputs,
                shared,
                per_input,
                base_index,
                dtype,
                None,
                name,
                seed,
                statistics or (),
                **(structure or {}),
            )
        )
    )

"""Merging: several models of one architecture into one.

    merge(states, "ties", base=root, weight=[0.5, 0.5], density=0.4)     # state dicts in, a new
    state dict out
    merge(states, "regmean", statistics=[grams(module, state, batches) for state in states],
    alpha=0.9)
    merge(states, "ot_acts", spec=spec, statistics=[activations(module, state, batches) for state in
    states])

`methods` has what is done to the tensors of one place, `recipes` what a merge is and `reading`
mergekit's YAML for it, `layout` says which tensors stand in one place, and `engine` streams
checkpoints through all of it. `statistics` has what methods learn from data, `transport` the plans
of optimal transport. Before anything is merged, `basis` asks whether the models share a basis at
all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from regauge.core.spec import Spec

    State = Mapping[str, torch.Tensor]

__all__ = ["merge", "merge_tensors"]


def merge(
    states: Sequence[State],
    method: str = "linear",
    *,
    base: State | None = None,
    seed: int = 0,
    statistics: Sequence[Mapping[str, Any]] | None = None,
    spec: Spec | None = None,
    **parameters: Any,
) -> dict[str, torch.Tensor]:
    """Merge state dicts that share names, shapes and basis, tensor by tensor. What is no
    floating-point number is taken from the base, or the first.

    `parameters` are the method's: a number, or for those of each model a list with a number for
    each state; without weights all count alike. `statistics` is what methods that need data know of
    each state as it is given here: what `regauge.merging.statistics` has computed of *it*, not of
    the same model before it was moved. Methods of transport move all states next to the first, and
    need the `spec`.
    """
    from regauge.merging.methods import METHODS, MergeError

    if not states:
        raise MergeError("there are no states to merge", hint="give at least one")
    how = METHODS.get(method)
    if how is not None and how.statistic and (statistics is None or len(statistics) != len(states)):
        raise MergeError(
            f"{method} needs to know what data say about each model ({how.statistic}), and "
            f"{len(statistics or ())} of {len(states)} are given",
            hint="give statistics= with one mapping for each state, by regauge.merging.statistics",
        )
    if how is not None and how.is_transport:
        states, parameters = _transport_states(method, states, spec, statistics, parameters)
        method, statistics = "linear", None
    root, called = (states[0], "state 0") if base is None else (base, "the base")
    for i, state in enumerate(states):
        extra = next((name for name in state if name not in root), None)
        if extra is not None:
            raise MergeError(
                f'state {i} has "{extra}", and {called} has not',
                hint="states that are merged have the same names",
            )
    out = {}
    for name, value in root.items():
        absent = next((i for i, state in enumerate(states) if name not in state), None)
        if absent is not None:
            raise MergeError(
                f'state {absent} has no "{name}"', hint="states that are merged have the same names"
            )
        if not value.is_floating_point():
            out[name] = value.clone()
            continue
        tensors = [state[name] for state in states]
        known = None if statistics is None else [s.get(name) for s in statistics]
        out[name] = merge_tensors(
            method,
            tensors,
            base=None if base is None else base[name],
            name=name,
            seed=seed,
            statistics=known,
            **parameters,
        )
    return out


def _transport_states(
    method: str,
    states: Sequence[State],
    spec: Spec | None,
    seen: Sequence[Mapping[str, Any]] | None,
    parameters: dict[str, Any],
) -> Any:
    """The states as transport moves them next to the first, and the parameters of the weighted mean
    that is left to be made of them.
    """
    from regauge.core.action import apply
    from regauge.merging.methods import METHODS, MergeError
    from regauge.merging.transport import fit_transport

    if spec is None:
        raise MergeError(
            f"{method} needs the spec of the models", hint="give spec=regauge.spec_of(model)"
        )
    how = METHODS[method]
    given = {"weight": how.per_model["weight"], **parameters}
    soft = (
        given.pop("regularization", how.shared["regularization"])
        if "regularization" in how.shared
        else None
    )
    moved = [states[0]]
    for i, state in enumerate(states[1:], 1):
        pair = (seen[i], seen[0]) if seen is not None and how.statistic else None
        moved.append(
            apply(
                fit_transport(spec, state, states[0], regularization=soft, activations=pair),
                state,
                force=True,
            )
        )
    return moved, given


def merge_tensors(
    method: str,
    tensors: Sequence[torch.Tensor],
    *,
    base: torch.Tensor | None = None,
    name: str = "",
    seed: int = 0,
    dtype: torch.dtype | None = None,
    statistics: Sequence[Any] | None = None,
    **parameters: Any,
) -> torch.Tensor:
    """Merge the tensors of one place. `lambda` may be given as `lambda_`; the result has the dtype
    of the base, or of the first, unless given. `statistics` has what is known of each tensor, for
    methods that need it: its Fisher (a tensor like it), or its Gram.
    """
    from regauge.checkpoints.blocks import materialize
    from regauge.merging.methods import METHODS, REQUIRED, MergeError, MergeInput

    if method not in METHODS:
        raise MergeError(f'there is no method "{method}"', hint=f"choose from {', '.join(METHODS)}")
    how = METHODS[method]
    if how.is_transport:
        raise MergeError(
            f"{method} moves whole models, and not the tensors of one place",
            hint="give whole states and their spec to regauge.merge",
        )
    given = {key.rstrip("_"): value for key, value in parameters.items()}
    for key in given:
        if key not in how.shared and key not in how.per_model:
            raise MergeError(
                f'{method} has no parameter "{key}"',
                hint=f"it has {', '.join((*how.shared, *how.per_model)) or 'none'}",
            )
    if how.needs_base and base is None:
        raise MergeError(f"{method} needs a base", hint="give base=")
    if not how.needs_base and base is not None:
        raise MergeError(
            f"{method} knows no base", hint="give the base as one of the models, or leave it out"
        )
    together = [*tensors] if base is None else [base, *tensors]
    shapes = {tuple(t.shape) for t in together}
    if len(shapes) > 1:
        raise MergeError(
            f'"{name}" has different shapes: {", ".join(str(list(s)) for s in sorted(shapes))}',
            hint="models of one size are merged",
        )
    shared = {key: given.get(key, default) for key, default in how.shared.items()}
    each: list[dict[str, Any]] = [{} for _ in tensors]
    for key, default in how.per_model.items():
        value = given.get(
            key, 1.0 if key == "weight" else default
        )  # a recipe must say it; here all count alike
        values = list(value) if isinstance(value, list | tuple) else [value] * len(tensors)
        if len(values) != len(tensors):
            raise MergeError(
                f'"{key}" has {len(values)} values for {len(tensors)} models',
                hint="give one number, or one for each model",
            )
        for place, one in zip(each, values, strict=True):
            place[key] = one
    missing = next(
        (
            k
            for k, v in [*shared.items(), *(item for e in each for item in e.items())]
            if v is REQUIRED
        ),
        None,
    )
    if missing is not None:
        raise MergeError(f'{method} needs the parameter "{missing}"', hint=f"give {missing}=")
    every, at = ([*each], None) if base is None else ([{}, *each], 0)
    return materialize(
        how.merge(
            MergeInput(together, shared, every, at, dtype, None, name, seed, statistics or ())
        )
    )

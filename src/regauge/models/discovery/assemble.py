"""From inferred groups to a spec: axes strings, parts, outputs, and the reasons for each group."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from regauge.core import axes as ax
from regauge.core.groups import Rotary
from regauge.core.spec import Space, Spec
from regauge.models.discovery.explain import summarize_reasons
from regauge.models.discovery.folds import find_folds
from regauge.models.discovery.infer_groups import GroupInference, Kind, infer_groups
from regauge.models.discovery.names import name_kinds, side_of
from regauge.models.discovery.terms import Atom, Sum, Term, factors, find, parts
from regauge.models.discovery.walk import Axis, Value, Walk

# Outputs that return an inner value unchanged: a space may be visible there. On all others, axes
# that nothing reads are frozen, since callers depend on them.
_INNER_OUTPUTS = re.compile(
    r".*(hidden_state|hidden_states|embeds|embeddings?|pooler_output|features)$"
)
_IGNORED_OUTPUTS = ("encoder_last_hidden_state", "loss")


def assemble(
    w: Walk, module: torch.nn.Module, family: str
) -> tuple[Spec, GroupInference, dict[Atom, str]]:
    """Build the spec of a walked module.

    Returns:
        The spec, the inferred groups, and the names of spaces by atom.
    """
    outputs = {
        n: v
        for n, v in w.graph.outputs.items()
        if len(w.graph.outputs) == 1 or n not in _IGNORED_OUTPUTS
    }
    if "encoder_last_hidden_state" in w.graph.outputs and "last_hidden_state" in w.graph.outputs:
        outputs = dict(w.graph.outputs)
    norms, scales = find_folds(w, list(outputs.values()))
    values = {name: w.value(node) for name, node in outputs.items()}
    closed = _caller_visible_axes(w, values)
    inference = infer_groups(w, {n.gain for n in norms} | {s.gain for s in scales}, closed)
    has_sides = (
        len(
            {
                side
                for n in inference.parameters
                if (side := side_of([n])) and re.search(r"\.\d+\.", n)
            }
        )
        > 1
    )
    names = name_kinds(inference, has_sides)
    tensors = {
        name: format_axes(inference, names, axes) for name, axes in inference.parameters.items()
    }
    state = dict(module.state_dict(keep_vars=True))
    for tied in _tie_groups(w.graph.ties):  # unused names have the axes of the used one
        used = next((n for n in tied if n in w.first_use), None)
        for name in tied:
            if name not in w.first_use:
                tensors[name] = tensors[used] if used is not None else _holes(state[name].shape)
    for name in w.graph.unused:
        tensors.setdefault(name, _holes(state[name].shape))
    parameters = {n for n, _ in module.named_parameters(remove_duplicate=False)}
    buffers = [n for n in state if n not in parameters and n not in tensors]
    tensors = {n: tensors[n] for n in state if n in tensors}
    spaces = {names[k.atom]: _make_space(k, names) for k in _sort_kinds(inference, names)}
    spec = Spec(
        family=family,
        spaces=spaces,
        tensors=tensors,
        parts=_assign_parts(w, tensors),
        ties={a: t for a, t in w.graph.ties.items() if a in tensors and t in tensors},
        outputs={
            name: " ".join(str(_open_axis(_axis_term(inference, names, a))) for a in v.axes)
            for name, v in values.items()
        },
        norms=tuple(
            n
            for n in norms
            if _is_worth_folding(tensors, spaces, n.gain, [r for r, _ in n.readers], w.gain_axes)
        ),
        scales=tuple(s for s in scales if _is_worth_folding(tensors, spaces, s.gain, [], {})),
        buffers=tuple(re.escape(n) for n in buffers),
        notes=_make_notes(w),
    )
    return spec, inference, names


def _holes(shape: Sequence[int]) -> str:
    return " ".join(f"_{n}" for n in shape)


def _tie_groups(ties: Mapping[str, str]) -> list[list[str]]:
    """Return the names of each tied parameter."""
    groups: dict[str, list[str]] = {}
    for alias, target in ties.items():
        groups.setdefault(target, [target]).append(alias)
    return list(groups.values())


def _caller_visible_axes(w: Walk, values: Mapping[str, Value]) -> dict[Axis, str]:
    """Return the axes of outputs that nothing inside the module reads, with the reason for freezing
    them.
    """
    from regauge.models.discovery.terms import leaves

    contracted = {
        id(a)
        for r in w.relations
        if r.kind == "contract"
        for axis in (*r.left, *r.right)
        for a in leaves(axis.term)
    }
    out = {}
    for name, value in values.items():
        for axis in value.axes:
            if not _INNER_OUTPUTS.match(name) and not any(
                id(a) in contracted for a in leaves(axis.term)
            ):
                out[axis] = f'it is returned in "{name}"'
    return out


def _is_worth_folding(
    tensors: Mapping[str, str],
    spaces: Mapping[str, Space],
    gain: str,
    readers: Sequence[str],
    gain_axes: Mapping[str, int],
) -> bool:
    """Return whether folding a gain makes a space larger, and the readers show which axis it folds
    into.
    """
    gain_spaces = {leaf.space for term in ax.parse(tensors[gain]).terms for leaf in ax.leaves(term)}

    def reads(name: str) -> bool:
        for i, term in enumerate(ax.parse(tensors[name]).terms):
            term_leaves = list(ax.leaves(term))
            if (
                term_leaves
                and {f.space for f in term_leaves} == gain_spaces
                and all(f.star for f in term_leaves)
            ):
                return gain_axes.get(name, i) == i
        return False

    larger = any(spaces[name].folded is not None for name in gain_spaces)
    return len(ax.parse(tensors[gain]).terms) == 1 and larger and all(reads(r) for r in readers)


def format_axes(inference: GroupInference, names: Mapping[Atom, str], axes: Sequence[Axis]) -> str:
    """Write axes in the notation of specs."""
    return " ".join(str(_axis_term(inference, names, axis)) for axis in axes)


def _axis_term(inference: GroupInference, names: Mapping[Atom, str], axis: Axis) -> ax.Term:
    """Convert the term of an axis to the notation of specs."""
    positions = iter(range(10**9))

    def leaf(atom: Atom) -> ax.Term:
        i = next(positions)
        kind = inference.kinds.get(atom)
        if (
            kind is None
            or atom not in names
            or (kind.is_frozen and not any(k.over is atom for k in inference.kinds.values()))
        ):
            return ax.Hole(atom.size)
        e = kind.exponents.get(
            (axis, i), 1 if (axis, i) not in kind.exponents and not kind.occurs_on(axis) else 0
        )
        if isinstance(kind.group, Rotary) and e == 0:
            return ax.Hole(atom.size)
        barred = e == 0 and not kind.is_frozen
        return ax.Leaf(names[atom], star=e < 0, bar=barred)

    def term(t: Term) -> ax.Term:
        converted = [direct_sum(f) if isinstance(f, Sum) else leaf(f) for f in factors(t)]
        return _join_factors(converted)

    def direct_sum(s: Sum) -> ax.Term:
        terms = [term(find(t)) for t in parts(s)]
        joined: list[ax.Term] = []
        for t in terms:
            if isinstance(t, ax.Hole) and joined and isinstance(joined[-1], ax.Hole):
                joined[-1] = ax.Hole((joined[-1].size or 0) + (t.size or 0))
            else:
                joined.append(t)
        return joined[0] if len(joined) == 1 else ax.Sum(tuple(joined))

    return term(axis.term)


def _open_axis(term: ax.Term) -> ax.Term:
    """Give an axis of an output any length, for any number of rows or tokens. Of several adjacent
    holes the last is open.
    """
    match term:
        case ax.Hole():
            return ax.Hole()
        case ax.Sum() | ax.Product():
            inner = list(term.terms if isinstance(term, ax.Sum) else term.factors)
            last = next(
                (i for i in reversed(range(len(inner))) if isinstance(inner[i], ax.Hole)), None
            )
            if last is not None:
                inner[last] = ax.Hole()
            return (
                ax.Sum(tuple(inner))
                if isinstance(term, ax.Sum)
                else ax.Product(tuple(inner), term.star)
            )
        case _:
            return term


def _join_factors(factors: list[ax.Term]) -> ax.Term:
    """Build a product, with adjacent holes merged."""
    out: list[ax.Term] = []
    for t in factors:
        if isinstance(t, ax.Hole) and out and isinstance(out[-1], ax.Hole):
            out[-1] = ax.Hole((out[-1].size or 1) * (t.size or 1))
        else:
            out.append(t)
    if not out:
        return ax.Hole(1)
    if len(out) == 1:
        return out[0]
    if all(isinstance(t, ax.Leaf) and (t.star or t.bar) for t in out) and any(
        isinstance(t, ax.Leaf) and t.star for t in out
    ):
        return ax.Product(
            tuple(ax.Leaf(t.space, bar=t.bar) for t in out if isinstance(t, ax.Leaf)), star=True
        )
    return ax.Product(tuple(out))


def _make_space(kind: Kind, names: Mapping[Atom, str]) -> Space:
    """Build the space of a kind."""
    return Space(
        kind.atom.size,
        kind.group,
        over=names[kind.over] if kind.over is not None else None,
        folded=kind.folded,
        why=summarize_reasons(kind),
    )


def _sort_kinds(inference: GroupInference, names: Mapping[Atom, str]) -> list[Kind]:
    """Sort kinds by name: the stream first, then layer by layer."""

    def key(kind: Kind) -> tuple[bool, tuple[int, ...], str]:
        name = names[kind.atom]
        return (
            not name.startswith("stream"),
            tuple(int(n) for n in re.findall(r"\d+", name)),
            name,
        )

    return sorted((inference.kinds[a] for a in names), key=key)


def _assign_parts(w: Walk, tensors: Mapping[str, str]) -> dict[str, str]:
    """Assign each tensor to a part. The backbone is the parameters of the longest numbered lists of
    modules; parameters that are read before them are the embedding, the others the head.
    """
    prefixes = Counter(
        m.group(1) for n in tensors for m in [re.match(r"(.*?\.)\d+\.", f".{n}")] if m
    )
    lists = {
        p for p, number in prefixes.items() if number >= 2 and number * 4 >= max(prefixes.values())
    }
    first_use = w.first_use

    def is_in_list(name: str) -> bool:
        match = re.match(r"(.*?\.)\d+\.", f".{name}")
        return match is not None and match.group(1) in lists

    start = min((first_use[n] for n in tensors if is_in_list(n) and n in first_use), default=0)

    def part(name: str) -> str:
        if is_in_list(name) or not lists:
            return "backbone"
        return "embed" if first_use.get(name, start) < start else "head"

    return {n: part(n) for n in tensors}


def _make_notes(w: Walk) -> tuple[str, ...]:
    """Return notes on unsupported operators and unused parameters."""
    notes = []
    if w.unsupported:
        names = ", ".join(sorted(w.unsupported))
        notes.append(f"no rule for {names}: nothing acts on axes that they touch")
    if w.graph.unused:
        names = ", ".join(w.graph.unused[:3]) + (
            f" and {len(w.graph.unused) - 3} more" if len(w.graph.unused) > 3 else ""
        )
        notes.append(f"unused on the example inputs, left unchanged: {names}")
    return tuple(notes)

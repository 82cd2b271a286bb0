"""Rules for operators that only rearrange numbers: views, transpositions, cuts and joins, selections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regauge.discovery.graph import operator
from regauge.discovery.terms import Product, Sum, atom, unify
from regauge.discovery.walk import Axis, Node, Relation, Value, Walk, shape

CHOSEN = "single places of it are chosen by number"
LOOKED_UP = "it is looked up by number"


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    if len(node.args) > place:
        return node.args[place]
    return node.kwargs.get(name, default)


def kept(value: Value, axes: Any) -> Value:
    """The same numbers with other axes."""
    return replace(value, axes=tuple(axes), dim=-1, cases=())


def view(w: Walk, node: Node) -> Value:
    """view, reshape, flatten, unflatten, squeeze, unsqueeze: products are split and merged, row-major."""
    x, new = w.stacked(node.args[0]), shape(node)
    if x.cases:
        moved = _view_of_cases(w, x, shape(node.args[0]), new)
        if moved is not None:
            return moved
        x = w.collapse(x)
    dim = _selected(node)
    if dim is not None:
        apart = _apart(w, x, new, dim)
        if apart is not None:
            return apart
    old = [a for a in x.axes if a.size != 1]
    if [a.size for a in old] == [n for n in new if n != 1]:  # only ones come or go
        rest = iter(old)
        return kept(x, [w.follow(next(rest)) if n != 1 else Axis(atom(1)) for n in new])
    axes = [Axis(atom(n)) for n in new]
    w.same(x.axes, axes)
    return kept(x, axes)


def _view_of_cases(w: Walk, x: Value, old: tuple[int, ...], new: tuple[int, ...]) -> Value | None:
    """Ones that come or go around cases."""
    if [n for n in old if n != 1] != [n for n in new if n != 1] or len(x.cases) == 1:
        return None
    which = [i for i, n in enumerate(old) if n != 1].index(x.dim)
    dim = [i for i, n in enumerate(new) if n != 1][which]
    cases = []
    for case in x.cases:
        rest = iter([a for a in case.axes if a.size != 1])
        cases.append(kept(case, [Axis(atom(1)) if n == 1 else next(rest) for i, n in enumerate(new) if i != dim]))
    return replace(x, axes=(), dim=dim, cases=tuple(cases))


def _selected(node: Node) -> int | None:
    """The axis of a new view along which single places are taken, and nothing else is done: fused queries, keys and values."""
    for dim, n in enumerate(shape(node)):
        if 1 < n <= 8 and _ends_in_selects(node, dim):
            return dim
    return None


def _ends_in_selects(node: Node, dim: int) -> bool:
    if not node.users:
        return False
    for user in node.users:
        name, rank = operator(user), len(shape(node))
        if name in ("select", "unbind"):
            if argument(user, 1, "dim", 0) % rank != dim:
                return False
        elif name in ("contiguous", "clone", "alias", "to"):
            if not _ends_in_selects(user, dim):
                return False
        elif name in ("permute", "transpose"):
            if not _ends_in_selects(user, _order(user, rank).index(dim)):
                return False
        elif name in ("squeeze", "unsqueeze"):
            old, new = [i for i, n in enumerate(shape(node)) if n != 1], [i for i, n in enumerate(shape(user)) if n != 1]
            if dim not in old or len(old) != len(new) or not _ends_in_selects(user, new[old.index(dim)]):
                return False
        else:
            return False
    return True


def _apart(w: Walk, x: Value, new: tuple[int, ...], dim: int) -> Value | None:
    """A view whose axis `dim` counts cases: what lies behind it in the same old axis is of another kind in each case."""
    start, at = 0, 0
    for axis in x.axes:
        size, start = 1, at
        while size < axis.size and at < len(new):
            size *= new[at]
            at += 1
        if size != axis.size:
            return None
        if start <= dim < at:
            break
    else:
        return None
    before, behind = new[start:dim], new[dim + 1 : at]
    outer = [Axis(atom(n)) for n in before]
    inner = [[Axis(atom(n)) for n in behind] for _ in range(new[dim])]
    blocks = Sum(tuple(Product(tuple(a.term for a in one)) for one in inner))
    unify(axis.term, Product((*(a.term for a in outer), blocks)), w._misfit)
    w.relations.append(Relation("same", (axis,), (*outer, *(a for one in inner for a in one))))
    index = x.axes.index(axis)
    ahead = list(x.axes[:index])
    after = list(x.axes[index + 1 :])
    if tuple(a.size for a in ahead) != new[:start] or tuple(a.size for a in after) != new[at:]:
        return None
    cases = tuple(Value((*ahead, *outer, *one, *after), weights=x.weights) for one in inner)
    return Value((), weights=x.weights, dim=dim, cases=cases)


def _order(node: Node, rank: int) -> list[int]:
    if operator(node) == "permute":
        return [d % rank for d in argument(node, 1, "dims")]
    order = list(range(rank))
    if operator(node) in ("t", "numpy_T", "mT", "adjoint"):
        return [*order[:-2], *order[-2:][::-1]]
    a, b = argument(node, 1, "dim0"), argument(node, 2, "dim1")
    order[a], order[b] = order[b], order[a]
    return order


def permute(w: Walk, node: Node) -> Value:
    x = w.stacked(node.args[0])
    rank = len(x.axes) + (len(x.cases[0].axes) + 1 if x.cases else 0)
    order = _order(node, rank)
    if not x.cases:
        return kept(x, [x.axes[d] for d in order])
    dim = order.index(x.dim)
    rest = [d if d < x.dim else d - 1 for d in order if d != x.dim]
    return replace(x, dim=dim, cases=tuple(kept(c, [c.axes[d] for d in rest]) for c in x.cases))


def passed(w: Walk, node: Node) -> Value:
    """Casts, copies and dropout in evaluation mode: the same numbers."""
    return w.stacked(node.args[0])


def expand(w: Walk, node: Node) -> Value:
    x, new = w.value(node.args[0]), shape(node)
    old: list[Axis | None] = [None] * (len(new) - len(x.axes)) + list(x.axes)
    return kept(x, [a if a is not None and a.size == n else Axis(atom(n), uniform=True) for a, n in zip(old, new, strict=True)])


def repeat(w: Walk, node: Node) -> Value:
    """Copies of an axis one behind the other (repeat), or of each place (repeat_interleave)."""
    x, new = w.value(node.args[0]), shape(node)
    each = operator(node) == "repeat_interleave"
    old: list[Axis | None] = [None] * (len(new) - len(x.axes)) + list(x.axes)
    axes = []
    for a, n in zip(old, new, strict=True):
        if a is None or (a.size == 1 and n > 1):
            axes.append(Axis(atom(n), uniform=True))
        elif a.size == n:
            axes.append(w.follow(a))
        else:
            copies, out = Axis(atom(n // a.size)), Axis(atom(n))
            w.same([a, copies] if each else [copies, a], [out])
            axes.append(out)
    return Value(tuple(axes))


def select(w: Walk, node: Node) -> Value:
    x, dim, index = w.stacked(node.args[0]), argument(node, 1, "dim", 0), argument(node, 2, "index", 0)
    if x.cases and dim % (len(x.cases[0].axes) + 1) == x.dim and isinstance(index, int):
        return x.cases[index]
    x = w.value(node.args[0])
    dim %= len(x.axes)
    if not x.axes[dim].uniform:
        w.freeze(x.axes[dim], CHOSEN)
    return replace(kept(x, [w.follow(a) for i, a in enumerate(x.axes) if i != dim]), source=None)


def unbind(w: Walk, node: Node) -> list[Value]:
    x, dim = w.stacked(node.args[0]), argument(node, 1, "dim", 0)
    if x.cases and dim % (len(x.cases[0].axes) + 1) == x.dim:
        return list(x.cases)
    x = w.value(node.args[0])
    dim %= len(x.axes)
    w.freeze(x.axes[dim], CHOSEN)
    return [replace(kept(x, [w.follow(a) for i, a in enumerate(x.axes) if i != dim]), source=None) for _ in node.meta["val"]]


def getitem(w: Walk, node: Node) -> Value:
    found = w.values[node.args[0]]
    return found[node.args[1]] if isinstance(found, list) else found


def split(w: Walk, node: Node) -> list[Value]:
    """split, chunk and their like: a sum along one axis."""
    x = w.value(node.args[0])
    dim = argument(node, 2, "dim", 0) % len(x.axes)
    sizes = [v.shape[dim] for v in node.meta["val"]]
    if len(sizes) == 1:
        return [x]
    rest = [a for i, a in enumerate(x.axes) if i != dim]
    out = []
    for piece in w.pieces(x.axes[dim], sizes):
        axes = [w.follow(a) for a in rest]
        axes.insert(dim, piece)
        out.append(kept(x, axes))
    return out


def slice_(w: Walk, node: Node) -> Value:
    x = w.value(node.args[0])
    dim = argument(node, 1, "dim", 0) % len(x.axes)
    axis, n = x.axes[dim], shape(node)[dim]
    if n == axis.size:
        return x
    step = argument(node, 4, "step", 1)
    start = argument(node, 2, "start", 0) or 0
    if step != 1:
        w.freeze(axis, "every so many places of it are taken")
        piece = w.fixed(n, CHOSEN)
    else:
        start = max(0, start + axis.size if start < 0 else start)
        piece = w.pieces(axis, (start, n, axis.size - start - n))[1]
    axes = [piece if i == dim else w.follow(a) for i, a in enumerate(x.axes)]
    return kept(x, axes)


def cat(w: Walk, node: Node) -> Value:
    given = [n for n in node.args[0] if 0 not in shape(n)]  # a cache that is empty yet
    values = [w.value(n) for n in given]
    if len(values) == 1:
        return values[0]
    dim = argument(node, 1, "dim", 0) % len(values[0].axes)
    axes = []
    for i, first in enumerate(values[0].axes):
        if i == dim:
            axes.append(w.joined([v.axes[i] for v in values]))
            continue
        out = Axis(first.term)
        for v in values:
            _aligned(w, v.axes[i], out)
        axes.append(out)
    return Value(tuple(axes), weights=all(v.weights for v in values))


def _aligned(w: Walk, axis: Axis, out: Axis) -> None:
    if axis.uniform:
        w.restrict(out, "shift")
        unify(axis.term, out.term, w._misfit)
    else:
        w.same([axis], [out])


def stack(w: Walk, node: Node) -> Value:
    values = [w.value(n) for n in node.args[0]]
    dim = argument(node, 1, "dim", 0) % (len(values[0].axes) + 1)
    if len(node.users) and _ends_in_selects(node, dim):
        return Value((), dim=dim, cases=tuple(values), weights=all(v.weights for v in values))
    axes = []
    for i, first in enumerate(values[0].axes):
        out = Axis(first.term)
        for v in values:
            _aligned(w, v.axes[i], out)
        axes.append(out)
    axes.insert(dim, w.fixed(len(values), "tensors are stacked along it"))
    return Value(tuple(axes), weights=all(v.weights for v in values))


def embedding(w: Walk, node: Node) -> Value:
    table, ids = w.value(node.args[0]), w.value(node.args[1])
    _look_up(w, table.axes[0], ids)
    return Value((*(w.follow(a) for a in ids.axes), w.follow(table.axes[1])), weights=False)


def _look_up(w: Walk, axis: Axis, ids: Value) -> None:
    """Rows are taken by number: in a fixed order, unless the numbers are themselves places on such an axis."""
    if ids.places is not None:
        w.same([axis], [ids.places])
    else:
        w.freeze(axis, LOOKED_UP)


def index(w: Walk, node: Node) -> Value:
    x, indices = w.value(node.args[0]), list(node.args[1])
    out = list(shape(node))
    used = [d for d, i in enumerate(indices) if i is not None]
    values = [w.value(indices[d]) for d in used]
    for d, ids in zip(used, values, strict=True):
        if str(indices[d].meta["val"].dtype) == "torch.bool":
            return _picked(w, node, x, d, ids) if len(used) == 1 else _frozen(w, node, x)
        _look_up(w, x.axes[d], ids)
    rank = max(len(v.axes) for v in values)
    first = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    axes: list[Axis] = [w.follow(a) for d, a in enumerate(x.axes) if d not in used]
    ahead = next((v for v in values if len(v.axes) == rank and all(a.size == n for a, n in zip(v.axes, out[first:], strict=False))), None)
    if ahead is not None:
        new = [w.follow(a) for a in ahead.axes]
    else:
        new = [w.fixed(n, LOOKED_UP) for n in out[first : first + rank]]
    axes[first:first] = new
    chosen = x.weights and all(v.places is not None for v in values)  # each token's expert
    return Value(tuple(axes), source=x.source if chosen else None, weights=chosen)


def _picked(w: Walk, node: Node, x: Value, at: int, mask: Value) -> Value:
    """A mask picks places of some axes, and they become one; the others pass."""
    end = at + len(mask.axes)
    for a in x.axes[at:end]:
        w.freeze(a, "a mask picks its places")
    return Value((*(w.follow(a) for a in x.axes[:at]), w.fixed(shape(node)[at], "a mask picks its places"), *(w.follow(a) for a in x.axes[end:])))


def index_select(w: Walk, node: Node) -> Value:
    x, dim, ids = w.value(node.args[0]), argument(node, 1, "dim"), w.value(node.args[2])
    _look_up(w, x.axes[dim], ids)
    return Value(tuple(w.follow(ids.axes[0]) if i == dim % len(x.axes) else w.follow(a) for i, a in enumerate(x.axes)))


def gather(w: Walk, node: Node) -> Value:
    """Along `dim` numbers say which place is taken, for each place of the others."""
    x, ids = w.value(node.args[0]), w.value(node.args[2])
    dim = argument(node, 1, "dim") % len(x.axes)
    axes = []
    for i, (a, b) in enumerate(zip(x.axes, ids.axes, strict=True)):
        if i == dim:
            _look_up(w, a, ids)
            axes.append(w.follow(b))
        elif a.size == b.size:
            if not b.uniform:
                w.same([a], [b])
                w.restrict(a, "batch")
            axes.append(w.follow(a))
        else:
            w.freeze(a, CHOSEN)
            axes.append(w.follow(b))
    return Value(tuple(axes))


def reordered(w: Walk, node: Node) -> Value:
    """flip, roll: some axes keep their order, whatever it is; the others pass."""
    x = w.value(node.args[0])
    dims = argument(node, 2 if operator(node) == "roll" else 1, "dims", ())
    moved = {d % len(x.axes) for d in ([dims] if isinstance(dims, int) else dims)}
    for d in moved or set(range(len(x.axes))):
        w.freeze(x.axes[d], "its places are shifted or turned round")
    return Value(tuple(w.follow(a) for a in x.axes))


def pad(w: Walk, node: Node) -> Value:
    x, new = w.value(node.args[0]), shape(node)
    axes = []
    for a, n in zip(x.axes, new, strict=True):
        if a.size == n:
            axes.append(w.follow(a))
        else:
            w.freeze(a, "it is padded")
            axes.append(w.fixed(n, "it is padded"))
    return Value(tuple(axes))


def shuffled(w: Walk, node: Node) -> Value:
    """pixel_shuffle: channels become places."""
    x = w.value(node.args[0])
    for a in x.axes[-3:]:
        w.freeze(a, "channels and places become one another")
    return Value((*(w.follow(a) for a in x.axes[:-3]), *(w.fixed(n, "channels and places become one another") for n in shape(node)[-3:])))


def _frozen(w: Walk, node: Node, *values: Value) -> Value:
    for v in values:
        for a in v.axes:
            w.freeze(a, f"`{operator(node)}` follows no rule here")
    return Value(tuple(w.fixed(n, f"`{operator(node)}` follows no rule here") for n in shape(node)))

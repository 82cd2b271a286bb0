"""Deliberate faults in the core, one at a time. The suite must kill every one: a test that cannot
fail proves nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src" / "regauge"
ACTION, GROUPS, SPEC, FOLD = (
    "core/test_action.py",
    "core/test_groups.py",
    "core/test_spec.py",
    "core/test_fold.py",
)

# what is broken: (file, what stands there, what the mutant has instead, the tests that must notice)
MUTANTS = {
    "gather in the wrong direction": (
        "core/steps.py",
        "torch.as_tensor(self.index, device=x.device)",
        "torch.as_tensor(np.argsort(self.index), device=x.device)",
        GROUPS,
    ),
    "fused gathers in the wrong order": (
        "core/steps.py",
        "Gather(first.index[later.index], scale)",
        "Gather(later.index[first.index], scale)",
        ACTION,
    ),
    "a bracket's star forgotten": (
        "core/action.py",
        "if leaf.star != star and not",
        "if leaf.star and not",
        ACTION,
    ),
    "every star forgotten": (
        "core/action.py",
        "        member = member.dual()\n",
        "        pass\n",
        ACTION,
    ),
    "products acted on from the outside in": (
        "core/action.py",
        "inner.then(widen(_chain(g, outer, n, at, star), width))",
        "widen(_chain(g, outer, n, at, star), width).then(inner)",
        ACTION,
    ),
    "the last axis skipped": (
        "core/action.py",
        "for dim, chain in enumerate(chains):",
        "for dim, chain in enumerate(chains[:-1]):",
        ACTION,
    ),
    "a turn in the wrong direction": (
        "core/steps.py",
        "[a * re - b * im, a * im + b * re]",
        "[a * re + b * im, b * re - a * im]",
        GROUPS,
    ),
    "a barred axis scaled": (
        "core/action.py",
        "return Chain(n, (step(order),))",
        "return Chain(n, (step(member),))",
        ACTION,
    ),
    "experts that do not change places": (
        "core/action.py",
        "at = {entry.parent: place}",
        "source, at = name, {entry.parent: place}",
        ACTION,
    ),
    "second moments that follow signs": (
        "core/live.py",
        "ax.dual(m.axes) if key in _FIRST_MOMENTS else ax.bar(m.axes)",
        "ax.dual(m.axes)",
        ACTION,
    ),
    "optimizer state left behind": ("core/live.py", "target.copy_(value)", "pass", ACTION),
    "every head gets the first head's member": (
        "core/action.py",
        "np.array([at[space.over]])",
        "np.array([0])",
        ACTION,
    ),
    "parents on another axis not permuted": (
        "core/action.py",
        "x.select(dim, j), rest, at={**at, leaf.space: j}) for j in order]",
        "x.select(dim, j), rest, at={**at, leaf.space: j}) for j in range(x.shape[dim])]",
        ACTION,
    ),
    "float32 weights rounded twice": (
        "core/action.py",
        "w.double() if w.dtype.itemsize == 4 and w.dtype.is_floating_point else w",
        "w",
        ACTION,
    ),
    "modules moved before they are looked at": (
        "core/live.py",
        "misfits = check(g.spec, {name: every[name] for name in known})",
        "misfits = []",
        ACTION,
    ),
    "negated views moved by their bits": (
        "core/action.py",
        "w.resolve_neg().resolve_conj().view(bits)",
        "w.view(bits)",
        ACTION,
    ),
    "the part ignored": (
        "core/action.py",
        "if part is not None and g.spec.parts.get(entry.pattern) != part:",
        "if False:",
        ACTION,
    ),
    "composition in the wrong order": (
        "core/element.py",
        "members[name] = a.after(b)",
        "members[name] = b.after(a)",
        ACTION,
    ),
    "members that travel the wrong way": (
        "core/element.py",
        "a.take(_argsort(other._parent(name)))",
        "a.take(other._parent(name))",
        ACTION,
    ),
    "members that do not travel in the inverse": (
        "core/element.py",
        "(member if parent is None else member.take(parent)).inverse()",
        "member.inverse()",
        ACTION,
    ),
    "elements of other sizes let through": (
        "core/element.py",
        "elif self._is_foreign(name):",
        "elif False:",
        ACTION,
    ),
    "elements outside the group let through": (
        "core/element.py",
        "wrong = space.group.fault(member)",
        "wrong = None",
        ACTION,
    ),
    "an inverse scale at the wrong place": (
        "core/members.py",
        "1 / np.take_along_axis(self.scale, back, 1)",
        "1 / self.scale",
        GROUPS,
    ),
    "a missing dual": (
        "core/members.py",
        "return Monomial(self.index, None if self.scale is None else 1 / self.scale)",
        "return self",
        GROUPS,
    ),
    "a dual without its transpose": (
        "core/members.py",
        "self.inverse().values.swapaxes(1, 2)",
        "self.inverse().values",
        GROUPS,
    ),
    "a turn's dual not conjugated": (
        "core/members.py",
        "1 / self.factor.conj()",
        "1 / self.factor",
        GROUPS,
    ),
    "scales composed at the wrong place": (
        "core/members.py",
        "np.take_along_axis(other.scale, self.index, 1)",
        "other.scale",
        GROUPS,
    ),
    "QR without the sign fix": (
        "core/uniform.py",
        "q * np.where(np.diag(r) < 0, -1.0, 1.0)",
        "q",
        GROUPS,
    ),
    "ones not kept": (
        "core/uniform.py",
        "basis @ r @ basis.T + 1 / size",
        "basis @ r @ basis.T - 1 / size",
        GROUPS,
    ),
    "a signed fit without signs": (
        "core/fit.py",
        "np.where(picked < 0, -1.0, 1.0)",
        "np.ones_like(picked)",
        GROUPS,
    ),
    "a rotation that is fitted transposed": (
        "core/fit.py",
        "pair[0] @ pair[1].swapaxes(1, 2)",
        "pair[1] @ pair[0].swapaxes(1, 2)",
        GROUPS,
    ),
    "any scale let through": (
        "core/members.py",
        "np.maximum(factors.max(1), 1) / np.minimum(factors.min(1), 1)",
        "factors.max(1) / factors.min(1)",
        GROUPS,
    ),
    "fits that stretch without a limit": (
        "core/fit.py",
        "np.clip(factors, middle / half, middle * half)",
        "factors",
        GROUPS,
    ),
    "anything passes as orthogonal": (
        "core/groups.py",
        'else "is not orthogonal"',
        "else None",
        GROUPS,
    ),
    "biased words kept": (
        "core/rng.py",
        "if word < 2**64 - 2**64 % (i + 1):",
        "if True:",
        "core/test_rng.py",
    ),
    "Sattolo's cycles for Fisher-Yates": (
        "core/rng.py",
        "j = word % (i + 1)",
        "j = word % i",
        "core/test_rng.py",
    ),
    "labels that do not separate": (
        "core/rng.py",
        'b"regauge/1/" + label.encode()',
        'b"regauge/1/"',
        "core/test_rng.py",
    ),
    "normals with a wrong radius": (
        "core/rng.py",
        "np.sqrt(-2 * np.log(",
        "np.sqrt(-np.log(",
        "core/test_rng.py",
    ),
    "duals that stop at sums": (
        "core/axes.py",
        "return Sum(tuple(_flip(t) for t in term.terms))",
        "return term",
        "core/test_axes.py",
    ),
    "a star that does not reach the factors": (
        "core/axes.py",
        "yield from leaves(factor, star != term.star)",
        "yield from leaves(factor, star)",
        "core/test_axes.py",
    ),
    "ties to a stream that is not orthogonal": (
        "core/check.py",
        "if not spec.spaces[space_name].group.is_orthogonal:",
        "if False:",
        SPEC,
    ),
    "surplus names let through": (
        "core/check.py",
        "if name not in known and not spec.is_buffer(name):",
        "if False:",
        SPEC,
    ),
    "wrong sizes let through": (
        "core/check.py",
        "return sizes[term.space] == n",
        "return True",
        SPEC,
    ),
    "folded gains not held to their value": (
        "core/check.py",
        "if not bool((x == spec.fixed[name]).all())",
        "if False",
        SPEC,
    ),
    "a norm's bias multiplied by its gain": (
        "core/fold.py",
        "by=1 / gain.where(",
        "by=gain.where(",
        FOLD,
    ),
    "a gain that is stored as its distance from one taken the other way": (
        "core/fold.py",
        "+ (1.0 - norm.neutral)",
        "- (1.0 - norm.neutral)",
        FOLD,
    ),
    "float32 folded in float32": (
        "core/fold.py",
        "torch.float64 if x.dtype.itemsize >= 4 else torch.float32",
        "torch.float32",
        FOLD,
    ),
    "a norm's bias lost": ("core/fold.py", "return a + total.reshape(a.shape)", "return a", FOLD),
    "a norm's bias taken up by the first expert alone": (
        "core/fold.py",
        "str(entry.place))",
        '"0")',
        FOLD,
    ),
    "rotations allowed beside a gain that stays": (
        "core/fold.py",
        "if space.folded is not None and name not in barred",
        "if space.folded is not None",
        FOLD,
    ),
}


_FORKS = multiprocessing.get_context("forkserver")
# Imported once, in the server that the runs are forked from: everything heavy but regauge itself.
_FORKS.set_forkserver_preload(
    [
        "torch",
        "scipy.stats",
        "scipy.optimize",
        "hypothesis",
        "pytest",
        "safetensors.numpy",
        "support.preloaded",
    ]
)


def _child(package_root: str, tests: str, log: str) -> None:
    """One run of the tests against the package at this root, in a process of its own."""
    sys.path[:0] = [package_root, str(TESTS)]
    os.chdir(package_root)
    with Path(log).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        import regauge

        assert Path(regauge.__file__).is_relative_to(package_root), "the copy is what is tested"
        code = pytest.main(
            [
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                f"--rootdir={TESTS}",
                str(TESTS / tests),
            ]
        )
        sys.stdout.flush()
        os._exit(int(code))


def run_tests(package_root: Path, tests: str) -> tuple[int | None, str]:
    """The exit code of pytest, and what it printed."""
    log = package_root / "log"
    process = _FORKS.Process(target=_child, args=(str(package_root), tests, str(log)))
    process.start()
    process.join(300)
    process.kill()
    return process.exitcode, log.read_text()[-3000:]


def mutate(tmp_path: Path, file: str, old: str, new: str) -> Path:
    shutil.copytree(SOURCE, tmp_path / "regauge", ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path / "regauge" / file
    text = target.read_text()
    assert not old or text.count(old) == 1, (
        f"{file} must have {old!r} exactly once; it has it {text.count(old)} times"
    )
    target.write_text(text.replace(old, new))
    return tmp_path


# Each is a run of a test file: one in four is tried in every run of the suite, all of them in `make
# soak`.
SHARE = [
    pytest.param(name, marks=() if place % 4 == 0 else pytest.mark.slow)
    for place, name in enumerate(MUTANTS)
]


@pytest.mark.parametrize("name", SHARE)
def test_the_suite_kills(name: str, tmp_path: Path) -> None:
    file, old, new, tests = MUTANTS[name]
    code, printed = run_tests(mutate(tmp_path, file, old, new), tests)
    assert code == 1, f"this mutant lives:\n{printed}"


@pytest.mark.parametrize("tests", sorted({m[3] for m in MUTANTS.values()}))
def test_the_suite_spares_the_original(tests: str, tmp_path: Path) -> None:
    """The same run on an unchanged copy passes, so what kills the mutants is the fault and not the
    set-up.
    """
    code, printed = run_tests(mutate(tmp_path, "core/action.py", "", ""), tests)
    assert code == 0, printed

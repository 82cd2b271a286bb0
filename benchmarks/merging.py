"""`regauge merge` against mergekit 0.1.5: the same recipes and checkpoints, in one run.

mergekit has its own environment in a cache folder, created on first use. Three bf16 Llama-shaped
checkpoints of 2 GB (a base model and two models fine-tuned from it) are merged by both command
lines in turn, and their outputs are compared. Goals, after imports: at most 1/2 (linear), 1/3
(SLERP) and 1/4 (TIES) of its CPU-seconds, not more private memory, `--help` in half a CPU-second;
the same tensors to one bf16 unit (linear, task arithmetic), the same signs and masks to 99.99 %
(SLERP, TIES). Both also run the five recipes of examples/recipes on pico models.

Both compute in float32 and round once (`dtype: float32`, `out_dtype: bfloat16`): in bfloat16
mergekit rounds its task vectors at every step, which is reported separately. Both use one thread
for arithmetic (OMP_NUM_THREADS=1), which is mergekit's best case: waiting threads cost CPU-seconds.
Both write 500 MB shards: mergekit holds a shard in memory. mergekit has no dry run; its start-up
cost is that of `--help`, which imports and parses everything. Ours is that of a dry run on the pico
models: the basis test on the large ones counts as work.

Of values that are equal at the threshold, TIES in mergekit keeps those that torch's unstable sort
puts first, which depends on the processor. So masks are compared without those values; and on
smaller models with all values, with mergekit's sort made stable.

$REGAUGE_BENCH_LAYERS makes smaller models (2: 0.24 GB), $REGAUGE_ROUNDS sets the number of rounds
(3; TIES has one). All files are in a temporary folder ($REGAUGE_BENCH or the system's), at most
11 GB.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.environments import TORCH, environment
from benchmarks.move import Shape, make

MERGEKIT = "0.1.5"
ROUNDS = int(os.environ.get("REGAUGE_ROUNDS", "3"))
LAYERS = int(os.environ.get("REGAUGE_BENCH_LAYERS", "20"))
GOALS = {"linear": 1 / 2, "slerp": 1 / 3, "ties": 1 / 4}  # of mergekit's CPU-seconds
GOAL_HELP, GOAL_SAME = 0.5, 0.9999
RECIPES = Path(__file__).parent.parent / "examples" / "recipes"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
STEP = 1 << 22  # values per comparison

# mergekit with a stable order of equal values.
STABLE = """
import functools, sys, torch
torch.argsort = functools.partial(torch.argsort, stable=True)
from mergekit.scripts.run_yaml import main
main()
"""


def recipes(dtype: str) -> dict[str, dict[str, Any]]:
    """Return one recipe per method for the large models."""
    precision = {"dtype": dtype, "out_dtype": "bfloat16"}
    two = [
        {"model": "a", "parameters": {"weight": 0.7}},
        {"model": "b", "parameters": {"weight": 0.4}},
    ]
    trimmed = [
        {"model": m["model"], "parameters": {**m["parameters"], "density": 0.5}} for m in two
    ]
    return {
        "linear": {"merge_method": "linear", "models": two, **precision},
        "task_arithmetic": {
            "merge_method": "task_arithmetic",
            "base_model": "root",
            "models": two,
            **precision,
        },
        "slerp": {
            "merge_method": "slerp",
            "base_model": "a",
            "models": [{"model": "a"}, {"model": "b"}],
            "parameters": {"t": 0.4},
            **precision,
        },
        "ties": {
            "merge_method": "ties",
            "base_model": "root",
            "models": trimmed,
            "parameters": {"normalize": True},
            **precision,
        },
    }


def main() -> int:
    torch.set_num_threads(1)
    mergekit = environment(f"mergekit-{MERGEKIT}", [f"torch=={TORCH}", f"mergekit=={MERGEKIT}"])
    parent = os.environ.get("REGAUGE_BENCH")
    if parent:
        Path(parent).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="regauge-merging-", dir=parent) as folder:
        bench = Bench(Path(folder), mergekit)
        bench.help()
        bench.pico_recipes()
        bench.small()
        bench.large()
        return bench.verdict()


@dataclass
class Cost:
    """The cost of a command: CPU-seconds, wall seconds, and its peak private memory: dirty pages,
    and with clean private ones.
    """

    cpu: float
    wall: float
    dirty: float
    private: float


def measure(command: Sequence[str], where: Path) -> Cost:
    """Run a command and measure its cost. Memory is sampled from this process every 50 ms, so that
    the command's CPU time does not include it.
    """
    dirty = private = 0
    start = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, cwd=where, stdout=output, stderr=output, env={**os.environ, **ENVIRONMENT}
        )
        try:
            while True:
                pid, status, usage = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    break
                now = _memory(process.pid)
                dirty, private = max(dirty, now[0]), max(private, now[1])
                time.sleep(0.05)
        except BaseException:
            process.kill()
            process.wait()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(
                f"{' '.join(command)} failed:\n{output.read().decode(errors='replace')[-2000:]}"
            )
    return Cost(usage.ru_utime + usage.ru_stime, time.perf_counter() - start, dirty, private)


def _memory(pid: int) -> tuple[int, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # the process has just ended
        return 0, 0
    sizes = {
        line.split(":")[0]: 1024 * int(line.split()[1])
        for line in lines
        if line.startswith("Private_")
    }
    dirty = sizes.get("Private_Dirty", 0)
    return dirty, dirty + sizes.get("Private_Clean", 0)


@dataclass
class Agreement:
    """The agreement of two checkpoints, counted over all values."""

    values: int = 0
    exact: int = 0
    one_unit: int = 0
    most: int = 0
    signs: int = 0
    masked: int = 0
    untied: int = 0
    untied_masked: int = 0

    def share(self, what: str) -> float:
        of = self.untied if what == "untied_masked" else self.values
        return float(getattr(self, what)) / max(of, 1)


def compare(
    actual: Path,
    wanted: Path,
    base: Path | None = None,
    trimmed: Mapping[Path, float] | None = None,
) -> Agreement:
    """Compare values by their distance in units of the last place and by their signs; with a base,
    also by where they differ from it and with which sign. `trimmed` gives models and densities:
    values whose differences equal the threshold of the density are counted separately.
    """
    from regauge.checkpoints.reader import open_checkpoint

    x, y, root = (
        open_checkpoint(actual),
        open_checkpoint(wanted),
        None if base is None else open_checkpoint(base),
    )
    if set(x) != set(y):
        raise RuntimeError(
            f"{actual} and {wanted} have different tensors: {sorted(set(x) ^ set(y))[:5]}"
        )
    others = [(open_checkpoint(path), density) for path, density in (trimmed or {}).items()]
    out = Agreement()
    for name in x:
        if x.shapes[name] != y.shapes[name] or x.dtypes[name] != y.dtypes[name]:
            raise RuntimeError(
                f'"{name}" is {x.dtypes[name]} {x.shapes[name]} in {actual} and '
                f"{y.dtypes[name]} {y.shapes[name]} in {wanted}"
            )
        thresholds = (
            [_threshold(m[name], root[name], density) for m, density in others]
            if root is not None
            else []
        )
        flat = [
            t[name].reshape(-1)
            for t in (x, y, *([root] if root is not None else []), *(m for m, _ in others))
        ]
        for at in range(0, flat[0].numel(), STEP):
            a, b, *references = (t[at : at + STEP] for t in flat)
            units = (_in_order(a) - _in_order(b)).abs()
            out.values += a.numel()
            out.exact += int((units == 0).sum())
            out.one_unit += int((units <= 1).sum())
            out.most = max(out.most, int(units.max()))
            out.signs += int((a.sign() == b.sign()).sum())
            if references:
                r = references[0].float()
                same = (a.float() - r).sign() == (b.float() - r).sign()
                tied = torch.zeros_like(same)
                for t, threshold in zip(references[1:], thresholds, strict=True):
                    tied |= (t.float() - r).abs() == threshold
                out.masked += int(same.sum())
                out.untied += int((~tied).sum())
                out.untied_masked += int((same & ~tied).sum())
    return out


def _threshold(model: torch.Tensor, base: torch.Tensor, density: float) -> float:
    """Return the smallest magnitude of a difference that a density keeps, by numpy's selection,
    which is neither tool's code.
    """
    size = np.abs((model.float() - base.float()).numpy().reshape(-1))
    count = int(density * size.size)
    return (
        -1.0
        if density >= 1 or not count
        else float(np.partition(size, size.size - count)[size.size - count])
    )


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """Map half precision to integers in the order of the values: neighbours differ by one."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@dataclass
class Bench:
    """One run: its folder, mergekit's environment, start-up costs, and the checked goals."""

    folder: Path
    mergekit: Path
    start: dict[str, float] = field(default_factory=dict)
    checks: list[tuple[str, bool]] = field(default_factory=list)

    def check(self, what: str, met: bool) -> None:
        self.checks.append((what, met))
        print(f"  {'PASS' if met else 'MISS'}  {what}", flush=True)

    def verdict(self) -> int:
        missed = [what for what, met in self.checks if not met]
        print(
            f"goals: {len(self.checks) - len(missed)} of {len(self.checks)} met"
            + "".join(f"\n  missed: {what}" for what in missed)
        )
        return 1 if missed else 0

    def ours(self, recipe: Path, out: Path, *options: str) -> Cost:
        command = [
            sys.executable,
            "-m",
            "regauge.cli",
            "merge",
            str(recipe),
            "-o",
            str(out),
            "--shard-size",
            "500MB",
            *options,
        ]
        return measure(command, recipe.parent)

    def theirs(self, recipe: Path, out: Path, stable: bool = False) -> Cost:
        python = (
            [str(self.mergekit / "bin" / "python"), "-c", STABLE]
            if stable
            else [str(self.mergekit / "bin" / "mergekit-yaml")]
        )
        return measure(
            [
                *python,
                str(recipe),
                str(out),
                "--no-copy-tokenizer",
                "--no-write-model-card",
                "--out-shard-size",
                "500M",
            ],
            recipe.parent,
        )

    def help(self) -> None:
        """Measure the cost of `--help`, which is mergekit's start-up cost."""
        folder = self.folder / "help"
        folder.mkdir()
        subjects = {
            "regauge --help": [sys.executable, "-m", "regauge.cli", "--help"],
            "regauge merge --help": [sys.executable, "-m", "regauge.cli", "merge", "--help"],
            "mergekit-yaml --help": [str(self.mergekit / "bin" / "mergekit-yaml"), "--help"],
        }
        costs: dict[str, list[float]] = {name: [] for name in subjects}
        for turn in range(ROUNDS + 1):
            for name, command in subjects.items():
                cost = measure(command, folder).cpu
                if turn:  # the first only warms the cache
                    costs[name].append(cost)
        for name, seconds in costs.items():
            print(f"{name:22}  {_spread(seconds)} CPU-s")
        help_ = statistics.median(costs["regauge --help"])
        self.start["mergekit"] = statistics.median(costs["mergekit-yaml --help"])
        self.check(
            f"regauge --help: {help_:.2f} CPU-s (at most {GOAL_HELP}), mergekit's "
            f"{self.start['mergekit']:.2f}",
            help_ <= GOAL_HELP,
        )

    def pico_recipes(self) -> None:
        """Run the recipes of examples/recipes with both tools, as written (in float16), and
        computed in float32.
        """
        from regauge.merging.recipe_yaml import parse_recipe

        folder = self.folder / "picos"
        picos(folder / "models")
        print(
            "\nexamples/recipes on pico models    exact   one unit   most units   masks and "
            "signs (ties; mergekit's sort made stable)"
        )
        costs = []
        for path in sorted(RECIPES.glob("*.yml")):
            document = yaml.safe_load(path.read_text())
            for dtype in ("float16", "float32"):
                recipe = folder / path.name
                recipe.write_text(
                    yaml.safe_dump(
                        {**document, "dtype": dtype, "out_dtype": "float16"}, sort_keys=False
                    )
                )
                self.ours(recipe, folder / "ours")
                self.theirs(recipe, folder / "theirs", stable=document["merge_method"] == "ties")
                parsed = parse_recipe(recipe.read_text())
                is_ties = parsed.method == "ties"
                agreement = compare(
                    folder / "ours", folder / "theirs", folder / "models/root" if is_ties else None
                )
                agreed = f"{agreement.share('masked'):10.4%}" if is_ties else ""
                print(
                    f"{path.name:22} {dtype:8} {agreement.share('exact'):9.3%} "
                    f"{agreement.share('one_unit'):10.4%} {agreement.most:10}   {agreed}",
                    flush=True,
                )
                if dtype == "float32":
                    self.check(
                        f"{path.name}: every value within one unit",
                        agreement.one_unit == agreement.values,
                    )
                shutil.rmtree(folder / "ours")
                shutil.rmtree(folder / "theirs")
        for turn in range(ROUNDS + 1):
            cost = self.ours(folder / "linear.yml", folder / "ours", "--dry-run").cpu
            costs += [cost] if turn else []
        self.start["regauge"] = statistics.median(costs)
        print(
            f"start-up, before merging: regauge {_spread(costs)} CPU-s, mergekit "
            f"{self.start['mergekit']:.2f} CPU-s"
        )

    def large(self) -> None:
        """Merge the large models by every method, in several rounds, one tool after the other."""
        folder = self.folder / "large"
        finetune(folder, Shape(layers=LAYERS, vocab=32000 if LAYERS >= 20 else 8000))
        size = sum(p.stat().st_size for p in (folder / "a").iterdir())
        print(
            f"\n{size / 1e9:.2f} GB in {len(list((folder / 'a').glob('*.safetensors')))} shards, "
            f"{os.cpu_count()} cores, {ROUNDS} rounds",
            flush=True,
        )
        costs: dict[tuple[str, str], list[Cost]] = {}
        for turn in range(ROUNDS):
            for name, document in recipes("float32").items():
                if name == "ties" and turn:
                    # It takes many times as long as all others together, and clears its goal by
                    # far.
                    continue
                recipe = folder / f"{name}.yml"
                recipe.write_text(yaml.safe_dump(document, sort_keys=False))
                for tool, run in (("regauge", self.ours), ("mergekit", self.theirs)):
                    os.sync()
                    cost = run(recipe, folder / tool)
                    costs.setdefault((name, tool), []).append(cost)
                    print(
                        f"  round {turn + 1}, {name}, {tool}: {cost.cpu:.1f} CPU-s, "
                        f"{cost.wall:.1f} s",
                        file=sys.stderr,
                        flush=True,
                    )
                if turn == 0:
                    self.agree(folder, name)
                self.clean(folder)
        self.costs(costs)
        shutil.rmtree(folder)

    def clean(self, folder: Path) -> None:
        for tool in ("regauge", "mergekit"):
            shutil.rmtree(folder / tool, ignore_errors=True)

    def agree(self, folder: Path, name: str) -> None:
        """Compare the outputs of both tools for one method, computed in float32."""
        if name == "ties":
            trimmed = {folder / m: 0.5 for m in ("a", "b")}
            agreement = compare(folder / "regauge", folder / "mergekit", folder / "root", trimmed)
            print(
                f"ties: masks and signs agree in {agreement.share('masked'):.4%} of all values, "
                f"{agreement.share('exact'):.4%} are exactly equal; ",
                end="",
            )
            print(
                f"{1 - agreement.untied / agreement.values:.3%} are at a threshold, where the "
                "choice of mergekit depends on the processor"
            )
            without_ties = agreement.share("untied_masked")
            self.check(
                "ties, without values at a threshold: masks and signs agree in "
                f"{without_ties:.5%} (above 99.99 %)",
                without_ties > GOAL_SAME,
            )
            return
        agreement = compare(folder / "regauge", folder / "mergekit")
        if name == "slerp":
            self.check(
                f"slerp: signs agree in {agreement.share('signs'):.6%} (above 99.99 %)",
                agreement.share("signs") > GOAL_SAME,
            )
        else:
            self.check(
                f"{name}: within one bf16 unit {agreement.share('one_unit'):.7%} (all)",
                agreement.one_unit == agreement.values,
            )
        print(
            f"        exactly equal {agreement.share('exact'):.5%}, within one unit "
            f"{agreement.share('one_unit'):.6%}, at most {agreement.most} units"
        )

    def costs(self, costs: Mapping[tuple[str, str], Sequence[Cost]]) -> None:
        print(
            f"\n{'':26}  {'CPU-s':>22}  {'after imports':>13}  {'ratio':>5}  {'wall':>22}  "
            f"{'private, dirty':>14}  {'and mapped':>10}"
        )
        verdicts = []
        for name in dict.fromkeys(name for name, _ in costs):
            after, dirty = {}, {}
            for tool in ("mergekit", "regauge"):
                runs = costs[name, tool]
                after[tool] = statistics.median(c.cpu for c in runs) - self.start[tool]
                dirty[tool] = max(c.dirty for c in runs)
                ratio = after[tool] / after["mergekit"]
                mapped = max(c.private for c in runs)
                cpu, wall = _spread([c.cpu for c in runs]), _spread([c.wall for c in runs])
                memory = f"{dirty[tool] / 1e6:11.0f} MB  {mapped / 1e6:7.0f} MB"
                print(
                    f"{name:16} {tool:9}  {cpu:>22}  {after[tool]:13.1f}  {ratio:5.2f}  "
                    f"{wall:>22}  {memory}"
                )
            if name in GOALS:
                verdicts.append(
                    (
                        (
                            f"{name}: {after['regauge'] / after['mergekit']:.3f} of the "
                            "CPU-seconds "
                            f"(at most {GOALS[name]:.3f})"
                        ),
                        after["regauge"] <= GOALS[name] * after["mergekit"],
                    )
                )
            verdicts.append(
                (
                    (
                        f"{name}: {dirty['regauge'] / 1e6:.0f} MB of private memory against "
                        f"{dirty['mergekit'] / 1e6:.0f} MB"
                    ),
                    dirty["regauge"] <= dirty["mergekit"],
                )
            )
        for what, met in verdicts:
            self.check(what, met)

    def small(self) -> None:
        """Compare outputs on smaller models, without costs: mergekit with a stable sort, and both
        with `dtype: bfloat16`, where mergekit rounds its task vectors at every step.
        """
        folder = self.folder / "small"
        finetune(folder, Shape(layers=2, vocab=8000))
        print(
            "\n0.24 GB                          exact   one unit   most units   masks (ties) or "
            "signs"
        )
        cases = [("ties", "float32"), *((name, "bfloat16") for name in recipes("bfloat16"))]
        for name, dtype in cases:
            recipe = folder / f"{name}.yml"
            recipe.write_text(yaml.safe_dump(recipes(dtype)[name], sort_keys=False))
            self.ours(recipe, folder / "regauge")
            self.theirs(recipe, folder / "mergekit", stable=name == "ties")
            agreement = compare(
                folder / "regauge", folder / "mergekit", folder / "root" if name == "ties" else None
            )
            agreed = agreement.share("masked" if name == "ties" else "signs")
            print(
                f"{name:16} {dtype:8}  {agreement.share('exact'):12.3%} "
                f"{agreement.share('one_unit'):10.4%} {agreement.most:12} {agreed:12.5%}",
                flush=True,
            )
            if dtype == "float32":
                self.check(
                    "ties, all values, mergekit's sort made stable: masks and signs agree in "
                    f"{agreed:.5%} (above 99.99 %)",
                    agreed > GOAL_SAME,
                )
            self.clean(folder)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def picos(folder: Path) -> None:
    """Write a base model and three models near it, in float16, for examples/recipes."""
    from safetensors.torch import load_file, save_file

    from regauge.demo.move import LLAMA
    from regauge.demo.move import make_checkpoint as make_pico

    folder.mkdir(parents=True)
    make_pico(folder / "root", LLAMA, 0)
    state = load_file(folder / "root" / "model.safetensors")
    for seed, name in enumerate(("a", "b", "c", "root")):
        g, amount = torch.Generator().manual_seed(seed), 0.0 if name == "root" else 0.02
        (folder / name).mkdir(exist_ok=True)
        if name != "root":
            shutil.copyfile(folder / "root" / "config.json", folder / name / "config.json")
        new = {n: (t + amount * torch.randn(t.shape, generator=g)).half() for n, t in state.items()}
        save_file(new, folder / name / "model.safetensors", {"format": "pt"})


def finetune(folder: Path, shape: Shape) -> None:
    """Write a base model, and two models at a tenth of its norm from it in different directions, in
    bf16.
    """
    from regauge.checkpoints.plan import plan_checkpoint
    from regauge.checkpoints.reader import open_checkpoint
    from regauge.checkpoints.writer import write_plan

    folder.mkdir()
    make(folder / "root", 0, shape)
    root = open_checkpoint(folder / "root")

    def perturbed(seed: int, place: int, name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + place)
        x = root[name]
        return (
            x.float().add_(torch.empty(x.shape).normal_(0.0, 0.002, generator=generator)).bfloat16()
        )

    for seed, name in ((1, "a"), (2, "b")):
        thunks = {n: partial(perturbed, seed, place, n) for place, n in enumerate(root)}
        write_plan(folder / name, plan_checkpoint(folder / name, root, thunks), thunks)

"""Start-up time: CPU-seconds of `regauge --help` and `import regauge`, compared with Python alone.
Goal: --help in at most 0.5.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

RUNS, GOAL = 5, 0.5
SUBJECTS = {
    "python": "pass",
    "import regauge": "import regauge",
    "regauge --help": "from regauge.cli import main; main(['--help'])",
}


def main() -> int:
    seconds: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    for _ in range(RUNS):
        for name, code in SUBJECTS.items():
            before = os.times()
            subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
            after = os.times()
            seconds[name].append(
                after.children_user
                + after.children_system
                - before.children_user
                - before.children_system
            )
    for name, times in seconds.items():
        print(
            f"{name:16}  {statistics.median(times):5.2f} CPU-s  ({min(times):.2f} to "
            f"{max(times):.2f})"
        )
    met = statistics.median(seconds["regauge --help"]) <= GOAL
    print(f"goal: regauge --help in at most {GOAL} CPU-seconds: {'met' if met else 'NOT MET'}")
    return 0 if met else 1

"""The command line of the soak runs: `python -m soak [NAME ...] [--scale 1.0] [--json FILE]` runs
all scenarios or those named. Exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ["RUST_BACKTRACE"] = "0"
sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the builders of pico-models

from soak import data, federated, interruptions, pickles, servers, split, training_kills
from soak.files import files
from soak.folders import hostile_folders
from soak.harness import Outcome, table

# Each scenario takes a scale (1.0 is the full run, 0.01 a quick check) and yields outcomes.
Scenario = Callable[[float], Iterable[Outcome]]
SCENARIOS: dict[str, Scenario] = {
    "folders": hostile_folders,
    "files": files,
    "file-kills": interruptions.kills,
    "file-rewrites": interruptions.rewrites,
    "training-kills": training_kills.kills,
    "convert-bombs": pickles.convert_bombs,
    "pickle-mutants": pickles.pickle_mutants,
    "data-bombs": data.data_bombs,
    "data-mutants": data.data_mutants,
    "federated": federated.contributions,
    "server-checkpoints": servers.server_checkpoints,
    "server-kills": servers.server_kills,
    "split-memory": split.memory_bombs,
    "split-frames": split.frames,
    "split-connections": split.idle_connections,
    "split-watches": split.watch_streams,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenarios and print their table. Returns the exit code: 1 if one of them fails."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"scenarios to run: {', '.join(SCENARIOS)}")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="fraction of the full number of trials"
    )
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    args = parser.parse_args(arguments)
    unknown = sorted(set(args.names) - set(SCENARIOS))
    if unknown:
        parser.error(f"unknown scenario {unknown[0]!r}; choose from {', '.join(SCENARIOS)}")
    outcomes: list[Outcome] = []
    for name in args.names or SCENARIOS:
        for outcome in SCENARIOS[name](args.scale):
            outcomes.append(outcome)
            print(
                table([outcome]).splitlines()[-1],
                *(f"    {note}" for note in outcome.notes),
                sep="\n",
                flush=True,
            )
    print(f"\n{table(outcomes)}")
    if args.json is not None:
        args.json.write_text(json.dumps([o.to_dict() for o in outcomes], indent=1) + "\n")
    return 0 if outcomes and all(o.passed for o in outcomes) else 1


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # torch logs every model that it cannot trace
    sys.exit(main())

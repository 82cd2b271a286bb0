"""Hostile model folders: code, Auto classes and pickles in models, tokenizers, processors and timm
configs, with "y" on standard input.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from soak.harness import Counter, Outcome

SECONDS = 60  # timeout of a process, which spends most of its time importing torch and transformers
DIGITS = ["--data", "digits", "--mean", "0.3", "--std", "0.38"]
SERVER = ["--server", "127.0.0.1:9", "--patience", "1"]
ON_MODELS = {
    "verify": ["verify", "MODEL", "--steps", "0", "--no-general"],
    "inspect": ["inspect", "MODEL"],
    "split serve": ["split", "serve", "MODEL", "--listen", "127.0.0.1:0"],
    "split predict": ["split", "predict", "MODEL", *DIGITS, *SERVER],
    "jigsaw train": ["jigsaw", "train", "MODEL", *DIGITS, "-o", "OUT"],
    "audit gradients": ["audit", "gradients", "MODEL", *DIGITS],
    "barrier": ["barrier", "MODEL", "MODEL", *DIGITS],
    "federate": ["federate", "MODEL", *DIGITS, "--clients", "2", "--rounds", "1", "-o", "OUT"],
    "match": ["match", "MODEL", "MODEL", *DIGITS, "-o", "OUT"],
}
ON_TOKENIZERS = {
    "split predict": [
        "split",
        "predict",
        "TEXT",
        "--data",
        "BOOK",
        "--tokenizer",
        "MODEL",
        *SERVER,
    ],
    "barrier": ["barrier", "TEXT", "TEXT", "--data", "BOOK", "--tokenizer", "MODEL"],
    "match": ["match", "TEXT", "TEXT", "--data", "BOOK", "--tokenizer", "MODEL", "-o", "OUT"],
}


def hostile_folders(scale: float) -> Iterator[Outcome]:
    """Run commands as processes on every kind of hostile folder. A trial is `lost` if code of the
    folder ran (it writes a marker) or standard input was read.
    """
    import support.federations as federations
    import support.hostile_folders as hostile
    import support.picos as picos

    count = Counter("hostile model folders")
    with tempfile.TemporaryDirectory(prefix="regauge-soak-") as temporary:
        root = Path(temporary)
        federations.vit(num_labels=10).save_pretrained(root / "good")  # type: ignore[operator]
        picos.build("gpt2").float().save_pretrained(root / "TEXT")
        (root / "book.txt").write_text("a b c d " * 50)
        trials = [(kind, build, ON_MODELS) for kind, build in hostile.MODELS.items()]
        trials += [(kind, build, ON_TOKENIZERS) for kind, build in hostile.TOKENIZERS.items()]
        trials.append(
            (
                "unused_code",
                hostile.unused_code,
                {"verify": ON_MODELS["verify"], "inspect": ON_MODELS["inspect"]},
            )
        )
        runs = [
            (kind, build, command)
            for kind, build, commands in trials
            for command in commands.values()
        ]
        for kind, build, command in (
            runs[:: max(1, round(1 / max(scale, 1e-9)))] if scale < 1 else runs
        ):
            where = root / "trial"
            shutil.copytree(root / "good", where / "MODEL")
            build(where / "MODEL", where / "marker")
            places = {
                "MODEL": where / "MODEL",
                "OUT": where / "OUT",
                "TEXT": root / "TEXT",
                "BOOK": root / "book.txt",
            }
            _trial(count, kind, [str(places.get(a, a)) for a in command], where)
            shutil.rmtree(where)
    yield count.outcome()


def _trial(count: Counter, kind: str, command: list[str], where: Path) -> None:
    (where / "stdin").write_text("y\n" * 20)
    start = time.monotonic()
    with (where / "stdin").open() as answers:
        try:
            done = subprocess.run(
                [sys.executable, "-m", "regauge", *command],
                stdin=answers,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                check=False,
            )
        except subprocess.TimeoutExpired:
            count.add("hangs", f"{kind}: {' '.join(command)}")
            return
        read = os.lseek(answers.fileno(), 0, os.SEEK_CUR)
    note = (
        f"{kind}: {' '.join(command[:2])}: exit {done.returncode} after "
        f"{time.monotonic() - start:.1f} s, {done.stderr[-200:]!r}"
    )
    if (where / "marker").exists() or read or (where / "OUT").exists():
        count.add("lost", note)
    elif "Traceback" in done.stderr or done.returncode not in (0, 1):
        count.add("untyped", note)
    else:
        count.add(
            "accepted" if done.returncode == 0 else "rejected",
            None
            if (done.returncode == 0) == (kind == "unused_code") or "inspect" in command
            else note,
        )

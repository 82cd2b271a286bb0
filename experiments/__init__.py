"""The papers' tables and figures as functions of the library. Adding one is an import and a line.

    results = EXPERIMENTS["000/table2"](Lab("small", seeds=3))

A `Lab` holds the preset, its seeds, and the folders of assets and cache. Every number that an
experiment reports comes from a cached cell (`shared.cells`).
"""

from __future__ import annotations

from collections.abc import Callable

from experiments.federated import fedavg
from experiments.gradients.defence_tradeoff import front
from experiments.gradients.pretrained_models import real as real_updates
from experiments.locks.attacks import attacks
from experiments.paper_000.locked_finetune import figure5 as convergence
from experiments.paper_000.locked_finetune import figure6 as writing
from experiments.paper_000.locked_finetune import table7
from experiments.paper_000.permutation import table2, table3, table4, table5
from experiments.paper_000.reconstruction import figure7, table6
from experiments.paper_002 import accuracy, positions, robustness
from experiments.paper_002.gradient_leakage import table5 as gradients_leaked
from experiments.paper_002.text_jigsaw import texts
from experiments.paper_003.barriers import barriers
from experiments.paper_003.cost import table3 as times
from experiments.paper_003.fusion_figures import figure3, figure4, figure5
from experiments.paper_003.layers import figure6
from experiments.paper_003.merges import table2 as six_merges
from experiments.paper_003.pair_models import trained_pairs
from experiments.shared.runner import Lab
from experiments.split.defence_recipes import recipes as utility_and_leakage
from experiments.split.equality import equality
from experiments.split.leakage import leaks as seen_by_a_server
from regauge.results.findings import Results

EXPERIMENTS: dict[str, Callable[[Lab], Results]] = {
    "000/table2": table2,
    "000/table3": table3,
    "000/table4": table4,
    "000/table5": table5,
    "000/table6": table6,
    "000/table7": table7,
    "000/figure5": convergence,
    "000/figure6": writing,
    "000/figure7": figure7,
    "002/table1": accuracy.table1,
    "002/table2": accuracy.table2,
    "002/table3": accuracy.table3,
    "002/table4": robustness.table4,
    "002/table5": gradients_leaked,
    "002/table7": positions.table7,
    "002/table8": positions.table8,
    "002/table9": robustness.table9,
    "002/figure1": positions.figure1,
    "002/figure2": accuracy.figure2,
    "002/figure3": positions.figure3,
    "002/figure4": positions.figure4,
    "002/figure6": accuracy.figure6,
    "002/beyond": accuracy.beyond,
    "002/epochs": accuracy.epochs,
    "002/texts": texts,
    "003/pairs": trained_pairs,
    "003/figure3": figure3,
    "003/figure4": figure4,
    "003/figure5": figure5,
    "003/figure6": figure6,
    "003/table2": six_merges,
    "003/table3": times,
    "003/barriers": barriers,
    "federated/training": fedavg.training,
    "federated/fusion": fedavg.fusion,
    "gradients/front": front,
    "gradients/real": real_updates,
    "lock/attacks": attacks,
    "split/equality": equality,
    "split/leaks": seen_by_a_server,
    "split/recipes": utility_and_leakage,
}

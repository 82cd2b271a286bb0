"""The papers' tables and figures as functions of the library. Adding one is an import and a line.

    results = EXPERIMENTS["000/table2"](Lab("small", seeds=3))

A `Lab` holds the preset and its seeds, and where to find and keep things. Every number that an
experiment reports comes from cells (`cells`): what was computed once is not computed again.
"""

from __future__ import annotations

from collections.abc import Callable

from experiments import corrupted, federating, jigsaws, positions
from experiments.clocking import table3 as times
from experiments.front import front
from experiments.fusion import figure3, figure4, figure5
from experiments.lab import Lab
from experiments.layers import figure6
from experiments.leaks import leaks as seen_by_a_server
from experiments.locks import figure5 as convergence
from experiments.locks import figure6 as writing
from experiments.locks import table7
from experiments.merges import table2 as six_merges
from experiments.pairs import trained_pairs
from experiments.real import real as real_updates
from experiments.recipes import recipes as utility_and_leakage
from experiments.reconstructing import figure7, table6
from experiments.redteam import attacks
from experiments.splits import equality
from experiments.tables import table2, table3, table4, table5
from experiments.texts import texts
from experiments.theus import barriers
from experiments.updates import table5 as gradients_leaked
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
    "002/table1": jigsaws.table1,
    "002/table2": jigsaws.table2,
    "002/table3": jigsaws.table3,
    "002/table4": corrupted.table4,
    "002/table5": gradients_leaked,
    "002/table7": positions.table7,
    "002/table8": positions.table8,
    "002/table9": corrupted.table9,
    "002/figure1": positions.figure1,
    "002/figure2": jigsaws.figure2,
    "002/figure3": positions.figure3,
    "002/figure4": positions.figure4,
    "002/figure6": jigsaws.figure6,
    "002/beyond": jigsaws.beyond,
    "002/epochs": jigsaws.epochs,
    "002/texts": texts,
    "003/pairs": trained_pairs,
    "003/figure3": figure3,
    "003/figure4": figure4,
    "003/figure5": figure5,
    "003/figure6": figure6,
    "003/table2": six_merges,
    "003/table3": times,
    "003/barriers": barriers,
    "federated/training": federating.training,
    "federated/fusion": federating.fusion,
    "gradients/front": front,
    "gradients/real": real_updates,
    "lock/attacks": attacks,
    "split/equality": equality,
    "split/leaks": seen_by_a_server,
    "split/recipes": utility_and_leakage,
}

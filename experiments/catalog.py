"""The pages of docs/experiments and what the overview states about each table and figure.

Claims are literals; every number is read from docs/results by a reference `{row|column:format}`,
where a row is named by its leading cells, joined by slashes. `{row|column|table:format}` reads
another table of the same results, `{*|column:format}` the mean over rows without an empty cell;
`{#id:format}` is the value of a finding, `{#id|1:format}` its floor
and `{#id|2:format}` its ceiling. Names are those of a fresh run (`former_words`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One table or figure.

    Attributes:
        claim: The claim that is checked, or the question.
        paper: The paper's result, with references; empty if the paper has none.
        ours: Our result, with references.
        about: What to know when reading the tables.
        verdict: The verdict in one sentence where counting checks would not answer the claim, with
            references.
        pretrained: The result of preset pretrained, with references to its tables.
    """

    claim: str
    paper: str
    ours: str
    about: str = ""
    verdict: str = ""
    pretrained: str = ""


@dataclass(frozen=True)
class Page:
    """One page: its heading, an introduction, and entries by the name of their results."""

    title: str
    intro: str
    entries: dict[str, Entry]


EQUIVARIANCE = (
    "Xu et al., *Permutation Equivariance of Transformers and Its Applications* "
    "([arXiv:2304.07735](https://arxiv.org/abs/2304.07735))"
)
JIGSAW = (
    "Liu et al., *Breaking the Chain of Gradient Leakage in Vision Transformers* "
    "([arXiv:2205.12551](https://arxiv.org/abs/2205.12551))"
)
ROTATION = (
    "Zhang et al., *Beyond the Permutation Symmetry of Transformers: The Role of Rotation for "
    "Model Fusion* ([arXiv:2502.00264](https://arxiv.org/abs/2502.00264))"
)

PAGES: dict[str, Page] = {
    "permutation-equivariance": Page(
        "Permutation equivariance: inference and training",
        f"The theorems of {EQUIVARIANCE} on trained models: permuting the rows (tokens) or the "
        f"columns (channels) of a model's stream, and its weights accordingly, changes no "
        f"result.",
        {
            "000-table2": Entry(
                "A trained ViT gives the same results with permuted tokens (rows) or channels "
                "(columns).",
                "accuracy {plain|2:.2f} % → {rows permuted|2:.2f} %",
                "accuracy {plain|1:.2f} % → {rows permuted|1:.2f} % (rows), {columns "
                "permuted|1:.2f} % (columns)",
                "The dense model segments scenes composed of MNIST digits with one linear "
                "layer: accuracy over all pixels (aAcc), mean intersection over union (mIoU) "
                "and mean accuracy over classes (mAcc). In findings, *scene* is the dense "
                "model, and *no key* the permuted model on plain inputs.",
            ),
            "000-table3": Entry(
                "Training with permuted rows or columns gives the same model as plain training.",
                "ViT: accuracy {plain|2:.2f} % → {rows permuted|2:.2f} %",
                "ViT: accuracy {plain|1:.2f} % → {rows permuted|1:.2f} %; relative difference "
                "of the weights {#image/rows/weights:.1e}",
                "Findings named *outputs* and *weights* are relative differences; their control "
                "is a training with another seed.",
            ),
            "000-table4": Entry(
                "Trained language models give the same results with permuted columns.",
                "BERT: accuracy {plain|2:.2f} % → {columns permuted|2:.2f} %",
                "BERT: accuracy {plain|1:.2f} % → {columns permuted|1:.2f} %; permuted weights "
                "with plain inputs: {permuted weights, plain input|1:.2f} %",
                "SST-2 replaces IMDB. GPT-2 (G) are two text generators, trained on another "
                "part of Tiny Shakespeare; WikiText-2 is zero-shot for them. Without the key, a "
                "small model predicts at chance level: here the perplexity of a random guess is "
                "1,024. The paper's perplexity of 1e7 belongs to a vocabulary of 50,257 and a "
                "more confident model.",
                pretrained=(
                    "SmolLM2-135M-Instruct on 1,024 tokens of WikiText-2, one key: "
                    "perplexity {plain|1:.2f} → {columns "
                    "permuted|1:.2f} (columns), {rows permuted|1:.2f} (rows); permuted weights "
                    "with plain inputs: {permuted weights, plain input|1:,.0f}, with a wrong key: "
                    "{permuted weights, wrong key|1:,.0f} (paper: {plain|2:.2f} and 1e7)"
                ),
            ),
            "000-table5": Entry(
                "Training language models with permuted columns gives the same model as plain "
                "training.",
                "BERT: accuracy {plain|2:.2f} % → {columns permuted|2:.2f} %",
                "BERT: accuracy {plain|1:.2f} % → {columns permuted|1:.2f} %",
                "",
            ),
        },
    ),
    "locked-fine-tuning": Page(
        "Permutation equivariance: fine-tuning locked models",
        f"Locked models with and without their key, after {EQUIVARIANCE}.",
        {
            "000-table7": Entry(
                "Fine-tuning with the key equals plain fine-tuning; without it, accuracy is lower.",
                "ViT: accuracy {plain|3:.2f} %; with the key {locked, with the key|3:.2f} %, "
                "without {locked, without the key|3:.2f} %",
                "ViT: accuracy {plain|1:.2f} %; with the key {locked, with the key|1:.2f} %, "
                "without {locked, without the key|1:.2f} %, from scratch {from scratch|1:.2f} %",
                "Pre-trained models are locked, get a new head and are fine-tuned: the ViT of "
                "Table 2 (MNIST) on scikit-learn's digits, BERT and GPT-2 of Table 4 on 2,000 "
                "further sentences of SST-2. Without the key a thief still reaches 78 to 86 % "
                "in the paper: a lock removes the head start of pre-training and prevents "
                "nothing. Training lengths were reduced after seeing the test results of one "
                "seed, and the gaps depend on them: Figure 5 shows the same ViT after longer "
                "training, with a smaller gap.",
            ),
            "000-figure5": Entry(
                "Longer fine-tuning narrows the gap between thief and owner.",
                "",
                "accuracy: owner {plain|1:.2f} %, thief {locked, without the key|1:.2f} %, from "
                "scratch {from scratch|1:.2f} %",
                "The ViT of Table 7, trained longer on randomly shifted images, to the end of a "
                "cosine schedule.",
            ),
            "000-figure6": Entry(
                "A locked GPT-2 generates and fine-tunes correctly only with its key.",
                "",
                "perplexity: plain {plain|1:.2f}, with the key {locked, with the key|1:.2f}, "
                "without {locked, without the key|1:.2f}",
                "Two GPT-2s, one trial each, generate text and are fine-tuned on WikiText-2. "
                "The HTML report shows the loss curves of the paper's figure.",
            ),
        },
    ),
    "split-reconstruction": Page(
        "Permutation equivariance: what a split-learning server reconstructs",
        f"Reconstruction of images from the features that a client sends, after {EQUIVARIANCE}: "
        f"by the paper's decoder, and by stronger attacks. An SSIM of 1 is the image itself.",
        {
            "000-table6": Entry(
                "Shuffled rows protect images from the server.",
                "faces, pixel noise 0.5: SSIM {pixel-noise=0.5|4:.3f} → "
                "{pixel-noise=0.5+rows|4:.3f} with shuffled rows",
                "SSIM of the paper's decoder {pixel-noise=0.5|3:.3f} → "
                "{pixel-noise=0.5+rows|3:.3f}; of the best attack {pixel-noise=0.5|10:.3f} → "
                "{pixel-noise=0.5+rows|10:.3f}",
                "Faces (smiling or not, 32 x 32) and CIFAR-10, trained by split learning with "
                "each defence, which is applied in training, in tests and under attack. "
                "Training is in float64, so that shuffled rows (*rows*) cost no accuracy. The "
                "paper's code attacks features without positions (column *SSIM, no positions*; "
                "one seed); a client sends features with positions, and the paper's own decoder "
                "then learns to sort the tokens. Three seeds (`--seeds 3`); with one seed, "
                "CIFAR-10 has only three attacks.",
                verdict=(
                    "inconclusive: the spread of the paper's decoder over seeds is not stored; the "
                    "best attack recovers the images with shuffled rows too"
                ),
            ),
            "000-figure7": Entry(
                "Shuffled rows reduce leakage at every point of the accuracy-privacy curve.",
                "",
                "mean SSIM by the paper's decoder {#claim/faces/curve/decoder|2:.3f} → "
                "{#claim/faces/curve/decoder:.3f}, by the best attack "
                "{#claim/faces/curve/best|2:.3f} → {#claim/faces/curve/best:.3f}",
                "The same faces, for several radii of the filter and noise levels on the "
                "stream, with and without shuffled rows.",
                verdict=(
                    "inconclusive: one seed; the best attack loses less than the paper's decoder"
                ),
            ),
        },
    ),
    "masked-jigsaw": Page(
        "Masked jigsaw: accuracy and consistency",
        f"Training with masked jigsaw puzzles (MJP) after {JIGSAW}: a share of the patches (the "
        f"ratio) is shuffled. *Consistency* is the share of predictions that puzzles at "
        f"inference leave unchanged, *difference norm* the norm of the change of the features. "
        f"Models are small and trainings short: compare the direction of the differences with "
        f"the paper's, not the numbers. [How to train with puzzles](../guides/jigsaw.md).",
        {
            "002-table1": Entry(
                "MJP raises consistency under shuffled patches without costing accuracy.",
                "ViT: consistency {ViT|10:.1f} % → {ViT + MJP|10:.1f} %, accuracy {ViT|8:.1f} % "
                "→ {ViT + MJP|8:.1f} %",
                "ViT: consistency {ViT|5:.1f} % → {ViT + MJP|5:.1f} %, accuracy {ViT|1:.1f} % → "
                "{ViT + MJP|1:.1f} %; after 300 epochs {ViT, 300 epochs on 1,000 images|5:.1f} "
                "% → {ViT, 300 epochs on 1,000 images + MJP|5:.1f} % and {ViT, 300 epochs on "
                "1,000 images|1:.1f} % → {ViT, 300 epochs on 1,000 images + MJP|1:.1f} %",
                "Backbones trained on CIFAR-10. The ViT's position embeddings are initialized "
                "with the norm of its patch embeddings, so that short trainings depend on "
                "positions. This choice, the size of the ViT and the training ratio were made "
                "on a further seed and on training images. The longer trainings were added "
                "after the short one had missed the goal of this table.",
            ),
            "002-table2": Entry(
                "Each part of the method contributes.",
                "consistency: plain {A: plain|9:.1f} %, puzzles alone {E: JP|9:.1f} %",
                "consistency: plain {A: plain|5:.1f} %, puzzles alone {E: JP|5:.1f} %",
                "The paper's variants: SPP shuffles all patches and their pixels; JP shuffles a "
                "share of the patches; IDX adds a second position table, which is not shuffled; "
                "UNK gives shuffled patches one unknown position embedding; DAL (dense absolute "
                "localization) adds a regression of positions, by PCA, a linear (LN) or a "
                "nonlinear (NLN) map.",
            ),
            "002-table3": Entry(
                "More puzzles in training give more consistency.",
                "ratio 0 → 0.9: consistency {0.0|9:.1f} % → {0.9|9:.1f} %",
                "ratio 0 → 0.9: consistency {0.0|5:.1f} % → {0.9|5:.1f} %, accuracy {0.0|1:.1f} "
                "% → {0.9|1:.1f} %",
                "The training ratio is the share of patches that are shuffled in training.",
                verdict="in part: consistency rises and accuracy falls, both beyond the spread",
            ),
            "002-table4": Entry(
                "MJP is more robust to corrupted and unusual images.",
                "mean error under corruptions {ViT, plain|6:.1f} % → {ViT, MJP|6:.1f} %",
                "mean error under corruptions {ViT, plain|2:.1f} % → {ViT, MJP|2:.1f} %",
                "Corruptions of ImageNet-C at 32 pixels. The paper calls its measure mCE, but "
                "prints a plain mean of the errors: its column of plain models averages to the "
                "44.0 that it prints. Its column of MJP averages to 43.24 over the ten corruptions "
                "of its Table 9, where it prints 41.5. The summary therefore compares plain means; "
                "*mCE* in the table of all numbers is relative to the ResNet of Table 1. Test "
                "images that the ResNet gets wrong replace ImageNet-A (*hard images*); AURRA is "
                "the area under the curve of accuracy by response rate on them. MNIST replaces "
                "ImageNet-O; AUPR is the precision-recall area of its detection.",
                verdict="not reproduced: the error rises and all other measures fall",
            ),
            "002-table9": Entry(
                "MJP lowers the error under most corruptions of Table 4.",
                "mean over the ten corruptions that it prints {*|5:.2f} % → {*|6:.2f} %",
                "mean over the same ten {*|1:.1f} % → {*|2:.1f} %; lower under "
                "{#robust/corruptions:.0%} of all 15",
                "",
                verdict="not reproduced: the error rises under every corruption; one mean for "
                "each, without a spread",
            ),
        },
    ),
    "masked-jigsaw-beyond": Page(
        "Masked jigsaw: longer trainings, other puzzles, text",
        f"Beyond the tables of {JIGSAW}. [Terms](masked-jigsaw.md).",
        {
            "002-epochs": Entry(
                "Puzzles cost accuracy in short trainings only.",
                "",
                "accuracy, plain → MJP: half the schedule {0.5 of the schedule, plain|1:.1f} % "
                "→ {0.5 of the schedule, MJP|1:.1f} %, a fifth {0.2 of the schedule, "
                "plain|1:.1f} % → {0.2 of the schedule, MJP|1:.1f} %",
                "Images, model and learning-rate schedule are the same; only the number of "
                "steps differs.",
                verdict=(
                    "in part: the cost exceeds the seeds' spread at a fifth of the schedule only, "
                    "and is a gain at half of it"
                ),
            ),
            "002-beyond": Entry(
                "Other puzzles give more consistency than the paper's setting.",
                "",
                "consistency: paper's setting {paper: ratio 0.1 per batch|5:.1f} %, ratio 0.5 "
                "per batch {ratio 0.5 per batch|5:.1f} %",
                "Larger and rising ratios, one puzzle per image instead of one per batch, and "
                "puzzles that stop before the end of training, compared with the paper's "
                "setting. The best setting was selected on the test data on which it is shown, "
                "so that its gain has no verdict until it is measured on fresh seeds and images.",
                verdict="inconclusive: selected on the test data",
            ),
            "002-texts": Entry(
                "Shuffled spans raise the consistency of text models, as shuffled patches do "
                "for images.",
                "",
                "BERT, SST-2: consistency {BERT|5:.1f} % → {BERT + spans|5:.1f} %",
                "The paper has no text models.",
                verdict="a small gain, and only for the wrapped model",
            ),
        },
    ),
    "masked-jigsaw-positions": Page(
        "Masked jigsaw: position embeddings and attention",
        f"The effect of training with puzzles on position embeddings, after {JIGSAW}. "
        f"[Terms](masked-jigsaw.md).",
        {
            "002-table7": Entry(
                "With MJP, position embeddings vary in more directions.",
                "variance in 3 principal components: {paper: DeiT-S, plain|1:.1f} % → {paper: "
                "DeiT-S, MJP|1:.1f} %",
                "variance in 3 principal components: {ViT, plain|1:.1f} % → {ViT, MJP|1:.1f} %",
                "Variance of the position embeddings that the first principal components explain.",
                verdict="no clear difference",
            ),
            "002-table8": Entry(
                "Positions can be predicted from their embeddings.",
                "2-D error: plain {ViT, plain|6:.3f}, MJP {ViT, MJP, linear DAL|6:.3f}",
                "2-D error in patches: plain {ViT, plain|3:.3f}, MJP {ViT, MJP, linear DAL|3:.3f}",
                "Mean absolute error (MAE) of a linear regression from position embeddings to "
                "the index of the patch (1-D) or its row and column (2-D).",
                verdict="holds",
            ),
            "002-figure1": Entry(
                "The more puzzles in training, the more directions position embeddings vary in.",
                "",
                "variance in 3 principal components: plain {plain|1:.1f} %, ratio 0.9 {MJP, "
                "ratio 0.9|1:.1f} %",
                "The HTML report has the projections: each point is a patch, lines join "
                "neighbours in a row.",
                verdict="the variance falls with the ratio; its spread is not stored",
            ),
            "002-figure2": Entry(
                "With MJP, puzzles at inference cost less accuracy.",
                "",
                "ViT, inference ratio 0 → 0.9: accuracy plain {(a) ViT, plain|1:.1f} % → {(a) "
                "ViT, plain|6:.1f} %, MJP {(a) ViT, MJP, training ratio 0.3|1:.1f} % → {(a) "
                "ViT, MJP, training ratio 0.3|6:.1f} %",
                "",
                verdict="no clear difference at ratio 0.9, and a lower accuracy without puzzles",
            ),
            "002-figure3": Entry(
                "Eigenvalues of position embeddings decay more slowly with MJP.",
                "",
                "components for 90 % of the variance: plain {plain|1:.1f}, MJP {MJP|1:.1f}",
                "",
                verdict="no difference",
            ),
            "002-figure4": Entry(
                "Attention of the CLS token is spread more evenly with MJP.",
                "",
                "entropy: plain {plain|1:.3f}, MJP {MJP|1:.3f}",
                "Attention of the CLS token in the last layer; the HTML report has the maps. "
                "The entropy does not rise with MJP; the heads do differ more.",
                verdict="in part: the heads differ more, the entropy does not rise",
            ),
            "002-figure6": Entry(
                "Training with MJP converges as fast as plain training.",
                "",
                "accuracy at step 600: plain {600|1:.1f} %, MJP {600|2:.1f} %",
                "",
                verdict="no clear difference over the whole training",
            ),
        },
    ),
    "rotation-symmetry": Page(
        "Rotation symmetry: models, barriers and cost",
        f"Matching independently trained models, after {ROTATION} and Theus et al. "
        f"([arXiv:2506.22712](https://arxiv.org/abs/2506.22712)). The *endpoints* of a path are "
        f"the two models A and B that are interpolated, after A is matched to B. Losses are in "
        f"nats per token or example.",
        {
            "003-pairs": Entry(
                "The models at the ends of the paths are clearly better than a bigram or a guess.",
                "",
                "GPT-2: {#goal/endpoints/gpt2:.2f} nats, bigram {#goal/endpoints/gpt2|1:.2f}; "
                "MiniLM: accuracy {#goal/endpoints/minilm:.1%}",
                "The endpoints of all experiments on these pages, trained with budgets that fit "
                "two cores. `python -m experiments 003/pairs` trains them in hours; the other "
                "`003/...` only read them. A finding is the worst endpoint of its kind; its "
                "goal is 0.15 nats below the bigram, or an accuracy 25 points above a guess.",
            ),
            "003-barriers": Entry(
                "Matching removes the barrier between models trained from different seeds.",
                "GPT-2 (Theus et al.): {GPT-2/vanilla: unmatched|10:.2f} nats → "
                "{GPT-2/by weights: regauge, by weights|10:.2f} without data, "
                "{GPT-2/refined: regauge match --refine, 300 steps, without data|10:.2f} refined",
                "GPT-2: {GPT-2/vanilla: unmatched|3:.3f} nats → "
                "{GPT-2/default: regauge match, by default|3:.3f} by default, "
                "{#goal/gpt2/refined:.3f} refined; Llama: {Llama/vanilla: unmatched|3:.2f} → "
                "{Llama/default: regauge match, by default|3:.2f}, {#goal/llama/refined:.3f}; ViT: "
                "{ViT/vanilla: unmatched|3:.2f} → "
                "{ViT/default: regauge match, by default|3:.2f}, {#goal/vit/refined:.3f}",
                "Without data of the user. Norms are folded and heads untied; nothing else "
                "changes. Five models of each family were trained from seeds 0 to 4 for this page "
                "alone; options were chosen on other seeds. The published numbers belong to other "
                "models: compare the share of the vanilla barrier (the barrier without matching) "
                "that is left. Findings: *endpoints* is the highest loss of an endpoint, "
                "*function* the largest change of an endpoint's loss by matching and folding; "
                "*goal* findings are barriers: shares of vanilla by default, nats refined.",
            ),
            "003-table3": Entry(
                "Matching is cheap compared with the merges that need data.",
                "",
                "BERT: matching {BERT/regauge, by weights|2:.2f} CPU s, Fisher {BERT/merge: "
                "Fisher|2:.2f} CPU s, RegMean {BERT/merge: RegMean|2:.2f} CPU s",
                "CPU seconds on the machine that made this page; compare ratios. *Plain numpy* "
                "is a head-by-head transcription of the paper's formulas and reaches the same "
                "distance. The times of Fisher, RegMean and OT-ACTS include loading and "
                "tokenizing their data (for BERT an estimated 4.6 of RegMean's 6.5 CPU "
                "seconds), which makes matching look cheaper. Findings: *seconds* is the ratio "
                "of regauge's version of the paper's matcher to plain numpy, *share* the ratio "
                "of its seconds to those of a merge, *distance* the relative difference of the "
                "two distances.",
            ),
        },
    ),
    "rotation-symmetry-merges": Page(
        "Rotation symmetry: six merges with and without matching",
        f"Table 2 of {ROTATION}. [Terms](rotation-symmetry.md).",
        {
            "003-table2": Entry(
                "Matching helps every merge of two independently trained models.",
                "",
                "ViT, average: accuracy {ViT/Simple/unmatched|3:.1f} % → {ViT/Simple/regauge, "
                "by weights|3:.1f} %; BERT, Fisher: {BERT/Fisher/unmatched|3:.1f} % → "
                "{BERT/Fisher/regauge, by weights|3:.1f} %",
                "The merges of the paper: *Simple* averages, *Fisher* weighs by the Fisher "
                "information, *RegMean* fits the outputs of linear layers by least squares; the "
                "OT merges transport neurons, by weights (WTS) or by activations (ACTS), softly "
                "or exactly (EMD). *regauge, by weights* matches all spaces with norms folded, "
                "the refined variant adds gradient steps on unlabelled inputs. CPU seconds of "
                "methods with data include loading the data. A finding is the gain of accuracy; "
                "at most 0.005 may be lost.",
                verdict="inconclusive: one pair of each kind",
            ),
        },
    ),
    "rotation-symmetry-parts": Page(
        "Rotation symmetry: which parts of matching help",
        f"The parts of the matching of {ROTATION}, alone and together. "
        f"[Terms](rotation-symmetry.md).",
        {
            "003-figure3": Entry(
                "Each part of the matching helps the average.",
                "ViT, average: accuracy {ViT/Simple/paper's matcher (rotations, rescaling, "
                "FFN)|4:.2f} % with the paper's matcher",
                "ViT, average: accuracy {ViT/Simple/unmatched|3:.1f} % → {ViT/Simple/paper's "
                "matcher (rotations, rescaling, FFN)|3:.1f} % (paper's matcher), "
                "{ViT/Simple/regauge, by weights|3:.1f} % (regauge)",
                "Two models are matched in part or in whole, and merged. The paper leaves out "
                "attention, FFN or rescaling. Beyond the paper, the order of heads and the "
                "residual stream are matched too; *regauge, by weights* matches all spaces with "
                "norms folded. [Table 2](rotation-symmetry-merges.md) explains the merges. A "
                "finding *distance/x* is the distance after the paper's matcher, as a share of "
                "unmatched; its control is the distance after matcher x.",
                verdict=(
                    "one pair of each kind: rescaling adds nothing, the stream and folded norms "
                    "add most"
                ),
            ),
        },
    ),
    "rotation-symmetry-distance": Page(
        "Rotation symmetry: distance and barriers by matcher",
        f"Distances and loss barriers of {ROTATION}, for several matchers. "
        f"[Terms](rotation-symmetry.md).",
        {
            "003-figure4": Entry(
                "Rotations bring two models closer than permutations.",
                "ViT: to {ViT/paper's matcher (rotations, rescaling, FFN)|5:.1%} of the "
                "unmatched distance",
                "ViT: to {ViT/paper's matcher (rotations, rescaling, FFN)|3:.1%} of the "
                "unmatched distance by the paper's matcher, {ViT/regauge, by weights|3:.1%} by "
                "regauge",
                "Git Re-Basin assigns neurons by weights. OT-Fusion transports them: exactly, "
                "by a permutation, or softly (Sinkhorn), which is not a symmetry, so that its "
                "distance is not that of an equivalent model. A small distance does not imply a "
                "good merge: see Figure 5. A finding *x/y* is the distance after matcher x; its "
                "control is the distance after y.",
            ),
            "003-figure5": Entry(
                "Matching lowers the loss on the line between two models.",
                "",
                "ViT: barrier {ViT/unmatched|2:.3f} nats → {ViT/paper's matcher (rotations, "
                "rescaling, FFN)|2:.3f} (paper's matcher), {ViT/regauge, by weights|2:.3f} "
                "(regauge)",
                "The loss on the straight line between two models; the HTML report also has the "
                "plane through A, B and the matched A. The findings check that matching leaves "
                "the loss of the endpoints unchanged.",
                verdict=(
                    "one or two pairs of each kind: the barrier falls, except between two "
                    "fine-tunes of one base"
                ),
            ),
        },
    ),
    "rotation-symmetry-layers": Page(
        "Rotation symmetry: which layers to match",
        f"The matcher of {ROTATION} on single layers, on the first k and on the last k. "
        f"[Terms](rotation-symmetry.md).",
        {
            "003-figure6": Entry(
                "Each matched layer brings the models closer.",
                "",
                "GPT-2: {GPT-2/first k layers/6|3:.1%} of the unmatched distance with the first "
                "6 layers, {GPT-2/first k layers/1|3:.1%} with the first layer alone",
                "Findings named *distance* are the largest rise of the distance by one more "
                "layer: below zero, each layer brings the models closer. Findings named *first* "
                "are the loss of the average after matching the first half of the layers; the "
                "control is unmatched.",
            ),
        },
    ),
    "locks": Page(
        "What a lock is worth",
        "",
        {
            "lock-attacks": Entry(
                "Attacks recover a lock's key.",
                "",
                "public base, drift 0.1: {GPT-2 (G)/permutation|3:.0%} of the key; locked GPT-2 "
                "(G) alone: {GPT-2 (G)|2|2:.0%} of the stream's order",
                "Locks of every group, attacked with the base, with features, or with labels.",
            ),
        },
    ),
    "split-learning": Page(
        "Split learning: equality, leaks and defences",
        "What a server learns from [split learning](../guides/split.md). The *stream* is the "
        "tensor of features that crosses the network, its *rows* are the tokens, its *columns* the "
        "channels.",
        {
            "split-equality": Entry(
                "Split training gives the weights of local training.",
                "",
                "relative difference of the weights: {#image/weights:.1e} (ViT), "
                "{#bert/weights:.1e} (BERT), {#gpt2/weights:.1e} (GPT-2)",
                "The backbone is trained behind gRPC and mutual TLS on loopback, with locked "
                "columns and rows shuffled in every batch, and compared with training on one "
                "machine in float32. All weights together agree; the goal that every single "
                "tensor agrees to 1e-5 is missed, because Adam amplifies rounding where a "
                "gradient is almost zero.",
            ),
            "split-leaks": Entry(
                "A curious server learns labels, links between samples, and texts.",
                "",
                "labels from gradients: {faces: labels, epoch 1|2:.0%}; tokens of shuffled "
                "texts: {MiniLM: tokens, rows shuffled|2:.0%}",
                "Shares that the server recovers: labels from the gradients of an epoch, the "
                "same samples in two passes, the key of the columns, images of shuffled "
                "batches, and texts of 32 random tokens. The baseline is a random guess.",
                verdict="one seed: labels, and texts with shuffled rows, are recovered completely",
            ),
            "split-recipes": Entry(
                "A defence hides images at a useful accuracy.",
                "",
                "accuracy {none|1:.3f} undefended, all images identified; with a 2-dimensional "
                "bottleneck {bottleneck=2 + rows=sample|1:.3f}, {bottleneck=2 + "
                "rows=sample|5:.1%} identified",
                "The attackers know the defences and adapt to them. *best/faces/0.5* is the "
                "best accuracy with at most half of the images identified.",
                verdict="no: hiding costs most of the accuracy",
            ),
        },
    ),
    "gradients": Page(
        "Gradients and federated training",
        "What updates of a client reveal, and what defences cost. PSNR in dB; 100 dB means the "
        "exact image. [How to audit gradients](../guides/audit-gradients.md).",
        {
            "002-table5": Entry(
                "MJP hides images from gradient inversion.",
                "APRIL: {ViT/(a)/APRIL, modified block|12:.2f} dB, MJP {ViT + MJP/(a)/APRIL, "
                "modified block|12:.2f} dB",
                "APRIL: {ViT/(a)/APRIL, modified block|6:.2f} dB, MJP {ViT + MJP/(a)/APRIL, "
                "modified block|6:.2f} dB. Least squares on unmodified models trained with MJP: "
                "{ViT + MJP/(a)/least squares, unmodified|6:.0f} dB from an update without a "
                "puzzle, {ViT + MJP w/o unknown/(c)/least squares, unmodified|6:.0f} dB with a "
                "puzzle but no unknown embedding, {ViT + MJP/(b)/least squares, "
                "unmodified|6:.2f} dB with both (the mean image: {baseline: the mean "
                "image|6:.2f} dB)",
                f"Images from the gradients of one image, after {JIGSAW}: APRIL on a block "
                f"modified as in the paper's code, and least squares on the embedding of "
                f"unmodified models, which the paper did not try. Settings, as in the paper: "
                f"(a) the update is of the plain image; (b) of the image under a puzzle of "
                f"ratio 0.9; (c) as (b), without the unknown embedding; (d) as (b), compared "
                f"with the original image. Findings in dB: *plain*, *a* and *unknown* are least "
                f"squares on a plain model, on an MJP model in (a), and in (c); *paper* "
                f"findings are the claims on APRIL.",
                verdict=(
                    "**refuted** by example for updates without a puzzle, and for puzzles without "
                    "the unknown embedding: a closed-form attack recovers the image exactly; the "
                    "difference under APRIL is of one seed"
                ),
            ),
            "gradients-front": Entry(
                "A combination of defences keeps accuracy and hides single images.",
                "",
                "undefended: accuracy {none/1|2:.1f} %, images exact; no combination at batch "
                "size 1 hides all; sums over 128 images: AUC {none/128|7:.2f} (a guess: 0.50)",
                "Attackers train on their own updates, made with the same defences. The ViT is "
                "trained on 4,000 images of CIFAR-10 and then on 40,000, which contain 3,188 of "
                "the first; attacked images and test images are in neither set. The goals: a "
                "combination that keeps accuracy and hides, at one image per update (*single "
                "images*) and at several (*sums*).",
            ),
            "gradients-real": Entry(
                "Updates of pretrained models reveal their data.",
                "",
                "DINOv2-small at 224 px: {DINOv2-small, ImageNet at 224 px/none|2:.0f} dB; "
                "MiniLM: {none/1/exact search|3|1:.0%} of the words",
                "DINOv2-small on ImageNet images, a ViT on faces at three stages of its "
                "training, and MiniLM on sentences.",
            ),
            "federated-training": Entry(
                "Defences keep federated training accurate and lower leakage.",
                "",
                "FedAvg: accuracy {FedAvg/IID|2:.1%}, first image {FedAvg/IID|4:.0f} dB; "
                "embedding and first block frozen: {FedAvg, embedding and first block "
                "frozen/IID|2:.1%}, {FedAvg, embedding and first block frozen/IID|4:.1f} dB",
                "FedAvg on digits that are partitioned evenly (IID) or by class (non-IID: "
                "Dirichlet, alpha 0.3), with MJP, with frozen parts, and with parts that each "
                "client keeps local; closed-form attacks on updates.",
                verdict="in part: single images stay recoverable unless blocks are frozen",
            ),
            "federated-fusion": Entry(
                "Clients with different initializations can be averaged after matching.",
                "",
                "accuracy: unmatched {unmatched|1:.1%}, matched on noise {matched on "
                "noise|1:.1%}, matched on the server's inputs {matched on the server's "
                "inputs|1:.1%}",
                "Each client trains from its own random weights; the server averages the "
                "models. *better* checks the average against the unmatched one, *works* against "
                "chance and the clients' own accuracy.",
            ),
        },
    ),
}

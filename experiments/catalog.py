"""The pages of docs/experiments and what the overview states about each table and figure.

Claims are literals; every number is read from docs/results by a reference `{row|column:format}`,
where a row is named by its leading cells, joined by slashes. `{row|column|table:format}` reads
another table of the same results; `{#id:format}` the value of a finding, `{#id|1:format}` its floor
and `{#id|2:format}` its ceiling.
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
        verdict: The verdict in words where counting checks would not answer the claim.
    """

    claim: str
    paper: str
    ours: str
    about: str = ""
    verdict: str = ""


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
        f"The theorems of {EQUIVARIANCE}, on trained models: permuted rows (tokens) and permuted "
        "columns (channels) change no result.",
        {
            "000-table2": Entry(
                "A trained ViT gives the same results with permuted rows or columns.",
                "{Test w/o P.|2:.2f} % → {Test w/ Row P.|2:.2f} %",
                "{Test w/o P.|1:.2f} % → {Test w/ Row P.|1:.2f} % (rows), {Test w/ Col. "
                "P.|1:.2f} % (columns)",
                "The segmentation labels belong to scenes composed of MNIST digits. The dense "
                "head is one linear layer.",
            ),
            "000-table3": Entry(
                "Training with permuted rows or columns ends where plain training ends.",
                "ViT: {Train w/o P.|2:.2f} % → {Train w/ Row P.|2:.2f} %",
                "ViT: {Train w/o P.|1:.2f} % → {Train w/ Row P.|1:.2f} %; weights within "
                "{#image/rows/weights:.1e}",
            ),
            "000-table4": Entry(
                "Trained language models give the same results with permuted columns.",
                "BERT: {Test w/o P.|2:.2f} % → {Test w/ Col. P.|2:.2f} %",
                "BERT: {Test w/o P.|1:.2f} % → {Test w/ Col. P.|1:.2f} %; permuted weights with "
                "plain inputs: {moved model, normal input|1:.2f} %",
                "SST-2 stands in for IMDB. The GPT-2s were trained on another part of the same "
                "book; WikiText-2 is zero-shot for them. Without the key, a small model "
                "predicts at chance level: here the perplexity of a random guess is 1,024. The "
                "paper's perplexity of 1e7 belongs to a vocabulary of 50,257 and a more "
                "confident model.",
            ),
            "000-table5": Entry(
                "Training language models with permuted columns ends where plain training ends.",
                "BERT: {Train w/o P.|2:.2f} % → {Train w/ Col. P.|2:.2f} %",
                "BERT: {Train w/o P.|1:.2f} % → {Train w/ Col. P.|1:.2f} %",
            ),
        },
    ),
    "locked-fine-tuning": Page(
        "Permutation equivariance: fine-tuning locked models",
        f"Locked models with and without their key, after {EQUIVARIANCE}.",
        {
            "000-table7": Entry(
                "Fine-tuning with the key equals plain fine-tuning; without it, accuracy is lower.",
                "ViT: {normal|3:.2f} %; with the key {locked, authorized|3:.2f} %, without "
                "{locked, unauthorized|3:.2f} %",
                "ViT: {normal|1:.2f} %; with the key {locked, authorized|1:.2f} %, without "
                "{locked, unauthorized|1:.2f} %, from scratch {from scratch|1:.2f} %",
                "Pre-trained models are locked, get a new head and are fine-tuned: the ViT of "
                "Table 2 (MNIST) on scikit-learn's digits, BERT and GPT-2 of Table 4 on 2,000 "
                "further sentences of SST-2. Without the key a thief still reaches 78 to 86 % "
                "in the paper: a lock removes the head start of pre-training and prevents "
                "nothing. Budgets were shortened after a look at the test results of one seed, "
                "and the gaps depend on them: Figure 5 shows the same ViT after a longer "
                "training, with a smaller gap.",
            ),
            "000-figure5": Entry(
                "A longer fine-tuning narrows the gap between thief and owner.",
                "",
                "owner {normal|1:.2f} %, thief {locked, unauthorized|1:.2f} %, from scratch "
                "{from scratch|1:.2f} %",
                "The ViT of Table 7, trained longer with shifted images, to the end of a cosine "
                "schedule.",
            ),
            "000-figure6": Entry(
                "A locked GPT-2 generates and fine-tunes correctly with its key only.",
                "",
                "perplexity {normal|1:.2f}; with the key {locked, authorized|1:.2f}, without "
                "{locked, unauthorized|1:.2f}",
                "Two GPT-2s, one trial each, are fine-tuned on WikiText-2. The paper's figure "
                "shows the curves of fine-tuning, which the HTML report has.",
            ),
        },
    ),
    "split-reconstruction": Page(
        "Permutation equivariance: what a split-learning server reconstructs",
        f"Reconstruction of images from the features that a client sends, after {EQUIVARIANCE}: "
        "the paper's decoder, and stronger attacks. SSIM 1 is the image itself.",
        {
            "000-table6": Entry(
                "Shuffled rows protect images from the server.",
                "faces, noise 0.5: SSIM {pixel-noise=0.5|4:.3f} → {pixel-noise=0.5+rows|4:.3f} "
                "with rows",
                "the paper's decoder: {pixel-noise=0.5|3:.3f} → {pixel-noise=0.5+rows|3:.3f}; "
                "best attack: {pixel-noise=0.5|10:.3f} → {pixel-noise=0.5+rows|10:.3f}",
                "Faces (smiling or not, 32 x 32) and CIFAR-10, trained through the split engine "
                "with each defence, which acts in training, in tests and on what the attacker "
                "sees. Victims are trained in float64, so that rows cost no accuracy. The "
                "paper's code attacks features without positions (column *SSIM, no positions*); "
                "a client sends features with positions, and the paper's own decoder then "
                "learns to sort the tokens. Three seeds (`--seeds 3`). With one seed, CIFAR-10 "
                "has three attacks only, and its best attack is a lower bound. The column "
                "without positions has one seed.",
                verdict="only against the paper's decoder",
            ),
            "000-figure7": Entry(
                "With shuffled rows, every point of the curve leaks less.",
                "",
                "mean SSIM by the paper's decoder {#claim/faces/curve/decoder|2:.3f} → "
                "{#claim/faces/curve/decoder:.3f}, by the best attack "
                "{#claim/faces/curve/best|2:.3f} → {#claim/faces/curve/best:.3f}",
                "The same faces over the radius of the filter and over noise on the stream, "
                "with and without shuffled rows.",
                verdict="only against the paper's decoder",
            ),
        },
    ),
    "masked-jigsaw": Page(
        "Masked jigsaw: accuracy and consistency",
        f"Training with masked jigsaw puzzles (MJP) after {JIGSAW}. Models are small and trainings "
        "short: compare the direction of the differences with the paper's, not the numbers. "
        "[How to train with puzzles](../guides/jigsaw.md).",
        {
            "002-table1": Entry(
                "MJP raises consistency under shuffled patches without a loss of accuracy.",
                "ViT: consistency {ViT|10:.1f} → {ViT + MJP|10:.1f}, accuracy {ViT|8:.1f} → "
                "{ViT + MJP|8:.1f}",
                "ViT: {ViT|5:.1f} → {ViT + MJP|5:.1f}, accuracy {ViT|1:.1f} → {ViT + "
                "MJP|1:.1f}; trained to the end: {ViT, 300 epochs of 1,000|5:.1f} → {ViT, 300 "
                "epochs of 1,000 + MJP|5:.1f}, accuracy {ViT, 300 epochs of 1,000|1:.1f} → "
                "{ViT, 300 epochs of 1,000 + MJP|1:.1f}",
                "Backbones trained on CIFAR-10. The ViT's positions are initialized as large as "
                "its patches, so that it depends on positions within minutes; that, its size "
                "and the training ratio were chosen with one further seed and images of the "
                "training set. The longer training was added after the short one had missed the "
                "goal.",
            ),
            "002-table2": Entry(
                "Each part of the method contributes.",
                "consistency: plain {A: plain|9:.1f}, puzzles alone {E: JP|9:.1f}",
                "consistency: plain {A: plain|5:.1f}, puzzles alone {E: JP|5:.1f}",
                "The variants A to J of the method, one part at a time.",
            ),
            "002-table3": Entry(
                "More puzzles in training give more consistency.",
                "ratio 0 → 0.9: {0.0|9:.1f} → {0.9|9:.1f}",
                "ratio 0 → 0.9: {0.0|5:.1f} → {0.9|5:.1f}, accuracy {0.0|1:.1f} → {0.9|1:.1f}",
                "The ratio is the share of patches that are shuffled in training.",
                verdict="consistency rises, accuracy falls",
            ),
            "002-table4": Entry(
                "MJP is more robust to corrupted and unusual images.",
                "mCE {ViT, plain|6:.1f} → {ViT, MJP|6:.1f} (lower is better)",
                "mCE {ViT, plain|1:.1f} → {ViT, MJP|1:.1f}",
                "Corruptions of ImageNet-C for 32 pixels; test images that a ResNet gets wrong "
                "in place of ImageNet-A; MNIST in place of ImageNet-O.",
                verdict="not reproduced",
            ),
            "002-table9": Entry(
                "The corruptions of Table 4 one by one.",
                "gaussian noise: error {gaussian_noise|5:.1f} → {gaussian_noise|6:.1f}",
                "gaussian noise: error {gaussian_noise|1:.1f} → {gaussian_noise|2:.1f}",
                verdict="not reproduced",
            ),
        },
    ),
    "masked-jigsaw-beyond": Page(
        "Masked jigsaw: longer trainings, other puzzles, text",
        f"Beyond the tables of {JIGSAW}.",
        {
            "002-epochs": Entry(
                "The accuracy that puzzles cost in short trainings is a matter of their length.",
                "",
                "half the schedule: {0.5, plain|1:.1f} → {0.5, MJP|1:.1f}; a fifth: {0.2, "
                "plain|1:.1f} → {0.2, MJP|1:.1f}",
                "Images, model and schedule are the same; only the length differs.",
                verdict="holds: less is lost in longer trainings",
            ),
            "002-beyond": Entry(
                "Other puzzles give more consistency than the paper's setting.",
                "",
                "consistency: paper's setting {paper: ratio 0.1 per batch|5:.1f}, ratio 0.5 per "
                "batch {ratio 0.5 per batch|5:.1f}",
                "Puzzles per image, larger and rising ratios, and puzzles in every step, beside "
                "the paper's setting in the same run.",
            ),
            "002-texts": Entry(
                "Shuffled spans do for text what shuffled patches do for images.",
                "",
                "BERT, SST-2: consistency {BERT|5:.1f} → {BERT + spans|5:.1f}",
                "The paper has no texts.",
                verdict="a small gain of the wrapped model alone",
            ),
        },
    ),
    "masked-jigsaw-positions": Page(
        "Masked jigsaw: position embeddings and attention",
        f"What training with puzzles does to position embeddings, after {JIGSAW}.",
        {
            "002-table7": Entry(
                "With MJP, positions need more directions.",
                "variance in 3 directions: {paper: DeiT-S, plain|1:.1f} % → {paper: DeiT-S, "
                "MJP|1:.1f} %",
                "{ViT, plain|1:.1f} % → {ViT, MJP|1:.1f} %",
                "Explained variance of the position embeddings by principal components.",
                verdict="same direction, smaller",
            ),
            "002-table8": Entry(
                "Positions can be read off their embeddings.",
                "2-D error: plain {ViT, plain|6:.3f}, MJP {ViT, MJP (DAL - LN)|6:.3f}",
                "2-D error: plain {ViT, plain|3:.3f}, MJP {ViT, MJP (DAL - LN)|3:.3f}",
                "Mean absolute error of a regression from position embeddings to positions.",
                verdict="holds",
            ),
            "002-figure1": Entry(
                "Positions spread over more directions the more puzzles there are.",
                "",
                "variance in 3 directions: {plain|1:.1f} %, ratio 0.9: {MJP, ratio 0.9|1:.1f} %",
                "The drawings are in the HTML report.",
                verdict="holds",
            ),
            "002-figure2": Entry(
                "With MJP, accuracy falls less under puzzles at inference.",
                "",
                "ViT, ratio 0 → 0.9: plain {(a) ViT, plain|1:.1f} → {(a) ViT, plain|6:.1f}, MJP "
                "{(a) ViT, MJP, training ratio 0.3|1:.1f} → {(a) ViT, MJP, training ratio "
                "0.3|6:.1f}",
                verdict="holds, from a lower start",
            ),
            "002-figure3": Entry(
                "Eigenvalues of position embeddings decay more slowly with MJP.",
                "",
                "directions with 90 %: plain {plain|1:.1f}, MJP {MJP|1:.1f}",
                verdict="no difference",
            ),
            "002-figure4": Entry(
                "Attention of CLS is spread more evenly with MJP.",
                "",
                "entropy: plain {plain|1:.3f}, MJP {MJP|1:.3f}",
                "Attention in the last layer. The maps are in the HTML report.",
                verdict="not reproduced",
            ),
            "002-figure6": Entry(
                "Training with MJP converges as fast.",
                "",
                "accuracy at step 600: plain {600|1:.1f}, MJP {600|2:.1f}",
                verdict="slower here",
            ),
        },
    ),
    "rotation-symmetry": Page(
        "Rotation symmetry: models, barriers and cost",
        f"Matching models that were trained apart, after {ROTATION} and Theus et al. "
        "([arXiv:2506.22712](https://arxiv.org/abs/2506.22712)).",
        {
            "003-pairs": Entry(
                "The end models are clearly better than a bigram model or a guess.",
                "",
                "GPT-2: {#goal/ends/gpt2:.2f} nats, bigram 4.21; MiniLM: {#goal/ends/minilm:.1%}",
                "The end models of all merges below. Budgets are ours, limited by two cores. "
                "`python -m experiments 003/pairs` trains them (hours on two cores); the other "
                "`003/...` use the finished ones and train nothing.",
            ),
            "003-barriers": Entry(
                "Matching removes the barrier between models trained from different seeds.",
                "GPT-2 (Theus et al.): {GPT-2/vanilla: not matched|10:.2f} → {GPT-2/data-free: "
                "ours: everything, norms folded|10:.2f} without data, {GPT-2/refined: the same "
                "to the nearest weights, and 200 learned steps on such inputs|10:.2f} refined",
                "GPT-2: {GPT-2/vanilla: not matched|3:.3f} → {GPT-2/data-free: ours: "
                "everything, norms folded|3:.3f} without data, {#goal/gpt2/refined:.3f} refined "
                "(nats)",
                "Norms are folded and heads untied, nothing else changes. The published numbers "
                "belong to other models, and their matching makes attention larger: compare the "
                "share of the vanilla barrier that is left.",
            ),
            "003-table3": Entry(
                "Matching is cheap beside the merges that need data.",
                "",
                "BERT: matching {BERT/ours, everything|2:.2f} CPU s, Fisher {BERT/merge: "
                "Fisher|2:.2f}, RegMean {BERT/merge: RegMean|2:.2f}",
                "CPU seconds on the machine that made this page; compare ratios. *Plain numpy* "
                "is a transcription of the paper's formulas, head by head, and reaches the same "
                "distance. The time of Fisher, RegMean and OT-ACTS includes reading and "
                "tokenizing their data, so that shares of a merge favour matching. For BERT "
                "that is an estimated 4.6 of RegMean's 6.5 CPU seconds.",
            ),
        },
    ),
    "rotation-symmetry-merges": Page(
        "Rotation symmetry: six merges with and without matching",
        f"The table of merges of {ROTATION}.",
        {
            "003-table2": Entry(
                "Matching helps every merge of two models trained apart.",
                "",
                "ViT, average: {ViT/Simple/not matched|3:.1f} % → {ViT/Simple/ours: everything, "
                "norms folded|3:.1f} %; BERT, Fisher: {BERT/Fisher/not matched|3:.1f} % → "
                "{BERT/Fisher/ours: everything, norms folded|3:.1f} %",
                "The CPU seconds of methods with data include reading it.",
            ),
        },
    ),
    "rotation-symmetry-parts": Page(
        "Rotation symmetry: which parts of matching help",
        f"Parts of the matching of {ROTATION}, alone and together.",
        {
            "003-figure3": Entry(
                "Each part of the matching helps the average.",
                "ViT, average: {ViT/Simple/003: rotations, rescaling, FFN|4:.2f} % with all of "
                "the paper's parts",
                "ViT, average: {ViT/Simple/not matched|3:.1f} % → {ViT/Simple/003: rotations, "
                "rescaling, FFN|3:.1f} % (the paper's parts), {ViT/Simple/ours: everything, "
                "norms folded|3:.1f} % (everything)",
                "Two models are matched in part or in whole, and averaged. The paper leaves out "
                "attention, FFN or rescaling. Beyond it come heads, the residual stream, and "
                "everything with folded norms.",
                verdict="in part: rescaling adds nothing, the stream and folded norms most",
            ),
        },
    ),
    "rotation-symmetry-distance": Page(
        "Rotation symmetry: distance and barriers by matcher",
        f"Distances and loss barriers of {ROTATION}, for several matchers.",
        {
            "003-figure4": Entry(
                "Rotations bring two models nearer than permutations.",
                "ViT: to {ViT/003: rotations, rescaling, FFN|5:.1%} of the distance",
                "ViT: to {ViT/003: rotations, rescaling, FFN|3:.1%} with the paper's parts, "
                "{ViT/ours: everything, norms folded|3:.1%} with everything",
                "Git Re-Basin assigns neurons by weights. OT-Fusion transports them, exactly "
                "(then it is a permutation) or softly (then it is not a symmetry, and its "
                "distance is not one between two bases of the same models). Figure 5 and the "
                "barriers show what a merge gains.",
            ),
            "003-figure5": Entry(
                "Matching lowers the loss on the line between two models.",
                "",
                "ViT: barrier {ViT/not matched|2:.3f} → {ViT/003: rotations, rescaling, "
                "FFN|2:.3f} (the paper's parts), {ViT/ours: everything, norms folded|2:.3f} "
                "(everything)",
                "The loss on the straight line between two models, and on the plane through "
                "both and the aligned one.",
                verdict="holds; two fine-tunes of one base have nothing to gain",
            ),
        },
    ),
    "rotation-symmetry-layers": Page(
        "Rotation symmetry: which layers to match",
        f"The matcher of {ROTATION} at one layer, at the first k, and at the last k.",
        {
            "003-figure6": Entry(
                "Every layer that is matched brings the models nearer.",
                "",
                "GPT-2, first 6 layers: {GPT-2/first k/6|3:.1%} of the distance; first layer "
                "alone: {GPT-2/first k/1|3:.1%}",
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
                "base public, drift 0.1: {GPT-2 (G)/permutation|3:.0%} of the key; the locked "
                "GPT-2 alone: {GPT-2 (G)|2|2:.0%}",
                "Locks of every group, attacked with the base, with features, or with labels.",
            ),
        },
    ),
    "split-learning": Page(
        "Split learning: equality, leaks and defences",
        "[How to train split](../guides/split.md), and what a server learns from it.",
        {
            "split-equality": Entry(
                "Split training gives the weights of local training.",
                "",
                "weights within {#image/weights:.1e} (ViT), {#bert/weights:.1e} (BERT), "
                "{#gpt2/weights:.1e} (GPT-2)",
                "The backbone behind gRPC and mutual TLS on loopback, with locked columns and "
                "rows shuffled for every batch, against training on one machine.",
            ),
            "split-leaks": Entry(
                "A curious server learns labels, links and texts.",
                "",
                "labels from gradients: {leak/faces/labels, epoch 1|2:.0%}; tokens of shuffled "
                "texts: {leak/minilm/tokens, rows shuffled|2:.0%}",
                "Shares that the server gets right: labels, links of samples over epochs, keys, "
                "shuffled batches and texts.",
                verdict="holds",
            ),
            "split-recipes": Entry(
                "A defence hides images at a useful accuracy.",
                "",
                "accuracy {none|1:.3f} undefended, all images identified; with a 2-dimensional "
                "bottleneck {bottleneck=2 + rows=sample|1:.3f}, {bottleneck=2 + "
                "rows=sample|5:.1%} identified",
                "Attackers know the defences and adapt to them.",
                verdict="no: hiding costs most of the accuracy",
            ),
        },
    ),
    "gradients": Page(
        "Gradients and federated training",
        "What updates of a client reveal, and what defences cost. [How to audit "
        "gradients](../guides/audit-gradients.md).",
        {
            "002-table5": Entry(
                "MJP hides images from gradient inversion.",
                "APRIL: {ViT/(a)/APRIL, modified block|12:.2f} dB, MJP {ViT + MJP/(a)/APRIL, "
                "modified block|12:.2f} dB",
                "APRIL: {ViT/(a)/APRIL, modified block|6:.2f} dB, MJP {ViT + MJP/(a)/APRIL, "
                "modified block|6:.2f} dB. Least squares on unmodified models of MJP: {ViT + "
                "MJP/(a)/least squares, unmodified|6:.0f} dB from an update without a puzzle, "
                "{ViT + MJP w/o unknown/(c)/least squares, unmodified|6:.0f} dB with a puzzle "
                "but no unknown embedding, {ViT + MJP/(b)/least squares, unmodified|6:.2f} dB "
                "with both (the mean image: {floor: the mean image|6:.2f} dB)",
                f"Images from the gradients of one image, after {JIGSAW}: APRIL on a block "
                "modified as the paper's library modifies it, and least squares on the embedding "
                "of unmodified models, which the paper did not try. Settings, as in the paper: (a) "
                "the update is of the plain image; (b) of the image under a puzzle of ratio 0.9; "
                "(c) as (b), without the unknown embedding; (d) as (b), compared with the "
                "original image.",
                verdict="**refuted** for updates without a puzzle, and for puzzles without the "
                "unknown embedding: a closed-form attack recovers the image; with both, it is 2 "
                "dB above the mean image",
            ),
            "gradients-front": Entry(
                "A recipe keeps accuracy and hides single images.",
                "",
                "undefended {none/1|2:.1f} % and images exact; no recipe at batch 1 hides all; "
                "sums over 128 images: AUC {none/128|7:.2f} (a guess: 0.50)",
                "Attackers practise on updates of their own, made with the same defence. The "
                "ViT was trained on 4,000 images of CIFAR-10 and is trained further on 40,000, "
                "of which 3,188 are among the first; attacked and tested images are neither.",
            ),
            "gradients-real": Entry(
                "Updates of pretrained models reveal their data.",
                "",
                "DINOv2-small at 224 px: {DINOv2-small, ImageNet at 224 px/none|2:.0f} dB; "
                "MiniLM: {none/1/exact search|3|1:.0%} of the words",
                "DINOv2-small on ImageNet's images, a ViT on faces before, early and late in "
                "its training, and MiniLM on sentences. 100 dB means the exact image.",
            ),
            "federated-training": Entry(
                "Defences keep federated training accurate and lower leakage.",
                "",
                "FedAvg {FedAvg/even|2:.1%}, first image {FedAvg/even|4:.0f} dB; first block "
                "frozen {FedAvg, embedding and first block frozen/even|2:.1%}, {FedAvg, "
                "embedding and first block frozen/even|4:.1f} dB",
                "FedAvg on digits, on even and on unlike parts (Dirichlet, alpha 0.3), with "
                "MJP, frozen parts and parts that each client keeps; closed-form attacks on "
                "updates.",
                verdict="in part: single images stay recoverable unless blocks are frozen",
            ),
            "federated-fusion": Entry(
                "Clients with different initializations can be averaged after matching.",
                "",
                "unmatched {as they stand|1:.1%}, matched on noise {after a match on "
                "noise|1:.1%}, on the server's inputs {after a match on the server's "
                "inputs|1:.1%}",
            ),
        },
    ),
}

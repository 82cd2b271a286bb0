"""The figures of every table and figure of the papers, by the name of their results."""

from __future__ import annotations

from experiments.figures import Bars, Columns, Drawn, Front, Lines, Stored

PLAIN_MJP = ("plain", "MJP")
THREE = "Error bars are standard deviations over three seeds."
KEYS = ("plain", "locked, with the key", "locked, without the key", "from scratch")
INFERENCE = {
    "plain": "plain",
    "rows permuted": "rows permuted",
    "columns permuted": "columns permuted",
    "no key": "permuted weights, plain input",
    "wrong key": "permuted weights, wrong key",
    "a guess": "random guess",
}
PAPERS = "paper's matcher"
BACKBONES = {
    "ViT": "ViT",
    "ViT, longer": "ViT, longer training",
    "ViT, 300 epochs": "ViT, 300 epochs on 1,000 images",
    "ViT, 3,000 steps": "ViT, 3,000 steps",
    "Swin": "Swin",
    "ResNet": "ResNet",
}
VARIANTS = (
    "A: plain",
    "B: no positions",
    "C: SPP",
    "D: DAL (NLN)",
    "E: JP",
    "F: JP + IDX",
    "G: JP + UNK",
    "H: JP + UNK + DAL (PCA)",
    "I: JP + UNK + DAL (LN)",
    "J: JP + UNK + DAL (NLN)",
)

FIGURES: dict[str, tuple[Drawn, ...]] = {
    "000-table2": (
        Bars(
            "ViT: accuracy with and without the key",
            "Permuted inputs with permuted weights keep the accuracy. Without the key, the ViT is "
            "at the level of a guess. Means over three seeds.",
            {short: (name,) for short, name in INFERENCE.items()},
            ("ViT", "ViT, dense: aAcc", "ViT, dense: mIoU"),
            (1, 3, 5),
            unit="percent",
        ),
    ),
    "000-table3": (
        Stored(
            0,
            "Difference of the training loss from plain training, by step: rounding only, where "
            "another seed differs by orders of magnitude more.",
            title="ViT: loss of permuted and plain training",
            axes=("training step", "difference of the loss"),
        ),
    ),
    "000-table4": (
        Bars(
            "Accuracy with and without the key",
            "Sentiment of sentences, of which a guess gets 50 %. Means over three seeds.",
            {short: (name,) for short, name in INFERENCE.items()},
            ("BERT", "GPT-2"),
            (1, 3),
            unit="accuracy (%)",
        ),
    ),
    "000-table5": (
        Stored(
            0,
            "Difference of the training loss from plain training, by step.",
            title="BERT: loss of permuted and plain training",
            axes=("training step", "difference of the loss"),
        ),
    ),
    "000-table7": (
        Columns(
            "Accuracy after fine-tuning",
            f"With the key, fine-tuning equals plain fine-tuning. {THREE}",
            {"ViT": (1, 2), "BERT": (4, 5), "GPT-2": (7, 8)},
            {name: name for name in KEYS},
            "accuracy (%)",
        ),
        Stored(
            0,
            "Means over three seeds. The curves of plain fine-tuning and of the key holder "
            "coincide.",
            title="ViT: training loss by step",
            axes=("training step", "training loss (nats)"),
        ),
    ),
    "000-figure5": (
        Stored(
            0,
            "Means over three seeds. The curves of plain fine-tuning and of the key holder "
            "coincide.",
            title="ViT: validation loss by step",
            axes=("training step", "validation loss (nats)"),
        ),
    ),
    "000-figure6": (
        Stored(
            1,
            "Means over two models. The curves of plain fine-tuning and of the key holder "
            "coincide.",
            title="GPT-2 (G) on WikiText-2: validation loss by step",
            axes=("training step", "validation loss (nats)"),
        ),
    ),
    "000-table6": (
        Bars(
            "Faces: similarity of the reconstruction",
            "SSIM of the paper's decoder and of the best attack, with and without shuffled rows "
            "(three seeds).",
            {
                name: (name, name)
                for name in (
                    "none",
                    "rows",
                    "pixel-noise=0.5",
                    "pixel-noise=0.5+rows",
                    "low-pass=0.1",
                    "low-pass=0.1+rows",
                    "batch-shuffle=0.5",
                    "batch-shuffle=0.5+rows",
                )
            },
            ("the paper's decoder", "best attack"),
            (3, 10),
            unit="SSIM: less is more private",
        ),
    ),
    "000-figure7": (
        Stored(0, "One seed. Up and to the left is better.", title="The paper's decoder alone"),
        Stored(1, "One seed. Up and to the left is better.", title="The best of all attacks"),
    ),
    "002-table1": (
        Bars(
            "Consistency with and without MJP",
            THREE,
            {short: (name, f"{name} + MJP") for short, name in BACKBONES.items()},
            PLAIN_MJP,
            (5,),
            (6,),
            "consistency (%)",
        ),
        Bars(
            "Accuracy with and without MJP",
            THREE,
            {short: (name, f"{name} + MJP") for short, name in BACKBONES.items()},
            PLAIN_MJP,
            (1,),
            (2,),
            "accuracy (%)",
        ),
    ),
    "002-table2": (
        Bars(
            "Consistency of the variants",
            "Ours: means over three seeds.",
            {name: (name,) for name in VARIANTS},
            ("ours", "paper"),
            (5, 9),
            unit="consistency (%)",
        ),
    ),
    "002-table3": (
        Lines(
            "Consistency and accuracy by training ratio",
            "Bands are standard deviations over three seeds.",
            {"consistency": (5, 6), "accuracy": (1, 2)},
            "share of the patches shuffled in training",
            "percent",
        ),
    ),
    "002-table4": (
        Columns(
            "Robustness with and without MJP",
            "Means over three seeds. The mean error is lower for a more robust model, the other "
            "measures are higher.",
            {
                "mean error": (2, None),
                "hard images": (3, None),
                "AURRA": (4, None),
                "AUPR": (5, None),
            },
            {"plain": "ViT, plain", "MJP": "ViT, MJP"},
            "percent",
        ),
    ),
    "002-table9": (
        Stored(0, "Means over five severities and three seeds.", title="Error by corruption"),
    ),
    "002-epochs": (
        Bars(
            "Accuracy by training length",
            THREE,
            {
                length: (f"{length}, plain", f"{length}, MJP")
                for length in (
                    "0.1 of the schedule",
                    "0.2 of the schedule",
                    "0.5 of the schedule",
                    "whole schedule",
                )
            },
            PLAIN_MJP,
            (1,),
            (2,),
            "accuracy (%)",
        ),
    ),
    "002-beyond": (
        Bars(
            "Consistency of other puzzles",
            THREE,
            {
                short: (name,)
                for short, name in (
                    ("plain", "plain"),
                    ("paper: 0.1 per batch", "paper: ratio 0.1 per batch"),
                    ("0.3 per batch", "ratio 0.3 per batch"),
                    ("0.5 per batch", "ratio 0.5 per batch"),
                    ("0.3 per image", "ratio 0.3 per image"),
                    (
                        "0.5 per image, to 3/4",
                        "ratio 0.5 per image, no puzzles in the last quarter of training",
                    ),
                    ("rising to 0.9 per image", "ratio rising to 0.9 per image"),
                )
            },
            ("consistency",),
            (5,),
            (6,),
            "consistency (%)",
        ),
    ),
    "002-texts": (
        Bars(
            "Consistency under shuffled spans",
            THREE,
            {"BERT": ("BERT",), "BERT + spans": ("BERT + spans",)},
            ("wrapped", "plain checkpoint"),
            (5, 7),
            unit="consistency (%)",
        ),
    ),
    "002-table7": (
        Bars(
            "Variance in the first three components",
            "Means over three seeds; the paper's model is a DeiT-S.",
            {
                "ours": ("ViT, plain", "ViT, MJP"),
                "paper": ("paper: DeiT-S, plain", "paper: DeiT-S, MJP"),
            },
            PLAIN_MJP,
            (1,),
            unit="variance in 3 components (%)",
        ),
    ),
    "002-table8": (
        Bars(
            "Error of predicted positions",
            THREE,
            {
                "plain": ("ViT, plain",),
                "MJP, linear DAL": ("ViT, MJP, linear DAL",),
                "MJP, nonlinear DAL": ("ViT, MJP, nonlinear DAL",),
            },
            ("mean absolute error",),
            (3,),
            (4,),
            "patches",
        ),
    ),
    "002-figure1": (
        Stored(0, "Each point is a patch, lines join neighbours.", title="PCA of positions: plain"),
        Stored(
            6,
            "Each point is a patch, lines join neighbours.",
            title="PCA of positions: MJP, ratio 0.9",
        ),
    ),
    "002-figure2": (
        Stored(0, "Means over three seeds.", title="ViT: accuracy by inference ratio"),
        Stored(1, "Means over three seeds.", title="Swin: accuracy by inference ratio"),
    ),
    "002-figure3": (
        Stored(
            0,
            "Means over three seeds.",
            title="Cumulative eigenvalues",
            axes=("principal components", "share of the variance"),
        ),
    ),
    "002-figure4": (
        Bars(
            "Attention of the CLS token",
            "Means over three seeds.",
            {"plain": ("plain",), "MJP": ("MJP",)},
            ("entropy", "difference between heads"),
            (1, 2),
            unit="1 is uniform attention",
        ),
    ),
    "002-figure6": (
        Stored(
            0,
            "Means over three seeds.",
            title="Accuracy by training step",
            axes=("training step", "accuracy"),
        ),
    ),
    "003-pairs": (
        Stored(0, "One curve for each seed.", title="GPT-2: training loss"),
        Stored(2, "One curve for each seed.", title="ViT: training loss"),
    ),
    "003-barriers": (
        Stored(0, "Means over five pairs.", title="GPT-2: loss on the line from A to B"),
        Stored(1, "Means over five pairs.", title="Llama: loss on the line from A to B"),
        Stored(2, "Means over five pairs.", title="ViT: loss on the line from A to B"),
    ),
    "003-table3": (
        Bars(
            "BERT: the cost of matching and of merges",
            "Medians; merges that need data are timed once.",
            {
                short: (f"BERT/{name}",)
                for short, name in (
                    ("plain numpy", "plain numpy"),
                    (PAPERS, "regauge, the paper's matcher"),
                    ("regauge, by weights", "regauge, by weights"),
                    ("average", "merge: Simple"),
                    ("Fisher", "merge: Fisher"),
                    ("RegMean", "merge: RegMean"),
                )
            },
            ("CPU seconds",),
            (2,),
            unit="CPU seconds",
        ),
    ),
    "003-table2": (
        Stored(
            0,
            "One pair.",
            title="ViT: accuracy of the merged model",
            axes=("accuracy (%)", "accuracy (%)"),
        ),
        Stored(
            1,
            "One pair.",
            title="BERT: accuracy of the merged model",
            axes=("accuracy (%)", "accuracy (%)"),
        ),
    ),
    "003-figure3": (
        Bars(
            "ViT: accuracy of the average of two models",
            "One pair.",
            {
                short: (f"ViT/Simple/{name}",)
                for short, name in (
                    ("unmatched", "unmatched"),
                    ("FFN only", f"{PAPERS} without attention (FFN only)"),
                    ("attention only", f"{PAPERS} without FFN (attention only)"),
                    ("without rescaling", f"{PAPERS} without rescaling"),
                    (PAPERS, f"{PAPERS} (rotations, rescaling, FFN)"),
                    ("+ order of heads", f"{PAPERS} + order of heads"),
                    ("+ heads + stream", f"{PAPERS} + order of heads + stream"),
                    ("regauge, by weights", "regauge, by weights"),
                )
            },
            ("accuracy",),
            (3,),
            unit="accuracy (%)",
        ),
    ),
    "003-figure4": (
        Bars(
            "ViT: distance after matching",
            "Share of the unmatched distance; means over two pairs.",
            {
                short: (f"ViT/{name}",)
                for short, name in (
                    ("unmatched", "unmatched"),
                    ("Git Re-Basin, FFN", "Git Re-Basin, FFN only (as in the paper)"),
                    ("Git Re-Basin, all", "Git Re-Basin, all permutations"),
                    ("attention only", f"{PAPERS} without FFN (attention only)"),
                    ("without rescaling", f"{PAPERS} without rescaling"),
                    (PAPERS, f"{PAPERS} (rotations, rescaling, FFN)"),
                    ("+ heads + stream", f"{PAPERS} + order of heads + stream"),
                    ("regauge, by weights", "regauge, by weights"),
                )
            },
            ("share of unmatched",),
            (3,),
            unit="share of the unmatched distance",
        ),
    ),
    "003-figure5": (
        Stored(0, "One pair.", title="ViT: loss on the line from A to B"),
        Stored(9, "One pair.", title="GPT-2: loss on the line from A to B"),
    ),
    "003-figure6": (Stored(6, "Means over two pairs.", title="GPT-2: loss by matched layers"),),
    "lock-attacks": (
        Bars(
            "Share of the key that a public base reveals",
            "Means over keys.",
            {
                f"{model}, {group}": (f"{model}/{group}",)
                for model in ("GPT-2 (G)", "ViT", "Llama, 260 K")
                for group in ("permutation", "signed", "rotation")
            },
            ("drift 0.1", "drift 1"),
            (3, 4),
            unit="share of the key",
        ),
    ),
    "split-leaks": (
        Bars(
            "Recovered by the server",
            "One seed.",
            {
                short: (name,)
                for short, name in (
                    ("labels, epoch 1", "faces: labels, epoch 1"),
                    (
                        "tokens of 10 images",
                        "faces: tokens regrouped, shuffled batch of 10 images",
                    ),
                    (
                        "tokens of 50 images",
                        "faces: tokens regrouped, shuffled batch of 50 images",
                    ),
                    ("texts, rows shuffled", "MiniLM: tokens, rows shuffled"),
                )
            },
            ("a guess", "recovered"),
            (1, 2),
            unit="share",
        ),
    ),
    "split-recipes": (
        Front(
            "Accuracy against leakage: faces",
            "Means over three seeds. Up and to the left is better.",
            5,
            1,
            "share of images identified",
            "accuracy",
            {
                "none": "none",
                "low-pass=0.1 + rows=sample": "low-pass, rows",
                "noise=0.5 + rows=sample": "noise, rows",
                "batch-shuffle=0.5 + rows=sample": "batch shuffle, rows",
                "bottleneck=2 + rows=sample": "bottleneck 2, rows",
                "bottleneck=8 + round=1 + rows=sample": "bottleneck 8, rounding, rows",
            },
        ),
    ),
    "002-table5": (
        Bars(
            "PSNR of images from gradients",
            "16 images, one seed. 100 dB is the exact image; the mean image has "
            "{baseline: the mean image|6:.1f} dB.",
            {
                f"{name} {setting}": (
                    f"{name}/{setting}/APRIL, modified block",
                    f"{name}/{setting}/least squares, unmodified",
                )
                for name, setting in (
                    ("ViT", "(a)"),
                    ("ViT + MJP", "(a)"),
                    ("ViT", "(b)"),
                    ("ViT + MJP", "(b)"),
                    ("ViT + MJP w/o unknown", "(c)"),
                )
            },
            ("APRIL", "least squares"),
            (6,),
            unit="PSNR (dB): less is more private",
        ),
    ),
    "gradients-front": (
        Front(
            "Accuracy against leakage",
            "Area under the curve of patch membership, 0.5 for a guess; means over three seeds. "
            "Up and to the left is better.",
            7,
            2,
            "patch AUC of the strongest attack",
            "accuracy (%)",
            {
                "none/1": "none, 1 image",
                "mjp=0.5/1": "MJP, 1 image",
                "freeze=embedding,first/1": "two parts frozen, 1 image",
                "freeze=matrices/1": "matrices frozen, 1 image",
                "private=1/1": "differential privacy, 1 image",
                "none/128": "none, 128 images",
            },
        ),
    ),
    "gradients-real": (Stored(0, "One seed.", title="Faces: leakage by training step"),),
    "federated-training": (
        Bars(
            "Accuracy of the averaged model",
            THREE,
            {
                short: (f"{name}/IID", f"{name}/non-IID")
                for short, name in (
                    ("FedAvg", "FedAvg"),
                    ("MJP", "FedAvg + MJP"),
                    ("MJP, embedding frozen", "FedAvg + MJP, embedding frozen"),
                    ("MJP, embedding local", "FedAvg + MJP, embedding kept local"),
                    ("first block frozen too", "FedAvg, embedding and first block frozen"),
                )
            },
            ("IID", "non-IID"),
            (2,),
            (3,),
            "accuracy",
        ),
    ),
    "federated-fusion": (
        Bars(
            "Accuracy of the average after one round",
            THREE,
            {
                short: (name,)
                for short, name in (
                    ("unmatched", "unmatched"),
                    ("matched on noise", "matched on noise"),
                    ("matched on inputs", "matched on the server's inputs"),
                )
            },
            ("accuracy",),
            (1,),
            (3,),
            "accuracy",
        ),
    ),
}

"""Former words of stored results, and what the rendered pages write instead."""

from __future__ import annotations

import re

# Stored results keep the words with which they were computed. A pattern, then its replacement.
RENAMED: tuple[tuple[str, str], ...] = (
    (r"\btold apart\b", "re-identified"),
    (r"\bTold apart\b", "Re-identified"),
    (r"\btells (\d+%) of the images apart", r"re-identifies \1 of the images"),
    (r"\bstream, as they stand\b", "stream, norms not folded"),
    (r"\bas they stand\b", "unmatched"),
    (r"\bas the clients stand\b", "unmatched"),
    (r"\blocked, as it stands\b", "locked, unchanged"),
    (r"\bas it stands\b", "unchanged"),
    (r"\blabels told\b", "labels recovered"),
    (r"\bspreads stand with the findings\b", "spreads are listed with the findings"),
    (r"What they do not get, a better one may\.", "A stronger attack may recover more."),
    (r"\bmoved model, normal input\b", "permuted weights, plain input"),
    (r"\bmoved model, wrong key\b", "permuted weights, wrong key"),
    (r"\bMoved features\b", "Transformed features"),
    (r"\bNothing but the locked file\b", "The locked file alone"),
    (r"\bedges kept\b", "embedding and head kept"),
    (r"\bnew edges\b", "new embedding and head"),
    (r"\bthe control is who has no key\b", "the control has no key"),
    (r"\bwhoever has the base recovers\b", "an adversary with the base recovers"),
    (r"\bin what no key changes\b", "in the invariants under every key"),
    (
        r", which anybody can have; and how surely what no key changes tells that base",
        ", which is public; and how surely the invariants identify that base",
    ),
    (r"\bWhoever says the middle for every place is\b", "Guessing the middle for every place is"),
    (r"\b(model|them) is told which\b", r"\1 knows which"),
    (
        r"\bis no element: the moved model is another function",
        "is not an element: the transformed model computes another function",
    ),
    (r"\bwhich is not told\b", "which does not know"),
    (r"\bk = 0 is no matching\b", "k = 0 means unmatched"),
    (r"\b(which )?nobody had( seen)?\b", "unseen"),
    (r"\bBeyond paper 00[023]: ", "Beyond the paper: "),
    (r"\bPaper 00[023]: w", "W"),
    (r"\b[Pp]aper 00[023]\b", "the paper"),
    (r"\bin 000\b", "in the paper"),
    (r"\b(?:as )?00[023] had it\b", "as in the paper"),
    (r"(?<![\d,.])\b00[023]'s\b", "the paper's"),
    (r"(?<![\d,.])\b00[023] (\(its ViT\)|without|\+)", r"paper \1"),
    (r"(?<![\d,.])\b00[023]: ", "paper: "),
    (
        r"Images: of how many images one thing that the server sees is made\.",
        "Images: the number of images in one update.",
    ),
    (
        (
            r"FFT2D is the cosine distance done right, which is that of the pixels\. Empty: the "
            r"attack had nothing to work with\."
        ),
        (
            "FFT2D is a cosine distance, here corrected: it equals that of the pixels. Empty: the "
            "attack does not apply."
        ),
    ),
    (r"Empty: no attack had anything to work with\.", "Empty: no attack applies."),
    (r"\bof the attack that gets most\b", "by the strongest attack"),
    (
        (
            r"The list of recipes was settled while seed 0 was looked at; the other seeds, which "
            r"divide the images otherwise, came after it\."
        ),
        (
            "The recipes were chosen with seed 0; the other seeds divide the images differently "
            "and were run afterwards."
        ),
    ),
    (r"Random weights stand where the paper has ViT-S\.", "Random weights replace its ViT-S."),
    (r"\bfloat32 but where it says otherwise\b", "float32 unless stated otherwise"),
    (r"\(a\) to \(c\) are against what the model read,", "(a) to (c) compare with the input,"),
    (r"Nothing is lost by it: the backbone", "It costs no accuracy: the backbone"),
    (r"\bNothing of the images but their low frequencies, up to", "Low frequencies only, up to"),
    (r"What is exactly zero, as a bottleneck leaves it, stays\.", "Exact zeros stay."),
    (
        r"\beach place of the image asks all tokens, in whatever order they come\b",
        "each place of the image attends to all tokens, in any order",
    ),
    (
        r"\bover a sample's tokens, which no order changes; its answer need not be affine\b",
        "over a sample's tokens, which do not depend on their order",
    ),
    (r"\bnone is split learning as it is\.", "none is plain split learning."),
    (
        (
            r"A step moves the stream up and its output down, the output's gradient up and the "
            r"stream's down; masks and tables are the rest\."
        ),
        (
            "A step sends the stream and the output's gradient, and receives the output and the "
            "stream's gradient; the rest is masks and tables."
        ),
    ),
    (r"\bThe ends\b", "The end models"),
    (
        r"\bthe bigram is tuned on the test\. A guess knows how often each class is\.",
        "the bigram is tuned on the test data; a guess knows the class frequencies.",
    ),
    (r"\bthe ceiling is FedAvg as it is\b", "the control is plain FedAvg"),
    (r"\bdB above floor\b", "dB above the baseline"),
    (r"\bfloor\b", "baseline"),
    (r"\b([Cc])lients that begin apart\b", r"\1lients with different initializations"),
    (r"\bceiling\b", "control"),
)


def renamed(text: str) -> str:
    """Replace former words of stored results."""
    for pattern, new in RENAMED:
        text = re.sub(pattern, new, text)
    return text

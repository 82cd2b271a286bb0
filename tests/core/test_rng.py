"""Random streams: exact test vectors, the definition step by step, and the right distributions."""

from __future__ import annotations

import hmac
import itertools
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from regauge.core.rng import Stream, hkdf, seed_key

KEY = bytes(range(32))


def below(stream: Stream, n: int) -> int:
    """A uniform integer in [0, n), word by word as the definition has it."""
    while (word := int(stream.words(1)[0])) >= 2**64 - 2**64 % n:
        pass
    return word % n


@pytest.mark.parametrize(
    ("ikm", "salt", "info", "okm"),
    [  # RFC 5869, A.1 to A.3: the first 32 bytes, of which HKDF's first block consists
        (
            "0b" * 22,
            "000102030405060708090a0b0c",
            "f0f1f2f3f4f5f6f7f8f9",
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf",
        ),
        (
            bytes(range(0x50)).hex(),
            bytes(range(0x60, 0xB0)).hex(),
            bytes(range(0xB0, 0x100)).hex(),
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c",
        ),
        ("0b" * 22, "", "", "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"),
    ],
)
def test_hkdf_has_the_values_of_its_rfc(ikm: str, salt: str, info: str, okm: str) -> None:
    assert hkdf(bytes.fromhex(ikm), bytes.fromhex(info), bytes.fromhex(salt)).hex() == okm


def test_hkdf_is_what_version_1_had() -> None:
    """Extract and expand by hand, as files of version 1 were made."""
    for key, info, salt in (
        (KEY, b"regauge/1/x", b""),
        (KEY, b"regauge/1/lock/data", bytes(range(32))),
        (b"", b"", b"s"),
        (bytes(100), b"i" * 99, bytes(80)),
    ):
        extracted = hmac.digest(salt or bytes(32), key, "sha256")
        assert hkdf(key, info, salt) == hmac.digest(extracted, info + b"\x01", "sha256")


def test_hkdf_matches_the_library() -> None:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    assert hkdf(KEY, b"info") == HKDF(SHA256(), 32, salt=None, info=b"info").derive(KEY)


def test_vectors() -> None:
    """Committed vectors (docs/formats-keys.md): another language must get these."""
    assert seed_key(0).hex() == "dc82b1960114284231971f273a173292479db9915f1c5a7dfab17cf84f121452"
    assert Stream(KEY, "test").bytes(16).hex() == "ff3d60d5291205ae164cd5e36e7e8c72"
    assert Stream(KEY, "test").permutation(10).tolist() == [8, 9, 7, 4, 0, 1, 5, 6, 2, 3]
    assert Stream(KEY, "test").signs(8).tolist() == [-1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 1.0]
    assert [below(Stream(KEY, "test"), n) for n in (2, 10, 2**33)] == [1, 3, 7874821631]
    np.testing.assert_allclose(
        Stream(KEY, "test").uniforms(3),
        [0.6797648765690391, 0.4474562664725755, 0.3765697768168278],
        rtol=0,
        atol=1e-15,
    )
    np.testing.assert_allclose(
        Stream(KEY, "test").normals(3),
        [-0.831194708781226, 0.28483675465988606, -0.8692077342361199],
        rtol=0,
        atol=1e-12,
    )


def test_labels_and_keys_separate_streams() -> None:
    outputs = {Stream(k, label).bytes(16) for k in (KEY, bytes(32)) for label in ("a", "b")}
    assert len(outputs) == 4


class Fixed(Stream):
    """A stream that gives out chosen words."""

    def __init__(self, words: list[int]) -> None:
        self.left = list(words)

    def bytes(self, n: int) -> bytes:
        taken, self.left = self.left[: n // 8], self.left[n // 8 :]
        return b"".join(w.to_bytes(8, "little") for w in taken)


def test_words_beyond_the_last_multiple_are_dropped() -> None:
    top = 2**64 - 1  # 2^64 mod 3 is 1: the largest word is biased and must be dropped
    assert below(Fixed([top, 7]), 3) == 1
    assert Fixed([top, 7, 0]).permutation(3).tolist() == Fixed([7, 0]).permutation(3).tolist()


def test_permutation_is_fisher_yates_from_the_top() -> None:
    # i = 3: j = 1; i = 2: j = 2; i = 1: j = 0
    assert Fixed([5, 2, 4]).permutation(4).tolist() == [3, 0, 2, 1]


@pytest.mark.parametrize("n", [1, 2, 3, 100, 1000])
def test_permutations_are_those_of_the_definition(n: int) -> None:
    """All words are read at once; the definition takes them one by one."""
    slow, order = Stream(KEY, "test"), list(range(n))
    for i in range(n - 1, 0, -1):
        j = below(slow, i + 1)
        order[i], order[j] = order[j], order[i]
    fast = Stream(KEY, "test")
    assert fast.permutation(n).tolist() == order
    assert fast.bytes(8) == slow.bytes(8)


def test_small_permutations_are_uniform() -> None:
    stream = Stream(seed_key(1), "chi")
    counts = Counter(tuple(stream.permutation(4).tolist()) for _ in range(12000))
    observed = [counts[p] for p in itertools.permutations(range(4))]
    assert stats.chisquare(observed).pvalue > 1e-4


@pytest.mark.parametrize(("draw", "law"), [("uniforms", "uniform"), ("normals", "norm")])
def test_reals_have_their_law(draw: str, law: str) -> None:
    sample = getattr(Stream(seed_key(2), draw), draw)(20000)
    assert stats.kstest(sample, law).pvalue > 1e-4


def test_signs_are_fair() -> None:
    signs = Stream(seed_key(3), "signs").signs(20000)
    assert set(signs) == {-1.0, 1.0}
    assert abs(signs.mean()) < 0.03


def test_uniforms_never_touch_the_ends() -> None:
    assert Fixed([0]).uniforms(1)[0] > 0
    assert Fixed([2**64 - 1]).uniforms(1)[0] < 1


def test_the_documented_vectors_are_these() -> None:
    """docs/formats-keys.md lists what this code draws."""
    from pathlib import Path

    text = (Path(__file__).parents[2] / "docs" / "formats-keys.md").read_text()

    def row(draw: str) -> str:
        return (
            next(line for line in text.splitlines() if line.startswith(f"| {draw} |"))
            .split("|")[2]
            .strip()
        )

    def fresh() -> Stream:
        return Stream(KEY, "test")

    assert row("key of seed 0") == f"`{seed_key(0).hex()}`"
    assert row("16 bytes") == f"`{fresh().bytes(16).hex()}`"
    assert row("permutation of 10") == str(fresh().permutation(10).tolist())[1:-1]
    assert row("8 signs") == str(fresh().signs(8).astype(int).tolist())[1:-1]
    assert (
        row("below(2), below(10), below(2^33)")
        == str([below(fresh(), n) for n in (2, 10, 2**33)])[1:-1]
    )
    np.testing.assert_allclose(
        [float(x) for x in row("3 uniforms").split(",")], fresh().uniforms(3), rtol=0, atol=1e-15
    )
    np.testing.assert_allclose(
        [float(x) for x in row("3 normals").split(",")], fresh().normals(3), rtol=0, atol=1e-12
    )

"""Random numbers that mean the same in every version, on every machine, in every language.

A `Stream` is the ChaCha20 keystream (RFC 8439, zero nonce, counter from 0) under the key
HKDF-SHA256(ikm = key, salt = empty, info = "regauge/1/" + label). Words are 64-bit little-endian,
taken in order:

    below(n)      the next word w with w < 2^64 - (2^64 mod n), mod n; other words are dropped
    permutation   Fisher-Yates from the top: for i = n-1 .. 1 swap i with below(i + 1), starting
    from 0 .. n-1
    signs         bit 63 of a word: set is -1
    uniform       ((w >> 12) + 1/2) / 2^52, which is exact and never 0 or 1
    normal        Box-Muller on pairs of uniforms (u, v): sqrt(-2 ln u) cos(2 pi v), then sqrt(-2 ln
    u) sin(2 pi v)

`docs/formats.md` has test vectors.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from regauge.errors import ElementError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def seed_key(seed: int) -> bytes:
    """The 32-byte key of a public seed: SHA-256 of "regauge seed " and the decimal number. For
    experiments, never for secrets.
    """
    return hashlib.sha256(f"regauge seed {seed}".encode()).digest()


def hkdf(key: bytes, info: bytes, salt: bytes = b"") -> bytes:
    """HKDF-SHA256 (RFC 5869) with 32 bytes of output. An empty salt is 32 zero bytes."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return bytes(HKDF(SHA256(), 32, salt or None, info).derive(key))


def secret_of(key: bytes | int) -> bytes:
    """Return 32 secret bytes: the key itself, or the key of a public seed."""
    given: object = key
    if isinstance(given, bytes) and len(given) == 32:
        return given
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        return seed_key(int(given))
    raise ElementError(
        "a key is 32 bytes, or a whole number as a public seed", hint="os.urandom(32) makes one"
    )


class Stream:
    """The keystream of one (key, label) pair, and the draws on it that the module's docstring
    specifies.
    """

    def __init__(self, key: bytes, label: str) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        derived = hkdf(key, b"regauge/1/" + label.encode())
        self._chacha = Cipher(ChaCha20(derived, bytes(16)), mode=None).encryptor()

    def bytes(self, n: int) -> bytes:
        """The next n bytes."""
        return self._chacha.update(bytes(n))

    def words(self, n: int) -> npt.NDArray[np.uint64]:
        """The next n 64-bit words."""
        return np.frombuffer(self.bytes(8 * n), dtype="<u8")

    def permutation(self, n: int) -> Ints:
        """A uniform permutation of n things."""
        order = list(range(n))
        i = n - 1
        while i >= 1:
            # One read for all that is left. A rejected word (probability below n / 2^64) only means
            # that one more is read later.
            for word in self.words(i).tolist():
                if word < 2**64 - 2**64 % (i + 1):
                    j = word % (i + 1)
                    order[i], order[j] = order[j], order[i]
                    i -= 1
        return np.array(order, dtype=np.int64)

    def signs(self, n: int) -> Floats:
        """n independent signs, +1.0 or -1.0."""
        return np.where(self.words(n) >> np.uint64(63) == 1, -1.0, 1.0)

    def uniforms(self, n: int) -> Floats:
        """n uniform numbers strictly between 0 and 1."""
        return ((self.words(n) >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52

    def normals(self, n: int) -> Floats:
        """n standard normal numbers."""
        pairs = self.uniforms(2 * ((n + 1) // 2)).reshape(-1, 2)
        radius, angle = np.sqrt(-2 * np.log(pairs[:, 0])), 2 * np.pi * pairs[:, 1]
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:n]

"""Random numbers that are the same in every version, on every machine, in every language.

A `Stream` is the ChaCha20 keystream (RFC 8439, zero nonce, counter from 0) under the key
HKDF-SHA256(ikm = key, salt = empty, info = "regauge/1/" + label). Words are 64-bit little-endian,
taken in order:

    below(n)      the next word w with w < 2^64 - (2^64 mod n), mod n; other words are dropped
    permutation   Fisher-Yates from the top, starting from 0 .. n-1: for i = n-1 .. 1 swap i with
                  below(i + 1)
    signs         bit 63 of a word: set is -1
    uniform       ((w >> 12) + 1/2) / 2^52, which is exact and never 0 or 1
    normal        Box-Muller on pairs of uniforms (u, v): sqrt(-2 ln u) cos(2 pi v), then
                  sqrt(-2 ln u) sin(2 pi v)

`docs/formats-keys.md` has test vectors.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from regauge.errors import ElementError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def seed_key(seed: int) -> bytes:
    """Return the 32-byte key of a public seed: SHA-256 of "regauge seed " and the decimal number.
    For experiments, never for secrets.
    """
    return hashlib.sha256(f"regauge seed {seed}".encode()).digest()


def hkdf(key: bytes, info: bytes, salt: bytes = b"") -> bytes:
    """Derive 32 bytes by HKDF-SHA256 (RFC 5869). An empty salt means 32 zero bytes."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return bytes(HKDF(SHA256(), 32, salt or None, info).derive(key))


def secret_of(key: bytes | int) -> bytes:
    """Return 32 secret bytes: the key itself, or the key of a public seed."""
    value: object = key  # callers may pass anything
    if isinstance(value, bytes) and len(value) == 32:
        return value
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return seed_key(int(value))
    got = f"{len(value)} bytes" if isinstance(value, bytes) else type(value).__name__
    raise ElementError(
        f"a key must be 32 bytes, or a whole number as a public seed, got {got}",
        hint="os.urandom(32) makes a key",
    )


class Stream:
    """The keystream of one (key, label) pair, with the random numbers specified in the module's
    docstring.
    """

    def __init__(self, key: bytes, label: str) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        derived = hkdf(key, b"regauge/1/" + label.encode())
        self._chacha = Cipher(ChaCha20(derived, bytes(16)), mode=None).encryptor()

    def bytes(self, n: int) -> bytes:
        """Return the next n bytes."""
        return self._chacha.update(bytes(n))

    def words(self, n: int) -> npt.NDArray[np.uint64]:
        """Return the next n 64-bit words."""
        return np.frombuffer(self.bytes(8 * n), dtype="<u8")

    def permutation(self, n: int) -> Ints:
        """Sample a uniform permutation of 0 .. n-1."""
        order = list(range(n))
        i = n - 1
        while i >= 1:
            # Read all remaining words at once. A rejected word (probability below n / 2^64) only
            # means that another is read later.
            for word in self.words(i).tolist():
                if word < 2**64 - 2**64 % (i + 1):
                    j = word % (i + 1)
                    order[i], order[j] = order[j], order[i]
                    i -= 1
        return np.array(order, dtype=np.int64)

    def signs(self, n: int) -> Floats:
        """Sample n independent signs, +1.0 or -1.0."""
        return np.where(self.words(n) >> np.uint64(63) == 1, -1.0, 1.0)

    def uniforms(self, n: int) -> Floats:
        """Sample n uniform numbers strictly between 0 and 1."""
        return ((self.words(n) >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52

    def normals(self, n: int) -> Floats:
        """Sample n standard normal numbers."""
        pairs = self.uniforms(2 * ((n + 1) // 2)).reshape(-1, 2)
        radius, angle = np.sqrt(-2 * np.log(pairs[:, 0])), 2 * np.pi * pairs[:, 1]
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).reshape(-1)[:n]

"""Files sealed to recipients: each identity opens them, no other does, and every change of the
header is found before anything appears.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

import regauge
from regauge.core.canonical import canonical_json
from regauge.core.rng import seed_key
from regauge.errors import (
    KeyFileError,
    LockError,
    RegaugeError,
    TamperedFileError,
    WrongKeyError,
)
from regauge.locking import recipients
from regauge.locking.keys import Key, load_key, save_key
from regauge.locking.recipients import unwrap_file_key
from regauge.locking.seal import open_sealed, purpose_of, seal
from support.cli_runs import Run, run

__all__ = ["run"]

ALICE, BOB, EVE = (Key(seed_key(n), "receive") for n in (1, 2, 3))
START = len("regauge sealed 2\n")
TEXT = bytes(range(256)) * 4


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A file for two recipients."""
    (tmp_path / "in").write_bytes(TEXT)
    seal(tmp_path / "in", out=tmp_path / "sealed", to=[ALICE.recipient, BOB.recipient])
    return tmp_path / "sealed"


def header_end(data: bytes) -> int:
    return START + 4 + int.from_bytes(data[START : START + 4], "little")


def with_header(data: bytes, **changes: object) -> bytes:
    """The same file with other fields in its header."""
    end = header_end(data)
    raw = canonical_json(json.loads(data[START + 4 : end]) | changes)
    return data[:START] + len(raw).to_bytes(4, "little") + raw + data[end:]


def stanzas_of(data: bytes) -> list[str]:
    return list(json.loads(data[START + 4 : header_end(data)])["recipients"])


def assert_rejected(path: Path, data: bytes, key: Key = ALICE) -> RegaugeError:
    """Opening this is an error, and leaves nothing."""
    path.write_bytes(data)
    before = sorted(p.name for p in path.parent.iterdir())
    with pytest.raises(RegaugeError) as error:
        open_sealed(path, key, path.parent / "out")
    assert sorted(p.name for p in path.parent.iterdir()) == before
    return error.value


@pytest.mark.parametrize("identities", [[ALICE], [ALICE, BOB], [BOB, EVE, ALICE, BOB]])
def test_each_identity_opens_a_folder(tmp_path: Path, identities: list[Key]) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "sub" / "weights").write_bytes(TEXT)
    seal(tmp_path / "in", out=tmp_path / "s", to=[i.recipient for i in identities])
    data = (tmp_path / "s").read_bytes()
    assert data.startswith(b"regauge sealed 2\n")
    assert len(stanzas_of(data)) == len(set(identities)), "once each"
    assert TEXT[:32] not in data
    assert purpose_of(tmp_path / "s") == "receive"
    for number, identity in enumerate(identities):
        assert open_sealed(tmp_path / "s", identity, tmp_path / f"{number}") == ["sub/weights"]
        assert (tmp_path / f"{number}" / "sub" / "weights").read_bytes() == TEXT
    assert (tmp_path / "s").stat().st_mode & 0o077 == 0


def test_others_are_rejected(sealed: Path) -> None:
    data = sealed.read_bytes()
    error = assert_rejected(sealed, data, EVE)
    assert isinstance(error, WrongKeyError)
    assert f"the identity {EVE.id} is not a recipient of" in str(error)
    for purpose in ("seal", "lock"):  # the same secret, for another use
        error = assert_rejected(sealed, data, Key(seed_key(1), purpose))
        assert isinstance(error, KeyFileError)
        assert f'must be "receive", got "{purpose}"' in str(error)
    seal(sealed.with_name("in"), Key(seed_key(1), "seal"), sealed.with_name("old"))
    error = assert_rejected(sealed.with_name("old"), sealed.with_name("old").read_bytes())
    assert 'must be "seal", got "receive"' in str(error)


def test_recipients_are_anonymous(sealed: Path) -> None:
    data = sealed.read_bytes()
    for identity in (ALICE, BOB):
        assert identity.id.encode() not in data
        assert identity.recipient.encode() not in data
    seal(sealed.with_name("in"), out=sealed.with_name("again"), to=[ALICE.recipient])
    assert not set(stanzas_of(data)) & set(stanzas_of(sealed.with_name("again").read_bytes()))


def test_every_byte_of_the_header_is_authenticated(sealed: Path) -> None:
    good = sealed.read_bytes()
    end = header_end(good) + 32
    # hexadecimal digits that stay digits, in the stanza that is not opened, are changes too
    for i in [*range(START), *range(START, end, 3), end, len(good) - 1]:
        bad = bytearray(good)
        bad[i] ^= 1
        error = assert_rejected(sealed, bytes(bad))
        expected = TamperedFileError | WrongKeyError if i >= START else LockError
        assert isinstance(error, expected), i
    for n in (START - 1, START, START + 2, START + 40, end - 32, end - 1, end, len(good) - 1):
        assert isinstance(assert_rejected(sealed, good[:n]), LockError), n
    assert isinstance(assert_rejected(sealed, good + b"x"), TamperedFileError)


def test_damaged_stanzas(sealed: Path) -> None:
    good = sealed.read_bytes()
    first, second = stanzas_of(good)
    for damaged in (
        [],
        [first],
        [second],
        [second, first],
        [first, second, first],
        [first, second[:-2]],
        [first.upper(), second],
        [first + " ", second],
        [first, 1],
        [first] * 257,
        first,
        None,
        {},
    ):
        error = assert_rejected(sealed, with_header(good, recipients=damaged))
        assert isinstance(error, TamperedFileError) or damaged == [second], damaged
    low = "00" * 32 + second[64:]  # an ephemeral key of low order
    assert isinstance(
        assert_rejected(sealed, with_header(good, recipients=[low, second])), WrongKeyError
    )


def test_a_stanza_belongs_to_its_file(sealed: Path) -> None:
    """Bound by the salt to the file, and by the HMAC to all of its header."""
    (sealed.with_name("in2")).write_bytes(TEXT[::-1])
    seal(sealed.with_name("in2"), out=sealed.with_name("other"), to=[ALICE.recipient])
    good, other = sealed.read_bytes(), sealed.with_name("other").read_bytes()
    swapped = with_header(good, recipients=[stanzas_of(other)[0], stanzas_of(good)[1]])
    assert isinstance(assert_rejected(sealed, swapped), WrongKeyError)
    assert isinstance(assert_rejected(sealed, swapped, BOB), TamperedFileError)
    salt = json.loads(other[START + 4 : header_end(other)])["salt"]
    moved = with_header(swapped, salt=salt)
    assert isinstance(assert_rejected(sealed, moved), TamperedFileError)


VERSION_1 = "6aef564a2f679225146fb98588ebf4932a81ef5d63926affa0e76e297cc7ada6"


def test_files_of_a_key_have_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = Key(seed_key(1), "seal")
    (tmp_path / "in").write_bytes(TEXT)
    (tmp_path / "in").chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setattr("os.urandom", lambda n: bytes(range(n)))
        seal(tmp_path / "in", key, tmp_path / "sealed")
    data = (tmp_path / "sealed").read_bytes()
    assert hashlib.sha256(data).hexdigest() == VERSION_1, "as written before recipients"
    assert data.startswith(b"regauge sealed 1\n")
    assert purpose_of(tmp_path / "sealed") == "seal"
    open_sealed(tmp_path / "sealed", key, tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == TEXT
    relabelled = data.replace(b"sealed 1\n", b"sealed 2\n").replace(b'"version":1', b'"version":2')
    assert isinstance(assert_rejected(tmp_path / "sealed", relabelled), TamperedFileError)


def labeled_expand(prk: bytes, suite: bytes, label: bytes, info: bytes, n: int) -> bytes:
    info = n.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info
    return HKDFExpand(SHA256(), n, info).derive(prk)


def labeled_extract(salt: bytes, suite: bytes, label: bytes, value: bytes) -> bytes:
    return hmac.digest(salt, b"HPKE-v1" + suite + label + value, "sha256")


def hpke(shared: bytes, enc: bytes, public: bytes, info: bytes) -> tuple[ChaCha20Poly1305, bytes]:
    """Return the cipher and the nonce of RFC 9180 in base mode, from HMAC and HKDF alone."""
    kem, suite = b"KEM" + bytes([0, 0x20]), b"HPKE" + bytes([0, 0x20, 0, 1, 0, 3])
    eae = labeled_extract(b"", kem, b"eae_prk", shared)
    secret = labeled_expand(eae, kem, b"shared_secret", enc + public, 32)
    context = b"\0" + labeled_extract(b"", suite, b"psk_id_hash", b"")
    context += labeled_extract(b"", suite, b"info_hash", info)
    prk = labeled_extract(secret, suite, b"secret", b"")
    key = labeled_expand(prk, suite, b"key", context, 32)
    return ChaCha20Poly1305(key), labeled_expand(prk, suite, b"base_nonce", context, 12)


def derived(secret: bytes, label: bytes, salt: bytes | None) -> bytes:
    return HKDF(SHA256(), 32, salt, b"regauge/1/" + label).derive(secret)


STANZA = (
    "675dd574ed7789310b3d2e7681f3790b466c773b1521fecf36577958371ea52ff06236c9c642068b"
    "f9317320baf76e503514c34618b47551bd0a6e0ff9052c097b815cc676e93f17bbc4a067c0cf386b"
)


def test_the_key_wrapping_is_what_the_page_says() -> None:
    """A known answer, from the primitives: a change would leave older files closed."""
    secret, salt, file_key = bytes(range(32)), bytes(range(32, 64)), bytes(range(64, 96))
    identity = Key(secret, "receive")
    private = X25519PrivateKey.from_private_bytes(derived(secret, b"receive/x25519", None))
    public = private.public_key().public_bytes_raw()
    check = hashlib.sha256(b"regauge recipient " + public).digest()[:4]
    digits = base64.b32encode(public + check).decode().rstrip("=").lower()
    assert identity.recipient == f"regauge1{digits}"
    ephemeral = X25519PrivateKey.from_private_bytes(bytes(range(96, 128)))
    enc = ephemeral.public_key().public_bytes_raw()
    shared = ephemeral.exchange(private.public_key())
    cipher, nonce = hpke(shared, enc, public, b"regauge/1/seal/recipient" + salt)
    stanza = enc + cipher.encrypt(nonce, file_key, b"")
    assert stanza.hex() == STANZA
    assert unwrap_file_key(stanza, identity, salt) == file_key
    assert unwrap_file_key(stanza, identity, bytes(32)) is None
    assert unwrap_file_key(stanza, ALICE, salt) is None


def test_the_format_is_what_the_page_says(sealed: Path) -> None:
    data = sealed.read_bytes()
    end = header_end(data)
    start, tag, chunks = data[:end], data[end : end + 32], data[end + 32 :]
    header = json.loads(start[START + 4 :])
    salt, stanzas = bytes.fromhex(header["salt"]), header["recipients"]
    assert header == {"version": 2, "kind": "file", "salt": salt.hex(), "recipients": stanzas}
    stanza = bytes.fromhex(stanzas[1])
    private = X25519PrivateKey.from_private_bytes(derived(seed_key(2), b"receive/x25519", None))
    shared = private.exchange(X25519PublicKey.from_public_bytes(stanza[:32]))
    public = private.public_key().public_bytes_raw()
    cipher, nonce = hpke(shared, stanza[:32], public, b"regauge/1/seal/recipient" + salt)
    file_key = cipher.decrypt(nonce, stanza[32:], b"")
    assert hmac.digest(derived(file_key, b"seal/header", salt), start, "sha256") == tag
    plain = ChaCha20Poly1305(derived(file_key, b"seal/chunks", salt)).decrypt(
        bytes(11) + b"\1", chunks, tag
    )
    assert TEXT in plain


def test_identity_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "id"
    save_key(ALICE, path, "word", scrypt={"n": 16, "r": 8, "p": 1})
    assert json.loads(path.read_text())["version"] == 2, "older readers name the version"
    assert load_key(path, "receive", "word").recipient == ALICE.recipient
    with pytest.raises(KeyFileError, match='must be "seal", got "receive"'):
        load_key(path, "seal", "word")
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))
    with pytest.raises(KeyFileError, match="not a usable key file"):
        load_key(path, "receive", "word")
    path.unlink()
    save_key(ALICE, path)
    (tmp_path / "in").write_bytes(TEXT)
    seal(tmp_path / "in", out=tmp_path / "sealed", to=ALICE.recipient)
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match="can be read by others"):
        open_sealed(tmp_path / "sealed", path, tmp_path / "out")
    path.chmod(0o600)
    open_sealed(tmp_path / "sealed", path, tmp_path / "out")
    with pytest.raises(KeyFileError, match='must be "receive", got "seal"'):
        _ = Key(seed_key(1), "seal").recipient


def test_bad_recipients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").write_bytes(TEXT)
    save_key(ALICE, tmp_path / "id")
    secret = seed_key(1).hex()
    (tmp_path / "secret").write_text(secret)
    (tmp_path / "none").write_text("# nobody\n\n")
    typo = ALICE.recipient[:-5] + ("a" if ALICE.recipient[-5] != "a" else "b") + "aaaa"
    low = bytes(32) + hashlib.sha256(b"regauge recipient " + bytes(32)).digest()[:4]
    point = "regauge1" + base64.b32encode(low).decode().rstrip("=").lower()
    for to, why in (
        (tmp_path / "id", "is a private key; a recipient must be public"),
        (str(tmp_path / "id"), "is a private key"),
        (ALICE, f"must be public, got the key {ALICE.id}"),
        (typo, "is not a valid recipient"),
        (ALICE.recipient.upper(), "neither a recipient"),
        (ALICE.recipient + "aa", "is not a valid recipient"),
        (point, "is not a valid recipient"),
        ("regauge1é", "is not a valid recipient"),
        (secret, "neither a recipient"),
        ("a\0b", "neither a recipient"),
        (tmp_path / "secret", "line 1 of .* is not a valid recipient"),
        (tmp_path / "none", "a recipient per line, got none"),
        (tmp_path, "is not a regular file"),
        (3, "must be a string or a path, got int"),
        ([], "got neither"),
    ):
        to_list = to if isinstance(to, list) else [to]
        with pytest.raises(KeyFileError, match=why) as error:
            seal(tmp_path / "in", out=tmp_path / "x", to=to_list)
        assert secret[:16] not in f"{error.value} {error.value.hint}"
    with pytest.raises(KeyFileError, match="got both"):
        seal(tmp_path / "in", Key(bytes(32), "seal"), tmp_path / "x", to=ALICE.recipient)
    monkeypatch.setattr(recipients, "MAX_RECIPIENTS", 1)
    with pytest.raises(KeyFileError, match="must be from 1 to 1, got 2"):
        seal(tmp_path / "in", out=tmp_path / "x", to=[ALICE.recipient, BOB.recipient])
    assert not (tmp_path / "x").exists()


def test_a_file_of_recipients(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(TEXT)
    (tmp_path / "team").write_text(f"# Alice\n{ALICE.recipient}\r\n\n  {BOB.recipient}  ")
    seal(tmp_path / "in", out=tmp_path / "sealed", to=tmp_path / "team")
    regauge.open_sealed(tmp_path / "sealed", BOB, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == TEXT


def test_the_command_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(TEXT)
    made = run("keygen", "--purpose", "receive", "-o", tmp_path / "id")
    assert made.code == 0
    assert (tmp_path / "id").stat().st_mode & 0o777 == 0o600
    recipient = load_key(tmp_path / "id", "receive").recipient
    assert made.out == f"{recipient}\n"
    assert made.err.splitlines()[-1].startswith("regauge: next: regauge open SEALED -k")
    shown = run("keygen", "--public", tmp_path / "id")
    assert (shown.code, shown.out, shown.err) == (0, f"{recipient}\n", "")
    assert json.loads(run("keygen", "--public", tmp_path / "id", "--json").out)["recipient"] == (
        recipient
    )
    (tmp_path / "team").write_text(f"{BOB.recipient}\n")
    result = run(
        *("seal", tmp_path / "in", "--to", recipient, "--to", tmp_path / "team"),
        *("-o", tmp_path / "sealed", "--json"),
    )
    assert result.code == 0
    assert "to 2 recipients" in result.err
    assert json.loads(result.out)["recipients"] == [recipient, BOB.recipient]
    opened = run("open", tmp_path / "sealed", "-k", tmp_path / "id", "-o", tmp_path / "out")
    assert opened.code == 0
    assert (tmp_path / "out").read_bytes() == TEXT
    assert run("seal", tmp_path / "in", "--to", tmp_path / "id", "-o", tmp_path / "x").code == 1
    for usage in (
        ["seal", tmp_path / "in", "-o", tmp_path / "x"],
        ["seal", tmp_path / "in", "-o", tmp_path / "x", "-k", "K", "--to", recipient],
        ["keygen", "--public", tmp_path / "id", "-o", tmp_path / "x"],
    ):
        assert run(*usage).code == 2
    assert run("keygen", "-o", tmp_path / "key", "--purpose", "seal").code == 0
    error = run("open", tmp_path / "sealed", "-k", tmp_path / "key", "-o", tmp_path / "x").err
    assert 'must be "receive", got "seal"' in error
    error = run("keygen", "--public", tmp_path / "key").err
    assert 'must be "receive", got "seal"' in error
    assert not (tmp_path / "x").exists()

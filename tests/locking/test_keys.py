"""Keys: what a file looks like, who may read it, what is refused, and that no secret byte ever
shows.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest

from regauge.checkpoints.files import is_key_file
from regauge.core.rng import Stream, hkdf
from regauge.errors import CheckpointError, KeyFileError, PassphraseError
from regauge.locking.keys import Key, generate_key, load_key, save_key

SECRET = bytes(range(32))
CHEAP = {"n": 16, "r": 8, "p": 1}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_key(Key(SECRET, "lock", "2026-11-16T00:00:00Z"), tmp_path / "key")
    return tmp_path / "key"


def rewrite(path: Path, **changes: Any) -> Path:
    fields = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({name: value for name, value in fields.items() if value is not None})
    )
    return path


def test_a_file_and_back(file: Path) -> None:
    assert json.loads(file.read_text()) == {
        "regauge": "key",
        "version": 1,
        "purpose": "lock",
        "id": "63e50f181f4dafe8",
        "created": "2026-11-16T00:00:00Z",
        "key": SECRET.hex(),
    }
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load_key(file, "lock") == Key(SECRET)
    assert load_key(file, "lock") != Key(SECRET, "seal")
    assert [p.name for p in file.parent.iterdir()] == ["key"]
    assert is_key_file(file)
    assert not is_key_file(file.parent)


def test_new_keys_differ_and_say_when() -> None:
    a, b = generate_key(), generate_key()
    assert a != b
    assert a.id != b.id
    assert a.created.endswith("Z")


def test_vectors() -> None:
    """Committed vectors (docs/formats-keys.md): another language must get these."""
    text = (Path(__file__).parents[2] / "docs" / "formats-keys.md").read_text()
    key, digest = Key(SECRET), bytes(range(32, 64))
    derived = key.derive("lock/element", digest)
    found = {
        "id for lock": key.id,
        "id for seal": Key(SECRET, "seal").id,
        "`lock/element`": derived.hex(),
        "`lock/structure`": key.derive("lock/structure", digest).hex(),
        "permutation of 10 on `stream`": str(
            Stream(derived, "element/stream").permutation(10).tolist()
        )[1:-1],
    }
    assert found == {
        "id for lock": "63e50f181f4dafe8",
        "id for seal": "6ab56468893b4dee",
        "`lock/element`": "b28815fa8de466b4f8e8801c97ec664a46007ef9ef89abb1e495ea0ac7d8db59",
        "`lock/structure`": "f964ecc0d39917aba004a3b5769115a850800b68cf9c7e8c15a91c955674e01c",
        "permutation of 10 on `stream`": "6, 0, 3, 4, 2, 5, 9, 1, 8, 7",
    }
    for name, value in found.items():
        assert f"| {name} | `{value}` |" in text, name


def test_hkdf_with_a_salt_matches_the_library() -> None:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    assert hkdf(SECRET, b"info", b"salt") == HKDF(SHA256(), 32, salt=b"salt", info=b"info").derive(
        SECRET
    )


def test_nothing_shows_the_secret(file: Path) -> None:
    key = load_key(file, "lock")
    shown = [repr(key), str(key), f"{key}", repr([key]), repr(vars(type(key)).keys())]
    with pytest.raises(KeyFileError) as refused:
        pickle.dumps(key)
    shown.append(str(refused.value))
    for damage in (
        {"key": SECRET.hex()[:-1] + "g"},
        {"key": SECRET.hex()[:-2]},
        {"id": "0" * 16},
        {"purpose": SECRET.hex()},
        {"version": None},
    ):
        save_key(key, file.with_name("other"))
        with pytest.raises(KeyFileError) as refused:
            load_key(rewrite(file.with_name("other"), **damage), "lock")
        shown += [str(refused.value), str(refused.value.hint), repr(refused.value.__cause__)]
        file.with_name("other").unlink()
    file.write_text(
        file.read_text().replace('"key":', '"key"')
    )  # JSON's own error would quote the place
    with pytest.raises(KeyFileError) as refused:
        load_key(file, "lock")
    shown += [str(refused.value), repr(refused.value.__cause__)]
    assert not any(SECRET.hex()[:8] in text or repr(SECRET)[2:12] in text for text in shown)
    assert not hasattr(key, "__dict__")


def test_copies_are_the_same_key(file: Path) -> None:
    key = load_key(file, "lock")
    assert copy.deepcopy({"key": key})["key"] is key
    assert len({key, load_key(file, "lock")}) == 1


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_looser_mode_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(KeyFileError, match="can be read by others") as refused:
        load_key(file, "lock")
    assert refused.value.hint == f"chmod 600 {file}"
    file.chmod(0o400)
    assert load_key(file, "lock") == Key(SECRET)
    file.chmod(0o600)
    file.write_text("a shopping list")
    file.chmod(mode)
    with pytest.raises(
        KeyFileError, match="is not a usable key file"
    ) as refused:  # no chmod hint for a file that is not a key
        load_key(file, "lock")


def test_a_key_is_never_written_over(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = file.read_bytes()
    with pytest.raises(KeyFileError, match="exists already"):
        save_key(generate_key(), file)
    file.with_name("link").symlink_to(file.with_name("nowhere"))
    with pytest.raises(KeyFileError, match="exists already"):
        save_key(generate_key(), file.with_name("link"))
    assert file.read_bytes() == before
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_key(generate_key(), file.parent / "absent" / "key")
    monkeypatch.setattr(
        os.path, "lexists", lambda path: False
    )  # as if it had appeared since it was looked for
    with pytest.raises(CheckpointError, match="exists already"):
        save_key(generate_key(), file)
    assert file.read_bytes() == before


def test_a_key_for_another_purpose_is_rejected(file: Path) -> None:
    with pytest.raises(KeyFileError, match='must be "seal", got "lock"'):
        load_key(file, "seal")
    with pytest.raises(KeyFileError, match='must be "seal", got "lock"'):
        Key(SECRET).require("seal")


def test_files_without_a_key_are_rejected(tmp_path: Path, file: Path) -> None:
    def refused(path: Path, why: str) -> None:
        with pytest.raises(KeyFileError, match=why):
            load_key(path, "lock")

    refused(tmp_path / "absent", "cannot be read: No such file")
    refused(tmp_path, "not a regular file")
    refused(Path("a\0b"), "not a usable path")
    os.mkfifo(tmp_path / "pipe", 0o600)
    refused(tmp_path / "pipe", "not a regular file")
    (tmp_path / "huge").touch(0o600)
    os.truncate(tmp_path / "huge", 1 << 40)
    refused(tmp_path / "huge", "got 1099511627776")
    for text in (
        "",
        "[]",
        "{}",
        "\ufeff{",
        "[" * 60000,
        '{"regauge": "key", "regauge": "key"}',
        "9" * 6000,
    ):
        file.write_text(text)
        refused(file, "not a usable key file")
    save_key(Key(SECRET), tmp_path / "twice")
    (tmp_path / "twice").write_text(
        (tmp_path / "twice").read_text().replace('"version"', '"created": "2020", "version"')
    )
    refused(tmp_path / "twice", "a field occurs twice")
    (tmp_path / "there").symlink_to("newer")
    save_key(Key(SECRET), tmp_path / "newer")
    assert load_key(tmp_path / "there", "lock") == Key(SECRET)
    refused(rewrite(tmp_path / "newer", version=3), "format version 3; this regauge reads up to 2")


@pytest.mark.parametrize("bad", [b"", bytes(31), bytearray(32), "0" * 32, None, 7])
def test_a_key_is_32_bytes(bad: Any) -> None:
    with pytest.raises(KeyFileError, match="32 bytes"):
        Key(bad)
    with pytest.raises(KeyFileError, match="the purpose of a key must be one of lock, seal"):
        Key(SECRET, "other")  # type: ignore[arg-type]


def test_passphrases(tmp_path: Path) -> None:
    path = tmp_path / "key"
    save_key(Key(SECRET), path, "gr\u00fcn", scrypt=CHEAP)
    assert SECRET.hex()[:16] not in path.read_text()
    assert load_key(path, "lock", "gru\u0308n") == Key(SECRET), "the same text, composed otherwise"
    assert load_key(path, "lock", lambda: "gr\u00fcn") == Key(SECRET)
    with pytest.raises(PassphraseError, match="does not unwrap"):
        load_key(path, "lock", "gruen")
    with pytest.raises(PassphraseError, match="protected by a passphrase"):
        load_key(path, "lock")
    with pytest.raises(PassphraseError, match="empty"):
        save_key(Key(SECRET), tmp_path / "other", "")
    again = tmp_path / "again"
    save_key(Key(SECRET), again, "gr\u00fcn", scrypt=CHEAP)
    assert json.loads(again.read_text())["wrapped"] != json.loads(path.read_text())["wrapped"]


@pytest.mark.parametrize("change", [{"created": "2020"}, {"id": "0" * 16}, {"nonce": "00" * 12}])
def test_the_header_of_a_wrapped_key_is_bound(tmp_path: Path, change: dict[str, str]) -> None:
    save_key(Key(SECRET), tmp_path / "key", "x", scrypt=CHEAP)
    with pytest.raises(PassphraseError, match="or the file was changed"):
        load_key(rewrite(tmp_path / "key", **change), "lock", "x")


@pytest.mark.parametrize(
    "costs",
    [
        {"n": 1 << 30},
        {"n": 1 << 20, "r": 8},
        {"r": 1 << 20},
        {"p": 1 << 20},
        {"n": 17},
        {"n": -16},
        {"n": 1},
        {"p": 0},
        {"n": 16.0},
        {"n": True},
        {"n": 1 << 17, "r": 1},
    ],
)
def test_what_a_file_may_ask_for_is_capped(tmp_path: Path, costs: dict[str, int]) -> None:
    save_key(Key(SECRET), tmp_path / "key", "x", scrypt=CHEAP)
    scrypt = json.loads((tmp_path / "key").read_text())["scrypt"] | costs

    def never() -> str:
        raise AssertionError("the passphrase is not asked for")

    with pytest.raises(KeyFileError, match=r"to unwrap|scrypt parameters"):
        load_key(rewrite(tmp_path / "key", scrypt=scrypt), "lock", never)


def test_too_little_memory_is_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regauge.locking import keys

    def none_left(*args: object) -> bytes:
        raise MemoryError

    save_key(Key(SECRET), tmp_path / "key", "x", scrypt=CHEAP)
    monkeypatch.setattr(keys, "_stretch_passphrase", none_left)
    with pytest.raises(KeyFileError, match="0 MiB of memory, which are not free"):
        load_key(tmp_path / "key", "lock", "x")

"""Sealed files: back as they were, and every change found before anything appears."""

from __future__ import annotations

import hmac
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from regauge.core.canonical import canonical_json
from regauge.core.rng import seed_key
from regauge.errors import (
    CheckpointError,
    KeyFileError,
    LockError,
    RegaugeError,
    TamperedFileError,
    WrongKeyError,
)
from regauge.locking import seal as sealing
from regauge.locking.keys import Key
from regauge.locking.seal import open_sealed, seal

KEY, OTHER = Key(seed_key(1), "seal"), Key(seed_key(2), "seal")
START = len("regauge sealed 1\n")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "CHUNK", 64)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "weights").write_bytes(os.urandom(1000))
    (folder / "sub" / "nothing").touch()
    (folder / ".hidden").write_text("x")
    (folder / "run").write_text("#!")
    (folder / "run").chmod(0o750)
    (folder / "link").symlink_to("weights")
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        p.relative_to(folder).as_posix(): None if p.is_dir() else p.read_bytes()
        for p in sorted(folder.rglob("*"))
    }


def test_a_folder_and_back(folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    size = seal(folder, KEY, tmp_path / "sealed")
    assert size == (tmp_path / "sealed").stat().st_size
    names = open_sealed(tmp_path / "sealed", KEY, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert sorted(names) == sorted(n for n, data in before.items() if data is not None)
    assert not (tmp_path / "out" / "link").is_symlink(), "links are sealed as what they name"
    assert stat.S_IMODE((tmp_path / "out" / "run").stat().st_mode) & 0o700 == 0o700
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out", "sealed"]
    assert (folder / "weights").read_bytes()[:32] not in (tmp_path / "sealed").read_bytes()


@pytest.mark.parametrize("size", [0, 1, 10, 20, 63, 64, 65, 128, 1000])
def test_files_of_every_size(tmp_path: Path, size: int) -> None:
    (tmp_path / "in").write_bytes(bytes(i % 251 for i in range(size)))
    seal(tmp_path / "in", KEY, tmp_path / "sealed")
    open_sealed(tmp_path / "sealed", KEY, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()


def test_chunks_as_large_as_the_format_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert sealing.CHUNK == 262_144
    (tmp_path / "in").write_bytes(os.urandom(600_000))
    seal(tmp_path / "in", KEY, tmp_path / "sealed")
    open_sealed(tmp_path / "sealed", KEY, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()


def test_two_seals_differ(tmp_path: Path, folder: Path) -> None:
    for name in "ab":
        seal(folder, KEY, tmp_path / name)
    a, b = ((tmp_path / name).read_bytes() for name in "ab")
    assert a[-64:] != b[-64:]


def assert_rejected(sealed: Path, data: bytes, key: Key = KEY) -> RegaugeError:
    """Opening this is an error, and leaves nothing."""
    sealed.write_bytes(data)
    before = sorted(p.name for p in sealed.parent.iterdir())
    with pytest.raises(RegaugeError) as error:
        open_sealed(sealed, key, sealed.parent / "out")
    assert sorted(p.name for p in sealed.parent.iterdir()) == before
    return error.value


def test_every_bit_is_authenticated(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(os.urandom(100))
    seal(tmp_path / "in", KEY, tmp_path / "sealed")
    good = (tmp_path / "sealed").read_bytes()
    for i in range(len(good)):
        bad = bytearray(good)
        bad[i] ^= 1 << (i % 8)
        error = assert_rejected(tmp_path / "sealed", bytes(bad))
        assert isinstance(
            error, TamperedFileError if i >= START else LockError | TamperedFileError
        ) or "sealed by the key" in str(error)


def test_a_header_with_a_lone_surrogate_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"text")
    seal(tmp_path / "in", KEY, tmp_path / "sealed")
    good = (tmp_path / "sealed").read_bytes()
    length = int.from_bytes(good[START : START + 4], "little")
    header = json.loads(good[START + 4 : START + 4 + length]) | {"key": "4db28193\ud80005"}
    raw = canonical_json(header)
    bad = good[:START] + len(raw).to_bytes(4, "little") + raw + good[START + 4 + length :]
    assert isinstance(assert_rejected(tmp_path / "sealed", bad), TamperedFileError)


def test_truncation_reordering_and_appending_are_found(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(
        os.urandom(64 * 6)
    )  # chunks that are alike could change places unseen
    seal(tmp_path / "in", KEY, tmp_path / "sealed")
    good = (tmp_path / "sealed").read_bytes()
    at = START + 4 + int.from_bytes(good[START : START + 4], "little") + 32
    chunks = [good[i : i + 80] for i in range(at, len(good), 80)]
    assert len(chunks) == 7
    for n in (
        0,
        10,
        START,
        at - 1,
        at,
        at + 40,
        len(good) - 80,
        len(good) - 1,
        *range(at, len(good), 80),
    ):
        assert isinstance(
            assert_rejected(tmp_path / "sealed", good[:n]), TamperedFileError | LockError
        ), n
    head = good[:at]
    for order in (
        [1, 0, 2, 3, 4, 5, 6],
        [0, 2, 3, 4, 5, 6],
        [0, 0, 1, 2, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 5, 6, 6],
    ):
        assert isinstance(
            assert_rejected(tmp_path / "sealed", head + b"".join(chunks[i] for i in order)),
            TamperedFileError,
        ), order
    assert isinstance(assert_rejected(tmp_path / "sealed", good + b"x"), TamperedFileError)
    seal(tmp_path / "in", KEY, tmp_path / "second")
    other = (tmp_path / "second").read_bytes()
    (tmp_path / "second").unlink()
    assert isinstance(assert_rejected(tmp_path / "sealed", head + other[at:]), TamperedFileError), (
        "chunks belong to their header"
    )


def test_wrong_keys(tmp_path: Path, folder: Path) -> None:
    seal(folder, KEY, tmp_path / "sealed")
    with pytest.raises(WrongKeyError, match=f"sealed by the key {KEY.id}, got {OTHER.id}"):
        open_sealed(tmp_path / "sealed", OTHER, tmp_path / "out")
    for purpose in (
        lambda key: seal(folder, key, tmp_path / "x"),
        lambda key: open_sealed(tmp_path / "sealed", key, tmp_path / "x"),
    ):
        with pytest.raises(KeyFileError, match='must be "seal", got "lock"'):
            purpose(Key(seed_key(1), "lock"))
    forged = (tmp_path / "sealed").read_bytes().replace(KEY.id.encode(), OTHER.id.encode())
    assert isinstance(assert_rejected(tmp_path / "sealed", forged, OTHER), TamperedFileError)


def test_bad_places(tmp_path: Path, folder: Path) -> None:
    seal(folder, KEY, tmp_path / "sealed")
    (tmp_path / "taken").mkdir()
    for run, why in (
        (lambda: seal(tmp_path / "absent", KEY, tmp_path / "x"), "does not exist"),
        (lambda: seal(folder, KEY, tmp_path / "sealed"), "exists already"),
        (lambda: seal(folder, KEY, folder / "x"), "lies inside"),
        (lambda: seal(folder, KEY, tmp_path / "no" / "x"), "does not exist"),
        (lambda: open_sealed(tmp_path / "sealed", KEY, tmp_path / "taken"), "exists already"),
        (lambda: open_sealed(folder / "weights", KEY, tmp_path / "x"), "is not a sealed file"),
        (lambda: open_sealed(folder, KEY, tmp_path / "x"), "not a regular file"),
        (lambda: open_sealed(tmp_path / "absent", KEY, tmp_path / "x"), "cannot be read"),
    ):
        with pytest.raises(RegaugeError, match=why):
            run()
    os.mkfifo(folder / "pipe")
    with pytest.raises(CheckpointError, match="pipe is neither a file nor a folder"):
        seal(folder, KEY, tmp_path / "x")
    newer = (tmp_path / "sealed").read_bytes().replace(b"sealed 1\n", b"sealed 3\n")
    assert "format version 3" in str(assert_rejected(tmp_path / "sealed", newer))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "", ".", "a//b", "a\\b", "./a"])
def test_names_stay_in_their_folder(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(
        sealing, "_list_entries", lambda source: ("folder", [(folder / "weights", name)])
    )
    seal(folder, KEY, tmp_path / "sealed")
    assert isinstance(
        assert_rejected(tmp_path / "sealed", (tmp_path / "sealed").read_bytes()), TamperedFileError
    )


def test_a_file_that_changes_while_it_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").write_bytes(bytes(1000))
    write = sealing._Sealer.write

    def grow(self: sealing._Sealer, data: bytes) -> None:
        with (tmp_path / "in").open("ab") as file:
            file.write(b"x")
        write(self, data)

    monkeypatch.setattr(sealing._Sealer, "write", grow)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        seal(tmp_path / "in", KEY, tmp_path / "sealed")

    def shrink(self: sealing._Sealer, data: bytes) -> None:
        os.truncate(tmp_path / "in", 10)
        write(self, data)

    monkeypatch.setattr(sealing._Sealer, "write", shrink)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        seal(tmp_path / "in", KEY, tmp_path / "sealed")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_what_follows_the_end_and_a_file_that_is_none(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the key holder can make these; they are rejected all the same."""
    close = sealing._Sealer.close

    def more(self: sealing._Sealer) -> None:
        self.write(b"x")
        close(self)

    with monkeypatch.context() as patch:
        patch.setattr(sealing._Sealer, "close", more)
        seal(folder, KEY, tmp_path / "sealed")
    assert isinstance(
        assert_rejected(tmp_path / "sealed", (tmp_path / "sealed").read_bytes()), TamperedFileError
    )
    (tmp_path / "sealed").unlink()
    monkeypatch.setattr(
        sealing,
        "_list_entries",
        lambda source: ("file", [(folder / "weights", "data"), (folder / "run", "more")]),
    )
    seal(folder, KEY, tmp_path / "sealed")
    assert isinstance(
        assert_rejected(tmp_path / "sealed", (tmp_path / "sealed").read_bytes()), TamperedFileError
    )


def test_what_could_not_be_opened_again_is_not_sealed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "sub" / "a\\b").touch()
    with pytest.raises(CheckpointError, match="has a name that could not be opened again"):
        seal(folder, KEY, tmp_path / "sealed")
    (folder / "sub" / "a\\b").unlink()
    scandir, listdir = os.scandir, os.listdir

    def closed(
        list_: Callable[..., Any],
    ) -> Callable[..., Any]:  # (chmod closes no folder to root, as whom tests may run)
        def listed(path: Any = ".") -> Any:
            if Path(path).name == "sub":
                raise PermissionError(13, "Permission denied", str(path))
            return list_(path)

        return listed

    monkeypatch.setattr(os, "scandir", closed(scandir))
    monkeypatch.setattr(os, "listdir", closed(listdir))
    with pytest.raises(CheckpointError, match="sub cannot be read: Permission denied"):
        seal(folder, KEY, tmp_path / "sealed")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_leftovers_of_a_killed_process_are_ignored(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container every process may have the same number."""
    seal(folder, KEY, tmp_path / "sealed")
    for name in (".again", ".out"):
        (tmp_path / f"{name}.partial-{os.getpid()}").mkdir()
    seal(folder, KEY, tmp_path / "again")
    open_sealed(tmp_path / "again", KEY, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folder)


def test_what_is_opened_is_its_owners_until_it_is_whole(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seal(folder, KEY, tmp_path / "sealed")
    modes: list[int] = []
    take = sealing._extract_entries

    def looked(source: Path, chunks: sealing._Opener, partial: Path) -> object:
        modes.append(stat.S_IMODE(partial.stat().st_mode))
        return take(source, chunks, partial)

    monkeypatch.setattr(sealing, "_extract_entries", looked)
    open_sealed(tmp_path / "sealed", KEY, tmp_path / "out")
    assert modes == [0o700]


def test_the_format_is_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by nothing but docs/formats-keys.md: a change of labels, salts, nonces or associated
    data would leave older files closed.
    """
    monkeypatch.setattr(sealing, "CHUNK", 1 << 18)
    secret = seed_key(1)
    (tmp_path / "in" / "sub").mkdir(parents=True)
    data = b"regauge" * 40_000
    (tmp_path / "in" / "sub" / "file").write_bytes(data)
    (tmp_path / "in" / "sub" / "file").chmod(0o640)
    seal(tmp_path / "in", Key(secret, "seal"), tmp_path / "sealed")
    rest = (tmp_path / "sealed").read_bytes()
    assert rest.startswith(b"regauge sealed 1\n")
    n = START + 4 + int.from_bytes(rest[START : START + 4], "little")
    start, tag, rest = rest[:n], rest[n : n + 32], rest[n + 32 :]
    header = json.loads(start[START + 4 :])
    salt = bytes.fromhex(header["salt"])
    assert header == {"version": 1, "key": KEY.id, "kind": "folder", "salt": salt.hex()}

    def derived(label: bytes) -> bytes:
        return HKDF(SHA256(), 32, salt, b"regauge/1/" + label).derive(secret)

    assert hmac.digest(derived(b"seal/header"), start, "sha256") == tag
    cipher = ChaCha20Poly1305(derived(b"seal/chunks"))
    first, last = rest[: (1 << 18) + 16], rest[(1 << 18) + 16 :]
    plain = cipher.decrypt(bytes(12), first, tag) + cipher.decrypt(bytes(10) + b"\1\1", last, tag)
    heads = (b'{"folder":true,"name":"sub"}', b'{"mode":416,"name":"sub/file","size":280000}')
    assert plain == b"".join(
        len(head).to_bytes(4, "little") + head for head in heads
    ) + data + bytes(4)


def test_chunks_of_two_files_have_no_key_in_common(tmp_path: Path) -> None:
    """Nonces count from 0 in every file: were the key the same, the difference of two files would
    be the difference of what is sealed.
    """
    start = []
    for name in "ab":
        (tmp_path / name).write_bytes(bytes(60))
        seal(tmp_path / name, KEY, tmp_path / f"{name}.sealed")
        data = (tmp_path / f"{name}.sealed").read_bytes()
        at = START + 4 + int.from_bytes(data[START : START + 4], "little") + 32
        start.append(data[at : at + 64])
    assert start[0] != start[1]

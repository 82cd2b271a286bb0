"""A model encrypted at rest: seal it with a passphrase-protected key, open it again, and get an
error after one byte has changed.

python examples/seal_and_open.py       # a second; needs only regauge
"""

import tempfile
from pathlib import Path

from regauge import generate_key, load_key, open_sealed, save_key, seal
from regauge.errors import PassphraseError, TamperedFileError, WrongKeyError

with tempfile.TemporaryDirectory() as folder:
    work = Path(folder)
    (work / "model").mkdir()
    (work / "model" / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    (work / "model" / "config.json").write_text("{}")

    save_key(generate_key("seal"), work / "key", passphrase="correct horse battery staple")
    try:
        load_key(work / "key", "seal", "wrong")
    except PassphraseError as error:
        print("rejected:", error)
    key = load_key(work / "key", "seal", "correct horse battery staple")

    size = seal(work / "model", key, work / "model.sealed")
    names = open_sealed(work / "model.sealed", key, work / "opened")
    print(f"sealed into {size:,} bytes by {key}, opened again: {', '.join(sorted(names))}")
    assert (work / "opened" / "model.safetensors").read_bytes() == (
        work / "model" / "model.safetensors"
    ).read_bytes()

    changed = bytearray((work / "model.sealed").read_bytes())
    changed[-1000] ^= 1
    (work / "changed").write_bytes(changed)
    for file, secret in (("changed", key), ("model.sealed", generate_key("seal"))):
        try:
            open_sealed(work / file, secret, work / "never")
        except (TamperedFileError, WrongKeyError) as error:
            print("rejected:", str(error).replace(folder, "..."))
        assert not (work / "never").exists(), "no output before all of it is authenticated"

"""A model at rest, encrypted: sealed under a key with a passphrase, opened again, and refused once
a byte has changed.

python examples/seal_and_open.py       # a second; needs nothing but regauge
"""

import tempfile
from pathlib import Path

from regauge import generate_key, load_key, open_sealed, save_key, seal
from regauge.errors import PassphraseError, TamperedFileError, WrongKeyError

with tempfile.TemporaryDirectory() as folder:
    here = Path(folder)
    (here / "model").mkdir()
    (here / "model" / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    (here / "model" / "config.json").write_text("{}")

    save_key(generate_key("seal"), here / "key", passphrase="correct horse battery staple")
    try:
        load_key(here / "key", "seal", "wrong")
    except PassphraseError as refused:
        print("refused:", refused)
    key = load_key(here / "key", "seal", "correct horse battery staple")

    size = seal(here / "model", key, here / "model.sealed")
    names = open_sealed(here / "model.sealed", key, here / "opened")
    print(f"sealed into {size:,} bytes by {key}, opened again: {', '.join(sorted(names))}")
    assert (here / "opened" / "model.safetensors").read_bytes() == (
        here / "model" / "model.safetensors"
    ).read_bytes()

    changed = bytearray((here / "model.sealed").read_bytes())
    changed[-1000] ^= 1
    (here / "changed").write_bytes(changed)
    for file, secret in (("changed", key), ("model.sealed", generate_key("seal"))):
        try:
            open_sealed(here / file, secret, here / "never")
        except (TamperedFileError, WrongKeyError) as refused:
            print("refused:", str(refused).replace(folder, "..."))
        assert not (here / "never").exists(), "nothing appears before all of it is authenticated"

"""The text of `regauge` without arguments, the sections of `regauge --help`, and the examples at
the end of each command's help.

One literal holds all examples: a test checks that each command has one, and accepts it.
"""

from __future__ import annotations

OVERVIEW = """\
Rewrite a Transformer's weights in another basis without changing what it
computes.

Start
  regauge demo                     two minutes, no downloads; writes a page
  regauge doctor                   what is installed, and how to get what is not

By task
  merge independent models         regauge merge A B --align -o OUT
  check for a shared basis         regauge compare A B
  lock a model with a key          regauge keygen -o KEY
                                   regauge lock MODEL -k KEY -o LOCKED
  encrypt a model at rest          regauge keygen --purpose seal -o SEALKEY
                                   regauge seal MODEL -k SEALKEY -o SEALED
  measure what a lock is worth     regauge audit lock LOCKED --against BASE
  measure what gradients leak      regauge audit gradients MODEL --data DATA
  measure what features leak       regauge audit split MODEL --data DATA
  train with a remote backbone     regauge split --help
  train on federated data          regauge federate --help
  train with jigsaw puzzles        regauge jigsaw train MODEL --data DATA -o OUT
  accuracy or perplexity           regauge evaluate A B --data DATA
  check a model's symmetries       regauge verify MODEL
  show a model's symmetries        regauge inspect MODEL
  move a model to another basis    regauge move MODEL --random -o OUT

A model is a folder, a .safetensors file or a hub id. `regauge --help` lists all
commands; `regauge COMMAND --help` ends with examples."""

# Every command, in the order of the README's uses: `regauge --help` and the page of commands.
PANELS = {
    "Start": ("demo", "doctor"),
    "Align and merge": ("match", "merge", "extract-lora", "barrier"),
    "Check for a shared basis": ("compare", "fingerprint"),
    "Lock and seal": ("keygen", "lock", "unlock", "rekey", "seal", "open"),
    "Audit": ("audit lock", "audit split", "audit gradients"),
    "Split learning": ("split certs", "split serve", "split train", "split predict", "split join"),
    "Federated learning and jigsaw puzzles": (
        "federate",
        "jigsaw train",
        "jigsaw evaluate",
        "jigsaw study",
    ),
    "Models and results": ("evaluate", "verify", "inspect", "move", "convert", "report"),
}

# Lines that the commands accept; further lines of one command follow a line break.
EXAMPLES = {
    "audit gradients": "regauge audit gradients VIT --data IMAGES --report page.html\n"
    "regauge audit gradients VIT --data IMAGES --defence mjp=0.5\n"
    "regauge audit gradients --from RUN --report page.html",
    "audit lock": "regauge audit lock LOCKED -k KEY --against BASE --report page.html",
    "audit split": "regauge audit split VIT --data IMAGES --report page.html\n"
    "regauge audit split VIT --data IMAGES --defence rows --defence noise=0.5+rows",
    "barrier": "regauge barrier A B --data book.txt --report page.html",
    "compare": "regauge compare A B\nregauge compare A B --report page.html",
    "convert": "regauge convert PICKLED -o OUT",
    "demo": "regauge demo\nregauge demo -o regauge-demo --report page.html",
    "doctor": "regauge doctor\nregauge doctor --load --json",
    "evaluate": "regauge evaluate A B --data book.txt\n"
    "regauge evaluate LOCKED -k KEY --control --data IMAGES",
    "extract-lora": "regauge extract-lora MODEL BASE -o ADAPTER --rank 16\n"
    "regauge extract-lora MODEL BASE -o ADAPTER --energy 0.95 --save-modules",
    "federate": "regauge federate VIT --data IMAGES --clients 4 --rounds 10 -o RUN",
    "fingerprint": "regauge fingerprint MODEL --json",
    "inspect": "regauge inspect MODEL\nregauge inspect MODEL --explain stream",
    "jigsaw evaluate": "regauge jigsaw evaluate PLAIN TRAINED --data IMAGES --ratios 0.1,0.5",
    "jigsaw study": "regauge jigsaw study PLAIN TRAINED --data IMAGES --report page.html",
    "jigsaw train": "regauge jigsaw train MODEL --data IMAGES --ratio 0.1 --epochs 10 -o OUT",
    "keygen": "regauge keygen -o KEY\nregauge keygen --purpose seal --passphrase -o SEALKEY\n"
    "regauge keygen --purpose receive -o ID\nregauge keygen --public ID",
    "lock": "regauge lock MODEL -k KEY -o LOCKED\nregauge lock LOCKED -k KEY --reseal",
    "match": "regauge match A B -o NEAR\n"
    "regauge match A B --data book.txt -o NEAR --report page.html",
    "merge": "regauge merge A B --align -o MERGED\n"
    "regauge merge A B --method slerp --set t=0.5 --align -o MERGED\n"
    "regauge merge recipe.yaml -o MERGED",
    "move": "regauge move MODEL --random -o OUT --save-element G\n"
    "regauge move OUT -g G --invert -o BACK",
    "open": "regauge open MODEL.sealed -k SEALKEY -o MODEL\n"
    "regauge open MODEL.sealed -k ID -o MODEL",
    "rekey": "regauge rekey LOCKED -k OLD --to NEW -o RELOCKED",
    "report": "regauge report results.json -o page.html",
    "seal": "regauge seal MODEL -k SEALKEY -o MODEL.sealed\n"
    "regauge seal MODEL --to RECIPIENT --to team.txt -o MODEL.sealed",
    "split certs": "regauge split certs --to CERTS --name server.example --client hospital",
    "split join": "regauge split join EDGES BACKBONE -o MODEL",
    "split predict": "regauge split predict EDGES --data IMAGES --server server.example:7000 "
    "--tls CERTS --client-name hospital",
    "split serve": "regauge split serve MODEL --tls CERTS --listen 0.0.0.0:7000\n"
    "regauge split serve MODEL --tls CERTS --lr 1e-4 -o BACKBONE",
    "split train": "regauge split train MODEL --data IMAGES --server server.example:7000 --tls "
    "CERTS --client-name hospital -o EDGES",
    "unlock": "regauge unlock LOCKED -k KEY -o MODEL",
    "verify": "regauge verify MODEL\nregauge verify MODEL --dtype float64 --report page.html",
}

# The last line of a command that wrote {out}: what to do with it.
NEXT = {
    "convert": "regauge inspect {out} shows its symmetries",
    "extract-lora": "regauge evaluate BASE+{out} --data DATA measures it",
    "federate": "regauge evaluate {out}/model --data DATA measures the model",
    "jigsaw train": "regauge jigsaw evaluate {out} --data IMAGES measures it on puzzles",
    "keygen": "regauge lock MODEL -k {out} -o LOCKED locks a model with it",
    "keygen --purpose seal": "regauge seal MODEL -k {out} -o SEALED encrypts a model with it",
    "keygen --purpose receive": "regauge open SEALED -k {out} -o PATH opens what is sealed to it",
    "lock": "regauge audit lock {out} --against BASE measures what the lock is worth",
    "match": "regauge merge {out} B -o MERGED merges it with B, whose basis it now has",
    "merge": "regauge evaluate {out} --data DATA measures it",
    "move": "from_pretrained loads {out} as it loads the original",
    "rekey": "regauge unlock {out} -k NEW -o MODEL restores the model",
    "seal": "regauge open {out} -k KEY -o PATH decrypts it",
    "split join": "regauge evaluate {out} --data DATA measures it",
}

# The one library function that each command calls, as users import it. A test reads the commands.
FUNCTIONS = {
    "audit gradients": "regauge.audit.gradients",
    "audit lock": "regauge.audit.lock",
    "audit split": "regauge.audit.split",
    "barrier": "regauge.barrier",
    "compare": "regauge.compare",
    "convert": "regauge.checkpoints.convert.convert",
    "demo": "regauge.demo.run_demo",
    "doctor": "regauge.results.installation.check_installation",
    "evaluate": "regauge.evaluate",
    "extract-lora": "regauge.extract_lora",
    "federate": "regauge.federated.run",
    "fingerprint": "regauge.fingerprint",
    "inspect": "regauge.models.summary.inspect",
    "jigsaw evaluate": "regauge.jigsaw.evaluate",
    "jigsaw study": "regauge.jigsaw.study",
    "jigsaw train": "regauge.jigsaw.train",
    "keygen": "regauge.locking.keys.create_key",
    "lock": "regauge.lock",
    "match": "regauge.match",
    "merge": "regauge.merge",
    "move": "regauge.move",
    "open": "regauge.open_sealed",
    "rekey": "regauge.locking.rekey",
    "report": "regauge.results.report.write_page",
    "seal": "regauge.seal",
    "split certs": "regauge.split.make_certificates",
    "split join": "regauge.split.join",
    "split predict": "regauge.split.predict",
    "split serve": "regauge.split.serve",
    "split train": "regauge.split.train",
    "unlock": "regauge.unlock",
    "verify": "regauge.verify",
}
# Another public function, for a mode of the command.
MODES = {
    "audit gradients --from": "regauge.audit.recorded",
    "keygen --public": "regauge.load_key",
    "lock --data": "regauge.evaluate",
    "lock --reseal": "regauge.locking.reseal",
    "match --test": "regauge.evaluate",
    "unlock --data": "regauge.evaluate",
}


def examples_of(name: str) -> list[str]:
    """Return the examples at the end of a command's help."""
    return EXAMPLES.get(name, "").splitlines()

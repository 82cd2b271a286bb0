"""The text of `regauge` without arguments, the help panel of each command, and the example at the
end of each command's help.

One literal holds all examples: a test checks that each command has one, and accepts it.
"""

from __future__ import annotations

OVERVIEW = """\
Rewrite a Transformer's weights in another basis without changing what it computes.

Start here
  regauge demo                          two minutes, no downloads; writes an HTML page
  regauge doctor                        what is installed and missing, and how to install it
  regauge inspect MODEL                 symmetries of a model: a folder, a file or a hub id

Then, by task
  the same model in another basis       regauge move MODEL --random -o OUT
  check the theorems on a model         regauge verify MODEL
  accuracy or perplexity of models      regauge evaluate A B --data IMAGES
  do two models share a basis?          regauge compare A B
  merge independently trained models    regauge merge A B --align -o OUT
  lock weights with a key               regauge keygen -o KEY, regauge lock MODEL -k KEY -o LOCKED
  measure what a lock is worth          regauge audit lock LOCKED -k KEY --against BASE
  encrypt a model at rest               regauge seal MODEL -k SEALKEY -o MODEL.sealed
  backbone on a server, data here       regauge split certs, then split serve and split train
  train with jigsaw puzzles             regauge jigsaw train MODEL --data IMAGES -o OUT
  train on federated data               regauge federate MODEL --data IMAGES --clients 4 -o RUN
  measure what gradients leak           regauge audit gradients MODEL --data IMAGES

regauge --help lists all commands; regauge COMMAND --help ends with an example."""

PANELS = {
    "Start": ("demo", "doctor"),
    "Look at models": ("inspect", "verify", "evaluate", "compare", "barrier", "fingerprint"),
    "Change models": ("move", "match", "merge", "convert"),
    "Protect": ("keygen", "lock", "unlock", "rekey", "seal", "open"),
    "Train and serve": ("split", "jigsaw", "federate"),
    "Attack and report": ("audit", "report"),
}

EXAMPLES = {
    "audit gradients": "regauge audit gradients VIT --data IMAGES --defence mjp=0.5 --report "
    "page.html",
    "audit lock": "regauge audit lock LOCKED -k KEY --against BASE --report page.html",
    "audit split": "regauge audit split VIT --data IMAGES --defence rows --defence "
    "noise=0.5+rows --report page.html",
    "barrier": "regauge barrier A B --data book.txt --report page.html",
    "compare": "regauge compare A B",
    "convert": "regauge convert PICKLED -o OUT",
    "demo": "regauge demo --report page.html",
    "doctor": "regauge doctor --json",
    "evaluate": "regauge evaluate A B --data book.txt",
    "federate": "regauge federate VIT --data IMAGES --clients 4 --rounds 10 -o RUN",
    "fingerprint": "regauge fingerprint MODEL --json",
    "inspect": "regauge inspect MODEL --explain stream",
    "jigsaw evaluate": "regauge jigsaw evaluate PLAIN TRAINED --data IMAGES --ratios 0.1,0.5",
    "jigsaw study": "regauge jigsaw study PLAIN TRAINED --report page.html",
    "jigsaw train": "regauge jigsaw train MODEL --data IMAGES --ratio 0.1 --epochs 10 -o OUT",
    "keygen": "regauge keygen -o KEY --passphrase",
    "lock": "regauge lock MODEL -k KEY -o LOCKED",
    "match": "regauge match A B -o NEAR --json match.json",
    "merge": "regauge merge A B --method slerp --set t=0.5 --align -o MERGED",
    "move": "regauge move MODEL --random -o OUT --save-element G",
    "open": "regauge open MODEL.sealed -k SEALKEY -o MODEL",
    "rekey": "regauge rekey LOCKED -k OLD --to NEW -o RELOCKED",
    "report": "regauge report results.json -o page.html",
    "seal": "regauge seal MODEL -k SEALKEY -o MODEL.sealed",
    "split certs": "regauge split certs --to CERTS --name server.example --client hospital",
    "split join": "regauge split join EDGES BACKBONE -o MODEL",
    "split predict": "regauge split predict EDGES --data IMAGES --server server.example:7000 "
    "--tls CERTS --client-name hospital",
    "split serve": "regauge split serve MODEL --listen 0.0.0.0:7000 --tls CERTS --output BACKBONE",
    "split train": "regauge split train MODEL --data IMAGES --server server.example:7000 --tls "
    "CERTS --client-name hospital -o EDGES",
    "unlock": "regauge unlock LOCKED -k KEY -o MODEL",
    "verify": "regauge verify MODEL --dtype float64 --report page.html",
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
    "lock --reseal": "regauge.locking.reseal",
}


def panel_of(name: str) -> str | None:
    """Return the panel of a command in `regauge --help`, or None for the last panel, of
    all others.
    """
    return next((panel for panel, names in PANELS.items() if name in names), None)


def epilog_of(name: str) -> str | None:
    """Return the last line of a command's help."""
    return f"Example: {EXAMPLES[name]}" if name in EXAMPLES else None

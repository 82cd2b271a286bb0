"""What a server of split learning learns: victims trained for real, attacks on what the server saw,
scores against the truth, and what it comes to.

    results = audit_split(SplitCase(model, train, own, test, mean, std), ("none", "rows",
    "noise=0.5+rows"))
    results.facts["verdict"]

`victims` trains and watches, `attacking` has the table of attacks, `scoring` the metrics, `telling`
findings, tables, figures and the verdict; `reading` is the same for texts.
"""

from regauge.audit.split.engine import SplitCase, audit_split
from regauge.audit.split.scores import LeakageError
from regauge.audit.split.text_audit import audit_texts

__all__ = ["LeakageError", "SplitCase", "audit_split", "audit_texts"]

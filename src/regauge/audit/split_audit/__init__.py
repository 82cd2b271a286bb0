"""The audit of split learning: train victims, attack the recorded passes, score by the truth.

    case = SplitCase(model, train, own, test, mean, std)
    results = audit_split(case, ("none", "rows", "noise=0.5+rows"))
    results.facts["verdict"]

`engine` has the loop, `victims` trains and records, `attempts` has the table of attacks on images,
`image_audit` and `text_audit` what the two do not share, `report` findings, tables, figures and the
verdict.
"""

from regauge.audit.split_audit.engine import SplitCase
from regauge.audit.split_audit.image_audit import audit_split
from regauge.audit.split_audit.text_audit import audit_texts
from regauge.errors import AuditError

__all__ = ["AuditError", "SplitCase", "audit_split", "audit_texts"]

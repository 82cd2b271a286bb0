"""regauge: rewrite a Transformer's weights in other bases without changing its function.

Names are imported on first use, so that `import regauge` does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regauge.core.lazy import lazy_names

if TYPE_CHECKING:
    from regauge.checkpoints.adapters import move_adapter as move_adapter
    from regauge.checkpoints.element_files import load_element as load_element
    from regauge.checkpoints.element_files import save_element as save_element
    from regauge.checkpoints.reader import open_checkpoint as open_checkpoint
    from regauge.checkpoints.spec_files import load_spec as load_spec
    from regauge.core.action import act as act
    from regauge.core.action import apply as apply
    from regauge.core.axes import dual as dual
    from regauge.core.axes import parse as parse
    from regauge.core.check import check as check
    from regauge.core.element import Element as Element
    from regauge.core.element import element as element
    from regauge.core.element import identity as identity
    from regauge.core.live import apply_ as apply_
    from regauge.core.spec import Space as Space
    from regauge.core.spec import Spec as Spec
    from regauge.core.threads import set_threads as set_threads
    from regauge.data.sources import DataSource as DataSource
    from regauge.errors import RegaugeError as RegaugeError
    from regauge.jigsaw.wrapper import MaskedJigsaw as MaskedJigsaw
    from regauge.locking.api import lock as lock
    from regauge.locking.api import unlock as unlock
    from regauge.locking.authorize import authorize as authorize
    from regauge.locking.authorize import deauthorize as deauthorize
    from regauge.locking.evaluation import evaluate as evaluate
    from regauge.locking.keys import Key as Key
    from regauge.locking.keys import generate_key as generate_key
    from regauge.locking.keys import load_key as load_key
    from regauge.locking.keys import save_key as save_key
    from regauge.locking.permuted import Permuted as Permuted
    from regauge.locking.seal import open_sealed as open_sealed
    from regauge.locking.seal import seal as seal
    from regauge.matching.api import MatchOptions as MatchOptions
    from regauge.matching.api import compare as compare
    from regauge.matching.api import match as match
    from regauge.matching.barrier_report import BarrierOptions as BarrierOptions
    from regauge.matching.barrier_report import barrier as barrier
    from regauge.matching.fingerprint import fingerprint as fingerprint
    from regauge.matching.invariants import invariants as invariants
    from regauge.merging.api import MergeOptions as MergeOptions
    from regauge.merging.api import merge as merge
    from regauge.merging.lora import extract_lora as extract_lora
    from regauge.models.cut import cut as cut
    from regauge.models.discovery import discover as discover
    from regauge.models.load import load_model as load_model
    from regauge.models.resolve import spec_of as spec_of
    from regauge.models.transforms import fold_norms as fold_norms
    from regauge.models.transforms import move as move
    from regauge.results.progress import progress_bar as progress_bar
    from regauge.verification import verify as verify

__version__ = "0.2.0"

# Exported name -> the module that defines it. A test keeps this table, the imports above and
# `__all__` consistent.
_HOME = {
    "BarrierOptions": "matching.barrier_report",
    "DataSource": "data.sources",
    "Element": "core.element",
    "Key": "locking.keys",
    "MaskedJigsaw": "jigsaw.wrapper",
    "MatchOptions": "matching.api",
    "MergeOptions": "merging.api",
    "Permuted": "locking.permuted",
    "RegaugeError": "errors",
    "Space": "core.spec",
    "Spec": "core.spec",
    "act": "core.action",
    "apply": "core.action",
    "apply_": "core.live",
    "authorize": "locking.authorize",
    "barrier": "matching.barrier_report",
    "check": "core.check",
    "compare": "matching.api",
    "cut": "models.cut",
    "deauthorize": "locking.authorize",
    "discover": "models.discovery",
    "dual": "core.axes",
    "element": "core.element",
    "evaluate": "locking.evaluation",
    "extract_lora": "merging.lora",
    "fingerprint": "matching.fingerprint",
    "fold_norms": "models.transforms",
    "generate_key": "locking.keys",
    "identity": "core.element",
    "invariants": "matching.invariants",
    "load_element": "checkpoints.element_files",
    "load_key": "locking.keys",
    "load_model": "models.load",
    "load_spec": "checkpoints.spec_files",
    "lock": "locking.api",
    "match": "matching.api",
    "merge": "merging.api",
    "move": "models.transforms",
    "move_adapter": "checkpoints.adapters",
    "open_checkpoint": "checkpoints.reader",
    "open_sealed": "locking.seal",
    "parse": "core.axes",
    "save_element": "checkpoints.element_files",
    "save_key": "locking.keys",
    "seal": "locking.seal",
    "progress_bar": "results.progress",
    "set_threads": "core.threads",
    "spec_of": "models.resolve",
    "unlock": "locking.api",
    "verify": "verification",
}

# Packages with a public API of their own: `regauge.audit.lock(...)` works after `import regauge`.
_PACKAGES = ("audit", "federated", "jigsaw", "locking", "matching", "merging", "split")

__all__ = sorted(_HOME)
__getattr__, _names = lazy_names(__name__, _HOME, _PACKAGES)


def __dir__() -> list[str]:
    return [*_names(), "__version__"]

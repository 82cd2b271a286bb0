"""regauge: a Transformer's weights are one of many equal descriptions of the same function. regauge chooses which one.

Names are imported when they are first used, so that `import regauge` costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regauge.action import act as act
    from regauge.action import apply as apply
    from regauge.adapters import move_adapter as move_adapter
    from regauge.axes import dual as dual
    from regauge.axes import parse as parse
    from regauge.checkpoint import open_checkpoint as open_checkpoint
    from regauge.cutting import cut as cut
    from regauge.discovery import discover as discover
    from regauge.edge import authorize as authorize
    from regauge.edge import deauthorize as deauthorize
    from regauge.elementfiles import load_element as load_element
    from regauge.elementfiles import save_element as save_element
    from regauge.elements import Element as Element
    from regauge.elements import element as element
    from regauge.elements import identity as identity
    from regauge.errors import RegaugeError as RegaugeError
    from regauge.fold import fold_norms as fold_norms
    from regauge.invariance import invariants as invariants
    from regauge.keys import Key as Key
    from regauge.keys import generate_key as generate_key
    from regauge.keys import load_key as load_key
    from regauge.keys import save_key as save_key
    from regauge.live import apply_ as apply_
    from regauge.loading import load_model as load_model
    from regauge.locking import lock as lock
    from regauge.locking import unlock as unlock
    from regauge.matching import match as match
    from regauge.merging import merge as merge
    from regauge.permuting import Permuted as Permuted
    from regauge.sealing import open_sealed as open_sealed
    from regauge.sealing import seal as seal
    from regauge.sources import spec_of as spec_of
    from regauge.spec import Space as Space
    from regauge.spec import Spec as Spec
    from regauge.spec import check as check
    from regauge.specfile import load_spec as load_spec
    from regauge.verification import verify as verify

__version__ = "0.1.0"

# name -> the module it lives in. A test holds this table, the imports above and `__all__` together.
_HOME = {
    "Element": "elements",
    "Key": "keys",
    "Permuted": "permuting",
    "RegaugeError": "errors",
    "Space": "spec",
    "Spec": "spec",
    "act": "action",
    "apply": "action",
    "apply_": "live",
    "authorize": "edge",
    "check": "spec",
    "cut": "cutting",
    "deauthorize": "edge",
    "discover": "discovery",
    "dual": "axes",
    "element": "elements",
    "fold_norms": "fold",
    "generate_key": "keys",
    "identity": "elements",
    "invariants": "invariance",
    "load_element": "elementfiles",
    "load_key": "keys",
    "load_model": "loading",
    "load_spec": "specfile",
    "lock": "locking",
    "match": "matching",
    "merge": "merging",
    "move_adapter": "adapters",
    "open_checkpoint": "checkpoint",
    "open_sealed": "sealing",
    "parse": "axes",
    "save_element": "elementfiles",
    "save_key": "keys",
    "seal": "sealing",
    "spec_of": "sources",
    "unlock": "locking",
    "verify": "verification",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"regauge.{_HOME[name]}"), name)
    raise AttributeError(f"module 'regauge' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

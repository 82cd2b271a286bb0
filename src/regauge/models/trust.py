"""Restrictions on what a checkpoint's config may select: classes of transformers and timm, and no
other code or file.

transformers runs Python code that lies beside the weights if the user agrees, and prompts on
standard input if `trust_remote_code` was not passed. regauge never agrees: `without_code` removes
the fields that select code, `library_class` accepts only classes of the library, and
`code_disabled` turns a prompt into an error.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from regauge.errors import CheckpointError, CustomCodeError, UnknownModelError, need

# Fields that name code, or a file that is loaded in place of the weights. An attention or expert
# implementation with a slash is a kernel that is fetched from the hub and run; which one computes
# is not a property of the weights.
_SELECTORS = frozenset(
    {
        "auto_map",
        "custom_pipelines",
        "transformers_weights",
        *(
            f"{start}{what}_implementation{end}"
            for what in ("attn", "experts")
            for start in ("", "_")
            for end in ("", "_internal")
        ),
    }
)
_BUILT_IN = ("eager", "sdpa")
_TIMM_FILES = ("checkpoint_path", "cache_dir")
_TIMM_NAME = re.compile(r"[A-Za-z0-9_.\-]+")

_lock = threading.Lock()
_disabled = 0
_timeout = 0


def without_code(config: Mapping[str, Any], where: object = "the model") -> dict[str, Any]:
    """Copy a config without the fields that select custom code, at any depth.

    Args:
        config: the contents of config.json.
        where: the checkpoint, for error messages.

    Raises:
        CheckpointError: a timm model is named that is not one of timm's own, or its arguments name
        a file.
    """
    try:
        return {
            key: _without_code(key, value, where)
            for key, value in config.items()
            if not _selects_code(key, value)
        }
    except RecursionError:
        raise CheckpointError(
            f"the config of {where} is nested too deeply", hint="fetch the file again"
        ) from None


def _without_code(key: str, value: Any, where: object) -> Any:
    """Copy a value without the fields that select custom code."""
    if key in ("architecture", "backbone"):
        _check_timm_name(key, value, where)
    elif key in ("model_args", "backbone_kwargs") and isinstance(value, Mapping):
        _check_timm_arguments(key, value, where)
    if isinstance(value, Mapping):
        return {k: _without_code(k, v, where) for k, v in value.items() if not _selects_code(k, v)}
    return [_without_code("", item, where) for item in value] if isinstance(value, list) else value


def _selects_code(key: str, value: Any) -> bool:
    return key in _SELECTORS and value not in _BUILT_IN


def _check_timm_name(key: str, value: Any, where: object) -> None:
    """Raise for a name with which timm or a backbone would read another folder or the hub:
    "hf-hub:...", "local-dir:...".
    """
    if isinstance(value, str) and not _TIMM_NAME.fullmatch(value):
        raise CheckpointError(
            f'"{key}" in the config of {where} must be the name of a model in the library, got '
            f"{value[:80]!r}",
            hint="a config may not name a folder or a repository; load such a model in Python "
            "and pass the module",
        )


def _check_timm_arguments(key: str, value: Mapping[str, Any], where: object) -> None:
    """Raise for arguments with which timm would load a file, pickles among them, or fetch
    weights.
    """
    named = sorted(str(k) for k in value if str(k).startswith("pretrained") or k in _TIMM_FILES)
    if named:
        raise CheckpointError(
            f'"{key}" in the config of {where} must not set {", ".join(named)}',
            hint="the weights are those of the checkpoint: remove these arguments from config.json",
        )


def library_class(config: Mapping[str, Any], where: object) -> Any:
    """Return the model class of the transformers library that a config names in `architectures`.

    A config with an `auto_map` is accepted if the library has the class itself, as many checkpoints
    do that were published before their class was added: the library's class is used, and the code
    beside the weights is ignored.

    Args:
        config: the contents of config.json.
        where: the checkpoint, for error messages.

    Raises:
        CustomCodeError: the class is an `Auto*` class, or one that only custom code defines.
        UnknownModelError: no class is named, or the library has no such model class.
    """
    need("transformers", "models")
    import transformers

    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or not name:
        raise UnknownModelError(
            f'the config of {where} names no class ("architectures")',
            hint="regauge loads classes of the transformers library and timm only",
        )
    model_class = getattr(transformers, name, None) if name.isidentifier() else None
    if _is_model_class(model_class):
        return model_class
    if name.startswith("Auto"):
        raise _custom_code(where, f'"architectures" must name one model class, got {name}')
    if config.get("auto_map"):
        raise _custom_code(where, f"the transformers library has no class {name}")
    raise UnknownModelError(
        f"the config of {where} names the class {name}, which the transformers library does not "
        "have",
        hint="regauge loads classes of the transformers library and timm only; pass a module of "
        "your own in Python",
    )


def _is_model_class(kind: Any) -> bool:
    import transformers

    return (
        isinstance(kind, type)
        and issubclass(kind, transformers.PreTrainedModel)
        and kind.__module__.startswith("transformers.")
        and getattr(kind, "config_class", None) is not None
    )


def _custom_code(where: object, why: str) -> CustomCodeError:
    return CustomCodeError(
        f"{where} needs custom code, which regauge never runs: {why}",
        hint="load it in Python, after reading its code, and pass the module to regauge "
        "(regauge.verify(module), ...)",
    )


@contextmanager
def code_disabled() -> Iterator[None]:
    """Make transformers raise instead of prompting on standard input whether custom code may run.

    Not every class that loads another one passes `trust_remote_code=False` on (RagTokenizer, for
    example). The library raises if its timeout for an answer is 0. Nested and concurrent uses are
    counted; the last one restores the value.
    """
    from transformers import dynamic_module_utils as dynamic

    global _disabled, _timeout
    with _lock:
        if not _disabled:
            _timeout, dynamic.TIME_OUT_REMOTE_CODE = dynamic.TIME_OUT_REMOTE_CODE, 0
        _disabled += 1
    try:
        yield
    finally:
        with _lock:
            _disabled -= 1
            if not _disabled:
                dynamic.TIME_OUT_REMOTE_CODE = _timeout

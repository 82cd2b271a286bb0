"""Resolution of a live module, a checkpoint or a config to its spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.core.spec import Shaped, Spec
from regauge.errors import CustomCodeError, Hint, RegaugeError, SpecError, UnknownModelError
from regauge.models.families import check_counts, family_of, spec_from
from regauge.models.trust import code_disabled, library_class, without_code

if TYPE_CHECKING:
    import torch

    from regauge.checkpoints.reader import Checkpoint
    from regauge.models.discovery import Discovery

# Raised by a family for a config with nonsensical values.
_CONFIG_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError)


def spec_of(
    source: torch.nn.Module | Checkpoint | str | Path | Mapping[str, Any] | object,
    *,
    config: Mapping[str, Any] | None = None,
    discover: bool = True,
) -> Spec:
    """Return the spec of a model: that of its family, or else one discovered from its graph.

    Args:
        source: a live module of transformers or timm; a checkpoint (a path, a hub id, or opened);
            or a config, as a dict or as the library's object (its class is then built without
            memory, for the names of its tensors).
        config: a config to use instead of that of the module or checkpoint.
        discover: whether to discover the spec of a model of no known family.

    Returns:
        The spec.

    Raises:
        UnknownModelError: no family describes the model, and it cannot be discovered.
        SpecError: the config contradicts its family or the tensors.

    Example:
        >>> regauge.spec_of("model").family
        'gpt2'
    """
    from regauge.checkpoints.reader import Checkpoint, open_checkpoint

    if isinstance(source, str | Path):
        source = open_checkpoint(source)
    elif (
        isinstance(source, Mapping)
        and not isinstance(source, Checkpoint)
        and any(hasattr(value, "dtype") for value in source.values())
    ):
        raise SpecError(
            "a state dict does not name its family, so its spec is unknown",
            hint="pass the spec itself, with spec=, or the module in place of its state",
        )
    try:
        return _spec_of_family(source, config)
    except UnknownModelError as unknown:
        if not discover:
            raise
        return discover_unknown(source, unknown, config).spec


def discover_unknown(
    source: Any, unknown: UnknownModelError, config: Mapping[str, Any] | None = None
) -> Discovery:
    """Discover the symmetry of a model that no family describes. `unknown` is that error; it is
    raised if the model cannot be traced.
    """
    import torch

    from regauge.checkpoints.reader import Checkpoint
    from regauge.models.discovery import discover_config, discover_model
    from regauge.models.discovery.cache import default_folder

    try:
        if isinstance(source, torch.nn.Module):
            if config is not None or (
                getattr(source, "config", None) is None
                and not getattr(source, "pretrained_cfg", None)
            ):
                raise unknown
            return discover_model(source)
        fields = (
            (config or source.config or {})
            if isinstance(source, Checkpoint)
            else _config_to_dict(source)
        )
        if not _has_class_name(fields):
            raise unknown
        entries = source.entries if isinstance(source, Checkpoint) else {}
        return discover_config(
            fields, sum(e.numel for e in entries.values()), entries, cache=default_folder()
        )
    except UnknownModelError:
        raise
    except RegaugeError as error:
        hint = Hint(
            "restore the model's original config.json, or pass a spec file with spec= "
            "(docs/guides/adding-a-model.md)",
            cli="restore the model's original config.json, or pass a spec file with --spec "
            "(docs/guides/adding-a-model.md)",
        )
        raise UnknownModelError(f"{unknown}\n  and discovery failed: {error}", hint=hint) from error


def _has_class_name(config: Mapping[str, Any]) -> bool:
    """Return whether a config names a class to build: one of transformers in a list, or one of
    timm.
    """
    names = config.get("architectures")
    if names:
        return isinstance(names, list) and isinstance(names[0], str)
    return isinstance(config.get("architecture"), str)


def _spec_of_family(source: Any, config: Mapping[str, Any] | None) -> Spec:
    """Return the spec of a source's family."""
    from regauge.checkpoints.reader import Checkpoint

    if isinstance(source, Checkpoint):
        return _spec_of_checkpoint(source, config)
    import torch

    if isinstance(source, torch.nn.Module):
        return _spec_from_config(
            config or config_of(source), source.state_dict(), type(source).__name__
        )
    fields = _config_to_dict(source)
    module = _build_meta_module(fields)
    return _spec_from_config(
        {**fields, "architectures": [type(module).__name__]}, module.state_dict(), "the config"
    )


def config_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return a live module's config as its config.json would be.

    Raises:
        UnknownModelError: the module has neither a config nor a pretrained_cfg.
    """
    config = getattr(module, "config", None)
    if config is not None:
        return {**_config_to_dict(config), "architectures": [type(module).__name__]}
    timm_config = getattr(module, "pretrained_cfg", None)
    if timm_config:
        heads = [
            m.num_heads for m in module.modules() if isinstance(getattr(m, "num_heads", None), int)
        ]
        first: Any = next(iter(getattr(module, "blocks", [])), None)
        overrides = {
            "num_heads": heads[0] if heads else None,
            "global_pool": getattr(module, "global_pool", None),
            "no_embed_class": getattr(module, "no_embed_class", None),
        }
        return {
            **_config_to_dict(timm_config),
            **overrides,
            "block_fn": type(first).__name__,
            "norm_layer": type(getattr(first, "norm1", None)).__name__,
            "mlp_layer": _mlp_kind(first),
        }
    raise UnknownModelError(
        f"{type(module).__name__} has neither a config nor a pretrained_cfg, so its family is "
        "unknown",
        hint="discover its spec with regauge.discover(module, example_inputs), or write a "
        "spec file (docs/guides/adding-a-model.md)",
    )


def _mlp_kind(block: Any) -> str:
    """Return the kind of a live timm block's FFN. One class has the gate first or last: timm calls
    the former SwiGLU.
    """
    mlp = getattr(block, "mlp", None)
    return "swiglu" if getattr(mlp, "gate_last", True) is False else type(mlp).__name__


def _spec_of_checkpoint(checkpoint: Checkpoint, config: Mapping[str, Any] | None) -> Spec:
    """Return the spec of a checkpoint's family."""
    config = config or checkpoint.config
    if config is None:
        raise SpecError(
            f"{checkpoint.path} has no config.json, so its family is unknown",
            hint=Hint(
                "put config.json beside it, or describe the model in a spec file and "
                "pass it with spec=",
                cli="put config.json beside it, or describe the model in a spec file "
                "and pass it with --spec",
            ),
        )
    return _spec_from_config(
        config, checkpoint.entries, str(checkpoint.config_path or "the config")
    )


def _spec_from_config(
    config: Mapping[str, Any], tensors: Mapping[str, Shaped | Sequence[int]], where: str
) -> Spec:
    """Build a spec, and convert errors of nonsensical values into a SpecError."""
    try:
        return spec_from(config, tensors)
    except RegaugeError:
        raise
    except _CONFIG_ERRORS as error:
        kind = config.get("model_type") or config.get("architecture")
        raise SpecError(
            f"{where} is not a valid {kind} config: {error}",
            hint="compare it with the model's original config.json",
        ) from error


def _config_to_dict(config: Any) -> dict[str, Any]:
    """Return a config as a dict."""
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict") and not isinstance(config, type):
        return dict(config.to_dict())
    raise UnknownModelError(
        f"cannot read a spec from {config!r:.100}",
        hint="pass a module of transformers or timm, a checkpoint or its path, or a config as a "
        "dict or as the library's object",
    )


def _build_meta_module(config: Mapping[str, Any]) -> torch.nn.Module:
    """Build the module that a config describes on the meta device: all names and shapes, no
    weights.
    """
    import torch

    check_counts(config)
    if family_of(config).architectures:
        raise SpecError(
            "a timm config does not determine a model's tensors",
            hint="pass the live module or the checkpoint",
        )
    try:
        import transformers

        fields = {k: v for k, v in without_code(config).items() if k != "architectures"}
        with code_disabled(), torch.device("meta"):
            library_config = transformers.AutoConfig.for_model(**fields)
            if config.get("architectures"):
                module: torch.nn.Module = library_class(config, "the config")(library_config)
            else:
                base: Any = transformers.AutoModel
                module = base.from_config(library_config, trust_remote_code=False)
    except CustomCodeError:
        raise
    except Exception as error:  # transformers raises exceptions of any type
        raise SpecError(
            f"transformers cannot build a {config['model_type']} from the config: {error}",
            hint="compare it with the model's original config.json, or pass the module or the "
            "checkpoint itself",
        ) from error
    return module

"""From whatever a user holds to its spec: a live module, a checkpoint, a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regauge.core.spec import Shaped, Spec
from regauge.errors import CustomCodeError, RegaugeError, SpecError, UnknownModelError
from regauge.models.families import check_counts, family_of, spec_from
from regauge.models.trust import code_disabled, library_class, without_code

if TYPE_CHECKING:
    import torch

    from regauge.checkpoints.reader import Checkpoint
    from regauge.models.discovery import Discovery


def spec_of(
    source: torch.nn.Module | Checkpoint | str | Path | Mapping[str, Any] | object,
    *,
    config: Mapping[str, Any] | None = None,
    discover: bool = True,
) -> Spec:
    """The spec of a model: what its family says, or, if there is none, what can be read off its
    graph (unless not to `discover`).

    `source` is a live module of the transformers library or timm; a checkpoint, by path or hub id
    or opened; or a config, as a dict or as the library's own object (its class is then built
    without memory, for the names of its tensors). `config` stands in for a module's or a
    checkpoint's own.

    >>> # spec = regauge.spec_of(model); spec = regauge.spec_of("path/to/checkpoint")
    """
    from regauge.checkpoints.reader import open_checkpoint

    if isinstance(source, str | Path):
        source = open_checkpoint(source)
    try:
        return _spec_of_family(source, config)
    except UnknownModelError as unknown:
        if not discover:
            raise
        return discover_unknown(source, unknown, config).spec


def discover_unknown(
    source: Any, unknown: UnknownModelError, config: Mapping[str, Any] | None = None
) -> Discovery:
    """The symmetry of a model that no family describes, read off its graph; `unknown` says so, and
    is raised where there is no graph to be had.
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
        said = (
            (config or source.config or {})
            if isinstance(source, Checkpoint)
            else _config_to_dict(source)
        )
        if not _has_class_name(said):
            raise unknown
        entries = source.entries if isinstance(source, Checkpoint) else {}
        return discover_config(
            said, sum(e.numel for e in entries.values()), entries, cache=default_folder()
        )
    except UnknownModelError:
        raise
    except RegaugeError as error:
        hint = f"{error.hint}; or: {unknown.hint}" if error.hint else unknown.hint
        raise UnknownModelError(
            f"{unknown}\n  and it could not be discovered: {error}", hint=hint
        ) from error


def _has_class_name(config: Mapping[str, Any]) -> bool:
    """Return whether a config names a class to build: of the transformers library in a list, or
    timm's by itself.
    """
    names = config.get("architectures")
    if names:
        return isinstance(names, list) and isinstance(names[0], str)
    return isinstance(config.get("architecture"), str)


def _spec_of_family(source: Any, config: Mapping[str, Any] | None) -> Spec:
    from regauge.checkpoints.reader import Checkpoint

    if isinstance(source, Checkpoint):
        return _spec_of_checkpoint(source, config)
    import torch

    if isinstance(source, torch.nn.Module):
        return _spec_from_config(
            config or config_of(source), source.state_dict(), type(source).__name__
        )
    found = _config_to_dict(source)
    module = _build_meta_module(found)
    return _spec_from_config(
        {**found, "architectures": [type(module).__name__]}, module.state_dict(), "the config"
    )


def config_of(module: torch.nn.Module) -> dict[str, Any]:
    """A live module's config, as its config.json would have it."""
    config = getattr(module, "config", None)
    if config is not None:
        return {**_config_to_dict(config), "architectures": [type(module).__name__]}
    timm = getattr(module, "pretrained_cfg", None)
    if timm:
        heads = [
            m.num_heads for m in module.modules() if isinstance(getattr(m, "num_heads", None), int)
        ]
        first: Any = next(iter(getattr(module, "blocks", [])), None)
        live = {
            "num_heads": heads[0] if heads else None,
            "global_pool": getattr(module, "global_pool", None),
            "no_embed_class": getattr(module, "no_embed_class", None),
        }
        return {
            **_config_to_dict(timm),
            **live,
            "block_fn": type(first).__name__,
            "norm_layer": type(getattr(first, "norm1", None)).__name__,
            "mlp_layer": _mlp_kind(first),
        }
    raise UnknownModelError(
        f"{type(module).__name__} has neither a config nor a pretrained_cfg, so its family is "
        "not known",
        hint="read its spec off its graph, regauge.discover(module, example_inputs), or write a "
        "spec file (docs/adding-a-model.md)",
    )


def _mlp_kind(block: Any) -> str:
    """The kind of a live timm block's FFN. One class has the gate first or last: as timm names it,
    the former is a SwiGLU.
    """
    mlp = getattr(block, "mlp", None)
    return "swiglu" if getattr(mlp, "gate_last", True) is False else type(mlp).__name__


def _spec_of_checkpoint(checkpoint: Checkpoint, config: Mapping[str, Any] | None) -> Spec:
    config = config or checkpoint.config
    if config is None:
        raise SpecError(
            f"{checkpoint.path} has no config.json, so its family is not known",
            hint="put config.json beside it, or describe the model in a spec file and give it "
            "with --spec",
        )
    return _spec_from_config(
        config, checkpoint.entries, str(checkpoint.config_path or "the config")
    )


def _spec_from_config(
    config: Mapping[str, Any], tensors: Mapping[str, Shaped | Sequence[int]], where: str
) -> Spec:
    try:
        return spec_from(config, tensors)
    except RegaugeError:
        raise
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        LookupError,
        AttributeError,
    ) as error:  # a config whose values make no sense
        kind = config.get("model_type") or config.get("architecture")
        raise SpecError(
            f"{where} cannot be understood as a {kind}: {error}",
            hint="compare it with the model's original config.json",
        ) from error


def _config_to_dict(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if hasattr(config, "to_dict") and not isinstance(config, type):
        return dict(config.to_dict())
    raise UnknownModelError(
        f"a spec is not read from {config!r:.100}",
        hint="give a module of transformers or timm, a checkpoint or its path, or a config as a "
        "dict or as the library's object",
    )


def _build_meta_module(config: Mapping[str, Any]) -> torch.nn.Module:
    """The module that a config describes, on the meta device: all its names and shapes, none of its
    weights.
    """
    import torch

    check_counts(config)
    if family_of(config).architectures:
        raise SpecError(
            "timm's configs do not say what a model's tensors are",
            hint="give the live module, or the checkpoint",
        )
    try:
        import transformers

        given = {k: v for k, v in without_code(config).items() if k != "architectures"}
        with code_disabled(), torch.device("meta"):
            made = transformers.AutoConfig.for_model(**given)
            if config.get("architectures"):
                module: torch.nn.Module = library_class(config, "the config")(made)
            else:
                base: Any = transformers.AutoModel
                module = base.from_config(made, trust_remote_code=False)
    except CustomCodeError:
        raise
    except Exception as error:  # transformers raises whatever its layers run into
        raise SpecError(
            f"transformers cannot build a {config['model_type']} from the config: {error}",
            hint="compare it with the model's original config.json, or give the module or the "
            "checkpoint itself",
        ) from error
    return module

"""The models of the experiments, and the ways in which one is used: plainly, permuted, moved
without its edges, with a wrong key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from regauge.core.element import Element, element
from regauge.core.live import apply_
from regauge.errors import UnknownModelError, need
from regauge.locking.permuted import Permuted
from regauge.models.load import quiet
from regauge.models.resolve import spec_of
from regauge.models.trust import code_disabled

Tensor = torch.Tensor
WAYS = ("plain", "rows", "columns", "both", "moved", "wrong")


class Dense(torch.nn.Module):
    """A ViT and one linear layer that gives every pixel of a patch its classes."""

    def __init__(self, vit: torch.nn.Module, width: int, classes: int, patch: int) -> None:
        super().__init__()
        self.vit, self.patch = vit, patch
        self.decoder = torch.nn.Linear(width, classes * patch * patch)

    def forward(self, pixel_values: Tensor) -> Tensor:
        n, side = pixel_values.shape[0], pixel_values.shape[-1] // self.patch
        z = self.decoder(self.vit(pixel_values=pixel_values).last_hidden_state[:, 1:])
        z = z.view(n, side, side, -1, self.patch, self.patch)
        pixels: Tensor = z.permute(0, 3, 1, 4, 2, 5).reshape(
            n, -1, side * self.patch, side * self.patch
        )
        return pixels


def build(about: Mapping[str, Any], seed: int, source: str | None = None) -> torch.nn.Module:
    """A model with fresh weights from a seed, of a class of the transformers library and a config:
    {"class": ..., "config": {...}}.

    With a `source` (a folder or a hub id; for {"timm": architecture} it is optional) the weights
    are those, and only a new head is drawn. A model with "dense": classes is a ViT with one linear
    layer on top, one with "positions": factor has a table of positions that much larger than drawn.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if "timm" in about:
            return _of_timm(about, source)
        need("transformers", "models")
        import transformers

        kind = getattr(transformers, about["class"])
        if source is None:
            model = kind(
                transformers.AutoConfig.for_model(**about["config"]), **about.get("more", {})
            )
        else:
            try:
                with quiet(), code_disabled():
                    how = {
                        **about.get("config", {}),
                        **about.get("more", {}),
                        "trust_remote_code": False,
                    }
                    model = kind.from_pretrained(source, **how)
            except (OSError, ValueError) as error:
                raise _absent(source, error) from error
        if "positions" in about:
            for name, parameter in model.named_parameters():
                if name.endswith("position_embeddings"):
                    parameter.data.mul_(about["positions"])
        if "dense" in about:
            model = Dense(model, model.config.hidden_size, about["dense"], model.config.patch_size)
        return model  # type: ignore[no-any-return]


def fresh(about: Mapping[str, Any], seed: int, source: str | None = None) -> torch.nn.Module:
    """The same model as `build` makes, but with nothing of its source except the config."""
    if "timm" not in about and source is None:
        return build(about, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if "timm" in about:
            return _of_timm(about, None, pretrained=False)
        need("transformers", "models")
        import transformers

        try:
            with code_disabled():
                config = transformers.AutoConfig.from_pretrained(
                    str(source), trust_remote_code=False, **about.get("config", {})
                )
        except (OSError, ValueError) as error:
            raise _absent(str(source), error) from error
        return getattr(transformers, about["class"])(config, **about.get("more", {}))  # type: ignore[no-any-return]


def _of_timm(
    about: Mapping[str, Any], source: str | None, pretrained: bool = True
) -> torch.nn.Module:
    """A model of timm. Its pre-trained weights are those of the hub, or of a local file or folder
    with model.safetensors.
    """
    need("timm", "timm")
    import timm

    file = None if source is None else Path(source)
    if file is not None and file.is_dir():
        file = file / "model.safetensors"
    given = {"pretrained_cfg_overlay": {"file": str(file)}} if file and pretrained else {}
    try:
        return timm.create_model(  # type: ignore[no-any-return]
            about["timm"], pretrained=pretrained, num_classes=about["classes"], **given
        )
    except Exception as error:  # no network and no such file come as errors of several libraries
        raise _absent(source or about["timm"], error) from error


def _absent(source: str, error: Exception) -> UnknownModelError:
    first = (str(error) or type(error).__name__).splitlines()[0]
    return UnknownModelError(
        f"the model {source} is neither in the assets nor on the hub: {first}",
        hint="connect, or use --preset small",
    )


def draw(model: torch.nn.Module, seed: int) -> Element:
    """Columns for a model: a permutation of its stream, its heads, their insides and its
    neurons.
    """
    return element(spec_of(model), seed, within="permutation")


def used(model: torch.nn.Module, way: str, seed: int) -> torch.nn.Module:
    """The model in one of the ways in which it is used. It is moved in place.

    plain    unchanged
    rows     tokens shuffled where they enter the backbone, in a new order in every pass, and
             restored where they leave it (Eq. 2)
    columns  the weights of the backbone permuted by a key, features permuted by the same key and
             restored (Eq. 5 and 6)
    both     rows and columns
    moved    only the weights permuted: plain input without the key
    wrong    the weights permuted, and features permuted and restored by another key
    """
    if way not in WAYS:
        raise ValueError(f"there is no way {way!r}")
    if way == "plain":
        return model
    inner = model.vit if isinstance(model, Dense) else model
    rows = way in ("rows", "both")
    if rows and getattr(getattr(inner, "config", None), "model_type", "") in ("gpt2", "llama"):
        # the causal mask must be there to move with the rows
        inner.set_attn_implementation("eager")  # type: ignore[operator]
    key = None if way == "rows" else draw(inner, seed)
    if way == "moved":
        apply_(draw(inner, seed), inner, part="backbone")
        return model
    if way == "wrong":  # in the end the weights are moved by one key, and the features by another
        other = draw(inner, seed + 1_000_003)
        apply_(~other @ draw(inner, seed), inner, part="backbone")
        key = other
    wrapped = Permuted(inner, columns=key, rows=rows, key=seed)
    if isinstance(model, Dense):
        model.vit = wrapped
        return model
    return wrapped


def wrapper(model: torch.nn.Module) -> Permuted | None:
    """The wrapper in a model that `used` returned, if there is one."""
    found = model.vit if isinstance(model, Dense) else model
    return found if isinstance(found, Permuted) else None


def plain(model: torch.nn.Module) -> torch.nn.Module:
    """The plain model, with its columns where they were."""
    wrapped = wrapper(model)
    if wrapped is None:
        return model
    if isinstance(model, Dense):
        model.vit = wrapped.unwrap()
        return model
    return wrapped.unwrap()

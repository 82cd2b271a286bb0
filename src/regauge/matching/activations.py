"""What two models are seen to do on the same inputs, for matching by function instead of by
weights.

Recorded are the residual stream where it enters each block and leaves the last, and the second
moments of what attention reads. The stream is then matched by its own values (covariance
Procrustes, or assignment by correlation), and heads are compared by what they do to inputs that
occur: |(W - W') S^1/2| in place of |W - W'|. The inputs may be a user's data, without labels; or,
for language models, text that the two write themselves (`written`), which needs no data at all; or
noise of the kind that a model reads (`drawn`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call

from regauge.core import axes as ax
from regauge.core.action import State
from regauge.core.spec import Spec
from regauge.errors import RegaugeError
from regauge.models.cut import cut
from regauge.models.families import Boundary

Tensor = torch.Tensor
MAX_ROWS = (
    16_384  # rows of the stream that are kept at each place: far more than a stream has coordinates
)


class RecordError(RegaugeError):
    """A model that cannot be watched, or that shows nothing."""


@dataclass(frozen=True, eq=False)
class Activations:
    """What one model was seen to do: the stream by place, with the axes of each, and second moments
    by the tensor that reads.
    """

    streams: Mapping[str, Tensor]
    axes: Mapping[str, str]
    moments: Mapping[str, Tensor]


def record(
    model: torch.nn.Module,
    state: State | None,
    spec: Spec,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    max_rows: int = MAX_ROWS,
) -> Activations:
    """Run a model, with this state in place of its own weights if one is given, and keep what it
    shows.
    """
    streams: dict[str, list[Tensor]] = {}
    moments: dict[str, Tensor] = {}
    axes: dict[str, str] = {}
    kept: dict[str, int] = {}

    def stream(name: str, text: str, z: Tensor) -> None:
        axes[name] = f"_ {text}"
        room = max_rows - kept.get(name, 0)
        flat = z.detach().reshape(-1, z.shape[-1])[: max(room, 0)].float().cpu()
        streams.setdefault(name, []).append(flat)
        kept[name] = kept.get(name, 0) + len(flat)

    def moment(name: str, x: Tensor) -> None:
        flat = x.detach().reshape(-1, x.shape[-1]).double().cpu()
        moments[name] = moments.get(name, 0.0) + flat.T @ flat

    model.eval()
    with torch.no_grad(), _recording_hooks(model, spec, stream, moment):
        for batch in batches:
            if state is None:
                model(**batch)
            else:
                functional_call(model, dict(state), (), dict(batch), tie_weights=False)
    if not streams:
        raise RecordError(
            f"the blocks of this {type(model).__name__} were not seen at work",
            hint="give at least one batch of inputs",
        )
    return Activations({n: torch.cat(parts) for n, parts in streams.items()}, axes, moments)


@contextmanager
def _recording_hooks(
    model: torch.nn.Module, spec: Spec, stream: Any, moment: Any
) -> Iterator[None]:
    handles: list[Any] = []
    try:
        for boundary in cut(model).boundaries:
            handles += _hook_blocks(model, boundary, spec, stream)
        for pattern, text in spec.tensors.items():
            module = _find_reader(model, spec, pattern, text)
            if module is not None:
                handles.append(module.register_forward_pre_hook(_moment_hook(pattern, moment)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook_blocks(model: torch.nn.Module, boundary: Boundary, spec: Spec, stream: Any) -> list[Any]:
    found = model.get_submodule(boundary.blocks)
    blocks: Sequence[torch.nn.Module] = (
        list(found) if isinstance(found, torch.nn.ModuleList | torch.nn.Sequential) else [found]
    )
    enter, leave = (text.split()[-1] for text in (boundary.enter[boundary.stream], boundary.leave))
    if not {enter, leave} <= spec.spaces.keys():
        return []
    handles = []
    for i, block in enumerate(blocks):
        if i == 0 or enter == leave:
            handles.append(
                block.register_forward_pre_hook(
                    _input_hook(f"seen.{boundary.name}.{i}", enter, boundary.stream, stream),
                    with_kwargs=True,
                )
            )
    handles.append(
        blocks[-1].register_forward_hook(_output_hook(f"seen.{boundary.name}.last", leave, stream))
    )
    return handles


def _input_hook(name: str, text: str, argument: str, stream: Any) -> Any:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream(name, text, kwargs[argument] if argument in kwargs else args[0])

    return hook


def _output_hook(name: str, text: str, stream: Any) -> Any:
    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        stream(name, text, output[0] if isinstance(output, tuple) else output)

    return hook


def _moment_hook(name: str, moment: Any) -> Any:
    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if args:
            moment(name, args[0])

    return hook


def _find_reader(
    model: torch.nn.Module, spec: Spec, pattern: str, text: str
) -> torch.nn.Module | None:
    """The module of a weight by which heads read a space that is nobody's child."""
    leaves = [leaf for term in ax.parse(text).terms for leaf in ax.leaves(term)]
    reads = {
        leaf.space
        for leaf in leaves
        if leaf.star
        and spec.spaces[leaf.space].over is None
        and spec.spaces[leaf.space].group.is_orthogonal
    }
    inside = any(spec.spaces[leaf.space].over is not None and not leaf.star for leaf in leaves)
    if not pattern.endswith(".weight") or "{" in pattern or len(reads) != 1 or not inside:
        return None
    try:
        return model.get_submodule(pattern.removesuffix(".weight"))
    except AttributeError:
        return None


def generate_text(
    models: Sequence[torch.nn.Module],
    *,
    count: int = 64,
    length: int = 128,
    seed: int = 0,
    batch_size: int = 32,
) -> list[dict[str, Tensor]]:
    """Text that language models write themselves, by sampling from a random first token: as many
    sequences of each, as batches of input ids.
    """
    out: list[dict[str, Tensor]] = []
    share = max(1, count // len(models))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for model in models:
            if (
                not hasattr(model, "generate")
                or not getattr(model, "can_generate", lambda: False)()
            ):
                raise RecordError(f"a {type(model).__name__} writes no text", hint="give data")
            config: Any = model.config
            limit = getattr(config, "max_position_embeddings", None) or length
            for start in range(0, share, batch_size):
                n = min(batch_size, share - start)
                first = torch.randint(0, int(config.vocab_size), (n, 1))
                generate: Any = model.generate
                ids = generate(
                    first,
                    attention_mask=torch.ones_like(first),
                    do_sample=True,
                    top_k=0,
                    top_p=1.0,
                    temperature=1.0,
                    min_new_tokens=min(length, limit) - 1,
                    max_new_tokens=min(length, limit) - 1,
                    pad_token_id=0,
                )
                out.append({"input_ids": ids})
    return out


def sample_noise(
    model: torch.nn.Module,
    *,
    count: int = 256,
    length: int = 64,
    seed: int = 0,
    batch_size: int = 32,
) -> list[dict[str, Tensor]]:
    """Noise of the kind that a model reads, for models that write nothing: no data at all.

    Images whose amplitudes fall with the frequency, as those of photographs do, with much in common
    between channels; each with the brightness and contrast of standardised data. Or token ids, each
    as likely as any other.
    """
    random = torch.Generator().manual_seed(seed)
    config: Any = getattr(model, "config", None)
    if getattr(config, "image_size", None) is not None:
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = count, int(config.num_channels), int(height), int(width)
        inputs = {"pixel_values": _pink_noise(shape, random)}
    elif getattr(config, "vocab_size", None) is not None:
        length = min(length, getattr(config, "max_position_embeddings", None) or length)
        ids = torch.randint(0, int(config.vocab_size), (count, length), generator=random)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    else:
        raise RecordError(
            f"regauge does not know what a {type(model).__name__} reads", hint="give data"
        )
    return [
        {name: x[start : start + batch_size] for name, x in inputs.items()}
        for start in range(0, count, batch_size)
    ]


def _pink_noise(shape: tuple[int, int, int, int], random: torch.Generator) -> Tensor:
    """Noise with a 1/f spectrum [count, channels, height, width], of mean 0 and variance 1 over all
    images.
    """
    count, channels, height, width = shape
    across, down = torch.fft.rfftfreq(width), torch.fft.fftfreq(height)
    fall = 1 / (across[None] ** 2 + down[:, None] ** 2).sqrt().clamp(min=1 / max(height, width))
    common, own = (torch.randn(count, n, height, width, generator=random) for n in (1, channels))
    white = (
        0.9**0.5 * common + 0.1**0.5 * own
    )  # nine tenths of the variance of a photograph are brightness
    field = torch.fft.irfft2(torch.fft.rfft2(white) * fall, s=(height, width))
    return torch.div(field - field.mean(), field.std())

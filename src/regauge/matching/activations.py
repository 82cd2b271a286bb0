"""Recorded activations of two models on the same inputs, for matching by function.

`record` stores the residual stream where it enters each block and leaves the last, and the second
moments of the inputs of attention. The stream is then matched by its own values (covariance
Procrustes, or assignment by correlation), and heads are compared by their effect on inputs that
occur: |(W - W') S^1/2| in place of |W - W'|. The inputs may be a user's unlabelled data, text that
language models generate themselves (`generate_text`, no data needed), or noise in the format of the
model's inputs (`sample_noise`).
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
from regauge.errors import RecordError
from regauge.models.cut import cut
from regauge.models.families import Boundary

Tensor = torch.Tensor
# Rows of the stream recorded at each place: far more than a stream has coordinates.
MAX_ROWS = 16_384
# The largest language model, in parameters, that writes text for its alignment without being asked
# to: 64 texts of two such models take some minutes on two cores.
MAX_WRITER = 500_000_000


@dataclass(frozen=True, eq=False)
class Activations:
    """Activations of one model.

    Attributes:
        streams: the residual stream [rows, width], by place.
        axes: the axes string of each stream.
        moments: the second moments of the inputs, by the weight that reads them.
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
    """Run a model on batches and record its activations.

    Args:
        model: the module to run.
        state: weights to use in place of the module's own; None for its own.
        spec: the spec of the model.
        batches: arguments of forward, by name.
        max_rows: the number of rows of the stream to record at each place.

    Raises:
        RecordError: if no block was reached.
    """
    streams: dict[str, list[Tensor]] = {}
    moments: dict[str, Tensor] = {}
    axes: dict[str, str] = {}
    row_counts: dict[str, int] = {}

    def add_stream(name: str, text: str, z: Tensor) -> None:
        axes[name] = f"_ {text}"
        room = max_rows - row_counts.get(name, 0)
        flat = z.detach().reshape(-1, z.shape[-1])[: max(room, 0)].float().cpu()
        streams.setdefault(name, []).append(flat)
        row_counts[name] = row_counts.get(name, 0) + len(flat)

    def add_moment(name: str, x: Tensor) -> None:
        flat = x.detach().reshape(-1, x.shape[-1]).double().cpu()
        moments[name] = moments.get(name, 0.0) + flat.T @ flat

    hooks = _recording_hooks(model, spec, add_stream, add_moment)
    with torch.no_grad(), eval_mode(model), hooks:
        for batch in batches:
            if state is None:
                model(**batch)
            else:
                functional_call(model, dict(state), (), dict(batch), tie_weights=False)
    if not streams:
        raise RecordError(
            f"no block of this {type(model).__name__} was reached",
            hint="pass at least one batch of inputs",
        )
    return Activations({n: torch.cat(parts) for n, parts in streams.items()}, axes, moments)


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Disable dropout while the model is used; restore the mode on exit."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextmanager
def _recording_hooks(
    model: torch.nn.Module, spec: Spec, add_stream: Any, add_moment: Any
) -> Iterator[None]:
    """Install hooks that record streams and moments; remove them on exit."""
    handles: list[Any] = []
    try:
        for boundary in cut(model).boundaries:
            handles += _hook_blocks(model, boundary, spec, add_stream)
        for pattern, text in spec.tensors.items():
            module = _find_reader(model, spec, pattern, text)
            if module is not None:
                handles.append(module.register_forward_pre_hook(_moment_hook(pattern, add_moment)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook_blocks(
    model: torch.nn.Module, boundary: Boundary, spec: Spec, add_stream: Any
) -> list[Any]:
    """Install the hooks of one stack of blocks."""
    submodule = model.get_submodule(boundary.blocks)
    blocks: Sequence[torch.nn.Module] = (
        list(submodule)
        if isinstance(submodule, torch.nn.ModuleList | torch.nn.Sequential)
        else [submodule]
    )
    enter, leave = (text.split()[-1] for text in (boundary.enter[boundary.stream], boundary.leave))
    if not {enter, leave} <= spec.spaces.keys():
        return []
    handles = []
    for i, block in enumerate(blocks):
        if i == 0 or enter == leave:
            handles.append(
                block.register_forward_pre_hook(
                    _input_hook(f"seen.{boundary.name}.{i}", enter, boundary.stream, add_stream),
                    with_kwargs=True,
                )
            )
    handles.append(
        blocks[-1].register_forward_hook(
            _output_hook(f"seen.{boundary.name}.last", leave, add_stream)
        )
    )
    return handles


def _input_hook(name: str, text: str, argument: str, add_stream: Any) -> Any:
    """Return a hook that records the stream entering a block."""

    def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        add_stream(name, text, kwargs[argument] if argument in kwargs else args[0])

    return hook


def _output_hook(name: str, text: str, add_stream: Any) -> Any:
    """Return a hook that records the stream leaving a block."""

    def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        add_stream(name, text, output[0] if isinstance(output, tuple) else output)

    return hook


def _moment_hook(name: str, add_moment: Any) -> Any:
    """Return a hook that adds to the second moments of a module's inputs."""

    def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if args:
            add_moment(name, args[0])

    return hook


def _find_reader(
    model: torch.nn.Module, spec: Spec, pattern: str, text: str
) -> torch.nn.Module | None:
    """Return the module of a weight by which heads read a space without a parent, or None."""
    leaves = [leaf for term in ax.parse(text).terms for leaf in ax.leaves(term)]
    reads = {
        leaf.space
        for leaf in leaves
        if leaf.star
        and spec.spaces[leaf.space].over is None
        and spec.spaces[leaf.space].group.is_orthogonal
    }
    writes_head = any(spec.spaces[leaf.space].over is not None and not leaf.star for leaf in leaves)
    if not pattern.endswith(".weight") or "{" in pattern or len(reads) != 1 or not writes_head:
        return None
    try:
        return model.get_submodule(pattern.removesuffix(".weight"))
    except AttributeError:
        return None


def writes_by_default(model: torch.nn.Module) -> bool:
    """Return whether a model writes text for its alignment without being asked to: it can, and has
    at most `MAX_WRITER` parameters.
    """
    size = sum(p.numel() for p in model.parameters())
    return size <= MAX_WRITER and _can_generate(model)


def _can_generate(model: torch.nn.Module) -> bool:
    return hasattr(model, "generate") and bool(getattr(model, "can_generate", lambda: False)())


def require_generation(model: torch.nn.Module) -> None:
    """Raise unless a model can generate text.

    Raises:
        RecordError: it cannot.
    """
    if not _can_generate(model):
        raise RecordError(f"a {type(model).__name__} cannot generate text", hint="pass data")


def generate_text(
    models: Sequence[torch.nn.Module],
    *,
    count: int = 64,
    length: int = 128,
    seed: int = 0,
    batch_size: int = 32,
) -> list[dict[str, Tensor]]:
    """Sample text from language models, starting from a random first token.

    Args:
        models: the models; each generates the same number of sequences.
        count: the number of sequences of all models together.
        length: tokens in a sequence, limited by the positions of the model.
        seed: the random seed.
        batch_size: sequences in a batch.

    Returns:
        Batches of input ids. Encoder-decoders read the text twice, on both sides.

    Raises:
        RecordError: if a model cannot generate, or its generation fails.
    """
    batches: list[dict[str, Tensor]] = []
    share = max(1, count // len(models))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for model in models:
            require_generation(model)
            config: Any = model.config
            limit = getattr(config, "max_position_embeddings", None) or length
            for start in range(0, share, batch_size):
                n = min(batch_size, share - start)
                first = torch.randint(0, int(config.vocab_size), (n, 1))
                ids = _continue_text(model, first, min(length, limit) - 1)
                batch = {"input_ids": ids}
                if getattr(config, "is_encoder_decoder", False):
                    batch["decoder_input_ids"] = ids
                batches.append(batch)
    return batches


def _continue_text(model: torch.nn.Module, first: Tensor, count: int) -> Tensor:
    """Sample `count` tokens after the first ones."""
    if count < 1:
        return first
    generate: Any = model.generate
    try:
        with eval_mode(model):
            ids: Tensor = generate(
                first,
                attention_mask=torch.ones_like(first),
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
    except Exception as error:  # model classes raise exceptions of any type
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RecordError(
            f"a {type(model).__name__} failed to generate text: {reason}", hint="pass data"
        ) from error
    return ids


def sample_noise(
    model: torch.nn.Module,
    *,
    count: int = 256,
    length: int = 64,
    seed: int = 0,
    batch_size: int = 32,
) -> list[dict[str, Tensor]]:
    """Sample noise in the format of a model's inputs, for models that cannot generate text.

    Images have amplitudes that fall with the frequency, as photographs have, and channels that are
    strongly correlated; their brightness and contrast are those of standardized data. Token ids are
    uniform.

    Args:
        model: the model that reads the noise.
        count: the number of images or sequences.
        length: tokens in a sequence, limited by the positions of the model.
        seed: the random seed.
        batch_size: examples in a batch.

    Raises:
        RecordError: if the model reads neither images nor token ids.
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
        raise RecordError(f"the inputs of a {type(model).__name__} are unknown", hint="pass data")
    return [
        {name: x[start : start + batch_size] for name, x in inputs.items()}
        for start in range(0, count, batch_size)
    ]


def _pink_noise(shape: tuple[int, int, int, int], random: torch.Generator) -> Tensor:
    """Return noise with a 1/f spectrum [count, channels, height, width], standardized."""
    count, channels, height, width = shape
    across, down = torch.fft.rfftfreq(width), torch.fft.fftfreq(height)
    amplitude = 1 / (across[None] ** 2 + down[:, None] ** 2).sqrt().clamp(
        min=1 / max(height, width)
    )
    shared, per_channel = (
        torch.randn(count, n, height, width, generator=random) for n in (1, channels)
    )
    # Nine tenths of the variance of a photograph are brightness.
    white = 0.9**0.5 * shared + 0.1**0.5 * per_channel
    field = torch.fft.irfft2(torch.fft.rfft2(white) * amplitude, s=(height, width))
    return torch.div(field - field.mean(), field.std())

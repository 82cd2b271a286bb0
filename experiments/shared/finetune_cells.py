"""Two cells of the lock: fine-tune a pre-trained model that is plain, locked with the key, locked
without it, or not pre-trained; and generate text with one.

The lock is that of the library: `regauge.lock` transforms the backbone by a key, `authorize` adds
the hooks at the edges (embedding and head), `unlock` restores trained weights. A thief without the
key trains the locked weights unchanged. Two controls measure what the locked weights contribute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from experiments.shared.cells import Cell
from experiments.shared.models import build, fresh
from experiments.shared.train_cells import Parameters, parameters_of, uri_of
from regauge.checkpoints.resume import Outcome, ResumeState
from regauge.core.spec import stored_tensors
from regauge.data.evaluate import mean_loss
from regauge.data.tasks import Examples, decode, encode, prepare
from regauge.data.train import train_model
from regauge.locking.authorize import authorize_with_element
from regauge.locking.keys import Key
from regauge.locking.lock import lock_state, locked_element, unlock_state
from regauge.models.resolve import spec_of

State = dict[str, torch.Tensor]
WAYS = ("plain", "authorized", "unauthorized", "edges", "scratch")
ANOTHER = 1_000_003  # what is drawn afresh must not be what the pre-trained weights once came from


def key_of(seed: int) -> Key:
    """A key that can be made again, for experiments only: real ones come from the system's
    randomness.
    """
    return Key(hashlib.sha256(f"regauge experiment {seed}".encode()).digest())


def begun(
    p: Parameters, data: Mapping[str, Any], dtype: torch.dtype, device: str
) -> tuple[torch.nn.Module, Callable[[State], State]]:
    """Return the model that one party starts from, and the function that restores its trained
    weights.

    plain         the pre-trained model
    authorized    locked, with the key: hooks at the edges, the backbone stays locked
    unauthorized  locked, without the key: the locked weights unchanged
    edges         embedding and head, which the lock leaves in plain, with a random backbone
    scratch       nothing pre-trained
    """
    way, seed, source = p["way"], int(p["seed"]), uri_of(data, "source")
    if way not in WAYS:
        raise ValueError(f"there is no way {way!r}")
    blank = fresh(p["model"], seed + ANOTHER, source).to(device, dtype)
    if way == "scratch":
        return blank, dict
    model = build(p["model"], seed, source).to(device, dtype)
    if "start" in data:
        drawn = {
            name: t
            for name, t in blank.state_dict().items()
            if name.startswith(tuple(p.get("fresh", ())) or ("\0",))
        }
        model.load_state_dict({**data["start"].tensors, **drawn})
    spec = spec_of(model)
    if way == "edges":
        inside = {
            name
            for name, entry in stored_tensors(spec).items()
            if spec.parts.get(entry.pattern) == "backbone"
        }
        model.load_state_dict(
            {
                name: blank.state_dict()[name] if name in inside else t
                for name, t in model.state_dict().items()
            }
        )
    if way not in ("authorized", "unauthorized"):
        return model, dict
    key = key_of(seed)
    locked = lock_state(spec, {name: t.detach() for name, t in model.state_dict().items()}, key)
    model.load_state_dict(locked.state)
    if way == "unauthorized":
        return model, dict
    authorize_with_element(model, locked_element(locked.spec, locked.record, key))
    return model, lambda state: unlock_state(locked.spec, state, locked.record, key, retrained=True)


def tune(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Fine-tune one party's model: its weights, the losses of training, and those on validation
    data along the way.
    """
    recipe, seed = p["recipe"], int(p["seed"])
    dtype = getattr(torch, recipe["dtype"])
    examples, kept = (
        prepare(p[task], data["train"], uri_of(data, "tokenizer")) for task in ("task", "validated")
    )
    model, put_back = begun(p, data, dtype, work.device)
    losses, seen = train_model(
        model,
        examples,
        recipe,
        seed,
        work,
        lambda: mean_loss(model, kept, p["batch"]),
    )
    state = put_back({name: t.detach().cpu().clone() for name, t in model.state_dict().items()})
    values = {
        "losses": losses,
        "seen": seen,
        "steps": len(losses),
        "examples": len(examples),
        "parameters": parameters_of(model),
    }
    return Outcome(values, state)


def speak(p: Parameters, data: Mapping[str, Any], work: ResumeState) -> Outcome:
    """Let one party's language model go on from prompts, by `generate`, with the same random draws
    for every party; and its loss on a text.
    """
    said, tokenizer = p["said"], uri_of(data, "tokenizer")
    assert tokenizer is not None
    examples = prepare(p["task"], data["test"], tokenizer)
    dtype = getattr(torch, said["dtype"])
    model, _ = begun(p, data, dtype, work.device)
    nats = mean_loss(model, examples, p["batch"])
    tokens: list[list[int]] = []
    with torch.random.fork_rng(), torch.no_grad():
        for i, ids in enumerate(encode(tokenizer, list(said["prompts"]))):
            torch.manual_seed(1000 * int(p["seed"]) + i)
            given = torch.tensor([ids], device=work.device)
            how = {
                "do_sample": True,
                "temperature": said["temperature"],
                "max_new_tokens": said["tokens"],
                "min_new_tokens": said["tokens"],
            }
            out = model.generate(
                given, attention_mask=torch.ones_like(given), pad_token_id=0, **how
            )  # type: ignore[operator]
            tokens.append(out[0, len(ids) :].tolist())
    texts = [decode(tokenizer, ids) for ids in tokens]
    values = {
        "nats": nats,
        "frequencies": _entropy(examples),
        "tokens": tokens,
        "texts": texts,
        "examples": len(examples),
    }
    return Outcome({**values, "parameters": parameters_of(model)})


def _entropy(examples: Examples) -> float:
    """Return the nats per token of a model that predicts the token frequencies of this text."""
    counts = torch.bincount(examples.batch(np.arange(len(examples)))[1].flatten()).double()
    share = counts[counts > 0] / counts.sum()
    return float(-(share * share.log()).sum())


TUNE = Cell("tune", 1, tune)
SPEAK = Cell("speak", 1, speak)

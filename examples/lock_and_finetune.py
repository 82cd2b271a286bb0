"""Fine-tune a locked model with PEFT. The weights stay locked, and the adapter is trained in the
locked basis: without the key neither is of use.

pip install 'regauge[models]' peft && python examples/lock_and_finetune.py       # some seconds
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import regauge
from regauge.cli import main as regauge_command

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
text = torch.tensor([[(i * i + 3 * i) % 32 for i in range(64)]])  # something to learn


def train(model: torch.nn.Module, steps: int, rate: float) -> float:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    for _ in range(steps):
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


with tempfile.TemporaryDirectory() as folder:
    here = Path(folder)
    owner = LlamaForCausalLM(config)
    train(owner, 30, 3e-3)
    owner.save_pretrained(here / "model")
    assert regauge_command(["keygen", "-o", str(here / "key")]) == 0
    assert (
        regauge_command(
            ["lock", str(here / "model"), "-k", str(here / "key"), "-o", str(here / "locked")]
        )
        == 0
    )

    locked = LlamaForCausalLM.from_pretrained(here / "locked")
    nonsense = locked(input_ids=text, labels=text).loss.item()
    key = regauge.load_key(here / "key", "lock")
    model = get_peft_model(
        regauge.authorize(locked, key), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )  # authorise first, adapters after
    before = model(input_ids=text, labels=text).loss.item()
    after = train(model, 60, 1e-2)
    model.save_pretrained(here / "adapter")

    # Who has the locked model and the adapter, and no key:
    from peft import PeftModel

    thief = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(here / "locked"), here / "adapter"
    )
    stolen = thief(input_ids=text, labels=text).loss.item()

print(
    f"locked, no key: {nonsense:.2f}; authorised: {before:.2f}; with the adapter trained: "
    f"{after:.2f}; locked and adapter, no key: {stolen:.2f}"
)
assert after < before < nonsense
assert stolen > before

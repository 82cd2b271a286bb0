"""Fine-tune a locked model with PEFT. The weights stay locked, and the adapter is trained in the
locked basis: neither is usable without the key.

pip install '.[models]' peft && python examples/lock_and_finetune.py       # some seconds
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


def train(model: torch.nn.Module, steps: int, lr: float) -> float:
    """Train on the text and return the last loss."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


with tempfile.TemporaryDirectory() as folder:
    work = Path(folder)
    owner = LlamaForCausalLM(config)
    train(owner, 30, 3e-3)
    owner.save_pretrained(work / "model")
    assert regauge_command(["keygen", "-o", str(work / "key")]) == 0
    assert (
        regauge_command(
            ["lock", str(work / "model"), "-k", str(work / "key"), "-o", str(work / "locked")]
        )
        == 0
    )

    locked = LlamaForCausalLM.from_pretrained(work / "locked")
    unauthorized = locked(input_ids=text, labels=text).loss.item()
    key = regauge.load_key(work / "key", "lock")
    model = get_peft_model(
        regauge.authorize(locked, key), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    )  # authorize first, then add adapters
    before = model(input_ids=text, labels=text).loss.item()
    after = train(model, 60, 1e-2)
    model.save_pretrained(work / "adapter")

    # An attacker with the locked model and the adapter, but without the key:
    from peft import PeftModel

    thief = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(work / "locked"), work / "adapter"
    )
    stolen = thief(input_ids=text, labels=text).loss.item()

print(
    f"locked, no key: {unauthorized:.2f}; authorized: {before:.2f}; with the adapter trained: "
    f"{after:.2f}; locked and adapter, no key: {stolen:.2f}"
)
assert after < before < unauthorized
assert stolen > before

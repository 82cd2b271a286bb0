"""Masked jigsaw puzzles in a timm training script: wrap the model, and train as usual.

pip install timm && python examples/jigsaw_timm.py       # some seconds
"""

import numpy as np
import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

from regauge.jigsaw import MaskedJigsaw

torch.manual_seed(0)
rng = np.random.default_rng(0)
labels = rng.integers(0, 4, 512)
images = 0.3 * rng.standard_normal((512, 3, 32, 32)).astype(np.float32)
# The class is the colour of a square, at a random position.
for image, label in zip(images, labels, strict=True):
    x, y = rng.integers(0, 24, 2)
    image[label % 3, y : y + 8, x : x + 8] += 2.0 if label < 3 else -2.0

model = timm.create_model(
    "vit_tiny_patch16_224",
    pretrained=False,
    num_classes=4,
    img_size=32,
    patch_size=8,
    embed_dim=48,
    depth=2,
    num_heads=4,
)
# Shuffle half of the patches, under one learnable embedding for unknown positions.
wrapped = MaskedJigsaw(model, ratio=0.5)
optimizer = create_optimizer_v2(wrapped, opt="adamw", lr=2e-3, weight_decay=0.05)
scheduler, _ = create_scheduler_v2(optimizer, num_epochs=8)
for epoch in range(8):
    wrapped.train()
    for batch in torch.randperm(512).split(64):
        out = wrapped(torch.from_numpy(images[batch]), torch.from_numpy(labels[batch]))
        out.loss.backward()  # the task's loss and the position regression
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step(epoch + 1)
    print(f"epoch {epoch}: {wrapped.extra_repr()}, loss {float(out.loss):.3f}")

plain = wrapped.unwrap().eval()  # an ordinary timm model again
accuracy = float(
    (plain(torch.from_numpy(images)).argmax(1) == torch.from_numpy(labels)).float().mean()
)
print(f"accuracy of the plain model: {accuracy:.0%}")
assert accuracy > 0.5

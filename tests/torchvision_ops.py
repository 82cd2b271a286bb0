"""There is no CPU build of torchvision: its wheel imports only after the operators it misses are declared. Import this before timm or transformers."""

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

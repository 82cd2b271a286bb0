"""Make timm importable: put it and torchvision on the path, and declare the operators that
torchvision misses without its CUDA build.

There is no CPU build of torchvision; its wheel imports only after `nms` and `qnms` are declared,
and until then breaks transformers and timm alike. `make` installs both apart from everything else,
in the environment's `vision` folder. Import this before timm or transformers.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(sys.prefix) / "vision"))
_LIBRARY = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _LIBRARY.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

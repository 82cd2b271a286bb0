"""Shared by all tests: no hub, no network, and torchvision's missing operators declared once."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import torch

import torchvision_ops  # noqa: F401

torch.set_num_threads(1)

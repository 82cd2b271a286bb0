"""Slow imports, done once before processes are forked. Nothing of regauge: a child imports it for
the first time.
"""

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import safetensors.numpy
import safetensors.torch  # noqa: F401
import scipy.optimize
import scipy.stats  # noqa: F401
import torch
import transformers.models.bert.modeling_bert
import transformers.models.gemma2.modeling_gemma2
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.vit.modeling_vit  # noqa: F401

import support.torchvision_ops as torchvision_ops  # noqa: F401

torch.set_num_threads(1)

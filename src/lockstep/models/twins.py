"""One model, two views: a second module of the same class with its own config and, if wanted, the same weights."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def twin(module: PreTrainedModel, attention: str, *, share: bool, replaced: Collection[str] = ()) -> PreTrainedModel:
    """A frozen copy of `module` that calls `attention`; with `share` its weights are the same memory.

    Sharing is for phases that alternate. A config carries the attention's name, so each view has its own. Weights that
    the caller is going to replace, by name, are never copied.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.data if share or name in replaced else p.data.clone(), requires_grad=False)
        for name, p in module.named_parameters()
    }
    if share:  # router biases are weights that happen to be buffers
        memo |= {id(b): b for b in module.buffers()}
    copied = copy.deepcopy(module, memo)
    use_attention(copied, attention)
    return copied.eval()


def use_attention(module: PreTrainedModel, name: str) -> None:
    """Makes every attention layer of `module` call the function registered under `name`."""
    module.set_attn_implementation(name)

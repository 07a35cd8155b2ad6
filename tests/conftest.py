"""Shared by all tests: one thread, and tiny models made once."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine_support import small
from lockstep.models.tiny import byte_tokenizer

# Tiny tensors: a second thread costs more in waiting for a busy core than it computes.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def dense() -> PreTrainedModel:
    """A tiny Qwen3 whose distributions are not flat. Shared: do not change its weights."""
    return small()


@pytest.fixture(scope="session")
def mixture() -> PreTrainedModel:
    """The same as a mixture of experts."""
    return small(experts=4)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_tokenizer()

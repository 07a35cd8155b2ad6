"""How much memory a recipe will take, before it takes it."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.assembly.devices import choose_device
from lockstep.assembly.recipe import Recipe
from lockstep.models.kv import kv_shape
from lockstep.models.loading import ModelConfig, read_config
from lockstep.models.lowbit import low_bit_layers
from lockstep.models.tiny import tiny_model
from lockstep.rollout.core import PAGE_SIZE

GIB = 2**30


def estimate(recipe: Recipe) -> dict[str, float]:
    """GiB by purpose, on one rank. Activations are a rule of thumb; the rest is counted."""
    module = _outline(recipe.model)
    num_parameters, (num_low_bit, codes) = module.num_parameters(), _low_bit_size(recipe, module)
    text = module.config.get_text_config()
    dtype = recipe.learner.torch_dtype(choose_device(recipe.device))
    masters = 0 if dtype == torch.float32 else 4 * num_parameters
    engine = dtype.itemsize * (num_parameters - num_low_bit) + codes
    own_buffers = recipe.train.max_staleness > 0
    heads, key_size, value_size = kv_shape(text)
    kv_token = text.num_hidden_layers * heads * (key_size + value_size) * dtype.itemsize
    kv_most = recipe.rollout.max_seqs * -(-text.max_position_embeddings // PAGE_SIZE) * PAGE_SIZE * kv_token
    wide = 2 * text.hidden_size + 3 * text.intermediate_size + 4 * text.hidden_size
    layers = 2 if recipe.learner.activation_checkpointing else text.num_hidden_layers
    parts = {
        "weights": dtype.itemsize * num_parameters,
        "low-bit weights": codes * (2 if recipe.learner.num_updates > 1 else 1),
        "weights of the engine and the store": 2 * engine if own_buffers else 0,
        "float32 masters": masters,
        "gradients": 4 * num_parameters,
        "optimiser": 8 * num_parameters,
        "reference": dtype.itemsize * _reference_size(recipe),
        "keys and values": min(recipe.rollout.kv_gib * GIB, kv_most),
        "activations (about)": recipe.learner.micro_tokens * layers * wide * dtype.itemsize,
    }
    return {name: size / GIB for name, size in parts.items()}


def _low_bit_size(recipe: Recipe, module: PreTrainedModel) -> tuple[int, float]:
    """How many parameters the engine runs in low bits, and the bytes they take: codes, and at most a scale for 128."""
    precision = recipe.rollout.precision
    if precision is None:
        return 0, 0.0
    num = sum(module.get_parameter(layer.name).numel() for layer in low_bit_layers(module, precision))
    bits: int = precision.cls.bits  # type: ignore[attr-defined]
    return num, num * (bits / 8 + 4 / 128)


def _reference_size(recipe: Recipe) -> int:
    """Parameters of the model a KL term is to; 0 without one."""
    if recipe.algorithm.kl is None:
        return 0
    other = recipe.algorithm.kl.reference
    return _outline(ModelConfig(path=other) if other else recipe.model).num_parameters()


def _outline(model: ModelConfig) -> PreTrainedModel:
    """The module without its weights: nothing is loaded or made."""
    if model.init is not None:
        with torch.device("meta"):
            return tiny_model(model.init, seed=0)
    config = read_config(model.path)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)

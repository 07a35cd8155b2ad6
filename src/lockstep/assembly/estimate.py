"""How much memory a recipe will take, before it takes it."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from lockstep.assembly.devices import choose_device
from lockstep.assembly.recipe import Recipe
from lockstep.models.loading import ModelConfig, read_config
from lockstep.models.paged import kv_shape
from lockstep.models.tiny import tiny_model
from lockstep.rollout.core import PAGE_SIZE

GIB = 2**30


def estimate(recipe: Recipe) -> dict[str, float]:
    """GiB by purpose, on one rank. Activations are a rule of thumb; the rest is counted."""
    config, num_parameters = _model_size(recipe.model)
    text = config.get_text_config()
    dtype = recipe.learner.torch_dtype(choose_device(recipe.device))
    masters = 0 if dtype == torch.float32 else 4 * num_parameters
    own_buffers = recipe.train.max_staleness > 0
    heads, key_size, value_size = kv_shape(text)
    kv_token = text.num_hidden_layers * heads * (key_size + value_size) * dtype.itemsize
    kv_most = recipe.rollout.max_seqs * -(-text.max_position_embeddings // PAGE_SIZE) * PAGE_SIZE * kv_token
    wide = 2 * text.hidden_size + 3 * text.intermediate_size + 4 * text.hidden_size
    layers = 2 if recipe.learner.activation_checkpointing else text.num_hidden_layers
    parts = {
        "weights": dtype.itemsize * num_parameters,
        "weights of the engine and the store": 2 * dtype.itemsize * num_parameters if own_buffers else 0,
        "float32 masters": masters,
        "gradients": 4 * num_parameters,
        "optimiser": 8 * num_parameters,
        "reference": dtype.itemsize * _reference_size(recipe),
        "keys and values": min(recipe.rollout.kv_gib * GIB, kv_most),
        "activations (about)": recipe.learner.micro_tokens * layers * wide * dtype.itemsize,
    }
    return {name: size / GIB for name, size in parts.items()}


def _reference_size(recipe: Recipe) -> int:
    """Parameters of the model a KL term is to; 0 without one."""
    if recipe.algorithm.kl is None:
        return 0
    other = recipe.algorithm.kl.reference
    return _model_size(ModelConfig(path=other) if other else recipe.model)[1]


def _model_size(model: ModelConfig) -> tuple[PreTrainedConfig, int]:
    """Config and number of parameters, without loading or making any weight."""
    if model.init is not None:
        with torch.device("meta"):
            module = tiny_model(model.init, seed=0)
    else:
        config = read_config(model.path)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
    return module.config, sum(p.numel() for p in module.parameters())

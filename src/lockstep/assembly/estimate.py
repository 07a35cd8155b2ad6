"""How much memory a recipe will take, before it takes it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lockstep.assembly.devices import choose_device
from lockstep.assembly.recipe import Recipe
from lockstep.models.exact import require_exact_architecture
from lockstep.models.head import chunk_rows
from lockstep.models.kv import PAGE_SIZE, KVCache, kv_shape
from lockstep.models.loading import ModelConfig, read_config
from lockstep.models.lowbit import low_bit_layers
from lockstep.models.tiny import tiny_model
from lockstep.rollout.budget import kv_gib

GIB = 2**30


def estimate(recipe: Recipe) -> dict[str, float]:
    """GiB by purpose, on one rank. Activations are a rule of thumb; the rest is counted. ConfigError for a model that
    cannot be exact where that is asked for."""
    device, module = choose_device(recipe.device, exact=recipe.rollout.exact), _outline(recipe.model)
    if recipe.rollout.exact:
        require_exact_architecture(module)
    parts = _without_kv(recipe, module)
    leave = parts["weights"] + parts["low-bit weights"] + gib_for_learner(recipe, module, world=1)
    budget = kv_gib(recipe.rollout, device, leave)
    return parts | {"keys and values": min(budget, most_kv_gib(recipe, module))}


def checkpoint_gib(recipe: Recipe) -> float:
    """On disk: the model, the float32 weights it is learned in, and the optimiser's state."""
    parts = _without_kv(recipe, _outline(recipe.model))
    return parts["weights"] + (parts["float32 masters"] or parts["weights"]) + parts["optimiser"]


def most_kv_gib(recipe: Recipe, module: PreTrainedModel) -> float:
    """What all rows of the engine could ever fill with keys and values."""
    device, config = choose_device(recipe.device), recipe.rollout
    dtype = torch.float8_e4m3fn if config.kv_precision == "fp8" else recipe.learner.torch_dtype(device)
    pages = config.max_seqs * -(-module.config.get_text_config().max_position_embeddings // PAGE_SIZE)
    return pages * PAGE_SIZE * KVCache.slot_bytes(module.config, dtype) / GIB


def gib_for_learner(recipe: Recipe, module: PreTrainedModel, world: int) -> float:
    """What is still to be taken on the engine's device once the model is loaded; of what only a learner at work needs,
    nothing if the engine sleeps meanwhile."""
    parts = _without_kv(recipe, module, world)
    passing = ("gradients", "activations (about)")
    sharded = ("float32 masters", "gradients", "optimiser")
    taken = {"weights", "low-bit weights", *(passing if recipe.rollout.sleep else ())}
    return sum(gib / (world if name in sharded else 1) for name, gib in parts.items() if name not in taken)


def _without_kv(recipe: Recipe, module: PreTrainedModel, world: int = 1) -> dict[str, float]:
    num_parameters, (num_low_bit, codes) = module.num_parameters(), _low_bit_size(recipe, module)
    text = module.config.get_text_config()
    dtype = recipe.learner.torch_dtype(choose_device(recipe.device))
    masters = 0 if dtype == torch.float32 else 4 * num_parameters
    engine = dtype.itemsize * (num_parameters - num_low_bit) + codes
    own_buffers = recipe.train.max_staleness > 0 or world > 1
    parts = {
        "weights": dtype.itemsize * num_parameters,
        "low-bit weights": codes * (2 if recipe.learner.num_updates > 1 else 1),
        "weights of the engine and the store": 2 * engine if own_buffers else 0,
        "float32 masters": masters,
        "gradients": 4 * num_parameters,
        "optimiser": 8 * num_parameters,
        "reference": dtype.itemsize * _reference_size(recipe),
        "activations (about)": _activations(recipe, text, dtype),
    }
    return {name: size / GIB for name, size in parts.items()}


def _activations(recipe: Recipe, text: Any, dtype: torch.dtype) -> int:
    """What a fused layer (`models/learner_view.py`; others more) keeps of a token for its gradient: two sums and their
    norms, projections, rotated heads, what they attended to, gates and their product. And what the output layer takes:
    a chunk's logits with their gradient, and the gradient of its weight.
    """
    heads, size, value_size = kv_shape(text)
    queries = text.num_attention_heads
    attention = (2 * queries + 2 * heads) * size + (queries + heads) * value_size
    experts = getattr(text, "num_experts_per_tok", None)
    width = (experts and getattr(text, "moe_intermediate_size", None)) or text.intermediate_size
    computed = experts * (3 * width + 2 * text.hidden_size) if experts else 3 * width
    kept = 4 * text.hidden_size + attention + computed
    layers = text.num_hidden_layers
    each = 2 * kept + layers * text.hidden_size if recipe.learner.activation_checkpointing else layers * kept
    tokens, device = recipe.learner.micro_tokens, choose_device(recipe.device)
    rows = min(tokens, chunk_rows(text.vocab_size, device))
    logit = dtype.itemsize + (4 if recipe.model.float32_logits or device.type == "cpu" else 0)
    output = text.vocab_size * (rows * logit + text.hidden_size * (4 + dtype.itemsize))
    return tokens * each * dtype.itemsize + output


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

"""The learner's module made ready to train: nothing random, activations recomputed, sharded over several ranks."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lockstep.learner.ranks import Ranks
from lockstep.models.head import find_head
from lockstep.models.routing import decoder_layers


def prepare(module: PreTrainedModel, dtype: torch.dtype, recompute: bool, ranks: Ranks) -> None:
    """In place. `eval` turns dropout and router jitter off: nothing in the learner may be random."""
    module.eval()
    if recompute:
        for layer in decoder_layers(module):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if ranks.world > 1:
        shard(module, dtype, ranks)
    else:
        _cast_parameters(module, dtype)


def shard(module: PreTrainedModel, dtype: torch.dtype, ranks: Ranks) -> None:
    """FSDP2: float32 shards are the master weights, each layer is gathered in `dtype`, gradients reduce in float32."""
    _cast_parameters(module, torch.float32)
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, src=0)  # all ranks start from the same weights, whatever each has loaded
    mesh = init_device_mesh(ranks.device.type, (ranks.world,), mesh_dim_names=("fsdp",))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in decoder_layers(module):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def _cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Buffers keep theirs: rotary frequencies are float32 in a model of any dtype."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def full_weights(
    module: nn.Module, dtype: torch.dtype, names: Collection[str] | None = None, *, without: Collection[str] = ()
) -> dict[str, Tensor]:
    """Whole tensors by their Hugging Face names, tied weights once, the value head left out. All ranks must call it.

    On one rank these are the module's own tensors, not copies. With `names` only those; `without` are left out.
    """
    head = find_head(module)
    own = {id(p) for p in head.value.parameters()} if head.value is not None else set()
    seen: set[int] = set()
    weights = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) in seen | own:
            continue
        seen.add(id(tensor))
        if name in without or (names is not None and name not in names):
            continue
        weights[name] = whole(tensor.detach(), dtype)
    return weights


def whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """All of a sharded tensor, on every rank; any other as it is."""
    return tensor.full_tensor().to(dtype) if isinstance(tensor, DTensor) else tensor

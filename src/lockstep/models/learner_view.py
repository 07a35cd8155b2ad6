"""The learner's view of a model: the same module and weights; packed attention, few launches.

On a GPU most of an unfused step's time goes to what stands between the matrix products. Where a part is of a kind we
know, its forward is replaced: norms, head norms with rotation, and gates are one kernel each, with one for the gradient
(`kernels/differentiable.py`). Layers are left as transformers wrote them: FSDP2, activation checkpointing and told
routers take hold of these. The self-check holds the result against plain transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from lockstep.models import kernels, varlen
from lockstep.models.fused import ATTENTION, MLP, NORM, SILU, window
from lockstep.models.head import is_exact
from lockstep.models.twins import use_attention
from lockstep.quant.modules import apply_all


def use_learner_view(module: PreTrainedModel) -> None:
    """Makes the module compute so, in place. If it is exact, sums of attention and norms are the engine's, too."""
    exact = is_exact(module)
    use_attention(module, varlen.NAME)
    if not kernels.available(module.device):
        assert not exact, "refused when it was made exact"
        return
    part: Any
    for part in module.modules():
        kind = type(part).__name__
        if kind in NORM:
            part.forward = partial(_norm, part, exact)
        elif kind in ATTENTION and part.head_dim & (part.head_dim - 1) == 0:
            part.forward = partial(_attention, part, exact)
        elif kind in MLP and type(part.act_fn).__name__ in SILU:
            part.forward = partial(_mlp, part)


def _norm(self: Any, exact: bool, hidden_states: Tensor) -> Tensor:
    from lockstep.models.kernels.differentiable import rms_norm

    return rms_norm(hidden_states, self.weight, self.variance_epsilon, exact=exact)


def _attention(
    self: Any,
    exact: bool,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Of hidden states [1, K, width]. Its parts are read, not called: hooks on them do not run."""
    from lockstep.models.kernels.differentiable import rotated

    assert len(hidden_states) == 1, "sequences are laid end to end"
    projected = apply_all((self.q_proj, self.k_proj, self.v_proj), hidden_states)
    query, key, value = (x[0].unflatten(-1, (-1, self.head_dim)) for x in projected)
    for_query, for_key = (self.q_norm, self.k_norm) if hasattr(self, "q_norm") else (None, None)
    query, key = (
        rotated(x, norm and norm.weight, norm.variance_epsilon if norm else 0.0, position_embeddings, exact=exact)
        for x, norm in ((query, for_query), (key, for_key))
    )
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    attended, _ = varlen.attention(
        self, q, k, v, attention_mask, self.scaling, sliding_window=window(self), exact=exact, **arguments
    )
    return self.o_proj(attended.flatten(2)), None


def _mlp(self: Any, x: Tensor) -> Tensor:
    from lockstep.models.kernels.differentiable import gated_silu

    return self.down_proj(gated_silu(*apply_all((self.gate_proj, self.up_proj), x)))

"""What a model asks of its attention beyond the plain causal one: implemented, or refused by name, never dropped."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

# Bookkeeping that transformers hands to every attention function and that changes nothing here.
IGNORED = frozenset({"position_ids", "use_cache", "cache_position", "past_key_values", "output_router_logits"})


def refuse_unsupported(
    module: nn.Module, mask: Tensor | None, dropout: float, is_causal: bool | None, extra: dict[str, Any]
) -> None:
    """ValueError for sinks, softcapping, masks, dropout and whatever else Lockstep's attention does not compute."""
    name = type(module).__name__
    unknown = sorted(k for k, v in extra.items() if k not in IGNORED and v is not None and v is not False)
    if unknown:
        raise ValueError(f"{name} asks for {', '.join(unknown)}, which Lockstep's attention does not implement")
    if mask is not None:
        raise ValueError(f"{name} passes an attention mask; Lockstep separates sequences by length only")
    if dropout:
        raise ValueError(f"{name} has attention dropout {dropout}; Lockstep runs without dropout")
    if not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        raise ValueError(f"{name} is not causal; Lockstep's attention is")

"""How often the learner's routers would choose other experts than the sampler's did, and how the experts are loaded.

Prompts count too: their keys and values depend on experts as much as an answer's. L layers with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.algorithms.diagnostics.tally import Tally
from lockstep.types import Batch


@torch.no_grad()
def tally_routing(tally: Tally, batch: Batch, differ: Tensor | None, used: Tensor, num_experts: int) -> None:
    """Once per token and step. `differ` [N, L]: recorded experts, as a set, are not those the learner would choose
    (None: nothing was recorded); `used` [N, L, k]: the experts that ran."""
    rows = _forwarded(batch)
    ids = used.long() + num_experts * torch.arange(used.shape[1], device=used.device)[:, None]
    load = torch.zeros(used.shape[1] * num_experts, dtype=torch.float64, device=used.device)
    load.index_add_(0, ids.flatten(), rows.double()[:, None, None].expand_as(ids).flatten())
    tally.add("expert_load", load.view(-1, num_experts))
    if differ is not None and batch.routed is not None:
        tally.add("routing", _by_sequence(batch, differ, rows & batch.routed))


def _forwarded(batch: Batch) -> Tensor:
    """[N] bool: what a sampler forwards, all but the last token; not of a blank row, which has nothing sampled."""
    sampled = torch.zeros(batch.num_seqs, device=batch.mask.device).index_add_(0, batch.seq, batch.mask.float())
    last = torch.zeros_like(batch.mask).index_fill_(0, batch.cu_seqlens[1:].long() - 1, True)
    return (sampled > 0)[batch.seq] & ~last


def _by_sequence(batch: Batch, differ: Tensor, rows: Tensor) -> Tensor:
    """[2 + L]: sequences, then sums over them of their share of tokens with any difference, and with one in a layer."""
    columns = torch.cat([torch.ones_like(differ[:, :1]), differ.any(1, keepdim=True), differ], 1) & rows[:, None]
    sums = torch.zeros(batch.num_seqs, columns.shape[1], dtype=torch.float64, device=rows.device)
    sums = sums.index_add_(0, batch.seq, columns.double())
    num, shares = sums[:, :1], sums[:, 1:] / sums[:, :1].clamp(min=1)
    return torch.cat([(num > 0).sum(0), shares.sum(0)])


def routing_metrics(sums: Mapping[str, Tensor]) -> dict[str, float]:
    """Of a tally on the host."""
    found: dict[str, float] = {}
    if "routing" in sums and sums["routing"][0]:
        tokens, *layers = (sums["routing"][1:] / sums["routing"][0]).tolist()
        found |= {"routing/differ": sum(layers) / len(layers), "routing/differ_tokens": tokens}
        found |= {"routing/differ_per_token": sum(layers)}
        found |= {f"routing/differ/moe{number}": share for number, share in enumerate(layers)}
    if "expert_load" in sums:
        found |= _load(sums["expert_load"])
    return found


def _load(load: Tensor) -> dict[str, float]:
    """Means over layers."""
    share = load / load.sum(1, keepdim=True).clamp(min=1)
    entropy = torch.special.entr(share).sum(1) / torch.tensor(float(load.shape[1])).log()
    return {
        "routing/load_max": float((share.amax(1) * load.shape[1]).mean()),
        "routing/load_entropy": float(entropy.mean()),
        "routing/unused": float((load == 0).double().mean()),
    }


def load_drift(load: Tensor, before: Tensor) -> float:
    """Total variation between two loads [L, E]: the share of one that went elsewhere in the other; mean over layers."""
    now, then = (x / x.sum(1, keepdim=True).clamp(min=1) for x in (load, before))
    return float((now - then).abs().sum(1).mean() / 2)

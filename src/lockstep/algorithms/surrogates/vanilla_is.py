"""Vanilla-IS, a baseline that fails under low-bit sampling (Yao et al., On the Rollout-Training Mismatch, Eq. 2)."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.algorithms.surrogates.decoupled_ppo import DecoupledPPO


@dataclass(frozen=True, slots=True, kw_only=True)
class VanillaIs(DecoupledPPO):
    """−w·min(r·A, clip(r, 1−ε, 1+ε)·A);  r = exp(ℓ − ℓp), w = exp(ℓp − ℓb) without a cap.

    The same loss as `decoupled_ppo`, by another name for another cause of w ≠ 1: there the sampler is an older policy,
    here it computes the same one in fewer bits, and w has the heavier tail.
    """

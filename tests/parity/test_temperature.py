"""The engine samples and the learner scores at one temperature: identical policies show w = 1 whatever it is."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from engine_support import ask, engine_core, finish, prompt
from lockstep.data.packing import collate, row_of
from lockstep.learner.scoring import score
from lockstep.models import varlen
from lockstep.models.head import install_head
from lockstep.models.twins import twin
from lockstep.types import Completion, Request, Trajectory, Verdict


def as_trajectory(request: Request, done: Completion, temperature: float) -> Trajectory:
    asked, tokens = len(request.tokens), torch.tensor([*request.tokens, *done.tokens])
    mask = torch.arange(len(tokens)) >= asked
    return Trajectory(
        uid=request.uid,
        tokens=tokens,
        mask=mask,
        logp_behav=torch.tensor([0.0] * asked + done.logp),
        versions=torch.where(mask, 0, -1).int(),
        temperature=temperature,
        stop_reason=done.stop_reason,
        verdict=Verdict(value=1.0),
        text="",
    )


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_identical_policies_have_weights_of_one(dense: PreTrainedModel, temperature: float) -> None:
    requests = [ask(f"r{i}", prompt(7, seed=i), 24, temperature=temperature, seed=i) for i in range(4)]
    done = finish(engine_core(dense), requests)
    learner = twin(dense, varlen.NAME, share=False)
    install_head(learner, False)

    def weights(learned_at: float) -> torch.Tensor:
        batch = collate([row_of(as_trajectory(r, done[r.uid], learned_at), version=0) for r in requests])
        with torch.no_grad():
            return (score(learner, batch).logp - batch.logp_behav)[batch.mask].exp()

    assert (weights(temperature) - 1).abs().max() < 1e-4
    assert (weights(temperature * 1.1) - 1).abs().max() > 1e-2

"""What `learner.routing` can be, in words: for recipes, refusals and `lockstep explain`."""

from __future__ import annotations

ROUTING_MODES = {
    "r3": "Rollout routing replay (Ma et al., arXiv:2510.11370): every forward of the learner takes the experts that "
    "the sampler took, token by token and layer by layer; the weights they are mixed by are its own, so routers "
    "keep their gradient.",
    "r2": "Routing replay within a step: experts are recorded where the learner recomputes old log-probs and replayed "
    "in its updates, so that minibatches move the routers' choices no further; what the sampler chose does not count.",
    "off": "Routers choose anew in every forward: what the sampler chose is recorded and compared, not replayed.",
}

"""What the symbols of the equations mean, wherever one is shown."""

from __future__ import annotations

import re

SYMBOLS = {
    "ℓ": "log-prob of a sampled token under the learner as it is now: has the gradient",
    "ℓp": "its log-prob under the learner before the first update of the step, frozen",
    "ℓb": "its log-prob when the sampler drew it, frozen",
    "ℓref": "its log-prob under the reference model, frozen",
    "r": "exp(ℓ − ℓp): 1 at the first update of a step, so that clips act only if there are more",
    "w": "exp(ℓp − ℓb): how far the sampler was from the learner, frozen",
    "A": "advantage of the token, the same on a whole answer unless there is a value head",
    "R": "reward of an answer",
    "V": "what the value head predicts before the token",
    "m": "1 on sampled tokens, the end of the answer among them; 0 on the prompt",
    "L": "number of sampled tokens of a sequence",
    "B": "number of sequences of an update that have a sampled token",
    "x": "correction · surrogate of a token",
    "seq": "seq(x) = Σ(x·m)/L: the mean over one sequence",
    "sg": "sg(x) is x without its gradient",
}


def legend(equation: str) -> dict[str, str]:
    """The symbols that occur in an equation."""
    return {name: meaning for name, meaning in SYMBOLS.items() if re.search(rf"(?<![\w']){name}(?![\w'])", equation)}

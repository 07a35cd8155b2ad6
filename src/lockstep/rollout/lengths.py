"""How long answers to a prompt have been: what is expected to take longest is started first, so that it is not the last
to end when everything else is done."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from lockstep.types import Request

KEPT = 100_000  # prompts, the least recently answered is forgotten
MEMORY = 0.8  # weight of what was known, when an answer is added


class Lengths:
    """Running means of answers' tokens, by prompt. A prompt not seen yet is expected to be like the mean of all."""

    def __init__(self) -> None:
        self._of_prompt: OrderedDict[int, float] = OrderedDict()
        self._of_all = 0.0

    def expected(self, request: Request) -> float:
        known = self._of_prompt.get(hash(request.tokens), self._of_all)
        return min(known, request.params.max_tokens)

    def longest_first(self, requests: Iterable[Request]) -> list[Request]:
        """Answers to one prompt side by side, where they read it together; among equals in the order they came in."""
        of_prompt: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            of_prompt.setdefault(request.tokens, []).append(request)
        groups = sorted(of_prompt.values(), key=lambda group: max(map(self.expected, group)), reverse=True)
        return [request for group in groups for request in group]

    def saw(self, request: Request, num_tokens: int) -> None:
        prompt = hash(request.tokens)
        before = self._of_prompt.pop(prompt, float(num_tokens))
        self._of_prompt[prompt] = MEMORY * before + (1 - MEMORY) * num_tokens
        self._of_all = MEMORY * (self._of_all or num_tokens) + (1 - MEMORY) * num_tokens
        if len(self._of_prompt) > KEPT:
            self._of_prompt.popitem(last=False)

"""The embedded engine without its thread: schedule, run, commit. One caller at a time."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.models.paged import KVCache, kv_shape
from lockstep.rollout.config import RolloutConfig
from lockstep.rollout.pages import PagePool
from lockstep.rollout.runner import Runner
from lockstep.rollout.scheduler import Scheduler
from lockstep.rollout.sequence import Sequence
from lockstep.types import Completion, Request, StopReason

PAGE_SIZE = 16


class EngineCore:
    """Samples from `module`, a view of the model that calls the paged attention."""

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: Seq[int],
        config: RolloutConfig,
    ) -> None:
        self.module = module
        self.tokenizer = tokenizer
        self.end_tokens = frozenset(end_tokens)
        text = module.config.get_text_config()
        self.context: int = text.max_position_embeddings
        pages_per_seq = -(-self.context // PAGE_SIZE)
        parameter = next(module.parameters())
        num_pages = self._num_pages(config, pages_per_seq, parameter.dtype)
        cache = KVCache(
            module.config, num_pages=num_pages, page_size=PAGE_SIZE, dtype=parameter.dtype, device=parameter.device
        )
        self.runner = Runner(module, cache, max_seqs=config.max_seqs, max_pages_per_seq=pages_per_seq)
        self.scheduler = Scheduler(
            pool=PagePool(num_pages, PAGE_SIZE),
            max_seqs=config.max_seqs,
            max_step_tokens=max(config.step_tokens, config.max_seqs),
            context=self.context,
        )
        self._arrivals = 0

    def _num_pages(self, config: RolloutConfig, pages_per_seq: int, dtype: torch.dtype) -> int:
        """As many pages as every row could ever fill, or as the memory allows."""
        text = self.module.config.get_text_config()
        heads, key_size, value_size = kv_shape(text)
        page_bytes = text.num_hidden_layers * PAGE_SIZE * heads * (key_size + value_size) * dtype.itemsize
        affordable = int(config.kv_gib * 2**30 // page_bytes)
        if affordable < pages_per_seq:
            need = pages_per_seq * page_bytes / 2**30
            raise ValueError(
                f"rollout.kv_gib = {config.kv_gib} cannot hold one sequence of the model's context "
                f"({self.context} tokens need {need:.2f} GiB)"
            )
        return min(affordable, config.max_seqs * pages_per_seq)

    def check(self, request: Request) -> None:
        """Refuses a request that could never run, before it waits for anything."""
        num_prompt, params = len(request.tokens), request.params
        if not num_prompt:
            raise ValueError(f"request {request.uid!r} has no prompt tokens")
        if num_prompt >= self.context:
            raise ValueError(
                f"request {request.uid!r}: {num_prompt} prompt tokens leave no room in a context of {self.context}"
            )
        if params.max_tokens < 1:
            raise ValueError(f"request {request.uid!r}: max_tokens is {params.max_tokens}, at least 1 is needed")
        if params.temperature < 0 or not 0 < params.top_p <= 1 or not 0 <= params.min_p < 1 or params.top_k < 0:
            raise ValueError(f"request {request.uid!r}: sampling parameters out of range: {params}")
        vocab = self.runner.sampling.vocab
        if not all(0 <= token < vocab for token in request.tokens):
            raise ValueError(
                f"request {request.uid!r}: token {max(request.tokens)} is outside the vocabulary of {vocab}"
            )

    def add(self, requests: Seq[Request]) -> None:
        for request in requests:
            self.scheduler.add([Sequence.of(request, self._arrivals)])
            self._arrivals += 1

    @property
    def busy(self) -> bool:
        return not self.scheduler.idle

    def step(self) -> list[Completion]:
        """Computes one step; returns what finished with it."""
        plan = self.scheduler.schedule()
        tokens, logp = self.runner.run(plan).tolists()
        return [seq.completion() for seq in self.scheduler.commit(plan, tokens, logp, self._stopped)]

    def abort(self, uids: set[str]) -> list[Completion]:
        return [seq.completion() for seq in self.scheduler.abort(uids)]

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copies weights, by Hugging Face name, into the engine's own buffers: none may be missing, none unknown."""
        own = self.module.state_dict()
        tied = set(getattr(self.module, "all_tied_weights_keys", None) or ())
        missing = own.keys() - weights.keys() - tied
        if missing or (unknown := weights.keys() - own.keys()):
            names = sorted(missing or unknown)  # pyright: ignore[reportPossiblyUnboundVariable]
            raise ValueError(f"published weights do not fit the engine's model: {', '.join(names[:3])}")
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)

    def _stopped(self, seq: Sequence) -> StopReason | None:
        params = seq.request.params
        token = seq.tokens[-1]
        if token in self.end_tokens or token in params.stop_tokens:
            return StopReason.EOS
        if params.stop and self._hit_stop_string(seq):
            return StopReason.STOP
        if len(seq.logp) >= params.max_tokens or len(seq.tokens) >= self.context:
            return StopReason.LENGTH
        return None

    def _hit_stop_string(self, seq: Sequence) -> bool:
        """Looks at the end only; a token may be less than a character, so a few more than characters are read."""
        longest = max(map(len, seq.request.params.stop))
        tail = self.tokenizer.decode(seq.sampled[-(4 * longest + 8) :])
        return any(stop in tail for stop in seq.request.params.stop)

"""The embedded engine without its thread: schedule, run, commit. One caller at a time."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.config import ConfigError
from lockstep.models import kernels
from lockstep.models.head import is_exact
from lockstep.models.kv import PAGE_SIZE, KVCache
from lockstep.models.operators import engine_operators
from lockstep.models.releasable import Releasable
from lockstep.models.routes import RouteMemory
from lockstep.models.routing import Routers
from lockstep.rollout.budget import free_gib, kv_gib, require_memory, room
from lockstep.rollout.burst import STEPS, Burst
from lockstep.rollout.config import RolloutConfig
from lockstep.rollout.lengths import Lengths
from lockstep.rollout.pages import PagePool
from lockstep.rollout.routes import Recorder
from lockstep.rollout.rows import Rows
from lockstep.rollout.runner import Runner
from lockstep.rollout.scheduler import Draws, Plan, Scheduler
from lockstep.rollout.sequence import Sequence
from lockstep.types import LEAST_TEMPERATURE, Completion, Operator, Request, StopReason


class EngineCore:
    """Samples from `module`, a view of the model that calls the paged attention."""

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        end_tokens: Seq[int],
        config: RolloutConfig,
        routers: Routers | None = None,
        memory: Releasable | None = None,
    ) -> None:
        """With `routers`, which the module must obey, the experts of every token are recorded. What lies in `memory`
        (keys and values, routes, and the module's weights if they do) is given up in `sleep`."""
        assert config.exact == is_exact(module), "a view is exact if its model was made so before"
        self.module = module
        self.tokenizer = tokenizer
        self.end_tokens = frozenset(end_tokens)
        self.context: int = module.config.get_text_config().max_position_embeddings
        parameter = next(module.parameters())  # of the embedding: matrices may be low-bit
        self.dtype, device = parameter.dtype, parameter.device
        self.memory = memory
        self._weights_sleep = memory is not None and memory.holds(parameter)
        self._has_weights = True
        cache, routes = self._make_pages(config, routers, device)
        self.recorder = Recorder(routes, PAGE_SIZE) if routes is not None else None
        num_pages = self.capacity // PAGE_SIZE
        pages_per_seq = min(num_pages, -(-self.context // PAGE_SIZE))
        self.rows = Rows(config.max_seqs, pages_per_seq, module.config.get_text_config().vocab_size, device)
        burst = None
        if config.compile and kernels.available(device):
            burst = Burst(module, cache, self.rows, end_tokens, routes)
        self.runner = Runner(module, cache, self.rows, recorder=self.recorder, burst=burst)
        self.scheduler = Scheduler(
            pool=PagePool(num_pages, PAGE_SIZE),
            max_seqs=config.max_seqs,
            max_step_tokens=max(config.step_tokens, config.max_seqs),
            run_ahead=STEPS if burst is not None else 1,
        )
        if self.recorder is not None:
            self.scheduler.leaving = self.recorder.leaving
        self.lengths = Lengths() if device.type == "cuda" else None  # a CPU's runs resume bit for bit, without a past
        self._arrivals = 0
        self._ended: list[Sequence] = []
        self._ahead: Plan | None = None  # launched already
        if burst is not None:
            burst.warm_up()

    def _make_pages(
        self, config: RolloutConfig, routers: Routers | None, device: torch.device
    ) -> tuple[KVCache, RouteMemory | None]:
        """With a page more than the scheduler knows of, for what nobody reads."""
        self.kv_gib = kv_gib(config, device)
        dtype = torch.float8_e4m3fn if config.kv_precision == "fp8" else self.dtype
        num_pages = self._num_pages(config, dtype, routers)
        self.capacity = num_pages * PAGE_SIZE
        place = {"device": device, "memory": self.memory}
        pages = {"num_pages": num_pages + 1, "page_size": PAGE_SIZE, "dtype": dtype, "exact": is_exact(self.module)}
        try:
            require_memory(num_pages * PAGE_SIZE * KVCache.slot_bytes(self.module.config, dtype), device)
            cache = KVCache(self.module.config, **pages, **place)
            return cache, RouteMemory(routers, self.capacity + PAGE_SIZE, **place) if routers is not None else None
        except (MemoryError, RuntimeError) as error:  # what the driver says, and what PyTorch does
            told = f"rollout.kv_gib = {self.kv_gib:g} does not fit into the memory of {device}: {room(device)}"
            raise ConfigError(told) from error

    def _num_pages(self, config: RolloutConfig, dtype: torch.dtype, routers: Routers | None) -> int:
        """As many pages as every row could ever fill, or as the memory allows."""
        slot_bytes = KVCache.slot_bytes(self.module.config, dtype)
        page_bytes = PAGE_SIZE * (slot_bytes + (RouteMemory.slot_bytes(routers) if routers else 0))
        affordable = int(self.kv_gib * 2**30 // page_bytes)
        if not affordable:
            raise ConfigError(
                f"rollout.kv_gib = {self.kv_gib} does not hold the keys and values of {PAGE_SIZE} tokens "
                f"({page_bytes / 2**30:.2g} GiB)"
            )
        return min(affordable, config.max_seqs * -(-self.context // PAGE_SIZE))

    def check(self, request: Request) -> None:
        """Refuses a request that could never run, before it waits for anything."""
        if problem := self._problem(request):
            raise ConfigError(f"request {request.uid!r}: {problem}")

    def _problem(self, request: Request) -> str | None:
        num_prompt, params, vocab = len(request.tokens), request.params, self.rows.sampling.vocab
        if not num_prompt:
            return "no prompt tokens"
        if num_prompt >= self.context:
            return f"{num_prompt} prompt tokens leave no room in a context of {self.context}"
        if not 0 <= request.num_routed < num_prompt:
            return f"num_routed is {request.num_routed} of {num_prompt} prompt tokens"
        if params.max_tokens < 1:
            return f"max_tokens is {params.max_tokens}, at least 1 is needed"
        if (longest := min(num_prompt + params.max_tokens, self.context)) > self.capacity:
            return f"{longest} tokens may be needed, rollout.kv_gib = {self.kv_gib} holds {self.capacity}"
        if not (params.temperature == 0 or params.temperature >= LEAST_TEMPERATURE):
            return f"temperature is {params.temperature}: 0, which is greedy, or at least {LEAST_TEMPERATURE:g}"
        if not 0 < params.top_p <= 1 or not 0 <= params.min_p < 1 or params.top_k < 0:
            return f"sampling parameters out of range: {params}"
        if not all(params.stop):
            return "an empty stop string would end every answer at once"
        if outside := [token for token in request.tokens if not 0 <= token < vocab]:
            return f"token {outside[0]} is outside the vocabulary of {vocab}"
        return None

    def add(self, requests: Seq[Request]) -> None:
        """On a GPU the prompts first whose answers are expected to take longest."""
        if self.lengths is not None:
            requests = self.lengths.longest_first(requests)
        for request in requests:
            self.scheduler.add([Sequence.of(request, self._arrivals, self.context)])
            self._arrivals += 1

    @property
    def busy(self) -> bool:
        under_way = self._ahead is not None or not self.scheduler.idle
        return self.awake and self._has_weights and under_way

    @property
    def awake(self) -> bool:
        return self.memory is None or not self.memory.released

    def sleep(self) -> None:
        """Gives up its memory. Answers under way keep what they drew, and the experts they drew it with; their tokens
        are prefilled again after `wake`, in which the engine finds its own weights empty until the next update."""
        if self.memory is None:
            raise RuntimeError("the engine's memory cannot be given up: it was not started with rollout.sleep = true")
        if self.awake:
            self.scheduler.empty()  # what is drawn ahead for them is dropped, and drawn again
            self.memory.release()
            self._has_weights = not self._weights_sleep

    def wake(self) -> None:
        """RuntimeError, and it sleeps on, if others have taken too much of the device in the meantime."""
        if self.memory is None or self.awake:
            return
        try:
            self.memory.restore()
        except MemoryError as error:
            raise RuntimeError(
                f"the engine cannot wake: it had {self.memory.num_bytes / 2**30:.1f} GiB, the device has "
                f"{free_gib(self.memory.device):.1f} free; a smaller rollout.kv_gib leaves more to the learner"
            ) from error

    def step(self) -> list[Completion]:
        """Computes one step, or many; returns what finished with them, or shortly before."""
        plan, launched = self._ahead or self.scheduler.schedule(), self._ahead is not None
        if not launched:
            self.runner.launch(plan)
        self._ahead = self.scheduler.follow(plan)
        if self._ahead is not None:  # the device goes on while the host takes in what was drawn
            self.runner.launch(self._ahead)
        ended = self.scheduler.commit(plan, self.runner.collect(), self._take)
        if self.lengths is not None:
            for seq in ended:
                self.lengths.saw(seq.request, len(seq.sampled))
        self._ended += ended
        return self._completions(wait=not self.busy)

    def abort(self, uids: set[str]) -> list[Completion]:
        self._ended += self.scheduler.abort(uids)
        return self._completions(wait=True)

    def _completions(self, *, wait: bool) -> list[Completion]:
        """Of the sequences that have ended and whose routes are on the host; while it has work the engine goes on."""
        recorder, ended = self.recorder, self._ended
        if recorder is None:
            self._ended = []
            return [seq.completion() for seq in ended]
        recorder.read_out()
        here = [recorder.arrived(seq, wait=wait) for seq in ended]
        self._ended = [seq for seq, arrived in zip(ended, here, strict=True) if not arrived]
        return [seq.completion(recorder.take(seq)) for seq, arrived in zip(ended, here, strict=True) if arrived]

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copies weights, by Hugging Face name, into the engine's own buffers: none may be missing, none unknown."""
        if self._weights_sleep and not self.awake:
            raise RuntimeError("the engine sleeps: wake it before an update")
        own = self.module.state_dict()
        tied = set(getattr(self.module, "all_tied_weights_keys", None) or ())
        wrong = [f"{name} is missing" for name in sorted(own.keys() - weights.keys() - tied)]
        wrong += [f"{name} is unknown" for name in sorted(weights.keys() - own.keys())]
        wrong += [
            f"{name} is {tuple(weights[name].shape)}, not {tuple(own[name].shape)}"
            for name in sorted(own.keys() & weights.keys())
            if weights[name].shape != own[name].shape
        ]
        if wrong:  # before the first copy: an update is whole or it is not made
            raise ValueError(f"published weights do not fit the engine's model: {'; '.join(wrong[:3])}")
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)
        self._has_weights = True

    def operators(self, names: Seq[str] | None = None) -> dict[str, Operator]:
        if not self._has_weights:
            raise RuntimeError("the engine gave up its weights to sleep: an update brings them back")
        return engine_operators(self.module, self.dtype, names)

    def _take(self, seq: Sequence, drawn: Draws) -> int:
        """Appends what was drawn for a sequence, up to where it must stop. Of a burst, the device ended it at an end
        token or its limit; what only the host knows is looked for token by token."""
        params, before = seq.request.params, len(seq.tokens)
        pieces = [drawn]
        if params.stop or params.stop_tokens:
            pieces = [([token], [logp]) for token, logp in zip(*drawn, strict=True)]
        for tokens, logp in pieces:
            seq.tokens += tokens
            seq.logp += logp
            seq.stop_reason = self._stopped(seq)
            if seq.stop_reason is not None:
                break
        return len(seq.tokens) - before

    def _stopped(self, seq: Sequence) -> StopReason | None:
        params = seq.request.params
        token = seq.tokens[-1]
        if token in self.end_tokens or token in params.stop_tokens:
            return StopReason.EOS
        if params.stop and self._hit_stop_string(seq):
            return StopReason.STOP
        return StopReason.LENGTH if len(seq.tokens) >= seq.limit else None

    def _hit_stop_string(self, seq: Sequence) -> bool:
        """Looks at the end only; a token may be less than a character, so a few more than characters are read."""
        longest = max(map(len, seq.request.params.stop))
        first = max(seq.num_prompt, len(seq.tokens) - (4 * longest + 8))
        tail = self.tokenizer.decode(seq.tokens[first:], clean_up_tokenization_spaces=False)
        return any(stop in tail for stop in seq.request.params.stop)

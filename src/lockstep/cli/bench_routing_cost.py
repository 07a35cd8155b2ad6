"""`lockstep bench routing-cost`: what recording experts costs the sampler, and replaying them the learner.

One model, random weights. Two engines, one of which records, answer the same requests in turns of a step each, or of a
row of steps where these are one CUDA graph; then one learner makes the same step with and without the recorded experts,
in turns. A machine whose speed drifts does so for both, and the median of the ratios of neighbours leaves out what
disturbed single turns; how far it can be trusted is told with it. The garbage collector waits meanwhile: what it finds
to do, and when, has nothing to do with routes.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import ceil, floor, sqrt
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lockstep import __version__
from lockstep.algorithms.config import AlgorithmConfig
from lockstep.assembly.devices import choose_device
from lockstep.cli.benchmarks import processor, write_into
from lockstep.config import ConfigError
from lockstep.data.chat import Conversation
from lockstep.learner.config import LearnerConfig
from lockstep.learner.routes import RouteCheck
from lockstep.learner.step import LearnerCore
from lockstep.models.engine_view import engine_view
from lockstep.models.head import install_head
from lockstep.models.kv import kv_shape
from lockstep.models.learner_view import use_learner_view
from lockstep.models.routes import RouteMemory
from lockstep.models.routing import Routers, find_routers, install_routing
from lockstep.models.tiny import byte_tokenizer
from lockstep.rollout.config import RolloutConfig
from lockstep.rollout.core import EngineCore
from lockstep.types import Completion, Group, Request, Routes, Sample, SamplingParams, StopReason, Trajectory, Verdict

NAME = "cost"  # of its place on the page
GROUP = 8  # answers
ROUNDS = 4  # in which all requests are answered, after one that does not count
LONG = (4096, 48, 8)  # tokens, layers and choices of an answer whose check is timed: Qwen3-30B-A3B's
CONTEXT = {"tiny": 4096, "30b-a3b": 40_960}  # tokens of a prompt and its answer, at most
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "vocab_size": 512,
    },
    "30b-a3b": {
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    },
}


@dataclass(frozen=True, slots=True)
class Size:
    seqs: int
    prompt_tokens: int
    max_tokens: int

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of the same work with and without routes, step by step."""

    with_: list[float]
    without: list[float]

    def __str__(self) -> str:
        ratios = [a / b - 1 for a, b in zip(self.with_, self.without, strict=True)]
        low, high = median_interval(ratios)
        whole = sum(self.with_) / sum(self.without) - 1
        return (
            f"{len(ratios)} | {1e3 * median(self.without):.2f} | {1e3 * median(self.with_):.2f} | "
            f"{median(ratios):+.2%} ({low:+.2%} to {high:+.2%}) | {whole:+.2%}"
        )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median of many more would lie, in 19 of 20 cases, whatever their distribution: as many values are below
    it as heads fall in that many tosses."""
    ordered, spread = sorted(values), 1.96 * sqrt(len(values)) / 2
    low, high = floor(len(values) / 2 - spread), ceil(len(values) / 2 + spread) - 1
    return ordered[max(low, 0)], ordered[min(high, len(values) - 1)]


def compare(
    shape: str, layers: int, size: Size, *, pairs: int, device: str, out: Path | None, console: Console
) -> None:
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; choices: {', '.join(SHAPES)}")
    if size.context > CONTEXT[shape]:
        asked = f"--prompt-tokens {size.prompt_tokens} and --max-tokens {size.max_tokens} make {size.context:,}"
        raise ConfigError(f"{asked} tokens, which must be at most {CONTEXT[shape]:,}, the context of {shape}")
    place = choose_device(device)
    with console.status("making the model"):
        module = make_model(shape, layers, size.context, place)
        routers = find_routers(module)
    assert routers is not None
    bytes_ = _bytes(module, routers)
    with console.status("sampling, with and without recording"):
        recording, done = measure_recording(module, routers, size)
    with console.status("learning, with and without replay"):
        replaying = measure_replay(module, routers, _groups(done), pairs)
    text = "\n\n".join([_conditions(shape, layers, size, place), _table(recording, replaying), bytes_, _check_line()])
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        write_into(out, text, NAME)


def make_model(shape: str, layers: int, context: int, device: torch.device) -> PreTrainedModel:
    """In bfloat16 on a GPU, float32 on a CPU, made where it will run."""
    config = Qwen3MoeConfig(
        **SHAPES[shape],
        num_hidden_layers=layers,
        max_position_embeddings=context,
        norm_topk_prob=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            return Qwen3MoeForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def measure_recording(
    module: PreTrainedModel, routers: Routers, size: Size
) -> tuple[Cost, list[tuple[Request, Completion]]]:
    """After a first round that does not count, some step by step; the answers of the last come along."""
    recorded, plain = _engine(module, routers, size), _engine(module, None, size)
    rounds = [_requests(size, number, module.config.vocab_size) for number in range(ROUNDS + 1)]
    _take_turns(recorded, plain, rounds[0])
    cost, done = Cost([], []), {}
    with _undisturbed():
        for requests in rounds[1:]:
            taken, done = _take_turns(recorded, plain, requests)
            cost = Cost(cost.with_ + taken.with_, cost.without + taken.without)
    return cost, [(request, done[request.uid]) for request in rounds[-1]]


def _engine(module: PreTrainedModel, routers: Routers | None, size: Size) -> EngineCore:
    view = engine_view(module, share=True, routers=routers)
    step_tokens = max(4096, size.seqs)
    return EngineCore(view, byte_tokenizer(), (), RolloutConfig(max_seqs=size.seqs, step_tokens=step_tokens), routers)


def _requests(size: Size, number: int, vocab: int) -> list[Request]:
    """Of one round. Nothing ends an answer but its length, so that all engines make the same steps."""
    tokens = torch.randint(vocab, (size.seqs, size.prompt_tokens), generator=torch.Generator().manual_seed(number))
    return [
        Request(uid=f"{number}/{i}", tokens=tuple(row), params=SamplingParams(max_tokens=size.max_tokens, seed=i))
        for i, row in enumerate(tokens.tolist())
    ]


def _take_turns(
    recorded: EngineCore, plain: EngineCore, requests: Sequence[Request]
) -> tuple[Cost, dict[str, Completion]]:
    """Who goes first changes from step to step."""
    cost, done = Cost([], []), {}
    for core in (recorded, plain):
        core.add(requests)
    while recorded.busy:
        turns = [(recorded, cost.with_), (plain, cost.without)]
        for core, seconds in turns if len(cost.with_) % 2 else turns[::-1]:
            began = _now(core.module)
            finished = core.step()
            seconds.append(_now(core.module) - began)
            if core is recorded:
                done |= {completion.uid: completion for completion in finished}
    return cost, done


def measure_replay(module: PreTrainedModel, routers: Routers, groups: Sequence[Group], pairs: int) -> Cost:
    """One learner; without replay its routers are left alone, as if the model were dense."""
    gc.collect()  # engines
    use_learner_view(module)
    install_head(module)
    install_routing(module, routers)
    config = LearnerConfig(learning_rate=1e-9)
    core = LearnerCore(
        module,
        AlgorithmConfig.model_validate({"surrogate": "grpo", "truncated": "keep"}),
        config,
        num_updates=2 * pairs + 2,
        routers=routers,
    )
    bare = [replace(g, trajectories=tuple(replace(t, routes=None) for t in g.trajectories)) for g in groups]
    cost = Cost([], [])
    with _undisturbed():
        for number in range(pairs + 1):
            turns = [(routers, groups, cost.with_), (None, bare, cost.without)]
            for told, given, seconds in turns if number % 2 else turns[::-1]:
                core.updater.routers = told
                began = _now(module)
                _step(core, given)
                seconds.append(_now(module) - began)
    return Cost(cost.with_[1:], cost.without[1:])  # the first pair warms up


@contextmanager
def _undisturbed() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _step(core: LearnerCore, groups: Sequence[Group]) -> None:
    core.begin(0)
    core.accumulate(groups)
    core.measure()
    core.finish()


def _now(module: PreTrainedModel) -> float:
    """When the device is idle; on a CPU the time this process has had on it, which a busy machine changes less."""
    if module.device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _groups(done: Sequence[tuple[Request, Completion]]) -> list[Group]:
    """Judged by turns, so that there is something to learn."""
    answers = [_answer(request, completion, float(i % 2)) for i, (request, completion) in enumerate(done)]
    return [
        Group(index=i, sample=Sample(uid=str(i), messages=()), version=0, trajectories=tuple(answers[i : i + GROUP]))
        for i in range(0, len(answers), GROUP)
    ]


def _answer(request: Request, completion: Completion, reward: float) -> Trajectory:
    conversation = Conversation()
    conversation.observe(request.tokens)
    conversation.sampled(completion)
    return conversation.trajectory(uid=request.uid, text="", verdict=Verdict(value=reward), temperature=1.0)


def _table(recording: Cost, replaying: Cost) -> str:
    return "\n".join(
        [
            "| | pairs | without, ms | with, ms | median of ratios (19 of 20 such medians) | of the whole time |",
            "|---|---|---|---|---|---|",
            f"| recording, per turn of the engine | {recording} |",
            f"| replay, per learner step | {replaying} |",
        ]
    )


def _bytes(module: PreTrainedModel, routers: Routers) -> str:
    text = module.config.get_text_config()
    heads, key, value = kv_shape(text)
    kv = text.num_hidden_layers * heads * (key + value) * module.dtype.itemsize
    routes = RouteMemory.slot_bytes(routers)
    return f"Routes take {routes:,} bytes per token, keys and values {kv:,}: {routes / kv:.2%}."


def _check_line() -> str:
    """How long the learner looks at the routes of a long answer, on the host."""
    tokens, layers, top_k = LONG
    routers = Routers(layers=("",) * layers, modules=("",) * layers, num_experts=128, top_k=top_k)
    ids = torch.rand(tokens - 1, layers, routers.num_experts).argsort(-1)[..., :top_k].to(routers.dtype)
    answer = _long_answer(ids)
    check = RouteCheck(routers)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()  # CPU time would count threads that wait for work
        check([answer])
        seconds.append(time.perf_counter() - began)
    size = f"{tokens:,} tokens, {layers} layers, top-{top_k}"
    return f"Checking the routes of one answer ({size}) takes the host {1e3 * min(seconds):.1f} ms."


def _long_answer(ids: Tensor) -> Trajectory:
    num = len(ids) + 1
    return Trajectory(
        uid="",
        tokens=torch.zeros(num, dtype=torch.int64),
        mask=torch.ones(num, dtype=torch.bool),
        logp_behav=torch.zeros(num),
        versions=torch.zeros(num, dtype=torch.int32),
        temperature=1.0,
        stop_reason=StopReason.EOS,
        verdict=Verdict(value=0.0),
        text="",
        routes=Routes(ids, torch.zeros(len(ids), dtype=torch.int32)),
    )


def _conditions(shape: str, layers: int, size: Size, device: torch.device) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{processor()}, {os.cpu_count()} cores"
    work = f"{size.seqs} answers of {size.prompt_tokens} + {size.max_tokens} tokens at a time"
    return f"{where}; lockstep {__version__}, torch {torch.__version__}; {shape} with {layers} layers, {work}."

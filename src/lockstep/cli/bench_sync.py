"""`lockstep bench sync`: what new weights cost the engine, and what sleeping does, on this machine.

An engine is started on one set of random weights and gets another, as from a learner: quantized from float32 masters,
copied into a store and from there, between two steps, into the engine's own buffers. Where engine and learner share
their memory only the first of these is left. Afterwards it must answer as an engine that was started on those weights;
so must it after a sleep, from which its weights come back by one more update.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.cli.bench_rollout import device_name, known
from lockstep.cli.benchmarks import write_into
from lockstep.cli.rollout_workloads import SHAPES, Shape
from lockstep.config import choices
from lockstep.config.loading import validate
from lockstep.models.loading import Loaded
from lockstep.models.lowbit import LowBitWeights
from lockstep.models.tiny import byte_tokenizer
from lockstep.quant.ladder import HIGH
from lockstep.rollout.config import RolloutConfig
from lockstep.rollout.engines.embedded import Embedded
from lockstep.types import Completion, Request, SamplingParams
from lockstep.weights.memory import Memory

CONTEXT, ROWS = 32_768, 8  # so many tokens could fill the memory below
KV_GIB = {"cuda": 24.0, "cpu": 0.25}
REPEATS = 5  # the median counts
ANSWERS, PROMPT, LENGTH = 8, 64, 40
CLOSE = 0.02  # nats between log-probs of the same token; none are expected


@dataclass(frozen=True, slots=True)
class Sync:
    precision: str
    published: int  # bytes
    quantize_ms: float  # of float32 masters, once per update
    store_ms: float  # learner -> store
    load_ms: float  # store -> engine
    shared_ms: float  # the engine's part where nothing is copied
    slept: int  # bytes given back: keys and values, and the engine's own weights
    sleep_ms: float
    wake_ms: float
    difference: float  # largest, of log-probs, to an engine that was started on the new weights


def compare(shape: str, layers: int | None, precisions: Sequence[str], out: Path | None, console: Console) -> None:
    known("shape", [shape], SHAPES)
    every = [HIGH, *choices("lockstep.quant.formats")]
    known("precision", precisions, every)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    syncs = []
    for precision in precisions or every:
        console.print(f"{precision} …", highlight=False)  # a line, not a spinner: on a CPU each takes minutes
        syncs.append(asyncio.run(_measure(SHAPES[shape].cut(layers), precision, device)))
        gc.collect()
        torch.cuda.empty_cache()
    text = f"{shape}{f', {layers} layers' if layers else ''}, {device_name()}\n\n{table(syncs)}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        write_into(out, text, f"sync {shape}")


def table(syncs: Sequence[Sync]) -> str:
    """Markdown."""
    lines = [
        "| engine | published, GiB | quantize, ms | to the store, ms | to the engine, ms | GB/s | shared, ms "
        "| sleep, ms | wake, ms | GiB given back | Δ log-prob |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join(lines + [_line(sync) for sync in syncs])


def _line(s: Sync) -> str:
    return (
        f"| `{s.precision}` | {s.published / 2**30:.3g} | {s.quantize_ms:.1f} | {s.store_ms:.1f} | {s.load_ms:.1f} "
        f"| {s.published / s.load_ms / 1e6:,.0f} | {s.shared_ms:.2f} | {s.sleep_ms:.1f} | {s.wake_ms:.1f} "
        f"| {s.slept / 2**30:.1f} | {s.difference:.1g} |"
    )


async def _measure(shape: Shape, precision: str, device: torch.device) -> Sync:
    config = validate(
        RolloutConfig,
        {"precision": precision, "max_seqs": ROWS, "kv_gib": KV_GIB[device.type], "sleep": True},
        "bench sync",
    )
    store = Memory(snapshot=True)
    engine = _start(shape.module(CONTEXT, device, seed=0), config, store)
    new = shape.module(CONTEXT, device, seed=1)
    low_bit = LowBitWeights(new, config.precision) if config.precision else None
    quantize_ms = _time_quantize(new, low_bit)
    weights = _published(new, low_bit)
    try:
        before = await _answers(engine)
        store_ms = median([await _timed(device, lambda: _put(store, weights)) for _ in range(REPEATS)])
        load_ms = median([await _timed(device, lambda: engine.update_weights(1)) for _ in range(REPEATS)])
        updated = await _answers(engine)
        slept, sleep_ms, wake_ms = await _nap(engine, device)
        await engine.update_weights(1)
        woken = await _answers(engine)
    finally:
        await engine.close()
    fresh = _start(new, config.model_copy(update={"sleep": False, "kv_gib": 1.0}), None, low_bit)
    try:
        shared_ms = median([await _timed(device, lambda: fresh.update_weights(1)) for _ in range(REPEATS)])
        expected = await _answers(fresh)
    finally:
        await fresh.close()
    _require_new(before, expected)
    difference = max(_difference(updated, expected), _difference(woken, expected))
    published = sum(tensor.nbytes for tensor in weights.values())
    return Sync(precision, published, quantize_ms, store_ms, load_ms, shared_ms, slept, sleep_ms, wake_ms, difference)


def _start(
    module: PreTrainedModel, config: RolloutConfig, store: Memory | None, low_bit: LowBitWeights | None = None
) -> Embedded:
    if low_bit is None and config.precision is not None:
        low_bit = LowBitWeights(module, config.precision)
    return Embedded.start(Loaded.of(module, byte_tokenizer()), config, store, low_bit)


def _time_quantize(module: PreTrainedModel, low_bit: LowBitWeights | None) -> float:
    """Milliseconds; nothing to do in high precision."""
    if low_bit is None:
        return 0.0
    masters = {name: module.get_parameter(name).detach().float() for name in low_bit.encoded}
    times = []
    for _ in range(REPEATS):
        _settle(module.device)
        begun = time.perf_counter()
        low_bit.refresh(masters)
        _settle(module.device)
        times.append(1e3 * (time.perf_counter() - begun))
    return median(times)


def _published(module: PreTrainedModel, low_bit: LowBitWeights | None) -> dict[str, Tensor]:
    """As a learner does, tied weights once."""
    tied = getattr(module, "all_tied_weights_keys", None) or {}
    plain = {name: tensor for name, tensor in module.state_dict().items() if name not in tied}
    if low_bit is None:
        return plain
    return {name: tensor for name, tensor in plain.items() if name not in low_bit.encoded} | low_bit.publish()


async def _put(store: Memory, weights: Mapping[str, Tensor]) -> None:
    store.put(1, weights)


async def _timed(device: torch.device, action: Callable[[], Awaitable[Any]]) -> float:
    """Milliseconds, until the device is done."""
    _settle(device)
    begun = time.perf_counter()
    await action()
    _settle(device)
    return 1e3 * (time.perf_counter() - begun)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


async def _nap(engine: Embedded, device: torch.device) -> tuple[int, float, float]:
    """Bytes given back, as the device tells them where it can, and milliseconds to fall asleep and to wake."""
    memory = engine.memory
    assert memory is not None
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
    sleep_ms = await _timed(device, engine.sleep)
    slept = torch.cuda.mem_get_info()[0] - free if device.type == "cuda" else memory.num_bytes
    wake_ms = await _timed(device, engine.wake)
    return slept, sleep_ms, wake_ms


async def _answers(engine: Embedded) -> list[Completion]:
    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(0, 256, (ANSWERS, PROMPT), generator=generator).tolist()
    requests = [
        Request(uid=f"{i}", tokens=tuple(prompt), params=SamplingParams(max_tokens=LENGTH, seed=i))
        for i, prompt in enumerate(prompts)
    ]
    found = {completion.uid: completion async for completion in engine.generate(requests)}
    await engine.reset_cache()
    return [found[request.uid] for request in requests]


def _require_new(before: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Otherwise equal answers would say nothing about the update."""
    if all(a.tokens == b.tokens for a, b in zip(before, expected, strict=True)):
        raise RuntimeError("both sets of weights give the same answers")


def _difference(found: Sequence[Completion], expected: Sequence[Completion]) -> float:
    if any(a.tokens != b.tokens for a, b in zip(found, expected, strict=True)):
        raise RuntimeError("after an update the engine answers differently from one started on the same weights")
    worst = max(abs(x - y) for a, b in zip(found, expected, strict=True) for x, y in zip(a.logp, b.logp, strict=True))
    if worst > CLOSE:
        raise RuntimeError(f"after an update log-probs are {worst:.2g} nats from those of an engine started on it")
    return worst

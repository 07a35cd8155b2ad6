"""The engines that `lockstep bench rollout` compares: each loads a checkpoint and answers requests with log-probs.

Every engine runs in a process of its own, vLLM with an interpreter of its own if told so (its packages for a CPU do not
go with others): `vllm:python=/path/to/python`. It is configured for this workload as its documentation advises: CUDA
graphs (on a CPU its compiler), asynchronous scheduling, prefix caching, no detokenisation, the sampled token's log-prob
only.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from lockstep.config import ConfigError
from lockstep.config.loading import validate
from lockstep.models.engine_view import engine_view
from lockstep.models.exact import make_exact
from lockstep.models.loading import ModelConfig, load, quietly
from lockstep.models.lowbit import LowBitWeights
from lockstep.models.routing import Routers, find_routers
from lockstep.models.selfcheck import self_check
from lockstep.rollout.config import RolloutConfig
from lockstep.rollout.core import EngineCore
from lockstep.rollout.engines.embedded import Embedded
from lockstep.types import Request, SamplingParams

Ask = tuple[list[int], int]  # prompt, tokens to draw
Answer = tuple[list[int], list[float]]  # tokens, their log-probs


class Contender(Protocol):
    def __call__(self, requests: Sequence[Ask]) -> list[Answer]: ...


def lockstep(folder: Path, device: torch.device, options: dict[str, Any]) -> Contender:
    """The embedded engine, through the same interface as in training."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loaded = load(ModelConfig(path=str(folder)), dtype=dtype, device=device, seed=0)
    self_check(loaded.module)
    config = rollout_config(options)
    if config.exact:
        make_exact(loaded.module)
    low_bit = LowBitWeights(loaded.module, config.precision) if config.precision is not None else None
    routers = _recorded(loaded.module) if options.get("record", True) else None
    view = engine_view(loaded.module, share=True, low_bit=low_bit, routers=routers)
    engine = Embedded(EngineCore(view, loaded.tokenizer, (), config, routers), store=None)

    async def generate(requests: Sequence[Ask]) -> list[Answer]:
        asked = [
            Request(uid=f"{i}", tokens=tuple(prompt), params=SamplingParams(max_tokens=n, seed=i))
            for i, (prompt, n) in enumerate(requests)
        ]
        found = {c.uid: (list(c.tokens), list(c.logp)) async for c in engine.generate(asked)}
        await engine.reset_cache()
        return [found[r.uid] for r in asked]

    return lambda requests: asyncio.run(generate(requests))


def rollout_config(options: Mapping[str, Any]) -> RolloutConfig:
    """ConfigError for a value that it refuses."""
    tables = {
        "max_seqs": options["max_seqs"],
        "step_tokens": options.get("step_tokens", 16_384),
        "kv_gib": options["kv_gib"],
        "precision": options.get("precision"),
        "kv_precision": options.get("kv", "high"),
        "exact": options.get("exact", False),
        "compile": options.get("compile", True),
    }
    return validate(RolloutConfig, tables, "lockstep")


def _recorded(module: PreTrainedModel) -> Routers | None:
    try:
        return find_routers(module)
    except ConfigError as refused:
        raise ConfigError(f"{refused}; lockstep:record=false samples without recording them") from None


def vllm(folder: Path, device: torch.device, options: dict[str, Any]) -> Contender:
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has looked at the device already
    on_cpu = device.type == "cpu"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(options.get("multiprocessing", not on_cpu)))
    if on_cpu:  # with few cores a process of its own only takes turns with ours
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(options["kv_gib"])))
    import vllm as library  # pyright: ignore[reportMissingImports]

    llm = library.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype=options.get("dtype", "float32" if on_cpu else "bfloat16"),
        max_model_len=options["context"],
        max_num_seqs=options["max_seqs"],
        kv_cache_dtype=options.get("kv", "auto"),
        max_num_batched_tokens=16_384,
        enable_prefix_caching=True,
        async_scheduling=options.get("async_scheduling", True),
        disable_log_stats=True,
        seed=0,
        **({} if on_cpu else {"gpu_memory_utilization": 0.8}),
        **({"quantization": options["quantization"]} if "quantization" in options else {}),
    )

    def generate(requests: Sequence[Ask]) -> list[Answer]:
        params = [
            library.SamplingParams(
                temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False, seed=None
            )
            for _, n in requests
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        found = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        llm.reset_prefix_cache()
        return [(list(o.token_ids), [next(iter(p.values())).logprob for p in o.logprobs]) for o in found]

    return generate


def plain_model(folder: Path, device: torch.device) -> Any:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with quietly():
        module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return module.to(device)


def transformers(folder: Path, device: torch.device, options: dict[str, Any]) -> Contender:
    """`generate`: one batch, which runs until its longest answer is done."""
    module = plain_model(folder, device)

    @torch.inference_mode()
    def generate(requests: Sequence[Ask]) -> list[Answer]:
        ids = torch.tensor([prompt for prompt, _ in requests], device=device)
        longest = max(n for _, n in requests)
        out = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=longest,
            min_new_tokens=longest,
            return_dict_in_generate=True,
            output_logits=False,
            pad_token_id=0,
        )
        tokens = out.sequences[:, ids.shape[1] :].tolist()
        return [(t[:n], []) for t, (_, n) in zip(tokens, requests, strict=True)]

    return generate


def continuous_batching(folder: Path, device: torch.device, options: dict[str, Any]) -> Contender:
    """`generate_batch` of transformers, with a manager that stays: making its cache takes longer than short answers."""
    module = plain_model(folder, device)
    config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)

    def generate(requests: Sequence[Ask]) -> list[Answer]:  # which computes in a thread of its own, in its own mode
        out = module.generate_batch(
            inputs=[prompt for prompt, _ in requests],
            generation_config=config,
            max_new_tokens=max(n for _, n in requests),
            persistent_manager=True,
            progress_bar=False,
        )
        found = [out[key] for key in sorted(out, key=lambda name: int(name.rpartition("_")[2]))]
        return [(list(f.generated_tokens)[:n], []) for f, (_, n) in zip(found, requests, strict=True)]

    return generate


ENGINES: dict[str, Callable[[Path, torch.device, dict[str, Any]], Contender]] = {
    "lockstep": lockstep,
    "vllm": vllm,
    "generate": transformers,
    "continuous": continuous_batching,
}
OPTIONS = {
    "lockstep": ("precision", "kv", "exact", "compile", "record", "step_tokens", "max_seqs", "kv_gib"),
    "vllm": ("multiprocessing", "async_scheduling", "quantization", "kv", "dtype", "max_seqs", "python"),
    "generate": (),
    "continuous": (),
}
"""What may follow an engine's name."""
FLAGS = frozenset({"record", "multiprocessing", "async_scheduling"})  # of these, what is true or false

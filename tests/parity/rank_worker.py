"""One rank of the two-rank test: rank 0 is the front and writes what came out, the other serves."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "learner"))
from making import make_checkpoint, make_core, make_group, routed

from lockstep.learner.ranks import Front, join, leave, serve
from lockstep.learner.step import LearnerCore
from lockstep.types import Group

REFERENCE = "reference"
EXPERTS = ("experts", "low-bit-experts")
PRECISION = {"low-bit": "w4a16", "low-bit-experts": "w4a8", "low-bit-replayed": "fp8_w8a8"}


def prepare(folder: Path) -> None:
    """Before the ranks start: the checkpoint that some cases are held to."""
    make_checkpoint(folder / REFERENCE, seed=5)


def steps(case: str) -> list[list[Group]]:
    """Uneven: one group of three answers, so that shares differ and, at the end, one rank has nothing at all."""
    if case == "uneven":
        return [[make_group(0, (1.0, 0.0, 0.5))], [make_group(1, (1.0, None, 0.0)), make_group(2, (0.0, 1.0))]]
    if case.startswith("routed"):
        return [[routed(make_group(4 * s + i, (1.0, 0.0, 0.5, 0.0)), seed=i) for i in range(3)] for s in range(2)]
    return [[make_group(4 * s + i, (1.0, 0.0, 0.5, 0.0)) for i in range(4)] for s in range(2)]


def build(name: str, folder: Path) -> LearnerCore:
    """In a prepared folder."""
    algorithm, learner = {
        "streamed": ({"surrogate": "dapo"}, {"micro_tokens": 30}),
        "uneven": ({"surrogate": "grpo"}, {"micro_tokens": 12}),
        "replayed": ({"surrogate": "dapo"}, {"micro_tokens": 40, "mini_steps": 2, "epochs": 2}),
        "values": ({"surrogate": "ppo"}, {"micro_tokens": 40, "mini_steps": 2}),
        "recomputed": ({"surrogate": "dapo"}, {"micro_tokens": 30, "activation_checkpointing": True}),
        "experts": ({"surrogate": "dapo"}, {"micro_tokens": 30}),
        "routed": ({"surrogate": "dapo"}, {"micro_tokens": 30, "activation_checkpointing": True}),
        "routed, replayed": ({"surrogate": "dapo"}, {"micro_tokens": 40, "mini_steps": 2}),
        "governed": ({"surrogate": "dapo"}, {"micro_tokens": 30}),
        "held": ({"surrogate": "dapo", "kl": {"coef": 0.5}}, {"micro_tokens": 30}),
        "penalised": ({"surrogate": "dapo", "kl": {"estimator": "k1", "where": "reward"}}, {"micro_tokens": 30}),
        "summed": ({"surrogate": "rloo"}, {"micro_tokens": 40, "mini_steps": 2}),
        "normed": ({"surrogate": "dr_grpo", "correction": ["tis", "veto"]}, {"micro_tokens": 30}),
        "batch-wide": ({"surrogate": "reinforce_pp", "correction": "icepop"}, {"micro_tokens": 40}),
        "scaled": ({"surrogate": "dapo"}, {"micro_tokens": 30, "update_scale": 1.5}),
        "rates": ({"surrogate": "dapo"}, {"micro_tokens": 30, "update_scale": 1.5, "update_scale_by": "rates"}),
        "low-bit": ({"surrogate": "dapo"}, {"micro_tokens": 30, "activation_checkpointing": True}),
        "low-bit-experts": ({"surrogate": "dapo"}, {"micro_tokens": 30}),
        "low-bit-replayed": ({"surrogate": "dapo"}, {"micro_tokens": 40, "mini_steps": 2, "update_scale": 1.5}),
        "bfloat16": ({"surrogate": "dapo"}, {"micro_tokens": 30, "dtype": "bfloat16"}),
    }[name]
    obeying = name.startswith("routed")
    seed = dist.get_rank() if dist.is_initialized() else 0
    core = make_core(
        algorithm,
        learner,
        seed=seed,
        experts=name in EXPERTS or obeying,
        precision=PRECISION.get(name),
        obeying=obeying,
    )
    if "kl" in algorithm:
        core.load_reference(str(folder / REFERENCE))
    return core


def drive(front: Front, name: str, folder: Path) -> None:
    """Two steps, a checkpoint between them loaded into the same core. Governed: the first is skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    metrics = []
    for version, groups in enumerate(steps(name)):
        front.call("begin", version)
        for group in groups:
            front.call("accumulate", [group])
        front.call("measure")
        metrics.append(front.call("finish", name == "governed" and version == 0))
        if name == "governed":
            front.call("set_correction", "none")
        front.call("published")
        front.call("save", folder)
        front.call("load", folder)
    torch.save(front.call("checkpoint"), folder / "weights.pt")
    torch.save(front.call("published"), folder / "published.pt")
    (folder / "metrics.json").write_text(json.dumps(metrics))


def main(folder: Path, names: list[str]) -> None:
    assert join(torch.device("cpu"), timedelta(seconds=60)).world == 2
    for name in names:
        core = build(name, folder)
        if dist.get_rank() == 0:
            front = Front(core)
            drive(front, name, folder / name)
            front.stop()
        else:
            serve(core)
    leave()
    assert not dist.is_initialized()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(Path(sys.argv[1]), sys.argv[2:])
    os._exit(0)  # torch now and then aborts while the interpreter takes a process group apart

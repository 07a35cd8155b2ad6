"""One training step, in four calls: `begin`, `accumulate` as groups arrive, `measure`, `finish`.

Between the last two somebody may look at what was measured and decide that the weights shall not move.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lockstep.algorithms.config import AlgorithmConfig
from lockstep.algorithms.diagnostics import Tally, load_drift, metrics
from lockstep.algorithms.ladder import as_rung
from lockstep.algorithms.supervised import CROSS_ENTROPY
from lockstep.config.loading import validate
from lockstep.data.packing import example_row
from lockstep.learner.checkpoint import load_state, save_state
from lockstep.learner.config import LearnerConfig
from lockstep.learner.parallel import full_weights
from lockstep.learner.passes import Outcome, Pass, Replayed, Streamed
from lockstep.learner.precision import Skip
from lockstep.learner.ranks import Ranks
from lockstep.learner.reference import Reference
from lockstep.learner.routes import RouteCheck
from lockstep.learner.rows import admit
from lockstep.learner.update_scale import UpdateScale
from lockstep.learner.updates import Updater
from lockstep.models.head import find_head
from lockstep.models.lowbit import LowBitWeights
from lockstep.models.operators import learner_operators
from lockstep.models.routing import Routers
from lockstep.types import Group, Operator


class LearnerCore:
    """Synchronous and algorithm-blind; every rank has one and all ranks make the same calls."""

    def __init__(
        self,
        module: PreTrainedModel,
        algorithm: AlgorithmConfig,
        config: LearnerConfig,
        *,
        num_updates: int,
        ranks: Ranks | None = None,
        update_scale: UpdateScale | None = None,
        low_bit: LowBitWeights | None = None,
        routers: Routers | None = None,
    ) -> None:
        """`module` runs `models.varlen`'s attention and has a `LogProbHead` (with a value if the algorithm needs one).

        `num_updates` are the optimiser updates of the whole run, for the schedule. `low_bit` is what the engine runs
        of the matrices; whether the module's own forward runs it too is for whoever built the module. `routers` are
        those of a mixture that the module makes obey; None: a dense model, or one whose routers cannot be followed.
        """
        self.algorithm, self.config, self.ranks = algorithm, config, ranks or Ranks.current(module.device)
        self.objective, self.advantage = algorithm.build_objective(), algorithm.build_advantage()
        self.penalty = algorithm.build_penalty()
        self.updater = Updater(module, config, num_updates, self.ranks, update_scale, low_bit, routers)
        self.begin(version=0)

    @property
    def streams(self) -> bool:
        """Whether gradients are taken while groups still arrive."""
        waits = self.advantage.scope == "batch" or self.advantage.needs_values or self.penalty is not None
        return self.config.num_updates == 1 and not waits

    def begin(self, version: int) -> None:
        """Starts a step of the learner at `version`; an unfinished one is forgotten."""
        self.updater.discard()
        self._version, self._num_tokens, self._busy = version, 0, 0.0
        self._left_out = Counter[str]()
        routers = self.updater.routers
        self._check_routes = RouteCheck(routers, replayed=self.config.routing == "r3") if routers else None
        self._measured = False
        self._pass: Pass = (
            Streamed(self.updater, self.objective, self.advantage)
            if self.streams
            else Replayed(self.updater, self.objective, self.advantage, self.config, self.penalty)
        )

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Takes complete groups in the order they are to be learned from."""
        with self._working():
            for group in groups:
                judged = admit(group, self._version, self.algorithm.truncated, self._left_out, self._check_routes)
                self._num_tokens += sum(map(len, judged.rows))
                self._pass.take(judged)

    def measure(self) -> dict[str, float]:
        """All groups are in: what is known of them before the weights move, by the names in `lockstep.metrics`."""
        with self._working():
            self._pass.measure()
            self._measured = True
            return self._tallied()

    def finish(self, skip: bool = False) -> dict[str, float]:
        """The updates of a measured step and all its metrics. With `skip` weights, optimiser and schedule stay put."""
        assert self._measured, "finish follows measure: the last groups would be lost"
        with self._working():
            result = _summary(self._pass.finish(skip)) | self._tallied()
            self.updater.encode()
            if self.updater.low_bit is not None:
                result |= self.updater.low_bit.metrics()
        return result | {
            "time/learn": self._busy,
            "perf/train_tokens_per_s": self._num_tokens / self._busy,
            "perf/memory_gib": peak_memory(self.ranks.device),
        }

    def _tallied(self) -> dict[str, float]:
        tally = replace(self._pass.tally)  # updates may still add to the pass's own
        tally.combine(self.ranks.sum, self.ranks.max)
        found = metrics(tally) | {"mismatch/refused": float(self._left_out["refused"])}
        return found | self._drift(tally) | (self._check_routes.metrics if self._check_routes else {})

    def _drift(self, tally: Tally) -> dict[str, float]:
        if (load := tally.sums.get("expert_load")) is None:
            return {}
        if self.updater.first_load is None:
            self.updater.first_load = load
        return {"routing/load_drift": load_drift(load, self.updater.first_load)}

    @contextmanager
    def _working(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._busy += time.perf_counter() - start

    def set_correction(self, name: str) -> None:
        """From the next step on, with the options it has on the ladder.

        ConfigError if there is none or the surrogate refuses it.
        """
        tables = self.algorithm.model_dump() | {"correction": as_rung(self.algorithm, name)}
        algorithm = validate(AlgorithmConfig, tables, f"correction {name!r}")
        self.algorithm, self.objective = algorithm, algorithm.build_objective()

    def set_learning_rate(self, rate: float) -> None:
        """At the top of the schedule, from the next update on."""
        self.updater.learning_rate = rate

    def supervised(self, examples: Sequence[tuple[Tensor, Tensor]], learning_rate: float) -> dict[str, float]:
        """One update on worked examples (tokens, mask), outside any step and outside the schedule."""
        self.updater.discard()
        for micro in self.updater.shares([example_row(tokens, mask) for tokens, mask in examples]):
            self.updater.backward(micro, CROSS_ENTROPY, None)
        applied = self.updater.apply(learning_rate)
        return {"warmup/loss": applied.loss, "warmup/learning_rate": learning_rate}

    def forget(self) -> None:
        """A fresh optimiser: what it learned of the supervised warm-up's gradients does not fit the policy's."""
        self.updater.build_optimiser()

    def load_reference(self, path: str) -> None:
        """The checkpoint the algorithm's KL term is to; without one a step fails. Part of no state: see the recipe."""
        float32_logits = find_head(self.updater.module).logits.float32
        self.updater.reference = Reference(path, self.updater.dtype, self.ranks, float32_logits=float32_logits)

    def weights(self) -> dict[str, Tensor]:
        """Whole tensors by their Hugging Face names, tied weights once; on one rank the live ones."""
        return full_weights(self.updater.module, self.updater.dtype)

    def checkpoint(self) -> dict[str, Tensor]:
        """The weights as a Hugging Face checkpoint has them: without update-aware scaling."""
        return self.updater.update_scale.end(self.updater.masters, self.weights())

    def published(self) -> dict[str, Tensor]:
        """What the engine loads: low-bit tensors, as they were made after the last update, in place of matrices."""
        updater, low_bit = self.updater, self.updater.low_bit
        if low_bit is None:
            return self.weights()
        updater.encode()
        return full_weights(updater.module, updater.dtype, without=low_bit.encoded) | low_bit.publish()

    def operators(self, names: Sequence[str] | None = None) -> dict[str, Operator]:
        """What the forward runs each weight in, with the digest of what is published for it."""
        updater = self.updater
        weights = full_weights(updater.module, updater.dtype, names)
        encoded = updater.low_bit.encoded if updater.low_bit else {}
        return learner_operators(updater.module, weights, encoded, updater.dtype)

    def save(self, folder: Path) -> None:
        """All a bit-exact resume of the same config needs: master weights, optimiser, counters, loss scale, value
        head."""
        save_state(folder, self.updater, self.ranks)

    def load(self, folder: Path) -> None:
        load_state(folder, self.updater)


def peak_memory(device: torch.device) -> float:
    """GiB: of the device if it has memory of its own, else of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest / (2**30 if sys.platform == "darwin" else 2**20)  # bytes there, KiB on Linux


def _summary(outcome: Outcome) -> dict[str, float]:
    """Means over the updates that were made."""
    made = [a for a in outcome.applied if not a.skipped]
    num = max(len(made), 1)
    summary = {
        "policy/loss": sum(a.loss for a in made) / num,
        "policy/grad_norm": sum(a.grad_norm for a in made) / num,
        "policy/learning_rate": outcome.applied[-1].learning_rate,
        "policy/updates": float(len(made)),
        "policy/skipped": float(len(outcome.applied) - len(made)),
        "policy/nonfinite": float(sum(a.skipped is Skip.NONFINITE for a in outcome.applied)),
    }
    if outcome.explained is None:
        return summary
    return summary | {"value/loss": sum(a.value_loss for a in made) / num, "value/explained": outcome.explained}

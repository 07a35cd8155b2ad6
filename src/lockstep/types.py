"""What flows through Lockstep: a Sample is answered by Trajectories, a Group of them is learned from as a Batch.

Words used the same way everywhere: a *step* of training consumes one batch of groups and publishes one *version* of the
weights; within it the optimiser makes one or more *updates*. (An engine step is one forward pass of the engine.)

Everything is frozen. Per-token fields are aligned with the token itself: `logp_behav[t]` is the log-prob of
`tokens[t]` given `tokens[:t]`, and `mask[t]` says whether the model sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a process that only judges answers starts without torch
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Message:
    role: str  # "system" | "user" | "assistant" | "tool"
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One problem: what the model is asked and what a verifier needs to judge the answer."""

    uid: str  # "train/17": the same problem in every run and after every resume
    messages: tuple[Message, ...]
    answer: str = ""  # "42"
    solution: str | None = None  # a worked answer, for supervised warm-up; None where the task has none
    info: Mapping[str, Any] = field(default_factory=dict)  # what else the reward reads, e.g. {"numbers": [3, 5, 7]}


LEAST_TEMPERATURE = 1e-6  # but for 0: divided by much less, logits would leave float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. Temperature 0 is greedy; its log-probs are those of temperature 1."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()

    @property
    def truncates(self) -> bool:
        """True if the sampled distribution is not the model's own at this temperature."""
        return self.temperature == 0 or self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class StopReason(StrEnum):
    EOS = "eos"  # the model ended its turn (an EOS or stop token, kept as the last token)
    STOP = "stop"  # a stop string appeared
    LENGTH = "length"  # cut off by max_tokens or by the context: not a wrong answer, a missing one
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    uid: str  # "17/3": sample 3 of group 17
    tokens: tuple[int, ...]  # everything before the first sampled token, never re-tokenised
    params: SamplingParams
    num_routed: int = 0  # leading tokens whose expert routes an earlier turn brought: only later ones come back


@dataclass(frozen=True, slots=True)
class Routes:
    """Which experts every router chose, a row per forwarded token: all of a sequence but the last one sampled."""

    ids: Tensor  # [rows, MoE layers, top-k] uint8, or int16 with more than 256 experts
    versions: Tensor  # [rows] int32, of the weights that chose; -1 where a row was lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine returns for one request; the lists have one entry per sampled token."""

    uid: str
    tokens: list[int]
    logp: list[float]  # under the distribution the token was really drawn from
    versions: list[int]  # the weight version that drew the token
    stop_reason: StopReason
    routes: Routes | None = None  # from token `num_routed` on; None: a dense model, or nobody records them


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A reward and why. `value is None` means the reward failed (raised, timed out, NaN): never trained on."""

    value: float | None
    parts: Mapping[str, float] = field(default_factory=dict)  # {"correct": 0.9, "format": 0.1}, after their weights
    reasons: tuple[str, ...] = ()  # ("correct: 42 equals 42", "format: no final answer marker")
    correct: bool | None = None  # whether the answer is right, which weights hide; None: see `is_correct`

    @property
    def failed(self) -> bool:
        return self.value is None

    @property
    def is_correct(self) -> bool:
        """What evaluation counts. A reward that does not say is right where its part `correct`, else its value, is
        at least 1."""
        if self.correct is not None:
            return self.correct
        return self.value is not None and self.parts.get("correct", self.value) >= 1.0


FLAWS = ("repetition", "garble")  # what an answer that falls apart is found to be: see data/flaws.py


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One answer with everything learning needs. A multi-turn one has several sampled spans in `mask`."""

    uid: str  # "17/3"
    tokens: Tensor  # [T] int64, prompt and response
    mask: Tensor  # [T] bool, True where the model sampled (EOS included, observations not)
    logp_behav: Tensor  # [T] float32, 0 where not sampled
    versions: Tensor  # [T] int32, -1 where not sampled
    temperature: float
    stop_reason: StopReason
    verdict: Verdict
    text: str  # the response as the reward saw it
    flaws: tuple[str, ...] = ()  # of FLAWS
    routes: Routes | None = None  # T-1 rows

    @property
    def num_sampled(self) -> int:
        return int(self.mask.sum())

    @property
    def truncated(self) -> bool:
        return self.stop_reason is StopReason.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All answers to one sample, complete: advantages are only ever computed from this."""

    index: int  # place in the run's order of prompts; a run never trains an index twice
    sample: Sample
    version: int  # the weight version when it was admitted
    trajectories: tuple[Trajectory, ...]


def negative(answers: Sequence[Trajectory]) -> list[Trajectory]:
    """The answers that were judged worse than their group's mean; none where all were judged alike."""
    judged = [(answer, answer.verdict.value) for answer in answers if answer.verdict.value is not None]
    values = [value for _, value in judged]
    return [answer for answer, value in judged if value < max(values) and value < fmean(values)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReceipt:
    """What the control plane learns of a finished group: numbers, never tensors."""

    index: int
    rewards: tuple[float, ...]  # of the answers that were judged
    num_failed: int  # answers whose reward failed
    failure: str = ""  # why the first of them did
    num_truncated: int
    num_tokens: int
    has_signal: bool  # the answers that may train differ in reward: otherwise every advantage is zero
    parts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # {"correct": (1.0, 0.0)}
    num_negative: int = 0  # judged answers below the mean of their rewards
    flaws: Mapping[str, int] = field(default_factory=dict)  # {"repetition": 2}, among the negative ones
    too_long: bool = False  # the prompt leaves no room for an answer: nothing was sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """What one weight is computed with on one side, for the audit that both sides compute the same thing."""

    format: str  # "w4a16", "bfloat16"
    kernel: str  # "cpu.w4a16_matmul"; "torch" for a plain layer
    digest: int  # of the bytes that are (learner: were) published


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    version: int  # of the weights this step published
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences laid end to end: sequence i is `[cu_seqlens[i]:cu_seqlens[i+1]]` of every [N] field."""

    tokens: Tensor  # [N] int64
    positions: Tensor  # [N] int64, restarting at 0 in every sequence
    cu_seqlens: Tensor  # [B+1] int32
    seq: Tensor  # [N] int64, which sequence a token belongs to
    mask: Tensor  # [N] bool
    logp_behav: Tensor  # [N] float32
    logp_prox: Tensor  # [N] float32
    advantage: Tensor  # [N] float32
    lag: Tensor  # [N] int32, learner version minus the version that drew the token
    temperature: float
    max_seqlen: int
    logp_ref: Tensor | None = None  # [N] float32, of the model the policy is held to; None without one
    returns: Tensor | None = None  # [N] float32, what a value head should predict
    values: Tensor | None = None  # [N] float32, what it predicted before the step
    shared: Tensor | None = None  # [N] int64, the first place with the same token and the same past; None: no sharing
    routes: Tensor | None = None  # [N, MoE layers, top-k] expert ids; None: all routing is live
    routed: Tensor | None = None  # [N] bool, where `routes` says something; elsewhere routing is live
    replayed: bool = True  # the routers follow `routes`; otherwise their own choice is only compared with it

    @property
    def num_seqs(self) -> int:
        return self.cu_seqlens.numel() - 1

    def to(self, device: torch.device) -> Batch:
        tensors = [f.name for f in fields(self) if str(f.type).startswith("Tensor")]
        return replace(self, **{name: t.to(device) for name in tensors if (t := getattr(self, name)) is not None})

"""The names Lockstep logs, with what they mean. They are stable: dashboards and the governor read them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache


def _in_names(numbers: Iterable[float]) -> tuple[str, ...]:
    return tuple(f"{number:g}" for number in numbers)


@dataclass(frozen=True, slots=True)
class Metric:
    name: str  # may hold * for a family
    meaning: str
    healthy: str = ""  # what it looks like in a run in good order
    unhealthy: str = ""  # what it means when it does not
    parted: bool = False  # also logged of a part of the tokens: `mismatch/k3` as `mismatch/lag0/k3`
    part: str = ""  # the part it is about; empty: all tokens
    members: tuple[str, ...] = ()  # what may stand for the *
    open: str = ""  # or, where only a run knows its members, the expression they match


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the tokens. The number in a name is the lower bound: `pos64` ends where `pos128` begins."""

    name: str
    meaning: str
    bounds: tuple[float, ...] = ()  # what may stand for the *, if it is a number
    words: tuple[str, ...] = ()  # the same, if it is not

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(self.name.replace("*", member) for member in self.words or _in_names(self.bounds))


TAUS = (1.1, 1.25, 1.5, 2, 3, 5, 10, 100)  # factors that F is taken at
LENGTHS = (0, *(2**k for k in range(4, 15)))  # in tokens

PARTS = (
    Part("lag*", "drawn by weights this many versions old; `lag8` is 8 and older", tuple(range(9))),
    Part("pos*", "with this many tokens before them in their answer, up to the next bound; 0, 16, … 16384", LENGTHS),
    Part(
        "adv_*",
        "with a negative, zero or positive advantage: `adv_neg`, `adv_zero`, `adv_pos`",
        words=("neg", "zero", "pos"),
    ),
    Part(
        "prob*",
        "to which the learner gives this probability, up to the next bound; 0, 0.01, 0.1, 0.5, 0.9",
        (0, 0.01, 0.1, 0.5, 0.9),
    ),
)

METRICS = (
    Metric(
        "eval/accuracy",
        "held-out share judged correct (the part `correct`, else the reward, is at least 1), greedy",
        "rises",
    ),
    Metric("eval/avg_at_k", "mean correctness of k sampled answers per problem"),
    Metric("eval/pass_at_k", "share of problems with at least one correct answer among k"),
    Metric("eval/length", "mean sampled tokens of greedy answers"),
    Metric("eval/failed", "held-out answers whose reward failed; they count nowhere", "0"),
    Metric("eval/truncated", "share of greedy answers cut off by the token limit", "near 0"),
    Metric("control/accuracy", "held-out share judged correct after supervised learning alone for as long as RL took"),
    Metric("reward/mean", "mean reward of the judged answers of a step, replaced groups included", "rises"),
    Metric("reward/std", "standard deviation of the rewards of a step, replaced groups included"),
    Metric("reward/part/*", "mean of one named part of the reward, replaced groups included", open=".+"),
    Metric("reward/failed", "answers whose reward raised, timed out or was NaN; none of them trains", "0"),
    Metric("rollout/length", "mean sampled tokens per answer"),
    Metric("rollout/truncated", "share of answers cut off by the token limit", "near 0; never rises above 0.5"),
    Metric(
        "rollout/repetition",
        "share of the answers below their group's mean reward that repeat themselves: cut off in a loop, or made "
        "mostly of runs of tokens that recur",
        "near 0",
        "rising: error tokens, which low-bit sampling makes in long answers",
    ),
    Metric(
        "rollout/garble",
        "share of the answers below their group's mean reward that are garbled: characters that are no text, words of "
        "mixed alphabets, three writing systems in one answer",
        "near 0",
    ),
    Metric("rollout/too_long", "prompts skipped because they leave no room for an answer in the context", "0"),
    Metric("rollout/no_signal", "groups whose rewards were all equal"),
    Metric("rollout/replaced", "groups without signal that dynamic sampling replaced"),
    Metric("rollout/lag_mean", "mean weight-version lag of the tokens learned from", "<= max_staleness"),
    Metric("rollout/lag_max", "largest lag of any token learned from", "<= max_staleness"),
    Metric("policy/loss", "value of the objective, mean over optimiser updates"),
    Metric(
        "policy/entropy",
        "mean entropy of the learner's distribution on sampled tokens, nats",
        "falls slowly",
        "near 0: it no longer explores; rising while rewards fall: it comes apart",
    ),
    Metric(
        "policy/kl_ref",
        "KL to the reference of `algorithm.kl`: mean k3 of sampled tokens before the updates, whatever its estimator",
        "0, or what rounding and low bits leave, in the first step; then rises slowly",
        "above 0.1 and rising fast: the KL's coefficient is too small to hold the policy",
    ),
    Metric(
        "policy/clip_low",
        "share of the tokens with an advantage and a weight that have no gradient, at a ratio below 1",
        "0 with one update a step, else a few percent",
        "large: the updates of a step move further than the surrogate trusts",
        parted=True,
    ),
    Metric(
        "policy/clip_high",
        "share of the tokens with an advantage and a weight that have no gradient, at a ratio of 1 or above",
        "0 with one update a step, else a few percent",
        "large in `adv_neg` or `prob0`: unlikely tokens of bad answers become likelier, the tail of QaRL's Fig. 5",
        parted=True,
    ),
    Metric("policy/grad_norm", "gradient norm before clipping, mean over updates", "steady"),
    Metric("policy/learning_rate", "learning rate of the last update"),
    Metric("policy/updates", "optimiser updates made", "mini_steps x epochs", "0: the step moved no weight"),
    Metric(
        "policy/skipped",
        "optimiser updates not made: nothing to learn from, a gradient that is not finite, or a step not approved",
    ),
    Metric("policy/nonfinite", "optimiser updates skipped for an inf or NaN gradient; ten in a row end the run", "0"),
    Metric("value/loss", "squared error of the value head"),
    Metric("value/explained", "share of the returns' variance that the value head explains", "towards 1"),
    Metric("mismatch/tokens", "sampled tokens that the mismatch is measured on", parted=True),
    Metric(
        "mismatch/k1",
        "KL(sampler || learner) of n tokens: mean of l_behav - l_prox, a token's log-probs in sampler and learner; "
        "unbiased, may be negative",
        "near 0, of either sign: rounding, and noise of about sqrt(2 k3 / n), outweigh a small KL",
        "far from `mismatch/k3` where that is above 1e-5: few tokens decide",
        parted=True,
    ),
    Metric(
        "mismatch/k3",
        "KL(sampler || learner): mean of w - 1 - log w, w a token's probability in the learner over the sampler's; "
        "never negative; with max_staleness > 0 it also holds what was learned meanwhile",
        "< 1e-3 with max_staleness 0, unless low bits of the sampler alone explain more; rising = drifting apart",
        "in `lag0`: sampler and learner compute different things (precision, kernels, templates); in later lags only: "
        "staleness",
        parted=True,
    ),
    Metric(
        "mismatch/f*",
        "share of tokens whose probabilities in sampler and learner differ by more than this factor",
        "near 0 for factors of 2 and more; smaller ones also count what rounding moves",
        "a flat curve far out (f10, f100): single tokens that one side finds impossible, as wrong experts or codes do",
        parted=True,
        members=_in_names(TAUS),
    ),
    Metric(
        "mismatch/chi2",
        "mean of (w - 1)^2, w a token's probability in the learner over the sampler's: chi-squared distance of the "
        "learner from the sampler, unbiased",
        "about twice `mismatch/k3`, and small",
        "far above twice `mismatch/k3`: heavy weights; above 1 a few tokens carry the gradient",
        parted=True,
    ),
    Metric(
        "mismatch/ess",
        "effective sample size, (sum w)^2 / sum w^2, as a share of the tokens; w is a token's probability in the "
        "learner over the sampler's",
        "near 1",
        "0.5: half of the batch is wasted on the variance of the weights",
        parted=True,
    ),
    Metric(
        "mismatch/w_max",
        "largest importance weight (a token's probability in the learner over the sampler's), cut at exp(20)",
        "below the correction's cap",
        "above the cap: the correction truncates, and without one this token outweighs the others",
        parted=True,
    ),
    Metric(
        "mismatch/dp_mean",
        "mean absolute difference of token probabilities in sampler and learner",
        "< 0.01",
        "large with a small `mismatch/f2`: likely tokens differ a little; small with a large one: only unlikely tokens "
        "differ",
        parted=True,
    ),
    Metric(
        "mismatch/dp_max",
        "largest absolute difference of token probabilities in sampler and learner",
        "< 0.1",
        "near 1: one side is sure of a token that the other one rules out",
        parted=True,
    ),
    Metric(
        "mismatch/pearson",
        "correlation of token probabilities in sampler and learner; absent where they are all the same",
        "> 0.99",
        "falling: sampler and learner no longer find the same tokens likely",
        parted=True,
    ),
    Metric(
        "mismatch/truncated",
        "share of tokens whose weight the correction capped",
        "< 0.01",
        "rising: the correction is biased by what it cuts",
        parted=True,
    ),
    Metric(
        "mismatch/rejected",
        "share of tokens whose weight the correction set to zero",
        "< 0.05",
        "rising: it learns from the part of the data on which sampler and learner agree",
        parted=True,
    ),
    Metric("mismatch/refused", "sequences refused for a NaN or -inf log-prob of the sampler", "0"),
    Metric(
        "mismatch/len*/answers",
        "answers of this many tokens, up to the next bound; 0, 16, 32, … 16384",
        part="len*",
        members=_in_names(LENGTHS),
    ),
    Metric(
        "mismatch/len*/accepted_answers",
        "share of the answers of this many tokens, up to the next bound, of which the correction left a token or more",
        "near 1 and alike at all lengths",
        "falling with length: long answers are filtered out, and the model learns to be brief",
        part="len*",
        members=_in_names(LENGTHS),
    ),
    Metric(
        "mismatch/len*/accepted_tokens",
        "share of the tokens of answers of this many tokens, up to the next bound, that the correction left",
        "near 1 and alike at all lengths",
        "falling with length: long answers are filtered out, and the model learns to be brief",
        part="len*",
        members=_in_names(LENGTHS),
    ),
    Metric(
        "routing/differ",
        "mixtures: share of routers (token and layer) at which the sampler's experts, replayed or not, are not those "
        "that the learner's router chooses; sets compared, prompts included, mean over sequences",
        "0 with equal arithmetic; up to 0.1 between engines or precisions",
        "rising at lag 0: sampler and learner compute apart; with staleness it also holds what was learned meanwhile",
    ),
    Metric(
        "routing/differ/moe*",
        "one layer with experts, `moe0` the first of them: share of tokens at which the sampler's experts are not "
        "those that the learner's router chooses; mean over sequences",
        open=r"\d+",
    ),
    Metric(
        "routing/differ_tokens",
        "share of tokens at which sampler and learner choose different experts in any layer; mean over sequences",
        "0 with equal arithmetic; may be near 1 between engines",
    ),
    Metric(
        "routing/differ_per_token",
        "layers in which sampler and learner choose different experts, per token; mean over sequences",
    ),
    Metric(
        "routing/missing",
        "tokens whose experts the sampler lost; the learner chooses them, once for all updates of a step",
        "0",
        "an engine that loses routes: their tokens are learned as without replay",
    ),
    Metric(
        "routing/rerecorded",
        "tokens computed again by newer weights than drew the token after them: their experts are the newer ones'",
        "0 unless answers are preempted, or recomputed, across an update",
    ),
    Metric(
        "routing/load_max",
        "load of the busiest expert over the mean load; mean over layers",
        "steady",
        "towards the number of experts over top-k: routing collapses onto the same few",
    ),
    Metric("routing/load_entropy", "entropy of the experts' load, 1 if all carry the same; mean over layers", "steady"),
    Metric(
        "routing/load_drift",
        "share of the load that went to other experts in the first step; mean over layers",
        "rises slowly",
        "jumps: the router moved more than the experts can follow",
    ),
    Metric("routing/unused", "share of experts that no token of the step went to; mean over layers", "steady"),
    Metric("quant/bits", "bits of a weight's code in the sampler; absent where it computes in the learner's precision"),
    Metric(
        "quant/changed",
        "share of the sampler's low-bit codes that differ from the version before",
        "above 0",
        "near 0 while the loss still has a gradient: updates are too small for the codes to see them",
    ),
    Metric(
        "quant/changed/layer*",
        "share of the sampler's low-bit codes of one decoder layer that differ from the version before",
        open=r"\d+",
    ),
    Metric("perf/rollout_tokens_per_s", "sampled tokens per second the engine was busy"),
    Metric("perf/train_tokens_per_s", "tokens learned from per second the learner was busy"),
    Metric("perf/samples_per_s", "answers sampled for a step, replaced ones too, per second of wall time"),
    Metric("perf/prefix_hit", "share of prompt tokens found in the prefix cache"),
    Metric("perf/preemptions", "sequences that lost their pages and were prefilled again", "0"),
    Metric(
        "perf/memory_gib",
        "peak memory of the process (CPU) or, as PyTorch counts it, of the device; with `rollout.sleep` without keys "
        "and values",
    ),
    Metric("time/total", "seconds of a step, without the evaluation and the checkpoint after it"),
    Metric("time/rollout", "seconds of a step in which the engine was busy; may overlap with learning"),
    Metric("time/learn", "seconds of a step in which the learner was busy; may overlap with sampling"),
    Metric("time/wait", "seconds of a step that are left without sampling, learning, sync and audit"),
    Metric("time/sync", "seconds of a step until the engine had the new weights"),
    Metric("time/audit", "seconds of a step for comparing weights of sampler and learner, and for the governor"),
    Metric("time/eval", "seconds of an evaluation, after a step"),
    Metric("time/save", "seconds of writing a checkpoint, after a step"),
    Metric("warmup/loss", "loss of a step of the supervised warm-up", "falls"),
    Metric("warmup/learning_rate", "learning rate of a step of the supervised warm-up"),
)


def describe(name: str) -> Metric | None:
    """The documented metric a logged name, or that of a family, belongs to; None means it is not one of ours."""
    if (found := known().get(name)) is not None:
        return found
    return next((m for m in METRICS if m.open and re.fullmatch(re.escape(m.name).replace(r"\*", m.open), name)), None)


@cache
def known() -> dict[str, Metric]:
    """Every name a run may log but those that only it knows: parts of its reward, layers of its model."""
    whole = {name: metric for metric in METRICS for name in (metric.name, *_members(metric))}
    parted = [(name, metric) for name, metric in whole.items() if metric.parted]
    cells = [(cell, part) for part in PARTS for cell in (part.name, *part.cells)]
    return whole | {_within(name, cell): _of(part, name, metric) for name, metric in parted for cell, part in cells}


def _members(metric: Metric) -> list[str]:
    return [metric.name.replace("*", member) for member in metric.members]


def _within(name: str, cell: str) -> str:
    group, _, figure = name.partition("/")
    return f"{group}/{cell}/{figure}"


def _of(part: Part, name: str, metric: Metric) -> Metric:
    meaning = f"{metric.meaning}; of tokens {part.meaning}"
    return replace(metric, name=_within(name, part.name), meaning=meaning, parted=False, part=part.name)

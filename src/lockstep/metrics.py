"""The names Lockstep logs, with what they mean. They are stable: dashboards and the governor read them."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch


@dataclass(frozen=True, slots=True)
class Metric:
    name: str  # may hold * for a family
    meaning: str
    healthy: str = ""


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
    Metric("control/accuracy", "the same eval after supervised learning alone for the same time"),
    Metric("reward/mean", "mean reward of the judged answers of a step", "rises"),
    Metric("reward/std", "spread of rewards over the step"),
    Metric("reward/part/*", "mean of one named part of the reward"),
    Metric("reward/failed", "answers whose reward raised, timed out or was NaN; none of them trains", "0"),
    Metric("rollout/length", "mean sampled tokens per answer"),
    Metric("rollout/truncated", "share of answers cut off by the token limit", "near 0; never rises above 0.5"),
    Metric("rollout/too_long", "prompts skipped because they leave no room for an answer in the context", "0"),
    Metric("rollout/no_signal", "groups whose rewards were all equal"),
    Metric("rollout/replaced", "groups without signal that dynamic sampling replaced"),
    Metric("rollout/lag_mean", "mean weight-version lag of the tokens learned from", "<= max_staleness"),
    Metric("rollout/lag_max", "largest lag of any token learned from", "<= max_staleness"),
    Metric("policy/loss", "value of the objective, mean over optimiser updates"),
    Metric("policy/entropy", "mean entropy of the learner's distribution on sampled tokens, nats", "falls slowly"),
    Metric("policy/clip_low", "share of tokens whose ratio was clipped from below"),
    Metric("policy/clip_high", "share of tokens whose ratio was clipped from above"),
    Metric("policy/grad_norm", "gradient norm before clipping, mean over updates", "steady"),
    Metric("policy/learning_rate", "learning rate of the last update"),
    Metric(
        "policy/skipped",
        "optimiser updates not made: nothing to learn from, a gradient that is not finite, a step not approved",
    ),
    Metric("policy/nonfinite", "those skipped for an inf or NaN in the gradient; ten in a row end the run", "0"),
    Metric("value/loss", "squared error of the value head"),
    Metric("value/explained", "share of the returns' variance that the value head explains", "towards 1"),
    Metric("mismatch/k1", "mean of l_behav - l_prox: KL(sampler || learner), unbiased, may be negative", "near 0"),
    Metric(
        "mismatch/k3",
        "the same KL, non-negative estimator; with max_staleness > 0 it also holds what was learned meanwhile",
        "< 1e-3 with max_staleness 0; rising = drifting apart",
    ),
    Metric("mismatch/f*", "share of tokens whose probabilities differ by more than this factor", "f2 near 0"),
    Metric("mismatch/w_max", "largest importance weight", "below the correction's cap"),
    Metric("mismatch/ess", "effective sample size of the weights, as a share of the tokens", "near 1"),
    Metric("mismatch/dp_mean", "mean absolute difference of token probabilities"),
    Metric("mismatch/dp_max", "largest absolute difference of token probabilities"),
    Metric("mismatch/truncated", "share of tokens whose weight the correction capped"),
    Metric("mismatch/rejected", "share of tokens whose weight the correction set to zero"),
    Metric("mismatch/refused", "sequences refused for a NaN or -inf log-prob of the sampler", "0"),
    Metric("perf/rollout_tokens_per_s", "sampled tokens per second the engine was busy"),
    Metric("perf/train_tokens_per_s", "tokens learned from per second the learner was busy"),
    Metric("perf/samples_per_s", "answers sampled for a step, replaced ones too, per second of wall time"),
    Metric("perf/prefix_hit", "share of prompt tokens found in the prefix cache"),
    Metric("perf/preemptions", "sequences that lost their pages and were prefilled again", "0"),
    Metric("perf/memory_gib", "peak memory of the process (CPU) or device"),
    Metric(
        "time/*",
        "seconds of a step: total, rollout (engine busy), learn, wait (neither), sync; eval, save",
    ),
    Metric("warmup/*", "loss and learning rate of the supervised warm-up"),
)


def describe(name: str) -> Metric | None:
    """The documented metric a logged name belongs to; None means the name is not one of ours."""
    return next((m for m in METRICS if fnmatch(name, m.name)), None)

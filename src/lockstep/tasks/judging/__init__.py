"""From an answer to a verdict: rewards made of named parts, and judging that a bad reward cannot hurt."""

from lockstep.tasks.judging.judge import Judge, JudgeConfig
from lockstep.tasks.judging.verdicts import Part, combine, failed, judged

__all__ = ["Judge", "JudgeConfig", "Part", "combine", "failed", "judged"]

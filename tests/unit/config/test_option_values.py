"""What a recipe may say of a plug-in's options: what is no option or no number is refused with the value."""

from __future__ import annotations

import pytest

from lockstep.assembly.recipe import Recipe
from lockstep.cli.recipe_files import find
from lockstep.config import ConfigError, load


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ('rollout.precision={name="w4a16",bits=2}', "w4a16 has no options, not 'bits'"),
        ("rollout.precision=int9", r"unknown format 'int9': choices: high, fp8_w8a8, int8_w8a8, w4a16, w4a8"),
        ("algorithm.surrogate.cap=2", "unknown option of grpo 'cap': choices: eps"),
        ('algorithm.correction={name="tis",cap=inf}', r"finite number \(got inf\)"),
        ('algorithm.correction={name="tis",cap=-2}', r"\(got -2\)"),
        ('algorithm.correction={name="veto",low=10}', r"\(got 10\)"),
        ('algorithm.reduction={name="token_sum_norm",horizon=0}', r"\(got 0\)"),
        ('algorithm.advantage={name="gae",gamma=2}', r"\(got 2\)"),
        ("learner.update_scale=1e300", r"update_scale.*\(got 1e\+300\)"),
        ("model.init.hidden=1000000000000", r"hidden.*\(got 1000000000000\)"),
        ("algorithm.surrogate.eps=1e300", r"grpo.eps: must be at most 3.4e\+38 in size.*\(got 1e\+300\)"),
        ("algorithm.surrogate.eps=1e-300", r"grpo.eps: must be at least 1.2e-38 in size.*\(got 1e-300\)"),
        ('algorithm.correction={name="tis",cap=1e39}', r"tis.cap: must be at most 3.4e\+38 in size.*\(got 1e\+39\)"),
        (f"algorithm.surrogate.eps={10**39}", r"grpo.eps: must be at most 3.4e\+38 in size.*\(got 10{39}\)"),
        ("algorithm.kl.coef=1e300", r"algorithm.kl.coef: must be at most 3.4e\+38 in size.*\(got 1e\+300\)"),
        ("learner.learning_rate=1e-40", r"learner.learning_rate: must be at least 1.2e-38.*\(got 1e-40\)"),
        (f"train.steps={2**63}", r"train.steps: must fit in 64 bits \(got 9223372036854775808\)"),
        ('learner.optimiser={name="adamw",betas=[2,0.9]}', r"adamw.betas.0: must be below 1.*\(got 2\)"),
        ("learner.optimiser.momentum=1", r"muon.momentum: must be below 1.*\(got 1\)"),
        ("learner.optimiser.iterations=0", r"muon.iterations: must be at least 1 \(got 0\)"),
        ("algorithm.value_coef=-1", r"value_coef.*\(got -1\)"),
    ],
)
def test_options_out_of_range_are_refused_with_their_value(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(Recipe, find("quickstart"), [override])

"""Benchmarks: the taking of turns with real processes, the arithmetic of the table, and what is said without TRL."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path

import pytest
import torch
from bench_sides import counting_side, failing_side
from rich.console import Console
from transformers import AutoTokenizer

from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import Sampling, load_model
from lockstep.cli import bench_trl
from lockstep.cli.bench_trl import (
    SETTINGS,
    Digits,
    prompts,
    recipe_tables,
    save_model,
    share_of_digits,
    speed_up,
    table,
)
from lockstep.cli.benchmarks import Measured, Step, take_turns
from lockstep.config import ConfigError
from lockstep.config.loading import validate
from lockstep.models.loading import ModelConfig, load
from lockstep.types import Request, StopReason


def test_sides_take_turns_and_the_warm_up_does_not_count(tmp_path: Path) -> None:
    log, seen = tmp_path / "log", []
    sides = [(name, counting_side, (tokens, log, name)) for name, tokens in (("a", 5), ("b", 7))]
    measured = take_turns(sides, steps=2, warmup=1, on_step=lambda number, _: seen.append(number))
    assert log.read_text() == "ababab"
    assert seen == [1, 2, 3]
    assert [[(s.samples, s.tokens) for s in m.steps] for m in measured] == [[(2, 10)] * 2, [(2, 14)] * 2]


def test_a_side_that_fails_is_named_with_its_reason() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)B failed:.*no more memory"):
        take_turns([("B", failing_side, ())], steps=1, warmup=0, on_step=lambda *_: None)


def measured(name: str, *seconds: float) -> Measured:
    return Measured(name, [Step(s, 2 * s, samples=4, tokens=40) for s in seconds])


def test_medians_ignore_a_step_the_machine_disturbed() -> None:
    side = measured("x", 1.0, 2.0, 90.0)
    assert (side.seconds, side.cpu_seconds, side.samples_per_s, side.tokens_per_s, side.length) == (2, 4, 2, 20, 10)


def test_the_table_shows_both_sides_and_the_ratio() -> None:
    theirs, ours = measured("TRL", 3.0), measured("Lockstep", 2.0)
    assert speed_up(ours, theirs) == pytest.approx(1.5)
    console = Console(width=120, record=True, file=sys.stderr)
    console.print(table(SETTINGS["short"], [theirs, ours]))
    lines = {line.split()[1]: line for line in console.export_text().splitlines() if line.startswith("│")}
    assert "1.50×" in lines["TRL"]
    assert "×" not in lines["Lockstep"]
    assert "1.3" in lines["TRL"]
    assert "2.0" in lines["Lockstep"]


def compare(*names: str) -> None:
    bench_trl.compare(names, steps=1, warmup=0, threads=1, continuous=False, out=None, console=Console())


def test_without_trl_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_trl, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'TRL is not installed: pip install "lockstep-rl\[bench\]"'):
        compare()


def test_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_trl, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"unknown setting 'huge'; choices: mixed, short, long, prompt"):
        compare("huge")


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_prompts_have_the_length_the_setting_names(setting: bench_trl.Setting, tmp_path: Path) -> None:
    save_model(setting, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    asked = prompts(setting, steps=2)
    assert len(asked) == 2 * setting.prompts
    assert {len(tokenizer.encode(prompt)) for prompt in asked} == {setting.prompt_tokens}


def test_the_recipe_is_valid_and_its_model_cannot_end_an_answer(tmp_path: Path) -> None:
    setting = SETTINGS["short"]
    save_model(setting, tmp_path)
    recipe = validate(Recipe, recipe_tables(setting, tmp_path, steps=2), "test")
    assert isinstance(recipe.task.build(), Digits)
    loaded = load(ModelConfig(path=str(tmp_path)), dtype=torch.float32, device=torch.device("cpu"), seed=0)
    assert loaded.tokenizer.eos_token_id == loaded.module.config.vocab_size


def test_mixed_answers_end_by_chance_at_geometric_lengths(tmp_path: Path) -> None:
    setting = SETTINGS["mixed"]
    save_model(setting, tmp_path)
    recipe = validate(Recipe, recipe_tables(setting, tmp_path, steps=1), "test")
    lengths, cut = asyncio.run(sampled_lengths(recipe, num=512))
    assert lengths.mean() == pytest.approx(30, abs=5)
    assert lengths.median() == pytest.approx(30 * math.log(2), abs=5)
    assert lengths.std() == pytest.approx(30, abs=6)
    assert cut < 0.05


async def sampled_lengths(recipe: Recipe, num: int) -> tuple[torch.Tensor, float]:
    """Of answers to one prompt, and the share that max_tokens cut off."""
    loaded = load_model(recipe)
    prompt = tuple(loaded.tokenizer.encode(prompts(SETTINGS["mixed"], steps=1)[0]))
    requests = [Request(uid=str(n), tokens=prompt, params=recipe.rollout.params(seed=n)) for n in range(num)]
    roles = Sampling(recipe, loaded)
    try:
        answers = [answer async for answer in roles.engine.generate(requests)]
    finally:
        await roles.close()
    cut = [answer.stop_reason is StopReason.LENGTH for answer in answers]
    return torch.tensor([float(len(answer.tokens)) for answer in answers]), sum(cut) / num


def test_the_reward_is_the_share_of_digits() -> None:
    assert share_of_digits("a1b2") == 0.5
    assert share_of_digits("") == 0.0

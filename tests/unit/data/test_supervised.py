import pytest
from byte_tokens import TEMPLATE, byte_tokenizer

from lockstep.config import ConfigError
from lockstep.data.chat import render_demonstration, turn_end
from lockstep.data.supervised import DemonstrationBatch, Demonstrations
from lockstep.types import Message, Sample

TOKENIZER = byte_tokenizer(TEMPLATE)
END = turn_end(TOKENIZER)
SAMPLES = [
    Sample(uid=f"demonstrations/{i}", messages=(Message("user", f"{i}+0="),), solution=f"#{i}") for i in range(7)
]


def demonstrations(samples: list[Sample] = SAMPLES, seed: int = 0, max_tokens: int = 100) -> Demonstrations:
    return Demonstrations(samples, TOKENIZER, batch_size=3, seed=seed, max_tokens=max_tokens)


def test_an_epoch_holds_every_demonstration_once() -> None:
    batches = [demonstrations().batch(step) for step in range(7)]  # three epochs of seven, in batches of three
    seen = [tuple(tokens) for batch in batches for tokens in batch.tokens]
    expected = {tuple(render_demonstration(TOKENIZER, s.messages, s.solution or "", END)[0]) for s in SAMPLES}
    assert set(seen[:7]) == set(seen[7:14]) == set(seen[14:]) == expected


def test_a_resumed_warm_up_goes_on_where_it_stopped() -> None:
    whole = demonstrations().batches()
    first = [next(whole) for _ in range(5)]
    resumed = demonstrations().batches(first_step=3)
    assert [next(resumed), next(resumed)] == first[3:]
    assert demonstrations(seed=1).batch(0) != first[0]


def test_masks_cover_solution_and_end() -> None:
    batch = demonstrations().batch(0)
    assert isinstance(batch, DemonstrationBatch)
    for tokens, mask in zip(batch.tokens, batch.mask, strict=True):
        assert len(tokens) == len(mask)
        assert sum(mask) == 3  # "#", the digit, the end of the turn


def test_too_long_is_left_out_and_counted() -> None:
    long = Sample(uid="demonstrations/7", messages=SAMPLES[0].messages, solution="9" * 200)
    made = demonstrations([*SAMPLES, long])
    batches = [made.batch(step) for step in range(8)]  # three epochs of eight
    assert sum(len(batch.tokens) for batch in batches) == 21
    assert made.num_skipped == 3
    with pytest.raises(ConfigError, match="longer than 2 tokens"):
        demonstrations(max_tokens=2).batch(0)


def test_no_demonstrations() -> None:
    with pytest.raises(ConfigError, match="no demonstrations"):
        demonstrations([])
    with pytest.raises(ConfigError, match="x/0 has no solution"):
        demonstrations([Sample(uid="x/0", messages=SAMPLES[0].messages)]).batch(0)

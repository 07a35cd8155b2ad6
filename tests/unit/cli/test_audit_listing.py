"""What `lockstep audit` prints."""

from __future__ import annotations

from lockstep.cli.audit import listing
from lockstep.types import Operator

NORM, MLP = "model.layers.{}.post_attention_layernorm.weight", "model.layers.{}.mlp.up_proj.weight"
PLAIN = Operator(format="float32", kernel="torch", digest=1)
LOW_BIT = Operator(format="w4a8", kernel="cpu.w4a8_matmul", digest=1)
STALE = Operator(format="w4a8", kernel="cpu.w4a8_matmul", digest=2)


def test_weights_are_listed_under_what_runs_them_and_differences_stand_apart() -> None:
    learner = {NORM.format(i): PLAIN for i in range(28)} | {MLP.format(i): LOW_BIT for i in range(28)}
    engine = learner | {MLP.format(3): STALE, NORM.format(4): LOW_BIT}
    lines = list(listing(engine, learner))
    assert [line.plain for line in lines] == [
        "float32 on both sides; same bytes sent",
        "  model.layers.*.post_attention_layernorm.weight  ×27",
        "w4a8, cpu.w4a8_matmul in the sampler, float32 in the learner; same bytes sent",
        "  model.layers.*.post_attention_layernorm.weight  ×1",
        "w4a8, cpu.w4a8_matmul on both sides; same bytes sent",
        "  model.layers.*.mlp.up_proj.weight  ×27",
        "w4a8, cpu.w4a8_matmul on both sides; bytes sent differ",
        "  model.layers.*.mlp.up_proj.weight  ×1",
    ]
    assert [line.style for line in lines if "sides" in line.plain or "sampler" in line.plain] == [
        "bold", "bold red", "bold", "bold red"
    ]  # fmt: skip
    assert max(len(line) for line in lines) <= 80

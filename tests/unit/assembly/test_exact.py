"""What `rollout.exact` asks for is asked for before anything is loaded, or as soon as the model is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from lockstep.assembly.estimate import estimate
from lockstep.assembly.recipe import Recipe
from lockstep.assembly.roles import load_model
from lockstep.assembly.run import train
from lockstep.config import ConfigError
from lockstep.config.loading import validate
from lockstep.models.exact import require_exact_architecture
from lockstep.models.tiny import TinyModel, tiny_model
from role_support import make_recipe


def recipe(precision: object, *, kv: str = "high", alignment: str = "aligned") -> Recipe:
    rollout = {"precision": precision, "exact": True, "kv_precision": kv}
    tables: dict[str, Any] = make_recipe(precision).model_dump(include={"model", "task", "algorithm", "train"})
    return validate(Recipe, {**tables, "rollout": rollout, "learner": {"alignment": alignment}}, "test")


@pytest.mark.parametrize("precision", ["high", "w4a16", "fp8_w8a8"])
def test_products_that_depend_on_the_batch_are_refused(precision: str) -> None:
    with pytest.raises(ConfigError, match=f"needs the precision int8_w8a8, w4a8 or .*, not '{precision}'"):
        recipe(precision)


def test_a_learner_that_computes_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'needs learner\.alignment = "aligned"'):
        recipe("int8_w8a8", alignment="none")
    with pytest.raises(ConfigError, match=r"needs kv_precision = .*, not 'fp8'"):
        recipe("int8_w8a8", kv="fp8")


def test_a_cpu_that_is_asked_for_is_refused_before_anything_is_loaded() -> None:
    tables = recipe("int8_w8a8").model_dump(mode="json") | {"device": "cpu"}
    with pytest.raises(ConfigError, match=r'exact = true needs a GPU: device = "auto" or "cuda", not "cpu"'):
        validate(Recipe, tables, "test")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_before_a_run_has_a_folder(tmp_path: Path) -> None:
    asked = recipe("int8_w8a8")
    for refused in (lambda: estimate(asked), lambda: train(asked, tmp_path / "run")):
        with pytest.raises(ConfigError, match=r"rollout\.exact = true needs a GPU, and PyTorch sees none"):
            refused()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("precision", ["int8_w8a8", "w4a8", {"name": "fp8_w8a8", "block": True}])
def test_on_a_cpu_it_is_refused(precision: object) -> None:
    asked = recipe(precision).model_copy(update={"device": "cpu"})
    with pytest.raises(ConfigError, match=r"rollout\.exact = true needs a GPU; this model is on 'cpu'"):
        load_model(asked)


def outline(**shape: int) -> PreTrainedModel:
    with torch.device("meta"):
        return tiny_model(
            TinyModel.model_validate({"hidden": 128, "layers": 2, "heads": 4, "context": 64} | shape), seed=0
        )


def test_what_cannot_be_exact_is_known_without_weights() -> None:
    require_exact_architecture(outline())
    with pytest.raises(ConfigError, match=r"exact = true needs a dense model: the routers of \w+ are not low-bit"):
        require_exact_architecture(outline(experts=4))
    with pytest.raises(ConfigError, match=r"a power of two from 16 to \d+; those of \w+ have 8 and 8"):
        require_exact_architecture(outline(heads=16))

"""The base of every config model; the models themselves live beside what they configure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, field_validator

if TYPE_CHECKING:
    from lockstep.config.layers import Presets

FLOAT32 = (2.0**-126, 2.0**128 - 2.0**104)  # the least and the largest size of a number that is not 0
INT64 = 2**63 - 1


class Config(BaseModel):
    """Frozen, and strict about names: a key that is not a field is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    presets: ClassVar[Presets | None] = None  # what `preset = "name"` at the top of a recipe may name

    @field_validator("*")
    @classmethod
    def _fits(cls, value: Any) -> Any:
        if problem := misfit(value):
            raise ValueError(problem)
        return value


class ConfigError(ValueError):
    """What the user wrote cannot be used. The message is one line that names the place, the value and the choices."""


def misfit(value: object) -> str | None:
    """What a number, or one in a list, must be for the tensors that are computed with it; None if it is."""
    if isinstance(value, tuple | list):
        return next((problem for item in value if (problem := misfit(item))), None)
    if isinstance(value, int):
        return None if abs(value) <= INT64 else "must fit in 64 bits"
    if not isinstance(value, float) or value == 0:
        return None
    if not math.isfinite(value):
        return "must be a finite number"
    least, most = FLOAT32
    if abs(value) > most:
        return f"must be at most {most:.2g} in size, the largest of float32"
    return None if abs(value) >= least else f"must be at least {least:.2g} in size: float32 makes less a 0"

"""The base of every config model; the models themselves live beside what they configure."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from lockstep.config.layers import Presets


class Config(BaseModel):
    """Frozen, and strict about names: a key that is not a field is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
    presets: ClassVar[Presets | None] = None  # what `preset = "name"` at the top of a recipe may name


class ConfigError(ValueError):
    """What the user wrote cannot be used. The message is one line that names the place, the value and the choices."""

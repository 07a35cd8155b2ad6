"""The base of every config model; the models themselves live beside what they configure."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Frozen, and strict about names: a key that is not a field is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


class ConfigError(ValueError):
    """What the user wrote cannot be used. The message is one line that names the place, the value and the choices."""

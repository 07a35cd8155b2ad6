"""Shared by the tests of low-bit formats: every format of the folder with every choice of its options."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lockstep.config.plugins import choices, load_class
from lockstep.quant.format import Format

FOLDER = "lockstep.quant.formats"


def all_formats() -> list[Format]:
    return [variant for name in choices(FOLDER) for variant in _variants(load_class(FOLDER, name))]


def _variants(cls: Any) -> list[Format]:
    hints = get_type_hints(cls)
    values = {field.name: _values(hints[field.name]) for field in fields(cls)}
    return [cls(**dict(zip(values, chosen, strict=True))) for chosen in product(*values.values())]


def _values(hint: Any) -> tuple[Any, ...]:
    if hint is bool:
        return (False, True)
    assert get_origin(hint) is Literal, f"say here which values of {hint} to test"
    return get_args(hint)

"""pydantic's complaints in the words of a recipe: what a value must be, not what an `Input` is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MUST_BE = {
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "finite_number": "a finite number",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table of keys",
    "dataclass_type": "a table of keys",
}


def in_plain_words(error: Mapping[str, Any]) -> str:
    """Of one entry of `ValidationError.errors()`: what is wrong, without the place and the value."""
    if error["type"] in _MUST_BE:
        return "must be " + _MUST_BE[error["type"]].format(**error.get("ctx", {}))
    if error["type"] == "string_pattern_mismatch":
        return f"must match {error['ctx']['pattern']}"
    return str(error["msg"]).removeprefix("Value error, ")

"""Which surrogates and corrections mean something together, and why the others do not."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.algorithms.pieces import Companions
from lockstep.config import Plugin


def refusal(surrogate: Plugin, corrections: Sequence[Plugin]) -> str | None:
    """Why the pieces must not be multiplied, in one line; None if they may."""
    rules = (_unreadable, _weighs_twice, _holds_weight, _needs_its_own)
    return next((reason for rule in rules if (reason := rule(surrogate, corrections))), None)


def _unreadable(surrogate: Plugin, corrections: Sequence[Plugin]) -> str | None:
    if not corrections:
        return 'an empty list of corrections; say "none"'
    if len({correction.cls for correction in corrections}) < len(corrections):
        return f"corrections {_listed(corrections)}: one of them twice"
    beside = len(corrections) > 1 and any(correction.name == "none" for correction in corrections)
    return f'corrections {_listed(corrections)}: "none" beside others' if beside else None


def _weighs_twice(surrogate: Plugin, corrections: Sequence[Plugin]) -> str | None:
    weights = _weighing(corrections)
    if len(weights) < 2:
        return None
    return f"corrections {_listed(weights)} all weigh the same mismatch: keep one beside those that only reject"


def _holds_weight(surrogate: Plugin, corrections: Sequence[Plugin]) -> str | None:
    weights = _weighing(corrections)
    if not weights or not _companions(surrogate).holds_weight:
        return None
    return (
        f"the surrogate {surrogate.name!r} holds the sampler's probability already, so that the correction "
        f'{_listed(weights)} would weigh the mismatch twice: use "none" or one that only rejects'
    )


def _needs_its_own(surrogate: Plugin, corrections: Sequence[Plugin]) -> str | None:
    needed, option = _companions(surrogate).correction, _companions(surrogate).shares
    if option is None:
        return None
    wanted = getattr(surrogate.build(), option)
    own = (correction.build() for correction in corrections if correction.name == needed)
    if any(getattr(correction, option) == wanted for correction in own):
        return None
    return (
        f"surrogate {surrogate.name!r} undoes what the correction {needed!r} does to its clip, and nothing else: "
        f"leave the correction unset or use {needed} with {option} = {wanted:g}"
    )


def _companions(surrogate: Plugin) -> Companions:
    return surrogate.cls.companions  # type: ignore[attr-defined]


def _weighing(corrections: Sequence[Plugin]) -> list[Plugin]:
    return [correction for correction in corrections if correction.cls.weighs]  # type: ignore[attr-defined]


def _listed(pieces: Sequence[Plugin]) -> str:
    return ", ".join(piece.name for piece in pieces)

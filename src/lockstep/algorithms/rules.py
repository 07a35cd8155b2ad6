"""Which surrogates and corrections mean something together, and why the others do not."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.algorithms.pieces import NamedCorrection, Surrogate


def refusal(surrogate: Surrogate, corrections: Sequence[NamedCorrection]) -> str | None:
    """Why the pieces must not be multiplied, in one line; None if they may."""
    rules = (_unreadable, _weighs_twice, _holds_weight, _needs_its_own)
    return next((reason for rule in rules if (reason := rule(surrogate, corrections))), None)


def _unreadable(surrogate: Surrogate, corrections: Sequence[NamedCorrection]) -> str | None:
    names = [_name(correction) for correction in corrections]
    if not names:
        return 'an empty list of corrections; say "none"'
    if len(set(names)) < len(names):
        return f"corrections {_listed(corrections)}: one of them twice"
    return f'corrections {_listed(corrections)}: "none" beside others' if "none" in names and len(names) > 1 else None


def _weighs_twice(surrogate: Surrogate, corrections: Sequence[NamedCorrection]) -> str | None:
    weights = [correction for correction in corrections if correction.weighs]
    if len(weights) < 2:
        return None
    return f"corrections {_listed(weights)} all weigh the same mismatch: keep one beside those that only reject"


def _holds_weight(surrogate: Surrogate, corrections: Sequence[NamedCorrection]) -> str | None:
    weights = [correction for correction in corrections if correction.weighs]
    if not weights or not surrogate.companions.holds_weight:
        return None
    return (
        f"surrogate {_name(surrogate)!r} holds the sampler's probability already, so that the correction "
        f'{_listed(weights)} would weigh the mismatch twice: use "none" or one that only rejects'
    )


def _needs_its_own(surrogate: Surrogate, corrections: Sequence[NamedCorrection]) -> str | None:
    needed, option = surrogate.companions.correction, surrogate.companions.shares
    if option is None:
        return None
    wanted = getattr(surrogate, option)
    if any(_name(correction) == needed and getattr(correction, option) == wanted for correction in corrections):
        return None
    return (
        f"surrogate {_name(surrogate)!r} undoes what the correction {needed!r} does to its clip, and nothing else: "
        f"leave the correction unset or use {needed} with {option} = {wanted:g}"
    )


def _listed(pieces: Sequence[object]) -> str:
    return ", ".join(map(_name, pieces))


def _name(piece: object) -> str:
    """As recipes call it: the name of its file."""
    return type(piece).__module__.rpartition(".")[2]

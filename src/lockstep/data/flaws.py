"""Error tokens: answers that fall apart while they are sampled, by repeating themselves or by turning to garble.

QaRL finds them in the negative samples of low-bit rollouts, where they get extreme ratios and drive updates off course.
Both tests read the sampled tokens and the text they decode to, and mean the same for byte-level and BPE tokenizers:

repetition  the answer was cut off in a loop: it ends in four or more copies of a block of tokens, 16 tokens or more in
            all; or, however it ended, it has 128 tokens or more and over half of its runs of 16 tokens occur in it more
            than once. A table, a long number or a refrain is neither.
garble      the text holds a character that no text should (a replacement character for bytes that are no UTF-8, a
            control character, an unassigned or private one), a word that mixes alphabets (`theория`; Greek letters,
            which formulas use, mix with any), or words of three writing systems.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence, Set
from functools import lru_cache

from lockstep.types import FLAWS

COPIES = 4  # of a block at the end of an answer that was cut off
LOOP = 16  # tokens such a loop has at least; also the length of the runs that are counted
LONGEST_BLOCK = 256  # tokens
LONG = 128  # tokens from which on an answer may be called repetitive however it ended
SYSTEMS = 3  # writing systems in one answer

BROKEN = frozenset({"Cc", "Cn", "Co", "Cs"})  # control, unassigned, private use, half of a surrogate pair
LETTERS = frozenset({"Lu", "Ll", "Lt", "Lo"})  # modifiers and iteration marks belong to no writing system
KINDS = ("LETTER", "IDEOGRAPH", "SYLLABLE")  # words that are in the names of letters, but not of letter-like symbols
REPLACEMENT = "\ufffd"
EAST_ASIAN = "CJK"
NEUTRAL = frozenset({"GREEK", "FULLWIDTH", "HALFWIDTH"})  # formulas and East Asian typesetting mix them with any others
WORD = re.compile(r"[^\W\d_]+")


def flaws(tokens: Sequence[int], text: str, *, cut_off: bool) -> tuple[str, ...]:
    """What is wrong with an answer of these sampled tokens: `repetition`, `garble`, both or neither."""
    repeats = (cut_off and ends_in_loop(tokens)) or repeats_itself(tokens)
    found = (repeats, is_garbled(text, cut_off=cut_off))
    return tuple(name for name, holds in zip(FLAWS, found, strict=True) if holds)


def ends_in_loop(tokens: Sequence[int]) -> bool:
    return any(_has_period(tokens, block) for block in range(1, min(LONGEST_BLOCK, len(tokens) // COPIES) + 1))


def _has_period(tokens: Sequence[int], block: int) -> bool:
    """Whether the end of `tokens`, as long as a loop must be, repeats with this period."""
    length = max(COPIES * block, LOOP)
    start = len(tokens) - length
    return start >= 0 and all(tokens[i] == tokens[i + block] for i in range(start, len(tokens) - block))


def repeats_itself(tokens: Sequence[int]) -> bool:
    if len(tokens) < LONG:
        return False
    runs = Counter(tuple(tokens[i : i + LOOP]) for i in range(len(tokens) - LOOP + 1))
    again = sum(count for count in runs.values() if count > 1)
    return again > sum(runs.values()) / 2


def is_garbled(text: str, *, cut_off: bool) -> bool:
    """An answer that was cut off may end within a character: that is no garble."""
    whole = text.rstrip(REPLACEMENT) if cut_off else text
    chars = set(whole)
    systems = _systems(chars)
    mixed = len(systems) > 1 and any(map(_mixes, WORD.findall(whole)))
    return mixed or len(systems) >= SYSTEMS or any(map(_is_broken, chars))


def _is_broken(char: str) -> bool:
    return char == REPLACEMENT or (unicodedata.category(char) in BROKEN and char not in "\n\r\t")


def _mixes(word: str) -> bool:
    """East Asian text writes foreign names without spaces around them."""
    systems = _systems(set(word))
    return len(systems) > 1 and systems != {"LATIN", EAST_ASIAN}


def _systems(chars: Set[str]) -> set[str]:
    return {system for char in chars if (system := _system(char))}


@lru_cache(maxsize=4096)
def _system(char: str) -> str:
    """The writing system of a letter, the first word of its Unicode name: LATIN, CYRILLIC, …; "" for all else."""
    name = unicodedata.name(char, "")
    system = name.partition(" ")[0]
    if system in NEUTRAL or unicodedata.category(char) not in LETTERS or not any(kind in name for kind in KINDS):
        return ""
    return EAST_ASIAN if system in ("CJK", "HIRAGANA", "KATAKANA", "HANGUL") else system

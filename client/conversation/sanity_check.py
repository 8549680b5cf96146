"""Check once, at the end, that a conversation's ids say what its messages say; O(n).

A render of all messages is compared with what the ids decode to. It is compared as text: the ids
themselves may differ where the policy split words differently from the tokenizer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

DecodeIds = Callable[[Sequence[int]], str]
_CONTEXT_CHARACTERS = 12
_CONTEXT_IDS = 4


class SanityCheckMode(StrEnum):
    """What counts as a difference: nothing, anything, or anything but whitespace."""

    DISABLE = "disable"
    STRICT = "strict"
    IGNORE_STRIPPABLE = "ignore_strippable"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where the ids do not say what the messages say.

    Attributes:
        token: Its position in the conversation's ids.
        character: Its position in their text.
        text: What the ids say there; `expected` is what the template renders.
        ids: The ids there; `expected_ids` are those of the full render.
        reason: The most likely cause.
    """

    token: int
    character: int
    text: str
    expected: str
    ids: tuple[int, ...]
    expected_ids: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return (
            f"token {self.token} (character {self.character}): the ids say {self.text!r} "
            f"{list(self.ids)}, the template {self.expected!r} {list(self.expected_ids)}: "
            f"{self.reason}"
        )


def find_difference(
    ids: array[int],
    expected: array[int],
    sampled: array[int],
    decode: DecodeIds,
    *,
    mode: SanityCheckMode,
    close: str,
    prompt: int,
) -> Difference | None:
    """Return the first difference from the ids of a full render; None if none counts in this mode.

    A final answer may lack (part of) `close`, which the template writes after an answer. The first
    `prompt` ids and those that the policy `sampled` determine the reason.
    """
    if mode is SanityCheckMode.DISABLE or ids == expected:
        return None
    ours, theirs = decode(ids), decode(expected)
    found = _first_difference(ours, theirs, ignore=mode is SanityCheckMode.IGNORE_STRIPPABLE)
    if found is None:
        return None
    i, j = found
    rest = theirs[j:]
    if i == len(ours) and close.endswith(rest) and ours.endswith(close.removesuffix(rest)):
        return None
    at, there = _token_at(ids, i, decode, len(ours)), _token_at(expected, j, decode, len(theirs))
    return Difference(
        token=at,
        character=i,
        text=ours[max(0, i - _CONTEXT_CHARACTERS) : i + _CONTEXT_CHARACTERS],
        expected=theirs[max(0, j - _CONTEXT_CHARACTERS) : j + _CONTEXT_CHARACTERS],
        ids=tuple(ids[at : at + _CONTEXT_IDS]),
        expected_ids=tuple(expected[there : there + _CONTEXT_IDS]),
        reason=_likely_reason(ours[i:], rest, at, sampled, prompt),
    )


def _first_difference(a: str, b: str, ignore: bool) -> tuple[int, int] | None:
    """Return where two texts first differ, or differ in more than whitespace."""

    def characters(text: str) -> Iterator[tuple[int, str]]:
        yield from ((i, c) for i, c in enumerate(text) if not (ignore and c.isspace()))
        yield len(text), ""  # the end differs from every character

    pairs = zip(characters(a), characters(b), strict=False)
    return next(((i, j) for (i, ours), (j, theirs) in pairs if ours != theirs), None)


def _token_at(ids: Sequence[int], character: int, decode: DecodeIds, characters: int) -> int:
    """Return the index of the id whose text contains a character, by bisection."""
    if character >= characters:
        return len(ids)
    low, high, base = 0, len(ids), 0
    while high - low > 1:
        middle = (low + high) // 2
        # Start one id earlier: some tokenizers drop the leading space of a text.
        first = max(0, low - 1)
        length = len(decode(ids[first:middle])) - len(decode(ids[first:low]))
        if base + length <= character:
            low, base = middle, base + length
        else:
            high = middle
    return low


def _likely_reason(ours: str, theirs: str, at: int, sampled: Sequence[int], prompt: int) -> str:
    near_ours, near_theirs = ours[:200].strip(), theirs[:200].strip()
    if not ours:
        return "the ids end before the messages do"
    if not theirs:
        return "the ids go on after the messages' end"
    if ours[:1] != theirs[:1] and ours.lstrip()[:_CONTEXT_IDS] == theirs.lstrip()[:_CONTEXT_IDS]:
        return "white space: the template strips or adds it"
    if at < prompt:
        return "the template prints the beginning differently once turns follow (or ids were given)"
    if "<think>" in near_ours[:40] or "</think>" in near_theirs[:40] or "<think>" in ours[:4]:
        return "the template leaves earlier reasoning out"
    if at < len(sampled) and sampled[at]:
        return "the message's content or tool calls are not what the policy wrote"
    return "the template prints this turn differently in the whole conversation"

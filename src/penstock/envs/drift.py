"""Text of a conversation that comes back: what is new in it. Of the rest the recorded tokens count.

Text does not determine tokens: what the policy sampled may be tokenised otherwise when it is shown back to it, and a
context made of that would not be the one that its log-probabilities belong to.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_SEPARATOR = 64
"""Characters that may stand between what was said and what follows: line breaks, names of speakers, marks of turns."""


def unsaid(text: str, said: Sequence[str]) -> str | None:
    """What `text` adds to what was said, if it begins by repeating all of that, in order; else None."""
    place = 0
    for words in (each.strip() for each in said):
        found = text.find(words, place, place + len(words) + LONGEST_SEPARATOR) if words else -1
        if found < 0:
            return None
        place = found + len(words)
    return text[place:]

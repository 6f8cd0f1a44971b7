"""The text of each token of a sequence. The texts together are the text of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""Stands for bytes that are no whole character, because the next token goes on with it."""
LONGEST_CHARACTER = 16
"""Most tokens that are decoded together because the last of them may not end a character."""

Decode = Callable[[Sequence[int]], str]


def token_texts(decode: Decode, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token, so that they join to `decode(token_ids)`.

    A character that several tokens make up is the text of the last of them; the others have none. If a tokenizer
    decodes a sequence to something else than its parts, the last token has the whole text.
    """
    whole = decode(token_ids)
    known = {token: decode([token]) for token in set(token_ids)}
    texts = [known[token] for token in token_ids]
    if "".join(texts) == whole:
        return texts
    texts = _in_context(decode, token_ids)
    if "".join(texts) == whole:
        return texts
    return [*[""] * (len(token_ids) - 1), whole]


def _in_context(decode: Decode, token_ids: Sequence[int]) -> list[str]:
    """Return the texts that each token adds to the tokens before it. Only a few of these are decoded again."""
    texts = [""] * len(token_ids)
    context = begun = 0
    """Tokens [context, begun) are complete text, and are decoded again only because texts depend on what is before."""
    before = ""
    for place in range(len(token_ids)):
        text = decode(token_ids[context : place + 1])
        is_last = place == len(token_ids) - 1
        if text.endswith(UNFINISHED) and not is_last and place - begun < LONGEST_CHARACTER:
            continue
        texts[place] = text[len(before) :]
        context, begun = begun, place + 1
        before = decode(token_ids[context:begun])
    return texts

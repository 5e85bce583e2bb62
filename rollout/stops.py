"""Strings that end a sample: found in the tokens, so that engines agree on the last one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


class StopStrings:
    """Looks for some strings in what a sample says.

    Args:
        tokenizer: decodes the tokens.
        stop: the strings, at least one, none empty.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        # Every token stands for a byte at least.
        self._longest = max(len(text.encode()) for text in stop) + 1
        self._may_end = _with_one_of(tokenizer, {text[-1] for text in stop})

    def ends(self, tokens: Sequence[int] | NDArray[Any]) -> bool:
        """Whether the text of some tokens holds a string, and didn't before the last one.

        Args:
            tokens: ``[L]`` sampled tokens, of which all but the last are known not to hold one.
        """
        last = int(tokens[-1])
        if last < len(self._may_end) and not self._may_end[last]:
            return False
        text = self._tokenizer.decode(
            [int(token) for token in tokens[-self._longest :]],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return any(stop in text for stop in self._stop)

    def first_end(self, tokens: Sequence[int], checked: int) -> int | None:
        """Number of tokens after which a string is there for the first time; None if none is.

        Args:
            tokens: ``[L]`` sampled tokens.
            checked: number of the first tokens that are known not to hold one.
        """
        for end in range(checked + 1, len(tokens) + 1):
            # Not all of them: this is asked at every step of a long sample.
            if self.ends(tokens[max(0, end - self._longest) : end]):
                return end
        return None


@lru_cache(maxsize=8)
def stop_strings(tokenizer: Any, stop: tuple[str, ...]) -> StopStrings:
    """The finder for some strings, made once."""
    return StopStrings(tokenizer, stop)


def _with_one_of(tokenizer: Any, characters: set[str]) -> NDArray[np.bool_]:
    """``[V]`` whether a token's text may have one of these characters."""
    size = len(tokenizer)
    if any(not ("!" <= character <= "~") for character in characters):
        # Vocabularies write other characters in ways of their own.
        return np.ones(size, dtype=np.bool_)
    pieces = tokenizer.convert_ids_to_tokens(list(range(size)))
    return np.array(
        [
            piece is None or piece.startswith("<0x") or not characters.isdisjoint(piece)
            for piece in pieces
        ]
    )

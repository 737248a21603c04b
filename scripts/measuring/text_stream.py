"""Tokens as they come, as text that never changes once it is shown."""

from __future__ import annotations

from collections.abc import Sequence

from flashtrain.data.tokenizers import Tokenizer

# A character takes at most four bytes, so at most four tokens of a byte; more that is not whole is not UTF-8.
_LONGEST = 4
_SHOWN = 8  # tokens before the new ones that are decoded with them: some tokenizers drop the first space of a text


class TextStream:
    """Decodes a growing sequence; halves of characters wait for their other half."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self._shown, self._new = list(prompt[-_SHOWN:]), list[int]()

    def add(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        self._new.append(token)
        text = self._text()
        if text.endswith("\ufffd") and len(self._new) < _LONGEST:
            return ""
        return self._take(text)

    def rest(self) -> str:
        """What was still waiting."""
        return self._take(self._text()) if self._new else ""

    def _text(self) -> str:
        before = self.tokenizer.decode(self._shown)
        return self.tokenizer.decode([*self._shown, *self._new])[len(before) :]

    def _take(self, text: str) -> str:
        self._shown, self._new = [*self._shown, *self._new][-_SHOWN:], []
        return text

"""Which pixels of an image are hidden, to be predicted from the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Hiding:
    """A share of an image's squares of `square` x `square` pixels, drawn at random: 1 for pixels one by one.

    Every image hides the same number, the share rounded, but never none and never all.
    """

    share: float
    square: int = 1

    def check(self, side: int) -> None:
        """Raise ValueError unless images of `side` x `side` pixels are made of two such squares at least."""
        if side % self.square or side == self.square:
            raise ValueError(
                f"pretrain.square={self.square}: must divide the images' side of {side} pixels and be less; write "
                "such a one, or pretrain.unit=pixel"
            )

    def places(self, side: int, draw: np.random.Generator) -> np.ndarray:
        """The hidden pixels of one image, counted row by row: int64, ascending, the same number for every draw."""
        across = side // self.square
        squares = across**2
        count = min(squares - 1, max(1, round(self.share * squares)))
        rows, columns = np.divmod(draw.choice(squares, count, replace=False, shuffle=False), across)
        corners = (rows * side + columns) * self.square
        inside = np.arange(self.square)
        return np.sort((corners[:, None, None] + inside[:, None] * side + inside).ravel()).astype(np.int64)

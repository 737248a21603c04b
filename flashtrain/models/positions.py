"""Where a token stands: the order of pixels, rotary angles on a line and a grid, sinusoids, tables grown in space.

Sources: rotary positions (Su et al. 2021), one half of the pairs for each axis on a grid (Heo et al. 2024, "axial");
sinusoids (Vaswani et al. 2017, section 3.5); growing a table gridwise (Dao et al. 2022, FlashAttention, appendix E.3).
"""

import math

import torch
from torch import Tensor

Rotation = tuple[Tensor, Tensor]  # cosines and sines, float32 [batch or 1, 1, seq, head_dim / 2]
Tile = tuple[int, int]  # height and width in pixels

# Radians per pixel of the fastest and the slowest pair of an axis. The fastest takes a little over two pixels for half
# a turn, so that it tells neighbours apart; the slowest takes 400 pixels for a whole one, more than the side of the
# largest image (256). Pixel units, whatever the image's size: a stroke learnt at 64 pixels looks the same at 256.
FASTEST_TURN = 1.5
SLOWEST_TURN = 2 * math.pi / 400


def to_tokens(image: Tensor, tile: Tile | None) -> Tensor:
    """[batch, side, side, ...] -> [batch, side^2, ...]: row by row, or tile by tile and row by row inside each."""
    if tile is None:
        return image.flatten(1, 2)
    height, width = tile
    tiles = image.unflatten(2, (-1, width)).unflatten(1, (-1, height))  # [batch, down, height, across, width, ...]
    return tiles.transpose(2, 3).flatten(1, 4)


def to_image(tokens: Tensor, side: int, tile: Tile | None) -> Tensor:
    """[batch, side^2, ...] -> [batch, side, side, ...], the way back of `to_tokens`."""
    if tile is None:
        return tokens.unflatten(1, (side, side))
    height, width = tile
    tiles = tokens.unflatten(1, (side // height, side // width, height, width))
    return tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def rotary_frequencies(head_dim: int, theta: float, device: torch.device) -> Tensor:
    """Radians per position of each rotated pair, theta^(-2i / head_dim): float64 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    return theta**-exponents


def rotation(positions: Tensor, frequencies: Tensor, amplitude: float = 1.0) -> Rotation:
    """Cosines and sines of the rotary angles, float32, times the amplitude.

    The product is taken in float64: at position 1,000,000 a float32 angle is off by up to 0.03 radians, which is more
    than bf16 queries lose by rounding.

    Args:
        positions: int64 [seq] or [batch, seq].
        frequencies: float64 [head_dim / 2], radians per position.
    """
    angles = positions[..., None] * frequencies
    angles = angles.unsqueeze(-3) if angles.dim() == 3 else angles[None, None]
    return (amplitude * angles.cos()).float(), (amplitude * angles.sin()).float()


def grid_frequencies(head_dim: int, device: torch.device) -> Tensor:
    """Radians per pixel of the pairs of one axis, geometric from the fastest to the slowest: float64 [head_dim / 4]."""
    steps = torch.linspace(0, 1, head_dim // 4, dtype=torch.float64, device=device)
    return FASTEST_TURN * (SLOWEST_TURN / FASTEST_TURN) ** steps


def grid_rotation(rows: Tensor, columns: Tensor, frequencies: Tensor) -> Rotation:
    """Rotary angles on a grid: the first half of the pairs turns with the row, the second half with the column.

    Args:
        rows, columns: int64 [seq], in pixels.
        frequencies: float64 [head_dim / 4], radians per pixel, the same for both axes.
    """
    angles = torch.cat((rows[:, None] * frequencies, columns[:, None] * frequencies), dim=-1)[None, None]
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """Turn the pairs (i, i + head_dim / 2) of x [batch, heads, seq, head_dim]; float32 unless x is wider."""
    cos, sin = turn
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def sinusoids(positions: Tensor, hidden_size: int) -> Tensor:
    """Sinusoidal positions, float32 [..., hidden_size], from float64 angles.

    Feature 2i is sin(position / 10000^(2i / hidden_size)) and feature 2i + 1 the cosine of the same angle.

    Args:
        positions: int64 [...].
        hidden_size: an even number of features.
    """
    angles = positions[..., None] * rotary_frequencies(hidden_size, 10_000.0, positions.device)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2).float()


def gridwise(table: Tensor, side_from: int, side_to: int) -> Tensor:
    """A learned table for a larger image from that of a smaller one: each position is repeated factor x factor times.

    Nearest neighbour in space, as FlashAttention took Path-64 to Path-X (factor 2) and Path-256 (factor 4): a pixel of
    the large image starts with the position of the pixel it would shrink to (Dao et al. 2022, appendix E.3).

    Args:
        table: [side_from^2, ...], row by row.
        side_from, side_to: sides in pixels; factor is side_to / side_from.

    Returns:
        [side_to^2, ...], row by row.

    Raises:
        ValueError: the table is not that of side_from, or side_to is not a multiple of it.
    """
    if len(table) != side_from**2:
        raise ValueError(f"side_from={side_from} has {side_from**2} positions, the table {len(table)}: give its side")
    if side_to % side_from:
        raise ValueError(f"side_to={side_to}: must be a multiple of side_from={side_from}, to repeat whole positions")
    factor = side_to // side_from
    grid = table.unflatten(0, (side_from, side_from))
    return grid.repeat_interleave(factor, dim=0).repeat_interleave(factor, dim=1).flatten(0, 1)

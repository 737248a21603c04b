"""Seeds of random numbers, as functions of where in a run they are drawn."""

from __future__ import annotations

import hashlib

import torch


def fold_seed(*numbers: int) -> int:
    """One 63-bit seed from several numbers."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def set_seed(seed: int, device: torch.device) -> None:
    """As torch.manual_seed, for one device alone: that one asks every kind of device that PyTorch knows."""
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)

"""The longest sequence that trains: which length to try next, and one try, which is two steps at that length.

Memory is that of the second step, when the optimiser's state is there. For our kernels a try need not wait for a
million tokens to attend to each other: with a window of some tokens they take the same tensors and the same work space
and hardly any time. A confirmation makes the second step with all of attention.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from flashtrain.attention import Causal, Mask, SlidingWindow
from flashtrain.config import Config
from flashtrain.training.forecast.choose import candidates
from flashtrain.training.forecast.ways_out import longest
from flashtrain.training.language import LanguageTask, mask_of
from flashtrain.training.memory import plan
from flashtrain.training.visibility import LayerMasks
from measuring.timing import Stopwatch
from measuring.training import GPT2_VOCAB, make_config, train_ours

WINDOW = 128  # tokens that a token sees while a length is searched for

# GPT-2's shapes, and one of 1.3 billion parameters.
MODELS = {
    "gpt2": (12, 12, 768),
    "gpt2_medium": (24, 16, 1024),
    "gpt_1.3b": (24, 16, 2048),
}
PARAMETERS = {"gpt2": 124e6, "gpt2_medium": 354e6, "gpt_1.3b": 1.31e9}
# Ours, with rotary positions: what differs from the defaults.
OURS = {
    "standard": ("attention=standard", "memory=none"),
    "ours": ("memory=selective",),
    "ours_full": ("memory=full", "memory.mlp_chunk_tokens=16k"),
}
# Where the search begins for others: bytes a token that a layer takes per unit of width, and the loss per token id.
_BEGIN = {"nanogpt": (36, 6), "huggingface": (64, 16)}


@dataclass(frozen=True)
class Tries:
    """What is known of a model: peaks in GiB of lengths that fit (None where unknown), and lengths that do not."""

    fits: dict[int, float | None]
    fails: frozenset[int]

    @property
    def longest(self) -> int | None:
        return max(self.fits, default=None)

    def next(self, lengths: Sequence[int], guess: int, capacity: float | None) -> int | None:
        """The length to try next, of `lengths` in order; None once the longest that fits stands beside one that does
        not, or at the end.

        Args:
            guess: about the longest, where the search begins.
            capacity: GiB of the device.
        """
        low = max((i for i, n in enumerate(lengths) if n in self.fits), default=-1)
        high = min((i for i, n in enumerate(lengths) if n in self.fails), default=len(lengths))
        if high - low <= 1:
            return None
        first = max((i for i, n in enumerate(lengths) if n <= guess), default=0)
        if low < first < high:
            return lengths[first]
        if high < len(lengths):
            # Down by one, two, four, ... while nothing fits, else into the middle.
            return lengths[(low + high) // 2 if low >= 0 else max(0, high - 2 ** (len(self.fails) - 1))]
        peak = self.fits[lengths[low]]
        reach = lengths[low] * capacity / peak if capacity is not None and peak else 0.0
        return lengths[max(low + 1, max((i for i, n in enumerate(lengths) if n <= 0.98 * reach), default=0))]


def grid(least: int, most: int) -> list[int]:
    """Powers of two times 1, 1.25, 1.5 and 1.75, from `least` to `most`."""
    powers = [2**power for power in range(2, most.bit_length())]
    return [n for power in powers for n in (power * part // 4 for part in (4, 5, 6, 7)) if least <= n <= most]


def config_of(model: str, implementation: str, seq_len: int, overrides: Sequence[str], dry_run: bool) -> Config:
    """One sequence a step of `model`; for ours as OURS says, all other models only read its sizes."""
    layers, heads, hidden = MODELS[model]
    sizes = [] if dry_run else [f"model.num_layers={layers}", f"model.num_heads={heads}", f"model.hidden_size={hidden}"]
    own = ["model.positions=rope", *OURS[implementation]] if implementation in OURS else []
    return make_config(seq_len, 1, [f"model.name={model}", *sizes, *own, *overrides], dry_run)


def guess(model: str, implementation: str, device_bytes: float, overrides: Sequence[str]) -> int:
    """About the longest, where the search begins: for ours by the forecast."""
    if implementation in OURS:
        vocab = f"model.vocab_size={GPT2_VOCAB}"
        found = plan(config_of(model, implementation, 1024, [vocab, *overrides], dry_run=False))
        return longest(found.case, device_bytes)
    layers, _, hidden = MODELS[model]
    width, ids = _BEGIN[implementation]
    a_token = width * hidden * layers + ids * GPT2_VOCAB + 16 * hidden
    return int((device_bytes - 18 * PARAMETERS[model]) / a_token)


class SecondStep:
    """Memory and time of the second of two steps."""

    def __init__(self, device: torch.device) -> None:
        self.watch, self.count = Stopwatch(device), 0
        self._begun = self.seconds = 0.0

    def done(self) -> bool:
        self.watch.wait()
        now = time.perf_counter()
        self.count, self.seconds, self._begun = self.count + 1, now - self._begun, now
        if self.count == 1 and self.watch.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.watch.device)
        return self.count == 2

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = {"seconds": self.seconds}
        if self.watch.device.type == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated(self.watch.device) / 2**30
            found["reserved_gib"] = torch.cuda.max_memory_reserved(self.watch.device) / 2**30
        return found


class Windowed(pl.Callback):
    """A token sees WINDOW tokens: in all steps, or in the first one alone."""

    def __init__(self, always: bool) -> None:
        self.always = always

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._see(module, SlidingWindow(WINDOW - 1, 0))

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.always:
            self._see(module, Causal())

    @staticmethod
    def _see(module: pl.LightningModule, mask: Mask) -> None:
        assert isinstance(module, LanguageTask)
        module.masks = LayerMasks(module.config, mask_of(module.config) & mask, positional=True)


def try_ours(config: Config, device: torch.device, steps: SecondStep, vocab: int, all_of_attention: bool) -> float:
    """Two steps of ours through the task and trainer of train.py; nothing is refused before it is allocated.

    Returns:
        The second step's loss.
    """
    how = next(candidates(config.memory))  # the only one: memory= is given
    windowed = config.attention.backend != "standard"  # which computes all pairs, whatever is hidden
    return train_ours(config, device, steps, vocab, how, [Windowed(not all_of_attention)] if windowed else [])

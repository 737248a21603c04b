"""A longer context than the weights were trained at: stretched, grown or left as it is, but only if that is chosen."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from flashtrain.config import Config
from flashtrain.config.schema import ModelConfig
from flashtrain.models.gpt import GPT
from flashtrain.models.longer import grown, reach, ways_to_extend

logger = logging.getLogger("flashtrain")

TABLE = "position_embedding.weight"

# How a trained model is made to read further: by its rotary angles, or its learned table.
Extension = Literal["extrapolate", "linear", "ntk", "yarn", "llama3", "duplicate", "interpolate"]
ROTARY: tuple[Extension, ...] = ("extrapolate", "linear", "ntk", "yarn", "llama3")
LEARNED: tuple[Extension, ...] = ("duplicate", "interpolate")


@dataclass(frozen=True)
class Trained:
    """What the positions of some weights were made for: the model, and tokens in its sequences."""

    model: ModelConfig
    seq_len: int


def fit_positions(model: GPT, weights: dict[str, Tensor], trained: Trained) -> None:
    """Bring the position table of `weights` to that of `model`, as the model's config says, if the model is longer.

    Raises:
        ValueError: the model is longer than the positions reach, and nothing is chosen; the ways are offered.
    """
    config, wanted = model.config, model.seq_len
    how = config.position_extension
    if wanted <= reach(trained.model, trained.seq_len) or config.positions != trained.model.positions:
        return
    if config.positions == "learned":
        if how is None or how == "extrapolate":
            raise ValueError(_too_long(trained, wanted))
        if TABLE in weights:
            weights[TABLE] = grown(weights[TABLE], wanted, how)
            logger.info("learned positions: %s from %d to %d", how, trained.seq_len, wanted)
    elif config.positions == "rope":
        chosen = how == "extrapolate" or config.rope_theta != trained.model.rope_theta
        if not chosen and reach(config, trained.seq_len) < wanted:
            raise ValueError(_too_long(trained, wanted))


def extended(config: Config, seq_len: int, how: Extension | None) -> Config:
    """The configuration of a trained run for `seq_len` tokens, without further training.

    Args:
        config: the run's.
        seq_len: tokens that the model is to read.
        how: what is done if that is more than the run was trained at; extrapolate goes on with the angles as they are.

    Raises:
        ValueError: it is more and nothing is chosen, or what is not for such positions.
    """
    trained, model = Trained(config.model, config.seq_len), config.model
    longer = seq_len > reach(model, config.seq_len)
    if longer and how is None:
        raise ValueError(_too_long(trained, seq_len, at_once=True))
    if longer and how not in (LEARNED if model.positions == "learned" else ROTARY):
        names = ", ".join(LEARNED if model.positions == "learned" else ROTARY)
        raise ValueError(f"extend={how}: the run has model.positions={model.positions}; take one of {names}")
    if longer and how in ("linear", "ntk", "yarn", "llama3"):
        scaling = model.rope_scaling
        original = config.seq_len if scaling.rule == "none" else scaling.original_seq_len or config.seq_len
        scaling = replace(scaling, rule=how, factor=seq_len / original, original_seq_len=original)
        model = replace(model, rope_scaling=scaling)
    elif longer and how in ("duplicate", "interpolate", "extrapolate"):
        model = replace(model, position_extension=how)
    return replace(config, seq_len=seq_len, model=model)


def _too_long(trained: Trained, wanted: int, at_once: bool = False) -> str:
    known = int(reach(trained.model, trained.seq_len))
    names = ", ".join(LEARNED if trained.model.positions == "learned" else ROTARY)
    now = f"extend it at once by --extend ({names}); or " if at_once else ""
    return f"seq_len={wanted}: the model's positions reach {known} tokens. To read further, {now}" + ways_to_extend(
        trained.model, trained.seq_len, wanted
    )

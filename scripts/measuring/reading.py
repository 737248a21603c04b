"""A trained language model to read and write with, at the length it was trained at or a longer one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flashtrain.attention import Causal, Mask, SlidingWindow, lower
from flashtrain.config.hugging_face import is_hugging_face_folder
from flashtrain.data.tokenizers import Tokenizer
from flashtrain.interchange.loading import own_tokenizer, read
from flashtrain.models.decoding import decoding_attention
from flashtrain.models.generate import PlanFor
from flashtrain.models.gpt import GPT
from flashtrain.models.longer import reach, ways_to_extend
from flashtrain.training.extension import TABLE, Extension, Trained, extended, fit_positions
from flashtrain.training.language import mask_of
from flashtrain.training.visibility import LayerMasks, Plans
from measuring.trained import Run, load_run


@dataclass(frozen=True)
class Reader:
    """A language model on a device, in evaluation mode.

    Attributes:
        model: its seq_len is the context that it reads here.
        plan_for: (queries, keys) -> plans of one sequence.
        block: queries in a block of its layouts; 1 where all layers are dense.
        trained: what its positions were made for.
        run: None for a Hugging Face folder.
    """

    name: str
    model: GPT
    tokenizer: Tokenizer
    plan_for: PlanFor
    block: int
    trained: Trained
    run: Run | None

    @property
    def device(self) -> torch.device:
        return self.model.head_weight.device

    def in_half(self, half: bool) -> AbstractContextManager[object]:
        """bfloat16 arithmetic on float32 weights, as in training, or none."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half)


def load_reader(path: Path, seq_len: int | None, how: Extension | None, device: torch.device) -> Reader:
    """The language model at `path`, float32 on `device`.

    Args:
        path: a run's folder, a checkpoint file, or a Hugging Face folder.
        seq_len: the context that it reads; None for the one that it was trained at.
        how: how its positions reach a longer one, see `extension.extended`.

    Raises:
        ValueError: no language model is there, or seq_len is more than its positions reach and nothing is chosen.
    """
    if is_hugging_face_folder(path):
        return _from_hugging_face(path, seq_len, how, device)
    run = load_run(path)
    if run.config.task != "language":
        raise ValueError(f"{run.id}: task={run.config.task}; give a language model's run")
    return _from_run(run, seq_len, how, device)


def _from_run(run: Run, seq_len: int | None, how: Extension | None, device: torch.device) -> Reader:
    tokenizer = own_tokenizer(run.config.tokenizer, run.about, run.id)
    trained = Trained(run.config.model, run.config.seq_len)
    config = extended(run.config, seq_len or trained.seq_len, how)
    weights = {name: tensor.to(torch.float32, copy=True) for name, tensor in run.weights.items()}
    rows = len(weights["token_embedding.weight"])
    with torch.device("meta"):
        model = GPT(config.model, rows, config.seq_len, decoding_attention)
    fit_positions(model, weights, trained)
    if TABLE in weights:
        weights[TABLE] = weights[TABLE][: config.seq_len]
    model.load_state_dict(weights, assign=True)
    # A shorter context sees the beginning of the layouts that the model was trained with.
    whole = replace(config, seq_len=max(config.seq_len, run.config.seq_len))
    masks = LayerMasks(whole, mask_of(config), positional=True)

    def plan_for(queries: int, keys: int) -> Plans:
        return masks.lower(1, keys, device) if queries == keys else masks.lower_last(queries, keys, device)

    return Reader(run.id, model.to(device).eval(), tokenizer, plan_for, masks.block, trained, run)


def _from_hugging_face(path: Path, seq_len: int | None, how: Extension | None, device: torch.device) -> Reader:
    loaded = read(path)
    model, trained = loaded.model, Trained(loaded.model.config, loaded.model.seq_len)
    if loaded.tokenizer is None:
        raise ValueError(f"{path}: has no tokenizer; put its tokenizer.json beside config.json")
    wanted, known = seq_len or trained.seq_len, int(reach(trained.model, trained.seq_len))
    if wanted > known:
        ways = ways_to_extend(trained.model, trained.seq_len, wanted).replace("<run>", str(path))
        raise ValueError(
            f"{path}: its positions reach {known} tokens; to extend it, make it a run of ours first: {ways}"
        )
    if how is not None:
        raise ValueError(f"--extend {how}: {path} reaches {wanted} tokens as it is; leave --extend out")
    model.seq_len = min(seq_len or trained.seq_len, trained.seq_len)
    model.attend_by(decoding_attention)
    mask: Mask = Causal() if loaded.window is None else Causal() & SlidingWindow(loaded.window - 1, 0)

    def plan_for(queries: int, keys: int) -> Plans:
        return lower(mask, 1, queries, keys, device)

    return Reader(path.resolve().name, model.to(device), loaded.tokenizer, plan_for, 1, trained, None)

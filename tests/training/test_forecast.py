"""The forecast: its counts are those of the model and of autograd, its figures those that were measured."""

from __future__ import annotations

import functools
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from flashtrain.attention import Causal, attention, lower
from flashtrain.config import build
from flashtrain.models import recompute
from flashtrain.models.gpt import GPT
from flashtrain.models.recompute import Recompute
from flashtrain.training import checkpoints, memory
from flashtrain.training.forecast import GPUS, SAFE, Case, Forecast, choose, gpu_called
from flashtrain.training.forecast.case import count_parameters
from flashtrain.training.forecast.memory import kept_bytes, step_memory
from flashtrain.training.forecast.ways_out import longest
from flashtrain.training.language import LanguageTask
from flashtrain.training.run import run

from .conftest import ROOT

GPT2_VOCAB = 50257
LANGUAGE_MODELS = ("tiny", "gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl", "gpt2_rope", "modern")


def raw_of(*overrides: str) -> Any:
    """The composed configuration of a command line."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_container(compose("config", list(overrides)), resolve=True)


def case_of(*overrides: str, sequences: int = 1, **changes: Any) -> Case:
    config = build(raw_of(*overrides))
    tokens = sequences * config.seq_len
    trainer = replace(config.trainer, batch_tokens=tokens, micro_batch_tokens=tokens)
    settings = {
        "vocab_size": GPT2_VOCAB,
        "precision": "bf16-mixed",
        "compiled": True,
        "backend": "portable",
        "pairs": config.seq_len * (config.seq_len + 1) / 2,
        "how": Recompute(),
        "gpu": GPUS["h200"],
    }
    return Case(config=replace(config, trainer=trainer), **(settings | changes))


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_the_parameters_are_counted_as_the_model_has_them(name):
    case = case_of(f"model={name}", "seq_len=512")
    with torch.device("meta"):
        model = GPT(case.config.model, GPT2_VOCAB, 512, lambda q, k, v, plan: q)
    assert sum(count_parameters(case).values()) == model.num_parameters


class Saved:
    """A tensor in autograd's keeping."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def saved_bytes(case: Case, monkeypatch: pytest.MonkeyPatch) -> int:
    """What autograd keeps of a forward pass on the CPU, each piece of memory once, without the model's parameters."""
    torch.manual_seed(0)
    config = case.config
    model = GPT(config.model, 64, config.seq_len, functools.partial(attention, backend=case.backend))
    model.checkpoint_blocks = replace(case.how, compiled=case.compiled)
    # As the compiler cuts graphs, without the compiling.
    cut = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(recompute, "_selective_graph", cut(recompute._selective))
    forward: Any = cut(model) if case.compiled and case.how.blocks == "none" else model
    alive: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        alive.add(saved)
        return saved

    rows, seq_len = config.sequences_per_micro_batch, config.seq_len
    tokens = torch.randint(64, (rows, seq_len))
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16-mixed"),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor),
    ):
        hidden = forward(tokens, lower(Causal(), rows, seq_len, seq_len, tokens.device))
    assert hidden.requires_grad
    storages = {saved.tensor.untyped_storage().data_ptr(): saved.tensor.untyped_storage().nbytes() for saved in alive}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(size for place, size in storages.items() if place not in weights)


SMALL = ("model.num_layers=3", "model.num_heads=4", "model.hidden_size=128")
GPT2 = ("model=gpt2", *SMALL)
ROPE = ("model=gpt2_rope", *SMALL)
MODERN = ("model=modern", *SMALL, "model.num_kv_heads=2")
CASES = {
    "gpt2": (GPT2, {}),
    "gpt2-float32": (GPT2, {"precision": "32-true"}),
    "gpt2-full": (GPT2, {"how": Recompute("full")}),
    "gpt2-pieces": (GPT2, {"how": Recompute("none", mlp_chunk_tokens=128)}),
    "rope": (ROPE, {}),
    "rope-standard": (ROPE, {"backend": "standard"}),
    "modern": (MODERN, {}),
    "gpt2-compiled": (GPT2, {"compiled": True}),
    "rope-compiled": (ROPE, {"compiled": True}),
    "rope-standard-compiled": (ROPE, {"compiled": True, "backend": "standard"}),
    "modern-compiled": (MODERN, {"compiled": True}),
    "rope-selective": (ROPE, {"compiled": True, "how": Recompute("selective")}),
    "modern-selective": (MODERN, {"compiled": True, "how": Recompute("selective")}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_blocks_keep_is_what_autograd_saves_within_5_percent(name, monkeypatch):
    overrides, changes = CASES[name]
    settings = {"compiled": False, "backend": "sdpa", "gpu": None, "fused_norm": False} | changes
    case = case_of(*overrides, "seq_len=512", sequences=2, **settings)
    w, tokens, counts = case.number_bytes, case.micro_tokens, count_parameters(case)
    # Beside what blocks keep: the final norm's input, token ids, rotary angles, and the cast weights of autocast.
    stream = tokens * (4 * case.config.model.hidden_size + 8) + 4 * case.sizes.head_dim * 512
    if case.config.model.norm == "rmsnorm" and (case.how.blocks != "none" or not case.compiled):
        stream += tokens * 4 * case.config.model.hidden_size  # unfused, as RMSNorm is on the CPU
    casts = w * counts["matrices"] if w < 4 and case.how.blocks == "none" and not case.how.mlp_chunk_tokens else 0
    measured = saved_bytes(case, monkeypatch) - stream - casts
    assert kept_bytes(case) == pytest.approx(measured, rel=0.05)


def test_the_longest_sequence_fits_and_a_longer_one_does_not():
    case, limit = case_of("model=gpt2_rope", "seq_len=4k"), 40 * 2**30
    here = longest(case, limit)
    assert step_memory(case.at_length(here)).peak <= limit < step_memory(case.at_length(here + 1024)).peak


def test_what_keeps_less_takes_longer_sequences():
    case, limit = case_of("model=gpt2_rope", "seq_len=4k"), 40 * 2**30
    settings = [Recompute(), Recompute("selective"), Recompute("full"), Recompute("full", True, 16384)]
    lengths = [longest(replace(case, how=how), limit) for how in settings]
    assert lengths == sorted(set(lengths))
    assert longest(replace(case, backend="standard"), limit) < lengths[0] / 10


def test_auto_keeps_all_where_that_fits_and_otherwise_takes_the_fastest_that_does():
    short, long = case_of("model=gpt2", "seq_len=16k"), case_of("model=gpt2_rope", "seq_len=1M")
    limit = SAFE * GPUS["h200"].memory_bytes
    assert choose(short, limit, 1e12) == Recompute()
    chosen = replace(long, how=choose(long, limit, 1e12))
    assert chosen.how.blocks == "selective"  # attention is nearly all of the step
    assert step_memory(chosen).peak <= limit < step_memory(long).peak


def test_auto_takes_nothing_to_a_host_without_room():
    case = case_of("model=gpt2_rope", "seq_len=1M", "memory.offload=auto")
    limit = SAFE * GPUS["a100-80gb"].memory_bytes
    assert choose(case, limit, 1e12).offload
    assert not choose(case, limit, 2**30).offload


def test_what_is_configured_is_not_changed():
    case = case_of("model=gpt2_rope", "seq_len=1M", "memory=none")
    assert choose(case, 1.0, 1e12) == Recompute()


def test_a_run_that_does_not_fit_stops_with_the_forecast_and_three_ways_out():
    case = case_of("model=gpt2_medium", "seq_len=64k", "memory=none", gpu=GPUS["rtx4090"])
    with pytest.raises(ValueError, match="does not fit") as error:
        memory.refuse_what_does_not_fit(Forecast.of(case, case.gpu.memory_bytes))
    _, _, ways = str(error.value).partition("ways out, the cheapest first:\n")
    assert len(ways.splitlines()) == 3
    memory.refuse_what_does_not_fit(Forecast.of(replace(case, gpu=GPUS["b200"]), 1e12))


def test_plan_only_prints_the_forecast_of_a_named_gpu_and_trains_nothing(make_config, tmp_path, capsys):
    config = make_config("model=gpt2", "model.num_layers=12", "seq_len=8k", "plan.only=true", "plan.gpu=a100-40gb")
    assert run(config, []) == 0
    said = capsys.readouterr().out
    assert "on a100-40gb" in said
    for word in (
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "loss",
        "peak",
        "tokens/s",
        "standard",
        "flash",
    ):
        assert word in said
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "prepared").exists()


def test_every_run_says_its_forecast_and_its_summary_has_it(make_config, tmp_path):
    assert run(make_config("run_id=m", "trainer.max_steps=2"), []) == 0
    folder = tmp_path / "runs" / "m"
    assert "forecast: " in (folder / "train.log").read_text()
    assert json.loads((folder / "summary.json").read_text())["forecast_peak_memory_gib"] > 0


OUT_OF_MEMORY = {
    "PyTorch": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 12.00 GiB. GPU 0 has ..."),
    "pinned host memory": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    "Triton": RuntimeError("Triton Error [CUDA]: out of memory"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "the CPU": RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you ..."),
}


@pytest.mark.parametrize("whose", OUT_OF_MEMORY)
def test_out_of_memory_in_mid_run_leaves_the_last_checkpoint_whole_and_says_who_asked(
    make_config, tmp_path, monkeypatch, whose
):
    honest = LanguageTask.loss_sum

    def hungry(self, batch):
        if torch.is_grad_enabled() and self.global_step == 5:
            raise OUT_OF_MEMORY[whose]
        return honest(self, batch)

    monkeypatch.setattr(LanguageTask, "loss_sum", hungry)
    assert run(make_config("run_id=m", "trainer.checkpoint_every_n_steps=2"), []) == 1
    folder: Path = tmp_path / "runs" / "m"
    log = (folder / "train.log").read_text()
    assert f"out of memory in step 6: {str(OUT_OF_MEMORY[whose]).splitlines()[0]}" in log
    assert "asked for by _work (flashtrain/training/task.py" in log
    assert "the last checkpoint is whole: go on with resume=m" in log
    assert "Traceback" not in log
    newest = checkpoints.newest(folder / "checkpoints")
    assert newest is not None
    assert newest[0].name == "step-00000004.ckpt"


@pytest.mark.parametrize(("training", "place"), [(True, "in step 1"), (False, "in the validation after step 2")])
def test_out_of_memory_before_any_checkpoint_promises_none(make_config, tmp_path, monkeypatch, training, place):
    honest = LanguageTask.loss_sum

    def hungry(self, batch):
        if torch.is_grad_enabled() == training:
            raise OUT_OF_MEMORY["PyTorch"]
        return honest(self, batch)

    monkeypatch.setattr(LanguageTask, "loss_sum", hungry)
    assert run(make_config("run_id=m", "trainer.val_every_n_steps=2"), []) == 1
    log = (tmp_path / "runs" / "m" / "train.log").read_text()
    assert f"out of memory {place}: " in log
    assert "there is no checkpoint yet: start again" in log
    assert "whole" not in log


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 39.4, "a100-40gb"),
        ("NVIDIA L40S", 44.4, "l40s"),
        ("NVIDIA GeForce RTX 4090", 23.5, "rtx4090"),
        ("NVIDIA L40", 44.4, None),
    ],
)
def test_a_gpu_is_known_by_the_name_that_pytorch_gives_it(name, gib, known):
    found = gpu_called(name, gib * 2**30)
    assert (found and found.name) == known
    assert found is None or found.memory_bytes == gib * 2**30

"""Training speed: our own path and peers', each in a process of its own, whatever becomes of it."""

from __future__ import annotations

from types import SimpleNamespace

import benchmark_training
import pytest
import torch
from measuring import training
from measuring.step_parts import Kernel, part_of, parts

from tests.scripts.conftest import check_facts

PEER = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=config.bias)

    def forward(self, idx, targets=None):
        logits = self.head(self.table(idx))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def _row(model, *arguments):
    return benchmark_training.row(
        benchmark_training.parse(["--dry-run", "--device", "cpu", "--row", model, *arguments])
    )


def test_ours_is_trained_in_a_process_of_its_own(dry_run, tmp_path):
    code, result = dry_run(benchmark_training.main, "--peer", f"nanogpt={tmp_path}", "--models", "ours")
    assert code == 0
    check_facts(result)
    assert str(tmp_path) not in result["command"]
    (ours,) = result["rows"]
    assert ours["failed"] is None and ours["tokens_per_second"] > 0 and ours["step_ms"]["repeats"] >= 3
    assert ours["loss"] == pytest.approx(torch.tensor(320.0).log().item(), rel=0.05)


@pytest.mark.parametrize(
    ("program", "failed"), [("echo lost >&2; kill -9 $$", "ended with -9: lost"), ("sleep 5", "took longer than 1 s")]
)
def test_a_row_that_crashes_or_hangs_is_told_and_the_others_go_on(dry_run, tmp_path, monkeypatch, program, failed):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    names = ["--peer", "huggingface", "--row-seconds", "1"]
    code, result = dry_run(benchmark_training.main, *names)
    assert code == 1
    assert [(row["model"], row["failed"]) for row in result["rows"]] == [("huggingface", failed), ("ours", failed)]


def test_a_peer_without_its_model_is_told(tmp_path):
    assert "no model.py" in _row("nanogpt", "--peer", f"nanogpt={tmp_path}")["failed"]


def test_nanogpts_model_is_trained_from_its_folder(tmp_path):
    (tmp_path / "model.py").write_text(PEER)
    found = _row("nanogpt", "--peer", f"nanogpt={tmp_path}")
    assert found.get("failed") is None and found["tokens_per_second"] > 0
    assert found["step_ms"]["min"] <= found["step_ms"]["median"]


def test_how_much_faster_ours_is_than_each_peer_is_told_by_length():
    def row(model, seq_len, rate, failed=None):
        return {"model": model, "seq_len": seq_len, "tokens_per_second": rate, "peak_gib": rate / 10, "failed": failed}

    rows = [row("nanogpt", 1024, 80.0), row("ours", 1024, 100.0), row("huggingface", 1024, 0.0, "out of memory")]
    found = benchmark_training.beside_peers([*rows, row("ours", 4096, 50.0)])
    assert found == [{"seq_len": 1024, "peer": "nanogpt", "speed": 1.25, "memory": 1.25}]


def test_a_name_that_is_no_model_says_what_there_is():
    assert "--peer nanogpt=PATH" in _row("megatron")["failed"]


def test_ours_takes_overrides_of_the_configuration():
    assert "did you mean" in _row("ours", "--override", "+memory.checkpoint=full")["failed"]


def test_every_model_sees_the_same_tokens_and_the_step_is_one_micro_batch():
    config = training.make_config(32, 2, [], dry_run=True)
    assert config.sequences_per_step == config.sequences_per_micro_batch == 2
    first, again = (next(training.batches(config, 320)) for _ in range(2))
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.tokens[:, 1:], first.targets[:, :-1])


def test_flops_of_a_step_of_gpt2_small_are_six_a_weight_and_token_and_the_attention():
    """123.5M weights in products; 12 x 768 x 12 FLOPs a visible pair, forward and backward."""
    config = training.make_config(1024, 32, [], dry_run=False)
    weights = 12 * 12 * 768**2 + 50257 * 768
    attention = 12 * 768 * 12 * 32 * (1024 * 1025 / 2)
    assert training.step_flops(config, training.GPT2_VOCAB) == pytest.approx(6 * weights * 32768 + attention)


def test_the_parts_of_a_step_are_told_by_the_kernels_names():
    wanted = {
        "_dkdv_kernel": "attention",
        "backward_kernel": "attention",
        "prepare_kernel": "attention",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention",
        "nvjet_tst_128x256_64x4_1x2_h_bz_TNT": "matmul",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas": "matmul",
        "triton_per_fused__to_copy_native_layer_norm_0": "norm and elementwise",
        "triton_poi_fused__scaled_dot_product_flash_attention_clone_3": "norm and elementwise",
        "triton_red_fused__log_softmax_nll_loss_forward_7": "loss",
        "liger_cross_entropy_kernel": "loss",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>": "optimiser and clipping",
        "Memcpy HtoD (Pinned -> Device)": "copies and fills",
        "void at::native::vectorized_elementwise_kernel<4, AddFunctor>": "norm and elementwise",
    }
    assert {name: part_of(name) for name in wanted} == wanted


def test_idle_is_the_time_in_which_nothing_ran():
    kernels = [Kernel("gemm", 0, 4000), Kernel("adam", 3000, 5000), Kernel("gemm", 7000, 10000)]
    found = parts(kernels, steps=2)
    assert found["step_ms"] == pytest.approx(5.0)
    assert found["parts_ms"] == pytest.approx({"matmul": 3.5, "optimiser and clipping": 1.0, "idle": 1.0})
    assert found["longest"][0]["kernel"] == "gemm"


def test_timing_ends_when_the_time_is_up_and_takes_three_steps_at_least(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("time.perf_counter", lambda: clock.now)
    timed = training.TimedSteps(torch.device("cpu"), seconds=4.0, most=10)
    steps = 0
    done = False
    while not done:
        clock.now += 30.0 if steps == 0 else 0.5
        steps += 1
        done = timed.done()
    found = timed.figures(tokens=1000, flops=1e12, peak=4e12)
    assert found["tokens_per_second"] == pytest.approx(2000)
    assert found["mfu"] == pytest.approx(0.5)
    assert found["step_ms"]["repeats"] == 8
    assert found["seconds_to_first_step"] == pytest.approx(30.0)

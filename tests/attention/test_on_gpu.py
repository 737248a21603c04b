"""What only a GPU can show: the kernels as compiled, at real lengths, beyond 2**31 elements, always the same bits."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flashtrain.attention import Causal, Documents, Mask, SlidingWindow, attention, lower
from tests.attention.oracle import NAMES, Case, assert_accurate, assert_close, make_case, run

pytestmark = pytest.mark.gpu

# Each is three kernels, compiled with and without tables: seconds apiece.
COMPILED = [
    *((torch.bfloat16, head_dim) for head_dim in (16, 64, 96, 128, 256)),
    *((torch.float16, head_dim) for head_dim in (59, 128)),
    *((torch.float32, head_dim) for head_dim in (32, 128, 256)),
]
MASKS: dict[str, Mask | None] = {
    "full": None,
    "causal": Causal(),
    "window": Causal() & SlidingWindow(200),
    "documents": Causal() & Documents(((1, 300, 0, 214, 188),)),
}


@pytest.fixture(autouse=True)
def _give_memory_back() -> None:
    torch.cuda.empty_cache()


@pytest.mark.parametrize(("dtype", "head_dim"), COMPILED, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_every_kernel_of_the_table_is_right(device: torch.device, dtype: torch.dtype, head_dim: int, name: str) -> None:
    case = make_case(device, dtype, MASKS[name], batch=2, heads=(4, 2), seq=(703, 703), head_dim=head_dim)
    assert_accurate(case)


@pytest.mark.parametrize("seq", [(1025, 1025), (1, 4097), (799, 3), (4224, 4224), (300, 2048)], ids=str)
def test_long_and_unequal_lengths_are_right(device: torch.device, seq: tuple[int, int]) -> None:
    assert_accurate(make_case(device, torch.bfloat16, Causal(), heads=(4, 1), seq=seq))


def by_chunks(case: Case, dtype: torch.dtype, chunk: int = 512, causal: bool = True) -> dict[str, Tensor]:
    """Attention and its gradients by their formulas, a few queries at a time. One head, no gradient on lse."""
    q, k, v, dout = (tensor[0, 0].to(dtype) for tensor in (*case.inputs(), case.dout))
    results = {name: torch.zeros_like(q) for name in ("out", "dq", "dk", "dv")}
    dk, dv = torch.zeros_like(k, dtype=torch.float64), torch.zeros_like(v, dtype=torch.float64)
    key = torch.arange(len(k), device=k.device)
    for first in range(0, len(q), chunk):
        rows = slice(first, first + chunk)
        hidden = (key > key[rows, None]) & causal
        p = ((q[rows] @ k.T) * case.scale).masked_fill(hidden, float("-inf")).softmax(-1)
        results["out"][rows] = p @ v
        dp = dout[rows] @ v.T
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * case.scale
        results["dq"][rows] = ds @ k
        dk += (ds.T @ q[rows]).double()
        dv += (p.T @ dout[rows]).double()
    results["dk"], results["dv"] = dk.to(dtype), dv.to(dtype)
    return {name: tensor[None, None] for name, tensor in results.items()}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("seq", [4096, 16384, 65536])
def test_long_sequences_stay_within_twice_the_error_of_plain_pytorch(
    device: torch.device, seq: int, head_dim: int
) -> None:
    case = make_case(device, torch.bfloat16, Causal(), heads=(1, 1), seq=(seq, seq), head_dim=head_dim)
    case.dlse.zero_()
    ours, truth, plain = run(case), by_chunks(case, torch.float64), by_chunks(case, torch.bfloat16)
    for name in ("out", "dq", "dk", "dv"):
        assert_close(name, ours[name], plain[name], truth[name])
        assert abs((ours[name].double() - truth[name]).mean()) < 1e-4, f"{name} is biased"


def grads_of(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    out = attention(*leaves, mask, backend="portable")
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def needs_memory(gibibytes: int) -> None:
    if torch.cuda.get_device_properties(0).total_memory < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of GPU memory: no smaller tensor has offsets beyond 32 bits")


def test_the_last_of_a_batch_beyond_32_bits_is_right(device: torch.device) -> None:
    needs_memory(60)
    shape = (2049, 16, 512, 128)
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    many = [tensor[2048:].clone() for tensor in grads_of(q, k, v, dout, Causal())]
    alone = grads_of(q[2048:], k[2048:], v[2048:], dout[2048:], Causal())
    assert all(torch.equal(a, b) for a, b in zip(many, alone, strict=True))


def test_the_last_document_of_a_fused_view_beyond_32_bits_is_right(device: torch.device) -> None:
    needs_memory(40)
    qkv = torch.randn(1, 180_000, 3, 32, 128, device=device, dtype=torch.bfloat16)
    dout = torch.randn(1, 180_000, 32, 128, device=device, dtype=torch.bfloat16)
    q, k, v, dout = (tensor.transpose(1, 2) for tensor in (*qkv.unbind(2), dout))
    packed = grads_of(q, k, v, dout, Causal() & Documents(((1000,) * 180,)))
    last = [tensor[:, -1:, -1000:].contiguous() for tensor in (q, k, v, dout)]
    case = Case(*last, torch.zeros(1, 1, 1000, device=device), 128**-0.5, lower(Causal(), 1, 1000, 1000, device))
    truth, plain = by_chunks(case, torch.float64), by_chunks(case, torch.bfloat16)
    for name, result in zip(("out", "dq", "dk", "dv"), packed, strict=True):
        assert_close(name, result[:, -1:, -1000:], plain[name], truth[name])


def test_a_gradient_with_rows_beyond_32_bits_apart_is_right(device: torch.device) -> None:
    needs_memory(40)
    seq, heads, dim = 230_000, 16, 96
    q, k, v = (torch.randn(1, heads, seq, dim, device=device, dtype=torch.bfloat16) for _ in range(3))
    wide = torch.randn(seq, heads * dim + 8192, device=device, dtype=torch.bfloat16)
    dout = wide[:, : heads * dim].view(1, seq, heads, dim).transpose(1, 2)
    mask = Causal() & Documents(((1000,) * 230,))
    for a, b in zip(grads_of(q, k, v, dout, mask), grads_of(q, k, v, dout.contiguous(), mask), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", MASKS)
def test_twenty_backward_passes_give_the_same_bits(device: torch.device, name: str) -> None:
    seq = 703 if name == "documents" else 2048
    case = make_case(device, torch.bfloat16, MASKS[name], batch=2, heads=(8, 2), seq=(seq, seq))
    first = run(case)
    for _ in range(19):
        again = run(case)
        assert all(torch.equal(first[key], again[key]) for key in NAMES)


def digest() -> str:
    case = make_case(torch.device("cuda"), torch.bfloat16, Causal(), batch=2, heads=(8, 2), seq=(2048, 2048))
    results = run(case)
    return hashlib.sha256(b"".join(results[n].float().cpu().numpy().tobytes() for n in NAMES)).hexdigest()


def test_another_process_gives_the_same_bits() -> None:
    command = [sys.executable, "-c", "from tests.attention.test_on_gpu import digest; print(digest())"]
    other = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert other.returncode == 0, other.stderr[-2000:]
    assert other.stdout.split()[-1] == digest()


def test_memory_is_linear_in_the_sequence(device: torch.device) -> None:
    peaks = []
    for seq in (65_536, 131_072):
        case = make_case(device, torch.bfloat16, Causal(), heads=(4, 4), seq=(seq, seq))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(case)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del case
    assert peaks[1] < 2.2 * peaks[0] < 2**31


def test_more_than_65535_heads_in_all(device: torch.device) -> None:
    case = make_case(device, torch.float16, Causal(), batch=4400, heads=(16, 16), seq=(5, 5), head_dim=16)
    assert_accurate(case)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_device_than_the_current_one() -> None:
    with torch.cuda.device(0):
        case = make_case(torch.device("cuda:1"), torch.bfloat16, MASKS["documents"], seq=(703, 703))
        assert_accurate(case)
        assert torch.cuda.current_device() == 0


def test_lowering_and_calling_stop_the_host_nowhere(device: torch.device) -> None:
    case = make_case(device, torch.bfloat16, heads=(4, 4), seq=(512, 512))
    run(case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for lengths in ((500, 12), (12, 500)):
            case.plan = lower(Causal() & Documents((lengths,)), 1, 512, 512, device)
            leaves = [tensor.detach().requires_grad_() for tensor in case.inputs()]
            attention(*leaves, case.plan, backend="portable").backward(case.dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")

"""The bytes that attention moves, counted by hand from what its kernels load and store.

Three counts, from far to near. `least`: what any algorithm moves that finds q, k, v (and out, dout) in HBM and leaves
its results there. HBM, `Step.read` and `Step.written`: every kernel reads each of its tensors from HBM once and writes
its results once, which is so where the L2 cache catches what is read again. L2, `Step.asked`: every tile that a kernel
loads or stores, the same one as often as it is asked for: what HBM would see without a cache.

Numbers have 16 bits, and there are as many keys as queries and as many key heads as query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashtrain.attention.hopper.configs import BACKWARD, forward_config
from flashtrain.attention.portable.configs import Configs
from flashtrain.attention.portable.launch import STATISTICS_ROWS
from measuring.attention import Shape

L2_BYTES = 50 * 2**20  # of an H100


@dataclass(frozen=True)
class Step:
    """One kernel, in bytes.

    Attributes:
        read, written: of HBM, when nothing is in the L2 cache before.
        asked: between L2 and the multiprocessors; None where it is up to PyTorch's library.
        copy: a plain copy, which the driver makes: a profiler that counts kernels does not see it.
    """

    name: str
    read: int
    written: int
    asked: int | None = None
    copy: bool = False


Passes = dict[str, list[Step]]


def totals(passes: Passes) -> dict[str, dict[str, float | None]]:
    """GB by pass and for both: read_gb and written_gb of kernels, copied_gb read and written by copies, asked_gb."""
    passes = passes | {"both": [step for steps in passes.values() for step in steps]}
    return {name: _total(steps) for name, steps in passes.items()}


def _total(steps: Sequence[Step]) -> dict[str, float | None]:
    kernels = [step for step in steps if not step.copy]
    asked = [step.asked for step in kernels if step.asked is not None]
    return {
        "read_gb": sum(step.read for step in kernels) / 1e9,
        "written_gb": sum(step.written for step in kernels) / 1e9,
        "copied_gb": sum(step.read + step.written for step in steps if step.copy) / 1e9,
        "asked_gb": sum(asked) / 1e9 if len(asked) == len(kernels) else None,
    }


def least(shape: Shape) -> dict[str, dict[str, float]]:
    """GB by pass. Forward: q, k, v in, out out. Backward: q, k, v, out, dout in, dq, dk, dv out."""
    tensor = _tensor(shape) / 1e9
    tensors = {"forward": (3, 1), "backward": (5, 3), "both": (8, 4)}
    return {name: {"read_gb": i * tensor, "written_gb": o * tensor} for name, (i, o) in tensors.items()}


def of(name: str, shape: Shape, configs: Configs) -> Passes | None:
    """By the name of an implementation in `measuring.attention`; None where its kernels are not counted here. configs:
    the tiles of the plain Triton kernels."""
    if name == "portable":
        return portable(shape, configs)
    return {"standard": standard, "hopper": hopper}[name](shape) if name in ("standard", "hopper") else None


def standard(shape: Shape, l2_bytes: int = L2_BYTES) -> Passes:
    """`measuring.attention.standard`, kernel by kernel: each reads and writes whole matrices of all pairs.

    Hiding copies the matrix and then overwrites it in place. The kernel that does reads the mask, a byte a pair, which
    all heads share: anew for every head, unless the mask and a head's matrix, read and written, fit into L2.
    """
    t, matrix, pairs = _tensor(shape), 2 * _heads(shape) * shape.seq_len**2, shape.seq_len**2
    mask = pairs if 5 * pairs <= l2_bytes else _heads(shape) * pairs
    make_mask = [Step("ones", 0, pairs), Step("triangle", pairs, pairs)]
    hide = [Step("copy", matrix, matrix, copy=True), Step("hide", matrix + mask, matrix)]
    scale = Step("scale", matrix, matrix)
    make_mask, hide = (make_mask, hide) if shape.causal else ([], [])
    return {
        "forward": [
            Step("scores = q k^T", 2 * t, matrix),
            scale,
            *make_mask,
            *hide,
            Step("softmax", matrix, matrix),
            Step("out = weights v", matrix + t, t),
        ],
        "backward": [
            Step("dweights = dout v^T", 2 * t, matrix),
            Step("dv = weights^T dout", matrix + t, t),
            Step("weights * dweights", 2 * matrix, matrix),
            Step("softmax", 2 * matrix, matrix),
            *hide,
            scale,
            Step("dq = dscores k", matrix + t, t),
            Step("dk = dscores^T q", matrix + t, t),
        ],
    }


def portable(shape: Shape, configs: Configs) -> Passes:
    """The plain Triton kernels: forward; delta, the rows' statistics (three small kernels), dk and dv, dq."""
    t, row, statistics = _tensor(shape), _heads(shape) * 4 * shape.seq_len, _statistics(shape)
    by_queries = [_keys(shape, config.block_m, config.block_n) for config in (configs.forward, configs.dq)]
    by_keys = _queries(shape, configs.dkdv.block_n, configs.dkdv.block_m)
    return {
        "forward": [Step("forward", 3 * t, t + row, asked=t + by_queries[0] + t + row)],
        "backward": [
            _once("delta", 2 * t, row),
            _once("statistics", 2 * row, statistics + 2 * row),
            Step("dk, dv", 4 * t + statistics, 2 * t, asked=2 * t + by_keys + 2 * t),
            Step("dq", 4 * t + statistics, t, asked=2 * t + statistics + by_queries[1] + t),
        ],
    }


def hopper(shape: Shape) -> Passes:
    """The Hopper kernels. dq is added up in float32, twice as many bytes as a tensor: set to zero, added to in L2 by
    every program that sees its queries, read and narrowed."""
    t, row, statistics = _tensor(shape), _heads(shape) * 4 * shape.seq_len, _statistics(shape)
    config = forward_config(shape.head_dim, shape.seq_len, not shape.causal, False, (), 0)
    keys = _keys(shape, config.block_m, config.block_n)
    backward = BACKWARD[shape.head_dim]
    visits = queries_loaded(shape.seq_len, backward.block_n, backward.block_m, shape.causal)
    added = _heads(shape) * visits * 4 * shape.head_dim
    by_keys = _queries(shape, backward.block_n, backward.block_m)
    return {
        "forward": [Step("forward", 3 * t, t + row, asked=t + keys + t + row)],
        "backward": [
            _once("prepare", 2 * t + row, statistics + 2 * t),
            Step("backward", 4 * t + statistics + 2 * t, 2 * t + 2 * t, asked=2 * t + by_keys + added + 2 * t),
            _once("finish", 2 * t, t),
        ],
    }


def keys_loaded(seq_len: int, block_m: int, block_n: int, causal: bool) -> int:
    """Keys that the tiles of queries of one head load together: whole tiles, up to the last query's own."""
    ends = [min(first + block_m, seq_len) for first in range(0, seq_len, block_m)]
    return sum(min(-(-end // block_n) * block_n, seq_len) if causal else seq_len for end in ends)


def queries_loaded(seq_len: int, block_n: int, block_m: int, causal: bool) -> int:
    """Queries that the tiles of keys of one head load together: whole tiles, from the first key's own."""
    return sum(seq_len - (first // block_m * block_m if causal else 0) for first in range(0, seq_len, block_n))


def _keys(shape: Shape, block_m: int, block_n: int) -> int:
    """Bytes of k and v that all tiles of queries load."""
    keys = keys_loaded(shape.seq_len, block_m, block_n, shape.causal)
    return _heads(shape) * keys * 2 * 2 * shape.head_dim


def _queries(shape: Shape, block_n: int, block_m: int) -> int:
    """Bytes of q, dout and the rows' two statistics that all tiles of keys load."""
    queries = queries_loaded(shape.seq_len, block_n, block_m, shape.causal)
    return _heads(shape) * queries * (2 * 2 * shape.head_dim + 8)


def _once(name: str, read: int, written: int) -> Step:
    """A kernel that goes through its tensors once."""
    return Step(name, read, written, asked=read + written)


def _heads(shape: Shape) -> int:
    return shape.batch * shape.num_heads


def _tensor(shape: Shape) -> int:
    return _heads(shape) * shape.seq_len * 2 * shape.head_dim


def _statistics(shape: Shape) -> int:
    """-lse and delta, float32, padded to whole tiles."""
    return _heads(shape) * -(-shape.seq_len // STATISTICS_ROWS) * STATISTICS_ROWS * 8

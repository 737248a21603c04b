"""Cross-entropy of the vocabulary head, chunk by chunk, so that the logits of a long sequence never stand in memory.

16,384 tokens x 50,257 logits are 1.6 GB in bf16, and autograd would keep several copies of them. Here each chunk's
logits become its gradient of the logits in place, already in the forward pass, and are used up at once.
"""

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE = -100  # the target where there is nothing to predict

# The head is padded to this multiple inside the loss: matrix units and vector loads want aligned rows of logits, and
# GPT-2's 50,257 is odd. A padded logit is -inf, so it has no probability and no gradient.
VOCAB_MULTIPLE = 64

logger = logging.getLogger(__name__)


def cross_entropy_sum(
    hidden: Tensor, head_weight: Tensor, targets: Tensor, *, chunk_tokens: int, kernel: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of hidden @ head_weight^T, holding the logits of `chunk_tokens` tokens at most.

    Divide by the number of targets of the whole optimiser step, not of one micro-batch. The products run in hidden's
    dtype, or autocast's; softmax statistics and the sum are float32 (float64 for float64), and so is the
    accumulation of the head's gradient. Gradients come back in the dtypes of `hidden` and `head_weight`.

    Args:
        hidden: [..., hidden_size].
        head_weight: [vocab, hidden_size]; may be the embedding too.
        targets: int64 [...], token ids or -100 (ignored: adds nothing, gradient exactly 0).
        chunk_tokens: tokens in a chunk. Logits take chunk_tokens * vocab numbers.
        kernel: what makes a chunk's logits their gradient: liger (Liger's kernel, on the GPU), chunked (PyTorch), auto
            (Liger's where it runs, and once said where it is missing).

    Returns:
        The sum, a scalar (0 where all targets are ignored), and the number of targets that count, an int64 scalar.

    Raises:
        ValueError: shapes or chunk_tokens do not fit, or (on the CPU) a target is outside the vocabulary. On a GPU
            such a target makes the loss NaN: looking at it would synchronise, and data are checked when prepared.
            Or Liger's kernel is asked for where it cannot run.
    """
    _check(hidden, head_weight, targets, chunk_tokens)
    if kernel == "liger" and (reason := why_not_liger(hidden.device)):
        raise ValueError(f"memory.loss=liger: {reason}; write memory.loss=chunked or auto")
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    loss: Tensor = _ChunkedCrossEntropy.apply(
        hidden.flatten(0, -2),
        head_weight,
        targets.flatten(),
        chunk_tokens,
        kernel != "chunked",
        torch.is_grad_enabled(),
    )
    return loss, (targets != IGNORE).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    """hidden [tokens, hidden_size], head_weight [vocab, hidden_size], targets [tokens] -> sum of the losses."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        chunk_tokens: int,
        may_use_liger: bool,
        with_grad: bool,
    ) -> Tensor:
        weight = _padded(head_weight.to(hidden.dtype))
        statistics = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_weight = (with_grad and needed for needed in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=statistics) if needs_weight else None
        valid = ((targets >= 0) & (targets < len(head_weight))) | (targets == IGNORE)
        # Kernels read and write at the target's place: never let them see an id that is not in the vocabulary.
        targets = targets.where(valid, IGNORE)
        losses = torch.zeros(len(hidden), dtype=statistics, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), chunk_tokens):
                chunk = slice(start, start + chunk_tokens)
                losses[chunk] = _chunk_losses(
                    hidden[chunk],
                    weight,
                    targets[chunk],
                    len(head_weight),
                    None if grad_hidden is None else grad_hidden[chunk],
                    grad_weight,
                    may_use_liger,
                )
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight[: len(head_weight)])
        ctx.weight_dtype = head_weight.dtype
        return losses.sum().where(valid.all(), torch.nan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # Not in place: a graph that is kept may be walked again.
        return (
            None if grad_hidden is None else grad_hidden * grad_loss,
            None if grad_weight is None else (grad_weight * grad_loss).to(ctx.weight_dtype),
            *(None,) * 4,
        )


def _chunk_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab: int,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    may_use_liger: bool,
) -> Tensor:
    """Losses [n] of one chunk; fills grad_hidden [n, hidden_size] and adds to grad_weight [padded vocab, hidden_size].

    A function of its own so that the logits are gone before the next chunk makes its own.
    """
    logits = hidden @ weight.t()
    logits[:, vocab:] = -torch.inf
    with_grad = grad_hidden is not None or grad_weight is not None
    kernel = _liger_kernel() if may_use_liger and _runs_on_liger(logits) else None
    if kernel is None:
        losses = _softmax_gradient_(logits, targets, with_grad)
    else:
        losses = _liger_softmax_gradient_(kernel, logits, targets, with_grad)
    # From here on `logits` holds their gradient.
    if grad_hidden is not None:
        torch.mm(logits, weight, out=grad_hidden)
    if grad_weight is None:
        pass
    elif logits.is_cuda and logits.dtype in (torch.bfloat16, torch.float16):
        # Added up in the product's own float32 accumulators, without a rounded copy of the gradient in between.
        torch.addmm(grad_weight, logits.t(), hidden, out_dtype=torch.float32, out=grad_weight)
    else:
        grad_weight += logits.t() @ hidden
    return losses


def _softmax_gradient_(logits: Tensor, targets: Tensor, with_grad: bool) -> Tensor:
    """Losses [n] of logits [n, vocab]; with_grad overwrites the logits with their gradient, softmax - one-hot."""
    ignored = targets == IGNORE
    picked = targets.masked_fill(ignored, 0)[:, None]
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    losses = -log_probs.gather(1, picked).squeeze(1).masked_fill(ignored, 0)
    if with_grad:
        gradient = log_probs.exp_()
        gradient.scatter_add_(1, picked, torch.full_like(picked, -1, dtype=gradient.dtype))
        logits.copy_(gradient.masked_fill_(ignored[:, None], 0))
    return losses


def _liger_softmax_gradient_(kernel: Any, logits: Tensor, targets: Tensor, with_grad: bool) -> Tensor:
    """The same in one pass of Liger's kernel, which is called directly: its Python wrapper synchronises.

    The kernel's parameters grow from version to version; `_liger_kernel` has made sure that all are known here.
    """
    losses = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    vocab = logits.shape[1]
    block = min(32768, 1 << (vocab - 1).bit_length())
    arguments = _LIGER_UNUSED | {
        "X_ptr": logits,
        "X_stride": logits.stride(0),
        "Y_ptr": targets,
        "Y_stride": targets.stride(0),
        "loss_ptr": losses,
        "loss_stride": 1,
        "n_cols": vocab,
        "n_non_ignore": 1,  # only a mean divides by it
        "ignore_index": IGNORE,
        "reduction": "sum",
        "BLOCK_SIZE": block,
        "HAS_GRADIENTS": with_grad,
    }
    known = {name: arguments[name] for name in kernel.arg_names}
    with torch.cuda.device_of(logits):
        kernel[(len(logits),)](**known, num_warps=32 if block >= 8192 else 8)
    return losses


# Parameters of Liger's kernel for what is not asked of it: class weights, z-loss, smoothing, soft caps, accuracy.
_LIGER_UNUSED: dict[str, Any] = {
    "weight_ptr": None,
    "HAS_WEIGHT": False,
    "weight_sum": 0.0,
    "sum_non_ignore_weight": 0.0,
    "z_loss_ptr": None,
    "RETURN_Z_LOSS": False,
    "lse_square_scale": 0.0,
    "label_smoothing": 0.0,
    "softcap": None,
    "HAS_SOFTCAPPING": False,
    "token_accuracy_ptr": None,
    "token_accuracy_stride": 0,
    "RETURN_TOKEN_ACCURACY": False,
    "predicted_tokens_ptr": None,
    "predicted_tokens_stride": 0,
    "RETURN_PREDICTED_TOKENS": False,
}
_LIGER_USED = {"X_ptr", "X_stride", "Y_ptr", "Y_stride", "loss_ptr", "loss_stride", "n_cols", "n_non_ignore"} | {
    "ignore_index", "reduction", "BLOCK_SIZE", "HAS_GRADIENTS"
}  # fmt: skip


@cache
def _liger_kernel() -> Any | None:
    """Liger's cross-entropy kernel, or None, said once, where it is missing or has parameters we do not know."""
    try:
        from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel as kernel
    except ImportError:
        logger.warning(
            "liger-kernel is not installed: the loss takes PyTorch's slower softmax (pip install liger-kernel)"
        )
        return None
    unknown = sorted(set(kernel.arg_names) - _LIGER_USED - set(_LIGER_UNUSED))
    if unknown:
        logger.warning(
            "this liger-kernel has parameters the loss does not know (%s): it takes PyTorch's slower softmax",
            ", ".join(unknown),
        )
        return None
    return kernel


def why_not_liger(device: torch.device) -> str | None:
    """Why Liger's kernel cannot run there, or None if it can."""
    if device.type != "cuda":
        return f"its kernel needs an NVIDIA GPU and the model is on {device}"
    if _liger_kernel() is None:
        return "liger-kernel is not installed, or of a version that is not known here (pip install liger-kernel)"
    return None


def _runs_on_liger(logits: Tensor) -> bool:
    return logits.is_cuda and logits.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _padded(weight: Tensor) -> Tensor:
    """Rows of zeros up to a multiple of VOCAB_MULTIPLE."""
    missing = -len(weight) % VOCAB_MULTIPLE
    return torch.nn.functional.pad(weight, (0, 0, 0, missing)) if missing else weight


def _check(hidden: Tensor, head_weight: Tensor, targets: Tensor, chunk_tokens: int) -> None:
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens}: a chunk has at least one token")
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != head_weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)}, head_weight {list(head_weight.shape)} and targets {list(targets.shape)}: "
            "expected [..., hidden_size], [vocab, hidden_size] and [...]"
        )
    if targets.device.type != "cpu":
        return
    wrong = ((targets < 0) | (targets >= len(head_weight))) & (targets != IGNORE)
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"target {targets[place].item()} at {place} is outside the vocabulary of {len(head_weight)} ids "
            f"(and is not {IGNORE}, ignored): prepare the data with the model's tokenizer"
        )

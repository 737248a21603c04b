"""No speed without a right result: each implementation's out, dq, dk and dv against float64, beside what plain PyTorch
in the same number format makes of the same inputs.

The rule is FlashAttention's: an error of at most twice that of plain PyTorch, here with the rounding of one result on
top, for the largest error and for its root mean square.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from measuring.attention import Case, Implementation, standard
from measuring.report import Problem

FACTOR = 2.0
_CHUNK_NUMBERS = 2**26  # of a float64 matrix of scores that stand in memory at once: half a GiB


class WrongResult(Problem):
    """An implementation's result is further from the truth than it may be."""


@dataclass(frozen=True)
class Errors:
    """Largest and root-mean-square error of one tensor, those of plain PyTorch, and the rounding that is allowed."""

    largest: float
    rms: float
    pytorch_largest: float
    pytorch_rms: float
    largest_rounding: float
    rms_rounding: float

    @property
    def within(self) -> bool:
        # False for NaN.
        return (
            self.largest <= FACTOR * self.pytorch_largest + self.largest_rounding
            and self.rms <= FACTOR * self.pytorch_rms + self.rms_rounding
        )

    def __str__(self) -> str:
        return (
            f"off by {self.largest:.2g} at most and {self.rms:.2g} rms, "
            f"PyTorch by {self.pytorch_largest:.2g} and {self.pytorch_rms:.2g}"
        )


class Truth:
    """The right results for one set of inputs, and the limits that follow from plain PyTorch's.

    Args:
        q, k, v, dout: [batch, num_heads, seq, head_dim] in the number format under test.
        hidden: bool [seq, seq] ([tail, seq] with a tail), true where a query must not see a key, on top of the causal
            mask.
        last_head: compare the last head of the last batch row only; the others do not touch it.
        tail: compare the last `tail` positions only, which at long sequences is all that can be afforded; with a causal
            mask their queries and keys depend on nothing that is left out.
        definition: what is right where it is not attention: a function of q, k and v, by plain PyTorch.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        *,
        causal: bool,
        hidden: Tensor | None = None,
        last_head: bool = False,
        tail: int | None = None,
        definition: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        seq_len = q.shape[2]
        self.heads = slice(-1, None) if last_head else slice(None)
        self.tail = slice(-min(tail or seq_len, seq_len), None)
        if not causal and tail is not None:
            raise ValueError(f"tail={tail}: without a causal mask every query has a part in every key's gradient")
        q, k, v, dout = (x[self.heads, self.heads] for x in (q, k, v, dout))
        q, dout = q[:, :, self.tail], dout[:, :, self.tail]
        plain = Implementation("plain", definition or functools.partial(standard, causal=causal, hidden=hidden))
        if definition is None:
            truth = exact(q, k, v, dout, causal, hidden)
        else:
            truth = Case(plain, *(x.double() for x in (q, k, v, dout))).results()
        self.exact = {name: x[:, :, self.tail] for name, x in truth.items()}
        self.plain = {name: x[:, :, self.tail] for name, x in Case(plain, q, k, v, dout).results().items()}
        self.eps = torch.finfo(q.dtype).eps

    def compare(self, results: dict[str, Tensor]) -> dict[str, Errors]:
        """Errors of out, dq, dk and dv, [batch, num_heads, seq, head_dim] each."""
        found = {name: x[self.heads, self.heads, self.tail] for name, x in results.items()}
        return {name: self._errors(found[name], self.plain[name], truth) for name, truth in self.exact.items()}

    def require(self, results: dict[str, Tensor]) -> dict[str, dict[str, float]]:
        """The errors for the record.

        Raises:
            WrongResult: naming the tensors that are off.
        """
        compared = self.compare(results)
        wrong = [f"{name} is {errors}" for name, errors in compared.items() if not errors.within]
        if wrong:
            raise WrongResult("; ".join(wrong))
        return {name: vars(errors) for name, errors in compared.items()}

    def _errors(self, found: Tensor, plain: Tensor, truth: Tensor) -> Errors:
        ours, theirs = (found.double() - truth).abs(), (plain.double() - truth).abs()
        return Errors(
            largest=ours.max().item(),
            rms=_rms(ours),
            pytorch_largest=theirs.max().item(),
            pytorch_rms=_rms(theirs),
            largest_rounding=self.eps / 2 * truth.abs().max().item(),
            rms_rounding=self.eps / 8 * _rms(truth),
        )


def check(case: Case, truth: Truth) -> dict[str, dict[str, float]]:
    """The errors of a case on inputs that `truth` was made for; raises WrongResult."""
    poison(case)
    return truth.require(case.results())


def poison(case: Case) -> None:
    """Fill memory that is about to be handed out again with NaN: what a kernel forgets to write is then seen, where the
    right answer of the implementation before may still lie."""
    held = [torch.full_like(case.dout, float("nan")) for _ in range(6)]
    del held


@torch.no_grad()
def exact(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, hidden: Tensor | None = None
) -> dict[str, Tensor]:
    """out, dq, dk and dv in float64, a few queries at a time, so that no matrix of all pairs is held.

    q, dout: [batch, num_heads, seq_q, head_dim]; k, v: [batch, num_heads, seq_k, head_dim], aligned at the end.
    """
    scale = q.shape[-1] ** -0.5
    k, v = k.double(), v.double()
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    batch, num_heads, seq_q, _ = q.shape
    seq_k = k.shape[2]
    step = max(1, _CHUNK_NUMBERS // (batch * num_heads * seq_k))
    outs, dqs = [], []
    for begin in range(0, seq_q, step):
        queries, grads = q[:, :, begin : begin + step].double(), dout[:, :, begin : begin + step].double()
        scores = queries @ k.mT * scale
        if causal:
            position = torch.arange(begin, begin + queries.shape[2], device=q.device) + seq_k - seq_q
            scores.masked_fill_(torch.arange(seq_k, device=q.device) > position[:, None], float("-inf"))
        if hidden is not None:
            scores.masked_fill_(hidden[begin : begin + step], float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        del scores
        out = weights @ v
        dscores = weights * (grads @ v.mT - (grads * out).sum(-1, keepdim=True)) * scale
        outs.append(out)
        dqs.append(dscores @ k)
        dk += dscores.mT @ queries
        dv += weights.mT @ grads
    return {"out": torch.cat(outs, dim=2), "dq": torch.cat(dqs, dim=2), "dk": dk, "dv": dv}


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()

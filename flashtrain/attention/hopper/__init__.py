"""Attention kernels for Hopper GPUs (compute capability 9.0) in Gluon: TMA, asynchronous tensor-core products and warp
specialisation, after FlashAttention-3 (https://arxiv.org/abs/2407.08608)."""

from flashtrain.attention.hopper.calls import backward, delta, forward, gradients

__all__ = ["backward", "delta", "forward", "gradients"]

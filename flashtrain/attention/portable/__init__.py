"""Flash attention in plain Triton: every CUDA GPU, and Triton's interpreter on the CPU."""

from flashtrain.attention.portable.backward import backward, delta, gradients
from flashtrain.attention.portable.forward import forward

__all__ = ["backward", "delta", "forward", "gradients"]

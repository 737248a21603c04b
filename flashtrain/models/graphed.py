"""The next token as one CUDA graph: the same kernels on the same memory, whatever the length.

A token behind a long context is little work in some four hundred kernels, which take the host longer to launch than a
GPU to run. A graph launches them all at once, with the same arguments: so the token, its position and what follows from
it lie on the device, and attention goes over the cache's whole memory, of which the plan hides what is not written yet.
Shapes that stay the same can be compiled too, which leaves fewer kernels.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from flashtrain.attention import Plan
from flashtrain.models.cache import Cache, FixedLayer
from flashtrain.models.decoding import PieceBounds, Pieces, decoding_attention
from flashtrain.models.dimensions import Dimensions
from flashtrain.models.gpt import GPT, Attention

FEWEST = 8  # tokens for which a recording pays
_WARM_UPS = 3  # Triton compiles its kernels in them, and cuBLAS takes its memory


def why_not(model: GPT, plans: Sequence[Any]) -> str | None:
    """Why a token of `model` cannot be read by steps of fixed shapes, or None if it can; plans: of its layers."""
    if not all(isinstance(p, Plan) and p.rows is None and p.q_lists is None and p.right == 0 for p in plans):
        return "a layer's attention is not causal, or causal within a window, alone"
    if any(part.attend is not decoding_attention for part in model.modules() if isinstance(part, Attention)):
        return "the model attends by another function than decoding_attention"
    if torch.is_autocast_enabled(model.head_weight.device.type):
        return "autocast keeps copies of the weights, which a graph would go on to read"
    return None


class OneToken:
    """Reads the token behind those in a cache. On a GPU the first call records a graph, which the others launch.

    Args:
        model: in evaluation mode; its weights stay where they are.
        cache: whole pieces in capacity, with at least one token in it.
        piece: keys a piece.
        plans: of the model's layers, for which `why_not` has nothing to say.
        compiled: let torch.compile fuse what lies between matrix products and attention; it does so at the first token.
    """

    def __init__(self, model: GPT, cache: Cache, piece: int, plans: Sequence[Plan], compiled: bool = False) -> None:
        device, sizes = model.head_weight.device, Dimensions.of(model.config)
        self.model, self.cache = model, cache
        self._token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._frequencies = model.frequencies(device)
        self._layers = [FixedLayer(layer, self._position) for layer in cache.layers]
        self._lefts = [plan.left for plan in plans]
        queries = sizes.num_heads // sizes.num_kv_heads
        self._bounds = {
            left: PieceBounds(left, cache.capacity, piece, queries, device) for left in dict.fromkeys(self._lefts)
        }
        self._compiled = torch.compile(self._logits, fullgraph=True) if compiled else None
        self._to_record = device.type == "cuda"
        self._repeat: Callable[[], Tensor] | None = None

    def __call__(self, token: int) -> Tensor:
        """The logits after one more token, float32 [vocab], in memory that the next call writes again.

        Raises:
            ValueError: no room in the cache, or the model does what no graph can hold, such as waiting for the device.
        """
        self.cache.make_room(1)
        self._token.fill_(token)
        self._position.fill_(self.cache.length)
        if self._to_record:
            self._to_record, self._repeat = False, self._recorded()
        logits = self._read() if self._repeat is None else self._repeat()
        self.cache.advance()
        return logits

    def _read(self) -> Tensor:
        """What is recorded: nothing in it waits for the device or depends on the length. Done twice it is as once."""
        pieces = {left: bounds.at(self._position) for left, bounds in self._bounds.items()}
        plans = [pieces[left] for left in self._lefts]
        if self._compiled is None:
            return self._logits(plans)
        with torch.compiler.set_stance("default"):  # whoever reads other lengths beside it may have said force_eager
            return self._compiled(plans)

    @torch.no_grad()
    def _logits(self, plans: list[Pieces]) -> Tensor:
        """Those after the token, float32 [vocab]."""
        hidden = self.model.read_at(self._token, self._position, self._layers, plans, self._frequencies)
        return self.model.logits(hidden[0, 0]).float()

    def _recorded(self) -> Callable[[], Tensor]:
        """The launch of a graph of `_read`."""
        device = self._token.device
        # Set here, the present stream is so again afterwards: torch.cuda.graph leaves its own where a recording fails.
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
            present, aside = torch.cuda.current_stream(), _stream_aside(device)
            aside.wait_stream(present)
            with torch.cuda.stream(aside):
                for _ in range(_WARM_UPS):
                    self._read()
            present.wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            try:
                # Other threads may use the GPU meanwhile.
                with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                    logits = self._read()
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise ValueError(
                    f"graphed=True: a token of this model cannot be recorded ({str(error).splitlines()[0]}); leave it "
                    "out (--eager)"
                ) from error

        def repeat() -> Tensor:
            graph.replay()
            return logits

        return repeat


@functools.cache
def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps memory for each stream that it ever worked on."""
    return torch.cuda.Stream(device)

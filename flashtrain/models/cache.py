"""Keys and values of the tokens read so far, so that generating a token costs one token and not the whole context."""

from torch import Tensor


class LayerCache:
    """One layer's keys and values, in memory that is taken once, with the dtype and device of the first ones.

    Args:
        capacity: tokens that there is room for.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        self._length = 0

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, with the new ones behind the earlier: views, [batch, num_kv_heads, length, head_dim].

        Args:
            k, v: [batch, num_kv_heads, new, head_dim].
        """
        if self._keys is None or self._values is None:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            self._keys, self._values = k.new_empty(shape), v.new_empty(shape)
        first, self._length = self._length, self._length + k.shape[2]
        self._keys[:, :, first : self._length] = k
        self._values[:, :, first : self._length] = v
        return self._keys[:, :, : self._length], self._values[:, :, : self._length]

    @property
    def num_bytes(self) -> int:
        """What it takes, for its whole capacity."""
        held = [tensor for tensor in (self._keys, self._values) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


class Cache:
    """The caches of all layers: 2 x num_kv_heads x head_dim numbers a token and layer.

    Attributes:
        length: tokens in it; `GPT.read` adds to it.
    """

    def __init__(self, num_layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]

    def make_room(self, new: int) -> None:
        """Make sure that `new` more tokens fit.

        Raises:
            ValueError: they do not.
        """
        if self.length + new > self.capacity:
            raise ValueError(
                f"a cache of {self.capacity} tokens holds {self.length}, and {new} more do not fit: make it with "
                f"capacity={self.length + new} or more"
            )

    @property
    def num_bytes(self) -> int:
        """What it takes, for its whole capacity."""
        return sum(layer.num_bytes for layer in self.layers)

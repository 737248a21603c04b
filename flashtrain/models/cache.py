"""Keys and values of the tokens read so far, so that generating a token costs one token and not the whole context."""

from torch import Tensor


class LayerCache:
    """One layer's keys and values, in memory that is taken once, with the dtype and device of the first ones.

    Args:
        capacity: tokens that there is room for.

    Attributes:
        length: tokens in it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, with the new ones behind the earlier: views, [batch, num_kv_heads, length, head_dim].

        Args:
            k, v: [batch, num_kv_heads, new, head_dim].
        """
        if self._keys is None or self._values is None:
            shape = (*k.shape[:2], self.capacity, k.shape[3])
            # Where all of it is attended to, what is hidden still counts, times 0: a NaN there would be one everywhere.
            self._keys, self._values = k.new_empty(shape), v.new_zeros(shape)
        first, self.length = self.length, self.length + k.shape[2]
        self._keys[:, :, first : self.length] = k
        self._values[:, :, first : self.length] = v
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """All keys and values, [batch, num_kv_heads, capacity, head_dim], those behind `length` unwritten."""
        assert self._keys is not None and self._values is not None, "taken with the first tokens"
        return self._keys, self._values

    @property
    def num_bytes(self) -> int:
        """What it takes, for its whole capacity."""
        held = [tensor for tensor in (self._keys, self._values) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


class FixedLayer:
    """A layer's cache where nothing depends on the length but numbers on the device, so that a CUDA graph can hold it.

    Args:
        layer: with tokens in it.
        position: int64 [1], where the next token goes.
    """

    def __init__(self, layer: LayerCache, position: Tensor) -> None:
        self.layer, self.position = layer, position

    def extended(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's whole memory, with the keys and values of one token at `position`.

        Args:
            k, v: [batch, num_kv_heads, 1, head_dim].
        """
        keys, values = self.layer.memory
        return keys.index_copy_(2, self.position, k), values.index_copy_(2, self.position, v)


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

    def advance(self) -> None:
        """Count a token that `FixedLayer` wrote."""
        self.length += 1
        for layer in self.layers:
            layer.length = self.length

    @property
    def num_bytes(self) -> int:
        """What it takes, for its whole capacity."""
        return sum(layer.num_bytes for layer in self.layers)

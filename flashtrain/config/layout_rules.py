"""What may be said of block layouts: the parameters that each takes, what they may be, and where a layout fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from flashtrain.config.schema import AttentionConfig, Config, LayoutConfig

# The parameters of each layout: those of the function of its name in flashtrain.attention.layouts, where `per_head`
# stands for a layout of each head's own and `path` for the file of a tensor.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "local_global": ("window", "global_blocks"),
    "window_sinks": ("window", "after", "sinks"),
    "dilated": ("window", "dilation", "global_blocks"),
    "butterfly": ("max_stride", "global_blocks"),
    "bigbird": ("window", "global_blocks", "random", "seed", "per_head"),
    "strided": ("stride",),
    "fixed": ("stride", "summary"),
    "random_blocks": ("density", "seed", "per_head"),
    "tiles_2d": ("reach",),
    "from_mask": ("path",),
}
_LEAST = {
    "window": 0, "after": 0, "sinks": 0, "global_blocks": 0, "random": 0, "seed": 0, "summary": 0, "reach": 0,
    "dilation": 1, "stride": 1, "max_stride": 1,
}  # fmt: skip
FIXED_STRIDE = 8  # what `fixed` takes where none is given


def broken_layout_rules(config: Config) -> Iterator[str]:
    """One line for each rule that the layouts break: key, value, and what to write instead."""
    attention = config.attention
    if attention.layout is None:
        return
    for key, layout in _named(attention):
        yield from _parameters(key, layout)
        yield from _values(key, layout)
        yield from _place(key, layout, config)
    yield from _layers(attention, config.model.num_layers)


def _named(attention: AttentionConfig) -> Iterator[tuple[str, LayoutConfig]]:
    """Each layout with its key."""
    for number, layout in enumerate(attention.layouts):
        yield f"attention.alternate_with[{number - 1}]" if number else "attention.layout", layout


def _parameters(key: str, layout: LayoutConfig) -> Iterator[str]:
    """Parameters that a layout has no use for, and those that it cannot do without."""
    takes = PARAMETERS[layout.name]
    for field in dataclasses.fields(layout):
        value = getattr(layout, field.name)
        if field.name in ("name", "block", *takes) or value is None:
            continue
        others = ", ".join(name for name, parameters in PARAMETERS.items() if field.name in parameters)
        yield (
            f"{key}.{field.name}={value}: {layout.name} has no such parameter, it takes {', '.join(takes) or 'none'}; "
            f"write null, or take a layout with it ({others})"
        )
    if layout.name == "random_blocks" and layout.density is None:
        yield f"{key}.density=null: random_blocks needs the share of blocks to draw; give {key}.density=0.1"
    if layout.name == "from_mask" and layout.path is None:
        yield f"{key}.path=null: from_mask reads a .npy file; give {key}.path=file"


def _values(key: str, layout: LayoutConfig) -> Iterator[str]:
    for name, least in _LEAST.items():
        value = getattr(layout, name)
        if value is not None and value < least:
            yield f"{key}.{name}={value}: must be at least {least}"
    if layout.density is not None and not 0 < layout.density <= 1:
        yield f"{key}.density={layout.density}: must be above 0 and at most 1, such as 0.1"
    longest = layout.max_stride
    if longest is not None and longest >= 1 and longest & (longest - 1):
        near = 1 << (longest.bit_length() - 1)
        yield f"{key}.max_stride={longest}: must be a power of two, such as {near} or {2 * near}"
    stride = FIXED_STRIDE if layout.stride is None else layout.stride
    if layout.name == "fixed" and layout.summary is not None and layout.summary > stride >= 1:
        yield f"{key}.summary={layout.summary}: must be at most {key}.stride={stride}"


def _place(key: str, layout: LayoutConfig, config: Config) -> Iterator[str]:
    """Layouts that this task or its lengths leave no room for."""
    block = 64 if layout.block == 64 else 128
    if layout.name != "dense" and 0 < config.seq_len <= block:
        yield (
            f"{key}.block={layout.block}: seq_len={config.seq_len} is no longer than one block, so nothing could be "
            "left out; write a longer seq_len, a smaller block, or attention=flash"
        )
    if layout.name == "tiles_2d" and (what := _no_images(config)):
        yield f"{key}.name=tiles_2d: is for images; with {what} take local_global"
    if layout.name == "from_mask" and config.curriculum is not None:
        yield f"{key}.name=from_mask: a tensor is for one seq_len, and a curriculum has several; take another layout"


def _no_images(config: Config) -> str | None:
    """The key that makes this a run on text, or None where its tokens are pixels."""
    if config.task == "language":
        return "task=language"
    if config.sequences is not None and config.sequences.source != "grey_images":
        return f"sequences.source={config.sequences.source}"
    return None


def _layers(attention: AttentionConfig, num_layers: int) -> Iterator[str]:
    every, count = attention.dense_every, len(attention.layouts)
    if every is not None and every < 2:
        yield f"attention.dense_every={every}: must be at least 2, or null; for dense layers alone take attention=flash"
    if every is not None and every > num_layers:
        yield (
            f"attention.dense_every={every}: model.num_layers={num_layers} has no such layer; "
            f"write at most {num_layers}, or null"
        )
    if count > num_layers:
        yield (
            f"attention.alternate_with has {count - 1} layouts: with attention.layout that is more than "
            f"model.num_layers={num_layers}; leave some out"
        )

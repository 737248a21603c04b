"""Models whose layers have block layouts of their own: equal to masks written out, and one compilation."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from flashtrain.attention import Causal, Documents, attention, layouts, lower
from flashtrain.config.schema import ClassifierConfig
from flashtrain.models.classifier import Classifier
from flashtrain.models.loss import cross_entropy_sum
from flashtrain.models.positions import to_tokens

SEQ, BLOCK = 150, 64  # three blocks, the last one cut off
# Blocks of queries x blocks of keys. In the second layer the last blocks see only what lies before them.
SEEN = torch.tensor([[[1, 0, 1], [1, 1, 0], [1, 0, 1]], [[1, 1, 1], [0, 1, 0], [1, 1, 0]]], dtype=torch.bool)


def written_out(seen, *masks):
    """bool [SEQ, SEQ]: the blocks, element by element, and other masks."""
    elements = seen.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:SEQ, :SEQ]
    for mask in masks:
        elements = elements & mask
    return elements


def masked(q, k, v, visible):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)


def tokens(rows=2):
    return torch.randint(257, (rows, SEQ), generator=torch.Generator().manual_seed(7))


def outputs(model, inputs, plans):
    """The hidden states and every gradient."""
    model.zero_grad()
    hidden = model(inputs, plans)
    hidden = hidden[0] if isinstance(hidden, tuple) else hidden
    hidden.square().sum().backward()
    return [
        hidden.detach(),
        *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None),
    ]


@pytest.mark.parametrize("modern", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "standard"])
def test_a_gpt_with_layouts_by_layer_equals_the_same_with_masks_written_out(make_gpt, modern, recompute, backend):
    made = {"modern": modern, "seq_len": SEQ, "num_layers": 3}
    sparse = make_gpt(**made, attend=partial(attention, backend=backend)).double()
    dense = make_gpt(**made, attend=masked).double()
    sparse.checkpoint_blocks = recompute
    plans = [
        lower(Causal() & layouts.from_mask(SEEN[0], SEQ, BLOCK), 2, SEQ, SEQ, "cpu"),
        lower(Causal() & layouts.from_mask(SEEN[1], SEQ, BLOCK), 2, SEQ, SEQ, "cpu"),
        lower(Causal(), 2, SEQ, SEQ, "cpu"),
    ]
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    masks = [written_out(SEEN[0], causal), written_out(SEEN[1], causal), causal]
    for found, wanted in zip(outputs(sparse, tokens(), plans), outputs(dense, tokens(), masks), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    swapped = outputs(sparse, tokens(), [plans[1], plans[0], plans[2]])
    assert not torch.allclose(swapped[0], outputs(sparse, tokens(), plans)[0])  # each layer has its own


@pytest.mark.parametrize("order", ["rows", "tiles"])
def test_a_classifier_in_either_order_sees_the_tiles_of_its_pixels(make_config, order):
    """A tile is a block in one order and lies in two blocks in the other."""
    classifier = ClassifierConfig(
        num_classes=2, pooling="mean", positions="rope2d", token_order=order, tile=(8, 8), dense_classes=3,
        dense_weight=1.0, proximity=(),
    )  # fmt: skip
    models = []
    for attend in (partial(attention, backend="sdpa"), masked):
        torch.manual_seed(0)
        models.append(Classifier(make_config(), classifier, attend, seq_len=256).double())
    pictures = torch.randint(256, (2, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixel = to_tokens(torch.arange(256).view(1, 16, 16), models[0].tile)[0]
    tile = pixel // 128 * 2 + pixel % 16 // 8
    blocks = (tile[:, None] == tile).view(4, BLOCK, 4, BLOCK).any(3).any(1)
    assert blocks.sum() == {"rows": 8, "tiles": 4}[order]
    visible = blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    token_order = {"rows": "row_major", "tiles": "tile"}[order]
    plan = lower(layouts.tiles_2d(16, 16, BLOCK, tile=(8, 8), reach=0, order=token_order), 2, 256, 256, "cpu")
    found, wanted = outputs(models[0], pictures, plan), outputs(models[1], pictures, visible)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("backend", ["sdpa", "standard"])
def test_a_model_with_layouts_compiles_once_for_all_steps(make_gpt, backend):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = make_gpt(seq_len=SEQ, num_layers=4, attend=partial(attention, backend=backend))
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=counter)
    layout = layouts.local_global(SEQ, BLOCK, window=0)
    for documents in (((150,),), ((70, 80),), ((1, 100, 49),)):
        mask = Causal() & Documents(documents)
        sparse, dense = (lower(m, 2, SEQ, SEQ, "cpu") for m in (mask & layout, mask))
        plans = (sparse, sparse, sparse, dense)
        hidden = compiled(tokens(), plans)
        loss, _ = cross_entropy_sum(hidden, model.head_weight, tokens(), chunk_tokens=100)
        loss.backward()
        torch.testing.assert_close(hidden, model(tokens(), plans))
        assert sparse.visible_pairs < dense.visible_pairs
    assert counter.frame_count == 1

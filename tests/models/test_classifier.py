import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from flashtrain.attention import Documents, attention, lower
from flashtrain.config.schema import ClassifierConfig
from flashtrain.models.classifier import Classifier
from flashtrain.models.positions import grid_frequencies, grid_rotation, gridwise, sinusoids, to_tokens

BASE = ClassifierConfig(
    num_classes=2, pooling="max", positions="rope2d", token_order="rows", tile=(2, 4),
    dense_classes=0, dense_weight=1.0, proximity=(),
)  # fmt: skip
POSITIONS = ["learned", "sinusoidal", "rope", "rope2d", "none"]


def full(q, k, v, plan):
    """Attention both ways, or a boolean mask given as the plan."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=plan)


@pytest.fixture
def make(make_config):
    """A small classifier with fixed weights; keywords change single keys of either config."""

    def build(vocab_size=None, seq_len=64, attend=full, seed=0, **changes):
        torch.manual_seed(seed)
        classifier = replace(BASE, **{key: changes.pop(key) for key in list(changes) if key in vars(BASE)})
        return Classifier(make_config(**changes), classifier, attend, vocab_size, seq_len=seq_len)

    return build


def images(batch=2, side=8):
    return torch.randint(256, (batch, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("size", [{"hidden_size": 32}, {"hidden_size": 128, "num_heads": 2, "init_std": 0.09}])
def test_first_loss_is_ln_classes(make, pooling, classes, size):
    model = make(pooling=pooling, num_classes=classes, dense_classes=3, seq_len=1024, **size)
    with torch.no_grad():
        logits, dense = model(images(10, 32))
    loss = F.cross_entropy(logits, torch.arange(10) % classes)
    assert abs(loss.item() / math.log(classes) - 1) < 0.02
    assert abs(F.cross_entropy(dense.flatten(0, 2), torch.arange(10 * 1024) % 3).item() / math.log(3) - 1) < 0.02
    down = model.blocks[1].mlp.down.weight.std().item()
    assert down == pytest.approx(size.get("init_std", 0.02) / math.sqrt(2 * 2), rel=0.05)  # as in GPT-2, two layers


@pytest.mark.parametrize("positions", POSITIONS)
def test_logits_have_the_promised_shapes_at_every_side_that_positions_allow(make, positions):
    model = make(positions=positions, dense_classes=3)
    for side in (8,) if positions == "learned" else (8, 4, 12):
        logits, dense = model(images(3, side))
        assert logits.shape == (3, 2)
        assert dense.shape == (3, side, side, 3)
    assert make(positions=positions)(images())[1] is None


def test_bytes_and_fractions_are_the_same_image(make):
    model = make()
    torch.testing.assert_close(model(images())[0], model(images().float() / 255)[0])
    assert not torch.allclose(model(images())[0], model(images() // 2)[0], rtol=1e-3)


def test_the_first_norm_keeps_grey_levels_apart(make):
    """Levels on one line through 0 would come out of a norm as two directions, black and white."""
    model = make(positions="none", bias=False)
    levels = model.blocks[0].attention_norm(model.embedding(torch.tensor([[0.0, 0.25, 0.5, 1.0]])))[0]
    assert torch.pdist(levels).min() > 0.3


@pytest.mark.parametrize("positions", POSITIONS)
def test_token_order_changes_nothing_but_the_order(make, positions):
    entering, results = [], []
    for order in ("rows", "tiles"):
        model = make(positions=positions, token_order=order, dense_classes=3).double()
        model.blocks[0].register_forward_pre_hook(lambda module, args: entering.append(args[0]))
        results.append(model(images()))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    pixel = [8 * r + c for r0, c0 in product((0, 2, 4, 6), (0, 4)) for r in (r0, r0 + 1) for c in range(c0, c0 + 4)]
    assert torch.equal(entering[1], entering[0][:, pixel])


@pytest.mark.parametrize("order", ["rows", "tiles"])
def test_dense_logits_lie_on_their_pixels(make, order):
    model = make(positions="none", token_order=order, dense_classes=3, attend=lambda q, k, v, plan: 0 * v)
    picture, alone = images(1), images(1)
    alone[0, 5, 2] = 255 - alone[0, 5, 2]
    changed = (model(picture)[1] != model(alone)[1]).any(-1)[0]
    assert changed.nonzero().tolist() == [[5, 2]]


@pytest.mark.parametrize("order", ["rows", "tiles"])
def test_a_shifted_drawing_gets_shifted_dense_logits(make, order):
    """On a grid only relative positions matter. The empty paper around the drawing is masked out: it does not move."""
    model = make(dense_classes=3, proximity=(2.0, 1.0), token_order=order, tile=(3, 3), seq_len=144)
    drawing = images(1, 4)[0].clamp(min=1)
    found = []
    for top, left in ((1, 2), (7, 6), (1, 6)):
        paper = torch.zeros(1, 12, 12, dtype=torch.uint8)
        paper[0, top : top + 4, left : left + 4] = drawing
        dense = model(paper, to_tokens(paper > 0, model.tile)[:, None, None])[1]
        found.append(dense[0, top : top + 4, left : left + 4])
    for shifted in found[1:]:
        torch.testing.assert_close(shifted, found[0], rtol=1e-4, atol=1e-6)
    assert found[0].std() > 1e-3


def test_grid_rotation_turns_half_of_the_pairs_with_each_axis():
    frequencies = grid_frequencies(64, torch.device("cpu"))
    assert frequencies[[0, -1]].tolist() == pytest.approx([1.5, 2 * math.pi / 400])
    assert frequencies.log().diff().std() < 1e-9
    cos, sin = grid_rotation(torch.tensor([200, 0]), torch.tensor([0, 3]), frequencies)
    torch.testing.assert_close(cos[0, 0, 0], torch.cat([(200 * frequencies).cos(), torch.ones(16)]).float())
    torch.testing.assert_close(sin[0, 0, 1], torch.cat([torch.zeros(16), (3 * frequencies).sin()]).float())


def test_proximity_makes_the_first_attention_fall_with_distance_alike_along_both_axes(make):
    weights = []

    def attend(q, k, v, plan):
        weights.append((q @ k.mT / 8).softmax(-1)[0].unflatten(-1, (32, 32)))
        return v

    model = make(hidden_size=128, num_heads=2, proximity=(2.0, 1.0), attend=attend, seq_len=1024)
    model.blocks[0].attention.qkv.weight.data.zero_()
    model(torch.zeros(1, 32, 32))
    strong, weak = (head[16 * 32 + 16] for head in weights[0])
    for head in (strong, weak):
        down = head[16:, 16]
        for line in (head[16, 16:], head.flip(0)[15:31, 16], head.flip(1)[16, 15:31]):
            torch.testing.assert_close(line, down)
        assert (down[:7].diff() < 0).all()
        assert down[7:].max() < down[0] / 3
    assert strong.flatten().topk(9).values.sum() > 0.7  # the pixel and its neighbours
    frequencies = grid_frequencies(64, torch.device("cpu"))
    expected = [sum(math.cos(f * d) for f in frequencies) - 16 for d in range(16)]
    torch.testing.assert_close((weak[16, 16:] / weak[16, 16]).log(), torch.tensor(expected) / 8, atol=1e-4, rtol=1e-4)
    named = make(proximity=(2.0,)).blocks[1].attention.qkv.bias.view(3, 4, 8)
    assert named[:2, 0].tolist() == [[2.0] * 4 + [0.0] * 4] * 2
    assert named.sum() == 2 * 4 * 2.0  # nothing on other heads, nor on values


def test_sinusoids_follow_the_formula():
    table = sinusoids(torch.tensor([0, 1, 65_535]), 6)
    for row, position in enumerate((0, 1, 65_535)):
        angles = [position / 10_000 ** (2 * i / 6) for i in range(3)]
        assert table[row].tolist() == pytest.approx([f(a) for a in angles for f in (math.sin, math.cos)], abs=1e-6)
    assert table.dtype == torch.float32


def test_a_learned_table_grows_gridwise(make):
    small = torch.arange(4.0)[:, None]
    assert gridwise(small, 2, 4).view(4, 4).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]
    with pytest.raises(ValueError, match=r"side_to=5.*multiple of side_from=2"):
        gridwise(small, 2, 5)
    with pytest.raises(ValueError, match=r"side_from=3 has 9 positions, the table 4"):
        gridwise(small, 3, 6)
    before, after = make(positions="learned", seq_len=16), make(positions="learned", seq_len=64)
    state = before.state_dict()
    state["position_embedding.weight"] = gridwise(state["position_embedding.weight"], 4, 8)
    after.load_state_dict(state)
    large = images(2, 4).repeat_interleave(2, 1).repeat_interleave(2, 2)
    torch.testing.assert_close(after(large)[0], before(images(2, 4))[0])  # every token four times


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rope"])
def test_padding_never_changes_the_logits(make, pooling, positions):
    model = make(20, seq_len=24, pooling=pooling, positions=positions, attend=partial(attention, backend="sdpa"))
    model.final_norm.bias.data.fill_(-9)  # nothing is above 0: padding counted as zeros would be the largest
    ids = torch.randint(20, (2, 24), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([17, 24])
    plan = lower(Documents(((17, 7), (24, 0))), 2, 24, 24, "cpu")
    logits = model(ids, plan, lengths)[0]
    torch.testing.assert_close(logits, torch.cat([model(ids[:1, :17])[0], model(ids[1:])[0]]))
    assert not torch.equal(model(ids, plan)[0][0], logits[0])
    ids[0, 17:] = 3
    assert torch.equal(model(ids, plan, lengths)[0], logits)


@pytest.mark.parametrize("dim", [0.7, 1.0])
def test_pooling_takes_the_tokens_it_names(make, dim):
    picture = torch.zeros(1, 8, 8)
    picture[0, 1, 3] = picture[0, 6, 2] = dim
    picture[0, 4] = 0.9 * dim
    hidden = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(2))
    expected = {"mean": hidden.mean(1), "max": hidden.amax(1), "marker": (hidden[:, 11] + hidden[:, 50]) / 2}
    for pooling, pooled in expected.items():
        model = make(pooling=pooling)
        model.final_norm.register_forward_hook(lambda *_: hidden)
        torch.testing.assert_close(model(picture)[0], model.head(pooled), msg=pooling)
    assert torch.isfinite(make(pooling="marker")(torch.zeros(1, 8, 8))[0]).all()


@pytest.mark.parametrize("changes", [{}, {"vocab_size": 20, "positions": "rope", "dense_classes": 0}])
def test_checkpointed_blocks_give_the_same_gradients_and_every_parameter_has_one(make, changes):
    results = []
    for recompute in (False, True):
        model = make(**{"dropout": 0.2, "dense_classes": 3} | changes)
        model.checkpoint_blocks, calls = recompute, []
        model.blocks[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(3)
        logits, dense = model(images().flatten(1).long() % 20 if changes else images())
        loss = F.cross_entropy(logits, torch.tensor([0, 1])) + (0 if dense is None else dense.square().mean())
        loss.backward()
        assert len(calls) == 1 + recompute
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]), name
        assert gradient.any(), name


@pytest.mark.parametrize("changes", [{"proximity": (1.0,), "pooling": "marker"}, {"positions": "sinusoidal"}])
def test_model_compiles_as_one_graph(make, changes):
    model = make(dense_classes=3, token_order="tiles", **changes)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for expected, found in zip(model(images()), compiled(images()), strict=True):
        torch.testing.assert_close(found, expected)


def test_layers_may_have_plans_of_their_own(make):
    seen = []
    model = make(attend=lambda q, k, v, plan: seen.append(plan) or v)
    model(images(), ["first", "second"])
    assert seen == ["first", "second"]
    with pytest.raises(ValueError, match=r"3 plans for model\.num_layers=2"):
        model(images(), [None] * 3)


@pytest.mark.parametrize(("positions", "dots", "init_std"), [("rope2d", 2, 0.1), ("learned", 1, 0.02)])
def test_it_learns_where_dots_are(make, positions, dots, init_std):
    """Two dots at most two rows apart, which relative positions tell; one dot in the right half, which they do not."""
    generator = torch.Generator().manual_seed(5)

    def batch(count):
        places = torch.rand(count, 64, generator=generator).topk(dots).indices
        pictures = torch.zeros(count, 64, dtype=torch.uint8).scatter_(1, places, 255).view(-1, 8, 8)
        label = (places[:, 0] // 8 - places[:, 1] // 8).abs() <= 2 if dots == 2 else places[:, 0] % 8 >= 4
        return pictures, label.long()

    model = make(positions=positions, init_std=init_std, num_layers=1, num_heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=80)
    for _ in range(80):
        pictures, label = batch(64)
        optimizer.zero_grad()
        F.cross_entropy(model(pictures)[0], label).backward()
        optimizer.step()
        schedule.step()
    pictures, label = batch(500)
    assert (model(pictures)[0].argmax(-1) == label).float().mean() > 0.95


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 9, "positions": "none", "pooling": "marker"}, r"pooling=marker: .*take mean or max"),
        ({"vocab_size": 9}, r"positions=rope2d: .*take rope"),
        ({"vocab_size": 9, "positions": "rope", "token_order": "tiles"}, r"token_order=tiles: .*take rows"),
        ({"vocab_size": 9, "positions": "rope", "dense_classes": 3}, r"dense_classes=3: .*token ids 0"),
        ({"positions": "rope", "proximity": (1.0,)}, r"proximity=\[1\.0\]: needs .*rope2d, not rope"),
        ({"proximity": (1.0,) * 5}, r"more entries than model\.num_heads=4"),
        ({"proximity": (1.0,), "bias": False}, r"set model\.bias=true"),
        ({"proximity": (1.0,), "qk_norm": True}, r"set model\.qk_norm=false"),
        ({"proximity": (1.0,), "num_kv_heads": 2}, r"set model\.num_kv_heads=null"),
        ({"head_dim": 6}, r"model\.head_dim=6: must be a multiple of 4 .*rope2d"),
        ({"head_dim": 7, "positions": "rope"}, r"model\.head_dim=7: must be a multiple of 2"),
        ({"token_order": "tiles", "tile": (3, 4)}, r"tile=\[3, 4\]: .*side of 8 pixels"),
        ({"seq_len": 60}, r"seq_len=60: .*take 49 or 64"),
    ],
)
def test_combinations_that_cannot_work_name_key_value_and_fix(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_inputs_that_do_not_fit_are_named(make):
    with pytest.raises(ValueError, match=r"image of side 4 .*positions of side 8.*seq_len=16.*gridwise.*rope2d"):
        make(positions="learned")(images(1, 4))
    with pytest.raises(ValueError, match=r"tile=\[2, 4\]: .*side of 6 pixels"):
        make(token_order="tiles")(images(1, 6))
    with pytest.raises(ValueError, match=r"inputs torch\.int64 \[2, 8, 8\].*takes images"):
        make()(images().long())
    with pytest.raises(ValueError, match="images have no padding"):
        make()(images(), lengths=torch.tensor([3, 4]))
    words = make(9, positions="learned")
    with pytest.raises(ValueError, match=r"65 tokens .*table of 64.*seq_len=65"):
        words(torch.zeros(1, 65, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"inputs torch\.uint8 .*takes token ids"):
        words(images())

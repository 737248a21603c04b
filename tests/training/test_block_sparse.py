"""Runs with block-sparse layers: each has its own layout, what it costs is counted, and a stopped run goes on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flashtrain.attention import Causal, Full, SlidingWindow
from flashtrain.config.build import ConfigError
from flashtrain.data.batch import Batch
from flashtrain.models.flops import model_flops
from flashtrain.training.attention_report import AttentionReport
from flashtrain.training.language import LanguageTask
from flashtrain.training.layouts import corner, layouts_of_layers
from flashtrain.training.run import run
from flashtrain.training.visibility import LayerMasks, visible_pairs

from .conftest import figures, go_on, metrics, summary

CPU, VOCAB = torch.device("cpu"), 257
# Four blocks of 64; under a causal mask a block sees itself and, but for the first, the first one.
SPARSE = (
    "attention=block_sparse", "attention.layout.block=64", "attention.layout.window=0", "seq_len=256",
    "trainer.batch_tokens=512", "trainer.micro_batch_tokens=256", "trainer.max_steps=4",
)  # fmt: skip
BLOCK_PAIRS, DIAGONAL_PAIRS = 64 * 64, 64 * 65 / 2
PAIRS = 4 * DIAGONAL_PAIRS + 3 * BLOCK_PAIRS
CAUSAL_PAIRS = 256 * 257 / 2


def log_of(tmp_path, run_id: str = "m") -> str:
    return (tmp_path / "runs" / run_id / "train.log").read_text()


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ((), ["local_global"] * 6),
        (("dense_every=3",), ["local_global", "local_global", "dense"] * 2),
        (("alternate_with=[{name: butterfly}]",), ["local_global", "butterfly"] * 3),
        (("alternate_with=[{name: butterfly}]", "dense_every=3"),
         ["local_global", "butterfly", "dense", "butterfly", "local_global", "dense"]),
        (("alternate_with=[{name: dense}, {name: strided, stride: 2, block: 128}]",),
         ["local_global", "dense", "strided"] * 2),
    ],
)  # fmt: skip
def test_layers_take_the_layouts_in_turn_and_every_nth_is_dense(make_config, changes, names):
    config = make_config(*SPARSE, "model.num_layers=6", *(f"attention.{change}" for change in changes))
    layers = layouts_of_layers(config)
    assert [layer.name for layer in layers] == names
    assert {layer.block for layer in layers if layer.name not in ("dense", "strided")} == {64}


def test_layers_of_one_layout_share_one_plan_that_is_lowered_once(make_config):
    config = make_config(*SPARSE, "model.num_layers=6", "attention.dense_every=3")
    masks = LayerMasks(config, Causal(), positional=True)
    plans = masks.lower(2, 256, CPU)
    assert len({id(plan) for plan in plans[:2] + plans[3:5]}) == 1
    assert plans[2] is plans[5] and plans[2].is_causal
    assert masks.lower(2, 256, CPU)[0] is plans[0]  # not built again the next step
    everywhere = LayerMasks(make_config(*SPARSE), Causal(), positional=True).lower(2, 256, CPU)
    assert not isinstance(everywhere, tuple)


@pytest.mark.parametrize("layout", ["random_blocks", "bigbird", "butterfly", "fixed"])
def test_a_shorter_sequence_sees_the_beginning_of_the_layout_it_was_trained_with(make_config, layout):
    density = ["attention.layout.density=0.4"] if layout == "random_blocks" else []
    drawn = ["attention.layout.per_head=true"] if layout in ("random_blocks", "bigbird") else []
    sizes = [change for change in SPARSE if "window" not in change]
    config = make_config(*sizes, "seq_len=600", f"attention.layout.name={layout}", *density, *drawn)
    masks = LayerMasks(config, Causal(), positional=True)
    whole = masks.lower(1, 600, CPU).dense()
    for length in (1, 64, 130, 599):
        assert torch.equal(masks.lower(1, length, CPU).dense(), whole[..., :length, :length])


@pytest.mark.parametrize("layout", ["random_blocks", "butterfly"])
def test_new_tokens_see_of_a_cache_what_their_rows_of_the_layout_see(make_config, layout):
    density = ["attention.layout.density=0.4", "attention.layout.per_head=true"] if layout == "random_blocks" else []
    sizes = [change for change in SPARSE if "window" not in change]
    config = make_config(*sizes, "seq_len=600", f"attention.layout.name={layout}", *density, "attention.dense_every=2")
    masks = LayerMasks(config, Causal(), positional=True)
    for number, whole in enumerate(masks.lower(1, 600, CPU)):
        for queries, keys in ((1, 1), (1, 64), (1, 65), (1, 600), (20, 148), (64, 128), (192, 320), (88, 600), (5, 70)):
            plan = masks.lower_last(queries, keys, CPU)[number]
            assert torch.equal(plan.dense(), whole.dense()[..., keys - queries : keys, :keys])
    with pytest.raises(ValueError, match="70 queries from number 30 on lie across blocks of 64"):
        masks.lower_last(70, 100, CPU)


def test_images_of_another_size_have_a_layout_of_their_own(image_config):
    tiles = ("attention.layout.name=tiles_2d", "attention.layout.reach=0", "attention.layout.block=64")
    masks = LayerMasks(image_config("attention=block_sparse", *tiles), Full(), positional=False)
    small = masks.layout(masks.layers[0], 16 * 16)
    assert len(small.blocks) != len(corner(masks.layout(masks.layers[0], 32 * 32), 16 * 16).blocks)


def test_documents_and_windows_limit_sparse_layers_too(make_config):
    config = make_config(*SPARSE, "attention.window=100", "attention.dense_every=2")
    task = LanguageTask(config, VOCAB)
    tokens = torch.zeros(1, 256, dtype=torch.int64)
    sparse, dense = (p.dense()[0, 0] for p in task.plan(Batch(tokens, tokens, None, ((200, 56),), 256)))
    i, j = torch.arange(256)[:, None], torch.arange(256)
    expected = (j <= i) & (j > i - 100) & ((i < 200) == (j < 200))
    assert torch.equal(dense, expected)
    assert torch.equal(sparse, expected & ((i // 64 == j // 64) | (j < 64)))


def test_visible_pairs_are_the_mean_over_layers(make_config):
    config = make_config(*SPARSE, "model.num_layers=3", "attention.dense_every=3")
    plans = LayerMasks(config, Causal(), positional=True).lower(1, 256, CPU)
    assert float(visible_pairs(plans)) == pytest.approx((2 * PAIRS + CAUSAL_PAIRS) / 3)
    assert visible_pairs(plans[2]) == CAUSAL_PAIRS
    assert isinstance(visible_pairs(plans), torch.Tensor)  # a step must not wait for the device to know them


@pytest.mark.parametrize("borders", ["false", "true"])
def test_the_meter_counts_what_each_layer_computes(make_config, tmp_path, monkeypatch, borders):
    counted, honest = [], LanguageTask.plan

    def plan(self, batch):
        plans = honest(self, batch)
        if torch.is_grad_enabled():
            counted.append(len(batch.tokens) * sum(p.dense().sum().item() / len(p.dense()) for p in plans) / len(plans))
        return plans

    monkeypatch.setattr(LanguageTask, "plan", plan)
    changes = ("run_id=m", "attention.dense_every=2", "trainer.peak_tflops=0.001", "trainer.log_every_n_steps=2")
    config = make_config(*SPARSE, *changes, f"data.document_borders={borders}")
    assert run(config, []) == 0
    if borders == "false":
        assert counted == [(PAIRS + CAUSAL_PAIRS) / 2] * 8
    for row, steps in zip(metrics(tmp_path / "runs" / "m"), (counted[:4], counted[4:]), strict=True):
        per_token = model_flops(config.model, VOCAB, 256, sum(steps) / 4).training / 256
        assert float(row["mfu"]) == pytest.approx(float(row["tokens_per_second"]) * per_token / 1e9)


def test_a_run_says_which_layers_are_sparse_and_how_dense(make_config, tmp_path):
    assert run(make_config(*SPARSE, "run_id=m", "model.num_layers=5", "attention.dense_every=4"), []) == 0
    share = PAIRS / CAUSAL_PAIRS
    log = log_of(tmp_path)
    assert f"attention of layers 1-3, 5: local_global(window=0) in blocks of 64, {100 * share:.3g} %" in log
    assert "attention of layer 4: dense" in log
    assert f"attention of all 5 layers: {100 * (4 * share + 1) / 5:.3g} % of the pairs of dense attention" in log
    assert "attention by sdpa holds layouts as dense masks" in log
    said = summary(tmp_path / "runs" / "m")
    assert said["attention_density"] == pytest.approx((4 * PAIRS + CAUSAL_PAIRS) / 5 / 256**2)
    assert [(each["layout"], each["layers"]) for each in said["attention_layers"]] == [
        ("local_global", [1, 2, 3, 5]), ("dense", [4]),
    ]  # fmt: skip
    assert said["attention_layers"][0]["density"] == pytest.approx(PAIRS / 256**2)


def test_a_dense_run_says_nothing_of_layers(make_config, tmp_path):
    assert run(make_config("run_id=m", "trainer.max_steps=1"), []) == 0
    assert "attention of" not in log_of(tmp_path)
    said = summary(tmp_path / "runs" / "m")
    assert said["attention_density"] == pytest.approx(33 / 64) and "attention_layers" not in said


def test_a_layout_that_leaves_nothing_out_is_told(make_config):
    config = make_config(*SPARSE, "attention.layout.window=3")
    lines = list(AttentionReport(LayerMasks(config, Causal(), positional=True), "32-true", CPU).lines())
    assert any("local_global leaves nothing out at seq_len=256" in line for line in lines)


def test_blocks_that_see_nothing_of_the_past_are_told(make_config, tmp_path):
    np.save(tmp_path / "seen.npy", np.array([[0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1]], dtype=bool))
    sizes = [change for change in SPARSE if "window" not in change]
    config = make_config(*sizes, "attention.layout.name=from_mask", f"attention.layout.path={tmp_path / 'seen.npy'}")
    lines = list(AttentionReport(LayerMasks(config, Causal(), positional=True), "32-true", CPU).lines())
    assert any("from_mask: 2 of 4 blocks of queries (heads counted) see nothing at all" in line for line in lines)


def test_blocks_whose_layout_lies_outside_of_the_window_are_told(make_config):
    sizes = [change for change in SPARSE if "window" not in change]
    alone = ("attention.layout.name=random_blocks", "attention.layout.density=1", "attention.layout.per_head=true")
    for changes, told in (
        (("attention.layout.density=0.0625", "attention.layout.seed=0"), True),
        (("attention.layout.density=1",), False),
    ):
        config = make_config(*sizes, *alone, "attention.window=60", *changes)
        masks = LayerMasks(config, Causal() & SlidingWindow(59), positional=True)
        lines = [line for line in AttentionReport(masks, "32-true", CPU).lines() if "see nothing at all" in line]
        assert len(lines) == told, lines
        if told:
            plan = masks.lower(1, 256, CPU)
            blind = (~plan.dense()[0].any(-1)).view(2, 4, 64).all(-1).sum()
            assert f"random_blocks: {blind} of 8 blocks" in lines[0] and "attention.window" in lines[0]


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.ones((3, 4), bool), "visible has shape (3, 4)"),
        (np.ones((4, 4), np.int64), "give a bool tensor"),
        (np.ones((3, 4, 4), bool), "the array has 3 heads and the model model.num_heads=2"),
        (None, "No such file"),
    ],
)
def test_a_file_that_holds_no_layout_for_this_run_stops_it_before_it_starts(make_config, tmp_path, array, told):
    if array is not None:
        np.save(tmp_path / "seen.npy", array)
    sizes = [change for change in SPARSE if "window" not in change]
    changes = ("run_id=m", "attention.layout.name=from_mask", f"attention.layout.path={tmp_path / 'seen.npy'}")
    assert run(make_config(*sizes, *changes), []) == 1
    assert told in log_of(tmp_path) and f"path={tmp_path / 'seen.npy'}" in log_of(tmp_path)
    assert not (tmp_path / "runs" / "m" / "metrics.csv").exists()


@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_a_backend_that_cannot_do_it_stops_the_run_before_it_starts(make_config, tmp_path, monkeypatch, backend):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert run(make_config(*SPARSE, "run_id=m", f"attention.backend={backend}"), []) == 1
    assert f"backend='{backend}': the Triton kernels need a CUDA GPU" in log_of(tmp_path)
    assert not (tmp_path / "runs" / "m" / "metrics.csv").exists()


@pytest.mark.parametrize(
    "changes",
    [
        ("attention.dense_every=2", "data.document_borders=true", "memory=full"),
        ("attention.alternate_with=[{name: bigbird, random: 1, per_head: true}]", "model.num_kv_heads=1"),
        ("attention.backend=standard", "trainer.precision=bf16-mixed"),
    ],
    ids=lambda changes: " ".join(changes),
)
def test_sparse_models_learn(make_config, tmp_path, changes):
    assert run(make_config(*SPARSE, "run_id=m", "trainer.max_steps=8", *changes), []) == 0
    losses = [float(row["train_loss"]) for row in metrics(tmp_path / "runs" / "m")]
    assert losses[-1] < losses[0]
    assert all(math.isfinite(float(row["val_loss"])) for row in metrics(tmp_path / "runs" / "m") if row["val_loss"])


def test_sparse_layers_train_another_model_than_dense_ones(make_config, tmp_path):
    """The guard of the tests here: the layouts do reach the model."""
    assert run(make_config(*SPARSE, "run_id=sparse", "trainer.max_steps=2"), []) == 0
    sizes = [change for change in SPARSE if not change.startswith("attention")]
    assert run(make_config(*sizes, "run_id=dense", "trainer.max_steps=2"), []) == 0
    sparse, dense = (figures(tmp_path / "runs" / name) for name in ("sparse", "dense"))
    assert float(sparse[0][2]) == pytest.approx(float(dense[0][2]), rel=0.02) and sparse[0] != dense[0]


def test_a_sparse_run_stopped_and_resumed_is_equal_bit_for_bit(make_config, tmp_path):
    changes = (*SPARSE, "attention.alternate_with=[{name: random_blocks, density: 0.5}]", "trainer.val_every_n_steps=4")
    assert run(make_config(*changes, "run_id=straight"), []) == 0
    assert run(make_config(*changes, "run_id=cut", "trainer.max_time=0s"), []) == 0
    assert summary(tmp_path / "runs" / "cut")["steps"] == 1
    assert go_on(tmp_path, "cut", "trainer.max_time=9h") == 0
    straight, cut = (figures(tmp_path / "runs" / name) for name in ("straight", "cut"))
    assert cut[1:] == straight[1:]


def test_another_layout_is_refused_on_resume(make_config, tmp_path):
    assert run(make_config(*SPARSE, "run_id=m", "trainer.max_time=0s"), []) == 0
    with pytest.raises(ConfigError, match=r"attention\.dense_every=2: the run was started with None"):
        go_on(tmp_path, "m", "attention.dense_every=2")


@pytest.mark.parametrize("order", ["rows", "tiles"])
def test_images_train_on_tiles_in_either_order(image_config, tmp_path, order):
    pytest.importorskip("numba")
    tiles = ("attention=block_sparse", "attention.layout.name=tiles_2d", f"classifier.token_order={order}")
    assert run(image_config(*tiles, "run_id=m", "trainer.max_steps=2"), []) == 0
    said = summary(tmp_path / "runs" / "m")
    assert said["status"] == "finished" and 0.2 < said["attention_density"] < 0.9
    assert f"tiles_2d in blocks of 128, {100 * said['attention_density']:.3g} %" in log_of(tmp_path)

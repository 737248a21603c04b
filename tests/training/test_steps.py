"""What one optimiser step does: every target counts once, documents stay apart, and nothing bad reaches the weights."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from flashtrain.data.batch import IGNORE, Batch
from flashtrain.training import memory
from flashtrain.training.hardware import peak_flops
from flashtrain.training.language import LanguageTask
from flashtrain.training.memory import forecast_of
from flashtrain.training.optimizers import build_optimizer, clip_gradients, skip_if_not_finite
from flashtrain.training.run import run
from flashtrain.training.schedules import learning_rate

from .conftest import figures, metrics, summary

VOCAB = 257


def make_task(make_config, *changes: str, dtype=torch.float64) -> LanguageTask:
    torch.manual_seed(0)
    return LanguageTask(make_config(*changes), VOCAB).to(dtype)


def batch_of(documents: list[torch.Tensor], borders: bool) -> Batch:
    """The documents packed into one row; where borders are cut, no token predicts the next document's first."""
    tokens = torch.cat([document[:-1] for document in documents])
    targets = torch.cat([document[1:] for document in documents])
    lengths = tuple(len(document) - 1 for document in documents)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Batch(
        tokens[None],
        targets[None],
        positions[None] if borders else None,
        (lengths,) if borders else None,
        int((targets != IGNORE).sum()),
    )


def gradients(task: LanguageTask, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    task.model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in task.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("positions", ["learned", "rope"])
@pytest.mark.parametrize("backend", ["sdpa", "standard"])
def test_a_packed_row_gives_the_loss_and_gradients_of_its_documents_one_by_one(make_config, positions, backend):
    task = make_task(make_config, f"model.positions={positions}", f"attention.backend={backend}", "seq_len=256")
    draw = torch.Generator().manual_seed(1)
    documents = [torch.randint(0, 256, (n,), generator=draw) for n in (64, 2, 66, 100)]
    packed = task.loss_sum(batch_of(documents, borders=True))
    alone = sum(task.loss_sum(batch_of([document], borders=False)) for document in documents)
    assert packed.item() == pytest.approx(alone.item(), rel=1e-12)
    one, other = gradients(task, packed), gradients(task, alone)
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-12)


def test_without_borders_a_document_does_see_the_one_before(make_config):
    """The guard of the test above: the two ways differ where they should."""
    task = make_task(make_config, "seq_len=256")
    documents = [torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)) for n in (64, 66)]
    joined, apart = (task.loss_sum(batch_of(documents, borders=borders)) for borders in (False, True))
    assert abs(joined.item() - apart.item()) > 1e-3


def test_another_first_document_changes_nothing_in_the_second(make_config):
    task = make_task(make_config, "seq_len=256", dtype=torch.float32)
    second = torch.randint(0, 256, (40,))
    hidden = []
    for seed in (1, 2):
        first = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(seed))
        batch = batch_of([first, second], borders=True)
        hidden.append(task.model(batch.tokens, task.plan(batch), batch.positions)[0, 29:])
    assert torch.equal(hidden[0], hidden[1])


def test_micro_batches_with_unequal_targets_count_each_target_once(make_config, tmp_path, monkeypatch):
    """k uneven micro-batches give the gradient of one batch: never the mean of their means."""
    from flashtrain.data.stream import StepBatches

    honest = StepBatches.batches

    def uneven(self, step):
        batches = honest(self, step)
        rows = [row for batch in batches for row in batch.targets]
        for number, row in enumerate(rows):
            row[: number * 3] = IGNORE
        for batch in batches:
            batch.num_targets = int((batch.targets != IGNORE).sum())
        return batches

    monkeypatch.setattr(StepBatches, "batches", uneven)
    for name, micro in (("one", 256), ("many", 32)):
        changes = (f"run_id={name}", f"trainer.micro_batch_tokens={micro}", "trainer.max_steps=4")
        assert run(make_config(*changes, "trainer.sample_tokens=0"), []) == 0
    one, many = figures(tmp_path / "runs" / "one"), figures(tmp_path / "runs" / "many")
    for a, b in zip(one, many, strict=True):
        assert float(a[2]) == pytest.approx(float(b[2]), rel=1e-5)  # loss
        assert float(a[5]) == pytest.approx(float(b[5]), rel=1e-4)  # gradient norm


def test_a_step_without_any_target_changes_no_weight_and_is_not_nan(make_config, tmp_path, monkeypatch):
    from flashtrain.data.stream import StepBatches

    honest = StepBatches.batches

    def all_ignored(self, step):
        batches = honest(self, step)
        for batch in batches:
            batch.targets.fill_(IGNORE)
            batch.num_targets = 0
        return batches

    monkeypatch.setattr(StepBatches, "batches", all_ignored)
    assert run(make_config("run_id=none", "trainer.max_steps=2", "optimizer.weight_decay=0"), []) == 0
    assert [row["train_loss"] for row in metrics(tmp_path / "runs" / "none")][:2] == ["0.0", "0.0"]


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_never_reaches_the_weights_and_ends_the_run_naming_it(
    make_config, tmp_path, monkeypatch, where
):
    honest, calls, weights = LanguageTask.loss_sum, [], []

    def poisoned(self, batch):
        loss = honest(self, batch)
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) > 4 * 6:
                weights.append(self.model.token_embedding.weight.detach().clone())
                if where == "loss":
                    return loss * math.nan
                loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    monkeypatch.setattr(LanguageTask, "loss_sum", poisoned)
    config = make_config("run_id=bad", "trainer.log_every_n_steps=3", "trainer.val_every_n_steps=100")
    assert run(config, []) == 1
    folder = tmp_path / "runs" / "bad"
    assert summary(folder)["status"] == "diverged"
    assert "not finite at step 7" in (folder / "train.log").read_text()
    assert all(torch.equal(weights[0], later) for later in weights[1:])
    assert torch.isfinite(weights[-1]).all()
    newest = sorted(folder.glob("checkpoints/*.ckpt"))[-1].name
    assert newest == "step-00000004.ckpt"


@pytest.mark.parametrize(("clip_norm", "factor"), [(1.0, 1 / 20), (100.0, 1.0), (None, 1.0)])
def test_a_gradient_longer_than_clip_norm_is_scaled_down_to_it(clip_norm, factor):
    model = torch.nn.Linear(3, 4)
    for p in model.parameters():
        p.grad = torch.full_like(p, 5.0)
    norm = clip_gradients(model.parameters(), clip_norm)
    assert norm.item() == pytest.approx(20)  # 16 numbers of 5
    assert all(torch.allclose(p.grad, torch.full_like(p, 5 * factor)) for p in model.parameters())


def test_a_run_clips_its_gradients(make_config, tmp_path):
    for name, clip_norm in (("clipped", "1e-9"), ("free", "null")):
        changes = (f"run_id={name}", f"optimizer.clip_norm={clip_norm}", "optimizer.eps=1", "trainer.max_steps=4")
        assert run(make_config(*changes, "optimizer.weight_decay=0", "trainer.sample_tokens=0"), []) == 0
    clipped, free = (metrics(tmp_path / "runs" / name) for name in ("clipped", "free"))
    assert clipped[-1]["val_loss"] != free[-1]["val_loss"]


def test_a_skipped_step_leaves_weights_moments_and_step_counts_as_they_were(make_config):
    task = make_task(make_config, dtype=torch.float32)
    optimizer = build_optimizer(task.model, task.config.optimizer)
    for p in task.model.parameters():
        p.grad = torch.ones_like(p)
    skip_if_not_finite(optimizer, torch.tensor(True))
    optimizer.step()
    before = [t.clone() for p in task.model.parameters() for t in (p, *optimizer.state[p].values())]
    skip_if_not_finite(optimizer, torch.tensor(False))
    for p in task.model.parameters():
        p.grad.fill_(math.nan)
    optimizer.step()
    after = [t for p in task.model.parameters() for t in (p, *optimizer.state[p].values())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_weight_decay_spares_biases_and_norms(make_config):
    task = make_task(make_config, "model.bias=true", "model.norm=layernorm")
    optimizer = build_optimizer(task.model, task.config.optimizer)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(task.model.parameters()))
    for name, p in task.model.named_parameters():
        assert decay[id(p)] == (0.0 if name.endswith("bias") or "norm" in name else 0.1), name


class TestSchedule:
    def rates(self, make_config, name: str, steps: int = 100, warmup: int = 10) -> list[float]:
        config = make_config(f"schedule={name}", f"schedule.warmup_steps={warmup}")
        return [learning_rate(step, 1.0, steps, config.schedule) for step in range(steps)]

    def test_the_warmup_is_linear_and_its_first_step_moves(self, make_config):
        rates = self.rates(make_config, "cosine")
        assert rates[:10] == pytest.approx([(n + 1) / 10 for n in range(10)])

    def test_cosine_ends_exactly_at_its_floor(self, make_config):
        rates = self.rates(make_config, "cosine")
        assert rates[-1] == pytest.approx(0.1)
        assert all(a >= b for a, b in pairwise(rates[10:]))

    def test_wsd_is_flat_until_its_last_fifth_and_ends_at_zero(self, make_config):
        rates = self.rates(make_config, "wsd")
        assert set(rates[10:80]) == {1.0}
        assert rates[-1] == pytest.approx(0.0, abs=1e-12)
        assert rates[80] == pytest.approx(0.95)

    def test_constant_stays(self, make_config):
        assert set(self.rates(make_config, "constant")[10:]) == {1.0}


def test_checkpointing_changes_no_loss_and_is_chosen_where_activations_would_not_fit(
    make_config, tmp_path, monkeypatch
):
    for name in ("none", "full"):
        changes = (f"memory={name}", f"run_id={name}", "model.dropout=0.1", "trainer.max_steps=3")
        assert run(make_config(*changes), []) == 0
    assert figures(tmp_path / "runs" / "none") == figures(tmp_path / "runs" / "full")
    small, large = (
        make_config(),
        make_config("model=gpt2", "seq_len=64k", "model.num_layers=12", "model.hidden_size=768"),
    )
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "device_memory_bytes", lambda device: 24 << 30)  # of any machine, for once
    assert forecast_of(small, VOCAB, "32-true", cpu).case.how.blocks == "none"
    assert forecast_of(large, VOCAB, "32-true", cpu).case.how.blocks != "none"


def test_the_meter_counts_tokens_and_knows_no_peak_for_a_cpu(make_config, tmp_path):
    assert run(make_config("run_id=m", "trainer.log_every_n_steps=4"), []) == 0
    rows = [row for row in metrics(tmp_path / "runs" / "m") if row["train_loss"]]
    assert [(row["step"], row["tokens"]) for row in rows] == [("4", "1024"), ("8", "2048"), ("12", "3072")]
    assert all(float(row["tokens_per_second"]) > 0 and row["mfu"] == "" for row in rows)
    assert summary(tmp_path / "runs" / "m")["tokens"] == 3072
    assert peak_flops(torch.device("cpu"), "bf16-mixed", None) is None


def test_mfu_is_model_flops_over_the_given_peak(make_config, tmp_path):
    assert run(make_config("run_id=m", "trainer.peak_tflops=0.001"), []) == 0
    from flashtrain.models.flops import model_flops

    config = make_config()
    per_token = model_flops(config.model, VOCAB, 32, 32 * 33 / 2).training / 32
    for row in metrics(tmp_path / "runs" / "m"):
        if row["mfu"]:
            assert float(row["mfu"]) == pytest.approx(float(row["tokens_per_second"]) * per_token / 1e9)


def test_the_metrics_have_one_row_a_step_and_one_header(make_config, tmp_path):
    assert run(make_config("run_id=m"), []) == 0
    rows = metrics(tmp_path / "runs" / "m")
    assert [row["step"] for row in rows] == [str(n) for n in range(1, 13)]
    assert [row["step"] for row in rows if row["val_loss"]] == ["5", "10", "12"]
    text = (tmp_path / "runs" / "m" / "metrics.csv").read_text()
    assert text.count("train_loss") == 1
    assert float(rows[4]["val_perplexity"]) == pytest.approx(math.exp(float(rows[4]["val_loss"])))


def test_the_rows_come_in_the_order_of_their_steps_also_between_logged_ones(make_config, tmp_path):
    changes = ("run_id=m", "trainer.log_every_n_steps=4", "trainer.val_every_n_steps=3")
    assert run(make_config(*changes), []) == 0
    rows = metrics(tmp_path / "runs" / "m")
    assert [(row["step"], bool(row["train_loss"]), bool(row["val_loss"])) for row in rows] == [
        ("3", False, True), ("4", True, False), ("6", False, True), ("8", True, False), ("9", False, True),
        ("12", True, True),
    ]  # fmt: skip


def test_the_summary_says_what_was_run(make_config, tmp_path):
    assert run(make_config("run_id=m", "attention=flash"), []) == 0
    wanted = (
        "run_id seq_len model attention_backend steps tokens train_loss val_loss tokens_per_second mfu peak_memory_gib "
        "device git_commit status"
    )
    said = summary(tmp_path / "runs" / "m")
    assert set(wanted.split()) <= set(said)
    assert (said["status"], said["attention_backend"], said["steps"]) == ("finished", "sdpa", 12)
    assert said["trigram_val_loss"] > 0


def test_tensorboard_gets_the_same_figures(make_config, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run(make_config("run_id=m", "logger=tensorboard"), []) == 0
    folder = tmp_path / "runs" / "m"
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    logged = [(event.step, event.value) for event in events.Scalars("train_loss")]
    assert logged == [(int(row["step"]), pytest.approx(float(row["train_loss"]))) for row in metrics(folder)]


@pytest.mark.parametrize(
    "changes",
    [
        ("data.packing=whole", "data.document_borders=true"),
        ("data.document_borders=true", "attention.window=8", "model.num_kv_heads=1"),
        ("trainer.precision=bf16-mixed", "memory=full"),
        ("trainer.precision=bf16-true", "schedule=wsd"),
        ("model=gpt2", "data.tokenizer=bytes", "model.num_layers=2", "attention=standard"),
        ("seq_len=4k", "trainer.sample_tokens=0"),  # longer than all that is held out
    ],
    ids=lambda changes: " ".join(changes),
)
def test_the_ways_of_training_all_learn_and_say_what_they_took(make_config, tmp_path, changes):
    assert run(make_config("run_id=m", *changes), []) == 0
    rows = metrics(tmp_path / "runs" / "m")
    losses = [float(row["train_loss"]) for row in rows]
    assert losses[-1] < losses[0]
    assert all(math.isfinite(float(row["val_loss"])) for row in rows if row["val_loss"])

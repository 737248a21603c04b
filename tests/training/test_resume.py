"""Stopping and going on is the same as never having stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flashtrain.config import to_dict
from flashtrain.config.build import ConfigError
from flashtrain.config.resume import resumed
from flashtrain.data.tokenizers import ByteTokenizer
from flashtrain.training import checkpoints as ckpt
from flashtrain.training.run import run
from flashtrain.training.run_folder import RunFolder

from .conftest import ROOT, changed, figures, go_on, metrics, summary


def start(overrides: list[str], *more: str) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "train.py", *changed(overrides, *more)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def wait_for(condition, process: subprocess.Popen, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate()[0]
        time.sleep(0.01)


@pytest.fixture
def straight(make_config, tmp_path):
    """The run that was never stopped, with dropout and accumulation, so that both are part of the promise."""
    torch.set_num_threads(1)
    assert run(make_config("run_id=straight", "model.dropout=0.1"), []) == 0
    return figures(tmp_path / "runs" / "straight")


@pytest.mark.parametrize("rows", [1, 6, 9])
def test_killed_anywhere_and_resumed_gives_the_same_losses_bit_for_bit(overrides, tmp_path, straight, rows):
    process = start(overrides, "run_id=cut", "model.dropout=0.1")
    folder = tmp_path / "runs" / "cut"
    wait_for(lambda: (folder / "metrics.csv").exists() and len(metrics(folder)) >= rows, process)
    process.kill()
    process.wait()
    assert go_on(tmp_path, "cut") == 0
    assert figures(folder) == straight


def test_resumed_twice_in_a_row_gives_the_same_losses_bit_for_bit(make_config, tmp_path, straight):
    folder = tmp_path / "runs" / "cut"
    assert run(make_config("run_id=cut", "model.dropout=0.1", "trainer.max_time=0s"), []) == 0  # one step
    assert summary(folder)["steps"] == 1
    assert go_on(tmp_path, "cut", "trainer.max_time=0") == 0
    assert summary(folder)["steps"] == 2
    config_text = (folder / "config.yaml").read_text().replace("max_time: 0.0", "max_time: null")
    (folder / "config.yaml").write_text(config_text)
    assert go_on(tmp_path, "cut") == 0
    # The extra validations at steps 1 and 2 belong to the stops.
    assert [(*f[:3], *f[4:]) for f in figures(folder)] == [(*f[:3], *f[4:]) for f in straight]
    assert [f[3] for f in figures(folder)][2:] == [f[3] for f in straight][2:]


@pytest.mark.parametrize(("number", "code", "workers"), [(signal.SIGTERM, 143, 0), (signal.SIGINT, 130, 1)])
def test_a_signal_saves_and_leaves_with_its_own_code(overrides, tmp_path, number, code, workers):
    process = start(
        overrides,
        "run_id=cut",
        "trainer.max_steps=20k",
        "trainer.val_every_n_steps=20k",
        f"data.num_workers={workers}",
    )
    folder = tmp_path / "runs" / "cut"
    wait_for(lambda: (folder / "metrics.csv").exists() and len(metrics(folder)) >= 2, process)
    os.killpg(process.pid, number)  # as a terminal does: the readers get it too
    output = process.communicate(timeout=60)[0]
    assert process.returncode == code, output
    assert summary(folder)["status"] == "stopped"
    assert "resume=cut" in output
    steps = summary(folder)["steps"]
    assert ckpt.newest(folder / "checkpoints")[1]["flashtrain"]["step"] == steps
    assert go_on(tmp_path, "cut", f"trainer.max_steps={steps + 3}") == 0
    assert [row["step"] for row in metrics(folder)] == [str(n) for n in range(1, steps + 4)]


def test_a_stop_in_the_middle_of_an_accumulation_gives_the_step_up_and_repeats_it(
    make_config, tmp_path, straight, monkeypatch
):
    """A signal between two micro-batches: nothing of the half step may stay behind."""
    from flashtrain.training.language import LanguageTask

    honest, calls = LanguageTask.loss_sum, []

    def interrupted(self, batch):
        calls.append(1)
        if len(calls) == 4 * 6 + 2:  # the second of four micro-batches of step 7
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(self, batch)

    monkeypatch.setattr(LanguageTask, "loss_sum", interrupted)
    config = make_config("run_id=cut", "model.dropout=0.1", "trainer.val_every_n_steps=100")
    assert run(config, []) == 143
    monkeypatch.setattr(LanguageTask, "loss_sum", honest)
    folder = tmp_path / "runs" / "cut"
    assert summary(folder)["steps"] == 6
    assert go_on(tmp_path, "cut") == 0
    assert [f[2] for f in figures(folder)] == [f[2] for f in straight]


@pytest.mark.parametrize("moment", ["in the validation", "in the step before it"])
def test_a_validation_that_a_stop_cut_short_is_made_up_for(make_config, tmp_path, straight, monkeypatch, moment):
    from flashtrain.training.language import LanguageTask

    honest, calls = LanguageTask.loss_sum, []

    def interrupted(self, batch):
        calls.append(torch.is_grad_enabled())
        wanted = [True] * 20 + [False] * 2 if moment == "in the validation" else [True] * 20
        if calls == wanted:  # four micro-batches in each of five steps, then the validation
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(self, batch)

    monkeypatch.setattr(LanguageTask, "loss_sum", interrupted)
    assert run(make_config("run_id=cut", "model.dropout=0.1"), []) == 143
    monkeypatch.setattr(LanguageTask, "loss_sum", honest)
    folder = tmp_path / "runs" / "cut"
    assert (summary(folder)["steps"], metrics(folder)[-1]["val_loss"]) == (5, "")
    assert go_on(tmp_path, "cut") == 0
    assert figures(folder) == straight


def test_a_finished_run_resumed_trains_no_further(make_config, tmp_path):
    assert run(make_config("run_id=done"), []) == 0
    before = (tmp_path / "runs" / "done" / "metrics.csv").read_text()
    val_loss = summary(tmp_path / "runs" / "done")["val_loss"]
    assert go_on(tmp_path, "done") == 0
    assert summary(tmp_path / "runs" / "done")["val_loss"] == val_loss
    assert (tmp_path / "runs" / "done" / "metrics.csv").read_text() == before
    assert summary(tmp_path / "runs" / "done")["status"] == "finished"


def test_a_run_that_has_made_more_steps_than_it_is_given_says_so(make_config, tmp_path):
    assert run(make_config("run_id=less"), []) == 0
    assert go_on(tmp_path, "less", "trainer.max_steps=5", "schedule.warmup_steps=2") == 0
    log = (tmp_path / "runs" / "less" / "train.log").read_text()
    assert "trainer.max_steps=5: the run has made 12 steps already" in log
    assert summary(tmp_path / "runs" / "less")["steps"] == 12


def test_a_finished_run_goes_on_when_it_is_given_more_steps(make_config, tmp_path):
    assert run(make_config("run_id=more"), []) == 0
    assert go_on(tmp_path, "more", "trainer.max_steps=16") == 0
    folder = tmp_path / "runs" / "more"
    assert [row["step"] for row in metrics(folder)] == [str(n) for n in range(1, 17)]
    assert "trainer.max_steps: 12 -> 16" in (folder / "train.log").read_text()
    assert (folder / "config.1.yaml").exists()  # the earlier configuration is kept


@pytest.mark.parametrize("change", ["model.num_layers=3", "data.packing=whole", "trainer.batch_tokens=512"])
def test_a_change_that_a_resume_cannot_honour_is_refused_with_both_values(make_config, tmp_path, change):
    config = make_config("run_id=kept")
    folder = tmp_path / "runs" / "kept"
    folder.mkdir(parents=True)
    import yaml

    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    with pytest.raises(ConfigError) as error:
        go_on(tmp_path, "kept", change)
    key, value = change.split("=")
    assert f"{key}={value}" in str(error.value)
    assert "was started with" in str(error.value)


def test_an_unknown_run_is_named_with_those_that_exist(make_config, tmp_path):
    assert run(make_config("run_id=here", "trainer.max_steps=2"), []) == 0
    with pytest.raises(ConfigError, match="here"):
        go_on(tmp_path, "gone")


def test_another_text_is_refused(make_config, tmp_path, text_folder):
    assert run(make_config("run_id=first"), []) == 0
    (text_folder / "00.txt").write_text("something else")
    assert go_on(tmp_path, "first") == 1
    assert "corpus_fingerprint was" in (tmp_path / "runs" / "first" / "train.log").read_text()


def test_a_tokenizer_that_has_become_another_is_refused(make_config, tmp_path, monkeypatch):
    """Under the same name, as a folder's files may: its ids would mean something else to the weights."""
    assert run(make_config("run_id=first"), []) == 0
    honest = ByteTokenizer.__init__

    def another(self):
        honest(self)
        self.fingerprint = "another"

    monkeypatch.setattr(ByteTokenizer, "__init__", another)
    assert go_on(tmp_path, "first", "trainer.max_steps=16") == 1
    folder = tmp_path / "runs" / "first"
    assert "tokenizer_fingerprint was" in (folder / "train.log").read_text()
    assert len(metrics(folder)) == 12


class TestCheckpoints:
    def test_a_checkpoint_is_plain_data(self, make_config, tmp_path):
        assert run(make_config("run_id=plain"), []) == 0
        path, _ = ckpt.newest(tmp_path / "runs" / "plain" / "checkpoints")
        assert torch.load(path, weights_only=True)["flashtrain"]["step"] == 12

    def test_only_the_newest_are_kept(self, make_config, tmp_path):
        assert run(make_config("run_id=few", "trainer.keep_checkpoints=2"), []) == 0
        names = [path.name for path in ckpt.existing(tmp_path / "runs" / "few" / "checkpoints")]
        assert names == ["step-00000008.ckpt", "step-00000012.ckpt"]

    def test_a_truncated_newest_checkpoint_falls_back_to_the_one_before(self, make_config, tmp_path, straight):
        assert run(make_config("run_id=torn", "model.dropout=0.1"), []) == 0
        folder = tmp_path / "runs" / "torn"
        newest = ckpt.existing(folder / "checkpoints")[-1]
        newest.write_bytes(newest.read_bytes()[:-100])
        assert go_on(tmp_path, "torn") == 0
        assert figures(folder) == straight
        told = (folder / "train.log").read_text()
        assert f"{newest}: not a readable checkpoint" in told and "taking step-00000008.ckpt" in told

    def test_a_foreign_file_is_refused(self, tmp_path):
        torch.save({"weights": 1}, tmp_path / "step-00000001.ckpt")
        with pytest.raises(ValueError, match="not a checkpoint"):
            ckpt.newest(tmp_path)

    @pytest.mark.parametrize(("content", "why"), [(b"", "it is empty"), (b"PK" * 99, "another kind of file")])
    def test_what_pytorch_cannot_read_is_named_with_the_reason(self, tmp_path, content, why):
        (tmp_path / "step-00000001.ckpt").write_bytes(content)
        with pytest.raises(ValueError, match=f"step-00000001.ckpt: not a readable checkpoint .*{why}"):
            ckpt.newest(tmp_path)

    def test_a_full_disk_keeps_the_earlier_checkpoint_whole(self, make_config, tmp_path, monkeypatch):
        import lightning.pytorch as pl

        honest = pl.Trainer.save_checkpoint

        def full(self, path, *args, **kwargs):
            if self.global_step > 4:
                Path(path).write_bytes(b"half")
                raise OSError(28, "No space left on device")
            honest(self, path, *args, **kwargs)

        monkeypatch.setattr(pl.Trainer, "save_checkpoint", full)
        assert run(make_config("run_id=full"), []) == 1
        folder = tmp_path / "runs" / "full"
        assert [path.name for path in folder.glob("checkpoints/*")] == ["step-00000004.ckpt"]
        assert ckpt.newest(folder / "checkpoints")[1]["flashtrain"]["step"] == 4
        log = (folder / "train.log").read_text()
        assert "No space left" in log and "MiB are free" in log
        assert summary(folder)["status"] == "failed"


def test_a_run_that_lengthens_its_sequences_resumes_to_the_same_bits(make_config, tmp_path):
    changes = ("schedule.length_steps=8", "schedule.first_length=8", "trainer.sample_tokens=0")
    assert run(make_config(*changes, "run_id=straight"), []) == 0
    assert run(make_config(*changes, "run_id=cut", "trainer.max_time=0s"), []) == 0
    assert go_on(tmp_path, "cut", "trainer.max_time=9h") == 0
    straight, cut = figures(tmp_path / "runs" / "straight"), figures(tmp_path / "runs" / "cut")
    assert cut[1:] == straight[1:]
    assert run(make_config("trainer.sample_tokens=0", "run_id=whole"), []) == 0
    whole = figures(tmp_path / "runs" / "whole")
    assert [row[1] for row in whole] == [row[1] for row in straight]  # as many tokens
    assert whole[0][2] != straight[0][2]  # other contexts


@pytest.mark.parametrize("damaged", ["", "seq_len: [", "seq_len: 32"])
def test_a_damaged_configuration_is_named(make_config, tmp_path, damaged):
    folder = RunFolder.create(make_config("run_id=damaged"))
    folder.config.write_text(damaged)
    with pytest.raises(ConfigError, match=r"resume=damaged: .*config\.yaml is damaged"):
        go_on(tmp_path, "damaged")


def test_another_optimizer_is_refused_since_its_state_is_of_another_kind(make_config, tmp_path):
    RunFolder.create(make_config("run_id=cut"))
    with pytest.raises(ConfigError, match=r"optimizer\.name=muon: the run was started with adamw"):
        go_on(tmp_path, "cut", "optimizer.name=muon")


def test_a_runs_folder_instead_of_its_id_is_told_what_to_write(make_config, tmp_path):
    folder = RunFolder.create(make_config("run_id=cut"))
    with pytest.raises(ConfigError, match="write the run's id, resume=cut"):
        resumed({"runs_dir": "runs", "resume": str(folder.path)}, [])

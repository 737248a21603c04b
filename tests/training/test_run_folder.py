"""A run's folder survives full and read-only disks, damaged files, and odd names."""

from __future__ import annotations

import errno
import json
import logging
from pathlib import Path

import pytest
import yaml

from flashtrain.config import build, to_dict
from flashtrain.training.progress import Display
from flashtrain.training.run import run
from flashtrain.training.run_folder import RunFolder

from .conftest import go_on


@pytest.fixture
def full_disk(monkeypatch):
    """What is written from here on does not fit."""

    def write_text(self: Path, text: str) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_text)


def test_a_runs_dir_that_cannot_be_written_is_named(make_config, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run(make_config(f"runs_dir={tmp_path / 'file'}"), []) == 1
    assert f"runs_dir={tmp_path / 'file'}: " in capsys.readouterr().err


def test_a_new_run_on_a_full_disk_says_so_and_leaves_no_folder(make_config, tmp_path, full_disk, capsys):
    assert run(make_config("run_id=new"), []) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "new").exists()


def test_a_full_disk_takes_no_configuration_away(make_config, request):
    config = make_config("run_id=full")
    folder = RunFolder.create(config)
    request.getfixturevalue("full_disk")
    with pytest.raises(OSError, match=r"No space left on device: cannot write .*config"):
        folder.write_config(make_config("run_id=full", "seed=5"))
    assert yaml.safe_load(folder.config.read_text()) == to_dict(config)
    assert [path.name for path in folder.path.iterdir()] == ["config.yaml"]


def test_a_damaged_summary_is_written_anew(make_config):
    folder = RunFolder.create(make_config("run_id=damaged"))
    for damaged in ("", '{"steps":', "3"):
        folder.summary.write_text(damaged)
        folder.write_summary({"steps": 7})
        assert json.loads(folder.summary.read_text()) == {"steps": 7}


@pytest.mark.parametrize("name", ["mein Modell (ü)", "../../up", "_", "a/b"])
def test_a_run_named_after_any_folder_of_weights_can_be_resumed(make_config, tmp_path, name):
    raw = to_dict(make_config())
    raw["model"]["name"] = name
    folder = RunFolder.create(build(raw))
    assert folder.path.parent == tmp_path / "runs"
    build(raw | {"resume": folder.run_id})


def test_a_log_on_a_full_disk_is_told_once_and_the_run_goes_on(capsys):
    display = Display(Path("/dev/full"), 1)
    logger = logging.getLogger("flashtrain")
    for _ in range(3):
        logger.info("a line")
    display.close()
    shown = capsys.readouterr()
    assert shown.out.count("a line") == 3
    assert shown.err.count("/dev/full") == 1
    assert "Traceback" not in shown.err


def test_changes_with_which_a_run_cannot_go_on_do_not_stay(make_config, tmp_path):
    assert run(make_config("run_id=kept", "trainer.max_steps=2"), []) == 0
    stored = (tmp_path / "runs" / "kept" / "config.yaml").read_text()
    assert go_on(tmp_path, "kept", "attention.backend=hopper", "trainer.max_steps=4") == 1
    assert (tmp_path / "runs" / "kept" / "config.yaml").read_text() == stored
    assert go_on(tmp_path, "kept", "trainer.max_steps=4") == 0

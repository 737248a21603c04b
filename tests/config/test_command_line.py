"""A wrong command line is told at once, whole, and before anything heavy is imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from flashtrain.config import ConfigError
from flashtrain.config.command_line import check_overrides

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"


def problems_of(*arguments: str) -> str:
    with pytest.raises(ConfigError) as error:
        check_overrides(arguments, CONF)
    return str(error.value)


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("seqlen=16k", "did you mean 'seq_len'"),
        ("+seqlen=16k", "did you mean 'seq_len'"),
        ("trainer.max_stpes=10", "did you mean 'trainer.max_steps'"),
        ("+trainer.max_stpes=10", "did you mean 'trainer.max_steps'"),
        ("model.n_haeds=8", "did you mean 'model.num_heads'"),
        ("num_layers=4", "did you mean 'model.num_layers'"),
        ("model=gpt3x", "did you mean model=gpt2"),
        ("trainer.accelerator=cdua", "did you mean cuda"),
        ("~model.num_layers", "cannot be removed"),
        ("seq_len=16kb", "expected a size"),
        ("trainer.compile=perhaps", "expected one of auto, true, false"),
        ("trainer.deterministic=perhaps", "expected true or false"),
        ("seq_len=", "expected a size"),
        ("attention=flash,sdap", "did you mean attention=sdpa"),
        ("seq_len=4k,16q", "seq_len=16q"),
        ("experiment=glob(nobody*)", "no such choice; "),
        ("curriculum=null", "write '~curriculum'"),
        ("data.path=/data/kürpus", "data.path='/data/kürpus'"),
        ("data.path=/data/date=2024", "data.path='/data/date=2024'"),
        ("seq_len", "'seq_len': not an override; write key=value"),
        ("", "'': not an override; write key=value"),
        ("seed=glob(1*)", "seed=glob(1*): glob() chooses among the files of a group, and seed is none"),
    ],
)
def test_a_mistake_names_the_key_and_what_to_write(argument, hint):
    assert hint in problems_of(argument)


@pytest.mark.parametrize("sweep", ["", ",'/other, one=1'"])
def test_a_text_in_quotes_may_hold_anything(sweep):
    check_overrides(["-m", "data=text", f"data.path='/data/kürpus (1), date=2024'{sweep}", "seq_len='16k',4k"], CONF)


def test_the_value_of_a_flag_is_no_override():
    check_overrides(["--cfg", "job", "--config-name", "config", "seq_len=16k"], CONF)


def test_all_mistakes_come_in_one_message():
    message = problems_of("-m", "seqlen=1k,2k", "+trainer.max_stpes=3", "model=gpt9", "seed=1", "seed=2", "seq_len=x")
    assert "5 problems" in message
    for part in ("seqlen", "max_stpes", "gpt9", "seed is given twice", "seq_len=x"):
        assert part in message


def test_a_combination_that_cannot_work_is_told_together_with_a_typo():
    message = problems_of("seqlen=16k", "model.num_heads=5", "run_id=../up")
    assert "3 problems" in message
    for part in ("did you mean 'seq_len'", "must be a multiple of model.num_heads=5", "run_id='../up'"):
        assert part in message


def test_right_command_lines_pass():
    check_overrides(
        ["-m", "seq_len=4k,16384,0.5M", "model=gpt2,tiny", "seed=1,2", "trainer.max_time=8m",
         "optimizer.betas=[0.9,0.99]",
         "data.path=null", "logger.tags=[a,b]", "hydra.verbose=true", "run_id=17", "optimizer.lr=1e-3,3e-4"],
        CONF,
    )  # fmt: skip


def test_a_pattern_stands_for_the_files_of_a_group():
    check_overrides(["-m", "experiment=glob(pathfinder64*)", "seed=1,2", "trainer.max_steps=9"], CONF)
    told = problems_of("-m", "images=glob([pathfinder,npz])", "images.sides=3")
    assert "did you mean 'images.side'" in told and "no such choice" not in told


def test_a_wrong_command_stops_within_seconds_and_without_torch():
    code = (
        "import sys, runpy; sys.argv = ['train.py', 'seqlen=16k', 'model.num_heads=5']\n"
        "try: runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit as stop: print(stop)\n"
        "print('torch' in sys.modules, 'lightning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "did you mean 'seq_len'" in done.stdout
    assert "False False" in done.stdout


@pytest.mark.parametrize("value", ["${oc.env:NOT_SET_ANYWHERE}", "${not.there}"])
def test_an_interpolation_that_leads_nowhere_names_its_key_without_a_traceback(value):
    done = subprocess.run(
        [sys.executable, "train.py", f"seed={value}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert f"  - seed={value}: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (("seed=${seed}",), ("seed=${seed}",)),
        (("model.batch_tokens=${trainer.batch_tokens}",), ("model.batch_tokens=${", "trainer.batch_tokens=${model.")),
        (("logger.tags=[a,'${seed}']", "seed=${seq_len}", "seq_len=${seed}"),
         ("logger.tags[1]=${seed}", "seed=${seq_len}", "seq_len=${seed}")),
    ],
    ids=["itself", "what stands in conf", "and what leads there"],
)  # fmt: skip
def test_interpolations_that_go_round_in_a_circle_name_every_key_before_a_run_has_a_folder(tmp_path, overrides, keys):
    runs = tmp_path / "runs"
    done = subprocess.run(
        [sys.executable, "train.py", f"runs_dir={runs}", *overrides],
        cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    told = done.stderr.splitlines()
    assert f"{len(keys)} problem" in told[0] and len(told) == 1 + len(keys)
    for key in keys:
        assert any(line.startswith(f"  - {key}") and "round in a circle" in line for line in told), done.stderr
    assert not runs.exists()


def test_a_circle_is_told_together_with_a_typo():
    message = problems_of("seqlen=16k", "seed=${seed}")
    assert "2 problems" in message and "seed=${seed}: leads round in a circle" in message


def test_help_explains_the_groups_without_a_run():
    done = subprocess.run([sys.executable, "train.py", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "model: gpt2" in done.stdout and "seq_len: 256" in done.stdout


def test_ctrl_c_while_torch_is_imported_leaves_with_its_code_and_without_a_traceback():
    code = (
        "import sys, runpy; sys.argv = ['train.py']\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "runpy.run_path('train.py', run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "stopped by Ctrl-C\n")

"""Parameters, packed files and the script of Pathfinder: what a user may write, and what may go wrong on a disk."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import flashtrain.data.pathfinder.packer as packer
from flashtrain.config.schema import PathfinderPreset
from flashtrain.data.pathfinder import PRESETS, PackedImages, PathfinderSpec, generate, prepare, spec_of

ROOT = Path(__file__).resolve().parents[2]
SPEC = spec_of("lra32", contour_length=6)


def visible(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize(
    ("preset", "length", "count", "dashes"),
    [
        ("documented32", 14, 5, 4),
        ("documented64", 14, 5, 4),
        ("documented128", 14, 8, 4),
        ("documented256", 14, 7, 4),
        ("documented128", 9, 11, 3),
        ("documented128", 6, 17, 2),
        ("lra32", 14, 10, 4),
        ("lra64", 14, 11, 4),
        ("lra128", 14, 17, 4),
        ("lra256", 14, 15, 4),
        ("lra128", 9, 17, 3),
        ("lra128", 6, 17, 2),
    ],
)
def test_distractors_are_those_of_the_documents_or_the_release(
    preset: str, length: int, count: int, dashes: int
) -> None:
    spec = spec_of(preset, contour_length=length)
    assert (spec.distractor_count, spec.distractor_length) == (count, dashes)


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("lra128", side=64, contour_length=7, distractor_count=4, start_border=8, seed_distance=12),
        spec_of("lra128", side=96, contour_length=10, distractor_count=9, start_border=30),
        spec_of("lra64", side=48, contour_length=3, distractor_count=2, distractor_length=1, start_border=16),
        spec_of("lra256", side=192, contour_length=20, distractor_count=30, distractor_length=6),
    ],
)
def test_any_size_length_and_clutter_makes_a_curriculum(spec: PathfinderSpec) -> None:
    made = generate(spec, 0, "train", 0, 4, targets=True)
    assert made.images.shape == (4, spec.side, spec.side)
    assert made.targets is not None
    assert (made.targets.max(axis=(1, 2)) == 2 + made.labels).all()


@pytest.mark.parametrize(
    ("preset", "changes", "says"),
    [
        ("lra100", {}, "preset='lra100': must be one of lra32"),
        ("lra32", {"contour_lenght": 6}, "contour_lenght=6: .*did you mean contour_length"),
        ("lra32", {"wind": 6}, "wind=6: .*must be one of side"),
        ("lra32", {"side": 8}, "side=8: must be a whole number from 16 to 1024"),
        ("lra32", {"contour_length": 6.5}, r"contour_length=6\.5: must be a whole number"),
        ("lra32", {"contour_length": 1}, "contour_length=1: must be a whole number from 2"),
        ("lra32", {"margins": ()}, r"margins=\(\): name at least one"),
        ("lra32", {"margins": 3}, r"margins=3: a list of margins in pixels, such as \[3\]"),
        ("lra32", {"rendering": "scipy"}, "rendering='scipy': must be one of float, eight_bit"),
        ("lra32", {"dash_thickness": 0.7}, "dash_thickness=0.7: .*multiple of 0.5"),
        ("lra128", {"side": 64}, "start_border=40 .*side=64"),
    ],
)
def test_a_wrong_parameter_is_named_with_its_value_and_what_is_allowed(
    preset: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        spec_of(preset, **changes)


def test_contours_that_never_fit_are_an_error_and_no_endless_search() -> None:
    crowded = spec_of("lra32", side=16, seed_distance=3, contour_length=100)
    with pytest.raises(ValueError, match=r"contour_length=100: .*do not fit into side=16"):
        generate(crowded, 0, "train", 0, 1)
    with pytest.raises(ValueError, match="start_border=63: no first dash fits"):
        generate(spec_of("lra128", start_border=63), 0, "train", 0, 1)


@pytest.mark.parametrize("missing", ["numba", "PIL"])
def test_without_the_extra_packed_images_are_read_and_generating_says_what_to_install(
    missing: str, tmp_path: Path
) -> None:
    packed = prepare(tmp_path, SPEC, 0, "val", 3, workers=1)
    program = f"""
import sys
sys.modules[{missing!r}] = None
from flashtrain.data.pathfinder import PackedImages, generate, spec_of
print(PackedImages.open(sys.argv[1]).labels.tolist())
generate(spec_of("lra32"), 0, "val", 0, 1)
"""
    done = run(program, packed.path)
    assert json.loads(done.stdout) == packed.labels.tolist()
    assert "ImportError" in done.stderr
    assert "pip install 'flashtrain[pathfinder]'" in done.stderr


def test_a_packed_file_holds_the_same_images_for_one_and_three_workers(tmp_path: Path) -> None:
    made = generate(SPEC, 5, "val", 0, 301, targets=True)
    files = [prepare(tmp_path / str(n), SPEC, 5, "val", 301, targets=True, workers=n) for n in (1, 3)]
    assert files[0].path.read_bytes() == files[1].path.read_bytes()
    for part in ("images", "labels", "targets", "markers"):
        assert np.array_equal(getattr(files[1], part), getattr(made, part))
        assert getattr(files[1], part).dtype == getattr(made, part).dtype
    assert len(files[0]) == 301
    assert files[0].spec.as_dict() == SPEC.as_dict()
    assert (files[0].seed, files[0].split) == (5, "val")


def test_targets_are_an_option_that_changes_no_image(tmp_path: Path) -> None:
    plain, dense = (prepare(tmp_path, SPEC, 0, "train", 20, targets=targets, workers=1) for targets in (False, True))
    assert plain.targets is None
    assert dense.targets is not None
    assert plain.path != dense.path
    assert plain.fingerprint == dense.fingerprint
    other = prepare(tmp_path, SPEC, 1, "train", 20, workers=1)
    assert other.fingerprint != plain.fingerprint


def test_a_second_call_finds_the_file_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(tmp_path, SPEC, 0, "train", 5, workers=1)
    monkeypatch.setattr(packer, "generate", None)
    second = prepare(str(tmp_path), replace(SPEC, continuity=1, start_border=14), 0, "train", 5, workers=2)
    assert second.path == first.path
    assert np.array_equal(pickle.loads(pickle.dumps(second)).images, first.images)
    assert len(pickle.dumps(second)) < 1000


def test_a_file_of_other_images_under_the_same_name_is_refused(tmp_path: Path) -> None:
    path = prepare(tmp_path, SPEC, 0, "train", 5, workers=1).path
    prepare(tmp_path, spec_of("lra32", contour_length=9), 1, "train", 5, workers=1).path.replace(path)
    with pytest.raises(ValueError, match=r"made with seed=1, not 0; contour_length=9, not 6; .*delete this file"):
        prepare(tmp_path, SPEC, 0, "train", 5)


@pytest.mark.parametrize(
    ("key", "value"), [("split", "../train"), ("split", ""), ("count", 0), ("workers", 0), ("workers", -1)]
)
def test_a_wrong_argument_is_named(tmp_path: Path, key: str, value: Any) -> None:
    arguments = {"split": "train", "count": 1, "workers": 1} | {key: value}
    with pytest.raises(ValueError, match=f"{key}={value!r}: "):
        prepare(tmp_path, SPEC, 0, **arguments)


@pytest.mark.parametrize("drop", [1, 50, 6_000])
def test_a_truncated_file_is_refused(tmp_path: Path, drop: int) -> None:
    path = prepare(tmp_path, SPEC, 0, "train", 5, workers=1).path
    path.write_bytes(path.read_bytes()[:-drop])
    with pytest.raises(ValueError, match=r"\.pathfinder: truncated: .*make it again"):
        prepare(tmp_path, SPEC, 0, "train", 5)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it is empty"),
        (b"\x89PNG" * 5_000, "not a file of packed Pathfinder images"),
        (b"FLPATHFD" + bytes(100), "truncated within its header"),
        (b"FLPATHFD" + (99).to_bytes(4, "little") + bytes(9_000), "version 99"),
        (b"FLPATHFD" + (1).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"{'a':" + bytes(9_000), "damaged"),
        (b"FLPATHFD" + (1).to_bytes(4, "little") + (2).to_bytes(4, "little") + b"{}" + bytes(9_000), "'generator'"),
        (b"FLPATHFD" + (1).to_bytes(4, "little") + (2).to_bytes(4, "little") + b"[]" + bytes(9_000), "damaged"),
        (None, "there is no such packed file"),
    ],
)
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "foreign.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"foreign\.bin: .*{says}"):
        PackedImages.open(path)


def test_an_interrupted_preparation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(3))

    def stop_at_the_third(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return generate(*arguments)

    monkeypatch.setattr(packer, "generate", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        prepare(tmp_path, SPEC, 0, "train", 1000, workers=1)
    assert visible(tmp_path) == []
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
def test_a_killed_preparation_leaves_no_file_and_no_worker_and_can_be_repeated(tmp_path: Path) -> None:
    program = """
import sys
from flashtrain.data.pathfinder import prepare, spec_of
prepare(sys.argv[1], spec_of("lra32", contour_length=6), 0, "train", 5_000_000, workers=2)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        unfinished = wait_for(lambda: [p for p in tmp_path.glob(".*.unfinished") if p.stat().st_size > 10_000])
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(workers) >= 2
        process.send_signal(signal.SIGKILL)
    assert wait_for(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
    assert visible(tmp_path) == []
    unfinished[0].rename(tmp_path / f".{small_name(tmp_path)}.unfinished")
    assert len(prepare(tmp_path, SPEC, 0, "train", 3, workers=1)) == 3
    assert not list(tmp_path.glob(".*.unfinished"))


def small_name(folder: Path) -> str:
    """The name of the file of three images."""
    path = prepare(folder / "elsewhere", SPEC, 0, "train", 3, workers=1).path
    return path.name


def wait_for(condition: Any, seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_no_half(tmp_path: Path) -> None:
    program = """
import resource, signal, sys
from flashtrain.data.pathfinder import generate, prepare, spec_of
spec = spec_of("lra32", contour_length=6)
generate(spec, 0, "train", 0, 1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
prepare(sys.argv[1], spec, 0, "train", 1000, workers=1)
"""
    done = run(program, tmp_path)
    assert "OSError" in done.stderr
    assert f"cannot write {tmp_path}/pathfinder32-train" in done.stderr
    assert visible(tmp_path) == []
    assert not list(tmp_path.glob(".*.unfinished"))


def test_a_disk_without_room_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer, "generate", None)
    with pytest.raises(OSError, match=r"pathfinder32-train-.* needs [\d,]+ MiB, [\d,]+ MiB are free"):
        prepare(tmp_path, SPEC, 0, "train", 10**12, workers=1)


def test_the_script_draws_packs_and_counts(tmp_path: Path) -> None:
    def script(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "scripts/pathfinder.py", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)

    common = ["--preset", "lra32", "--set", "contour_length=6", "--count"]
    drawn = script("sheet", *common, "7", "--targets", "--out", str(tmp_path / "sheet.png"))
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG"), drawn.stderr
    made = script("make", *common, "9", "--split", "val", "--workers", "2", "--out", str(tmp_path))
    assert len(prepare(tmp_path, SPEC, 0, "val", 9)) == 9
    assert prepare(tmp_path, SPEC, 0, "val", 9).fingerprint in made.stdout
    counted = script("statistics", *common, "40")
    assert "label 1" in counted.stdout
    assert "images a second" in counted.stdout
    wrong = script("statistics", "--set", "sides=3")
    assert wrong.returncode == 2
    assert "did you mean side?" in wrong.stderr
    none = script("sheet", "--count", "0", "--out", str(tmp_path / "none.png"))
    assert (none.returncode, "--count 0: must be at least 1" in none.stderr) == (2, True)


def test_presets_are_named_in_the_error_and_complete() -> None:
    assert {f"{kind}{side}" for kind in ("lra", "documented") for side in (32, 64, 128, 256)} == set(PRESETS)
    assert get_args(PathfinderPreset) == tuple(PRESETS)  # what a configuration may say

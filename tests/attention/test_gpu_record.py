"""The kernels that are here are the ones that passed on a GPU."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from tests.attention.record import COMMAND, RECORD, attention_hash, write_record


@pytest.mark.skipif("FLASHTRAIN_GPU_RECORD" in os.environ, reason="this run makes the record anew")
def test_the_gpu_tests_passed_with_the_attention_code_that_is_here():
    record = json.loads(RECORD.read_text())
    assert record["error"] == 0
    assert record["failed"] == 0, record["failed_tests"]
    assert record["passed"] > 200
    assert record["attention_hash"] == attention_hash(), f"the attention code has changed: on a GPU, run {COMMAND}"


def test_a_record_counts_the_attention_tests_that_used_the_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
    stats = {
        "passed": ["tests/attention/test_layouts.py::test_a[1]", "tests/models/test_gpt.py::test_b"],
        "failed": [
            "tests/attention/test_on_gpu.py::test_c",
            "tests/attention/test_gpu_record.py::test_d",
            "tests/attention/test_compile_hopper_without_gpu.py::test_e",
        ],
        "error": ["tests/attention/test_plan.py::test_f", "tests/data/test_bytes.py::test_g"],
    }
    reporter = SimpleNamespace(
        stats={name: [SimpleNamespace(nodeid=test) for test in tests] for name, tests in stats.items()},
        config=SimpleNamespace(invocation_params=SimpleNamespace(args=("-q", "-k", "a or b"))),
    )
    write_record(reporter, tmp_path / "record.json")
    record = json.loads((tmp_path / "record.json").read_text())
    assert {name: record[name] for name in ("passed", "failed", "error", "skipped")} == {
        "passed": 1, "failed": 1, "error": 1, "skipped": 0,
    }  # fmt: skip
    assert record["failed_tests"] == ["tests/attention/test_on_gpu.py::test_c", "tests/attention/test_plan.py::test_f"]
    assert record["command"] == "python -m pytest -q -k 'a or b'"

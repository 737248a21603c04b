"""The kernels that are here are the ones that passed on a GPU."""

import json

from tests.attention.record import COMMAND, RECORD, attention_hash


def test_the_gpu_tests_passed_with_the_attention_code_that_is_here():
    record = json.loads(RECORD.read_text())
    assert record["error"] == 0
    assert record["failed"] == 0, record["failed_tests"]
    assert record["passed"] > 200
    assert record["attention_hash"] == attention_hash(), f"the attention code has changed: on a GPU, run {COMMAND}"

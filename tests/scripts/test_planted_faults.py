"""Every planted fault can still be planted where it is meant to be, and only what turns tests red counts as found."""

from __future__ import annotations

import planted_faults
import pytest
from faults import PLAN, Fault
from faults_several_gpus import ONE, SHARES
from planted_faults import FAULTS

WINDOWS = "attention/test_plan.py::test_several_windows_join_to_the_narrowest"
PACKINGS = "attention/test_plan.py::test_two_packings_of_one_shape_never_share_a_plan_and_one_packing_always_does"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_the_sources_and_its_tests_are_there(fault: Fault) -> None:
    source = (planted_faults.ROOT / planted_faults.PACKAGE / fault.file).read_text()
    assert fault.right in source and fault.right != fault.wrong
    assert fault.tests
    for test in fault.tests:
        file, _, function = test.partition("::")
        text = (planted_faults.ROOT / planted_faults.TESTS / file).read_text()
        assert f"def {function.split('[')[0]}(" in text if function else text


def test_names_of_faults_tell_them_apart() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_fault_is_found_only_if_all_of_its_tests_turn_red() -> None:
    fault = Fault("windows join to the widest", PLAN, "left = min(left,", "left = max(left,", (WINDOWS,))
    assert planted_faults.survives(fault) == (False, WINDOWS.split("::")[1])
    both = Fault(fault.name, fault.file, fault.right, fault.wrong, (WINDOWS, PACKINGS))
    assert planted_faults.survives(both) == (True, PACKINGS.split("::")[1])


@pytest.mark.parametrize(
    "test",
    [
        f"{ONE}::test_shards_and_their_positions_belong_together",
        f"{SHARES}::test_the_shares_of_a_step_are_the_step_of_one_process",
    ],
)
def test_no_test_turns_red_for_what_the_copy_lacks(test: str) -> None:
    harmless = Fault("harmless", PLAN, "left = min(left,", "left = min( left,", (test,))
    assert planted_faults.survives(harmless) == (True, test.split("::")[1])


@pytest.mark.parametrize(
    ("right", "tests", "message"),
    [
        ("no such line", WINDOWS, "no longer contains"),
        ("left = min", "attention/test_plan.py::test_no_such", "pytest ended"),
    ],
)
def test_a_fault_that_cannot_be_planted_or_tested_stops_the_run(right: str, tests: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        planted_faults.survives(Fault("broken", PLAN, right, right + " ", (tests,)))

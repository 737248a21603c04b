"""The faults in training steps and in what is kept of them that `planted_faults` plants."""

from __future__ import annotations

from faults import Fault

# Files in flashtrain.
LANGUAGE, BATCH, TASK = "training/language.py", "data/batch.py", "training/task.py"
CURRICULUM = "training/curriculum.py"

# Tests in tests.
RECORDED = "training/test_recording.py"
ON_TEXT = f"{RECORDED}::test_recorded_steps_on_text_equal_launched_ones_whatever_their_targets[dense]"

FAULTS = [
    Fault(
        "recorded: the number of targets of the recording",
        LANGUAGE,
        "return (batch.targets != IGNORE).sum()",
        "return batch.num_targets",
        (ON_TEXT,),
    ),
    Fault(
        "recorded: the targets of the recording",
        BATCH,
        'for name in ("tokens", "targets", "positions"):',
        'for name in ("tokens", "positions"):',
        (ON_TEXT,),
    ),
    Fault(
        "compiled: eight versions",
        TASK,
        "_VERSIONS = 64",
        "_VERSIONS = 8",
        (f"{RECORDED}::test_a_compiled_model_takes_every_length_of_a_warm_up",),
    ),
    Fault(
        "curriculum: the running mean keeps the stage before",
        CURRICULUM,
        "return step - self.first_step",
        "return self.scheduled(step)",
        ("training/test_curriculum.py::test_the_running_mean_soon_forgets_the_stage_before",),
    ),
]

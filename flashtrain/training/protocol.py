"""What a result on images may be compared with: how the images came, and what was learned beside the labels.

Weights that another run learned bring its protocol along: whoever starts from a run that saw fresh images without end,
or dense targets, is no longer within the Long Range Arena's protocol, whatever the run's own images are.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from flashtrain.interchange.classifier_folder import RESULT

GENERATOR, FIXED_SET = "generator", "fixed set"


def said_of(name: str | None, runs_dir: str) -> dict[str, Any]:
    """What a run's summary or an exported classifier's result says; empty where there is none.

    Args:
        name: as in `model.init_from`; a checkpoint in a run's folder is that run's.
    """
    if name is None:
        return {}
    for place in (Path(name), Path(runs_dir) / name):
        folder = place.parent.parent if place.parent.name == "checkpoints" else place
        for file in (folder / "summary.json", folder / RESULT):
            with contextlib.suppress(OSError, ValueError):  # that weights can be read matters more
                said: dict[str, Any] = json.loads(file.read_text())
                return said
    return {}


def joined(own: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The facts `protocol`, `dense_target` and `pretraining` of a run and of the weights that it began with."""
    generator = GENERATOR in (own["protocol"], before.get("protocol"))
    return {
        "protocol": GENERATOR if generator else FIXED_SET,
        "dense_target": own["dense_target"] or bool(before.get("dense_target")),
        "pretraining": own["pretraining"] or before.get("pretraining"),
    }

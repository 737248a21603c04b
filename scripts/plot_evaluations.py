"""Language models beside each other: loss by position in one panel, and the passkeys that each finds.

    python scripts/plot_evaluations.py benchmarks/longer_*.json --out docs/images/longer.png
    python scripts/plot_evaluations.py a.json b.json --labels "as it is" YaRN --out longer.png

Reads what scripts/evaluate.py --out has written.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from measuring.language_report import draw


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files of scripts/evaluate.py")
    parser.add_argument("--labels", nargs="+", help="one for each file (how it was extended, else the run's id)")
    parser.add_argument("--out", type=Path, required=True, help="picture to write")
    arguments = parser.parse_args(argv)
    try:
        results = [read(path) for path in arguments.results]
        labels = arguments.labels or [result.get("extended") or result["run"]["id"] for result in results]
        if len(labels) != len(results):
            raise ValueError(f"--labels: {len(labels)} labels for {len(results)} files; give one for each")
        draw(list(zip(labels, results, strict=True)), arguments.out)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    return 0


def read(path: Path) -> dict[str, Any]:
    """A result of a language model.

    Raises:
        ValueError: it is something else.
    """
    result = json.loads(path.read_text())
    if not isinstance(result, dict) or not isinstance(result.get("run"), dict) or "context" not in result:
        raise ValueError(f"{path}: not what scripts/evaluate.py writes about a language model")
    return result


if __name__ == "__main__":
    sys.exit(main())

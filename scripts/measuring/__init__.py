"""What the benchmark scripts share: the facts of the machine, clocks, the attention functions that are compared, the
check of their results, and the JSON they leave behind.

The scripts run from a clone, installed or not, as train.py does.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

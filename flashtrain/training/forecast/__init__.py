"""What a run will cost before it starts: memory by part, time, the longest sequence, and what to change.

forecast = Forecast.of(build_case(config, vocab_size, device), device_bytes)
"""

from __future__ import annotations

from flashtrain.training.forecast.case import Case
from flashtrain.training.forecast.choose import SAFE, choose, describe
from flashtrain.training.forecast.gpus import GPUS, Gpu, gpu_called
from flashtrain.training.forecast.report import Forecast

__all__ = ["GPUS", "SAFE", "Case", "Forecast", "Gpu", "choose", "describe", "gpu_called"]

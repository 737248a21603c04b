"""flashtrain's front door: python train.py [group=option] [key=value] ..., python train.py --help."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from flashtrain import sweep
from flashtrain.config import ConfigError
from flashtrain.config.command_line import check_overrides
from flashtrain.config.composed import configured
from flashtrain.config.started import check_started, end_at_once, end_with_parent, started_again, started_processes

ROOT = Path(__file__).resolve().parent
exit_code = 0


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed: DictConfig) -> float | None:
    """One run; under -m, one job of a sweep, which is a run in a process of its own."""
    global exit_code
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return sweep.run_job(ROOT / "train.py")
    # Unresolved: what is wrong with a value is told below, with its key.
    arguments: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    try:
        started, again = started_processes(os.environ), started_again(os.environ)
        config, changes = configured(composed, arguments, started, again)
    except ConfigError as error:
        print(error, file=sys.stderr)
        exit_code = 1
        return None
    # torch and Lightning are imported here, once the configuration is right
    if config.trainer.devices > 1 and started is None and not config.plan.only:
        from flashtrain.training.distributed.launch import launch

        exit_code = launch(config, [sys.executable, *sys.argv])
    else:
        from flashtrain.training.run import run

        exit_code = run(config, changes)
    return None


if __name__ == "__main__":
    end_with_parent()
    try:
        check_overrides(sys.argv[1:], ROOT / "conf")
        check_started(started_processes(os.environ), sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))
    sweep_id = sweep.prepare(sys.argv)
    try:
        main()
    except KeyboardInterrupt:  # a run catches it itself: this came before it began, or between the jobs of a sweep
        print("stopped by Ctrl-C", file=sys.stderr)
        exit_code = 130
    if started_processes(os.environ) is not None:
        end_at_once(exit_code)
    reported = sweep.report(sweep_id) if sweep_id else 0
    sys.exit(exit_code or reported)

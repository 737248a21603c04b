"""flashtrain's front door: python train.py [group=option] [key=value] ..., python train.py --help."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flashtrain import sweep
from flashtrain.config import ConfigError, build
from flashtrain.config.command_line import check_overrides
from flashtrain.config.from_folder import with_folder
from flashtrain.config.resume import resumed

ROOT = Path(__file__).resolve().parent
exit_code = 0


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(composed: DictConfig) -> float | None:
    """One run; under -m, one job of a sweep, which is a run in a process of its own."""
    global exit_code
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return sweep.run_job(ROOT / "train.py")
    # Unresolved: what is wrong with a value is told below, with its key.
    hydra_settings: Any = OmegaConf.to_container(HydraConfig.instance().cfg, resolve=False)
    arguments = hydra_settings["hydra"]["overrides"]["task"]
    try:
        raw: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
        raw, changes = resumed(raw, arguments) if raw.get("resume") else (with_folder(raw, arguments), [])
        config = build(raw)
    except (ConfigError, OmegaConfBaseException) as error:
        print(error, file=sys.stderr)
        exit_code = 1
        return None
    from flashtrain.training.run import run  # torch and Lightning are imported here, once the configuration is right

    exit_code = run(config, changes)
    return None


if __name__ == "__main__":
    try:
        check_overrides(sys.argv[1:], ROOT / "conf")
    except ConfigError as error:
        sys.exit(str(error))
    sweep_id = sweep.prepare(sys.argv)
    main()
    sys.exit(sweep.report(sweep_id) if sweep_id else exit_code)

"""The run's configuration: sizes such as 16k, typed sections, and every problem reported at once.

Nothing here imports torch or Lightning, so a mistyped key is told within a second.
"""

from flashtrain.config.build import ConfigError, build, to_dict
from flashtrain.config.schema import Config
from flashtrain.config.sizes import format_size, parse_duration, parse_size

__all__ = ["Config", "ConfigError", "build", "format_size", "parse_duration", "parse_size", "to_dict"]

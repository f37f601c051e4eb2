"""Runs the show: configuration, command line, training loop, run folder, checkpoints.

The public names of Greenroom for Python programs:

>>> from services import MAACConfig, MAACTrainer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.config import IACConfig, MAACConfig, SMARLConfig
    from services.smarl.trainer import SMARLTrainer
    from services.trainer import IACTrainer, MAACTrainer

__all__ = ["IACConfig", "IACTrainer", "MAACConfig", "MAACTrainer", "SMARLConfig", "SMARLTrainer"]


def __getattr__(name: str) -> Any:
    # Loaded on demand: the command line must answer `--help` without importing torch and Ray.
    if name.endswith("Config") and name in __all__:
        from services import config

        return getattr(config, name)
    if name in __all__:
        from services import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

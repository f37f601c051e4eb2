"""Which settings belong to which `algorithm`.  An algorithm joins by its entries here."""

from __future__ import annotations

from services.config.base import ConfigModel
from services.config.common import CommonRun
from services.config.run import LANGUAGE_ALGORITHMS, RunConfig
from services.config.smarl import SMARLConfig, SMARLRunConfig

ALGORITHMS: dict[str, type[ConfigModel]] = {**LANGUAGE_ALGORITHMS, "smarl": SMARLConfig}
"""The model that reads `args`."""

RUNS: dict[str, type[CommonRun]] = {**dict.fromkeys(LANGUAGE_ALGORITHMS, RunConfig), "smarl": SMARLRunConfig}
"""The model that reads the whole file."""


def run_model(algorithm: object) -> type[CommonRun]:
    """The model of a file with this `algorithm`; of a language-model run, if it is unknown."""
    return RUNS.get(algorithm, RunConfig) if isinstance(algorithm, str) else RunConfig

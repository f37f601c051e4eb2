"""The settings of a sweep: the section `sweep` of a file that is otherwise a run's configuration.

Help texts stand here and nowhere else.  What the search space means is the business of `services.sweep.space`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from services.config.base import ConfigModel
from services.config.common import CommonRun
from services.config.run import RunConfig


class SweepConfig(ConfigModel):
    """Which settings of the run are searched, and how. A report is what a trial tells of itself."""

    space: dict[str, Any] = Field(
        min_length=1,
        description="What is searched: a setting of the run (`engine.max_model_len`; without a dot, one of `args`) and "
        "a distribution: {uniform: [0, 1]}, {loguniform: [1.0e-4, 1.0e-2]}, {int: [1, 8]} with both ends included, "
        "{choice: [a, b]}, or {grid: [a, b]} to try each.",
        json_schema_extra={"accepts": "settings with distributions"},
    )
    metric: str | None = Field(
        default=None,
        min_length=1,
        description="What is compared, as metrics.jsonl calls it; null: `return_mean` with SMARL, else "
        "`turn_1/expected_return`, the reward of all turns.",
    )
    mode: Literal["max", "min"] = Field(default="max", description="Whether more of it is better, or less.")
    num_samples: int = Field(
        default=10, ge=1, description="Trials; with a grid: how often each of its points is tried."
    )
    search: Literal["random", "optuna"] = Field(
        default="random",
        description="How values are picked; `optuna` learns from the trials that have ended.",
    )
    scheduler: Literal["fifo", "asha", "pbt"] = Field(
        default="fifo",
        description="`fifo`: every trial to its end; `asha`: bad ones are stopped early; `pbt`: bad ones go on from a "
        "copy of a good one with changed values.",
    )
    grace_period: int = Field(default=1, ge=1, description="ASHA: reports before a trial may be stopped.")
    reduction_factor: float = Field(
        default=3, gt=1, description="ASHA: of so many trials one goes on at each decision."
    )
    perturbation_interval: int = Field(default=5, ge=1, description="PBT: reports between two decisions.")
    quantile_fraction: float = Field(
        default=0.25, gt=0, le=0.5, description="PBT: share of trials that copy, and that are copied."
    )
    report_interval: int = Field(
        default=1,
        ge=1,
        description="Update rounds (SMARL: rounds of episodes) between two reports; a report is their mean.",
    )
    checkpoint_interval: int = Field(
        default=10,
        ge=1,
        description="Reports between two checkpoints, from which a trial that died goes on; with PBT it is "
        "`perturbation_interval`.",
    )
    max_concurrent: int | None = Field(
        default=None, ge=1, description="Most trials side by side; null: as many as the cluster has room for."
    )
    max_failures: int = Field(
        default=1, ge=0, description="How often a trial that died goes on from its checkpoint."
    )
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="Seed of what is picked.")

    def inconsistencies(self) -> list[tuple[str, str]]:
        found = []
        if self.search == "optuna" and self.scheduler == "pbt":
            text = "optuna does not go with scheduler=pbt, which changes values itself: set search=random"
            found.append(("search", text))
        if self.scheduler == "pbt" and self.num_samples < 2 and not self.has_grid:
            found.append(("num_samples", "1 is no population for scheduler=pbt: there must be at least 2"))
        if self.search == "optuna" and self.has_grid:
            found.append(("search", "optuna cannot try a grid: use choice, or set search=random"))
        return found

    @property
    def has_grid(self) -> bool:
        """Whether some setting is tried at every given value."""
        return any(isinstance(each, dict) and "grid" in each for each in self.space.values())

    @property
    def effective_checkpoint_interval(self) -> int:
        """Reports between two checkpoints."""
        return self.perturbation_interval if self.scheduler == "pbt" else self.checkpoint_interval

    def effective_metric(self, run: CommonRun) -> str:
        """What is compared."""
        return self.metric or ("turn_1/expected_return" if isinstance(run, RunConfig) else "return_mean")

"""What a sweep found: how each trial ended, the best one's configuration, a picture of every parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.config import dump_config
from services.sweep.space import Parameter
from services.sweep.trial import TrialPlan

BEST_FILE = "best.yaml"
PLOT_FILE = "reward_by_parameter.png"
_COLUMNS = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a trial ended."""

    trial: str
    values: dict[str, Any]
    """Parameter -> value; with PBT the last one."""
    score: float | None
    """What is compared, in its last report; None where there was none."""
    reports: int
    error: str | None

    def told(self) -> str:
        """On one line."""
        values = ", ".join(f"{name}={_short(value)}" for name, value in self.values.items())
        score = "nothing" if self.score is None else f"{self.score:.4f}"
        failed = f"; failed: {self.error}" if self.error else ""
        return f"{self.trial}: {score} after {self.reports} reports with {values}{failed}"


def outcomes_of(results: Any, metric: str) -> list[Outcome]:
    """One for each trial of a `ResultGrid`."""
    # A result knows its values only once it has reported.
    trials = results._experiment_analysis.trials
    return [
        Outcome(
            trial=Path(result.path).name,
            values=dict(trial.config),
            score=result.metrics.get(metric) if result.metrics else None,
            reports=int((result.metrics or {}).get("training_iteration", 0)),
            error=None if result.error is None else _reason(result.error),
        )
        for trial, result in zip(trials, results, strict=True)
    ]


def best_of(outcomes: Sequence[Outcome], mode: str) -> Outcome:
    """The one whose last report was best; one that failed only where all did."""
    sign = 1 if mode == "max" else -1
    scored = [(o.error is None, sign * o.score, o) for o in outcomes if o.score is not None]
    return max(scored, key=lambda entry: entry[:2])[2]


def write_best(
    folder: Path, plan: TrialPlan, parameters: Sequence[Parameter], outcomes: Sequence[Outcome], mode: str
) -> None:
    """Write `best.yaml`, which `greenroom train` takes, and draw the picture."""
    best = best_of(outcomes, mode)
    head = f"# The best of {len(outcomes)} trials by {plan.metric}. {best.told()}"
    config = plan.config(best.values)
    if config.run_name is not None:  # is the sweep's folder by now
        config = config.model_copy(update={"run_name": f"{config.run_name}-best"})
    (folder / BEST_FILE).write_text(f"{head}\n{dump_config(config)}")
    plot_parameters(folder / PLOT_FILE, parameters, outcomes, plan.metric, best)


def plot_parameters(
    path: Path, parameters: Sequence[Parameter], outcomes: Sequence[Outcome], metric: str, best: Outcome
) -> None:
    """Draw the metric of all trials against each parameter."""
    # Imported here, for it takes a second that nobody else need spend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(parameters))
    rows = -(-len(parameters) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.5 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    shown = [outcome for outcome in outcomes if outcome.score is not None]
    for axes, parameter in zip(figure.subplots(rows, columns, squeeze=False).flat, parameters, strict=False):
        _plot(axes, parameter, shown, best)
        axes.set(xlabel=parameter.name, ylabel=metric)
    for axes in figure.axes[len(parameters) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=120)


def _plot(axes: Any, parameter: Parameter, outcomes: Sequence[Outcome], best: Outcome) -> None:
    choices = [str(value) for value in parameter.values] if parameter.kind in ("choice", "grid") else None

    def place(outcome: Outcome) -> float:
        value = outcome.values[parameter.name]
        return float(value) if choices is None else float(choices.index(str(value)))

    axes.scatter([place(o) for o in outcomes], [o.score for o in outcomes], color="tab:blue", alpha=0.7)
    axes.scatter([place(best)], [best.score], color="tab:orange", label="best", zorder=3)
    if choices is not None:
        axes.set_xticks(range(len(choices)), choices)
    else:
        low, high = parameter.values
        room = 0.03
        if parameter.kind == "loguniform":
            axes.set_xscale("log")
            axes.set_xlim(low * (low / high) ** room, high * (high / low) ** room)
        else:
            axes.set_xlim(low - room * (high - low), high + room * (high - low))
    axes.legend(loc="best", fontsize=8)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _reason(error: BaseException) -> str:
    """The last line of a remote traceback: the error itself."""
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).strip().splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__

"""A picture of a run: the return over episodes, with every change of the number of agents marked."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

FILE = "returns.png"


def plot_returns(run: Path) -> Path | None:
    """Draw `returns.png` from the run's metrics; None where there is nothing to draw."""
    logs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logs = [log for log in logs if "return_mean" in log]
    if len(logs) < 2:
        return None
    # Imported here, for it takes a second that nobody else need spend.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    episodes, returns = [log["episode"] for log in logs], [log["return_mean"] for log in logs]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(episodes, returns, color="tab:blue", alpha=0.3, linewidth=0.8)
    window = max(1, len(returns) // 40)
    smooth = [
        sum(part) / len(part) for k in range(len(returns)) if (part := returns[max(0, k - window) : k + 1])
    ]
    axes.plot(episodes, smooth, color="tab:blue", label=f"mean of {window + 1} rounds")
    evaluated = [(log["episode"], log["eval/return_mean"]) for log in logs if "eval/return_mean" in log]
    if evaluated:
        axes.plot(
            *zip(*evaluated, strict=True), "o", color="tab:orange", markersize=4, label="without exploration"
        )
    for before, log in pairwise(logs):
        if before["num_agents"] != log["num_agents"]:
            axes.axvline(before["episode"], color="tab:red", linestyle="--", linewidth=0.8)
            text = f" {before['num_agents']:.0f} → {log['num_agents']:.0f} agents"
            axes.text(before["episode"], axes.get_ylim()[1], text, color="tab:red", va="top", fontsize=8)
    axes.set(xlabel="episode", ylabel="return per agent", title=run.name)
    axes.legend(loc="lower right")
    path = run / FILE
    figure.savefig(path, dpi=120)
    return path

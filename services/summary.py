"""What a finished run says of itself: where it is, and how rewards or returns moved."""

from __future__ import annotations

import json
import re
from pathlib import Path

_TOLD = re.compile(r"turn_\d+/reward_mean|return_mean|team_return_mean")


def summarize(run: Path) -> str:
    """The run folder, and the mean of each turn's reward (SMARL: of the returns) over the first and the last tenth of
    the train logs."""
    logs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return "\n".join([f"run folder: {run}", *_movements(logs)])


def _movements(logs: list[dict[str, float]]) -> list[str]:
    lines = []
    for name in sorted({key for log in logs for key in log if _TOLD.fullmatch(key)}):
        values = [log[name] for log in logs if name in log]
        tenth = max(1, len(values) // 10)
        before, after = sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth
        lines.append(
            f"{name}: {before:.4f} in the first tenth of the run, {after:.4f} in the last ({after - before:+.4f})"
        )
    return lines

"""What a finished run says of itself: where it is, and how the reward moved."""

from __future__ import annotations

import json
from pathlib import Path

REWARD = "turn_1/reward_mean"


def summarize(run: Path) -> str:
    """The run folder, and the mean of each turn's reward over the first and the last tenth of the train logs."""
    lines = [f"run folder: {run}"]
    logs = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [log for log in logs if REWARD in log]
    if trained:
        tenth = max(1, len(trained) // 10)
        for name in sorted(
            key for key in trained[0] if key.startswith("turn_") and key.endswith("/reward_mean")
        ):
            first = [log[name] for log in trained[:tenth] if name in log]
            last = [log[name] for log in trained[-tenth:] if name in log]
            if first and last:
                before, after = sum(first) / len(first), sum(last) / len(last)
                moved = f"{before:.4f} in the first tenth of the run, {after:.4f} in the last ({after - before:+.4f})"
                lines.append(f"{name}: {moved}")
    return "\n".join(lines)

"""What sweep tests share: small runs of SMARL, and how they are swept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from services.sweep.report import Outcome
from services.sweep.sweep import Sweep, SweepFolder, load_sweep

SMARL: dict[str, Any] = {
    "algorithm": "smarl",
    "environment": {"name": "tests/services/sweep/paid.py:Paid", "options": {"pay": 1}},
    "agents": 2,
    "args": {
        "num_episodes": 6,
        "max_episode_steps": 4,
        "batch_size": 4,
        "hidden_sizes": [8],
        "target_hidden_size": 8,
        "target_interval": 4,
        "sync_interval": 4,
        "eval_interval": 0,
    },
    "run_name": "sweep",
}


def write(folder: Path, sweep: dict[str, Any], **changes: Any) -> Path:
    """The file of a sweep; `changes` replace settings of the run, those of `args` one by one."""
    args = {**SMARL["args"], **changes.pop("args", {})}
    path = folder / "config.yaml"
    path.write_text(
        yaml.safe_dump({**SMARL, "output_dir": str(folder), "args": args, **changes, "sweep": sweep})
    )
    return path


def run_sweep(folder: Path, sweep: dict[str, Any], **changes: Any) -> tuple[SweepFolder, dict[str, Outcome]]:
    """A whole sweep, and how its trials ended in the order in which they were made."""
    made = Sweep.create(*load_sweep(write(folder, sweep, **changes)))
    outcomes = {outcome.trial: outcome for outcome in made.fit()}
    return made.folder, dict(sorted(outcomes.items()))


def logs(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

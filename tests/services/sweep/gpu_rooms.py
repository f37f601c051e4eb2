"""Plans trials on a machine that claims to have two GPUs, in a process of its own; prints what came of it as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import ray

from services.config import ConfigError, parse_config
from services.config.sweep import SweepConfig
from services.sweep.resources import check_room, reserved_by
from services.sweep.space import read_space
from services.sweep.trial import TrialPlan

RUN = {
    "algorithm": "maac",
    "agent_model": "a",
    "critic_model": "b",
    "reward_func": "m:f",
    "train_dataset": "d.jsonl",
    "args": {"num_turns": 1},
}


def main() -> None:
    ray.init("local", num_cpus=8, num_gpus=2, include_dashboard=False, logging_level="ERROR")
    told = []
    for strategy, most in (("pack", None), ("pack", 1), ("spread", None)):
        run = parse_config({**RUN, "placement": {"strategy": strategy}})
        sweep = SweepConfig(space={"discount": {"uniform": [0.9, 1]}})
        parameters = read_space(sweep, run)
        plan = TrialPlan.of(run, sweep, parameters, Path("runs"))
        try:
            check_room(plan, parameters, most)
            group = reserved_by(plan, {"discount": 0.95})
            told.append({"bundles": group.bundles, "strategy": group.strategy})
        except ConfigError as error:
            told.append({"refused": error.problems[0]})
    print(json.dumps(told))


if __name__ == "__main__":
    main()

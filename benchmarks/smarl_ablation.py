"""What each part of SMARL is worth on the ball grid: final team return with parts taken out, at equal steps.

Run `python benchmarks/smarl_ablation.py [--episodes 1600] [--seeds 3]`.  All figures of a table are from one call.
"""

from __future__ import annotations

import argparse

import numpy as np
from smarl_runs import EXAMPLES, local_ray, measure, spread

VARIANTS = {
    "full SMARL": [],
    "random common action": ["args.common_policy=random"],
    "random target": ["args.target_policy=random"],
    "both random": ["args.common_policy=random", "args.target_policy=random"],
    "no central network": ["args.central_network=false"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1600, help="training episodes of every run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every variant")
    parser.add_argument("--eval-episodes", type=int, default=128, help="episodes of the final evaluation")
    arguments = parser.parse_args()
    variants = {name: [*own, f"args.num_episodes={arguments.episodes}"] for name, own in VARIANTS.items()}
    with local_ray():
        returns = measure(
            EXAMPLES / "smarl_grid.yaml", variants, range(arguments.seeds), arguments.eval_episodes
        )
    full = float(np.mean(returns["full SMARL"]))
    print(f"\nball_grid, 3 arms, {arguments.episodes} episodes, {arguments.seeds} seeds")
    print("| variant | team return | full SMARL earns |\n|---|---|---|")
    for name, values in returns.items():
        print(f"| {name} | {spread(values)} | {full / float(np.mean(values)):.2f} times |")


if __name__ == "__main__":
    main()

"""SMARL beside independent DDPG and BenchMARL's IDDPG and MADDPG on mpe2's simple_spread, at equal environment steps.

Run `python benchmarks/smarl_learning.py [--episodes 1600] [--seeds 3] [--benchmarl-python PATH]`.  PATH is a Python in
whose environment `benchmarl` and `mpe2` are installed; without it, only our own rows are measured.  Reward, episode
length, number of agents, networks, batch size, learning rate, noise and gradient steps are the same for all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smarl_runs import EXAMPLES, local_ray, measure, report, spread

from services.config import SMARLRunConfig, load_config
from services.smarl.blueprint import draw

CONFIG = EXAMPLES / "smarl_spread.yaml"
AGENTS = 3
BENCHMARL = Path(__file__).with_name("benchmarl_spread.py")

OURS = {
    "SMARL": [],
    "SMARL without a centre": ["args.central_network=false"],
    "independent DDPG": [
        f"environment.name={Path(__file__).resolve()}:plain_spread",
        "args.central_network=false",
        "args.replay=per_agent",
    ],
}


def plain_spread(num_agents: int, **options: Any) -> Any:
    """simple_spread with its own observations and actions: nothing is split, so there are no targets to choose."""
    from mpe2 import simple_spread_v3

    return simple_spread_v3.parallel_env(N=num_agents, **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1600, help="training episodes of every run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every algorithm")
    parser.add_argument("--eval-episodes", type=int, default=128, help="episodes of the final evaluation")
    parser.add_argument("--benchmarl-python", type=Path, help="interpreter that has BenchMARL")
    arguments = parser.parse_args()
    seeds, eval_episodes = range(arguments.seeds), arguments.eval_episodes
    # The length of an episode is stated to mpe2 itself, so that all rows are cut off by it.
    equal = [f"agents={AGENTS}", f"args.num_episodes={arguments.episodes}"]
    config = load_config(CONFIG, equal)
    assert isinstance(config, SMARLRunConfig)
    random = [*equal, "args.common_policy=random", "args.target_policy=random", "args.num_episodes=8"]
    variants = {"random": random, **{name: [*equal, *own] for name, own in OURS.items()}}
    with local_ray():
        returns = measure(CONFIG, variants, seeds, eval_episodes)
    if arguments.benchmarl_python is not None:
        returns |= benchmarl(arguments.benchmarl_python, config, seeds, eval_episodes)
    steps = arguments.episodes * config.args.max_episode_steps
    print(f"\nsimple_spread, {AGENTS} agents, {steps} environment steps, {arguments.seeds} seeds")
    print("| algorithm | team return |\n|---|---|")
    for name, values in returns.items():
        print(f"| {name} | {spread(values)} |")


def benchmarl(
    python: Path, config: SMARLRunConfig, seeds: Sequence[int], eval_episodes: int
) -> dict[str, list[float]]:
    """BenchMARL's final team returns with the settings of `config`."""
    returns: dict[str, list[float]] = {}
    for algorithm in ("iddpg", "maddpg"):
        name, started = f"BenchMARL {algorithm.upper()}", time.perf_counter()
        settings = {**_settings(config), "eval-episodes": eval_episodes}
        returns[name] = [_benchmarl_run(python, algorithm, {**settings, "seed": seed}) for seed in seeds]
        report(name, returns[name], started)
    return returns


def _settings(config: SMARLRunConfig) -> dict[str, object]:
    """What `benchmarl_spread.py` is told, from the configuration that our rows use."""
    args, rules, options = config.args, draw(config).worker.rules, config.environment.options
    return {
        "agents": AGENTS,
        "max-cycles": options["max_cycles"],
        "local-ratio": options["local_ratio"],
        "env-steps": args.num_episodes * args.max_episode_steps,
        "copies": config.workers.envs_per_runner * config.workers.num_env_runners,
        "batch-size": args.batch_size,
        "learning-rate": rules.actor_learning_rate,
        "discount": args.discount,
        "tau": args.tau,
        # Their noise is in units of the action, which ranges from 0 to 1; ours in halves of the range.
        "noise": args.exploration_noise / 2,
        "noise-end": args.exploration_noise_end / 2,
        "hidden": args.hidden_sizes,
    }


def _benchmarl_run(python: Path, algorithm: str, settings: Mapping[str, object]) -> float:
    command = [str(python), "-W", "ignore", str(BENCHMARL), algorithm]
    for name, value in settings.items():
        values = value if isinstance(value, list) else [value]
        command += [f"--{name}", *map(str, values)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return float(json.loads(done.stdout.splitlines()[-1])["team_return_mean"])


if __name__ == "__main__":
    main()

"""Trains BenchMARL's IDDPG or MADDPG on mpe2's simple_spread and prints the final team return.

`smarl_learning.py` runs it with the interpreter of another environment, in which BenchMARL, torchrl and mpe2 are
installed; it must not import anything of this project.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import count
from tempfile import TemporaryDirectory

import torch
from benchmarl.algorithms import IddpgConfig, MaddpgConfig
from benchmarl.environments.pettingzoo.common import PettingZooClass
from benchmarl.experiment import Experiment, ExperimentConfig
from benchmarl.models import MlpConfig
from mpe2 import simple_spread_v3
from torchrl.envs import EnvBase, PettingZooWrapper
from torchrl.envs.utils import ExplorationType, set_exploration_type

ALGORITHMS = {"iddpg": IddpgConfig, "maddpg": MaddpgConfig}


class Spread(PettingZooClass):  # type: ignore[misc]
    """BenchMARL's simple_spread, made by mpe2 as ours is, each copy with a seed of its own."""

    _copies = count()

    def get_env_fun(
        self, num_envs: int, continuous_actions: bool, seed: int | None, device: str
    ) -> Callable[[], EnvBase]:
        def make() -> EnvBase:
            env = simple_spread_v3.parallel_env(**self.config, continuous_actions=continuous_actions)
            own = 1000 * ((seed or 0) + 1) + next(self._copies)
            return PettingZooWrapper(env=env, return_state=True, seed=own, device=device)

        return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithm", choices=ALGORITHMS)
    for name in ("seed", "agents", "max-cycles", "env-steps", "copies", "batch-size", "eval-episodes"):
        parser.add_argument(f"--{name}", type=int, required=True)
    rates = ("local-ratio", "learning-rate", "discount", "tau", "noise", "noise-end")
    for name in rates:
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--hidden", type=int, nargs="+", required=True)
    with TemporaryDirectory() as folder:
        print(json.dumps({"team_return_mean": trained_return(parser.parse_args(), folder)}))


def trained_return(wanted: argparse.Namespace, folder: str) -> float:
    torch.set_num_threads(1)
    task = Spread(
        "SIMPLE_SPREAD",
        {"N": wanted.agents, "max_cycles": wanted.max_cycles, "local_ratio": wanted.local_ratio},
    )
    model = MlpConfig(num_cells=wanted.hidden, layer_class=torch.nn.Linear, activation_class=torch.nn.ReLU)
    experiment = Experiment(
        task=task,
        algorithm_config=ALGORITHMS[wanted.algorithm].get_from_yaml(),
        model_config=model,
        critic_model_config=model,
        seed=wanted.seed,
        config=_settings(wanted, folder),
    )
    experiment.run()
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        returns = [_episode(experiment, wanted.max_cycles) for _ in range(wanted.eval_episodes)]
    return sum(returns) / len(returns)


def _settings(wanted: argparse.Namespace, folder: str) -> ExperimentConfig:
    settings = ExperimentConfig.get_from_yaml()
    settings.save_folder, settings.loggers, settings.create_json = folder, [], False
    settings.render, settings.evaluation = False, False
    settings.gamma, settings.lr, settings.polyak_tau = wanted.discount, wanted.learning_rate, wanted.tau
    settings.max_n_frames = wanted.env_steps
    # A gradient step for each step of all copies, as ours.
    frames = wanted.copies * wanted.max_cycles
    settings.off_policy_n_envs_per_worker = wanted.copies
    settings.off_policy_collected_frames_per_batch = frames
    settings.off_policy_n_optimizer_steps = wanted.max_cycles
    settings.off_policy_train_batch_size = wanted.batch_size
    settings.off_policy_memory_size = 100_000
    settings.exploration_eps_init, settings.exploration_eps_end = wanted.noise, wanted.noise_end
    settings.exploration_anneal_frames = wanted.env_steps // 2
    return settings


def _episode(experiment: Experiment, max_cycles: int) -> float:
    """The team's return in one episode, summed over agents."""
    played = experiment.test_env.rollout(max_cycles, experiment.policy, break_when_any_done=True)
    return sum(float(played["next", group, "reward"].sum()) for group in experiment.group_map)


if __name__ == "__main__":
    main()

"""The training loop of SMARL: play episodes, learn at every step, sync with the centre, now and then train targets.

Reads top to bottom and owns the run's counters.  Between episodes the team may change and checkpoints are taken; inside
one, the target network is frozen, and while that trains, everything else waits (the seed's alternation).
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import ObjectLostError

from actors.smarl.chunk import Progress
from services.checkpoint import AfterRound, CheckpointStore
from services.config import SMARLRunConfig
from services.metrics import MetricsLogger
from services.smarl.blueprint import exploration_at
from services.smarl.report import Round, round_metrics
from services.smarl.runners import Collected, RunnerLostError
from services.smarl.system import TeamSystem
from services.stop_signals import StopSignals

logger = logging.getLogger(__name__)

_ATTEMPTS = 3


@dataclass(slots=True)
class TeamState:
    """Where a run stands between two episodes.  Random streams follow from these counters."""

    episode: int = 0
    """Episodes finished."""
    env_steps: int = 0
    """Steps of single environments: the step of every metric."""
    gradient_step: int = 0
    """Counts the steps at which agents learn (or would, were there enough to learn from)."""
    team_set_for: int = -1
    """The last entry of the schedule that has been applied."""
    reason: str = "interval"
    """Why the checkpoint was taken."""

    @property
    def step(self) -> int:
        return self.env_steps


@dataclass(slots=True)
class TeamRecorders:
    """Where a run writes down what happens."""

    metrics: MetricsLogger
    checkpoints: CheckpointStore
    show: Callable[[int, dict[str, float]], None]
    """Called with the episodes finished in a round and its metrics."""


@dataclass(slots=True)
class _Measured:
    """What a round of episodes gathers while it runs."""

    learned: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    distances: list[np.ndarray] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    env_steps: int = 0


class TeamLoop:
    """Trains until the configured episodes are done, or for `max_rounds` rounds of episodes side by side."""

    def __init__(
        self, config: SMARLRunConfig, system: TeamSystem, recorders: TeamRecorders, state: TeamState
    ) -> None:
        self._config, self._args = config, config.args
        self._system, self._to = system, recorders
        self.state = state
        self._signals = StopSignals(defer=lambda: True)
        self._checkpointed = state.episode
        self._has_targets = system.runners.has_targets

    def run(self, max_rounds: int | None = None, after_round: AfterRound | None = None) -> None:
        """Train.

        A signal ends the run after the episodes being played; an error, wherever it strikes, after the agents' present
        parameters have been written to a checkpoint.
        """
        rounds = 0
        with self._signals:
            try:
                while self.state.episode < self._args.num_episodes:
                    if max_rounds is not None and rounds >= max_rounds:
                        self._checkpoint("stopped after the asked number of rounds")
                        return
                    self._round()
                    rounds += 1
                    if after_round is not None:
                        after_round(lambda: self._checkpoint("asked for"))
                    self._signals.raise_if_asked()
            except BaseException as error:
                self._rescue(error)
                raise
        self._checkpoint("finished")

    def _round(self) -> None:
        """Episodes side by side, from start to end."""
        self._change_team()
        episodes = list(range(self.state.episode, self._round_end()))
        started = time.perf_counter()
        for attempt in range(_ATTEMPTS):
            try:
                measured, progress = self._play(episodes)
                break
            except RunnerLostError:
                if attempt + 1 == _ATTEMPTS:
                    raise
            except ObjectLostError as error:
                if attempt + 1 == _ATTEMPTS:
                    raise RunnerLostError(
                        f"what actors had made was lost with their node {_ATTEMPTS} times in a row: {error}"
                    ) from error
                logger.warning("a node died with what its actors had made; the episodes begin again")
                self._system.mend()
        self.state.episode = episodes[-1] + 1
        self.state.env_steps += measured.env_steps
        targets = self._train_targets(episodes, measured)
        round_seconds = time.perf_counter() - started
        metrics = round_metrics(
            Round(
                episodes=len(episodes),
                num_agents=self._system.num_agents,
                progress=progress,
                learned=measured.learned,
                distances=measured.distances,
                seconds={**measured.seconds, "round": round_seconds},
                env_steps=measured.env_steps,
            )
        )
        metrics |= targets
        metrics["restarts"] = float(self._system.restarts)
        metrics |= self._evaluate_if_due(episodes)
        self._to.metrics.log({**metrics, "episode": float(self.state.episode)}, self.state.env_steps)
        self._to.show(len(episodes), metrics)
        interval = self._config.checkpoint_interval
        if interval and any((e + 1) % interval == 0 for e in episodes):
            self._checkpoint("interval")

    def _play(self, episodes: list[int]) -> tuple[_Measured, list[Progress]]:
        """The steps of a round, and the learning between them."""
        measured = _Measured()
        how = exploration_at(self._args, episodes[0])
        system = self._system
        system.runners.start(episodes)
        step = 0
        while True:
            with _Timer(measured.seconds, "step"):
                collected = system.runners.collect(
                    self._config.workers.rollout_steps, how, system.workers.actors()
                )
            for sequences in collected.sequences:
                system.keeper.tell_later("observe", sequences)
            if self._args.common_policy == "learned":
                self._learn(collected, step, measured)
            step += collected.steps
            measured.env_steps += collected.env_steps
            if collected.over:
                break
        with _Timer(measured.seconds, "wait"):
            system.keeper.settle()
        return measured, collected.progress

    def _learn(self, collected: Collected, step: int, measured: _Measured) -> None:
        """A gradient step of every agent for each step collected, and the soft updates that fall between.

        The soft updates of step j come right after the gradient step of j, at j = 0, `sync_interval`, ... of the
        episode (the seed's pseudocode).
        """
        system, interval = self._system, self._args.sync_interval
        start = 0
        while start < collected.steps:
            next_sync = -(-(step + start) // interval) * interval
            stop = min(collected.steps, next_sync - step + 1)
            with _Timer(measured.seconds, "update"):
                learned = system.workers.learn(
                    start, stop, step + start, self.state.gradient_step, collected.chunks
                )
            self.state.gradient_step += stop - start
            for name, values in learned.items():
                measured.learned[name].append(values)
            has_learned = bool(len(next(iter(learned.values()))))
            if self._args.central_network and has_learned and step + stop - 1 == next_sync:
                with _Timer(measured.seconds, "sync"):
                    measured.distances.append(system.sync())
            start = stop

    def _train_targets(self, episodes: list[int], measured: _Measured) -> dict[str, float]:
        """Train the target network if one of `episodes` is due."""
        due = [episode for episode in episodes if episode % self._args.target_interval == 0]
        if not self._has_targets or self._args.target_policy == "random" or not due:
            return {}
        with _Timer(measured.seconds, "target"):
            metrics: dict[str, float] = self._system.keeper.tell("train_target", due[-1])
            self._system.keeper.remember()
            self._system.runners.set_target()
        return metrics

    def _round_end(self) -> int:
        """Episodes are played side by side up to the next change of the team."""
        episode = self.state.episode
        changes = [at for at in self._config.schedule if at > episode]
        return min([episode + self._system.runners.copies, self._args.num_episodes, *changes])

    def _change_team(self) -> None:
        """Apply what the schedule and commands have asked for since the last episodes."""
        system = self._system
        due = {
            at: n
            for at, n in self._config.schedule.items()
            if self.state.team_set_for < at <= self.state.episode
        }
        if due:
            self.state.team_set_for = max(due)
            wanted, present = due[max(due)], system.num_agents
            if wanted > present:
                system.add_agents(wanted - present)
            elif wanted < present:
                system.remove_agents(range(wanted, present))
        requests: list[tuple[int, list[int]]] = system.keeper.ask("take_requests")
        for add, remove in requests:
            system.change_team(add, remove)
        if due or requests:
            logger.info("episode %d: %d agents", self.state.episode, system.num_agents)

    def _evaluate_if_due(self, episodes: list[int]) -> dict[str, float]:
        interval = self._args.eval_interval
        if not interval or not any((episode + 1) % interval == 0 for episode in episodes):
            return {}
        returns = self._system.evaluate(range(self._args.eval_episodes), self._system.num_agents)
        return {
            "eval/return_mean": float(returns.mean()),
            "eval/team_return_mean": float(returns.sum(1).mean()),
        }

    def _checkpoint(self, reason: str) -> Path:
        latest = self._to.checkpoints.latest()
        if self._checkpointed == self.state.episode and latest is not None:
            return latest
        self.state.reason = reason
        path = self._to.checkpoints.write(self.state, lambda folder: self._system.save(str(folder)))
        self._checkpointed = self.state.episode
        logger.info("checkpoint %s (%s)", path, reason)
        return path

    def _rescue(self, error: BaseException) -> None:
        """Leave a checkpoint; a second failure must not hide the first."""
        try:
            self._checkpoint(f"{type(error).__name__}: {error}")
            run = self._to.checkpoints.folder.parent
            error.add_note(
                f"{self.state.episode} finished episodes are in {self._to.checkpoints.latest()}; continue with "
                f"`greenroom train --resume {run}`"
            )
        except Exception as second:
            error.add_note(f"and no checkpoint could be written: {second}")


class _Timer:
    """Adds the seconds spent inside to an entry."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        self._seconds[self._name] += time.perf_counter() - self._started

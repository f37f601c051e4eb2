"""All environment runners of a run, seen from the driver.

Owns how episodes are dealt to runners, and new runners for lost ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayActorError

from actors.recovery import recovering
from actors.smarl.chunk import Progress
from actors.smarl.runner import RunnerSpec, TeamRunner
from learners.smarl.common_action import Exploration
from services.waiting import fetch, wait_all

_ATTEMPTS = 3
_REMEDY = "Raise workers.timeout_s if the environment needs longer."


class RunnerLostError(RuntimeError):
    """A runner died in the middle of an episode; it has been replaced, and the episode has to begin again."""


@dataclass(frozen=True, slots=True)
class Collected:
    """A few steps of all runners."""

    chunks: list[Any]
    """References, for the workers."""
    sequences: list[Any]
    """References, for the coordinator; empty without a target network."""
    progress: list[Progress]
    """Of all runners that play."""
    steps: int
    """Steps of the longest chunk; runners whose episodes ended sooner have fewer."""
    env_steps: int
    """Steps of single environment copies."""

    @property
    def over(self) -> bool:
        return all(bool(p.over.all()) for p in self.progress)


class RunnerGroup:
    """`count` runners with `envs` environment copies each.

    Args:
        options: Ray options of each runner.
        target_weights: returns a reference to the target network's weights, for a new runner; None without one.
    """

    def __init__(
        self,
        spec: RunnerSpec,
        count: int,
        envs: int,
        num_agents: int,
        options: Callable[[int], dict[str, Any]],
        timeout_s: float,
        target_weights: Callable[[], Any] | None,
    ) -> None:
        self._spec, self._envs, self._num_agents, self._timeout_s = spec, envs, num_agents, timeout_s
        self._options = options
        self._target_weights = target_weights
        self._runners: list[Any] = []
        self._playing: list[Any] = []
        self._progress: dict[Any, Progress] = {}
        self.restarts = 0
        self._runners = [self._hire(k) for k in range(count)]
        fetch([r.ready.remote() for r in self._runners], "environment runners to start", timeout_s, _REMEDY)

    @property
    def has_targets(self) -> bool:
        return self._spec.pointer is not None

    @property
    def copies(self) -> int:
        """Episodes that can be played side by side."""
        return len(self._runners) * self._envs

    def set_target(self) -> None:
        """Bring every runner to the target network's present weights."""
        if self._target_weights is None:
            return
        for _ in range(_ATTEMPTS):
            weights = self._target_weights()
            calls = [r.set_target.remote(weights) for r in self._runners]
            # A successor starts with them.
            with suppress(RunnerLostError, ObjectLostError):
                self._ask(calls, self._runners, "runners to take weights")
                return
        raise RunnerLostError("environment runners could not be brought to the target network's weights")

    def seat(self, num_agents: int) -> None:
        """From the next episode on there are `num_agents` agents."""
        self._num_agents = num_agents
        calls = [r.seat.remote(num_agents) for r in self._runners]
        with suppress(RunnerLostError):  # a successor starts with the new team
            self._ask(calls, self._runners, "runners to change the team")

    def mend(self) -> None:
        """Replace who has died."""
        self._replace(self._runners)

    def start(self, episodes: Sequence[int]) -> None:
        """Begin `episodes`, dealt to the runners in order; runners without one stay idle."""
        dealt = [list(episodes[k : k + self._envs]) for k in range(0, len(episodes), self._envs)]
        self._playing = self._runners[: len(dealt)]
        calls = [r.start.remote(own) for r, own in zip(self._playing, dealt, strict=True)]
        self._progress = {}
        self._ask(calls, self._playing, "environments to start an episode")

    def collect(self, steps: int, how: Exploration, actors: Sequence[Any]) -> Collected:
        """Play up to `steps` steps with the actors that `actors` refer to.

        Raises:
            RunnerLostError: a runner died.
            ObjectLostError: the actors to play with were lost with their node.
        """
        playing = [r for r in self._playing if r not in self._progress or not self._progress[r].over.all()]
        returns = [r.collect.options(num_returns=3).remote(steps, how, *actors) for r in playing]
        news: list[Progress] = self._ask([each[2] for each in returns], playing, "environments to be stepped")
        self._progress |= dict(zip(playing, news, strict=True))
        return Collected(
            chunks=[each[0] for each in returns],
            sequences=[] if self._spec.pointer is None else [each[1] for each in returns],
            progress=[self._progress[r] for r in self._playing],
            steps=max(p.steps for p in news),
            env_steps=sum(p.alive for p in news),
        )

    def evaluate(self, episodes: Sequence[int], num_agents: int, actors: Sequence[Any]) -> np.ndarray:
        """Returns [episodes, N] without exploration, spread over the runners."""
        share = -(-len(episodes) // len(self._runners))
        dealt = [episodes[k : k + share] for k in range(0, len(episodes), share)]
        busy = self._runners[: len(dealt)]
        for _ in range(2):
            calls = [r.evaluate.remote(own, num_agents, *actors) for r, own in zip(busy, dealt, strict=True)]
            try:
                return np.concatenate(self._ask(calls, busy, "an evaluation"))
            except RunnerLostError:
                busy = self._runners[: len(dealt)]
        raise RunnerLostError("environment runners died twice in a row during an evaluation")

    def shutdown(self) -> None:
        for runner in self._runners:
            ray.kill(runner, no_restart=True)
        self._runners = []

    def _hire(self, number: int) -> Any:
        start = ray.remote(TeamRunner).options(**self._options(number), max_restarts=0)
        runner = start.remote(self._spec, self._num_agents, self._envs)
        if self._target_weights is not None:
            # A failure shows with the first step that is asked of it.
            runner.set_target.remote(self._target_weights())
        return runner

    def _ask(self, calls: list[Any], asked: list[Any], what: str) -> list[Any]:
        try:
            return fetch(calls, what, self._timeout_s, _REMEDY)
        except RayActorError as error:
            self._replace(asked)
            raise RunnerLostError(
                f"an environment runner died while the run waited for {what}: {error}"
            ) from error

    def _replace(self, asked: list[Any]) -> None:
        """New runners for those that have died."""
        for runner in list(asked):
            try:
                fetch([runner.ready.remote()], "an environment runner", self._timeout_s, _REMEDY)
            except RayActorError as error:
                self.restarts += 1
                with recovering("an environment runner", error, "a new one begins its episodes again"):
                    ray.kill(runner, no_restart=True)  # it may only be out of reach, and would keep its place
                    number = self._runners.index(runner)
                    self._runners[number] = successor = self._hire(number)
                    # If it dies in turn, the first step that is asked of it tells.
                    wait_all([successor.ready.remote()], "an environment runner", self._timeout_s, _REMEDY)

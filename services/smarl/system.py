"""A running SMARL system: coordinator, workers and runners, and the changes of the team that touch all three.

Owns the order in which they are told of a change.  When a change is due is the loop's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import ObjectLostError

from services.config import SMARLRunConfig
from services.ray_connection import connect
from services.shared_folder import check_shared
from services.smarl.blueprint import Blueprint
from services.smarl.keeper import CoordinatorKeeper
from services.smarl.places import TeamPlaces
from services.smarl.runners import RunnerGroup
from services.smarl.workers import WorkerGroup


class TeamSystem:
    """All actors of a run.

    Args:
        name: under which other processes find the coordinator.
        checkpoint: folder of a checkpoint to continue from.
        folder: into which the actors write; None if they never do.

    Raises:
        PlacementError: the cluster is too small.
        ConfigError: a node does not see `folder`.
        WaitLimitError: an actor was not ready in time.
    """

    def __init__(
        self,
        config: SMARLRunConfig,
        blueprint: Blueprint,
        name: str,
        checkpoint: str | None = None,
        folder: Path | None = None,
    ) -> None:
        connect()
        self._config = config
        self._has_targets = blueprint.space.has_targets
        self._places = TeamPlaces(config)
        try:
            if folder is not None:
                check_shared(folder, self._places.nodes())
            self._start(blueprint, name, checkpoint)
        except BaseException:
            self._places.release()  # ends what has been started in it
            raise

    def _start(self, blueprint: Blueprint, name: str, checkpoint: str | None) -> None:
        workers, places = self._config.workers, self._places
        first = next(iter(self._config.schedule.values()))
        self.keeper = CoordinatorKeeper(
            blueprint.coordinator, first, name, places.coordinator(), workers.timeout_s
        )
        self.workers = WorkerGroup(
            blueprint.worker,
            workers.agents_per_worker,
            places.worker,
            workers.timeout_s,
            lambda: self.keeper.ask("centre"),
        )
        if checkpoint is not None:
            self.keeper.ask("load", checkpoint)
        self.keeper.remember()
        identities: list[int] = self.keeper.ask("identities")
        self.workers.start(identities, *self.keeper.ask("initial_rows"))
        if checkpoint is not None:
            self.workers.load(checkpoint)
        self.runners = RunnerGroup(
            blueprint.runner,
            workers.num_env_runners,
            workers.envs_per_runner,
            len(identities),
            places.runner,
            workers.timeout_s,
            self._target_weights if self._has_targets else None,
        )

    @property
    def num_agents(self) -> int:
        return self.workers.num_agents

    @property
    def restarts(self) -> int:
        """Actors that died and were replaced."""
        return self.keeper.restarts + self.workers.restarts + self.runners.restarts

    def add_agents(self, count: int) -> None:
        """`count` agents join, with the centre's parameters."""
        self.change_team(count, [])

    def remove_agents(self, numbers: Sequence[int]) -> None:
        """Agents `numbers` leave; the others are numbered from 0 again."""
        self.change_team(0, numbers)

    def change_team(self, add: int, remove: Sequence[int]) -> None:
        """Agents `remove` leave, then `add` others join; environments only see who is there in the end."""
        if remove:
            self.keeper.tell("leave", list(remove))
            self.workers.leave(remove)
        if add:
            self.workers.join(self.keeper.tell("join", add))
        self.runners.seat(self.num_agents)

    def sync(self) -> np.ndarray:
        """Soft updates between the centre and every agent; returns the agents' distances to it before."""
        rows, firsts = self.workers.parameters(), self.workers.firsts
        order = range(len(firsts))
        if self._config.args.sync_order == "arrival":
            order = self.workers.arrival_order()  # type: ignore[assignment]
        pushed = [ref for k in order for ref in rows[2 * k : 2 * k + 2]]
        distances, back = self.keeper.sync([firsts[k] for k in order], pushed)
        pulled: list[Any] = [None] * len(rows)
        for place, k in enumerate(order):
            pulled[2 * k : 2 * k + 2] = back[2 * place : 2 * place + 2]
        self.workers.pull(pulled)
        return distances  # type: ignore[no-any-return]

    def evaluate(self, episodes: Sequence[int], num_agents: int) -> np.ndarray:
        """Returns [episodes, N] without exploration: of the agents' own actors, or of the central one for all where
        the number of agents is not the present one."""
        if num_agents == self.num_agents:
            try:
                return self.runners.evaluate(episodes, num_agents, self.workers.actors())
            except ObjectLostError:
                self.mend()
                return self.runners.evaluate(episodes, num_agents, self.workers.actors())
        actor, _ = self.keeper.ask("centre")
        return self.runners.evaluate(episodes, num_agents, [actor[None]])

    def mend(self) -> None:
        """After a node died: replace who was on it, and let go of what was lost with it."""
        self.keeper.mend()
        self.workers.mend()
        self.runners.mend()

    def save(self, folder: str) -> None:
        """Write everything that learning moves into `folder`."""
        self.keeper.settle()
        self.keeper.ask("save", folder)
        self.workers.save(folder)

    def shutdown(self) -> None:
        """End every actor and give the room back; safe to call when some have died."""
        for part in (self.runners, self.workers, self.keeper):
            part.shutdown()
        self._places.release()

    def _target_weights(self) -> Any:
        return self.keeper.reference("target_weights")

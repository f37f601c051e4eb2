"""The settings of a run's place in the cluster: strategy, and what each kind of actor asks Ray for.

Help texts stand here and nowhere else.  What is made of these settings is the business of `services.placement` and
`services.smarl.places`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.config import JsonDict

from services.config.base import ConfigModel

Strategy = Literal["pack", "spread", "per_agent_node"]

_Amounts = dict[str, Annotated[float, Field(gt=0)]]
"""Of custom resources, by their label."""


class CommonPlacement(ConfigModel):
    """What the placement of every run has."""

    strategy: Strategy = Field(
        default="pack",
        description="`pack`: on as few nodes as can be; `spread`: every actor on another node as far as there are "
        "nodes; `per_agent_node`: an agent's actors together, every agent on another node as far as there are nodes.",
    )
    timeout_s: float = Field(default=300, gt=0, description="Longest wait for these resources, in seconds.")
    wait_for_autoscaler: bool | None = Field(
        default=None,
        description="Wait that long also for nodes that are not there yet; null: where Ray reports an autoscaler. "
        "Otherwise a run that can never fit is refused at once.",
    )


def _per_kind(kinds: str) -> JsonDict:
    return {"accepts": f"for any of {kinds}: labels with amounts greater than 0"}


class PlacementConfig(CommonPlacement):
    """Where a run's actors go and what they ask Ray for; null is chosen from what the cluster has."""

    cpus_per_generation_worker: float | None = Field(
        default=None, ge=0, description="CPUs of one generation worker."
    )
    gpus_per_generation_worker: float | None = Field(
        default=None, ge=0, description="GPUs of one generation worker."
    )
    cpus_per_learner: float | None = Field(default=None, ge=0, description="CPUs of one learner.")
    gpus_per_learner: float | None = Field(default=None, ge=0, description="GPUs of one learner.")
    cpus_per_critic: float | None = Field(
        default=None, ge=0, description="CPUs of one critic learner; null: as any learner."
    )
    gpus_per_critic: float | None = Field(
        default=None, ge=0, description="GPUs of one critic learner; null: as any learner."
    )
    custom_resources: dict[Literal["generation_worker", "learner", "critic"], _Amounts] = Field(
        default_factory=dict,
        description="Custom resources of one actor of a kind, such as {learner: {big_memory: 1}}; `learner` means "
        "the policies' learners.",
        json_schema_extra=_per_kind("`generation_worker`, `learner`, `critic`"),
    )


class TeamPlacementConfig(CommonPlacement):
    """Where a SMARL run's actors go and what they ask Ray for."""

    cpus_per_coordinator: float | None = Field(
        default=None, ge=0, description="CPUs of the coordinator; null: `workers.cpus_per_actor`."
    )
    cpus_per_worker: float | None = Field(
        default=None, ge=0, description="CPUs of one DDPG worker; null: `workers.cpus_per_actor`."
    )
    cpus_per_runner: float | None = Field(
        default=None, ge=0, description="CPUs of one environment runner; null: `workers.cpus_per_actor`."
    )
    custom_resources: dict[Literal["coordinator", "worker", "runner"], _Amounts] = Field(
        default_factory=dict,
        description="Custom resources of one actor of a kind, such as {runner: {simulator: 1}}.",
        json_schema_extra=_per_kind("`coordinator`, `worker`, `runner`"),
    )

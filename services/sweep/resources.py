"""What a trial reserves: a bundle for each of its run's actors, all of them or none.

A trial that has its placement group can start everything it needs, and one that has not holds nothing: trials neither
wait for one another nor starve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.bundles import PlacementError, Resources
from services.composition import models_of
from services.config import CommonRun, ConfigError, RunConfig, SMARLRunConfig
from services.reservation import Terms, node_resources, refuse_impossible
from services.room import plan_room, terms_of
from services.smarl.places import TeamPlan
from services.sweep.space import Parameter
from services.sweep.trial import TrialPlan

_NEXT_TO_NOTHING = {"CPU": 0.0001}


@dataclass(frozen=True, slots=True)
class Needs:
    """The bundles of a run, and how it wants them."""

    driver: Resources
    """Of the trial's own process.  A language-model run's waits while its actors work, which share all CPUs."""
    bundles: list[Resources]
    terms: Terms
    numbered_gpus: bool
    """Whether its actors find GPUs by their numbers, whichever Ray reserved."""

    @property
    def everything(self) -> list[Resources]:
        """What the trial's placement group holds."""
        return [self.driver, *self.bundles]


def needs_of(config: CommonRun) -> Needs:
    """What a run reserves, on the nodes there are."""
    if isinstance(config, SMARLRunConfig):
        plan = TeamPlan(config)
        return Needs({"CPU": config.workers.cpus_per_actor}, plan.bundles, plan.terms, numbered_gpus=False)
    assert isinstance(config, RunConfig)
    models = models_of(
        config.args, config.agent_model, config.agents, config.critic_model, config.critics, config.tokenizer
    )
    count = len(models.critics)
    judges = [0] * config.args.num_agents if count == 1 else list(range(count))
    placement = plan_room(config, count, judges)
    actors = placement.everyone()
    numbered = any("runtime_env" in actor.options for actor in actors)
    return Needs({}, placement.bundles, terms_of(config, placement), numbered)


def reserved_by(plan: TrialPlan, values: dict[str, Any]) -> Any:
    """The `PlacementGroupFactory` of a trial.

    Values that make no run get next to nothing: the trial starts, says what is wrong with them, and ends.
    """
    from ray.tune import PlacementGroupFactory

    try:
        needs = needs_of(plan.config(values))
        refuse_impossible(needs.everything, needs.terms)
    except (ConfigError, PlacementError):
        return PlacementGroupFactory([{}, _NEXT_TO_NOTHING])
    # The run looks for its own bundles at the end.
    return PlacementGroupFactory([needs.driver, *needs.bundles], strategy=needs.terms.strategy)


def check_room(plan: TrialPlan, parameters: list[Parameter], max_concurrent: int | None) -> None:
    """Raise what speaks against the sweep as a whole.

    Raises:
        PlacementError: the cluster can never hold a trial.
        ConfigError: trials side by side would use the same GPUs.
    """
    configs = [plan.config({})]
    for parameter in parameters:
        for value in parameter.probes():
            try:
                configs.append(plan.config({parameter.name: value}))
            except ConfigError:
                continue  # makes sense with other values of other parameters alone
    several_gpus = any(node.get("GPU", 0) > 1 for node in node_resources())
    for config in configs:
        needs = needs_of(config)
        refuse_impossible(needs.everything, needs.terms)
        if needs.numbered_gpus and several_gpus and max_concurrent != 1:
            raise ConfigError(
                "placement.strategy: with pack, a run finds GPUs by their numbers, so trials side by side would use "
                "the same ones: set placement.strategy=spread, and no numbers in args.*_devices, or "
                "sweep.max_concurrent=1"
            )

"""Scenarios on a cluster of several raylets, each run as `python cluster_scenarios.py NAME ARGUMENTS`, answer in JSON.

A process of their own each: one process cannot be connected to two Ray clusters, and the other tests have theirs.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from language_runs import timeless
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from services import SMARLTrainer, shared_folder
from services.bundles import PlacementError
from services.config import ConfigError, parse_config
from services.reservation import Terms, free_resources, reserve
from services.trainer import trainer_of

HERE = Path(__file__).parent
# Ray needs half a minute to give a node up; here it is to notice within two seconds.
IMPATIENT = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1500,
    "health_check_failure_threshold": 3,
}
TEAM = {
    "num_episodes": 4, "max_episode_steps": 10, "batch_size": 16, "hidden_sizes": [16], "target_hidden_size": 16,
    "target_interval": 4, "sync_interval": 4, "eval_interval": 0,
}  # fmt: skip


def start(*nodes: dict[str, Any]) -> Cluster:
    """A cluster of raylets with `nodes`' resources; this process is a driver on the first."""
    own = {"object_store_memory": 100 * 2**20}
    first = {**own, "include_dashboard": False, "_system_config": IMPATIENT}
    cluster = Cluster(initialize_head=True, head_node_args={**first, **nodes[0]})
    for node in nodes[1:]:
        cluster.add_node(**own, **node)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    return cluster


def node_of(handle: Any) -> str:
    """Id of the node on which an actor is."""
    actor: dict[str, Any] = ray._private.state.actors(handle._actor_id.hex())
    return str(actor["Address"]["NodeID"])


def groups_left() -> int:
    return sum(group["state"] != "REMOVED" for group in placement_group_table().values())


def no_groups_left() -> bool:
    return wait_for(lambda: groups_left() == 0, 20)


def wait_for(condition: Callable[[], bool], seconds: float = 90) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def team(folder: str, name: str, agents: int, **changes: Any) -> SMARLTrainer:
    values: dict[str, Any] = {
        "environment": {"name": "ball_grid", "options": {"size": 4, "layouts": 4}},
        "agents": agents,
        "args": {**TEAM, **changes.pop("args", {})},
        "workers": {"agents_per_worker": 1, "envs_per_runner": 2, "rollout_steps": 5, "timeout_s": 120},
        "output_dir": folder,
        "run_name": name,
        "checkpoint_interval": 0,
    }
    return SMARLTrainer(**{**values, **changes})


def logs(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def teams(folder: str, *counts: str) -> dict[str, Any]:
    """SMARL runs with each strategy; where their actors were."""
    start(*[{"num_cpus": 2}] * 3)
    found = []
    for count in map(int, counts):
        for strategy in ("pack", "spread", "per_agent_node"):
            # Ray spreads over what is free, and the run before gives its room back a moment after it ended.
            assert wait_for(lambda: ray.available_resources().get("CPU") == 6, 20)
            with team(folder, f"{strategy}-{count}", count, placement={"strategy": strategy}) as run:
                run.train()
                system = run.system
                found.append(
                    {
                        "strategy": strategy,
                        "agents": count,
                        "workers": [node_of(member.handle) for member in system.workers._members],
                        "helpers": [node_of(h) for h in (system.keeper._handle, *system.runners._runners)],
                        "groups": groups_left(),
                        "episodes": logs(run.run_folder)[-1]["episode"],
                    }
                )
    return {"runs": found, "no_groups_left": no_groups_left()}


def reservations(folder: str) -> dict[str, Any]:
    """What is refused, what is waited for, and what is left behind."""
    start({"num_cpus": 2, "num_gpus": 2}, {"num_cpus": 2})
    found: dict[str, Any] = {}

    def told(name: str, function: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            function()
            found[name] = "nothing was refused"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        found[f"{name}_seconds"] = time.monotonic() - began

    def terms(**changes: Any) -> Terms:
        return Terms(
            **{"strategy": "PACK", "timeout_s": 30, "wait_for_autoscaler": None, "remedy": "R", **changes}
        )

    told("team", lambda: team(folder, "big", 2, placement={"cpus_per_worker": 2.5}).train())
    told("total", lambda: reserve([{"CPU": 1.0}] * 5, terms()))
    told("gpus", lambda: reserve([{"CPU": 0.1, "GPU": 1.5}, {"GPU": 1.0}], terms()))
    told("one_node", lambda: reserve([{"CPU": 1.5}, {"CPU": 1.5}], terms(strategy="STRICT_PACK")))
    told("waits", lambda: reserve([{"CPU": 3.0}], terms(timeout_s=2, wait_for_autoscaler=True)))
    with_gpus = reserve([{"CPU": 0.5, "GPU": 0.5}] * 4, terms())
    found["gpu_nodes"] = len(with_gpus.nodes())
    full = reserve([{"CPU": 1.0}] * 2, terms())
    told("full", lambda: reserve([{"CPU": 1.0}], terms(timeout_s=2)))
    full.release()
    full.release()
    with_gpus.release()
    found["no_groups_left"] = no_groups_left()
    found["killed_driver"] = _killed_driver()
    found["trial"] = _in_a_trial()
    found["blind"] = _blind_node(Path(folder))
    return found


def _killed_driver() -> dict[str, Any]:
    """A driver that reserves, is told of, and dies without a word."""
    code = (
        "import ray; ray.init(log_to_driver=False, logging_level='ERROR')\n"
        "from services.reservation import Terms, reserve\n"
        "room = reserve([{'CPU': 1.0}] * 2, Terms('SPREAD', 30, None, ''))\n"
        "print('reserved', flush=True); import time; time.sleep(300)\n"
    )
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment
    ) as driver:
        assert driver.stdout is not None
        line = driver.stdout.readline().strip()
        held = groups_left()
        driver.kill()
    return {"line": line, "held": held, "no_groups_left": no_groups_left()}


def _in_a_trial() -> dict[str, Any]:
    """An actor that has a placement group already, as a trial of Ray Tune has, reserves."""
    group = ray.util.placement_group([{"CPU": 0.5}, {"CPU": 0.25}, {"CPU": 0.75}])
    assert group.wait(20)

    @ray.remote(num_cpus=0.5)
    class Trial:
        def place(self, bundles: list[dict[str, float]]) -> Any:
            room = reserve(bundles, Terms("PACK", 20, None, ""))
            options = room.options(len(bundles) - 1, {"num_cpus": bundles[-1]["CPU"]})
            where = options["scheduling_strategy"]
            room.release()
            return where.placement_group.id.hex(), where.placement_group_bundle_index

        def refused(self) -> str:
            try:
                self.place([{"CPU": 4.0}])
            except PlacementError as error:
                return str(error)
            return "nothing was refused"

    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0
    )
    trial = Trial.options(scheduling_strategy=strategy).remote()
    own, index = ray.get(trial.place.remote([{"CPU": 0.25}, {"CPU": 0.75}]), timeout=60)
    _, other = ray.get(trial.place.remote([{"CPU": 0.2}]), timeout=60)
    answer = {
        "same_group": own == group.id.hex(),
        "measured": index,
        "other": other,
        "refused": ray.get(trial.refused.remote(), timeout=60),
        "groups": groups_left(),
    }
    ray.util.remove_placement_group(group)
    return answer


def _kill(cluster: Cluster, node_id: str) -> None:
    """The end of a raylet and all its workers, without notice."""
    (node,) = [node for node in cluster.list_all_nodes() if node.node_id == node_id]
    cluster.remove_node(node, allow_graceful=False)


def _killer(cluster: Cluster, run: Path, rounds: int, victim: Callable[[], str]) -> threading.Thread:
    def work() -> None:
        if wait_for(lambda: len(logs(run)) >= rounds):
            _kill(cluster, victim())

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def lost_team_node(folder: str, victim: str, hidden: str) -> dict[str, Any]:
    """A SMARL run loses the node of its `victim`; the driver's stays."""
    away = {"num_cpus": 2, "resources": {"away": 10}}
    cluster = start({"num_cpus": 2}, away, away)
    kinds = {victim: {"away": 1}}
    if victim == "coordinator":
        kinds["worker"] = {"away": 1}
    changes = {"num_episodes": 40, "hidden_sizes": [int(hidden)] * 2, "target_hidden_size": int(hidden)}
    with team(folder, "run", 3, args=changes, placement={"custom_resources": kinds}) as run:
        run._open_run(None)

        def where() -> str:
            system = run.system
            handles = {
                "coordinator": lambda: system.keeper._handle,
                "worker": lambda: system.workers._members[0].handle,
                "runner": lambda: system.runners._runners[0],
            }
            return node_of(handles[victim]())

        before: list[str] = []
        thread = _killer(cluster, run.run_folder, 2, lambda: before.append(where()) or before[0])
        run.train()
        thread.join()
        answer = {
            "episodes": logs(run.run_folder)[-1]["episode"],
            "restarts": run.system.restarts,
            "coordinator_restarts": run.system.keeper.restarts,
            "moved": before[0] != where(),
            "identities": run.system.keeper.ask("identities"),
            "checkpoint": len(list((run.run_folder / "checkpoints").glob("step_*/agent_*.safetensors"))),
        }
    return {**answer, "no_groups_left": no_groups_left()}


def _language_run(folder: str, model: str, name: str, **changes: Any) -> Any:
    rows = Path(folder) / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"def f{i}():"}) + "\n" for i in range(8)))
    args = {
        "num_turns": 1, "num_train_epochs": 4, "num_generations": 2, "max_new_tokens": 8, "rollout_buffer_size": 8,
        "early_termination_threshold": None,
    }  # fmt: skip
    values = {
        "algorithm": "maac", "agent_model": model, "critic_model": model, "train_dataset": str(rows),
        "reward_func": f"{HERE / 'callbacks_for_training.py'}:letters", "run_name": name, "output_dir": folder,
        "engine": {"backend": "transformers"}, "args": args,
    }  # fmt: skip
    return trainer_of(parse_config({**values, **changes}))


def language_strategies(folder: str, model: str, *strategies: str) -> dict[str, Any]:
    """Language-model runs with each strategy; where their actors were, and what they computed."""
    start(*[{"num_cpus": 2}] * 3)
    found = []
    for strategy in strategies:
        with _language_run(folder, model, strategy, placement={"strategy": strategy}) as run:
            run.train(max_updates=2)
            system = run._system
            found.append(
                {
                    "strategy": strategy,
                    "workers": [node_of(pool.workers[0]) for pool in system.generation.pools],
                    "policies": [node_of(policy.actors[0]) for policy in system.learners.policies],
                    "critic": node_of(system.learners.critics[0].actors[0]),
                    "numbers": timeless(logs(run.run_folder)),
                }
            )
    return {"runs": found, "no_groups_left": no_groups_left()}


def lost_engine_node(folder: str, model: str) -> dict[str, Any]:
    """A language-model run without and with the loss of a node that holds a generation worker."""
    engines = {"num_cpus": 2, "resources": {"engines": 2}}
    cluster = start({"num_cpus": 2, "resources": {"steady": 3}}, engines, engines)
    labels = {
        "generation_worker": {"engines": 1},
        "learner": {"steady": 1},
        "critic": {"steady": 1},
    }
    place = {"custom_resources": labels, "cpus_per_generation_worker": 0.5, "cpus_per_learner": 0.5}
    with _language_run(folder, model, "whole", placement=place) as run:
        whole = run.train()
    with _language_run(folder, model, "robbed", placement=place) as run:
        run._open_run(None)
        before: list[str] = []

        def where() -> str:
            return node_of(run._system.generation.pools[0].workers[0])

        thread = _killer(cluster, run.run_folder, 1, lambda: before.append(where()) or before[0])
        robbed = run.train()
        thread.join()
        recoveries = sum(pool.recoveries for pool in run._system.generation.pools)
        moved = where() != before[0]
    return {
        "recoveries": recoveries,
        "moved": moved,
        "same_numbers": timeless(logs(whole)) == timeless(logs(robbed)),
        "updates": len(logs(robbed)),
        "no_groups_left": no_groups_left(),
    }


def joining_node(folder: str, model: str) -> dict[str, Any]:
    """A language-model run to whose cluster a node comes, goes and comes again; and one left alone."""
    cluster = start({"num_cpus": 2})
    with _language_run(folder, model, "alone") as run:
        alone = run.train()
    counts: list[list[int]] = []
    places: list[str] = []

    def come_and_go(_: Any) -> None:
        pools = run._system.generation.pools
        counts.append([len(pool.workers) for pool in pools])
        if len(counts) in (1, 5):
            cluster.add_node(num_cpus=1, object_store_memory=100 * 2**20)
            assert wait_for(lambda: sum(node.get("CPU", 0) for node in free_resources()) >= 1)
        if len(counts) == 3:
            places.extend(node_of(pool.workers[1]) for pool in pools)
            _kill(cluster, places[0])
            assert wait_for(lambda: sum(node["Alive"] for node in ray.nodes()) == 1)

    engine = {"backend": "transformers", "max_workers_per_agent": 3}
    with _language_run(folder, model, "grown", engine=engine) as run:
        grown = run.train(after_round=come_and_go)
    # Sums of other batches are rounded differently.
    ours, theirs = (
        [{k: v for k, v in entry.items() if "gap" not in k} for entry in timeless(logs(each))]
        for each in (grown, alone)
    )
    return {
        "counts": counts,
        "same_node": len(set(places)) == 1,
        "same_numbers": ours == theirs,
        "no_groups_left": no_groups_left(),
    }


def _blind_node(folder: Path) -> dict[str, Any]:
    """A node that does not see the run folder.  All raylets share this machine, so what is written is hidden."""
    nodes = [node["NodeID"] for node in ray.nodes()]
    run = folder / "shared"
    run.mkdir()
    shared_folder.check_shared(run, nodes)
    seen = sorted(path.name for path in run.iterdir())
    shared_folder._DELAY_S = 1.0
    try:
        shared_folder.check_shared(_Elsewhere(run), nodes)
    except ConfigError as error:
        return {"left": seen, "told": str(error)}
    return {"left": seen, "told": "nothing was refused"}


class _Elsewhere(type(Path())):  # type: ignore[misc]
    """A folder in which one writes here what nobody reads there."""

    def __truediv__(self, name: str) -> Path:
        return _Unseen(Path(self) / name)


class _Unseen(type(Path())):  # type: ignore[misc]
    def touch(self, *_: Any, **__: Any) -> None:
        pass

    def unlink(self, *_: Any, **__: Any) -> None:
        pass


SCENARIOS: dict[str, Callable[..., dict[str, Any]]] = {
    function.__name__: function
    for function in (
        teams, reservations, lost_team_node, language_strategies, lost_engine_node, joining_node,
    )
}  # fmt: skip

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    answer = SCENARIOS[sys.argv[1]](*sys.argv[2:])
    print("ANSWER " + json.dumps(answer), flush=True)

"""Runs on a cluster of several raylets: where actors go, what the loss of a node does, what is left behind.

Each scenario is a process of its own with a cluster of its own; see cluster_scenarios.py.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("cluster_scenarios.py")


def play(scenario: str, *arguments: object, limit_s: float = 380) -> dict[str, Any]:
    """What a scenario found out."""
    # Ray writes into its folder which cluster `ray.init()` joins; that must not be this one for other processes.
    ray_folder = tempfile.mkdtemp(prefix="gr.", dir="/tmp")  # a socket's path must be short
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_AUTH_MODE")},
        "PYTHONPATH": str(SCRIPT.parents[2]),
        "OMP_NUM_THREADS": "1",
        "RAY_TMPDIR": ray_folder,
    }
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), scenario, *map(str, arguments)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=limit_s)
    finally:
        if process.poll() is None:  # raylets are children, and die with the group
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        shutil.rmtree(ray_folder, ignore_errors=True)
    answers = [line for line in out.splitlines() if line.startswith("ANSWER ")]
    assert answers, errors[-4000:]
    found: dict[str, Any] = json.loads(answers[-1].removeprefix("ANSWER "))
    return {**found, "log": errors}


def record_recoveries(log: str, record_property: Callable[[str, object], None]) -> None:
    found = re.findall(r"([^:]* is back after .* s)$", log, re.MULTILINE)
    assert found
    for each in found:
        record_property("recovery", each)


def as_even_as_can_be(places: list[str], nodes: int = 3) -> bool:
    counts = Counter(places)
    return len(counts) == min(nodes, len(places)) and max(counts.values()) - min(counts.values()) <= 1


def check_team(run: dict[str, Any]) -> None:
    """SMARL's actors are where the strategy says."""
    workers, everyone = run["workers"], [*run["workers"], *run["helpers"]]
    assert len(workers) == run["agents"]
    assert (run["groups"], run["episodes"]) == (1, 4)
    if run["strategy"] == "pack":
        assert len(set(everyone)) == 1
    elif run["strategy"] == "spread":
        assert as_even_as_can_be(everyone)
    else:
        assert as_even_as_can_be(workers)
        assert set(run["helpers"]) <= set(workers)


def test_two_agents_are_where_the_strategy_says_and_no_room_stays_taken(tmp_path: Path) -> None:
    found = play("teams", tmp_path, 2)
    assert [run["strategy"] for run in found["runs"]] == ["pack", "spread", "per_agent_node"]
    for run in found["runs"]:
        check_team(run)
    assert found["no_groups_left"]


@pytest.mark.slow
def test_more_agents_than_nodes_are_where_the_strategy_says(tmp_path: Path) -> None:
    found = play("teams", tmp_path, 4, 8, limit_s=580)
    assert [run["agents"] for run in found["runs"]] == [4, 4, 4, 8, 8, 8]
    for run in found["runs"]:
        check_team(run)
    assert found["no_groups_left"]


@pytest.mark.slow
def test_what_is_refused_waited_for_and_left_behind_and_who_does_not_see_the_run_folder(
    tmp_path: Path,
) -> None:
    found = play("reservations", tmp_path)
    refused = {
        "team": "PlacementError: .* 5.2 CPU needed in all, 4 there: add nodes, or lower workers.cpus_per_actor",
        "total": "PlacementError: the cluster cannot hold the run: 5 CPU needed in all, 4 there: R",
        "gpus": "PlacementError: .* 2.5 GPU needed in all, 2 there",
        "one_node": "PlacementError: .* 3 CPU needed on one node, the largest node has 2",
    }
    for name, message in refused.items():
        assert re.search(message, found[name])
        assert found[f"{name}_seconds"] < 60  # it did not wait the 300 of placement.timeout_s
    waited = {
        "waits": r"WaitLimitError: waited 2 s for 3 CPU in 1 bundle, .* the cluster lacks nodes: 3 CPU needed on one",
        "full": r"WaitLimitError: waited 2 s for 1 CPU in 1 bundle, free are 0 CPU. Raise placement.timeout_s",
    }
    for name, message in waited.items():
        assert re.search(message, found[name])
        assert found[f"{name}_seconds"] >= 2
    assert "waiting for the autoscaler up to 2 s (placement.timeout_s)" in found["log"]
    assert found["log"].count("waiting for room") <= 4
    assert found["gpu_nodes"] == 1
    assert found["no_groups_left"]
    assert found["killed_driver"] == {"line": "reserved", "held": 1, "no_groups_left": True}
    trial = found["trial"]
    assert trial.pop("refused").startswith(
        "the trial's placement group is too small for the run: 4 CPU needed"
    )
    assert trial == {"same_group": True, "measured": 2, "other": -1, "groups": 1}
    blind = found["blind"]
    assert blind["left"] == []  # the probe of the check that passed is gone
    assert "output_dir:" in blind["told"]
    assert "does not see what is written into it here" in blind["told"]


@pytest.mark.parametrize(
    ("victim", "hidden"),
    [
        pytest.param("coordinator", 16),
        # Parameters so large that they lie in a node's memory, and are lost with it.
        pytest.param("coordinator", 300, marks=pytest.mark.slow),
        pytest.param("worker", 300, marks=pytest.mark.slow),
        pytest.param("runner", 300, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_a_team_survives_the_loss_of_a_node(
    tmp_path: Path, victim: str, hidden: int, record_property: Callable[[str, object], None]
) -> None:
    found = play("lost_team_node", tmp_path, victim, hidden)
    record_recoveries(found["log"], record_property)
    assert found["moved"]
    assert found["restarts"] >= 1
    assert victim != "coordinator" or found["coordinator_restarts"] >= 1
    assert (found["episodes"], found["identities"], found["checkpoint"]) == (40, [0, 1, 2], 3)
    assert found["no_groups_left"]


@pytest.mark.slow
def test_language_models_are_where_the_strategy_says_and_compute_the_same(
    tmp_path: Path, small_model: Path
) -> None:
    found = play(
        "language_strategies", tmp_path, small_model, "pack", "spread", "per_agent_node", limit_s=580
    )
    pack, spread, per_node = found["runs"]
    assert as_even_as_can_be([*spread["workers"], *spread["policies"], spread["critic"]])
    assert per_node["workers"] == per_node["policies"]
    assert len({*per_node["workers"], per_node["critic"]}) == 3
    assert pack["numbers"] == spread["numbers"] == per_node["numbers"]
    assert len(pack["numbers"]) == 2
    assert found["no_groups_left"]


@pytest.mark.slow
def test_generation_workers_of_a_lost_node_are_restarted_elsewhere_and_no_number_changes(
    tmp_path: Path, small_model: Path, record_property: Callable[[str, object], None]
) -> None:
    found = play("lost_engine_node", tmp_path, small_model)
    record_recoveries(found["log"], record_property)
    assert found["recoveries"] >= 1
    assert found["moved"]
    assert found["same_numbers"]
    assert found["updates"] == 8
    assert found["no_groups_left"]


@pytest.mark.slow
def test_generation_workers_come_with_a_node_and_go_with_it_and_no_number_changes(
    tmp_path: Path, small_model: Path
) -> None:
    found = play("joining_node", tmp_path, small_model)
    # A node comes after the first round, goes after the third, and another comes after the fifth.
    assert found["counts"] == [[n, n] for n in (1, 2, 2, 1, 1, 2, 2, 2)]
    assert found["same_node"]
    assert len(re.findall(r"update round [0-9]+: 2 generation workers per agent", found["log"])) == 2
    assert len(re.findall(r"generation worker 1 of agent [01] was lost", found["log"])) == 2
    assert found["same_numbers"]
    assert found["no_groups_left"]

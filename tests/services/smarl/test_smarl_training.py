"""Whole runs with real actors: they learn, change their team, resume bit for bit, and survive losses."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from safetensors.numpy import load_file

from services import SMARLTrainer
from services.checkpoint import CheckpointStore

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

ARGS = {
    "num_episodes": 12,
    "max_episode_steps": 10,
    "batch_size": 16,
    "hidden_sizes": [16],
    "target_hidden_size": 16,
    "target_interval": 4,
    "sync_interval": 4,
    "eval_interval": 0,
}


def trainer(folder: Path, name: str = "run", **changes: Any) -> SMARLTrainer:
    values: dict[str, Any] = {
        "environment": {"name": "ball_grid", "options": {"size": 4, "layouts": 4}},
        "agents": 3,
        "args": {**ARGS, **changes.pop("args", {})},
        "workers": {"envs_per_runner": 2, "rollout_steps": 5, **changes.pop("workers", {})},
        "output_dir": str(folder),
        "run_name": name,
        "checkpoint_interval": 0,
        **changes,
    }
    return SMARLTrainer(**values)


def logs(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def final_state(run: Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint."""
    checkpoint = CheckpointStore(run / "checkpoints", None).latest()
    assert checkpoint is not None
    return {
        f"{path.name}/{name}": array
        for path in sorted(checkpoint.glob("*.safetensors"))
        for name, array in load_file(path).items()
    }


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)


def untimed(entries: list[dict[str, float]]) -> list[dict[str, float]]:
    return [
        {k: v for k, v in entry.items() if "second" not in k and k not in ("time", "restarts")}
        for entry in entries
    ]


def train(folder: Path, name: str = "run", **changes: Any) -> Path:
    with trainer(folder, name, **changes) as run:
        return run.train()


@pytest.fixture(scope="module")
def uninterrupted(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("uninterrupted"))


LEARNING = {
    "environment": {"name": "ball_grid", "options": {"size": 5, "layouts": 16}},
    "args": {
        "num_episodes": 400, "max_episode_steps": 25, "batch_size": 256, "hidden_sizes": [64, 64],
        "target_hidden_size": 64, "target_interval": 25, "sync_interval": 100, "replay": "shared",
        "eval_episodes": 64,
    },
    "workers": {"envs_per_runner": 8, "rollout_steps": 5},
}  # fmt: skip


def test_the_return_rises_above_what_random_directions_or_random_targets_can_earn(tmp_path: Path) -> None:
    with trainer(tmp_path, **LEARNING) as learning:
        before = learning.evaluate()["team_return_mean"]
        learning.train()
        after = learning.evaluate()["team_return_mean"]
    ablations = []
    for policy in ("common_policy", "target_policy"):
        random = {**LEARNING, "args": {**LEARNING["args"], policy: "random"}}
        with trainer(tmp_path, policy, **random) as half:
            half.train()
            ablations.append(half.evaluate()["team_return_mean"])
    assert before < 10
    assert after > 1.2 * max(ablations)
    assert max(ablations) < 14  # the right direction with a random target earns 13.4 of 25


@pytest.mark.parametrize("stop_after", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_run_stopped_and_resumed_equals_the_uninterrupted_one(
    uninterrupted: Path, tmp_path: Path, stop_after: int
) -> None:
    with trainer(tmp_path) as first:
        run = first.train(max_updates=stop_after)
    with trainer(tmp_path) as second:
        second.train(resume_from=run)
    assert_same(final_state(run), final_state(uninterrupted))
    assert untimed(logs(run)) == untimed(logs(uninterrupted))


def test_the_spread_over_workers_changes_no_number(uninterrupted: Path, tmp_path: Path) -> None:
    run = train(tmp_path, workers={"agents_per_worker": 2})
    ours, theirs = final_state(run), final_state(uninterrupted)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        # Batched matrix products may round differently for stacks of other sizes.
        np.testing.assert_allclose(array, theirs[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_agents_join_and_leave_by_schedule(tmp_path: Path) -> None:
    run = train(tmp_path, agents={0: 3, 4: 5, 9: 2}, workers={"agents_per_worker": 2})
    assert [(log["episode"], log["num_agents"]) for log in logs(run)] == [
        (2, 3), (4, 3), (6, 5), (8, 5), (9, 5), (11, 2), (12, 2),
    ]  # fmt: skip
    assert {name.split("/")[0] for name in final_state(run)} == {
        "agent_0.safetensors",
        "agent_1.safetensors",
        "coordinator.safetensors",
    }
    assert (run / "returns.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_changed_team_resumes_as_well(tmp_path: Path) -> None:
    schedule = {0: 3, 4: 5, 9: 2}
    whole = train(tmp_path, "whole", agents=schedule)
    with trainer(tmp_path, "parts", agents=schedule) as first:
        run = first.train(max_updates=3)
    with trainer(tmp_path, "parts", agents=schedule) as second:
        second.train(resume_from=run)
    assert_same(final_state(run), final_state(whole))


def test_a_joining_agent_starts_from_the_centre(tmp_path: Path) -> None:
    with trainer(tmp_path) as run:
        run.train(max_updates=3)
        actor, critic = run.system.keeper.ask("centre")
        before = run.system.workers.states()
        run.system.add_agents(2)
        after = run.system.workers.states()
    for name, rows in before.items():
        np.testing.assert_array_equal(after[name][:3], rows)
    for name, row in {
        "actor": actor,
        "actor_target": actor,
        "critic": critic,
        "critic_target": critic,
    }.items():
        np.testing.assert_array_equal(after[name][3:], np.stack([row, row]))


def test_all_agents_may_leave_where_others_join_with_the_same_request(tmp_path: Path) -> None:
    with trainer(tmp_path, workers={"agents_per_worker": 2}) as run:
        run.train(max_updates=1)
        actor, _ = run.system.keeper.ask("centre")
        run.system.change_team(3, [0, 1, 2])
        assert run.system.keeper.ask("identities") == [3, 4, 5]
        assert run.system.workers.firsts == [0, 2]
        np.testing.assert_array_equal(run.system.workers.states()["actor"], np.stack([actor] * 3))
        assert run.evaluate(episodes=2)["num_agents"] == 3


@pytest.mark.slow
def test_the_team_changes_on_request_while_the_run_trains(tmp_path: Path) -> None:
    with trainer(tmp_path, args={"num_episodes": 400}) as run:
        thread = threading.Thread(target=run.train)
        thread.start()
        wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(logs(tmp_path / "run")) > 2)
        assert run.add_agents(2) == 5
        wait_for(lambda: logs(tmp_path / "run")[-1]["num_agents"] == 5)
        assert run.remove_agents([0, 3]) == 3
        wait_for(lambda: logs(tmp_path / "run")[-1]["num_agents"] == 3)
        with pytest.raises(ValueError, match=r"agents \[7\] do not exist; there are agents 0 to 2"):
            run.remove_agents([7])
        with pytest.raises(ValueError, match="1 agents would be left; the run needs at least 2"):
            run.remove_agents([0, 1])
        assert run.system.keeper.ask("identities") == [1, 2, 4]
        thread.join(timeout=240)
        assert not thread.is_alive()


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def test_the_central_actor_plays_for_a_number_of_agents_never_trained(
    uninterrupted: Path, tmp_path: Path
) -> None:
    checkpoint = CheckpointStore(uninterrupted / "checkpoints", None).latest()
    with trainer(tmp_path) as run:
        own = run.evaluate(episodes=4, checkpoint=checkpoint)
        more = run.evaluate(num_agents=8, episodes=4)
        again = run.evaluate(episodes=4)
    assert (own["num_agents"], more["num_agents"]) == (3, 8)
    assert own == again
    assert more["team_return_mean"] != own["team_return_mean"]


def killer(run: SMARLTrainer, victim: Callable[[SMARLTrainer], Any], after_rounds: int) -> threading.Thread:
    """Ends the process of an actor once some rounds have been logged."""

    def work() -> None:
        path = run.run_folder / "metrics.jsonl"
        wait_for(lambda: path.exists() and len(path.read_text().splitlines()) >= after_rounds)
        ray.kill(victim(run), no_restart=True)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_killed_coordinator_is_restored_and_the_run_is_the_same(
    uninterrupted: Path, tmp_path: Path
) -> None:
    with trainer(tmp_path) as run:
        run._open_run(None)
        thread = killer(run, lambda r: r.system.keeper._handle, after_rounds=3)
        run.train()
        thread.join()
        assert run.system.keeper.restarts == 1
    assert_same(final_state(tmp_path / "run"), final_state(uninterrupted))
    assert untimed(logs(tmp_path / "run")) == untimed(logs(uninterrupted))


@pytest.mark.parametrize("victim", ["worker", "runner"])
def test_a_killed_worker_or_runner_is_replaced_and_the_run_completes(tmp_path: Path, victim: str) -> None:
    def find(run: SMARLTrainer) -> Any:
        group: Any = (
            run.system.workers._members[1].handle if victim == "worker" else run.system.runners._runners[0]
        )
        return group

    with trainer(tmp_path, workers={"agents_per_worker": 1, "num_env_runners": 2}) as run:
        run._open_run(None)
        thread = killer(run, find, after_rounds=1)
        run.train()
        thread.join()
        assert run.system.restarts == 1
        assert run.system.keeper.ask("identities") == [0, 1, 2]
    assert logs(tmp_path / "run")[-1]["episode"] == 12
    assert len([name for name in final_state(tmp_path / "run") if name.endswith("/actor")]) == 4


def test_while_targets_train_the_action_networks_stand_still_and_the_other_way_round(tmp_path: Path) -> None:
    seldom = {"target_interval": 1000, "num_episodes": 4}
    with trainer(tmp_path, "short", args=seldom) as run:
        run.train(max_updates=1)  # episode 0 trains the target network
        frozen = run.system.keeper.ask("target_weights")
    with trainer(tmp_path, "long", args=seldom) as run:
        run.train()
        for name, weights in run.system.keeper.ask("target_weights").items():
            np.testing.assert_array_equal(weights, frozen[name])
        before = run.system.workers.states()
        centre = run.system.keeper.ask("centre")
        run.system.keeper.tell("train_target", 7)
        changed = run.system.keeper.ask("target_weights")
        assert any((changed[name] != frozen[name]).any() for name in frozen)
        assert_same(run.system.workers.states(), before)
        for ours, theirs in zip(run.system.keeper.ask("centre"), centre, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_agents_without_a_centre_never_touch_it(tmp_path: Path) -> None:
    with trainer(tmp_path, args={"central_network": False}) as run:
        run._open_run(None)
        system = run._start()
        before = system.keeper.ask("centre")
        run.train()
        for ours, theirs in zip(system.keeper.ask("centre"), before, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert "centre_distance_mean" not in logs(tmp_path / "run")[-1]


def test_continuous_actions_learn_through_a_gymnasium_environment(tmp_path: Path) -> None:
    run = train(tmp_path, environment="gymnasium:Pendulum-v1", agents=1, args={"max_episode_steps": 20})
    last = logs(run)[-1]
    assert last["num_agents"] == 1
    assert np.isfinite(last["critic_loss"])
    assert "target_loss" not in last


@pytest.mark.parametrize("made_by", ["rllib", "pettingzoo"])
def test_a_team_trains_and_changes_in_a_foreign_environment_named_by_a_reference(
    tmp_path: Path, made_by: str
) -> None:
    game = Path(__file__).with_name("passing_game.py")
    environment = {
        "name": f"{game}:{made_by}", "compose_action": f"{game}:throw", "common_space": f"{game}:strengths"
    }  # fmt: skip
    run = train(tmp_path, environment=environment, agents={0: 2, 8: 3}, args={"max_episode_steps": 8})
    entries = logs(run)
    assert [entry["num_agents"] for entry in entries] == [2, 2, 2, 2, 3, 3]
    assert all(0 <= entry["return_mean"] <= 8 for entry in entries)
    assert max(entry["return_mean"] for entry in entries) > 0
    assert np.isfinite(entries[-1]["critic_loss"])
    assert any("target_loss" in entry for entry in entries)

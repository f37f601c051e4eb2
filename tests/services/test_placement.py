"""From devices and shares to Ray options; the arithmetic alone, no GPU is needed to check it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.placement import PlacementError, Shares, plan_placement


def plan(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "num_agents": 2,
        "workers_per_agent": 1,
        "agent_devices": ["cpu", "cpu"],
        "critic_devices": ["cpu"],
        "reference_devices": None,
        "shares": Shares(),
        "cluster_cpus": 2,
        "cluster_gpus": 0,
    }
    return plan_placement(**{**values, **changes})


def everyone(placement: Any) -> list[Any]:
    return [*(w for own in placement.workers for w in own), *placement.policies, *placement.critics.values()]


@given(agents=st.integers(1, 8), workers=st.integers(1, 4), cpus=st.integers(1, 64))
def test_automatic_shares_always_fit(agents: int, workers: int, cpus: int) -> None:
    placed = plan(
        num_agents=agents, workers_per_agent=workers, agent_devices=["cpu"] * agents, cluster_cpus=cpus
    )
    actors = everyone(placed)
    assert len(actors) == agents * (workers + 1) + 1
    assert 0 < sum(actor.options["num_cpus"] for actor in actors) <= cpus + 1e-9
    assert all("num_gpus" not in actor.options for actor in actors)


def test_a_shared_gpu_is_divided_among_its_users() -> None:
    placed = plan(
        agent_devices=["cuda:0", "cuda:1"], critic_devices=["cuda:1"], cluster_cpus=8, cluster_gpus=2
    )
    assert [policy.options["num_gpus"] for policy in placed.policies] == [0.5, 0.3333]
    assert [policy.device for policy in placed.policies] == ["cuda:0", "cuda:1"]
    assert placed.critics["cuda:1"].options["num_gpus"] == 0.3333
    visible = [own[0].options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] for own in placed.workers]
    assert visible == ["0", "1"]
    learner = placed.policies[1].options["runtime_env"]["env_vars"]
    assert learner == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def test_set_shares_are_kept() -> None:
    shares = Shares(cpus_per_generation_worker=0.25, cpus_per_learner=0.5)  # 4 workers, 3 learners: 2.5
    placed = plan(shares=shares, workers_per_agent=2, cluster_cpus=4)
    assert {w.options["num_cpus"] for own in placed.workers for w in own} == {0.25}
    assert {p.options["num_cpus"] for p in placed.policies} == {0.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"shares": Shares(cpus_per_learner=1.0)},
            r"5 actors need .* cpus, the cluster has 2: .*cpus_per_learner",
        ),
        ({"agent_devices": ["cuda:0", "cuda:1"], "cluster_gpus": 1}, r"need 2 gpus, the cluster has 1"),
    ],
)
def test_what_can_never_fit_is_refused_with_what_is_missing(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        plan(**changes)

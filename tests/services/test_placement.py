"""From devices, shares and nodes to Ray options and bundles; the arithmetic alone, no GPU is needed to check it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bundles import asked, bundle_of, pack_greedily, total, what_is_missing
from services.config import ConfigError, parse_config
from services.placement import Shares, Widths, plan_placement


def plan(*, cluster_cpus: float = 2, cluster_gpus: float = 0, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "num_agents": 2,
        "workers_per_agent": 1,
        "agent_devices": ["cpu", "cpu"],
        "critic_devices": ["cpu"],
        "reference_devices": None,
        "shares": Shares(),
        "nodes": [{"CPU": cluster_cpus, "GPU": cluster_gpus}],
    }
    return plan_placement(**{**values, **changes})


def everyone(placement: Any) -> list[Any]:
    return placement.everyone()  # type: ignore[no-any-return]


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
    assert [policy.options["num_gpus"] for (policy,) in placed.policies] == [0.5, 0.3333]
    assert [policy.device for (policy,) in placed.policies] == ["cuda:0", "cuda:1"]
    assert placed.critics["cuda:1"][0].options["num_gpus"] == 0.3333
    visible = [own[0].options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] for own in placed.workers]
    assert visible == ["0", "1"]
    learner = placed.policies[1][0].options["runtime_env"]["env_vars"]
    assert learner == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


def test_set_shares_are_kept() -> None:
    shares = Shares(cpus_per_generation_worker=0.25, cpus_per_learner=0.5)  # 4 workers, 3 learners: 2.5
    placed = plan(shares=shares, workers_per_agent=2, cluster_cpus=4)
    assert {w.options["num_cpus"] for own in placed.workers for w in own} == {0.25}
    assert {p.options["num_cpus"] for (p,) in placed.policies} == {0.5}


THREE_NODES = [{"CPU": 2.0, "GPU": 1.0}] * 3


def missing(placed: Any, nodes: list[dict[str, float]]) -> list[str]:
    return what_is_missing(placed.bundles, nodes, one_node=placed.group_strategy == "STRICT_PACK")


@pytest.mark.parametrize(
    ("changes", "nodes", "message"),
    [
        ({"shares": Shares(cpus_per_learner=1.0)}, [{"CPU": 2.0}], "3.8 CPU needed in all, 2 there"),
        (
            {"agent_devices": ["cuda:0", "cuda:1"]},
            [{"CPU": 2.0, "GPU": 1.0}],
            "2 GPU needed in all, 1 there",
        ),
        (
            {"shares": Shares(0.1, None, 0.1, None, 3.0)},
            [{"CPU": 2.0}] * 3,
            "3 CPU needed on one node, the largest node has 2",
        ),
        (
            {"shares": Shares(1.1, None, 1.1, None, 0.1)},
            [{"CPU": 2.0}] * 3,
            "4 places with 1.1 CPU each needed, the nodes (with 2, 2, 2) have 3",
        ),
        (
            {"shares": Shares(custom_resources={"critic": {"big": 1}})},
            [{"CPU": 2.0}],
            "1 big needed in all, 0 there",
        ),
    ],
)
def test_what_can_never_fit_is_told_with_what_is_missing(
    changes: dict[str, Any], nodes: list[dict[str, float]], message: str
) -> None:
    placed = plan(nodes=nodes, **changes)
    assert missing(placed, nodes) == [message]


@given(
    agents=st.integers(1, 8),
    workers=st.integers(1, 3),
    nodes=st.lists(st.integers(1, 16), min_size=2, max_size=5),
    strategy=st.sampled_from(["pack", "spread", "per_agent_node"]),
)
def test_automatic_shares_fit_on_several_nodes(
    agents: int, workers: int, nodes: list[int], strategy: str
) -> None:
    there = [{"CPU": float(cpus)} for cpus in nodes]
    placed = plan(
        num_agents=agents,
        workers_per_agent=workers,
        agent_devices=["cpu"] * agents,
        nodes=there,
        strategy=strategy,
    )
    assert pack_greedily(placed.bundles, there)
    assert missing(placed, there) == []
    actors = everyone(placed)
    assert total(placed.bundles)["CPU"] == pytest.approx(sum(a.options["num_cpus"] for a in actors))
    assert {actor.bundle for actor in actors} == set(range(len(placed.bundles)))


@pytest.mark.parametrize("nodes", [2, 3])
def test_an_agents_actors_share_a_bundle_and_a_shared_critic_has_one_where_nodes_are_left(nodes: int) -> None:
    placed = plan(strategy="per_agent_node", nodes=[{"CPU": 2.0}] * nodes, workers_per_agent=2)
    assert [[w.bundle for w in own] for own in placed.workers] == [[0, 0], [1, 1]]
    assert [policy.bundle for (policy,) in placed.policies] == [0, 1]
    assert placed.critics["critic_0"][0].bundle == (2 if nodes == 3 else 0)
    assert placed.group_strategy == "SPREAD"


def test_a_critic_of_one_agent_lies_beside_it() -> None:
    placed = plan(
        strategy="per_agent_node",
        nodes=THREE_NODES,
        critic_devices=["cpu", "cpu"],
        critic_owners=[0, 1],
    )
    assert [placed.critics[name][0].bundle for name in placed.critic_actors] == [0, 1]


def test_with_several_nodes_ray_picks_the_gpu_that_has_no_number() -> None:
    placed = plan(
        agent_devices=["cuda", "cuda"], critic_devices=["cpu"], reference_devices=["cuda", "cpu"], nodes=THREE_NODES
    )  # fmt: skip
    policy, worker = placed.policies[0][0], placed.workers[0][0]
    assert (policy.device, placed.reference_devices) == ("cuda:0", ["cuda:0", "cpu"])
    for actor in (policy, worker):
        assert actor.options["num_gpus"] == 0.5  # four actors, three GPUs, and none is on two of them
        assert "runtime_env" not in actor.options
    assert "num_gpus" not in placed.critics["cpu"][0].options


def test_a_reference_model_on_a_gpu_gives_its_learner_a_share() -> None:
    placed = plan(reference_devices=["cuda", "cpu"], nodes=THREE_NODES, strategy="spread")
    assert [p.options.get("num_gpus") for (p,) in placed.policies] == [1.0, None]
    assert placed.policies[0][0].device == "cpu"
    assert "runtime_env" not in placed.policies[0][0].options


def test_numbered_gpus_keep_a_run_on_one_of_several_nodes() -> None:
    nodes = [{"CPU": 2.0, "GPU": 2.0}, {"CPU": 4.0}]
    placed = plan(agent_devices=["cuda:0", "cuda:1"], critic_devices=["cuda:1"], nodes=nodes)
    assert placed.group_strategy == "STRICT_PACK"
    assert missing(placed, nodes) == []
    assert missing(placed, [{"CPU": 4.0, "GPU": 1.0}] * 2) == [
        "1.9999 GPU needed on one node, the largest node has 1"
    ]


@pytest.mark.parametrize("strategy", ["spread", "per_agent_node"])
@pytest.mark.parametrize(
    "devices", [{"agent_devices": ["cuda", "cuda:1"]}, {"critic_devices": ["cuda:0"], "agent_devices": "cpu"}]
)
def test_numbered_gpus_do_not_go_with_several_nodes(strategy: str, devices: dict[str, Any]) -> None:
    run = {
        "algorithm": "maac", "agent_model": "m", "critic_model": "m", "reward_func": "a:b", "train_dataset": "d",
        "args": {"parallel_training": "mp", "critic_devices": "cuda", **devices},
    }  # fmt: skip
    parse_config(run)
    with pytest.raises(ConfigError, match=rf"placement: strategy={strategy} .* write `cuda`"):
        parse_config({**run, "placement": {"strategy": strategy}})


def test_ranks_and_tensor_parallel_engines_have_whole_gpus_for_themselves() -> None:
    nodes = [{"CPU": 8.0, "GPU": 4.0}] * 2
    widths = Widths(ranks_per_policy=2, tensor_parallel_size=2)
    placed = plan(
        num_agents=1, agent_devices=["cuda"], critic_devices=["cuda"], nodes=nodes[:1], widths=widths
    )
    assert [[rank.options["num_gpus"] for rank in ranks] for ranks in placed.policies] == [[1.0, 1.0]]
    assert placed.workers[0][0].options["num_gpus"] == 2.0
    assert {actor.device for actor in placed.everyone()} == {"cuda:0"}, "the first of those that Ray gives it"
    assert all("runtime_env" not in actor.options for actor in placed.everyone())
    assert missing(placed, nodes[:1]) == ["5 GPU needed in all, 4 there"]
    assert missing(placed, nodes) == []
    both = plan(critic_devices=["cpu"], widths=Widths(ranks_per_policy=2, ranks_per_critic=3))
    assert [len(ranks) for ranks in (*both.policies, *both.critics.values())] == [2, 2, 3]
    assert sum(actor.options["num_cpus"] for actor in both.everyone()) <= 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {
                "learner": {"ranks_per_policy": 2},
                "args": {"agent_devices": "cuda:0", "critic_devices": "cpu"},
            },
            r"args: agent_devices=cuda:0 numbers GPUs, but learner\.ranks_per_policy=2 needs several",
        ),
        (
            {"learner": {"ranks_per_policy": 2}, "placement": {"gpus_per_learner": 0.5}},
            r"placement: gpus_per_learner=0\.5 lets two ranks of a learner share a GPU",
        ),
        (
            {"engine": {"tensor_parallel_size": 2}, "placement": {"gpus_per_generation_worker": 1}},
            "placement: gpus_per_generation_worker must be 2",
        ),
        (
            {"engine": {"tensor_parallel_size": 2, "backend": "transformers"}},
            r"engine: tensor_parallel_size=2 needs engine\.backend=vllm",
        ),
        (
            {"engine": {"weight_transfer": "nccl", "backend": "transformers"}},
            r"engine: weight_transfer=nccl is a way into vLLM: set engine\.backend=vllm",
        ),
        (
            {"engine": {"weight_transfer": "nccl"}, "max_staleness": 1},
            "engine: weight_transfer=nccl needs max_staleness=0",
        ),
        (
            {"engine": {"weight_transfer": "ipc"}, "learner": {"ranks_per_policy": 2}},
            r"weight_transfer=ipc shares .* learner\.ranks_per_policy=2 must equal engine\.tensor_parallel_size=1",
        ),
        (
            {"engine": {"workers_per_agent": 3, "max_workers_per_agent": 2}},
            r"engine\.max_workers_per_agent: 2 is less than workers_per_agent=3: raise it",
        ),
        (
            {"engine": {"weight_transfer": "ipc", "max_workers_per_agent": 2}},
            r"engine\.max_workers_per_agent: weight_transfer=ipc reaches engines on the learner's GPU alone",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    run = {
        "algorithm": "maac", "agent_model": "m", "critic_model": "m", "reward_func": "a:b", "train_dataset": "d",
    }  # fmt: skip
    args = {"parallel_training": "mp", "agent_devices": "cuda", "critic_devices": "cuda"}
    with pytest.raises(ConfigError, match=message):
        parse_config({**run, **changes, "args": {**args, **changes.get("args", {})}})


def test_what_is_set_for_critics_and_custom_labels_is_kept() -> None:
    custom = {"learner": {"big": 1.0}, "generation_worker": {"fast": 0.5}}
    shares = Shares(cpus_per_learner=0.5, cpus_per_critic=0.25, custom_resources=custom)
    placed = plan(shares=shares, cluster_cpus=4)  # a fifth of which is each worker's
    assert placed.critics["cpu"][0].options == {"num_cpus": 0.25}
    assert {p.options["num_cpus"] for (p,) in placed.policies} == {0.5}
    assert placed.policies[1][0].options["resources"] == {"big": 1.0}
    assert total(placed.bundles) == pytest.approx({"CPU": 2.85, "big": 2.0, "fast": 1.0})


def test_bundles_are_such_as_ray_takes() -> None:
    assert bundle_of([asked({"num_cpus": 0})]) == {"CPU": 0.0001}
    parts = [asked({"num_cpus": 0.5, "num_gpus": 0.7, "resources": {"a": 1}})] * 2
    assert bundle_of(parts) == {"CPU": 1.0, "GPU": 2, "a": 2}
    assert what_is_missing([{"GPU": 0.6}] * 3, [{"GPU": 2.0}], one_node=False) == [
        "3 places with 0.6 GPU each needed, the nodes (with 2) have 2"
    ]

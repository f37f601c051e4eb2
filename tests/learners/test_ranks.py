"""Learners that are several processes compute what one process computes: real Ray actors, real gloo, real FSDP2."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from numpy.testing import assert_allclose, assert_array_equal
from tiny_models import bits_of, causal_lm, mixed_batch
from transformers import AutoModelForCausalLM

from learners.learner_actors import CriticLearner, LearnerSpec, PolicyLearner, PolicySpec
from learners.lora import LoraSpec
from learners.optimiser import NonFiniteLossError
from services.learner_ranks import LearnerLostError, RankGroup, results_of

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]

MINIBATCHES = [[0, 3, 5], [1, 2], [6], [4]]  # some smaller than the number of ranks
ADVANTAGES = np.array([0.5, -1.0, 2.0, 1.5, -0.25, 0.75, -2.0], dtype=np.float32)
TARGETS = np.array([0.1, 0.9, -0.4, 0.3, 0.2, -0.7, 0.6], dtype=np.float32)
PROBE = np.arange(5, 25, dtype=np.int32)
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sharded")
    causal_lm(dtype=torch.float32).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def group() -> Iterator[Callable[..., RankGroup]]:
    """Starts learners of so many ranks, which end with the test."""
    groups: list[RankGroup] = []

    def start(learner: type, spec: Any, size: int, label: str = "agent 0") -> RankGroup:
        actor: Any = ray.remote(num_cpus=0.1, max_restarts=0)(learner)
        ranks = RankGroup(label, [actor.remote(spec, rank, size) for rank in range(size)])
        groups.append(ranks)
        call = ranks.start(LIMIT_S, LIMIT_S)
        results_of([call], "models", LIMIT_S, "")
        ranks.started(call)
        return ranks

    yield start
    for ranks in groups:
        ranks.end()


def ask(ranks: RankGroup, method: str, *arguments: Any, **named: Any) -> Any:
    return results_of([ranks.call(method, *arguments, **named)], method, LIMIT_S, "")[0]


def learner(model: str, **changes: Any) -> LearnerSpec:
    # One sample per micro-batch is the least, so that ranks have several and not all equally many.
    return LearnerSpec(model, learning_rate=1e-3, device="cpu", micro_batch_tokens=20, **changes)


def update_policy(ranks: RankGroup, times: int, *, with_head: bool = False) -> Any:
    update: Any = None
    for _ in range(times):
        scores = ask(ranks, "score", mixed_batch())
        head = (TARGETS, scores.values) if with_head else (None, None)
        update = ask(ranks, "update", mixed_batch(), ADVANTAGES, MINIBATCHES, *head)
    return update


def weights(ranks: RankGroup) -> dict[str, np.ndarray]:
    snapshot = ask(ranks, "snapshot", 1, PROBE)
    return {name: array for name, (_, array) in snapshot.tensors.items()}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "head": {"backbone_value": "q", "value_clip_range": 0.2},
    "lora and reference": {"lora": LoraSpec(3, 12.0), "with_reference": True},
    "reference": {"with_reference": True},
}


@pytest.mark.parametrize(
    "variant",
    [
        "plain",
        "lora and reference",
        *(pytest.param(v, marks=pytest.mark.slow) for v in ("head", "reference")),
    ],
)
def test_two_ranks_train_a_policy_as_one_does(
    model: str, group: Callable[..., RankGroup], variant: str
) -> None:
    checkpointing = {"gradient_checkpointing": variant == "plain"}
    spec = PolicySpec(learner(model, **checkpointing), agent_idx=0, **VARIANTS[variant])
    one, two = group(PolicyLearner, spec, 1), group(PolicyLearner, spec, 2)
    start = weights(one)
    with_head = variant == "head"
    alone, together = (update_policy(ranks, 3, with_head=with_head) for ranks in (one, two))
    assert_allclose(together.actor_loss, alone.actor_loss, rtol=1e-4, atol=1e-5)
    assert_allclose(together.critic_loss, alone.critic_loss, rtol=1e-4, atol=1e-5)
    assert together.metrics == pytest.approx(alone.metrics, rel=1e-3, abs=1e-5)
    assert together.token_logprobs.keys() == alone.token_logprobs.keys()
    for index, logprobs in alone.token_logprobs.items():
        assert_allclose(together.token_logprobs[index], logprobs, atol=1e-4)
    one_weights, two_weights = weights(one), weights(two)
    assert one_weights.keys() == two_weights.keys() == start.keys()
    for name, array in one_weights.items():
        assert_allclose(two_weights[name], array, rtol=0, atol=1e-5, err_msg=name)
    assert max(np.abs(array - start[name]).max() for name, array in one_weights.items()) > 5e-3
    alone, together = (ask(ranks, "score", mixed_batch()) for ranks in (one, two))
    for name in ("logprob", "entropy", "values", "reference_kl"):
        ours, theirs = getattr(together, name), getattr(alone, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_allclose(ours, theirs, atol=1e-3)


def test_a_critic_takes_its_agents_one_after_another(model: str, group: Callable[..., RankGroup]) -> None:
    one, other = (group(CriticLearner, {0: learner(model)}, 1, "critic 0") for _ in range(2))
    texts = list(mixed_batch().prompt_ids)
    reversed_texts, reversed_targets = texts[::-1], TARGETS[::-1].copy()
    # What each agent's critic reads; then one text for both, as a joint critic reads.
    for reads in ([texts, reversed_texts], [texts]):
        together = ask(
            one, "update", 0, [TARGETS, reversed_targets], [MINIBATCHES, MINIBATCHES[::-1]], *reads
        )
        first = ask(other, "update", 0, [TARGETS], [MINIBATCHES], reads[0])
        second = ask(other, "update", 0, [reversed_targets], [MINIBATCHES[::-1]], reads[-1])
        assert together == [*first, *second]
        assert first[0].critic_loss != second[0].critic_loss
    assert_array_equal(ask(one, "values", 0, texts), ask(other, "values", 0, texts))


def test_two_ranks_train_a_critic_as_one_does(model: str, group: Callable[..., RankGroup]) -> None:
    specs = {3: learner(model, value_head_hidden=5), 4: learner(model)}
    one, two = (group(CriticLearner, specs, size, "critic 3") for size in (1, 2))
    texts = [*mixed_batch().prompt_ids[:-1], mixed_batch().prompt_ids[0].copy()]
    start = ask(one, "values", 3, texts)
    for key in (3, 4):
        for _ in range(5):
            ((alone,), (together,)) = (
                ask(r, "update", key, [TARGETS], [MINIBATCHES], texts) for r in (one, two)
            )
        assert_allclose(together.critic_loss, alone.critic_loss, rtol=1e-3, atol=1e-6)
        assert together.metrics == pytest.approx(alone.metrics, rel=1e-3)
    values, others = ask(one, "values", 3, texts), ask(two, "values", 3, texts)
    assert_allclose(others, values, atol=1e-4)
    assert np.abs(values - start).max() > 1e-2


def saved(ranks: RankGroup, folder: Path) -> dict[str, Any]:
    ask(ranks, "save", str(folder), training_state=True)
    state: dict[str, Any] = torch.load(folder / "training_state.pt", weights_only=True)
    return state


@pytest.mark.parametrize(
    "lora", [pytest.param(None, marks=pytest.mark.slow), LoraSpec(3, 12.0)], ids=["full", "lora"]
)
def test_a_checkpoint_goes_from_one_rank_to_two_and_back(
    model: str, group: Callable[..., RankGroup], tmp_path: Path, lora: LoraSpec | None
) -> None:
    spec = PolicySpec(learner(model), agent_idx=0, lora=lora)
    one, two = group(PolicyLearner, spec, 1), group(PolicyLearner, spec, 2)
    update_policy(one, 2)
    of_one = saved(one, tmp_path / "one")
    ask(two, "load", str(tmp_path / "one"))
    of_two = saved(two, tmp_path / "two")
    assert bits_of(of_two) == bits_of(of_one), "resharded there, put together again: bit for bit"
    update_policy(one, 1)
    update_policy(two, 1)
    after = saved(two, tmp_path / "after")
    assert after["updates_done"] == 3
    back = group(PolicyLearner, spec, 1)
    ask(back, "load", str(tmp_path / "after"))
    for name, array in weights(one).items():
        assert_allclose(weights(back)[name], array, rtol=0, atol=1e-5, err_msg=name)
    assert bits_of(saved(back, tmp_path / "back")) == bits_of(after)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    assert loaded.config.architectures == ["Qwen2ForCausalLM"]
    for name, parameter in loaded.named_parameters():
        assert_array_equal(parameter.detach().numpy(), weights(back)[name], err_msg=name)


@pytest.mark.slow
def test_half_precision_is_sharded_with_its_masters(
    model: str, group: Callable[..., RankGroup], tmp_path: Path
) -> None:
    spec = PolicySpec(learner(model, dtype="bfloat16"), agent_idx=0)
    one, two = group(PolicyLearner, spec, 1), group(PolicyLearner, spec, 2)
    of_one, start = saved(one, tmp_path / "one"), saved(two, tmp_path / "two")
    assert bits_of(start) == bits_of(of_one)
    ends = [saved(ranks, tmp_path / "end") for ranks in (one, two) if update_policy(ranks, 2)]
    before, alone, together = (end["optimiser"]["masters"] for end in (start, *ends))
    assert {master.dtype for master in together} == {torch.float32}
    moved = [(one - was, two - was) for one, two, was in zip(alone, together, before, strict=True)]
    assert all(bool((two != 0).any()) for _, two in moved)
    # All together: where a gradient is nothing but rounding, as a key's bias's is, AdamW steps in any direction.
    ours, theirs = (torch.cat([step[side].flatten() for step in moved]) for side in (1, 0))
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.9


def test_a_loss_that_is_not_finite_is_refused_by_all_ranks_alike(
    model: str, group: Callable[..., RankGroup]
) -> None:
    two = group(PolicyLearner, PolicySpec(learner(model), agent_idx=0), 2)
    before = weights(two)
    huge = np.full(7, 3e38, np.float32)
    with pytest.raises(NonFiniteLossError, match="agent 0, mini-batch 0"):
        ask(two, "update", mixed_batch(), huge, MINIBATCHES, None, None)
    after = weights(two)
    assert all(np.array_equal(after[name], array) for name, array in before.items())
    update_policy(two, 1)


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_dies_is_named_and_ends_its_group(
    model: str, group: Callable[..., RankGroup], lost: int
) -> None:
    two = group(PolicyLearner, PolicySpec(learner(model), agent_idx=0), 2, "agent 7")
    pids = ray.get([actor.ready.remote() for actor in two.actors])
    os.kill(pids[lost], signal.SIGKILL)
    node = ray.util.get_node_ip_address()
    with pytest.raises(
        LearnerLostError, match=rf"rank {lost} of 2 of agent 7, on node {node}, died .* score"
    ):
        update_policy(two, 1)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(two.actors[1 - lost].ready.remote(), timeout=60)


def test_a_rank_that_does_not_come_is_named(model: str) -> None:
    actor: Any = ray.remote(num_cpus=0.1, max_restarts=0)(PolicyLearner)
    first = actor.remote(PolicySpec(learner(model), agent_idx=0), 0, 2)
    place = first.meet_at.remote(5.0)
    with pytest.raises(RuntimeError, match="waited 5 s for rank 1 of 2; it is still not there"):
        ray.get(first.join.remote(place, 5.0, 5.0), timeout=60)
    ray.kill(first)

"""Replays every recorded actor-critic run and compares each number on the way.

The recordings come from another implementation in float64.  The learners' own classes do all the arithmetic;
this file only names tensors and walks through the rounds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from learners.critic import Critic, CriticUpdate
from learners.minibatches import group_by_turn, plan_minibatches
from learners.policy import Policy, PolicyScores, PolicyUpdate
from learners.samples import Completion, Sample, TokenBatch
from learners.td import next_turn_index, normalise_advantages, returns_to_go, td_errors, td_targets
from learners.value_head import ValueHead

REPOSITORY = Path(__file__).parents[2]

MODEL_TOLERANCE = 2e-7
"""Of numbers that went through the model: its RMSNorm and rotary angles are float32 inside, in both
implementations."""
FLOAT32_TOLERANCE = 1e-6
"""Of targets, errors, advantages and losses, which pass through float32: one last bit may fall the other
way."""
FINAL_TOLERANCE = 5e-6
"""Of sums over final weights: AdamW magnifies the noise of gradients that are nearly zero."""


def oracle_folder() -> Path:
    configured = os.environ.get("GREENROOM_ORACLE")
    folder = Path(configured) if configured else REPOSITORY.parent / "shared" / "oracle"
    return folder if folder.is_dir() else REPOSITORY / "tests" / "oracle"


def cases() -> list[Path]:
    folder = oracle_folder()
    return sorted(path for kind in ("maac", "iac") for path in folder.glob(f"{kind}_*.json"))


@dataclass
class Round:
    """Consecutive updates in which every agent occurs once: the recorded mini-batches of each agent."""

    minibatches: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def samples(self, agent: int) -> list[dict[str, Any]]:
        return [sample for minibatch in self.minibatches[agent] for sample in minibatch["samples"]]


def rounds_of(case: dict[str, Any]) -> Iterator[Round]:
    current, last_agent = Round(), 0
    for minibatch in case["updates"]:
        if minibatch["agent"] < last_agent:
            yield current
            current = Round()
        last_agent = minibatch["agent"]
        current.minibatches.setdefault(last_agent, []).append(minibatch)
    yield current


class Players:
    """The policies and critics of one recorded run, with the recorded initial weights."""

    def __init__(self, path: Path) -> None:
        self.case: dict[str, Any] = json.loads(path.read_text())
        self.config = self.case["config"]
        self._tensors = load_file(str(path.with_name(self.case["weights"])))
        self._model_config = AutoConfig.from_pretrained(path.parent / "model")
        owners = sorted({name.split("/")[0] for name in self._tensors})
        self.maac = self.case["algorithm"] == "maac"
        self.mode = self.config.get("critic_type", "v")
        self.policies = {int(o[6:]): self._policy(o) for o in owners if o.startswith("agent_")}
        self.critics = {int(o[7:]): self._critic(o) for o in owners if o.startswith("critic_")}

    def _build(self, factory: Any, owner: str, prefix: str) -> Any:
        model = factory.from_config(self._model_config, dtype=torch.float64)
        wanted = f"{owner}/{prefix}"
        state = {k.removeprefix(wanted): v for k, v in self._tensors.items() if k.startswith(wanted)}
        assert state
        missing, unexpected = model.load_state_dict(state, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}, "lm_head is tied to the embeddings"
        return model

    def _value_head(self, owner: str) -> ValueHead | None:
        prefix = f"{owner}/value_head."
        state = {
            k.removeprefix(prefix).replace("pre_projection.0", "hidden_projection"): v
            for k, v in self._tensors.items()
            if k.startswith(prefix)
        }
        if not state:
            return None
        head = ValueHead(self._model_config.hidden_size, self.case["head_hidden"]).double()
        head.load_state_dict(state)
        return head

    def _policy(self, owner: str) -> Policy:
        reference = owner.replace("agent", "reference")
        referenced = any(name.startswith(reference) for name in self._tensors)
        return Policy(
            self._build(AutoModelForCausalLM, owner, "model."),
            learning_rate=self.config["agent_learning_rate"],
            value_head=self._value_head(owner),
            value_mode=self.mode,
            value_loss_coef=self.config.get("value_loss_coef", 0.6),
            value_clip_range=self.config.get("value_clip_range", 0.2),
            reference=self._build(AutoModelForCausalLM, reference, "model.") if referenced else None,
        )

    def _critic(self, owner: str) -> Critic:
        head = self._value_head(owner)
        assert head is not None
        return Critic(
            self._build(AutoModel, owner, "model.model."),
            head,
            learning_rate=self.config["critic_learning_rate"],
            value_loss_coef=self.config.get("value_loss_coef", 0.6),
        )

    def critic_of(self, agent: int) -> Critic | None:
        return self.critics.get(0 if self.maac else agent)

    def critic_texts(self, recorded: list[dict[str, Any]]) -> list[np.ndarray]:
        def text(sample: dict[str, Any]) -> list[int]:
            if self.maac:
                return sample["critic_ids"]
            return sample["prompt_ids"] + (sample["completion_ids"] if self.mode == "q" else [])

        return [np.array(text(sample), dtype=np.int32) for sample in recorded]

    def samples(self, recorded: Round, agent: int) -> list[Sample]:
        """The round's samples of one agent, each told which rollout it belongs to.

        The recording has every turn's samples in the rollouts' order, so that the k-th sample of a turn
        belongs to the k-th rollout that was not over before; a rollout is over when the mean reward exceeds
        the threshold.
        """
        mine = recorded.samples(agent)
        turns = [s["turn"] for s in mine]
        threshold = self.config["early_termination_threshold"]
        rollouts = list(range(turns.count(0)))
        samples: list[Sample] = []
        for turn in range(max(turns) + 1):
            members = [i for i, t in enumerate(turns) if t == turn]
            assert len(members) == len(rollouts)
            going_on = []
            for rollout, i in zip(rollouts, members, strict=True):
                mean_reward = np.mean([recorded.samples(a)[i]["reward"] for a in recorded.minibatches])
                over = turn + 1 == self.config["num_turns"] or (
                    threshold is not None and bool(mean_reward > threshold)
                )
                samples.append(_sample(mine[i], agent, rollout, is_final_turn=over))
                if not over:
                    going_on.append(rollout)
            rollouts = going_on
        return samples


def _sample(recorded: dict[str, Any], agent: int, rollout: int, *, is_final_turn: bool) -> Sample:
    completion = Completion(
        prompt_ids=np.array(recorded["prompt_ids"], dtype=np.int32),
        token_ids=np.array(recorded["completion_ids"], dtype=np.int32),
        logprobs=np.zeros(len(recorded["completion_ids"]), dtype=np.float32),
        text="",
        finish_reason="stop",
        weight_version=0,
    )
    return Sample(
        agent_idx=agent,
        item_idx=rollout,
        turn_idx=recorded["turn"],
        generation_idx=recorded["generation"],
        prompt="",
        completion=completion,
        reward=recorded["reward"],
        is_final_turn=is_final_turn,
        expected_return=recorded["expected_return"],
    )


def column(recorded: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([sample[name] for sample in recorded])


def assert_close(actual: Any, recorded: Any, tolerance: float, what: str) -> None:
    assert_allclose(actual, recorded, rtol=tolerance, atol=tolerance, err_msg=what)


def test_there_are_recorded_runs_of_both_algorithms() -> None:
    assert {path.stem.split("_")[0] for path in cases()} == {"maac", "iac"}


@pytest.mark.parametrize("path", cases(), ids=lambda path: path.stem)
def test_every_number_of_the_recorded_run_is_reproduced(path: Path) -> None:
    players = Players(path)
    for recorded_round in rounds_of(players.case):
        before = {a: observed(players, recorded_round, a) for a in recorded_round.minibatches}
        for agent, (scores, values) in before.items():
            update_and_compare(players, recorded_round, agent, scores, values)
    compare_final_weights(players)


def observed(players: Players, recorded_round: Round, agent: int) -> tuple[PolicyScores, np.ndarray]:
    """What policy and critic say at collection, before any update of the round."""
    recorded = recorded_round.samples(agent)
    scores = players.policies[agent].score(TokenBatch.of(players.samples(recorded_round, agent)))
    assert_close(scores.logprob, column(recorded, "completion_logprob"), MODEL_TOLERANCE, "logprob")
    if players.config.get("reference_kl_enabled", False):
        assert_close(scores.reference_kl, column(recorded, "reference_kl"), MODEL_TOLERANCE, "KL")
    else:
        assert scores.reference_kl is None
    critic = players.critic_of(agent)
    values = scores.values if critic is None else critic.values(players.critic_texts(recorded))
    assert values is not None
    assert_close(values, column(recorded, "old_value"), MODEL_TOLERANCE, "value")
    return scores, values


def update_and_compare(
    players: Players, recorded_round: Round, agent: int, scores: PolicyScores, values: np.ndarray
) -> None:
    config, recorded = players.config, recorded_round.samples(agent)
    samples = players.samples(recorded_round, agent)
    rewards = column(recorded, "reward")
    if scores.reference_kl is not None:
        rewards = rewards - config["reference_kl_coef"] * scores.reference_kl
    following = next_turn_index(samples)
    returns = returns_to_go(rewards, following)
    assert_close(returns, column(recorded, "expected_return"), FLOAT32_TOLERANCE, "expected return")
    targets = td_targets(rewards, values, following, config.get("discount", 1.0))
    assert_close(targets, column(recorded, "td_target"), FLOAT32_TOLERANCE, "TD target")
    advantages = td_errors(targets, values)
    assert_close(advantages, column(recorded, "td_error"), FLOAT32_TOLERANCE, "TD error")
    turns = [sample.turn_idx for sample in samples]
    if config.get("advantage_normalization", True):
        advantages = normalise_advantages(advantages, group_by_turn(turns))
    assert_close(advantages, column(recorded, "advantage"), FLOAT32_TOLERANCE, "advantage")

    minibatches = plan_minibatches(turns, config.get("train_batch_size", config["rollout_buffer_size"]), None)
    recorded_minibatches = recorded_round.minibatches[agent]
    assert [len(m) for m in minibatches] == [len(m["samples"]) for m in recorded_minibatches]
    critic = players.critic_of(agent)
    targets_for_head = {} if critic is not None else {"td_targets": targets, "old_values": values}
    update: PolicyUpdate | CriticUpdate = players.policies[agent].update(
        TokenBatch.of(samples), advantages, minibatches, **targets_for_head
    )
    assert isinstance(update, PolicyUpdate)
    actor_losses = [m["actor_loss"] for m in recorded_minibatches]
    assert_close(update.actor_loss, actor_losses, 2 * FLOAT32_TOLERANCE, "actor loss")
    if critic is not None:
        update = critic.update(players.critic_texts(recorded), targets, minibatches)
    critic_losses = [m["critic_loss"] for m in recorded_minibatches]
    assert_close(update.critic_loss, critic_losses, FLOAT32_TOLERANCE, "critic loss")


def compare_final_weights(players: Players) -> None:
    for owner, recorded in players.case["final"].items():
        learner: Any = None
        if owner.startswith("agent_"):
            policy = players.policies[int(owner[6:])]
            modules, learner = {"model.": policy.model, "value_head.": policy.value_head}, policy
        elif owner.startswith("critic_"):
            critic = players.critics[int(owner[7:])]
            modules, learner = {"model.model.": critic.backbone, "value_head.": critic.value_head}, critic
        assert learner is not None, owner
        state = {
            prefix + name.replace("hidden_projection", "pre_projection.0"): tensor
            for prefix, module in modules.items()
            if module is not None
            for name, tensor in module.state_dict().items()
        }
        assert set(recorded) - {"model.lm_head.weight"} == set(state) - {"model.lm_head.weight"}
        for name, (total, norm) in recorded.items():
            if name in state:
                assert_close(float(state[name].sum()), total, FINAL_TOLERANCE, f"sum of {owner}/{name}")
                assert_close(float(state[name].norm()), norm, FINAL_TOLERANCE, f"norm of {owner}/{name}")

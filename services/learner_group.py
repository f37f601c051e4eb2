"""All learners of a run, seen from the driver: values, TD errors and updates of one round.

Owns the order of an update round over the learner processes.  The mathematics is in `learners/`; where the samples come
from and where the weights go is the training loop's business.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from actors.generation_pool import WeightSource
from learners.critic_inputs import CriticReader
from learners.minibatches import group_by_turn, plan_minibatches
from learners.samples import FloatArray, IntArray, MiniBatches, Sample, TokenBatch
from learners.td import next_turn_index, normalise_advantages, returns_to_go, td_errors, td_targets
from services.learner_ranks import Call, LearnerLostError, RankGroup, results_of

__all__ = ["AgentRound", "LearnerGroup", "LearnerLostError", "RoundResult", "UpdateRules"]


@dataclass(frozen=True, slots=True)
class UpdateRules:
    """The part of the configuration that shapes an update round."""

    discount: float
    advantage_normalization: bool
    train_batch_size: int
    reference_kl_coef: float | None
    """None: no reference penalty."""
    seed: int
    weighs_tokens: bool = False
    """Whether policies correct for the engine's probabilities, and must be told them."""
    sends_weights: bool = False
    """Whether weights go straight to the engines, not in snapshots."""


@dataclass(slots=True)
class AgentRound:
    """One agent's numbers of one update round; every array is aligned with `samples`."""

    samples: list[Sample]
    values: FloatArray
    td_targets: FloatArray
    td_errors: FloatArray
    advantages: FloatArray
    reference_kl: FloatArray | None
    minibatches: MiniBatches
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class RoundResult:
    """What an update round computed, and how long its parts took."""

    agents: list[AgentRound]
    seconds: dict[str, float]


class LearnerGroup:
    """Policy learners (one per agent) and critic learners (which hold one or more critics), each of one or more ranks.

    Args:
        critics: critic key -> the learner that holds it; empty with a shared backbone.
        reader: what each critic reads of a round's samples.
    """

    def __init__(
        self,
        policies: Sequence[RankGroup],
        critics: dict[int, RankGroup],
        reader: CriticReader,
        rules: UpdateRules,
        *,
        update_timeout_s: float,
    ) -> None:
        self.policies = list(policies)
        self.critics = critics
        self._reader = reader
        self.layout = reader.layout
        self._rules = rules
        self._timeout_s = update_timeout_s

    def wait_ready(self, seconds: float) -> None:
        """Wait until every model is loaded."""
        calls = [group.start(seconds, self._timeout_s) for group in self._groups()]
        self.get(calls, "learners to load their models", seconds)
        for call in calls:
            call.group.started(call)

    def update(self, samples: list[list[Sample]], round_idx: int) -> RoundResult:
        """One update of every agent on its samples: values, targets and advantages once, then all mini-batches.

        `samples[agent]` are parallel lists: the k-th entries belong to one joint answer.  Policies and critics live in
        different processes and step side by side; a critic that several agents share takes their mini-batches one
        agent after another.
        """
        started = time.perf_counter()
        texts = [ray.put(ids) for ids in self._reader.read(samples)]
        keys = self.layout.critic_of_agent[: len(texts)]
        # The critics begin while the policies' batches are still on their way.
        reads = [self.critics[key].call("values", key, ids) for key, ids in zip(keys, texts, strict=True)]
        batches = [ray.put(TokenBatch.of(own, with_logprobs=self._rules.weighs_tokens)) for own in samples]
        values, kl = self._values_and_kl(batches, reads)
        agents = [
            self._plan(own, values[agent], kl[agent], agent, round_idx) for agent, own in enumerate(samples)
        ]
        valued = time.perf_counter()
        self._step(agents, batches, texts)
        return RoundResult(agents, {"value": valued - started, "update": time.perf_counter() - valued})

    def save(
        self, folder: str, agent_folders: Sequence[str], critic_folders: dict[int, str], *, state: bool
    ) -> None:
        """Write every learner below `folder`, all at once."""
        calls = [
            policy.call("save", f"{folder}/{name}", training_state=state)
            for policy, name in zip(self.policies, agent_folders, strict=True)
        ]
        calls += [
            critic.call("save", key, f"{folder}/{critic_folders[key]}", training_state=state)
            for key, critic in self.critics.items()
        ]
        self.get(calls, "learners to write a checkpoint")

    def load(self, folder: str, agent_folders: Sequence[str], critic_folders: dict[int, str]) -> None:
        """Continue from what `save` wrote with `state=True`."""
        calls = [p.call("load", f"{folder}/{n}") for p, n in zip(self.policies, agent_folders, strict=True)]
        calls += [c.call("load", k, f"{folder}/{critic_folders[k]}") for k, c in self.critics.items()]
        self.get(calls, "learners to read a checkpoint")

    def weights(self, agent: int, version: int, probe_ids: IntArray) -> WeightSource:
        """One agent's weights as they are now, on their way to engines; the driver never holds the tensors itself.

        In a snapshot they are taken once, now.  Straight from the learner they are sent when engines are given, again
        for one that has been lost: no update may come in between.
        """
        policy = self.policies[agent]
        if not self._rules.sends_weights:
            snapshot = self._answer(policy, "snapshot", version, probe_ids)
            return lambda engines, incarnation: snapshot
        return lambda engines, incarnation: self._answer(
            policy, "send", version, probe_ids, list(engines), incarnation
        )

    def _answer(self, policy: RankGroup, method: str, *arguments: Any) -> Any:
        """Reference to what a policy's first rank answers, once all ranks have done their part."""
        call = policy.call(method, *arguments)
        if len(policy.actors) > 1:
            # Once the ranks answer to something else, they have; engines cannot wait for ranks.
            self.get([policy.call("ready")], f"the weights of {policy.label}")
        return call.answer

    def shutdown(self) -> None:
        for group in self._groups():
            group.end()

    def get(self, calls: Sequence[Call], what: str, seconds: float | None = None) -> list[Any]:
        """Answers to all `calls`; everything still running is waited for before the first error is raised, so that no
        learner is stopped in the middle of a step."""
        remedy = "Raise learner.update_timeout_s (learner.start_timeout_s while starting) if the model needs longer."
        return results_of(calls, what, seconds or self._timeout_s, remedy)

    def _groups(self) -> list[RankGroup]:
        return [*self.policies, *dict.fromkeys(self.critics.values())]

    def _values_and_kl(
        self, batches: list[Any], reads: list[Call]
    ) -> tuple[list[FloatArray], list[FloatArray | None]]:
        """Old values and reference KL of every agent's samples, from weights that no sample has changed yet."""
        kind, with_kl = self.layout.kind, self._rules.reference_kl_coef is not None
        needs_score = with_kl or kind == "backbone"
        calls = (
            [p.call("score", b) for p, b in zip(self.policies, batches, strict=True)] if needs_score else []
        )
        results = self.get([*calls, *reads], "values and reference log-probabilities")
        scores, values = results[: len(calls)], results[len(calls) :]
        kl: list[FloatArray | None] = [None] * len(batches)
        if with_kl:
            kl = [s.reference_kl for s in scores]
        if kind == "backbone":
            return [s.values for s in scores], kl
        return (values * len(batches) if kind == "joint" else values), kl

    def _plan(
        self, own: list[Sample], values: FloatArray, kl: FloatArray | None, agent: int, round_idx: int
    ) -> AgentRound:
        """The numbers that stay fixed during the update."""
        rules = self._rules
        rewards = np.array([s.reward for s in own], np.float32)
        following = next_turn_index(own)
        if kl is not None and rules.reference_kl_coef is not None:
            rewards = rewards - np.float32(rules.reference_kl_coef) * kl.astype(np.float32)
            for sample, penalised in zip(own, returns_to_go(rewards, following), strict=True):
                sample.expected_return = float(penalised)
        targets = td_targets(rewards, values, following, rules.discount)
        errors = td_errors(targets, values)
        turns = [s.turn_idx for s in own]
        advantages = (
            normalise_advantages(errors, group_by_turn(turns)) if rules.advantage_normalization else errors
        )
        rng = np.random.default_rng([rules.seed, round_idx, agent])
        minibatches = plan_minibatches(turns, rules.train_batch_size, rng)
        return AgentRound(own, values, targets, errors, advantages, kl, minibatches)

    def _step(self, agents: list[AgentRound], batches: list[Any], texts: list[Any]) -> None:
        shared = self.layout.kind == "backbone"
        calls = [
            policy.call(
                "update",
                batch,
                own.advantages,
                own.minibatches,
                own.td_targets if shared else None,
                own.values if shared else None,
            )
            for policy, batch, own in zip(self.policies, batches, agents, strict=True)
        ]
        owners = self._agents_of_critics()
        for key, judged in owners.items():
            ids = texts if self.layout.kind == "joint" else [texts[agent] for agent in judged]
            targets = [agents[agent].td_targets for agent in judged]
            minibatches = [agents[agent].minibatches for agent in judged]
            calls.append(self.critics[key].call("update", key, targets, minibatches, *ids))
        results = self.get(calls, "policy and critic updates")
        for own, update in zip(agents, results, strict=False):
            own.metrics = _update_metrics(own, update)
        for judged, updates in zip(owners.values(), results[len(agents) :], strict=True):
            for agent, critic in zip(judged, updates, strict=True):
                agents[agent].metrics["critic_loss"] = float(np.mean(critic.critic_loss))
                agents[agent].metrics["critic_grad_norm"] = critic.metrics["grad_norm"]

    def _agents_of_critics(self) -> dict[int, list[int]]:
        """Critic key -> the agents that it judges."""
        found: dict[int, list[int]] = {}
        for agent, key in enumerate(self.layout.critic_of_agent):
            found.setdefault(key, []).append(agent)
        return found


def _update_metrics(own: AgentRound, update: Any) -> dict[str, float]:
    """Losses, entropy, and how far the engine's log-probabilities are from the learner's.

    Only the first mini-batch is compared: it alone is scored with the weights that the engine sampled with.
    """
    metrics = {"actor_loss": float(np.mean(update.actor_loss)), **update.metrics}
    if update.critic_loss:
        metrics["critic_loss"] = float(np.mean(update.critic_loss))
    gaps = [
        np.abs(logprobs - own.samples[index].completion.logprobs)
        for index, logprobs in update.token_logprobs.items()
    ]
    flat = np.concatenate(gaps) if gaps else np.zeros(0)
    if len(flat):
        metrics["logprob_gap_mean"], metrics["logprob_gap_max"] = float(flat.mean()), float(flat.max())
    return metrics

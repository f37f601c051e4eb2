"""Learners as they live in processes of their own: thin shells around `Policy` and `Critic`.

The classes are plain; whoever starts them makes Ray actors of them and decides where they run.  They own building a
learner from a description, handing its weights out, and its files in a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import ArrayLike
from torch import nn

from learners.critic import Critic, CriticUpdate, Floats
from learners.models import frozen_copy, hidden_size_of, load_backbone, load_causal_lm
from learners.policy import Policy, PolicyScores, PolicyUpdate
from learners.samples import IntArray, MiniBatches, TokenBatch
from learners.snapshot import WeightSnapshot
from learners.value_head import FILE_NAME as VALUE_HEAD_FILE
from learners.value_head import ValueHead

STATE_FILE = "training_state.pt"


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    """What policies and critics are built from alike; travels to the learner's process."""

    source: str
    """Model folder or hub identifier."""
    learning_rate: float
    device: str
    """"cpu", "cuda" or "cuda:k"."""
    dtype: str | None = None
    """None: float32 on a CPU, bfloat16 (with float32 optimiser state) on a GPU."""
    value_head_hidden: int | None = None
    value_loss_coef: float = 0.6
    micro_batch_tokens: int = 16384
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    attn_implementation: str | None = None
    seed: int = 0
    """Initialises a new value head."""

    def load_options(self) -> dict[str, Any]:
        dtype = self.dtype or ("float32" if self.device == "cpu" else "bfloat16")
        return {
            "dtype": getattr(torch, dtype),
            "trust_remote_code": self.trust_remote_code,
            "attn_implementation": self.attn_implementation,
        }

    def value_head(self, model: nn.Module) -> ValueHead:
        """The head saved beside the model, so that a trained critic starts as it ended; else a new one."""
        if (Path(self.source) / VALUE_HEAD_FILE).exists():
            return ValueHead.load(self.source)
        return ValueHead(hidden_size_of(model), self.value_head_hidden, seed=self.seed)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One agent's policy."""

    learner: LearnerSpec
    agent_idx: int
    backbone_value: Literal["v", "q"] | None = None
    """The value head's mode where the critic shares the policy's backbone; None: the critic is a model of its own."""
    value_clip_range: float | None = None
    with_reference: bool = False
    reference_device: str | None = None


class PolicyLearner:
    """One agent's policy and its optimiser."""

    def __init__(self, spec: PolicySpec) -> None:
        learner = spec.learner
        model = load_causal_lm(learner.source, **learner.load_options())
        self._policy = Policy(
            model,
            learning_rate=learner.learning_rate,
            device=learner.device,
            name=f"agent {spec.agent_idx}",
            value_head=learner.value_head(model) if spec.backbone_value else None,
            value_mode=spec.backbone_value or "v",
            value_loss_coef=learner.value_loss_coef,
            value_clip_range=spec.value_clip_range,
            reference=frozen_copy(model) if spec.with_reference else None,
            reference_device=spec.reference_device,
            micro_batch_tokens=learner.micro_batch_tokens,
            gradient_checkpointing=learner.gradient_checkpointing,
        )

    def ready(self) -> int:
        """Answers once the model is loaded, with the process's id."""
        return os.getpid()

    def score(self, batch: TokenBatch) -> PolicyScores:
        return self._policy.score(batch)

    def update(
        self,
        batch: TokenBatch,
        advantages: ArrayLike,
        minibatches: MiniBatches,
        td_targets: ArrayLike | None,
        old_values: ArrayLike | None,
    ) -> PolicyUpdate:
        return self._policy.update(
            batch, advantages, minibatches, td_targets=td_targets, old_values=old_values
        )

    def snapshot(self, version: int, probe_ids: IntArray) -> WeightSnapshot:
        """The weights as they are now, with this policy's log-probabilities of `probe_ids` to prove a push by."""
        tensors = self._policy.weights()
        return WeightSnapshot(
            version=version,
            tensors=tensors,
            aliases=_tied_names(self._policy.model, tensors),
            probe_ids=probe_ids,
            probe_logprobs=self._policy.probe_logprobs(probe_ids),
        )

    def save(self, directory: str, *, training_state: bool) -> None:
        """Write the model in Hugging Face layout; with `training_state` also what a bit-exact resume needs."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._policy.save_pretrained(directory)
        if training_state:
            torch.save(self._policy.state_dict(), Path(directory) / STATE_FILE)

    def load(self, directory: str) -> None:
        """Continue from a checkpoint's folder."""
        self._policy.load_state_dict(_load_state(directory))


class CriticLearner:
    """One or several critics on one device, updated in the order in which updates are asked for."""

    def __init__(self, specs: dict[int, LearnerSpec]) -> None:
        self._critics: dict[int, Critic] = {}
        for key, spec in specs.items():
            backbone = load_backbone(spec.source, **spec.load_options())
            self._critics[key] = Critic(
                backbone,
                spec.value_head(backbone),
                learning_rate=spec.learning_rate,
                device=spec.device,
                name=f"critic {key}",
                value_loss_coef=spec.value_loss_coef,
                micro_batch_tokens=spec.micro_batch_tokens,
                gradient_checkpointing=spec.gradient_checkpointing,
            )

    def ready(self) -> int:
        """Answers once the models are loaded, with the process's id."""
        return os.getpid()

    def values(self, key: int, texts: Sequence[IntArray]) -> Floats:
        return self._critics[key].values(texts)

    def update(
        self, key: int, texts: Sequence[IntArray], td_targets: ArrayLike, minibatches: MiniBatches
    ) -> CriticUpdate:
        return self._critics[key].update(texts, td_targets, minibatches)

    def save(self, key: int, directory: str, *, training_state: bool) -> None:
        """Write one critic in Hugging Face layout, its value head beside it."""
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._critics[key].save_pretrained(directory)
        if training_state:
            torch.save(self._critics[key].state_dict(), Path(directory) / STATE_FILE)

    def load(self, key: int, directory: str) -> None:
        """Continue from a checkpoint's folder."""
        self._critics[key].load_state_dict(_load_state(directory))


def _load_state(directory: str) -> dict[str, Any]:
    path = Path(directory) / STATE_FILE
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: only folders under checkpoints/ can be resumed from; final/ holds models alone"
        )
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _tied_names(model: nn.Module, tensors: dict[str, Any]) -> dict[str, str]:
    """Parameters that share memory with one in `tensors`: name -> that one's name."""
    owners = {id(p): name for name, p in model.named_parameters()}
    return {
        name: owners[id(p)]
        for name, p in model.named_parameters(remove_duplicate=False)
        if name not in tensors
    }

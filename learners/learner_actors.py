"""Learners as they live in processes of their own: thin shells around `Policy` and `Critic`.

The classes are plain; whoever starts them makes Ray actors of them and decides where they run.  They own building a
learner from a description, handing its weights out, and its files in a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ray
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from learners.critic import Critic, CriticUpdate, Floats
from learners.lora import LoraAdapter, LoraSpec
from learners.models import frozen_copy, hidden_size_of, load_backbone, load_causal_lm
from learners.policy import VALUE_HEAD_FOLDER, Policy, PolicyScores, PolicyUpdate
from learners.ranks import ALONE, Ranks, join, open_store, reach_store
from learners.samples import IntArray, MiniBatches, TokenBatch
from learners.snapshot import TransferSpec, WeightSnapshot
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
        """The head saved with the model, so that a trained critic starts as it ended; else a new one."""
        for folder in (Path(self.source), Path(self.source) / VALUE_HEAD_FOLDER):
            if (folder / VALUE_HEAD_FILE).exists():
                return ValueHead.load(folder)
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
    importance_sampling_cap: float | None = None
    lora: LoraSpec | None = None
    """None: all weights train."""
    transfer: TransferSpec | None = None
    """How weights go straight to the engines; None: in snapshots."""


class _Learner:
    """A process that trains alone, or as one of several ranks.

    Several ranks get every call alike, in the same order; what rank 0 answers counts, and rank 0 alone writes files.
    """

    def __init__(self, device: str, rank: int, size: int) -> None:
        self._device, self._rank, self._size = device, rank, size
        self._store: Any = None
        if size == 1:
            self._build(ALONE)

    def ready(self) -> int:
        """Answers once the models are loaded, with the process's id."""
        return os.getpid()

    def meet_at(self, timeout_s: float) -> tuple[str, int]:
        """Rank 0: open the place where the ranks meet; host and port."""
        host = ray.util.get_node_ip_address()
        self._store = open_store(host, self._size, timeout_s)
        return host, self._store.port

    def join(self, place: tuple[str, int], start_timeout_s: float, call_timeout_s: float) -> str:
        """Meet the other ranks there and load this rank's part of the models; says on which node it is.

        Raises:
            RuntimeError: a rank was not there in time; says which.
        """
        if self._store is None:
            self._store = reach_store(*place, self._size, start_timeout_s)
        ranks = join(
            self._store,
            self._rank,
            self._size,
            self._device,
            start_timeout_s=start_timeout_s,
            call_timeout_s=call_timeout_s,
        )
        self._build(ranks)
        return str(ray.util.get_node_ip_address())

    def _build(self, ranks: Ranks) -> None:
        raise NotImplementedError


class PolicyLearner(_Learner):
    """One agent's policy and its optimiser."""

    _policy: Policy
    _sender: Any = None  # of learners.weight_sender, which imports vLLM

    def __init__(self, spec: PolicySpec, rank: int = 0, size: int = 1) -> None:
        self._spec = spec
        super().__init__(spec.learner.device, rank, size)

    def _build(self, ranks: Ranks) -> None:
        spec, learner = self._spec, self._spec.learner
        model = load_causal_lm(learner.source, **learner.load_options())
        adapter = None if spec.lora is None else LoraAdapter(model, spec.lora, seed=learner.seed)
        reference = None
        if spec.with_reference:
            reference = frozen_copy(model) if adapter is None else model
        self._policy = Policy(
            model,
            learning_rate=learner.learning_rate,
            device=learner.device,
            name=f"agent {spec.agent_idx}",
            adapter=adapter,
            value_head=learner.value_head(model) if spec.backbone_value else None,
            value_mode=spec.backbone_value or "v",
            value_loss_coef=learner.value_loss_coef,
            value_clip_range=spec.value_clip_range,
            reference=reference,
            reference_device=spec.reference_device,
            micro_batch_tokens=learner.micro_batch_tokens,
            gradient_checkpointing=learner.gradient_checkpointing,
            importance_sampling_cap=spec.importance_sampling_cap,
            ranks=ranks,
        )

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
        """The weights as they are now, with this policy's log-probabilities of `probe_ids` to prove a push by.

        A rank other than the first answers without weights.
        """
        tensors = self._policy.weights()
        return WeightSnapshot(
            version=version,
            tensors=tensors,
            aliases=_tied_names(self._policy.model),
            probe_ids=probe_ids,
            probe_logprobs=self._policy.probe_logprobs(probe_ids),
        )

    def send(
        self, version: int, probe_ids: IntArray, engines: Sequence[Any], incarnation: int
    ) -> WeightSnapshot:
        """Send the weights as they are now straight to `engines`; the answer is what is left to prove the push by.

        Raises:
            WeightTransferError: they did not all get there.
        """
        probe = self._policy.probe_logprobs(probe_ids)
        if self._sender is None:
            from learners.weight_sender import WeightSender

            assert self._spec.transfer is not None, "this learner hands its weights out in snapshots"
            self._sender = WeightSender(
                self._spec.transfer, self._every_name, self._rank, self._policy.device
            )
        self._sender.send(engines, incarnation)
        return WeightSnapshot(version, None, probe_ids=probe_ids, probe_logprobs=probe)

    def _every_name(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight, one that is tied under each of its names; see `WeightSnapshot.aliases`."""
        names: dict[str, list[str]] = {}
        for alias, name in _tied_names(self._policy.model).items():
            names.setdefault(name, []).append(alias)
        for name, weight in self._policy.each_weight():
            for each in (name, *names.get(name, ())):
                yield each, weight

    def save(self, directory: str, *, training_state: bool) -> None:
        """Write the model in Hugging Face layout; with `training_state` also what a bit-exact resume needs."""
        _save(self._policy, directory, training_state, self._rank == 0)

    def load(self, directory: str) -> None:
        """Continue from a checkpoint's folder."""
        self._policy.load_state_dict(_load_state(directory, self._size))


class CriticLearner(_Learner):
    """One or several critics on one device, updated in the order in which updates are asked for."""

    def __init__(self, specs: dict[int, LearnerSpec], rank: int = 0, size: int = 1) -> None:
        self._specs = specs
        self._critics: dict[int, Critic] = {}
        super().__init__(next(iter(specs.values())).device, rank, size)

    def _build(self, ranks: Ranks) -> None:
        for key, spec in self._specs.items():
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
                ranks=ranks,
            )

    def values(self, key: int, texts: Sequence[IntArray]) -> Floats:
        return self._critics[key].values(texts)

    def update(
        self,
        key: int,
        td_targets: Sequence[ArrayLike],
        minibatches: Sequence[MiniBatches],
        *texts: Sequence[IntArray],
    ) -> list[CriticUpdate]:
        """Take the mini-batches of one agent after another; `texts` are each agent's, or what all of them share."""
        reads = texts * len(td_targets) if len(texts) == 1 else texts
        critic = self._critics[key]
        return [critic.update(*work) for work in zip(reads, td_targets, minibatches, strict=True)]

    def save(self, key: int, directory: str, *, training_state: bool) -> None:
        """Write one critic in Hugging Face layout, its value head beside it."""
        _save(self._critics[key], directory, training_state, self._rank == 0)

    def load(self, key: int, directory: str) -> None:
        """Continue from a checkpoint's folder."""
        self._critics[key].load_state_dict(_load_state(directory, self._size))


def _save(learner: Policy | Critic, directory: str, training_state: bool, writes: bool) -> None:
    Path(directory).mkdir(parents=True, exist_ok=True)
    learner.save_pretrained(directory)
    if training_state:
        state = learner.state_dict()
        if writes:
            torch.save(state, Path(directory) / STATE_FILE)


def _load_state(directory: str, size: int) -> dict[str, Any]:
    path = Path(directory) / STATE_FILE
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: only folders under checkpoints/ can be resumed from; final/ holds models alone"
        )
    # Several ranks each copy their part out of the file; a learner alone takes the tensors as its own.
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=size > 1)
    return state


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that have several: name -> the one under which it is in a snapshot."""
    owners = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: owners[id(p)] for name, p in every if name != owners[id(p)]}

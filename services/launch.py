"""Starts everything that a language-model run consists of: engines and learners, where the configuration puts them.

Owns the step from configuration to Ray actors.  What they then do is the training loop's business.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from transformers import AutoConfig

from actors.engine import Sampling
from actors.generation_group import GenerationGroup
from actors.generation_pool import GenerationPool, WorkerLostError
from actors.generation_worker import EngineSpec
from actors.limits import WaitLimitError
from learners.critic_inputs import CriticLayout, CriticReader
from learners.learner_actors import CriticLearner, LearnerSpec, PolicyLearner, PolicySpec
from learners.lora import LoraSpec
from learners.samples import Completion
from learners.snapshot import TransferSpec
from services.config import ActorCriticConfig, ConfigError, IACConfig, RunConfig
from services.learner_group import LearnerGroup, UpdateRules
from services.learner_ranks import RankGroup
from services.ray_connection import connect
from services.room import Room, Sources, critic_layout, take_room
from services.shared_folder import check_shared

_MIB = 2**20

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class System:
    """A running set of engines and learners."""

    generation: GenerationGroup
    learners: LearnerGroup
    sampling: Sampling
    tokenizers: list[Any]
    """Each agent's."""
    room: Room

    @property
    def workers_per_agent(self) -> int:
        """Of the agent that has the fewest: those beyond the plan end with their node."""
        return min(len(pool.workers) for pool in self.generation.pools)

    def generate(self, prompts: list[list[str]], seeds: list[list[int]]) -> list[list[Completion]]:
        """All agents' completions, drawn as training draws them."""
        return self.generation.generate(prompts, seeds, self.sampling)

    def scale(self, workers_per_agent: int, *, crowded: bool = True) -> None:
        """Go on with another number of generation workers; between two update rounds.

        Args:
            crowded: see `Room.worker_options`.

        Raises:
            WorkerLostError, WaitLimitError: a new worker did not come up; there are as many as before.
        """
        before = self.workers_per_agent
        try:
            self._scale(workers_per_agent, crowded)
        except (WorkerLostError, WaitLimitError):
            self._scale(before, crowded)
            raise

    def grow(self, most: int, *, crowded: bool) -> bool:
        """Get up to `most` generation workers per agent, as far as nodes have room for them; between two update rounds.

        Returns:
            Whether there are more than before.

        Raises:
            WorkerLostError, WaitLimitError: see `scale`.
        """
        before = self.workers_per_agent
        if before >= most or self.room.reservation.of_a_trial:
            return False
        more = self.room.more_workers(most - before, crowded=crowded)
        if more:
            self.scale(before + more, crowded=crowded)
        return more > 0

    def _scale(self, count: int, crowded: bool) -> None:
        self.generation.resize(
            [
                [self.room.worker_options(agent, k, crowded=crowded) for k in range(count)]
                for agent in range(len(self.generation.pools))
            ]
        )

    def shutdown(self) -> None:
        """End every actor and give the room back; safe to call when some have died."""
        self.generation.shutdown()
        self.learners.shutdown()
        self.room.reservation.release()


def launch(config: RunConfig, sources: Sources, tokenizers: Sequence[Any], folder: Path) -> System:
    """Start all actors side by side and wait until each is ready.

    Args:
        tokenizers: the agents', already loaded.
        folder: of the run, into which learners write.

    Raises:
        PlacementError: the cluster is too small.
        ConfigError: a node does not see `folder`, or weights are to go from GPU to GPU where there is none.
        WaitLimitError: an actor was not ready in time.
    """
    connect()
    args = config.args
    room = take_room(config, sources)
    try:
        check_shared(folder, room.reservation.nodes())
        _check_transfer(config, room)
        logger.info(
            "starting %d generation workers (%s) and %d learners",
            args.num_agents * config.engine.workers_per_agent,
            config.engine.backend,
            args.num_agents + len(room.placement.critics),  # each of one or several ranks
        )
        generation = _start_generation(config, sources, room)
        learners = _start_learners(config, sources, room, tokenizers[0])
    except BaseException:
        room.reservation.release()  # ends what has been started in it
        raise
    system = System(generation, learners, sampling_of(args), list(tokenizers), room)
    try:
        learners.wait_ready(config.learner.start_timeout_s)
        generation.wait_ready()
    except BaseException:
        system.shutdown()
        raise
    return system


@contextmanager
def engines_alone(config: RunConfig, sources: Sources) -> Iterator[GenerationGroup]:
    """Engines without learners, with the weights that lie in their folders."""
    connect()
    room = take_room(config, sources, with_learners=False)
    try:
        generation = _start_generation(config, sources, room)
        try:
            generation.wait_ready()
            yield generation
        finally:
            generation.shutdown()
    finally:
        room.reservation.release()


def sampling_of(args: ActorCriticConfig) -> Sampling:
    """How training draws completions."""
    return Sampling(args.max_new_tokens, args.temperature, args.top_p, args.top_k)


def _check_transfer(config: RunConfig, room: Room) -> None:
    way = config.engine.weight_transfer
    on_cpu = [agent for agent, places in enumerate(room.placement.policies) if places[0].device == "cpu"]
    if way in ("nccl", "ipc") and on_cpu:
        raise ConfigError(
            f"engine.weight_transfer: {way} goes from GPU to GPU, but agent {on_cpu[0]} learns on the CPU; "
            "use object_store there"
        )


def _start_generation(config: RunConfig, sources: Sources, room: Room) -> GenerationGroup:
    return GenerationGroup([_start_pool(config, sources, room, i) for i in range(config.args.num_agents)])


def _start_pool(config: RunConfig, sources: Sources, room: Room, agent: int) -> GenerationPool:
    engine = config.engine
    spec = EngineSpec(
        backend=engine.backend,
        model=sources.agents[agent],
        tokenizer=sources.tokenizers[agent],
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        kv_cache_memory_mib=engine.kv_cache_memory_mib,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        tensor_parallel_size=engine.tensor_parallel_size,
        enforce_eager=engine.enforce_eager,
        trust_remote_code=config.model_options.trust_remote_code,
        truncate_prompts=engine.truncate_prompts,
        logprob_tolerance=engine.logprob_tolerance,
        weight_transfer=engine.weight_transfer,
    )
    return GenerationPool(
        agent,
        spec,
        [room.worker_options(agent, replica, crowded=True) for replica in range(engine.workers_per_agent)],
        start_timeout_s=engine.start_timeout_s,
        generate_timeout_s=engine.generate_timeout_s,
    )


def _start_learners(config: RunConfig, sources: Sources, room: Room, first_tokenizer: Any) -> LearnerGroup:
    args, placement = config.args, room.placement
    layout = critic_layout(args, sources.critic_of_agent)
    policies = [_start_policy(config, sources, room, layout, i) for i in range(args.num_agents)]
    held_by: dict[str, dict[int, LearnerSpec]] = {}
    for key, (source, actor) in enumerate(zip(sources.critics, placement.critic_actors, strict=True)):
        device = placement.critics[actor][0].device
        spec = _learner_spec(config, source, args.effective_critic_learning_rate, device, key)
        held_by.setdefault(actor, {})[key] = spec
    critics: dict[int, RankGroup] = {}
    for name, specs in held_by.items():
        places = placement.critics[name]
        group = _ranks(f"critic {min(specs)}", CriticLearner, specs, [room.options(p) for p in places])
        critics.update(dict.fromkeys(specs, group))
    trust = config.model_options.trust_remote_code
    reader = CriticReader(
        layout,
        first_tokenizer,
        [_context_length(source, trust) for source in sources.critics],
        config.engine.truncate_prompts,
    )
    rules = UpdateRules(
        discount=args.discount,
        advantage_normalization=args.advantage_normalization,
        train_batch_size=args.effective_train_batch_size,
        reference_kl_coef=args.reference_kl_coef if args.reference_kl_enabled else None,
        seed=config.seed,
        weighs_tokens=config.importance_sampling_cap is not None,
        sends_weights=config.engine.weight_transfer != "object_store",
    )
    return LearnerGroup(policies, critics, reader, rules, update_timeout_s=config.learner.update_timeout_s)


def _start_policy(
    config: RunConfig, sources: Sources, room: Room, layout: CriticLayout, agent: int
) -> RankGroup:
    args = config.args
    places = room.placement.policies[agent]
    spec = PolicySpec(
        learner=_learner_spec(
            config, sources.agents[agent], args.agent_learning_rate, places[0].device, agent
        ),
        agent_idx=agent,
        backbone_value=layout.critic_type if layout.kind == "backbone" else None,
        value_clip_range=args.value_clip_range if isinstance(args, IACConfig) else None,
        with_reference=args.reference_kl_enabled,
        reference_device=room.placement.reference_devices[agent],
        importance_sampling_cap=config.importance_sampling_cap,
        lora=_lora_of(config),
        transfer=_transfer_of(config),
    )
    return _ranks(f"agent {agent}", PolicyLearner, spec, [room.options(place) for place in places])


def _lora_of(config: RunConfig) -> LoraSpec | None:
    lora = config.lora
    if lora is None:
        return None
    return LoraSpec(
        lora.rank, lora.alpha, None if lora.target_modules is None else tuple(lora.target_modules)
    )


def _transfer_of(config: RunConfig) -> TransferSpec | None:
    engine = config.engine
    if engine.weight_transfer == "object_store":
        return None
    return TransferSpec(
        engine.weight_transfer,
        engine.tensor_parallel_size,
        engine.transfer_bucket_mib * _MIB,
        engine.generate_timeout_s,
    )


def _learner_spec(config: RunConfig, source: str, learning_rate: float, device: str, key: int) -> LearnerSpec:
    args, options = config.args, config.model_options
    if isinstance(args, IACConfig) and not args.use_separate_critic:
        head_hidden = options.shared_head_hidden_dim(args)
    else:
        head_hidden = options.critic_head_hidden_dim(args)
    return LearnerSpec(
        source=source,
        learning_rate=learning_rate,
        device=device,
        dtype=options.dtype,
        value_head_hidden=head_hidden,
        value_loss_coef=args.value_loss_coef,
        micro_batch_tokens=config.learner.micro_batch_tokens,
        gradient_checkpointing=config.learner.gradient_checkpointing,
        trust_remote_code=options.trust_remote_code,
        attn_implementation=options.attn_implementation,
        seed=config.seed + key,
    )


def _ranks(label: str, learner: type, spec: Any, options: Sequence[dict[str, Any]]) -> RankGroup:
    """One actor per entry of `options`."""
    actor, size = ray.remote(learner), len(options)
    return RankGroup(
        label,
        [actor.options(max_restarts=0, **own).remote(spec, rank, size) for rank, own in enumerate(options)],
    )


def _context_length(source: str, trust_remote_code: bool) -> int | None:
    model = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()
    limit = getattr(model, "max_position_embeddings", None)
    return int(limit) if limit else None

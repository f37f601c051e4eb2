"""Starts everything that a language-model run consists of: engines and learners, where the configuration puts them.

Owns the step from configuration to Ray actors.  What they then do is the training loop's business.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from transformers import AutoConfig

from actors.engine import Sampling
from actors.generation_group import GenerationGroup
from actors.generation_pool import GenerationPool
from actors.generation_worker import EngineSpec
from learners.critic_inputs import CriticLayout, CriticReader
from learners.learner_actors import CriticLearner, LearnerSpec, PolicyLearner, PolicySpec
from services.config import ActorCriticConfig, IACConfig, RunConfig
from services.learner_group import LearnerGroup, UpdateRules
from services.placement import ActorPlacement, Placement, Shares, plan_placement

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the models of a run come from, every one a folder or hub identifier by now."""

    agents: Sequence[str]
    tokenizers: Sequence[str]
    critics: Sequence[str]
    """Distinct critic models; empty with a shared backbone."""
    critic_of_agent: Sequence[int]


@dataclass(slots=True)
class System:
    """A running set of engines and learners."""

    generation: GenerationGroup
    learners: LearnerGroup
    sampling: Sampling
    tokenizers: list[Any]
    """Each agent's."""

    def shutdown(self) -> None:
        """End every actor; safe to call when some have died."""
        self.generation.shutdown()
        self.learners.shutdown()


def connect() -> None:
    """Join the cluster that `RAY_ADDRESS` names, or start Ray on this machine; keep a connection that exists."""
    # A call with several results is checked by one of them; Ray would print its error for each of the others.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if not ray.is_initialized():
        ray.init(
            include_dashboard=False,
            logging_level=logging.WARNING,
            # Engines and libraries in actors chatter; their errors arrive as exceptions.
            log_to_driver=False,
        )


def launch(config: RunConfig, sources: Sources, tokenizers: Sequence[Any]) -> System:
    """Start all actors side by side and wait until each is ready. `tokenizers` are the agents', already loaded.

    Raises:
        PlacementError: the cluster is too small.
        WaitLimitError: an actor was not ready in time.
    """
    connect()
    args = config.args
    placement = _place(config, sources)
    logger.info(
        "starting %d generation workers (%s) and %d learners",
        args.num_agents * config.engine.workers_per_agent,
        config.engine.backend,
        args.num_agents + len(placement.critics),
    )
    generation = _start_generation(config, sources, placement)
    learners = _start_learners(config, sources, placement, tokenizers[0])
    system = System(
        generation,
        learners,
        sampling_of(args),
        list(tokenizers),
    )
    try:
        learners.wait_ready(config.learner.start_timeout_s)
        generation.wait_ready()
    except BaseException:
        system.shutdown()
        raise
    return system


def launch_generation(config: RunConfig, sources: Sources) -> GenerationGroup:
    """Start the engines alone, with the weights that lie in their folders."""
    connect()
    generation = _start_generation(config, sources, _place(config, sources))
    try:
        generation.wait_ready()
    except BaseException:
        generation.shutdown()
        raise
    return generation


def sampling_of(args: ActorCriticConfig) -> Sampling:
    """How training draws completions."""
    return Sampling(args.max_new_tokens, args.temperature, args.top_p, args.top_k)


def _start_generation(config: RunConfig, sources: Sources, placement: Placement) -> GenerationGroup:
    return GenerationGroup(
        [_start_pool(config, sources, placement, i) for i in range(config.args.num_agents)]
    )


def _place(config: RunConfig, sources: Sources) -> Placement:
    args = config.args
    resources = ray.cluster_resources()
    one_device = "cuda:0" if resources.get("GPU", 0) >= 1 else "cpu"
    placement = config.placement
    return plan_placement(
        num_agents=args.num_agents,
        workers_per_agent=config.engine.workers_per_agent,
        agent_devices=_devices(args.agent_devices, args.num_agents) or [one_device] * args.num_agents,
        critic_devices=_devices(args.critic_devices, len(sources.critics))
        or [one_device] * len(sources.critics),
        reference_devices=_devices(args.reference_devices, args.num_agents),
        shares=Shares(
            placement.cpus_per_generation_worker,
            placement.gpus_per_generation_worker,
            placement.cpus_per_learner,
            placement.gpus_per_learner,
        ),
        cluster_cpus=resources.get("CPU", 0),
        cluster_gpus=resources.get("GPU", 0),
    )


def _devices(devices: str | list[str] | None, count: int) -> list[str] | None:
    return [devices] * count if isinstance(devices, str) else devices


def _start_pool(config: RunConfig, sources: Sources, placement: Placement, agent: int) -> GenerationPool:
    engine = config.engine
    spec = EngineSpec(
        backend=engine.backend,
        model=sources.agents[agent],
        tokenizer=sources.tokenizers[agent],
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        kv_cache_memory_mib=engine.kv_cache_memory_mib,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        enforce_eager=engine.enforce_eager,
        trust_remote_code=config.model_options.trust_remote_code,
        truncate_prompts=engine.truncate_prompts,
        logprob_tolerance=engine.logprob_tolerance,
    )
    return GenerationPool(
        agent,
        spec,
        [worker.options for worker in placement.workers[agent]],
        start_timeout_s=engine.start_timeout_s,
        generate_timeout_s=engine.generate_timeout_s,
    )


def critic_layout(args: ActorCriticConfig, critic_of_agent: Sequence[int]) -> CriticLayout:
    """Who judges whom under the configured algorithm."""
    if not isinstance(args, IACConfig):
        return CriticLayout("joint", args.critic_type, (0,) * args.num_agents)
    if not args.use_separate_critic:
        return CriticLayout("backbone", args.critic_type)
    return CriticLayout("own", args.critic_type, tuple(critic_of_agent))


def _start_learners(
    config: RunConfig, sources: Sources, placement: Placement, first_tokenizer: Any
) -> LearnerGroup:
    args = config.args
    layout = critic_layout(args, sources.critic_of_agent)
    policies = [_start_policy(config, sources, placement, layout, i) for i in range(args.num_agents)]
    by_device: dict[str, dict[int, LearnerSpec]] = {}
    devices = _devices(args.critic_devices, len(sources.critics)) or [
        next(iter(placement.critics), "cpu") for _ in sources.critics
    ]
    for key, (source, device) in enumerate(zip(sources.critics, devices, strict=True)):
        spec = _learner_spec(config, source, args.effective_critic_learning_rate, device, key)
        by_device.setdefault(device, {})[key] = spec
    critics: dict[int, Any] = {}
    for device, specs in by_device.items():
        actor = _actor(CriticLearner, placement.critics[device]).remote(specs)
        critics.update(dict.fromkeys(specs, actor))
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
    )
    return LearnerGroup(policies, critics, reader, rules, update_timeout_s=config.learner.update_timeout_s)


def _start_policy(
    config: RunConfig, sources: Sources, placement: Placement, layout: CriticLayout, agent: int
) -> Any:
    args = config.args
    place = placement.policies[agent]
    spec = PolicySpec(
        learner=_learner_spec(config, sources.agents[agent], args.agent_learning_rate, place.device, agent),
        agent_idx=agent,
        backbone_value=layout.critic_type if layout.kind == "backbone" else None,
        value_clip_range=args.value_clip_range if isinstance(args, IACConfig) else None,
        with_reference=args.reference_kl_enabled,
        reference_device=placement.reference_devices[agent],
    )
    return _actor(PolicyLearner, place).remote(spec)


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


def _actor(learner: type, place: ActorPlacement) -> Any:
    return ray.remote(learner).options(max_restarts=0, **place.options)


def _context_length(source: str, trust_remote_code: bool) -> int | None:
    model = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code).get_text_config()
    limit = getattr(model, "max_position_embeddings", None)
    return int(limit) if limit else None

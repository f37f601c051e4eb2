"""The settings of a run's models: how they are loaded, how engines serve them, how learners train them.

Help texts stand here and nowhere else.  This module must not open a file or load a model.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from services.config.algorithm import ActorCriticConfig, IACConfig
from services.config.base import ConfigModel
from services.config.placement import PlacementConfig

Dtype = Literal["float32", "bfloat16", "float16"]


class ModelOptions(ConfigModel):
    """How models are loaded and how large value heads are."""

    dtype: Dtype | None = Field(
        default=None,
        description="Weights of learners; null: float32 on the CPU, bfloat16 on a GPU. "
        "Half types keep float32 optimiser state.",
    )
    critic_value_head_hidden_dim: int | None = Field(
        default=None, ge=1, description="The same as in `args`, kept for configurations that have it here."
    )
    value_head_hidden_dim: int | None = Field(
        default=None,
        ge=1,
        description="The same as in `args` of IAC, kept for configurations that have it here.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run model code that comes with a hub repository."
    )
    attn_implementation: str | None = Field(
        default=None,
        min_length=1,
        description="Attention of transformers, such as `sdpa` or `eager`; null: its own choice.",
    )

    def effective_dtype(self, on_gpu: bool) -> Dtype:
        """The type of the learners' weights."""
        return self.dtype or default_dtype(on_gpu)

    def critic_head_hidden_dim(self, args: ActorCriticConfig) -> int | None:
        """Hidden width of the value head of a critic model: that of `args`, else the one given here."""
        return args.critic_value_head_hidden_dim or self.critic_value_head_hidden_dim

    def shared_head_hidden_dim(self, args: IACConfig) -> int | None:
        """Hidden width of the value head on a shared backbone: that of `args`, else the one given here."""
        return args.value_head_hidden_dim or self.value_head_hidden_dim


class EngineConfig(ConfigModel):
    """The generation engines."""

    backend: Literal["vllm", "transformers"] = Field(
        default="vllm", description="What generates; `transformers` is slow and serves what vLLM does not."
    )
    workers_per_agent: int = Field(default=1, ge=1, description="Engines that share one agent's prompts.")
    max_workers_per_agent: int | None = Field(
        default=None,
        ge=1,
        description="How many such engines a run may grow to while it trains, as nodes with room join; "
        "null: only `greenroom scale` changes their number.",
    )
    tensor_parallel_size: int = Field(
        default=1,
        ge=1,
        description="GPUs over which vLLM spreads one engine's model; on the CPU as many processes.",
    )
    dtype: Dtype | None = Field(
        default=None, description="Weights of engines; null: float32 on the CPU, bfloat16 on a GPU."
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Longest prompt and completion together, in tokens; null: what the model allows.",
    )
    kv_cache_memory_mib: int | None = Field(
        default=None,
        ge=1,
        description="KV cache of one engine in MiB; null: 256 on the CPU, vLLM's choice on a GPU.",
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of a GPU's memory that one engine may take; null: vLLM's choice.",
    )
    enforce_eager: bool = Field(
        default=False, description="Do not compile the model: starts faster, generates slower."
    )
    truncate_prompts: bool = Field(
        default=False,
        description="Cut a prompt that is too long from its left, and count it, instead of refusing it.",
    )
    verify_push_every: int = Field(
        default=1,
        ge=1,
        description="Prove every n-th weight push by comparing log-probabilities with the learner's.",
    )
    logprob_tolerance: float | None = Field(
        default=None,
        gt=0,
        description="Largest difference such a proof accepts; null: 1e-3 in float32, 0.1 in half types.",
    )
    weight_transfer: Literal["object_store", "nccl", "ipc", "gloo"] = Field(
        default="object_store",
        description="How new weights travel: through Ray's object store, which is shared memory within a node, or "
        "straight from the learner through vLLM's weight transfer: `nccl` between GPUs, `ipc` where engine and learner "
        "share a GPU, `gloo` between CPUs.",
    )
    transfer_bucket_mib: int = Field(
        default=256,
        ge=1,
        description="Weights that go straight from the learner are sent in buckets of so many MiB.",
    )
    start_timeout_s: float = Field(
        default=600, gt=0, description="Longest wait for an engine to start, in seconds."
    )
    generate_timeout_s: float = Field(
        default=1800, gt=0, description="Longest wait for one call of generation, in seconds."
    )

    def inconsistencies(self) -> list[tuple[str, str]]:
        most, least = self.max_workers_per_agent, self.workers_per_agent
        if most is None:
            return []
        if most < least:
            return [("max_workers_per_agent", f"{most} is less than workers_per_agent={least}: raise it")]
        if self.weight_transfer == "ipc":
            text = "weight_transfer=ipc reaches engines on the learner's GPU alone: choose another, or leave this out"
            return [("max_workers_per_agent", text)]
        return []

    def effective_dtype(self, on_gpu: bool) -> Dtype:
        """The type of the engines' weights."""
        return self.dtype or default_dtype(on_gpu)

    def effective_kv_cache_memory_mib(self, on_gpu: bool) -> int | None:
        """MiB of KV cache; None leaves it to vLLM."""
        return self.kv_cache_memory_mib or (None if on_gpu else 256)

    def effective_logprob_tolerance(self, dtype: Dtype) -> float:
        """Largest accepted difference of a log-probability between an engine in `dtype` and the learner."""
        return self.logprob_tolerance or (1e-3 if dtype == "float32" else 0.1)


class LoraConfig(ConfigModel):
    """Low-rank adapters (LoRA) in the agents' models."""

    elsewhere: ClassVar[dict[str, str]] = {
        "dropout": "learners have none: the policy that is updated is the one that acted",
    }

    rank: int = Field(default=16, ge=1, description="Rank r of an adapter B A.")
    alpha: float = Field(
        default=32.0, gt=0, description="An adapter is scaled by alpha / rank before it is added."
    )
    target_modules: list[str] | None = Field(
        default=None,
        min_length=1,
        description="Names of the linear layers that get one, or their endings, such as [q_proj, v_proj]; null: all "
        "but the output head.",
    )


class LearnerConfig(ConfigModel):
    """The learners of policies and critics."""

    micro_batch_tokens: int = Field(
        default=16384,
        ge=1,
        description="Tokens, padding included, that a learner takes at a time; does not change a step.",
    )
    gradient_checkpointing: bool = Field(
        default=False, description="Recompute activations instead of keeping them."
    )
    ranks_per_policy: int = Field(
        default=1, ge=1, description="Processes, and GPUs, over which one agent's policy is sharded (FSDP)."
    )
    ranks_per_critic: int = Field(
        default=1,
        ge=1,
        description="Processes, and GPUs, over which a critic learner's models are sharded (FSDP).",
    )
    max_restarts: int = Field(
        default=3,
        ge=0,
        description="How often a run that lost a learner starts anew from its last checkpoint by itself.",
    )
    start_timeout_s: float = Field(
        default=600, gt=0, description="Longest wait for a learner to load its models, in seconds."
    )
    update_timeout_s: float = Field(
        default=3600, gt=0, description="Longest wait for one update, in seconds."
    )


def transfer_problems(
    engine: EngineConfig, learner: LearnerConfig, max_staleness: int
) -> list[tuple[str, str]]:
    """What does not go with weights that are sent straight from learners, each under its section."""
    way = f"weight_transfer={engine.weight_transfer}"
    if engine.weight_transfer == "object_store":
        return []
    found = []
    if engine.backend != "vllm":
        found.append(("engine", f"{way} is a way into vLLM: set engine.backend=vllm"))
    if max_staleness > 0:
        text = (
            f"{way} needs max_staleness=0: an engine that is lost during an update would get weights half-way"
        )
        found.append(("engine", text))
    ranks, width = learner.ranks_per_policy, engine.tensor_parallel_size
    if engine.weight_transfer == "ipc" and ranks != width:
        text = f"{way} shares each GPU's memory with the engine on it: learner.ranks_per_policy={ranks} must equal "
        found.append(("engine", f"{text}engine.tensor_parallel_size={width}"))
    return found


def wide_model_problems(
    engine: EngineConfig, learner: LearnerConfig, args: ActorCriticConfig, placement: PlacementConfig
) -> list[tuple[str, str]]:
    """What does not go with models that are spread over several devices, each under its section."""
    found: list[tuple[str, str]] = []
    if engine.tensor_parallel_size > 1 and engine.backend != "vllm":
        text = f"tensor_parallel_size={engine.tensor_parallel_size} needs engine.backend=vllm"
        found.append(("engine", text))
    widths = {
        "engine.tensor_parallel_size": engine.tensor_parallel_size,
        "learner.ranks_per_policy": learner.ranks_per_policy,
        "learner.ranks_per_critic": learner.ranks_per_critic,
    }
    wide = ", ".join(f"{name}={width}" for name, width in widths.items() if width > 1)
    for name in ("agent_devices", "critic_devices", "reference_devices") if wide else ():
        devices = str(getattr(args, name))
        if "cuda:" in devices:
            text = f"{name}={devices} numbers GPUs, but {wide} needs several for one model: write `cuda`"
            found.append(("args", text))
    if learner.ranks_per_policy > 1 and args.reference_devices is not None:
        text = "a reference is sharded like its policy, on the same devices: leave args.reference_devices out"
        found.append(("learner", f"ranks_per_policy={learner.ranks_per_policy}: {text}"))
    if args.num_critic_models == 0 and learner.ranks_per_critic > 1:
        text = "ranks_per_critic is given, but the critics are on the agents' backbones: set ranks_per_policy"
        found.append(("learner", text))
    shares = {
        "gpus_per_learner": (placement.gpus_per_learner, learner.ranks_per_policy),
        "gpus_per_critic": (placement.gpus_per_critic, learner.ranks_per_critic),
    }
    for name, (gpus, width) in shares.items():
        if width > 1 and gpus is not None and 0 < gpus <= 0.5:
            text = (
                f"{name}={gpus:g} lets two ranks of a learner share a GPU, which NCCL refuses: more than 0.5"
            )
            found.append(("placement", text))
    if engine.tensor_parallel_size > 1 and placement.gpus_per_generation_worker not in (
        None,
        0,
        engine.tensor_parallel_size,
    ):
        text = f"gpus_per_generation_worker must be {engine.tensor_parallel_size}, as engine.tensor_parallel_size is"
        found.append(("placement", text))
    return found


def default_dtype(on_gpu: bool) -> Dtype:
    """The type of weights where none is set."""
    return "bfloat16" if on_gpu else "float32"

"""The settings of a run that trains language models: what its YAML file holds.

Help texts stand here and nowhere else; the command line, the commented config and the reference are made from them.
This module must not open a file or load a model.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, SerializeAsAny, ValidationInfo, field_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

from services.config.algorithm import ActorCriticConfig, IACConfig, MAACConfig
from services.config.base import UNDECIDED, ConfigModel
from services.config.common import CommonRun

LANGUAGE_ALGORITHMS: dict[str, type[ActorCriticConfig]] = {"maac": MAACConfig, "iac": IACConfig}
"""The model that reads `args`, for each value of `algorithm`."""

Dtype = Literal["float32", "bfloat16", "float16"]

_CALLABLE: JsonDict = {"accepts": "`package.module:function` or `path/to/file.py:function`"}
_OPTIONAL_CALLABLE: JsonDict = {"accepts": "`package.module:function`, `path/to/file.py:function` or null"}
_FORMATTERS: JsonDict = {
    "accepts": "`package.module:function` or `path/to/file.py:function`, a list of them, or null"
}
_MODEL: JsonDict = {"accepts": "folder or hub name, or null"}
_MODELS: JsonDict = {"accepts": "list of folders or hub names, or null"}
_DATA: JsonDict = {"accepts": "text (the `path`) or section of settings"}
_OPTIONAL_DATA: JsonDict = {"accepts": "text (the `path`), section of settings or null"}
_TOKENIZER: JsonDict = {"accepts": "folder or hub name, a list of them, or null"}


class DataConfig(ConfigModel):
    """Where rows come from. A plain text instead of this section means its `path`."""

    path: str = Field(
        min_length=1,
        description="A .jsonl, .json, .csv or .parquet file, a folder of such files, a folder written by "
        "`Dataset.save_to_disk`, or a name on the Hugging Face hub.",
        examples=["data/train.jsonl"],
    )
    split: str | None = Field(
        default=None,
        min_length=1,
        description="Split to take, such as `train` or `test[:100]`; null: `train`, or the only one.",
    )
    name: str | None = Field(
        default=None, min_length=1, description="Configuration of a hub data set that has several."
    )
    limit: int | None = Field(default=None, ge=1, description="Take only the first so many rows.")


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
    start_timeout_s: float = Field(
        default=600, gt=0, description="Longest wait for an engine to start, in seconds."
    )
    generate_timeout_s: float = Field(
        default=1800, gt=0, description="Longest wait for one call of generation, in seconds."
    )

    def effective_dtype(self, on_gpu: bool) -> Dtype:
        """The type of the engines' weights."""
        return self.dtype or default_dtype(on_gpu)

    def effective_kv_cache_memory_mib(self, on_gpu: bool) -> int | None:
        """MiB of KV cache; None leaves it to vLLM."""
        return self.kv_cache_memory_mib or (None if on_gpu else 256)

    def effective_logprob_tolerance(self, dtype: Dtype) -> float:
        """Largest accepted difference of a log-probability between an engine in `dtype` and the learner."""
        return self.logprob_tolerance or (1e-3 if dtype == "float32" else 0.1)


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
    start_timeout_s: float = Field(
        default=600, gt=0, description="Longest wait for a learner to load its models, in seconds."
    )
    update_timeout_s: float = Field(
        default=3600, gt=0, description="Longest wait for one update, in seconds."
    )


class PlacementConfig(ConfigModel):
    """What the actors ask Ray for; null is chosen from what the machine has."""

    cpus_per_generation_worker: float | None = Field(
        default=None, ge=0, description="CPUs of one generation worker."
    )
    gpus_per_generation_worker: float | None = Field(
        default=None, ge=0, description="GPUs of one generation worker."
    )
    cpus_per_learner: float | None = Field(default=None, ge=0, description="CPUs of one learner.")
    gpus_per_learner: float | None = Field(default=None, ge=0, description="GPUs of one learner.")
    timeout_s: float = Field(default=300, gt=0, description="Longest wait for these resources, in seconds.")


class RunConfig(CommonRun):
    """A whole run of MAAC or IAC. Relative paths start from the folder in which the command is run."""

    algorithm: Literal["maac", "iac"] = Field(
        description="`maac`: one critic for all agents; `iac`: one for each.",
        examples=["maac"],
        json_schema_extra={"accepts": "`maac` or `iac`; `smarl` for a run of DDPG agents"},
    )
    agent_model: str | None = Field(
        default=None,
        min_length=1,
        description="Model from which every agent starts; they train apart. Either this or `agents`.",
        examples=["path/to/agent-model"],
        json_schema_extra=_MODEL,
    )
    agents: list[str] | None = Field(
        default=None, description="A model for each agent, where they differ.", json_schema_extra=_MODELS
    )
    critic_model: str | None = Field(
        default=None,
        min_length=1,
        description="Model from which the critics start; must read the agents' token ids. This or `critics`; "
        "neither with a shared backbone (IAC).",
        examples=["path/to/critic-model"],
        json_schema_extra=_MODEL,
    )
    critics: list[str] | None = Field(
        default=None,
        description="Critic models: exactly one for MAAC, one for each agent for IAC.",
        json_schema_extra=_MODELS,
    )
    tokenizer: str | list[str] | None = Field(
        default=None,
        description="Tokenizer of all agents, or one for each; null: that of each agent's model.",
        json_schema_extra=_TOKENIZER,
    )
    reward_func: str = Field(
        min_length=1,
        description="Scores the agents' joint answer.",
        examples=["path/to/callbacks.py:reward"],
        json_schema_extra=_CALLABLE,
    )
    reward_processor: str | None = Field(
        default=None,
        min_length=1,
        description="Applied to every number that the reward function returns.",
        json_schema_extra=_OPTIONAL_CALLABLE,
    )
    formatters: str | list[str | None] | None = Field(
        default=None,
        description="Makes a prompt of a row, for all agents or one for each; null: the row's `prompt`.",
        json_schema_extra=_FORMATTERS,
    )
    external_transition: str | None = Field(
        default=None,
        min_length=1,
        description="Makes the prompts of every turn but the first; needed when `args.num_turns` > 1.",
        examples=["path/to/callbacks.py:transition"],
        json_schema_extra=_OPTIONAL_CALLABLE,
    )
    metrics_callback: str | None = Field(
        default=None,
        min_length=1,
        description="Makes further metrics of a list of rollout samples.",
        json_schema_extra=_OPTIONAL_CALLABLE,
    )
    train_dataset: DataConfig = Field(description="Rows to train on.", json_schema_extra=_DATA)
    eval_dataset: DataConfig | None = Field(
        default=None,
        description="Rows to evaluate on; null: no evaluation.",
        json_schema_extra=_OPTIONAL_DATA,
    )
    args: SerializeAsAny[ActorCriticConfig] = Field(
        default=None,  # made by the validator, which knows the algorithm
        validate_default=True,
        description="The algorithm's settings.",
    )
    model_options: ModelOptions = Field(
        default=ModelOptions(), alias="model_config", description="How models are loaded."
    )
    engine: EngineConfig = Field(default=EngineConfig(), description="The generation engines.")
    learner: LearnerConfig = Field(default=LearnerConfig(), description="The learners.")
    placement: PlacementConfig = Field(
        default=PlacementConfig(), description="Resources of the actors; null is chosen automatically."
    )
    checkpoint_interval: int = Field(
        default=50, ge=0, description="Update rounds between two checkpoints; 0: only at the end."
    )
    eval_greedy: bool = Field(
        default=False, description="Evaluate with the likeliest token instead of sampling."
    )
    reward_timeout_s: float = Field(
        default=300, gt=0, description="Longest wait for one call of the reward function, in seconds."
    )

    @field_validator("args", mode="before")
    @classmethod
    def _read_args(cls, value: Any, info: ValidationInfo) -> ActorCriticConfig:
        model = LANGUAGE_ALGORITHMS.get(info.data.get("algorithm", ""))
        if model is None:
            raise PydanticCustomError(UNDECIDED, "not read, since `algorithm` is not known")
        if isinstance(value, ActorCriticConfig) and not isinstance(value, model):
            raise ValueError(f"{type(value).__name__} is given, but the algorithm needs {model.__name__}")
        return model.model_validate({} if value is None else value)

    @field_validator("model_options", "engine", "learner", "placement", mode="before")
    @classmethod
    def _empty_section(cls, value: Any) -> Any:
        # `engine:` with nothing below it is null in YAML.
        return {} if value is None else value

    @field_validator("train_dataset", "eval_dataset", mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    def inconsistencies(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        here = self.model_options
        for name in ("critic_value_head_hidden_dim", "value_head_hidden_dim"):
            wanted, there = getattr(here, name), getattr(self.args, name, None)
            if wanted is not None and there is not None and wanted != there:
                found.append(
                    (
                        "model_options",
                        f"{name}={wanted} contradicts args.{name}={there}: give it in one of the two",
                    )
                )
        return found


def default_dtype(on_gpu: bool) -> Dtype:
    """The type of weights where none is set."""
    return "bfloat16" if on_gpu else "float32"

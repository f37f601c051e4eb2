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
from services.config.models import (
    EngineConfig,
    LearnerConfig,
    LoraConfig,
    ModelOptions,
    transfer_problems,
    wide_model_problems,
)
from services.config.placement import PlacementConfig

LANGUAGE_ALGORITHMS: dict[str, type[ActorCriticConfig]] = {"maac": MAACConfig, "iac": IACConfig}
"""The model that reads `args`, for each value of `algorithm`."""

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
    lora: LoraConfig | None = Field(
        default=None,
        description="Train adapters in the agents' models instead of all their weights; null: all weights. Critic "
        "models train in full.",
        json_schema_extra={"accepts": "section of settings or null"},
    )
    placement: PlacementConfig = Field(
        default=PlacementConfig(),
        description="Nodes and resources of the actors; null is chosen automatically.",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        le=1,
        description="0: strictly on-policy; 1: the next rollouts are drawn while the update runs, from weights that "
        "are one update old.",
    )
    importance_sampling_cap: float | None = Field(
        default=None,
        gt=0,
        description="Truncated importance sampling: weigh each token by how much likelier the learner finds it than "
        "the engine did, at most this; null: no correction.",
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
        found += wide_model_problems(self.engine, self.learner, self.args, self.placement)
        found += transfer_problems(self.engine, self.learner, self.max_staleness)
        if self.lora is not None and self.args.reference_devices is not None:
            found.append(
                (
                    "lora",
                    "needs no reference model: the reference is the agent's model without its adapters, on the "
                    "same device; leave args.reference_devices out",
                )
            )
        if self.placement.strategy != "pack":
            found += [("placement", text) for text in self._numbered_devices()]
        return found

    def _numbered_devices(self) -> list[str]:
        """Numbers of GPUs mean something on one node only."""
        return [
            f"strategy={self.placement.strategy} uses several nodes, but args.{name}={devices} numbers the GPUs of "
            "one: write `cuda`, and Ray picks the GPU; or use strategy=pack"
            for name in ("agent_devices", "critic_devices", "reference_devices")
            if (devices := getattr(self.args, name)) is not None and "cuda:" in str(devices)
        ]

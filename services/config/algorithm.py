"""The settings of the two algorithms, MAAC and IAC: names, defaults and rules.

Help texts stand here and nowhere else; command line, commented config and reference are made from them.
This module must not know of models, files or machines.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.config import JsonDict

from services.config.base import ConfigModel

Device = Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")]
Devices = Device | list[Device] | None

_DEVICES: JsonDict = {
    "accepts": "`cpu`, `cuda` or `cuda:<number>`; one for all, or a list with one each; or null"
}


class ActorCriticConfig(ConfigModel):
    """What MAAC and IAC have in common."""

    algorithm: ClassVar[str] = ""

    num_agents: int = Field(default=2, ge=1, description="Language-model agents that answer together.")
    num_turns: int = Field(
        default=2,
        ge=1,
        description="Turns of a rollout; several need `external_transition` and `num_generations: 1`.",
    )
    num_train_epochs: int = Field(default=40, ge=1, description="Passes over the training set.")
    critic_type: Literal["v", "q"] = Field(
        default="v",
        description="What the critic values: `v` the history (prompt), `q` the history and the completion.",
    )
    agent_learning_rate: float = Field(default=5e-6, ge=0, description="AdamW learning rate of the agents.")
    critic_learning_rate: float | None = Field(
        default=5e-6, ge=0, description="AdamW learning rate of critics."
    )
    value_loss_coef: float = Field(default=0.6, ge=0, description="Weight of the critic's loss.")
    critic_value_head_hidden_dim: int | None = Field(
        default=None,
        ge=1,
        description="Width of a hidden layer in the value head of a critic model; null: none.",
    )
    advantage_normalization: bool = Field(
        default=True,
        description="Standardise the TD errors of each group of one agent and one turn before an update.",
    )
    rollout_buffer_size: int = Field(
        default=8, ge=1, description="Samples that an agent collects before it is updated."
    )
    train_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Samples of one optimiser step; null: as many as `rollout_buffer_size`.",
    )
    max_new_tokens: int = Field(default=256, ge=1, description="Longest completion, in tokens.")
    temperature: float = Field(
        default=0.6, gt=0, description="Sampling temperature. (Greedy evaluation: `eval_greedy` of the run.)"
    )
    top_p: float = Field(
        default=0.6, gt=0, le=1, description="Nucleus sampling: probability mass kept; 1 keeps all."
    )
    top_k: int | None = Field(
        default=None, ge=1, description="Sample among the k likeliest tokens only; null: among all."
    )
    num_generations: int = Field(
        default=1,
        ge=1,
        description="Completions per prompt and agent; the agents' i-th ones form the i-th joint answer.",
    )
    external_prompt_passthrough: bool = Field(
        default=False,
        description="Give the transition's prompts to the models as they are, not to the formatter again.",
    )
    discount: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Gamma of the TD targets. (`expected_return` is never discounted.)",
    )
    early_termination_threshold: float | None = Field(
        default=-0.2,
        description="A rollout ends after a turn whose mean processed reward exceeds this; null: never.",
    )
    eval_interval: int = Field(
        default=16,
        ge=0,
        description="Evaluate before every n-th training item, starting with the first; 0: never.",
    )
    eval_num_samples: int = Field(default=4, ge=1, description="Items of one evaluation.")
    eval_batch_size: int = Field(
        default=1, ge=1, description="Items that an evaluation generates for side by side."
    )
    logging_steps: int = Field(
        default=1,
        ge=1,
        description="Least number of joint-action reward evaluations between two training logs.",
    )
    parallel_training: Literal["none", "mp"] = Field(
        default="none",
        description="`none`: everything on one device; `mp`: placed as `agent_devices` and the like say.",
    )
    agent_devices: Devices = Field(
        default=None,
        description="Device of each agent's policy; needed with `mp`.",
        json_schema_extra=_DEVICES,
    )
    critic_devices: Devices = Field(
        default=None, description="Device of each critic model; needed with `mp`.", json_schema_extra=_DEVICES
    )
    reference_kl_enabled: bool = Field(
        default=False,
        description="Subtract a penalty from the reward for moving away from the frozen initial policy.",
    )
    reference_kl_coef: float = Field(default=0.1, ge=0, description="Weight of that penalty.")
    reference_devices: Devices = Field(
        default=None,
        description="Device of each agent's frozen reference; null: that of its policy.",
        json_schema_extra=_DEVICES,
    )

    @property
    def effective_train_batch_size(self) -> int:
        """Samples of one optimiser step."""
        return self.train_batch_size or self.rollout_buffer_size

    @property
    def effective_critic_learning_rate(self) -> float:
        """Learning rate of the critics."""
        raise NotImplementedError

    @property
    def num_critic_models(self) -> int:
        """Critics that are models of their own."""
        raise NotImplementedError

    def inconsistencies(self) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        if self.num_turns > 1 and self.num_generations != 1:
            text = (
                f"{self.num_generations} does not go with num_turns={self.num_turns}: several turns need "
                "exactly one completion per prompt; set num_generations=1 or num_turns=1"
            )
            found.append(("num_generations", text))
        if self.reference_devices is not None and not self.reference_kl_enabled:
            text = (
                f"{self.reference_devices!r} is given, but there is no reference model: set "
                "reference_kl_enabled=true or leave reference_devices out"
            )
            found.append(("reference_devices", text))
        wanted = {
            "agent_devices": (self.agent_devices, self.num_agents, True),
            "critic_devices": (self.critic_devices, self.num_critic_models, self.num_critic_models > 0),
            "reference_devices": (self.reference_devices, self.num_agents, False),
        }
        for field, (devices, count, needed) in wanted.items():
            problem = _device_problem(field, devices, count, needed, self.parallel_training)
            if problem:
                found.append((field, problem))
        return found


def _device_problem(
    field: str, devices: Devices, count: int, needed: bool, parallel_training: str
) -> str | None:
    """What is wrong with the placement of `count` models, or None."""
    if parallel_training == "none":
        if devices is None:
            return None
        return (
            f"{devices!r} is given, but parallel_training='none' keeps everything on one device: set "
            f"parallel_training='mp' or leave {field} out"
        )
    if devices is None and needed:
        example = [f"cuda:{i}" for i in range(count)]
        return (
            f"None, but parallel_training='mp' needs it: give one device for all, or a list of {count}, "
            f"such as {example}"
        )
    if isinstance(devices, list) and count > 0 and len(devices) != count:
        return (
            f"{devices!r} has {len(devices)} entries where {count} are needed: give one device for all, or a "
            f"list of {count}"
        )
    return None


class MAACConfig(ActorCriticConfig):
    """Multi-agent actor-critic: one critic reads the joint history, and every agent shares its TD error."""

    algorithm: ClassVar[str] = "maac"
    elsewhere: ClassVar[dict[str, str]] = {
        "value_clip_range": "only IAC has it; MAAC does not clip values",
        "use_separate_critic": "only IAC has it; the critic of MAAC is always a model of its own",
        "value_head_hidden_dim": "only IAC has it; MAAC takes `critic_value_head_hidden_dim`",
    }

    critic_learning_rate: float = Field(
        default=5e-6, ge=0, description="AdamW learning rate of the shared critic."
    )

    @property
    def effective_critic_learning_rate(self) -> float:
        """Learning rate of the shared critic."""
        return self.critic_learning_rate

    @property
    def num_critic_models(self) -> int:
        """Always one: the shared critic."""
        return 1


class IACConfig(ActorCriticConfig):
    """Independent actor-critic: every agent has a critic of its own, on its own history."""

    algorithm: ClassVar[str] = "iac"

    critic_learning_rate: float | None = Field(
        default=5e-6,
        ge=0,
        description="AdamW learning rate of the separate critics; null: the agents'. "
        "With the shared backbone always the agents'.",
    )
    use_separate_critic: bool = Field(
        default=True,
        description="A critic model for each agent; false: a small value head on each agent's own backbone.",
    )
    value_clip_range: float | None = Field(
        default=0.2,
        gt=0,
        description="Clip range of the value loss, shared backbone only; null: no clipping.",
    )
    value_head_hidden_dim: int | None = Field(
        default=None,
        ge=1,
        description="Width of a hidden layer in the value head on a shared backbone; null: none.",
    )

    @property
    def effective_critic_learning_rate(self) -> float:
        """Learning rate of the critics: the agents' where none is set or the backbone is shared."""
        if self.critic_learning_rate is None or not self.use_separate_critic:
            return self.agent_learning_rate
        return self.critic_learning_rate

    @property
    def num_critic_models(self) -> int:
        """One for each agent, or none with the shared backbone."""
        return self.num_agents if self.use_separate_critic else 0

    def inconsistencies(self) -> list[tuple[str, str]]:
        found = super().inconsistencies()
        if self.use_separate_critic and self.value_head_hidden_dim is not None:
            text = (
                f"{self.value_head_hidden_dim} is for the shared backbone: use critic_value_head_hidden_dim, "
                "or set use_separate_critic=false"
            )
            found.append(("value_head_hidden_dim", text))
        if not self.use_separate_critic and self.critic_value_head_hidden_dim is not None:
            text = (
                f"{self.critic_value_head_hidden_dim} is for separate critics: use value_head_hidden_dim, or "
                "set use_separate_critic=true"
            )
            found.append(("critic_value_head_hidden_dim", text))
        if (
            not self.use_separate_critic
            and self.critic_devices is not None
            and self.parallel_training == "mp"
        ):
            text = (
                f"{self.critic_devices!r} is given, but use_separate_critic=false puts the critics on the "
                "agents' backbones: leave critic_devices out"
            )
            found.append(("critic_devices", text))
        return found

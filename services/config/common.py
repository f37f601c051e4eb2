"""What every run has, whatever it trains: where it writes, its seed, its logs."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from services.config.base import ConfigModel


class WandbConfig(ConfigModel):
    """Logging to Weights & Biases."""

    project: str = Field(default="greenroom", min_length=1, description="Project to log to.")
    entity: str | None = Field(default=None, min_length=1, description="User or team; null: the default one.")
    name: str | None = Field(
        default=None, min_length=1, description="Name of the run there; null: `run_name`."
    )
    mode: Literal["online", "offline", "disabled"] = Field(
        default="online", description="`offline` keeps the log on disk until `wandb sync`."
    )
    dir: str | None = Field(
        default=None, min_length=1, description="Folder of its local files; null: the run folder."
    )
    tags: list[str] = Field(default_factory=list, description="Tags of the run.")


class CommonRun(ConfigModel):
    """The settings that all runs share."""

    elsewhere: ClassVar[dict[str, str]] = {"sweep": "only `greenroom sweep` reads it"}

    wandb_config: WandbConfig | None = Field(
        default=None, description="Log to Weights & Biases; null: do not."
    )
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="Seed of everything that is random.")
    output_dir: str = Field(default="runs", min_length=1, description="Folder in which run folders are made.")
    run_name: str | None = Field(
        default=None,
        pattern=r"^[^/\\]+$",
        description="Name of the run folder; null: algorithm and time.",
        json_schema_extra={"accepts": "text without slashes, or null"},
    )
    storage_path: str | None = Field(
        default=None,
        min_length=1,
        description="Where a copy of the run is kept, brought up to date after every checkpoint: a folder, or a URI "
        "such as s3://bucket/runs or gs://bucket/runs; null: nowhere.",
        json_schema_extra={"accepts": "a folder or a URI, or null"},
    )
    keep_checkpoints: int | None = Field(
        default=3, ge=1, description="Newest checkpoints to keep; null: all."
    )

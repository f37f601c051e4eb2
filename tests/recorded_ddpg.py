"""Reads the recorded DDPG runs: their networks as flat rows, their minibatches as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from rounds import oracle_folder

from learners.smarl.common_action import CommonSpace
from learners.smarl.ddpg import Networks, TransitionBatch
from learners.smarl.stacked_mlp import MLPShape

CASES = sorted(oracle_folder().glob("ddpg_sync_*.json"))
TOLERANCE = 1e-9


def shapes(case: dict[str, Any]) -> Networks:
    size = case["act_dim"]
    space = CommonSpace(False, size, (-1.0,) * size, (1.0,) * size)
    return Networks.of(case["obs_dim"], space, tuple(case["hidden"]))


def row(shape: MLPShape, layers: list[dict[str, Any]]) -> np.ndarray:
    return shape.flatten([(np.array(layer["weight"]), np.array(layer["bias"])) for layer in layers])


def rows(shape: MLPShape, agents: list[list[dict[str, Any]]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([row(shape, layers) for layers in agents]))


def batch_of(agents: list[dict[str, Any]]) -> TransitionBatch:
    stacked = {
        name: torch.tensor([agent[name] for agent in agents], dtype=torch.float64)
        for name in ("obs", "action", "reward", "next_obs")
    }
    return TransitionBatch(
        stacked["obs"],
        stacked["action"],
        stacked["reward"],
        stacked["next_obs"],
        torch.zeros_like(stacked["reward"], dtype=torch.bool),
    )

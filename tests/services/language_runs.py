"""What tests of whole language-model runs share: their settings, and how two runs are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import torch
from safetensors.torch import load_file

ROWS = [{"prompt": f"def add_{i}(a, b):"} for i in range(12)]
FAST: dict[str, Any] = {
    "max_new_tokens": 12,
    "temperature": 1.0,
    "top_p": 1.0,
    "early_termination_threshold": None,
}
TRANSFORMERS = {"backend": "transformers"}
VLLM = {"enforce_eager": True, "kv_cache_memory_mib": 32}


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def rollouts_of(run: Path) -> list[dict[str, Any]]:
    rows = ds.dataset(run / "rollouts").to_table().to_pylist()
    return sorted(
        rows, key=lambda r: (r["round"], r["agent_idx"], r["item_idx"], r["turn_idx"], r["generation_idx"])
    )


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.relative_to(folder)}:{name}": tensor
        for path in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def assert_same_run(one: Path, other: Path) -> None:
    """Same samples with the same numbers, same weights bit for bit, same metrics but for times."""
    assert rollouts_of(one) == rollouts_of(other)
    weights, others = weights_of(one / "final"), weights_of(other / "final")
    assert weights.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
    assert timeless(metrics_of(one)) == timeless(metrics_of(other))


def timeless(logs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def keep(name: str) -> bool:
        return name not in ("time", "tokens_per_second") and not name.startswith(("seconds/", "idle/"))

    return [{name: value for name, value in log.items() if keep(name)} for log in logs]


LEARN = {
    "agent_learning_rate": 5e-3,
    "critic_learning_rate": 5e-3,
    "num_train_epochs": 14,
    "rollout_buffer_size": 24,
}

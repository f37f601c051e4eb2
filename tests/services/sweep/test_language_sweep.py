"""A sweep over language models with real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from sweep_runs import logs

from services.sweep.sweep import Sweep, load_sweep

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("ray_cluster"),
]

CALLBACKS = Path(__file__).parents[1] / "callbacks_for_training.py"


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "cpus_per_learner"), [("maac", 1), ("iac", 0.75)])
def test_a_sweep_trains_one_trial_after_the_other_where_each_needs_the_whole_cluster(
    tmp_path: Path, small_model: Path, algorithm: str, cpus_per_learner: float
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"def f{i}():"}) + "\n" for i in range(8))
    )
    settings = {
        "algorithm": algorithm,
        "agent_model": str(small_model),
        "critic_model": str(small_model),
        "reward_func": f"{CALLBACKS}:letters",
        "train_dataset": str(tmp_path / "rows.jsonl"),
        "output_dir": str(tmp_path),
        "run_name": "sweep",
        "args": {
            "num_turns": 1,
            "num_train_epochs": 1,
            "num_generations": 2,
            "rollout_buffer_size": 4,
            "max_new_tokens": 8,
            "early_termination_threshold": None,
        },
        "engine": {"enforce_eager": True, "kv_cache_memory_mib": 32},
        "placement": {"cpus_per_generation_worker": 2, "cpus_per_learner": cpus_per_learner},
        "sweep": {
            "space": {
                "value_loss_coef": {"loguniform": [0.1, 1.0]},
                "discount": {"uniform": [0.9, 1.0]},
            },
            "num_samples": 2,
            "checkpoint_interval": 2,
        },
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    made = Sweep.create(*load_sweep(tmp_path / "config.yaml"))
    first, second = made.fit()
    for outcome in (first, second):
        run = made.folder.runs / outcome.trial
        entries = logs(run)
        assert outcome.error is None
        assert outcome.reports == len(entries) == 4
        assert outcome.score == pytest.approx(entries[-1]["turn_1/reward_mean"])
        assert 0.1 <= outcome.values["value_loss_coef"] <= 1
        assert 0.9 <= outcome.values["discount"] <= 1
        assert (run / "final" / "agent_1" / "model.safetensors").is_file()
    # Two engines and three learners, or four, take 7 of 8 CPUs.
    spans = [[entry["time"] for entry in logs(made.folder.runs / o.trial)] for o in (first, second)]
    earlier, later = sorted(spans)
    assert earlier[-1] < later[0]
    assert (made.folder.path / "best.yaml").is_file()

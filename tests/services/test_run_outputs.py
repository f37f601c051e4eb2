"""What a run writes down: folder, metrics, rollouts, checkpoints, reports."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset as ds
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rounds import agent_round, completion, recorded, sample
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from actors.generation_group import GenerationStats
from actors.rewards import CallbackError
from services.checkpoint import CheckpointError, CheckpointStore, TrainerState
from services.config import WandbConfig
from services.learner_group import RoundResult
from services.metrics import MetricBuffer, MetricsError, MetricsLogger
from services.metrics_callback import call_metrics_callback
from services.progress import Progress
from services.reporting import round_report, turn_metrics
from services.rollout_log import RolloutLog
from services.run_folder import RunFolder, RunFolderError
from services.summary import summarize


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path, "run", "maac")
    folder.write_config("algorithm: maac\n")
    return folder


def lines(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics_file.read_text().splitlines()]


def test_a_run_folder_is_never_written_over(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"run_name: .*/run holds a run already.*--resume"):
        RunFolder.create(tmp_path, "run", "maac")
    assert RunFolder.open(run.path) == run


def test_a_start_that_fails_takes_back_only_a_folder_in_which_nothing_began(run: RunFolder) -> None:
    for begun in (True, False):
        if begun:
            run.metrics_file.write_text("{}\n")
        else:
            run.metrics_file.unlink()
        with pytest.raises(KeyboardInterrupt), run.kept_once_started():
            raise KeyboardInterrupt
        assert run.path.exists() == begun
    with run.kept_once_started():
        run.write_config("algorithm: iac\n")
    assert run.config_file.read_text() == "algorithm: iac\n"


def test_runs_without_a_name_get_different_ones(tmp_path: Path) -> None:
    assert len({RunFolder.create(tmp_path, None, "iac").path for _ in range(3)}) == 3


def test_a_folder_without_config_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="is no run folder"):
        RunFolder.open(tmp_path)


def test_an_output_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match=r"output_dir: .*file/run cannot be made"):
        RunFolder.create(tmp_path / "file", "run", "maac")


def test_metrics_go_to_lines_and_tensorboard(run: RunFolder) -> None:
    logger = MetricsLogger(run, None, resume_step=None)
    logger.log({"turn_1/reward_mean": 0.25}, 8)
    logger.log({"turn_1/reward_mean": 0.5}, 16)
    assert [(line["step"], line["turn_1/reward_mean"]) for line in lines(run)] == [(8, 0.25), (16, 0.5)]
    logger.close()
    logger.close()
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("turn_1/reward_mean")] == [(8, 0.25), (16, 0.5)]


def test_a_resumed_log_forgets_what_will_happen_again(run: RunFolder) -> None:
    logger = MetricsLogger(run, None, resume_step=None)
    for step, name in [(0, "eval/x"), (8, "train"), (8, "eval/x"), (16, "train")]:
        logger.log({name: 1.0}, step)
    logger.close()
    with run.metrics_file.open("a") as file:
        file.write('{"step": 24, "tra')  # cut off when the process died
    MetricsLogger(run, None, resume_step=8).close()
    assert [(line["step"], sorted(line)[0]) for line in lines(run)] == [(0, "eval/x"), (8, "step")]


def test_a_resumed_log_keeps_a_round_that_ended_with_an_evaluation(run: RunFolder) -> None:
    logger = MetricsLogger(run, None, resume_step=None)
    for step in (8, 16, 24):
        logger.log({"return_mean": 1.0, "eval/return_mean": 2.0}, step)
    logger.close()
    MetricsLogger(run, None, resume_step=16).close()
    assert [line["step"] for line in lines(run)] == [8, 16]


def test_a_full_disk_is_named_with_the_remedy(run: RunFolder) -> None:
    logger = MetricsLogger(run, None, resume_step=None)
    logger._file.close()
    logger._file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(MetricsError, match=r"metrics\.jsonl: .*No space left.*--resume"):
        logger.log({"x": 1.0}, 1)


def test_weights_and_biases_offline(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = MetricsLogger(run, WandbConfig(project="p", mode="offline", tags=["t"]), resume_step=None)
    logger.log({"turn_1/reward_mean": 0.25}, 8)
    logger.close()
    (binary,) = run.path.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 20  # wandb's own process may still be writing when `finish` has returned
    while b"turn_1/reward_mean" not in binary.read_bytes() and time.monotonic() < end:
        time.sleep(0.1)
    assert b"turn_1/reward_mean" in binary.read_bytes()


def test_logs_wait_for_enough_reward_evaluations() -> None:
    buffer = MetricBuffer(10, {})
    assert buffer.add({"reward": 1.0, "gap_max": 3.0, "count/cut": 2.0}, 4) is None
    logged = buffer.add({"reward": 0.0, "gap_max": 1.0, "count/cut": 1.0}, 12)
    assert logged == {"reward": pytest.approx(4 / 16), "gap_max": 3.0, "count/cut": 3.0}
    assert buffer.add({"reward": 5.0}, 9) is None


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 9)), min_size=1, max_size=20), st.integers(1, 30))
def test_a_restored_buffer_logs_the_same(adds: list[tuple[float, int]], logging_steps: int) -> None:
    whole, restored = MetricBuffer(logging_steps, {}), MetricBuffer(logging_steps, {})
    for value, evaluations in adds:
        metrics = {"reward": value, "gap_max": value, "count/x": 1.0}
        restored = MetricBuffer(logging_steps, json.loads(json.dumps(restored.state())))
        assert whole.add(metrics, evaluations) == restored.add(metrics, evaluations)


@pytest.mark.parametrize(
    "name",
    [
        "maac_q_two_turns",
        "maac_early_termination",
        "iac_shared_v_clip",
        "maac_v_generations",
        "maac_reference_kl",
    ],
)
def test_reward_and_return_means_are_the_recorded_ones(name: str) -> None:
    case = recorded(name)
    rounds = rounds_of(case)
    for metric, values in case["epoch_metrics"].items():
        penalty = case["config"].get("reference_kl_coef")
        ours = [turn_metrics(agents, penalty).get(metric) for agents in rounds]
        ours = [value for value in ours if value is not None]
        num_agents = len(rounds[0])
        theirs = np.array(values).reshape(-1, num_agents).mean(axis=1)  # one entry per round and agent
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


def rounds_of(case: dict[str, Any]) -> list[list[Any]]:
    """Consecutive updates of one agent belong together; agent 0 opens a round."""
    blocks: list[tuple[int, list[Any], list[float]]] = []
    for update in case["updates"]:
        if not blocks or blocks[-1][0] != update["agent"]:
            blocks.append((update["agent"], [], []))
        blocks[-1][1].extend(
            sample(update["agent"], turn=s["turn"], reward=s["reward"], expected_return=s["expected_return"])
            for s in update["samples"]
        )
        blocks[-1][2].extend(s["reference_kl"] for s in update["samples"] if "reference_kl" in s)
    rounds: list[list[Any]] = []
    for agent, samples, kl in blocks:
        if agent == 0:
            rounds.append([])
        rounds[-1].append(agent_round(samples, reference_kl=np.array(kl) if kl else None))
    return rounds


def test_a_report_holds_every_kind_of_metric() -> None:
    first = agent_round(
        [
            sample(0, reward=1.0, completion=completion(4, finish_reason="length", prompt_truncated=True)),
            sample(0, reward=0.0, completion=completion(2)),
        ],
        td_targets=np.array([1.0, 0.0], np.float32),
        td_errors=np.array([0.5, -0.5], np.float32),
        values=np.array([0.5, 0.5], np.float32),
        reference_kl=np.array([0.2, 0.4], np.float32),
        metrics={"actor_loss": 1.0, "logprob_gap_max": 0.1},
    )
    second = agent_round(
        [sample(1, reward=1.0), sample(1, reward=0.0)],
        td_targets=np.array([1.0, 0.0], np.float32),
        td_errors=np.array([0.0, 0.0], np.float32),
        values=np.array([1.0, 0.0], np.float32),
        reference_kl=np.array([0.0, 0.0], np.float32),
        metrics={"actor_loss": 3.0, "logprob_gap_max": 0.3},
    )
    stats = GenerationStats(seconds=2.0, tokens=100)
    report = round_report(RoundResult([first, second], {}), 0.5, stats, {"generate": 2.0}, 0.01)
    expected = {
        "turn_1/reward_mean": 0.5,
        "turn_1/reference_kl_mean": 0.15,
        "turn_1/reference_kl_penalty_mean": 0.075,
        "completion_tokens_mean": 3.0,
        "agent_1/completion_tokens_mean": 3.0,
        "truncation_rate": 0.25,
        "eos_rate": 0.75,
        "count/prompts_truncated": 1.0,
        "value_mean": 0.5,
        "td_error_std": np.sqrt(0.125),
        "value_explained_variance": 1 - 0.125 / 0.25,
        "actor_loss": 2.0,
        "agent_1/actor_loss": 3.0,
        "logprob_gap_max": 0.3,
        "push_gap_max": 0.01,
        "tokens_per_second": 50.0,
        "seconds/generate": 2.0,
    }
    for name, value in expected.items():
        assert report[name] == pytest.approx(value, abs=1e-6), name


def test_rollouts_are_one_readable_data_set(run: RunFolder) -> None:
    log = RolloutLog(run, resume_round=None)
    log.write([agent_round([sample(0)]), agent_round([sample(1)])], 1, 0)
    log.write(
        [agent_round([sample(0)], reference_kl=np.array([0.25], np.float32)), agent_round([sample(1)])], 2, 0
    )
    rows = ds.dataset(run.rollouts).to_table().to_pylist()
    assert [(r["round"], r["agent_idx"], r["reference_kl"]) for r in rows] == [
        (1, 0, None), (1, 1, None), (2, 0, 0.25), (2, 1, None),
    ]  # fmt: skip
    assert rows[0]["prompt"] == "prompt 0"
    assert rows[0]["completion"] == "xxx"
    assert rows[0]["engine_logprob"] == -1.5
    RolloutLog(run, resume_round=1)
    assert {r["round"] for r in ds.dataset(run.rollouts).to_table().to_pylist()} == {1}


def test_checkpoints_appear_complete_or_not_at_all(run: RunFolder) -> None:
    store = CheckpointStore(run.checkpoints, keep=2)

    def fill(folder: Path) -> None:
        (folder / "weights").write_text("w")

    for round_ in (1, 2, 3):
        store.write(TrainerState(update_round=round_, reward_evaluations=10 * round_), fill)
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step_00000020", "step_00000030"]

    def full(folder: Path) -> None:
        (folder / "weights").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(
        CheckpointError, match=r"step_00000040 could not be written: .*No space left.*untouched"
    ):
        store.write(TrainerState(update_round=4, reward_evaluations=40), full)
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step_00000020", "step_00000030"]
    latest = store.latest()
    assert latest is not None
    assert store.read_state(latest, TrainerState).update_round == 3
    assert (latest / "weights").read_text() == "w"


def test_a_half_written_checkpoint_is_never_found(run: RunFolder) -> None:
    store = CheckpointStore(run.checkpoints, keep=None)
    (run.checkpoints / "step_00000099").mkdir(parents=True)  # no state file: its writer died
    (run.checkpoints / ".writing-step_00000100").mkdir()
    assert store.latest() is None


def test_a_state_from_a_newer_version_is_refused(run: RunFolder) -> None:
    store = CheckpointStore(run.checkpoints, keep=None)
    path = store.write(TrainerState(), lambda folder: None)
    (path / "trainer_state.json").write_text(json.dumps({**asdict(TrainerState()), "novelty": 1}))
    with pytest.raises(CheckpointError, match=r"unknown fields \['novelty'\]"):
        store.read_state(path, TrainerState)


def test_a_metrics_callback_sees_samples_and_its_odd_values_are_left_out() -> None:
    seen: list[Any] = []

    def callback(samples: list[Any]) -> dict[str, Any]:
        seen.extend(samples)
        return {
            "a": 1,
            "b": np.float32(2),
            "c": "text",
            "d": float("nan"),
            "e": True,
            "f": None,
            "g": np.ones(3),
        }

    assert call_metrics_callback(callback, [sample(1, turn=2)], [0.75]) == {"a": 1.0, "b": 2.0}
    (shown,) = seen
    assert (shown.agent_idx, shown.prompt, shown.completion) == (1, "prompt 0", "xxx")
    assert (shown.reward, shown.returns, shown.advantage) == (0.5, 0.5, 0.75)
    assert (shown.prompt_len, shown.response_len) == (4, 3)
    assert shown.metadata["turn_idx"] == 2
    assert shown.metadata["batch_item"] == {"prompt": "p"}
    with pytest.raises(CallbackError, match="must return a dictionary"):
        call_metrics_callback(lambda samples: [1], [sample()])
    with pytest.raises(CallbackError, match="raised ZeroDivisionError"):
        call_metrics_callback(lambda samples: {"x": 1 / 0}, [sample()])


def test_progress_outside_a_terminal_is_a_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    progress = Progress(total=10, done=2)
    for round_ in range(1, 4):
        progress.items(2)
        progress.show({"update": str(round_), "reward": "0.125"})
    progress.close()
    assert [r.getMessage() for r in caplog.records] == ["item 4 of 10: update 1, reward 0.125"]


def test_the_summary_compares_first_and_last_tenth(run: RunFolder) -> None:
    entries = [{"step": i, "turn_1/reward_mean": i / 100} for i in range(20)]
    entries.insert(3, {"step": 3, "eval/turn_1/reward_mean": 9.0})
    run.metrics_file.write_text("".join(json.dumps(e) + "\n" for e in entries))
    text = summarize(run.path)
    assert str(run.path) in text
    assert "0.0050 in the first tenth of the run, 0.1850 in the last (+0.1800)" in text

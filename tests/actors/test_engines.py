"""vLLM and transformers engines against a plain transformers forward pass, before and after weight pushes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_tokenizer
from transformers import AutoModelForCausalLM

from actors.engine import EngineOutput, Sampling
from actors.generation_worker import (
    EngineSpec,
    GenerationWorker,
    PromptTooLongError,
    stop_tokens,
    trim_padding,
)
from actors.weights import StaleWeightsError
from learners.learner_actors import LearnerSpec, PolicyLearner, PolicySpec
from learners.snapshot import WeightSnapshot, WeightSyncError

PROMPTS = ["def add(a, b):", "the quick brown fox", "is this a prompt?", "x"]
SAMPLING = Sampling(max_new_tokens=24, temperature=0.6, top_p=0.9)


def spec_of(model: Path, backend: str, **changes: object) -> EngineSpec:
    options = {"enforce_eager": True, "kv_cache_memory_mib": 32, **changes}
    return EngineSpec(backend=backend, model=str(model), tokenizer=str(model), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=[pytest.param("vllm", marks=pytest.mark.vllm), "transformers"])
def worker(request: pytest.FixtureRequest, small_model: Path) -> Iterator[GenerationWorker]:
    worker = GenerationWorker(spec_of(small_model, request.param))
    yield worker
    worker.shutdown()


@pytest.fixture
def learner(small_model: Path) -> PolicyLearner:
    return PolicyLearner(
        PolicySpec(LearnerSpec(str(small_model), learning_rate=1e-3, device="cpu"), agent_idx=0)
    )


def plain_logprobs(model: torch.nn.Module, prompt: np.ndarray, completion: np.ndarray) -> np.ndarray:
    ids = torch.tensor([[*prompt.tolist(), *completion.tolist()]])
    with torch.no_grad():
        table = torch.log_softmax(model(ids).logits[0].double(), -1)
    return (
        table[len(prompt) - 1 : -1]
        .gather(1, torch.tensor(completion.astype(np.int64))[:, None])[:, 0]
        .numpy()
    )


def push(worker: GenerationWorker, learner: PolicyLearner, version: int) -> float:
    probe = np.arange(5, 25, dtype=np.int32)
    return worker.push(learner.snapshot(version, probe), verify=True)


def test_log_probabilities_are_those_of_the_untempered_policy_before_and_after_a_push(
    worker: GenerationWorker, learner: PolicyLearner, small_model: Path
) -> None:
    push(worker, learner, 0)
    before = worker.generate(PROMPTS, SAMPLING, [1, 2, 3, 4], version=0).unpack()
    plain = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    for completion in before:
        expected = plain_logprobs(plain, completion.prompt_ids, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-3)

    model = learner._policy.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    assert push(worker, learner, 1) < 1e-3
    after = worker.generate(PROMPTS, SAMPLING, [1, 2, 3, 4], version=1).unpack()
    changed = 0
    for completion in after:
        now = plain_logprobs(model, completion.prompt_ids, completion.token_ids)
        old = plain_logprobs(plain, completion.prompt_ids, completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, now, atol=1e-3)
        changed += np.abs(now - old).max() > 0.1
        assert completion.weight_version == 1
    assert changed == len(after), "the push must have changed what is sampled, or this test shows nothing"


def test_a_completion_depends_on_its_own_seed_and_not_on_its_company(
    worker: GenerationWorker, learner: PolicyLearner
) -> None:
    push(worker, learner, 0)
    prompts = PROMPTS * 4
    seeds = list(range(100, 116))
    together = worker.generate(prompts, SAMPLING, seeds, version=0).unpack()
    for index in (0, 5, 15):
        (alone,) = worker.generate([prompts[index]], SAMPLING, [seeds[index]], version=0).unpack()
        assert alone.token_ids.tolist() == together[index].token_ids.tolist()
    (other,) = worker.generate([prompts[0]], SAMPLING, [999], version=0).unpack()
    assert other.token_ids.tolist() != together[0].token_ids.tolist()


def test_more_prompt_tokens_than_one_scheduling_step_takes(
    worker: GenerationWorker, learner: PolicyLearner
) -> None:
    push(worker, learner, 0)
    prompts = [f"{i} " + "ab " * 40 for i in range(128)]
    completions = worker.generate(prompts, Sampling(4), list(range(128)), version=0).unpack()
    assert sum(len(c.prompt_ids) for c in completions) > 8192
    (alone,) = worker.generate(prompts[100:101], Sampling(4), [100], version=0).unpack()
    assert alone.token_ids.tolist() == completions[100].token_ids.tolist()


def test_sampled_frequencies_follow_temperature_and_top_p(
    worker: GenerationWorker, learner: PolicyLearner
) -> None:
    push(worker, learner, 0)
    n = 3000
    sampling = Sampling(max_new_tokens=1, temperature=0.5, top_p=0.5)
    completions = worker.generate(["the"] * n, sampling, list(range(n)), version=0).unpack()
    ids = torch.tensor(completions[0].prompt_ids.astype(np.int64))[None]
    with torch.no_grad():
        probabilities = torch.softmax(learner._policy.model(ids).logits[0, -1].double() / 0.5, -1)
    order = probabilities.argsort(descending=True)
    kept = order[: int((probabilities[order].cumsum(0) < 0.5).sum()) + 1]
    expected = {int(t): float(probabilities[t] / probabilities[kept].sum()) for t in kept}
    drawn = [int(c.token_ids[0]) if len(c.token_ids) else 0 for c in completions]
    assert set(drawn) <= set(expected)
    for token, probability in expected.items():
        error = (probability * (1 - probability) / n) ** 0.5
        assert abs(drawn.count(token) / n - probability) < 5 * error


def test_greedy_decoding_takes_the_likeliest_token(worker: GenerationWorker, learner: PolicyLearner) -> None:
    push(worker, learner, 0)
    (completion,) = worker.generate(["the quick"], SAMPLING.greedy(), [0], version=0).unpack()
    ids = completion.prompt_ids.tolist()
    for token in completion.token_ids[:5].tolist():
        with torch.no_grad():
            logits = learner._policy.model(torch.tensor([ids])).logits[0, -1]
        assert token == int(logits.argmax())
        ids.append(token)


def test_a_worker_refuses_to_sample_with_another_version(
    worker: GenerationWorker, learner: PolicyLearner
) -> None:
    push(worker, learner, 3)
    with pytest.raises(StaleWeightsError, match="asked for weight version 4, holding 3"):
        worker.generate(["x"], SAMPLING, [0], version=4)


def test_a_push_whose_probe_does_not_match_leaves_no_version(
    worker: GenerationWorker, learner: PolicyLearner
) -> None:
    snapshot = learner.snapshot(5, np.arange(5, 25, dtype=np.int32))
    snapshot.probe_logprobs = snapshot.probe_logprobs - 0.5
    with pytest.raises(WeightSyncError, match="weight version 5 was pushed, but"):
        worker.push(snapshot, verify=True)
    with pytest.raises(StaleWeightsError, match="holding None"):
        worker.generate(["x"], SAMPLING, [0], version=5)


def test_a_prompt_longer_than_the_context_is_refused_and_named(
    worker: GenerationWorker, learner: PolicyLearner
) -> None:
    push(worker, learner, 0)
    with pytest.raises(
        PromptTooLongError, match=r"only 232 fit beside max_new_tokens.*truncate_prompts"
    ) as caught:
        worker.generate(["ok", "word " * 400], SAMPLING, [0, 1], version=0)
    assert caught.value.position == 1


@pytest.mark.parametrize("backend", ["transformers"])
def test_truncated_prompts_keep_their_end(backend: str, small_model: Path) -> None:
    worker = GenerationWorker(spec_of(small_model, backend, truncate_prompts=True))
    worker._version = 0
    long = "a " * 300 + "the end"
    short, cut = worker.generate(["x", long], SAMPLING, [0, 1], version=0).unpack()
    assert not short.prompt_truncated
    assert cut.prompt_truncated
    assert len(cut.prompt_ids) == 256 - SAMPLING.max_new_tokens
    assert cut.prompt_ids.tolist() == make_tokenizer()(long)["input_ids"][-len(cut.prompt_ids) :]


def output(ids: list[int]) -> EngineOutput:
    return EngineOutput(np.array(ids, np.int32), -np.ones(len(ids), np.float32), "stop")


def test_end_of_sequence_counts_once_and_padding_never() -> None:
    assert trim_padding(output([7, 8, 2]), pad_only=0).token_ids.tolist() == [7, 8, 2]
    assert trim_padding(output([7, 8, 0]), pad_only=0).token_ids.tolist() == [7, 8]
    empty = trim_padding(output([0]), pad_only=0)
    assert empty.token_ids.tolist() == []
    assert len(empty.logprobs) == 0
    assert trim_padding(output([7, 2]), pad_only=None).token_ids.tolist() == [7, 2]


def test_stop_tokens_where_padding_is_the_end_of_sequence(small_model: Path) -> None:
    tokenizer = make_tokenizer()
    assert stop_tokens(tokenizer, str(small_model)) == (0, [0, 2])
    tokenizer.pad_token = "</s>"
    assert stop_tokens(tokenizer, str(small_model)) == (None, [2])


def test_a_snapshot_restores_bfloat16_and_tied_names() -> None:
    weight = torch.randn(3, 4).bfloat16()
    snapshot = WeightSnapshot(
        1, {"embed": ("bfloat16", weight.view(torch.uint16).numpy())}, aliases={"lm_head": "embed"}
    )
    tensors = dict(snapshot.named_tensors())
    assert torch.equal(tensors["embed"], weight)
    assert torch.equal(tensors["lm_head"], weight)

"""A generation worker: text in, completions out, with the weights it was asked for.

The class works without Ray too; `actors.generation_pool` turns it into Ray actors.  It owns one engine
and its agent's tokenizer, and must not know of rewards, turns or other agents.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import ray
import torch
from transformers import AutoTokenizer, GenerationConfig

from actors.engine import Engine, EngineOutput, Sampling
from actors.weights import StaleWeightsError
from learners.ragged import Ragged
from learners.samples import CompletionBatch, IntArray
from learners.snapshot import WeightSnapshot


class PromptTooLongError(ValueError):
    """A prompt leaves no room for its completion. `position` is the prompt's place in its agent's request."""

    def __init__(self, position: int, tokens: int, limit: int, agent_idx: int | None = None) -> None:
        super().__init__(position, tokens, limit, agent_idx)
        self.position, self.tokens, self.limit, self.agent_idx = position, tokens, limit, agent_idx

    def moved(self, offset: int) -> PromptTooLongError:
        """The same, with the position in a longer request of which this was a part."""
        return PromptTooLongError(self.position + offset, self.tokens, self.limit, self.agent_idx)

    def of_agent(self, agent_idx: int) -> PromptTooLongError:
        """The same, naming the agent."""
        return PromptTooLongError(self.position, self.tokens, self.limit, agent_idx)

    def __str__(self) -> str:
        return (
            f"the prompt has {self.tokens} tokens, but only {self.limit} fit beside max_new_tokens into the model's "
            "context. Shorten it in the formatter, lower args.max_new_tokens, or set engine.truncate_prompts=true "
            "to cut prompts from the left."
        )


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything a worker needs to build its engine; travels to the worker's process."""

    backend: Literal["vllm", "transformers"]
    model: str
    tokenizer: str
    dtype: str | None = None
    """None: float32 on a CPU, bfloat16 on a GPU."""
    max_model_len: int | None = None
    kv_cache_memory_mib: int | None = None
    gpu_memory_utilization: float | None = None
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    trust_remote_code: bool = False
    truncate_prompts: bool = False
    logprob_tolerance: float | None = None
    weight_transfer: str = "object_store"


class GenerationWorker:
    """Hosts one engine of one agent."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        dtype = spec.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
        self._tolerance = spec.logprob_tolerance or (1e-3 if dtype == "float32" else 0.1)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(
            spec.tokenizer, trust_remote_code=spec.trust_remote_code
        )
        self._pad_only, self._stop_ids = stop_tokens(self._tokenizer, spec.model)
        self._engine = _build_engine(spec, dtype)
        self._version: int | None = 0  # the weights as they lie in the model's folder
        self._process = uuid4().hex  # a process id alone may come again, on another node

    # Asked of a worker that is being restarted, Ray holds the question until the new process can answer.
    @ray.method(max_task_retries=-1)  # type: ignore[untyped-decorator]
    def ready(self) -> dict[str, Any]:
        """Answers once the engine is up; says in which process it runs."""
        return {
            "pid": os.getpid(), "process": self._process, "context_length": self._engine.context_length
        }  # fmt: skip

    def push(self, snapshot: WeightSnapshot, verify: bool) -> float:
        """Take over `snapshot`, or what has been sent ahead of it; the weight version counts only once the engine is
        shown to compute with it.

        Returns:
            The largest difference of a probe log-probability (0 where `verify` is off).
        """
        self._version = None
        if snapshot.tensors is not None:
            self._engine.load(snapshot)
        gap = 0.0
        if verify and len(snapshot.probe_logprobs):
            gap = snapshot.check(self._engine.prompt_logprobs(snapshot.probe_ids), self._tolerance)
        self._version = snapshot.version
        return gap

    def transfer(self, step: str, *arguments: Any) -> None:
        """A step of vLLM's weight transfer, asked for by the learner; a push proves and closes it."""
        self._version = None
        self._engine.transfer(step, arguments)

    def generate(
        self, prompts: Sequence[str], sampling: Sampling, seeds: Sequence[int], version: int
    ) -> CompletionBatch:
        """One completion per prompt, in their order, sampled with exactly weight version `version`.

        Raises:
            StaleWeightsError: this worker holds another version (it was restarted, or a push failed).
            PromptTooLongError: a prompt does not fit and prompts are not to be cut.
        """
        if self._version != version:
            raise StaleWeightsError(f"asked for weight version {version}, holding {self._version}")
        limit = self._engine.context_length - sampling.max_new_tokens
        ids, truncated = self._tokenize(prompts, limit)
        outputs = self._engine.generate(ids, sampling, seeds, self._stop_ids)
        trimmed = [trim_padding(output, self._pad_only) for output in outputs]
        texts = self._tokenizer.batch_decode(
            [output.token_ids.tolist() for output in trimmed], skip_special_tokens=True
        )
        return CompletionBatch(
            Ragged.of(ids, np.int32),
            Ragged.of([output.token_ids for output in trimmed], np.int32),
            Ragged.of([output.logprobs for output in trimmed], np.float32),
            texts,
            [output.finish_reason for output in trimmed],
            truncated,
            version,
        )

    def _tokenize(self, prompts: Sequence[str], limit: int) -> tuple[list[IntArray], list[bool]]:
        if limit < 1:
            raise PromptTooLongError(0, 1, limit)
        distinct = list(dict.fromkeys(prompts))  # num_generations copies of a prompt are tokenized once
        encoded = dict(zip(distinct, self._tokenizer(distinct)["input_ids"], strict=True))
        ids, truncated = [], []
        for position, prompt in enumerate(prompts):
            tokens = encoded[prompt]
            if len(tokens) > limit and not self._spec.truncate_prompts:
                raise PromptTooLongError(position, len(tokens), limit)
            truncated.append(len(tokens) > limit)
            ids.append(np.asarray(tokens[-limit:], np.int32))
        return ids, truncated

    def shutdown(self) -> None:
        """End the engine before the process ends."""
        self._engine.shutdown()


def _build_engine(spec: EngineSpec, dtype: str) -> Engine:
    common: dict[str, Any] = {
        "dtype": dtype,
        "max_model_len": spec.max_model_len,
        "trust_remote_code": spec.trust_remote_code,
    }
    if spec.backend == "transformers":
        from actors.transformers_engine import TransformersEngine

        return TransformersEngine(spec.model, **common)
    from actors.vllm_engine import VLLMEngine

    return VLLMEngine(
        spec.model,
        kv_cache_memory_mib=spec.kv_cache_memory_mib,
        gpu_memory_utilization=spec.gpu_memory_utilization,
        tensor_parallel_size=spec.tensor_parallel_size,
        enforce_eager=spec.enforce_eager,
        weight_transfer=spec.weight_transfer,
        **common,
    )


def stop_tokens(tokenizer: Any, model: str) -> tuple[int | None, list[int]]:
    """The token that is padding and nothing else (None if there is none), and every token that ends a completion.

    The model's generation config may name more end-of-sequence tokens than its tokenizer does (chat models do).
    """
    try:
        named = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        named = None
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])} - {None}
    pad = tokenizer.pad_token_id
    pad_only = None if pad in ends else pad
    return pad_only, sorted(ends | ({pad} - {None}))


def trim_padding(output: EngineOutput, pad_only: int | None) -> EngineOutput:
    """Drop a sampled padding token that ended the completion: padding is never counted, end-of-sequence once.

    Where padding and end-of-sequence are one token, the sampled token is the end of the sequence and stays.
    """
    if pad_only is None or not len(output.token_ids) or output.token_ids[-1] != pad_only:
        return output
    return EngineOutput(output.token_ids[:-1], output.logprobs[:-1], output.finish_reason)

"""The vLLM engine, inside the process that owns it.  Knows vLLM and nothing else of Greenroom's wiring."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from actors.engine import EngineOutput, Sampling
from learners.samples import FloatArray, IntArray
from learners.snapshot import WeightSnapshot

logger = logging.getLogger(__name__)

_MIB = 2**20
_CPU_KV_CACHE_MIB = 256


class VLLMEngine:
    """One model in one vLLM instance that lives and dies with this process.

    Args:
        model: folder or hub identifier.
        dtype: torch dtype name.
        max_model_len: longest prompt + completion in tokens; None takes the model's own.
        kv_cache_memory_mib: size of the key/value cache; None lets vLLM use what `gpu_memory_utilization` allows on
            a GPU, and 256 MiB on a CPU.
        gpu_memory_utilization: share of the GPU's memory for this engine; None is vLLM's default.
        tensor_parallel_size: GPUs (on a CPU: processes) over which the model is spread.
        enforce_eager: skip compilation: starts faster, generates somewhat slower.
        weight_transfer: backend of vLLM's weight transfer, or "object_store", which needs none.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        max_model_len: int | None = None,
        kv_cache_memory_mib: int | None = None,
        gpu_memory_utilization: float | None = None,
        tensor_parallel_size: int = 1,
        enforce_eager: bool = False,
        trust_remote_code: bool = False,
        weight_transfer: str = "object_store",
    ) -> None:
        # vLLM reads these when it is imported.  In-process, so that the end of this process, however it comes, is
        # the end of the engine; unbound threads, so that several engines do not share core 0.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM

        options: dict[str, Any] = {}
        if not torch.cuda.is_available():
            kv_cache_memory_mib = kv_cache_memory_mib or _CPU_KV_CACHE_MIB
            # A prompt prefilled in parts has its request's generator rewound, which CPU generators cannot do.
            options["enable_chunked_prefill"] = False
        if kv_cache_memory_mib is not None:
            options["kv_cache_memory_bytes"] = kv_cache_memory_mib * _MIB
        if gpu_memory_utilization is not None:
            options["gpu_memory_utilization"] = gpu_memory_utilization
        if weight_transfer != "object_store":
            options["weight_transfer_config"] = {"backend": weight_transfer}
        self._llm = LLM(
            model,
            dtype=dtype,
            max_model_len=max_model_len,
            skip_tokenizer_init=True,  # the worker owns the tokenizer; the engine sees token ids only
            # One device: in this process.  Several: processes of its own, which end when this one does.
            distributed_executor_backend="uni" if tensor_parallel_size == 1 else "mp",
            tensor_parallel_size=tensor_parallel_size,
            worker_extension_cls="actors.weight_transfer.WeightPush",
            # The sampled token's log-probability before temperature and top-p: that of the policy being trained.
            logprobs_mode="raw_logprobs",
            generation_config="vllm",  # no sampling defaults out of the model's folder
            enforce_eager=enforce_eager,
            trust_remote_code=trust_remote_code,
            seed=0,
            **options,
        )
        self._context_length = int(self._llm.llm_engine.model_config.max_model_len)

    @property
    def context_length(self) -> int:
        return self._context_length

    def generate(
        self, prompts: Sequence[IntArray], sampling: Sampling, seeds: Sequence[int], stop_ids: Sequence[int]
    ) -> list[EngineOutput]:
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p if sampling.temperature > 0 else 1.0,
                top_k=sampling.top_k or 0,
                seed=seed,
                logprobs=0,
                stop_token_ids=list(stop_ids),
                detokenize=False,
            )
            for seed in seeds
        ]
        requests = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        outputs = self._llm.generate(requests, parameters, use_tqdm=False)
        return [_output(request.outputs[0]) for request in outputs]

    def prompt_logprobs(self, token_ids: IntArray) -> FloatArray:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        ids = token_ids.tolist()
        (request,) = self._llm.generate([{"prompt_token_ids": ids}], parameters, use_tqdm=False)
        table = request.prompt_logprobs
        return np.array([table[i][ids[i]].logprob for i in range(1, len(ids))], np.float32)

    def load(self, snapshot: WeightSnapshot) -> None:
        self._llm.collective_rpc("push", args=(list(snapshot.named_tensors()),))
        self._llm.reset_prefix_cache()

    def transfer(self, step: str, arguments: Sequence[Any]) -> None:
        self._llm.collective_rpc(step, args=tuple(arguments))
        self._llm.reset_prefix_cache()

    def shutdown(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _output(completion: Any) -> EngineOutput:
    ids = np.asarray(completion.token_ids, np.int32)
    logprobs = np.array(
        [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)],
        np.float32,
    )
    return EngineOutput(ids, logprobs, "stop" if completion.finish_reason == "stop" else "length")

"""The transformers engine: for models and machines that vLLM does not serve, and to check vLLM against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from actors.engine import EngineOutput, Sampling
from learners.samples import FloatArray, IntArray
from learners.snapshot import WeightSnapshot


class TransformersEngine:
    """`model.generate` with one random stream per request, so that a completion does not depend on its company."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        max_model_len: int | None = None,
        trust_remote_code: bool = False,
        device: str | None = None,
    ) -> None:
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype), trust_remote_code=trust_remote_code
        ).to(self._device)
        self._model.eval()
        self._context_length = max_model_len or int(self._model.config.max_position_embeddings)

    @property
    def context_length(self) -> int:
        return self._context_length

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[IntArray], sampling: Sampling, seeds: Sequence[int], stop_ids: Sequence[int]
    ) -> list[EngineOutput]:
        width = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, width - len(prompt) :] = 1
        chooser = _SeededChoice(sampling, seeds)
        tokens = self._model.generate(
            ids.to(self._device),
            attention_mask=mask.to(self._device),
            logits_processor=LogitsProcessorList([chooser]),
            generation_config=GenerationConfig(
                max_new_tokens=sampling.max_new_tokens,
                do_sample=False,  # the chooser has already drawn; generate only follows it
                eos_token_id=list(stop_ids) or None,
                pad_token_id=stop_ids[0] if stop_ids else 0,
            ),
        )[:, width:].cpu()
        logprobs = torch.stack(chooser.logprobs, dim=1).float().cpu().numpy()
        stops = torch.isin(tokens, torch.tensor(list(stop_ids), dtype=tokens.dtype)).numpy()
        outputs = []
        for row, row_stops in enumerate(stops):
            stopped = bool(row_stops.any())
            length = int(row_stops.argmax()) + 1 if stopped else tokens.shape[1]
            outputs.append(
                EngineOutput(
                    tokens[row, :length].numpy().astype(np.int32),
                    logprobs[row, :length],
                    "stop" if stopped else "length",
                )
            )
        return outputs

    @torch.inference_mode()
    def prompt_logprobs(self, token_ids: IntArray) -> FloatArray:
        ids = torch.from_numpy(token_ids.astype(np.int64)).to(self._device)[None]
        logprobs = self._model(ids).logits[0, :-1].float().log_softmax(-1)
        chosen: FloatArray = logprobs.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
        return chosen

    @torch.no_grad()
    def load(self, snapshot: WeightSnapshot) -> None:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, tensor in snapshot.named_tensors():
            parameters[name].copy_(tensor)

    def transfer(self, step: str, arguments: Sequence[Any]) -> None:
        raise NotImplementedError(f"{step}: transformers has no weight transfer; engine.backend=vllm has")

    def shutdown(self) -> None:
        del self._model


class _SeededChoice(LogitsProcessor):  # type: ignore[misc]
    """Draws each row's token with the row's own generator (Gumbel-max) and notes its raw log-probability."""

    def __init__(self, sampling: Sampling, seeds: Sequence[int]) -> None:
        self._greedy = sampling.temperature == 0
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._warpers = LogitsProcessorList()
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
            if sampling.top_k:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._warpers.append(TopPLogitsWarper(sampling.top_p))
        self.logprobs: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raw = scores.float()
        choice = raw
        if not self._greedy:
            uniform = torch.stack([torch.rand(raw.shape[1], generator=g) for g in self._generators])
            gumbel = -torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7))).to(raw.device)
            choice = self._warpers(input_ids, raw) + gumbel
        picked = choice.argmax(-1, keepdim=True)
        self.logprobs.append((raw.gather(1, picked) - raw.logsumexp(-1, keepdim=True))[:, 0])
        return choice

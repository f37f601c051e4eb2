"""What can be told of a model and a tokenizer without loading weights.

Every function answers for one model or one pair; which models a run has is not known here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.config.base import ConfigError

_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model*.json")

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head that vLLM's CPU kernels have."""


def read_model_config(source: Any, trust_remote_code: bool = False) -> Any:
    """The transformers configuration of a model: a folder, a hub name, or a built model.

    Of a hub name that is not in the local cache, the configuration is fetched. Raises ConfigError with what is wrong
    with the source.
    """
    if not isinstance(source, str | Path):
        config = getattr(source, "config", None)
        if config is None or not hasattr(source, "save_pretrained"):
            raise ConfigError(
                f"an object of type {type(source).__name__} is no transformers model; give a model, a folder or a "
                "hub name"
            )
        return config
    from transformers import AutoConfig

    folder = _local_folder(str(source))
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{str(source)!r} holds no config.json; give a folder that a model was saved to"
            )
        if not any(next(folder.glob(pattern), None) for pattern in _WEIGHTS):
            raise ConfigError(f"{str(source)!r} holds no weights; give a folder that a model was saved to")
    return _read(AutoConfig, source, folder, trust_remote_code, "model")


def read_tokenizer(source: Any, trust_remote_code: bool = False) -> Any:
    """The tokenizer at a folder or hub name, with a pad token; one that is given as an object is only completed.

    Raises ConfigError with what is wrong with the source.
    """
    tokenizer = source
    if isinstance(source, str | Path):
        from transformers import AutoTokenizer

        tokenizer = _read(AutoTokenizer, source, _local_folder(str(source)), trust_remote_code, "tokenizer")
        # A folder without a tokenizer gives an empty one, and no error.
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise ConfigError(f"{str(source)!r} holds no tokenizer; save one there, or set `tokenizer`")
        if not _reads_its_own_words(tokenizer):
            raise ConfigError(
                f"{str(source)!r} holds a tokenizer that makes no tokens of its own words when loaded as "
                f"{type(tokenizer).__name__}: it was made for another type of model; save one that fits the model's "
                "type, or set `tokenizer`"
            )
    elif not callable(tokenizer) or not hasattr(tokenizer, "get_vocab"):
        raise ConfigError(
            f"an object of type {type(source).__name__} is no tokenizer; give a transformers tokenizer, a folder or a "
            "hub name"
        )
    ensure_pad_token(tokenizer)
    return tokenizer


def _reads_its_own_words(tokenizer: Any) -> bool:
    # transformers rebuilds some tokenizers by the type of the model beside them, whatever they were saved as; one of
    # another kind then silently reads every text as nothing.
    special = set(tokenizer.all_special_ids)
    words = [token for token in tokenizer.get_vocab().values() if token not in special][:64]
    return bool(tokenizer(tokenizer.decode(words), add_special_tokens=False)["input_ids"])


def ensure_pad_token(tokenizer: Any) -> None:
    """Lets the end-of-sequence token stand in for a missing pad token. Raises ConfigError if there is neither."""
    if tokenizer.pad_token is not None:
        return
    if tokenizer.eos_token is None:
        raise ConfigError("the tokenizer has neither a pad nor an end-of-sequence token; give it one of them")
    tokenizer.pad_token = tokenizer.eos_token


def vocabulary_problem(tokenizer: Any, config: Any) -> str | None:
    """Why a model of `config` cannot read every id that `tokenizer` makes, or None if it can.

    A model may know more ids than the tokenizer has; embeddings are often padded to a round number.
    """
    known = getattr(_text_config(config), "vocab_size", None)
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if known is None or highest < known:
        return None
    return f"its vocabulary has {known} ids, 0 to {known - 1}, but the tokenizer gives ids up to {highest}"


def causal_problem(config: Any) -> str | None:
    """Why a model of `config` cannot be a policy, or None."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or getattr(config, "auto_map", None):
        return None
    return f"a model of type {config.model_type!r} does not generate text; give a causal language model"


def tensor_parallel_problem(config: Any, size: int) -> str | None:
    """Why vLLM cannot spread a model of `config` over `size` devices, or None."""
    heads = getattr(_text_config(config), "num_attention_heads", None)
    if heads is None or heads % size == 0:
        return None
    return f"its {heads} attention heads cannot be shared evenly among {size} devices"


def adapter_problem(
    config: Any, target_modules: Sequence[str], trust_remote_code: bool = False
) -> str | None:
    """Why a model of `config` cannot have LoRA adapters in `target_modules`, or None.  Builds it without weights."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not model.get_output_embeddings()
    ]
    unknown = [t for t in target_modules if not any(n == t or n.endswith(f".{t}") for n in linear)]
    if not unknown:
        return None
    known = dict.fromkeys(name.rpartition(".")[2] for name in linear)
    return f"it has no linear layers called {', '.join(unknown)}; they are called {', '.join(known)}"


def head_size_problem(config: Any) -> str | None:
    """Why vLLM's CPU build cannot serve the attention of a model of `config`, or None."""
    text = _text_config(config)
    heads, width = getattr(text, "num_attention_heads", None), getattr(text, "hidden_size", None)
    size = getattr(text, "head_dim", None) or (width // heads if heads and width else None)
    if size is None or size in CPU_HEAD_SIZES:
        return None
    return (
        f"its attention heads are {size} wide, which vLLM cannot serve on the CPU (it can: "
        f"{', '.join(map(str, CPU_HEAD_SIZES))}); choose another model, or set engine.backend=transformers"
    )


def context_length(config: Any) -> int | None:
    """Longest text of a model of `config` in tokens; None if it does not say."""
    length = getattr(_text_config(config), "max_position_embeddings", None)
    return int(length) if length else None


def _text_config(config: Any) -> Any:
    # Models of several modalities keep what counts here in a part of their configuration.
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _local_folder(source: str) -> Path | None:
    """The folder that `source` names, or None if it is a hub name. Raises ConfigError if it is neither."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ConfigError(f"{source!r} is a file; give the folder that it is in")
    # `models/tiny` beside an existing `models` is a mistyped folder rather than a name on the hub.
    if (
        source.startswith(("/", ".", "~"))
        or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source)
        or ("/" in source and path.parent.is_dir())
    ):
        raise ConfigError(f"{source!r} does not exist (looked in {Path.cwd()})")
    return None


def _read(factory: Any, source: str | Path, folder: Path | None, trust_remote_code: bool, what: str) -> Any:
    """What `factory.from_pretrained` makes of a folder, of the hub's local cache, or of the hub itself."""
    name = str(source)
    options = {"trust_remote_code": trust_remote_code}
    if folder is not None:
        try:
            return factory.from_pretrained(str(folder), **options)
        except Exception as error:
            raise ConfigError(f"{name!r} holds no {what} that can be loaded: {_reason(error)}") from error
    try:
        return factory.from_pretrained(name, local_files_only=True, **options)
    except Exception as error:
        missing = error
    if not _HUB_NAME.match(name):
        raise ConfigError(
            f"{name!r} is neither a folder in {Path.cwd()} nor a model in the local hub cache; names on the hub are "
            "written owner/name"
        ) from missing
    if _offline():
        raise ConfigError(
            f"{name!r} is neither a folder in {Path.cwd()} nor in the local hub cache, and HF_HUB_OFFLINE forbids to "
            "fetch it"
        ) from missing
    try:
        return factory.from_pretrained(name, **options)
    except Exception as error:
        raise ConfigError(
            f"{name!r} is no folder, and the hub does not give its {what}: {_reason(error)}"
        ) from error


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__

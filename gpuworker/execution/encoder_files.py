"""What the small files of an encoder's directory say, read without torch and transformers: `gpuworker serve` checks a directory by it, the owner loads by it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from gpuworker.execution.model_directory import check_files, check_unquantised, read_json

MOST_TOKENS = 1 << 20
"""A model_max_length above it means "not known" in a tokenizer_config.json."""
SMALLEST_BUCKET = 16
# Families that count positions from their padding id + 1, as RoBERTa does, so that the first rows of their table are never used.
OFFSET_POSITIONS = frozenset(
    ["camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"]
)
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclasses.dataclass(frozen=True)
class EncoderFiles:
    """An encoder as it was saved by transformers or sentence-transformers."""

    directory: str
    max_length: int
    """Tokens of a text that the model looks at."""
    pooling: str
    """How a text's vector comes from those of its tokens: "mean" or "cls" (the first one's)."""
    normalize: bool
    """Whether vectors are scaled to length 1."""
    pad_id: int
    lower: bool
    """Whether texts are lower-cased before they are tokenised."""

    @property
    def tokenizer(self) -> str:
        """Path of the tokenizer.json."""
        return os.path.join(self.directory, "tokenizer.json")

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> EncoderFiles:
        """Raises OSError or ValueError, with what is wrong with the directory, for one that HFEncoder cannot serve."""
        root = Path(os.path.abspath(directory))
        check_files(root)
        config = read_json(root / "config.json")
        check_unquantised(root, config)
        _check_config(root, config)
        tokenizer = read_json(root / "tokenizer_config.json")
        sentence = read_json(root / "sentence_bert_config.json")
        modules, normalize = _modules(root)
        pooling = "mean" if modules is None else _pooling(root / modules / "config.json")
        pad_id = config.get("pad_token_id")
        pad_id = pad_id if isinstance(pad_id, int) and pad_id >= 0 else 0
        positions = config.get("max_position_embeddings")
        if isinstance(positions, int) and config.get("model_type") in OFFSET_POSITIONS:
            positions -= pad_id + 1
        limits = (positions, tokenizer.get("model_max_length"), sentence.get("max_seq_length"))
        max_length = min((limit for limit in limits if isinstance(limit, int) and 0 < limit <= MOST_TOKENS), default=512)
        return cls(str(root), max_length, pooling, normalize, pad_id, sentence.get("do_lower_case") is True)


def buckets(longest: int) -> tuple[int, ...]:
    """Length buckets for texts of up to `longest` tokens: 16, 32, 64 and so on, the last is `longest`."""
    found, bucket = [], SMALLEST_BUCKET
    while bucket < longest:
        found.append(bucket)
        bucket *= 2
    return (*found, longest)


def _check_config(root: Path, config: dict[str, Any]) -> None:
    architectures = [name for name in config.get("architectures") or () if isinstance(name, str)]
    if config.get("is_decoder") is True or any(name.endswith("ForCausalLM") or name == "GPT2LMHeadModel" for name in architectures):
        raise ValueError(f"{root} is a decoder-only model ({', '.join(architectures) or config.get('model_type')}); an encoder is needed")
    if config.get("is_encoder_decoder") is True:
        raise ValueError(f"{root} is an encoder with a decoder ({', '.join(architectures) or config.get('model_type')}); an encoder alone is needed")


def _modules(root: Path) -> tuple[str | None, bool]:
    """(folder of the pooling, whether vectors are normalised) as modules.json has it; without one: mean pooling, normalised."""
    if not (root / "modules.json").exists():
        return ("1_Pooling" if (root / "1_Pooling" / "config.json").exists() else None), True
    modules = read_json(root / "modules.json", list)
    pooling, kinds = None, []
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else "?"
        kinds.append(kind)
        if kind == "Pooling":
            pooling = str(module.get("path", ""))
        elif kind not in ("Transformer", "Normalize"):
            raise ValueError(f"{root}: modules.json has a module {kind!r}, which is not supported; Transformer, Pooling and Normalize are")
        elif kind == "Transformer" and module.get("path"):
            raise ValueError(f"{root}: modules.json has its model in {module['path']!r}; give a directory with the model's files themselves")
    return pooling, "Normalize" in kinds


def _pooling(file: Path) -> str:
    config = read_json(file)
    modes = config.get("pooling_mode") or [mode for flag, mode in POOLING_FLAGS.items() if config.get(flag) is True] or "mean"
    modes = [modes] if isinstance(modes, str) else modes
    if modes not in (["mean"], ["cls"]):
        raise ValueError(f"{file}: pooling by {' and '.join(map(str, modes))} is not supported; mean and cls are")
    return str(modes[0])

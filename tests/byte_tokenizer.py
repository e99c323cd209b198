"""Tokenizers for tests: of all bytes, with few merges, so that an emoji is several tokens; and one that spells what it does not know as <0xE4>."""

import pytest

pytest.importorskip("tokenizers")
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END = 0
TEXTS = (
    "hello world, the quick brown fox jumps over the lazy dog",
    "h\u00e9llo w\u00f6rld",
    "中文字符,日本語",
    "\U0001f389\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd",
    "e\u0301 \u0928\u092e\u0938\u094d\u0924\u0947",
    " leading, trailing ",
    "a\n\n\tb\x00c",
)


def byte_level():
    """As GPT-2's. Special tokens are the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), special_tokens=list(SPECIALS), show_progress=False
    )
    tokenizer.train_from_iterator(["hello world the quick brown fox"] * 5, trainer)
    return tokenizer


def byte_fallback():
    """As Llama's: pieces with the space in front, a space dropped at the beginning, and bytes for the rest."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581hello", "lo", "中"]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(at)) for at, piece in enumerate(pieces)], unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_pieces():
    """As BERT's: its decoder takes back spaces that it had made."""
    vocabulary = {word: at for at, word in enumerate(["[UNK]", "do", "n", "'", "t", "##t", "you", ".", "i", "##n"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return tokenizer

"""Encoders of two layers with random weights, as transformers and sentence-transformers would have saved them."""

import json
import random

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = ("search", "vector", "batch", "token", "graph", "queue", "ring", "slot", "wake", "worker")
LETTERS = "abcdefghijklmnopqrstuvwxyzäé"
VOCAB = [*SPECIALS, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
POSITIONS, MAX_TOKENS, HIDDEN = 64, 48, 32


def save_encoder(directory, family="bert", seed=1, **config):
    """A directory of "bert", "roberta" or "gpt2", with a tokenizer.json that pads and truncates as some training had it. -> the directory."""
    import torch
    import transformers

    torch.manual_seed(seed)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64} if family != "gpt2" else {"n_layer": 2, "n_head": 2}
    shared = {"vocab_size": len(VOCAB), "hidden_size": HIDDEN, "max_position_embeddings": POSITIONS, "initializer_range": 0.3, "pad_token_id": 0}
    kinds = {
        "bert": (transformers.BertConfig, transformers.BertModel),
        "roberta": (transformers.RobertaConfig, transformers.RobertaModel),
        "gpt2": (transformers.GPT2Config, transformers.GPT2Model),
    }
    config_kind, model_kind = kinds[family]
    model_kind(config_kind(**{**shared, **sizes, **config})).save_pretrained(directory)
    save_tokenizer(directory / "tokenizer.json")
    write_json(
        directory / "tokenizer_config.json", {"model_max_length": MAX_TOKENS, "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    )
    return directory


def save_tokenizer(file, types=0, specials=True):
    """types: the token type that it gives to all tokens."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordPiece({token: index for index, token in enumerate(VOCAB)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if specials:
        ends = [(token, VOCAB.index(token)) for token in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"[CLS]:{types} $A:{types} [SEP]:{types}", special_tokens=ends)
    tokenizer.enable_padding(length=20)
    tokenizer.enable_truncation(20)
    tokenizer.save(str(file))


def save_modules(directory, pooling="mean", normalize=True, max_seq_length=None, **pooling_config):
    """What sentence-transformers adds."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    write_json(
        directory / "modules.json", [{"idx": i, "path": paths[kind], "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    )
    (directory / "1_Pooling").mkdir(exist_ok=True)
    flags = pooling_config or {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
    write_json(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": HIDDEN, **flags})
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": max_seq_length, "do_lower_case": False})


def texts(count, seed=5, most_words=30):
    """Of all lengths, some with more tokens than the model takes, none alike."""
    source = random.Random(seed)
    return [
        " ".join(f"{source.choice(WORDS)}{source.choice(('', '', 's', 'é'))}" for _ in range(source.randint(1, most_words))) for _ in range(count)
    ]


def write_json(file, value):
    file.write_text(json.dumps(value))


def change_json(file, **changes):
    write_json(file, {**json.loads(file.read_text()), **changes})

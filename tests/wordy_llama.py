"""The tiny llama with a tokenizer of words, and a chat template."""

from tests import tiny_llama

TEMPLATE = "{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}assistant :"
WORDS = ("<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "system", "poison", ":", "hello", *(f"w{index}" for index in range(10, 256)))


def save(directory):
    """-> the directory, as text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(f"{directory}/tokenizer.json")
    with open(f"{directory}/chat_template.jinja", "w") as file:
        file.write(TEMPLATE)
    return tiny_llama.save(directory)


def ids(text):
    return [WORDS.index(word) for word in text.split()]


def text_of(tokens):
    return " ".join(WORDS[token] for token in tokens if token > 2)

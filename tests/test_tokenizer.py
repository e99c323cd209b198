"""Texts become token ids in the frontend: the same ids everywhere, or an error that says what to do."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from gpuworker import GpuWorkerError, InvalidRequest
from gpuworker.client import tokenizer as tokenizing
from gpuworker.client.tokenizer import Tokenizer, entry_of
from tests.tiny_encoder import VOCAB, save_tokenizer, texts

pytest.importorskip("tokenizers")
CLS, SEP = VOCAB.index("[CLS]"), VOCAB.index("[SEP]")


@pytest.fixture
def file(tmp_path):
    save_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def spelt(ids):
    return [VOCAB[index] for index in ids]


def test_a_text_becomes_int64_ids_with_special_tokens_and_no_padding(file):
    request = Tokenizer(entry_of(str(file), 48))("Search queues")
    assert list(request) == ["input_ids"]
    assert request["input_ids"].dtype == np.int64
    assert spelt(request["input_ids"]) == ["[CLS]", "search", "queue", "##s", "[SEP]"]


def test_texts_are_cut_at_max_length_and_not_where_the_file_says(file):
    text = "search " * 100
    for most in (3, 30, 48):  # the file says 20
        ids = Tokenizer(entry_of(str(file), most))(text)["input_ids"]
        assert (len(ids), ids[0], ids[-1]) == (most, CLS, SEP)
    with pytest.raises(ValueError, match="max_length=2: 2 tokens of every text are special ones; give at least 3"):
        entry_of(str(file), 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n\t", []),
        ("\x00a", ["a"]),
        ("Ä", ["ä"]),
        ("🎉 中 a", ["[UNK]", "[UNK]", "a"]),
        ("\N{ZERO WIDTH JOINER}", []),
    ],
)
def test_any_unicode_goes(file, text, expected):
    assert spelt(Tokenizer(entry_of(str(file), 48))(text)["input_ids"]) == ["[CLS]", *expected, "[SEP]"]


def test_lower_case_is_made_before_where_the_model_wants_it(file):
    document = file.read_text().replace('"lowercase":true', '"lowercase":false').replace('"lowercase": true', '"lowercase": false')
    file.write_text(document)
    assert spelt(Tokenizer(entry_of(str(file), 48))("SEARCH")["input_ids"]) == ["[CLS]", "[UNK]", "[SEP]"]
    assert spelt(Tokenizer(entry_of(str(file), 48, lower=True))("SEARCH")["input_ids"]) == ["[CLS]", "search", "[SEP]"]


def test_token_types_come_along_only_where_they_are_not_all_zero(tmp_path):
    save_tokenizer(tmp_path / "ones.json", types=1)
    request = Tokenizer(entry_of(str(tmp_path / "ones.json"), 48))("a b")
    assert list(request) == ["input_ids", "token_type_ids"]
    assert request["token_type_ids"].tolist() == [1, 1, 1, 1]
    assert request["token_type_ids"].dtype == np.int64


def test_long_texts_have_the_same_ids_and_are_made_without_pythons_lock(file, tmp_path, monkeypatch):
    save_tokenizer(tmp_path / "ones.json", types=1)
    for path in (file, tmp_path / "ones.json"):
        tokenize = Tokenizer(entry_of(str(path), 48))
        for text in texts(5):
            long = f"{text} " * 400
            expected = {name: ids.tolist() for name, ids in tokenize(long).items()}
            with monkeypatch.context() as patch:
                patch.setattr(tokenizing, "LONG_TEXT", 1 << 30)
                assert {name: ids.tolist() for name, ids in tokenize(long).items()} == expected
    begun, rounds, over = threading.Event(), [0], threading.Event()

    def count():
        begun.set()
        while not over.wait(0.0001):
            rounds[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    begun.wait()
    tokenize("search queue " * 5_000)
    over.set()
    thread.join()
    assert rounds[0] > 3


@pytest.mark.parametrize(("text", "where"), [("ab\ud800c", "U+D800 at 2"), ("\udfff", "U+DFFF at 0")])
def test_a_lone_surrogate_is_refused(file, text, where):
    with pytest.raises(InvalidRequest, match=f"lone surrogate, {where.replace('+', '[+]')}"):
        Tokenizer(entry_of(str(file), 48))(text)


def test_threads_and_forks_have_the_same_ids(file):
    entry, wanted = entry_of(str(file), 48), texts(40)
    tokenize = Tokenizer(entry)
    expected = [tokenize(text)["input_ids"].tolist() for text in wanted]
    found = {}

    def run(number, one):
        found[number] = [one(text)["input_ids"].tolist() for text in wanted]

    threads = [threading.Thread(target=run, args=(number, tokenize if number % 2 else Tokenizer(entry))) for number in range(4)]
    for thread in threads:
        thread.start()
    child = os.fork()  # while they tokenise
    if child == 0:
        os._exit([tokenize(text)["input_ids"].tolist() for text in wanted] != expected)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), expected)


def test_a_process_that_has_forked_is_told_nothing_and_has_imported_little(file):
    program = f"""
import os, sys
from gpuworker.client.tokenizer import Tokenizer
tokenize = Tokenizer({entry_of(str(file), 48)!r})
assert "tokenizers" not in sys.modules
tokenize("a b c")
assert not {{"torch", "transformers"}} & set(sys.modules)
child = os.fork()
tokenize("a b c")
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_file_is_loaded_once(file, monkeypatch):
    entry = entry_of(str(file), 48)
    monkeypatch.setattr(tokenizing, "_load", None)
    assert len(Tokenizer(entry)("a")["input_ids"]) == 3


def test_a_file_that_this_process_cannot_read_is_named(file, monkeypatch):
    entry = entry_of(str(file), 48)
    monkeypatch.setattr(tokenizing, "_loaded", {})
    tokenize = Tokenizer(entry)
    file.rename(file.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError, match="clients read its tokenizer from there") as raised:
        tokenize("a")
    assert raised.value.filename == str(file)
    file.with_name("elsewhere").rename(file)
    assert len(tokenize("a")["input_ids"]) == 3  # as soon as it is there


def test_another_file_at_the_same_path_is_refused(file, monkeypatch):
    entry = entry_of(str(file), 48)
    save_tokenizer(file, specials=False)
    monkeypatch.setattr(tokenizing, "_loaded", {})
    with pytest.raises(GpuWorkerError, match="is not the tokenizer that the worker uses"):
        Tokenizer(entry)("a")


def test_a_file_that_is_no_tokenizer_is_named(file):
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"is not a tokenizer that the package tokenizers .* can read"):
        entry_of(str(file), 48)


def test_without_the_package_the_error_says_what_to_install(file, monkeypatch):
    entry = entry_of(str(file), 48)
    monkeypatch.setattr(tokenizing, "_loaded", {})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tokenizers"):
        Tokenizer(entry)("a")

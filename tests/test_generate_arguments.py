"""Whatever is given to client.generate and client.stream: it is taken as it is meant, or refused in words that name the argument, its value and what to give."""

import re
from array import array
from collections import UserDict

import numpy as np
import pytest

import gpuworker
from tests.fake_generation import VOCABULARY, client_fixture, directory_fixture, echo, ids_of, owner_fixture, served  # noqa: F401

NAN, INF = float("nan"), float("inf")
IDS = "give token ids in a list, as in [2, 50256]"
STR = "give a str of at least one character, or several in a list"
REFUSED = [
    ("max_tokens", [-1, 1 << 33, "5", 5.0, False], "give an integer from 0 to 1,073,741,824"),
    ("max_tokens", [600], "a prompt of 3 tokens and max_tokens=600 are 603, and this worker takes 512 together"),
    ("stop", [b"x", 3, True, {"a": 1}], STR),
    ("stop", [""], STR),
    ("stop", [[""], ["a", ""], [b"x"], [3], [None], [["a"]]], STR),
    ("stop", ["a\ud800", ["b", "\udfff"]], "holds a lone surrogate"),
    ("stop_ids", [None, 3, "ab", b"ab", {1: 2}, np.array(3)], IDS),
    ("stop_ids", [[1.0], [True], ["1"], [[1]], [-1], [1 << 31], [None], np.array([1.0])], "is no token id; give integers from 0"),
    ("stop_ids", [[VOCABULARY]], "this model's tokens go from 0 to 399"),
    ("ignore_eos", [None, 0, 1, "no"], "give True or False"),
    ("temperature", [-0.1, 101, NAN, INF, None, "1", True, 10**400, 10**5000], "give a number from 0 (greedy) to 100"),
    ("top_k", [-1, 1.5, None, True, 1 << 40, "5"], "give how many tokens to keep, or 0 for all"),
    ("top_p", [0, 0.0, -1, 1.5, NAN, None, "1", True], "give a share above 0, up to 1 (off)"),
    ("min_p", [-0.1, 1.5, NAN, None], "give a share from 0 (off) to 1"),
    ("repetition_penalty", [0, -1, INF, NAN, None], "give a number above 0; 1 is off"),
    ("presence_penalty", [-3, 3, NAN, None], "give a number from -2 to 2; 0 is off"),
    ("frequency_penalty", [-3, 3, NAN, None], "give a number from -2 to 2; 0 is off"),
    ("logit_bias", [[1], [(1, 2)], 3, "1"], "give a dict from token ids to what is added to their logits, or None"),
    ("logit_bias", [{"1": 2}, {1.0: 2}, {True: 2}, {-1: 2}, {1 << 40: 2}, {None: 1}], "is no token id; give integers from 0, as in {50256: -100}"),
    ("logit_bias", [{1: "2"}, {1: NAN}, {1: 101}, {1: -101}, {1: None}, {1: True}], "give a number from -100 (never) to 100 (nothing else)"),
    ("logit_bias", [{VOCABULARY: 1.0}], "this model's tokens go from 0 to 399"),
    ("seed", [1 << 64, -(1 << 63) - 1, 1.0, "a", True], "give an integer from -2**63 to 2**64 - 1, or None"),
    ("logprobs", [-1, 21, True, False, 1.0, "1"], "give an integer from 0 to 20, or None"),
    ("n", [0, -1, 1.0, "2", None, True, 1 << 40], "give an integer from 1 to 1,024"),
    ("priority", [-1, 256, None, True, 1.5], "give an integer from 0 to 255"),
    ("timeout", [-1, NAN, "1", b"1", [1]], "give seconds >= 0, or None for no limit"),
]


@pytest.mark.parametrize(("argument", "values", "wanted"), REFUSED, ids=[f"{argument}: {wanted}"[:50] for argument, _, wanted in REFUSED])
def test_options_that_are_none(owner, client, argument, values, wanted):
    for value in values:
        with pytest.raises(ValueError, match=re.escape(wanted)) as caught:
            client.generate("abc", **{argument: value})
        assert isinstance(caught.value, gpuworker.InvalidRequest) or argument == "timeout"
        assert argument in str(caught.value)
        assert len(str(caught.value)) < 400
        if argument != "n":
            with pytest.raises(ValueError, match=re.escape(wanted)):
                client.stream("abc", **{argument: value})
    assert owner.in_use == 0
    assert owner.admit() == []


@pytest.mark.parametrize(
    "value",
    [("stop_ids", 1.5, "[1, 1.5]"), ("stop", b"x", "['a', b'x']"), ("logit_bias", "7", "{7: 1, '7': 2}")],
    ids=lambda value: value[0],
)
def test_of_several_values_the_one_at_fault_is_named(owner, client, value):
    name, culprit, whole = value
    with pytest.raises(gpuworker.InvalidRequest, match=re.escape(repr(culprit))) as caught:
        client.generate("abc", **{name: eval(whole)})
    assert whole not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "crosses"),
    [
        ({"max_tokens": np.int32(5)}, lambda request: request.max_tokens == 5),
        ({"stop": None}, lambda request: True),
        ({"stop": ()}, lambda request: True),
        ({"stop": ("a", "b")}, lambda request: True),
        ({"stop_ids": np.array([1, 2])}, lambda request: request.stop_ids == (1, 2)),
        ({"stop_ids": {3}}, lambda request: request.stop_ids == (3,)),
        ({"temperature": np.float32(0.5)}, lambda request: request.sampling.temperature == 0.5),
        ({"temperature": 1}, lambda request: request.sampling.temperature == 1),
        ({"top_k": np.int64(3)}, lambda request: request.sampling.top_k == 3),
        ({"logit_bias": {}}, lambda request: not request.sampling.logit_bias),
        ({"logit_bias": UserDict({np.int64(1): np.float32(2)})}, lambda request: request.sampling.logit_bias == {1: 2}),
        ({"seed": -(1 << 63)}, lambda request: request.sampling.seed == -(1 << 63)),
        ({"seed": (1 << 64) - 1}, lambda request: request.sampling.seed == (1 << 64) - 1),
        ({"seed": np.uint8(7)}, lambda request: request.sampling.seed == 7),
        ({"logprobs": np.int8(0)}, lambda request: request.sampling.logprobs == 0),
        ({"priority": 255}, lambda request: request.priority == 255),
        ({"timeout": INF}, lambda request: True),
        ({"timeout": 10**400}, lambda request: True),
        ({"timeout": np.float32(60)}, lambda request: True),
    ],
    ids=str,
)
def test_options_that_are_some(owner, client, option, crosses):
    stream = client.stream([5], **({"max_tokens": 3} | option))
    assert crosses(owner.admit_one().request)
    stream.close()


def test_any_kind_of_integer_says_how_many_samples(owner, client):
    with served(owner, echo):
        assert len(client.generate([5, 6], n=np.int64(2))) == 2


WHAT = "give a str, token ids as a list or an array of one dimension, or messages like"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, VOCABULARY], "from 0 to 399, and these from 1 to 400"),
        ([-1, 2], "from 0 to 399, and these from -1 to 2"),
        ([1 << 70], "from 0 to 399"),
        ([1.5], f"prompt[0]=1.5: it is no token id; {WHAT}"),
        ([7, True], f"prompt[1]=True: it is no token id; {WHAT}"),
        ([7, None], f"prompt[1]=None: it is no token id; {WHAT}"),
        ([[1, 2]], f"prompt[0]=[1, 2]: it is no token id; {WHAT}"),
        ([[1], [2, 3]], f"prompt[0]=[1]: it is no token id; {WHAT}"),
        (["a"], f"prompt[0]='a': it is no token id; {WHAT}"),
        (b"ab", f"prompt=b'ab': {WHAT}"),
        ({"role": "user"}, f"prompt={{'role': 'user'}}: {WHAT}"),
        (None, f"prompt=None: {WHAT}"),
        (7, f"prompt=7: {WHAT}"),
        (True, f"prompt=True: {WHAT}"),
        (iter([1, 2]), WHAT),
        ({1, 2}, WHAT),
        (np.zeros((2, 2), int), "not an array of 2 dimensions of int64"),
        (np.array(3), "not an array of 0 dimensions of int64"),
        (np.array([1.0]), "not an array of 1 dimensions of float64"),
        (np.array([True]), "not an array of 1 dimensions of bool"),
        (np.array(["a"]), "not an array of 1 dimensions of <U1"),
        ([], "prompt: it is empty; give at least one token"),
        ("", "prompt: it is empty; give at least one token"),
        (np.zeros(0, "i4"), "prompt: it is empty; give at least one token"),
        ("a\ud800", "lone surrogate"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_prompts_that_are_none(owner, client, prompt, message):
    for call in (client.generate, client.stream):
        with pytest.raises(gpuworker.InvalidRequest, match=re.escape(message)):
            call(prompt)
    assert owner.in_use == 0


@pytest.mark.parametrize("prompt", [[5, 6], (5, 6), range(5, 7), np.array([5, 6], "u1"), array("q", [5, 6]), [np.int64(5), 6]], ids=str)
def test_token_ids_of_any_kind(owner, client, prompt):
    stream = client.stream(prompt)
    assert owner.admit_one().request.ids == [5, 6]
    stream.close()


MESSAGE = "messages: "
CONTENT = "messages: the content of a message is a str, or a list of parts where the model's template takes them, not "


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{}], "messages: give dicts like"),
        ([{"content": "x"}], "messages: give dicts like"),
        ([{"role": 3, "content": "x"}], "messages: give dicts like"),
        ([{"role": "user", "content": "x"}, "y"], "not 'y'"),
        ([{"role": "user", "content": "x"}, None], "not None"),
        ([{"role": "user"}], f"{CONTENT}None"),
        ([{"role": "user", "content": None}], f"{CONTENT}None"),
        ([{"role": "user", "content": 3}], f"{CONTENT}3"),
        ([{"role": "user", "content": b"x"}], f"{CONTENT}b'x'"),
        ([{"role": "user", "content": ["x"]}], f"{CONTENT}['x']"),
        ([{"role": "user", "content": {"text": "x"}}], f"{CONTENT}{{'text': 'x'}}"),
        ([{"role": "user", "content": "a\ud800"}], "lone surrogate"),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_messages_that_are_none(owner, client, messages, words):
    with pytest.raises(gpuworker.InvalidRequest, match=re.escape(words)):
        client.generate(messages)
    assert owner.in_use == 0


def test_a_message_may_call_a_tool_in_place_of_saying_something(owner, client):
    said = {"role": "user", "content": "ab"}
    stream = client.stream([said, {"role": "assistant", "content": None, "tool_calls": []}, said])
    assert owner.admit_one().request.ids.count(ids_of("ab")[-1]) >= 2
    stream.close()

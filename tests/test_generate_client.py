"""client.generate and client.stream, against an owner whose every step the test makes: any interleaving is at hand, and none is left to chance."""

import json

import numpy as np
import pytest

import gpuworker
from gpuworker.client.contract import Contract, GenerationContract
from gpuworker.segment.stats import Stats
from tests.byte_tokenizer import END
from tests.fake_generation import BYTES, EMOJI, VOCABULARY, client_fixture, directory_fixture, echo, fake_owner, ids_of, owner_fixture, served  # noqa: F401

# The shape of an answer.


def test_an_answer_comes_piece_by_piece_and_whole(owner, client):
    ids = ids_of(EMOJI)
    stream = client.stream("ab", max_tokens=100)
    assert stream.generation is None
    answer = owner.admit_one()
    assert answer.request.ids == ids_of("ab")
    deltas = []
    for token in ids:
        answer.send(token)
        deltas.append(next(stream))
    answer.send(END)
    answer.end("stop")
    deltas += list(stream)
    assert "".join(delta.text for delta in deltas) == EMOJI == stream.result().text
    assert [token for delta in deltas for token in delta.tokens] == [*ids, END] == stream.generation.tokens
    assert all(delta.logprobs is None for delta in deltas)
    assert stream.generation == gpuworker.Generation(EMOJI, [*ids, END], "stop", None, gpuworker.Usage(len(ids_of("ab")), len(ids) + 1))
    assert owner.in_use == 0
    with pytest.raises(StopIteration):
        next(stream)


def test_generate_waits_for_all_of_it(owner, client):
    with served(owner, echo):
        generation = client.generate("a" + EMOJI)
        assert (generation.text, generation.finish_reason) == (EMOJI, "stop")
        assert client.generate(ids_of("a" + EMOJI)).text == EMOJI
        assert client.generate(np.array(ids_of("a" + EMOJI), np.uint16)).text == EMOJI
        cut = client.generate("a" + EMOJI, max_tokens=3)
    assert (cut.tokens, cut.finish_reason) == (ids_of("a" + EMOJI)[1:4], "length")
    assert cut.text == BYTES.decode(cut.tokens)  # with U+FFFD for half a character
    assert owner.in_use == 0


def test_all_of_the_request_arrives(owner, client):
    stream = client.stream(
        [5, 6], max_tokens=7, stop_ids=[9, 8], ignore_eos=True, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, logit_bias={3: -100}, seed=11, logprobs=2, priority=4,
    )  # fmt: skip
    request = owner.admit_one().request
    assert (request.ids, request.max_tokens, request.stop_ids, request.ignore_eos, request.priority) == ([5, 6], 7, (9, 8), True, 4)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed, sampling.logprobs) == (0.5, 3, 0.9, 0.1, 11, 2)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty, sampling.logit_bias) == (1.1, 0.2, 0.3, {3: -100})
    stream.close()


def test_seeds_are_drawn_by_the_client(owner, client):
    """So an owner that starts again goes on with the same tokens; and a forked child draws others."""
    with served(owner, lambda request: [request.sampling.seed % 97 + 1]):
        samples = client.generate("a", n=3, temperature=1.0, max_tokens=1)
        assert len(samples) == 3
        first = samples[0].tokens[0] - 1
        assert [sample.tokens for sample in samples] == [[(first + k) % 97 + 1] for k in range(3)]
        assert [one.tokens for one in client.generate("a", n=2, temperature=1.0, seed=10, max_tokens=1)] == [[11], [12]]
        assert len({client.generate("a", temperature=1.0, max_tokens=1).tokens[0] for _ in range(20)}) > 1
    with client.stream("a"):
        assert owner.admit_one().request.sampling.seed is None  # greedily there is nothing to draw


def test_logprobs(owner, client):
    stream = client.stream("a", logprobs=2, max_tokens=4)
    answer = owner.admit_one()
    answer.send(5, 6, logprob=-0.5, top=[(5, -0.5), (7, -1.5)])
    delta = next(stream)
    assert delta.tokens == [5, 6]
    assert delta.logprobs == [(5, -0.5, [(5, -0.5), (7, -1.5)]), (6, -0.5, [(5, -0.5), (7, -1.5)])]
    answer.end("stop")
    assert stream.result().logprobs == delta.logprobs
    stream = client.stream("a", logprobs=0, max_tokens=4)
    answer = owner.admit_one()
    answer.send(5, logprob=-0.25)
    assert next(stream).logprobs == [gpuworker.TokenLogprob(5, -0.25, [])]
    stream.close()


def test_the_token_that_ends_it_has_no_text(owner, client):
    a, b, c, d = ids_of("abcd")
    owner.generation["eos_ids"] = [END, d]  # the second is no special token
    owner.declare({"contract": {"generation": owner.generation}})
    for options, tokens, expected in [
        ({}, [a, d], "a"),
        ({"ignore_eos": True}, [a, d], "ad"),
        ({"stop_ids": [c]}, [a, b, c], "ab"),
        ({}, [a, END], "a"),
        ({"ignore_eos": True}, [a, END, b], "ab"),
        ({"ignore_eos": True, "stop_ids": [c]}, [END, a, c], "a"),
    ]:
        with served(owner, lambda request, tokens=tokens: tokens):
            generation = client.generate("x", max_tokens=len(tokens), **options)
        assert (generation.text, generation.tokens) == (expected, tokens)
        assert generation.usage.completion_tokens == len(tokens)


def test_without_a_tokenizer_there_are_tokens_and_no_text(name, tmp_path):
    with fake_owner(name, tmp_path) as owner, gpuworker.connect(name) as client, served(owner, echo):
        generation = client.generate([1, 2, 3])
        assert (generation.text, generation.tokens) == ("", [2, 3, END])
        with pytest.raises(FileNotFoundError, match="clients read its tokenizer from there"):
            client.generate("text")
        with pytest.raises(FileNotFoundError):
            client.generate([1], stop="x")


# Stop strings.


def test_case_4_a_stop_string_never_leaks(owner, client):
    """vllm 3574, 2577: also when the reader takes each token as it comes."""
    stream = client.stream("x", stop="DEFGHIJ", max_tokens=50)
    answer = owner.admit_one()
    seen = []
    for token in ids_of("ABCDEFGHIJKL"):
        if not answer.send(token):
            break
        seen.append(next(stream).text)
    assert "".join(seen) == stream.result().text == "ABC"
    assert stream.generation.finish_reason == "stop"


def test_case_5_a_stop_string_across_tokens(owner, client):
    """mzau/mlx-knife 68."""
    the, quick = ids_of("the quick")[0], ids_of(" quick")
    text = BYTES.decode([the, *quick])
    stop = text[1:6]
    assert BYTES.decode([the]) not in stop
    with served(owner, lambda request: [the, *quick, *ids_of(" brown")]):
        generation = client.generate("x", stop=[stop], max_tokens=40)
    assert (generation.text, generation.finish_reason) == (text[:1], "stop")


def test_a_stop_string_frees_the_blocks_at_once_and_later_tokens_do_not_count(owner, client):
    stream = client.stream("x", stop=["b", "zzz"], max_tokens=50, logprobs=0)
    answer = owner.admit_one()
    answer.send(*ids_of("abc"), logprob=-1.0)
    assert not answer.is_gone
    delta = next(stream)
    assert answer.is_gone
    a, b, _ = ids_of("abc")
    assert (delta.text, delta.tokens, len(delta.logprobs)) == ("a", [a, b], 2)
    generation = stream.result()
    assert (generation.text, generation.tokens, generation.finish_reason, generation.usage.completion_tokens) == ("a", [a, b], "stop", 2)
    assert len(generation.logprobs) == 2
    assert list(stream) == []
    assert answer.finish()
    assert owner.in_use == 0


def test_an_answer_that_a_stop_string_ends_is_completed(owner, client):
    """It was counted as abandoned; what somebody does not want any more still is."""
    stream = client.stream("x", stop="b", max_tokens=50)
    answer = owner.admit_one()
    answer.send(*ids_of("ab"))
    assert stream.result().finish_reason == "stop"
    assert answer.finish()  # to the owner it is one that nobody waits for
    found = Stats.read(owner.segment)
    assert (found.completed, found.abandoned, found.cancelled) == (1, 0, 0)
    left = client.stream("x", max_tokens=50)
    answer = owner.admit_one()
    answer.send(*ids_of("a"))
    next(left)
    del left
    answer.finish()
    stream = client.stream("x", stop="b", max_tokens=2)
    answer = owner.admit_one()
    answer.send(*ids_of("ab"))
    answer.end("length")  # before anybody has looked
    assert stream.result().finish_reason == "stop"
    found = Stats.read(owner.segment)
    assert (found.submitted, found.completed, found.abandoned) == (3, 2, 1)


def test_what_was_held_back_comes_at_the_end(owner, client):
    with served(owner, lambda request: ids_of("hello wor")):
        generation = client.generate("x", stop="world", max_tokens=len(ids_of("hello wor")))
    assert (generation.text, generation.finish_reason) == ("hello wor", "length")


# What is refused before it is sent.


def test_case_9_no_tokens_at_all(owner, client):
    """vllm 6521, 9336: max_tokens=0 crashed the server."""
    stream = client.stream("abc", max_tokens=0)
    answer = owner.admit_one()
    answer.end("length")
    generation = stream.result()
    assert (generation.text, generation.tokens, generation.finish_reason) == ("", [], "length")
    assert generation.usage == (len(ids_of("abc")), 0)


def test_case_10_an_empty_prompt_is_its_senders_error(owner, client):
    """vllm 7283: it killed the engine. For this tokenizer "" has no tokens."""
    for empty in ([], (), "", np.zeros(0, "i4")):
        with pytest.raises(ValueError, match="prompt: it is empty"):
            client.generate(empty)
    assert owner.in_use == 0
    with served(owner, echo):
        assert client.generate("ab").finish_reason == "stop"


def test_case_12_a_prompt_that_is_too_long_among_others(owner, client):
    """vllm 1655: the wrong number of outputs. Here each has its own answer or error, in its place."""
    results = []
    with served(owner, echo):
        for prompt in ([1, 2], [1] * 600, [1, 3]):
            try:
                results.append(client.generate(prompt, max_tokens=10).tokens)
            except gpuworker.InvalidRequest as error:
                results.append(str(error))
    assert results == [[2, END], "a prompt of 600 tokens and max_tokens=10 are 610, and this worker takes 512 together", [3, END]]


def test_an_answer_that_does_not_fit_the_slot_is_refused_with_the_numbers(owner, client):
    with pytest.raises(
        gpuworker.InvalidRequest, match=r"max_tokens=400: an answer of so many tokens takes [\d,]+ bytes, and this worker has room for 4,096"
    ):
        client.generate("a", max_tokens=400, logprobs=5)
    client.stream("a", max_tokens=400).close()


def test_priorities_where_there_are_none(owner, client):
    owner.generation["priorities"] = False
    owner.declare({"contract": {"generation": owner.generation}})
    with pytest.raises(gpuworker.InvalidRequest, match="start it with the option priorities"):
        client.generate("a", priority=1)
    client.stream("a").close()


def test_the_other_kind_of_request_is_told_what_to_call(owner, client, in_process, gate):
    for call in (client.submit, client.enqueue, lambda request: next(client.map([request]))):
        with pytest.raises(gpuworker.InvalidRequest, match=r"this worker generates: call client\.generate"):
            call("text")
    other = in_process(gate.run_batch).connect()
    for call in (other.generate, other.stream):
        with pytest.raises(gpuworker.InvalidRequest, match=r"does not generate: call client\.submit"):
            call("text")
    assert other.submit("text") == "text"


@pytest.mark.parametrize(
    "generation",
    [
        {"directory": 7},
        {"directory": "/a\0b"},
        {"eos_ids": 3},
        {"eos_ids": [-1]},
        {"vocabulary": "many"},
        {"vocabulary": 1 << 40},
        {"max_model_tokens": None},
        {"priorities": 1},
        None,
        [],
    ],
)
def test_nonsense_in_the_info_declares_nothing(generation):
    right = {"directory": "/x", "eos_ids": [1], "vocabulary": 4, "max_model_tokens": 5}
    assert isinstance(Contract.parse(json.dumps({"contract": {"generation": right}}).encode()), GenerationContract)
    entry = {**right, **generation} if isinstance(generation, dict) else generation
    assert Contract.parse(json.dumps({"contract": {"generation": entry}}).encode()) is None


# Another worker of the same name.


def test_what_is_refused_is_refused_by_the_worker_that_there_is_now(name, directory):
    """A worker that has been replaced is not asked."""
    with gpuworker.connect(name) as client:
        with fake_owner(name, directory, max_model_tokens=8) as small:
            with pytest.raises(gpuworker.InvalidRequest, match="takes 8 together"):
                client.generate("abc")
            assert small.in_use == 0
        with fake_owner(name, directory) as large, served(large, echo):
            assert client.generate("ab").finish_reason == "stop"


def test_a_worker_that_has_declared_something_else_since(owner, client):
    with pytest.raises(gpuworker.InvalidRequest):
        client.generate("abc", max_tokens=1000)
    owner.generation["max_model_tokens"] = 2000
    owner.declare({"contract": {"generation": owner.generation}})
    with served(owner, echo):
        assert client.generate("ab", max_tokens=700).finish_reason == "stop"

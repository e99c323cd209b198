"""Which sequences a step works on: decoding beside long prompts, ends, cancelling, a restart, figures. The model is a fake; see paged_model.py."""

import random
import subprocess
import sys

import pytest

from gpuworker.errors import InvalidRequest
from tests.paged_model import World, alone, shuffle

# Ends.


@pytest.mark.parametrize("max_tokens", [1, 2, 15, 16, 17, 40])
def test_exactly_as_many_tokens_as_asked_for(max_tokens):
    world = World()
    sequences = [world.add(length, max_tokens) for length in (1, 15, 16, 17, 100)]
    world.finish()
    assert {len(sequence.generated) for sequence in sequences} == {max_tokens}
    assert {sequence.finish_reason for sequence in sequences} == {"length"}
    assert world.scheduler.plan() == []


def test_no_tokens_asked_for_takes_no_blocks_and_no_step():
    world = World()
    sequence = world.add(20, max_tokens=0)
    assert (sequence.finish_reason, sequence.generated) == ("length", [])
    assert (world.pool.used, world.scheduler.plan()) == (0, [])


def test_an_end_ends_exactly_there():
    world = World(eos_ids=[0])
    (expected, reason) = alone([1, 2, 3], 50, {0})
    assert reason == "stop"
    eos = world.add([1, 2, 3], 50)
    ignored = world.add([1, 2, 3], 50, ignore_eos=True)
    own = world.add([1, 2, 3], 50, stop_ids=[expected[0]])
    own_only = world.add([1, 2, 3], 50, stop_ids=[2], ignore_eos=True)
    world.finish()
    assert (eos.generated, eos.finish_reason) == (expected, "stop")
    assert (len(ignored.generated), ignored.finish_reason) == (50, "length")
    assert (own.generated, own.finish_reason) == (expected[:1], "stop")
    assert own_only.generated[-1] == 2
    assert own_only.generated.count(2) == 1


def test_an_end_that_is_also_the_last_token_asked_for_is_an_end():
    world = World()
    (token,), _ = alone([1, 2, 3], 1)
    sequence = world.add([1, 2, 3], 1, stop_ids=[token])
    world.finish()
    assert sequence.finish_reason == "stop"


# What can never be finished is refused at once.


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "says"),
    [
        ([], 5, "the prompt is empty"),
        (200, 0, "the whole cache holds 128"),
        (100, 29, "may need 129 tokens, and the whole cache holds 128"),
        (10, 991, "may need 1,001 tokens, and the model takes 1,000"),
        (10, -1, "max_tokens=-1"),
    ],
)
def test_what_can_never_be_finished_is_refused_and_the_next_works(prompt, max_tokens, says):
    world = World(blocks=9, max_model_tokens=1000)
    with pytest.raises(InvalidRequest, match=says):
        world.add(prompt, max_tokens)
    with pytest.raises(ValueError, match=says):
        world.add(prompt, max_tokens)
    fits = world.add(100, 28)
    assert world.finish() == [fits]


@pytest.mark.parametrize(
    "options", [{"max_batch_tokens": 7}, {"max_running": 0}, {"max_model_tokens": 0}, {"max_overtakes": -1}, {"watermark_blocks": -1}]
)
def test_options_that_cannot_work(options):
    with pytest.raises(ValueError, match="at least"):
        World(**options)


# No phases: decoding goes on beside prompts.


@pytest.mark.parametrize("priority", [0, 1])
def test_a_running_sequence_gets_a_token_in_every_step_of_a_long_prefill(priority):
    world = World(blocks=400)
    decoding = [world.add(5, 200) for _ in range(3)]
    world.step()
    long = world.add(4000, 10, priority=priority)
    steps = 0
    while not long.generated:
        before = [len(sequence.generated) for sequence in decoding]
        world.step()
        steps += 1
        assert [len(sequence.generated) for sequence in decoding] == [n + 1 for n in before]
    assert steps == -(-4000 // (64 - 3))  # all that decoding leaves goes to it
    world.finish()


def test_a_full_house_of_decodes_still_leaves_the_oldest_prompt_a_token():
    world = World(max_batch_tokens=8, max_running=8)
    for _ in range(7):
        world.add(1, 100)
    world.step(1)
    long = world.add(50, 1)
    world.step(50)
    assert long.is_finished


def test_prompts_share_a_step():
    world = World()
    for length in (20, 30, 40):
        world.add(length)
    assert [(chunk.sequence.ticket, chunk.start, chunk.count) for chunk in world.scheduler.plan()] == [(1, 0, 20), (2, 0, 30), (3, 0, 14)]
    world.step()
    assert [(chunk.sequence.ticket, chunk.start, chunk.count) for chunk in world.scheduler.plan()] == [(1, 20, 1), (2, 30, 1), (3, 14, 26)]


def test_a_plan_that_was_not_carried_out_is_made_again():
    world = World()
    for length in (20, 30, 40):
        world.add(length)
    first = [(chunk.sequence, chunk.start, chunk.count) for chunk in world.scheduler.plan()]
    assert [(chunk.sequence, chunk.start, chunk.count) for chunk in world.scheduler.plan()] == first
    world.finish()


def test_what_is_not_of_the_last_plan_is_refused():
    world = World()
    sequence = world.add(20)
    chunks = world.scheduler.plan()
    with pytest.raises(KeyError):
        world.scheduler.done(chunks, {})
    assert (sequence.computed, sequence.generated) == (0, [])
    world.scheduler.done(chunks, {sequence: 1})
    with pytest.raises(RuntimeError, match="not of the last plan"):
        world.scheduler.done(chunks, {sequence: 1})


# Cancelling and failing.


def test_cancel_returns_the_blocks_at_once_in_every_state():
    world = World(max_running=2)
    decoding, prefilling, waiting = world.add(5, 50), world.add(300, 5), world.add(5)
    world.step(2)
    assert prefilling.computed > 0
    assert prefilling.missing > 1
    assert not waiting.is_running
    for sequence in (waiting, prefilling, decoding):
        assert world.scheduler.cancel(sequence)
        assert (sequence.finish_reason, sequence.blocks) == ("cancelled", [])
        assert not world.scheduler.cancel(sequence)
        assert not world.scheduler.fail(sequence, "too late")
        world.scheduler.check()
    assert world.pool.used == 0
    assert world.scheduler.plan() == []


def test_cancel_of_a_preempted_one():
    world = World(blocks=9)
    world.add(60, 60)
    preempted = world.add(40, 60)
    while not world.preemptions:
        world.step()
    assert world.scheduler.cancel(preempted)
    assert list(world.scheduler.waiting) == []
    world.finish()


def test_a_late_token_of_a_cancelled_one_goes_to_nobody():
    """Its blocks belong to another already when the step that it was part of ends."""
    world = World(blocks=9, prefix_caching=False)
    cancelled = world.add(100, 10)
    world.step(2)
    chunks = world.scheduler.plan()
    sampled = world.model.run(chunks)
    assert cancelled in sampled
    said = cancelled.generated
    world.scheduler.cancel(cancelled)
    next_one = world.add(100, 10)
    assert world.scheduler.done(chunks, sampled) == []
    assert cancelled.generated == said
    world.step()
    assert set(next_one.blocks) & set(range(1, 9))
    world.finish()
    assert len(next_one.generated) == 10


def test_one_fails_and_the_others_go_on():
    world = World()
    good, bad = world.add(20), world.add(30)
    world.step()
    chunks = world.scheduler.plan()
    sampled = world.model.run(chunks)
    del sampled[bad]
    assert world.scheduler.fail(bad, FloatingPointError("nan"))
    world.scheduler.done(chunks, sampled)
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, FloatingPointError)
    assert len(bad.generated) == 1
    assert world.finish() == [good]


# An owner after this one.


def test_a_restarted_owner_goes_on_where_the_other_ended():
    prompts = [random.Random(i).choices(range(7), k=10 * i + 1) for i in range(6)]
    first = World()
    before = [first.add(prompt, 30) for prompt in prompts]
    first.step(9)
    again = World()
    after = [again.add(sequence.prompt, 30, generated=sequence.generated) for sequence in before]
    again.finish()
    assert [sequence.generated for sequence in after] == [alone(prompt, 30)[0] for prompt in prompts]


def test_one_that_had_said_everything_is_finished_at_once():
    world = World(eos_ids=[0])
    said_all = world.add([1, 2], 3, generated=[4, 4, 4])
    ended = world.add([1, 2], 9, generated=[4, 0])
    assert (said_all.finish_reason, ended.finish_reason) == ("length", "stop")
    assert world.scheduler.plan() == []


# A policy: no torch, and what it says.


def test_nothing_of_it_needs_torch():
    code = "import sys, gpuworker.generation.scheduler; print(sorted({module.split('.')[0] for module in sys.modules} & {'torch', 'transformers'}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_what_the_statistics_say():
    world = World(blocks=33, max_running=2)
    a, b, _ = world.add(20, 10), world.add([1] * 10, 10), world.add(30, 10)
    world.step(2)
    stats = world.scheduler.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.blocks_free) == (2, 1, 3, 29)
    assert (stats.steps, stats.batch_tokens, stats.preemptions, stats.prefix_hit_tokens) == (2, 32, 0, 0)
    assert stats.waste == pytest.approx((48 - len(a.tokens) - len(b.tokens)) / 48)
    world.finish()
    stats = world.scheduler.stats()
    assert (stats.running, stats.waiting, stats.blocks_used, stats.waste) == (0, 0, 0, 0.0)
    assert stats.blocks_cached > 0


def test_no_more_than_a_part_of_one_block_is_wasted_per_sequence():
    world = World(blocks=200)
    for length in (1, 50, 150, 300, 500):
        world.add(length, 100)
    for _ in range(40):
        world.step()
        used = world.scheduler.stats().blocks_used
        assert world.scheduler.stats().waste * used * 16 <= 15 * len(world.scheduler.running)
    world.finish()


def test_a_sequence_says_how_far_it_is():
    world = World()
    sequence = world.add(20, 3)
    assert repr(sequence) == "<Sequence 1: waiting, 20 + 0 of 3, 0 computed>"
    world.step()
    assert repr(sequence) == "<Sequence 1: running, 20 + 1 of 3, 20 computed>"
    world.finish()
    assert repr(sequence) == "<Sequence 1: length, 20 + 3 of 3, 0 computed>"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda world: world.pool.share(world.sequences[0].blocks), "who holds what"),
        (lambda world: world.pool.release(world.sequences[0].blocks), "who holds what"),
        (lambda world: setattr(world.sequences[0], "computed", 99), "should not"),
        (lambda world: world.scheduler.running.reverse(), "in order"),
        (lambda world: setattr(world.sequences[2], "computed", 1), "waits and should not"),
    ],
)
def test_the_check_finds_what_is_wrong(damage, says):
    world = World(max_running=2)
    for _ in range(3):
        world.add(5)
    world.step()
    damage(world)
    with pytest.raises(RuntimeError, match=says):
        world.scheduler.check()


@pytest.mark.parametrize("seed", range(20))
def test_where_blocks_are_makes_no_difference(seed):
    chance = random.Random(seed)
    world = World(blocks=chance.randint(12, 40))
    for _ in range(15):
        world.add(chance.choices(range(3), k=chance.randint(1, 90)), chance.randint(1, 60))
        shuffle(world.pool, chance)
        world.step(chance.randint(0, 5))
    world.finish()

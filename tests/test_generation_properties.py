"""Whatever is added, cancelled, failed, preempted, restarted, in whatever order: every output is as if its sequence had been alone, and every block comes back."""

import os
import random

import hypothesis.strategies as st
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from gpuworker.generation.blocks import BlockPool
from gpuworker.generation.scheduler import Scheduler
from gpuworker.generation.sequence import Sequence
from tests.paged_model import PagedModel, alone, check_plan, shuffle

EXAMPLES = os.environ.get(
    "GPUWORKER_GENERATION_EXAMPLES"
)  # given: so many, and what fails is made small, which may take longer than a test of the suite may
VOCABULARY = 11


class Generation(RuleBasedStateMachine):
    """One owner at a time. Between `plan` and `done` a step is being computed, and anything else may happen."""

    @initialize(data=st.data())
    def start(self, data):
        draw = data.draw
        self.blocks, self.block_tokens = draw(st.integers(2, 20), "blocks"), draw(st.sampled_from([1, 2, 4, 16]), "block_tokens")
        max_running = draw(st.integers(1, 5), "max_running")
        self.options = {
            "max_running": max_running,
            "max_batch_tokens": max_running + draw(st.integers(0, 40), "more tokens"),
            "max_model_tokens": 200,
            "watermark_blocks": draw(st.sampled_from([None, 0, 1, 3]), "watermark_blocks"),
            "max_overtakes": draw(st.integers(0, 3), "max_overtakes"),
            "prefix_caching": draw(st.booleans(), "prefix_caching"),
            "eos_ids": [0] if draw(st.booleans(), "eos") else [],
        }
        self.sequences, self.prompts, self.ticket, self.in_flight = [], [[1]], 0, None
        self.begin()

    def begin(self):
        self.pool = BlockPool(self.blocks, self.block_tokens)
        self.scheduler = Scheduler(self.pool, **self.options)
        self.model = PagedModel(self.pool, vocabulary=VOCABULARY)

    def unfinished(self):
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @rule(
        data=st.data(), count=st.integers(1, 6), seed=st.integers(0, 1 << 20), priorities=st.sampled_from([1, 1, 2]), ends=st.sampled_from([0, 0, 1])
    )
    def add(self, data, count, seed, priorities, ends):
        """Some sequences, of all lengths that the cache can hold and a little more, which often begin alike."""
        chance, capacity = random.Random(seed), (self.blocks - 1) * self.block_tokens
        for _ in range(count):
            self.ticket += 1
            known = chance.choice(self.prompts)
            prompt = known[: chance.randint(0, len(known))] + chance.choices(range(VOCABULARY), k=chance.randint(0, capacity // 2))
            max_tokens = chance.randint(0, max(1, capacity * 2 // 3))
            sequence = Sequence(
                self.ticket,
                prompt,
                max_tokens=max_tokens,
                priority=chance.randrange(priorities),
                arrival_ns=self.ticket,
                stop_ids=chance.sample(range(VOCABULARY), ends),
                ignore_eos=chance.random() < 0.5,
            )
            try:
                self.scheduler.add(sequence)
            except ValueError:
                assert not prompt or len(prompt) + max_tokens > min(200, capacity)
                continue
            assert prompt
            assert len(prompt) + max_tokens <= capacity
            self.prompts = [*self.prompts[-4:], prompt]
            self.sequences.append(sequence)

    @precondition(lambda self: self.in_flight is None)
    @rule()
    def plan(self):
        chunks = self.scheduler.plan()
        check_plan(self.scheduler, chunks)
        self.in_flight = chunks, self.model.run(chunks)

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def done(self):
        (chunks, sampled), self.in_flight = self.in_flight, None
        finished = self.scheduler.done(chunks, sampled)
        assert all(sequence.finish_reason in ("stop", "length") for sequence in finished)
        for sequence in finished:
            self.check_output(sequence)

    @precondition(lambda self: self.in_flight is None)
    @rule(count=st.integers(1, 20))
    def steps(self, count):
        for _ in range(count):
            self.plan()
            self.done()

    @precondition(lambda self: self.in_flight is not None)
    @rule()
    def the_step_fails(self):
        """Nothing of it counts; what it has written is written again."""
        self.in_flight = None

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), fails=st.booleans())
    def end(self, data, fails):
        sequence = data.draw(st.sampled_from(self.sequences), "sequence")
        before, said = sequence.finish_reason, sequence.generated
        ended = self.scheduler.fail(sequence, "reason") if fails else self.scheduler.cancel(sequence)
        assert ended == (before is None)
        assert sequence.finish_reason == (before or ("error" if fails else "cancelled"))
        assert (sequence.blocks, sequence.generated) == ([], said)

    @rule(seed=st.integers(0, 1000))
    def shuffle(self, seed):
        shuffle(self.pool, random.Random(seed))

    @rule()
    def restart(self):
        """The owner dies, and another goes on from what was said."""
        before, self.in_flight = self.unfinished(), None
        self.sequences = [sequence for sequence in self.sequences if sequence.is_finished]
        self.begin()
        for old in before:
            kept = {name: getattr(old, name) for name in ("max_tokens", "priority", "arrival_ns", "stop_ids", "ignore_eos")}
            self.sequences.append(Sequence(old.ticket, old.prompt, generated=old.generated, **kept))
            self.scheduler.add(self.sequences[-1])

    def check_output(self, sequence):
        ends = sequence.stop_ids | (frozenset() if sequence.ignore_eos else frozenset(self.options["eos_ids"]))
        expected, reason = alone(sequence.prompt, sequence.max_tokens, ends, vocabulary=VOCABULARY)
        if sequence.finish_reason in ("stop", "length"):
            assert (sequence.generated, sequence.finish_reason) == (expected, reason)
        else:
            assert sequence.generated == expected[: len(sequence.generated)]

    @invariant()
    def all_is_whole(self):
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        there = {*self.scheduler.running, *self.scheduler.waiting}
        assert there == set(self.unfinished())
        for sequence in self.sequences:
            self.check_output(sequence)
            assert sequence.overtaken <= self.options["max_overtakes"]

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        if self.in_flight is not None:
            self.done()
        # The first of the running gets a token in every step, so even one after the other they are done after this many.
        bound = sum(len(sequence.prompt) + sequence.max_tokens for sequence in self.unfinished()) + len(self.sequences)
        while self.unfinished():
            self.plan()
            self.done()
            bound -= 1
            assert bound >= 0, "it does not end"
        self.all_is_whole()
        assert self.scheduler.plan() == []
        assert self.pool.free == self.pool.usable
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.blocks_used, stats.waste) == (0, 0, 0, 0)


def test_every_output_is_as_if_alone_and_every_block_comes_back():
    phases = set(Phase) if EXAMPLES else {Phase.explicit, Phase.reuse, Phase.generate}
    run_state_machine_as_test(Generation, settings=settings(max_examples=int(EXAMPLES or 100), stateful_step_count=40, deadline=None, phases=phases))

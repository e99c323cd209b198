"""A model for tests of scheduling: its next token depends on all tokens so far, and it reads them from a paged cache, so a wrong block shows in the output."""

from gpuworker.generation.blocks import BlockPool
from gpuworker.generation.scheduler import Scheduler
from gpuworker.generation.sequence import Sequence

MODULUS = (1 << 61) - 1


def value_of(before, token):
    """What the cache holds for a token: it depends on all tokens before it, as keys and values do."""
    return (before * 1_000_003 + token + 1) % MODULUS


def token_from(values, vocabulary):
    """The next token, from the values of all tokens so far."""
    mixed = 0
    for value in values:
        mixed = (mixed * 31 + value) % MODULUS
    return mixed % vocabulary


def values_of(tokens):
    values = [0]
    for token in tokens:
        values.append(value_of(values[-1], token))
    return values[1:]


def alone(prompt, max_tokens, ends=(), vocabulary=7):
    """-> what a sequence by itself generates, and why it ends."""
    values, generated = values_of(prompt), []
    while len(generated) < max_tokens:
        generated.append(token_from(values, vocabulary))
        if generated[-1] in ends:
            return generated, "stop"
        values.append(value_of(values[-1], generated[-1]))
    return generated, "length"


class PagedModel:
    """Computes chunks: first all of them are written, then read, as a real step does layer by layer."""

    def __init__(self, pool, vocabulary=7):
        self.pool, self.vocabulary = pool, vocabulary
        self.cache = [[None] * pool.block_tokens for _ in range(pool.usable + 1)]

    def run(self, chunks):
        """-> the token of each sequence that has caught up."""
        for chunk in chunks:
            for position in range(chunk.start, chunk.start + chunk.count):
                before = self.read(chunk.sequence, position - 1) if position else 0
                self.write(chunk.sequence, position, value_of(before, chunk.sequence.tokens[position]))
        sampled = {}
        for chunk in chunks:
            values = [self.read(chunk.sequence, position) for position in range(chunk.start + chunk.count)]
            assert values == values_of(chunk.sequence.tokens[: len(values)]), f"{chunk.sequence} has read what is not its own"
            if chunk.is_last:
                sampled[chunk.sequence] = token_from(values, self.vocabulary)
        return sampled

    def place(self, sequence, position):
        return sequence.blocks[position // self.pool.block_tokens], position % self.pool.block_tokens

    def read(self, sequence, position):
        block, slot = self.place(sequence, position)
        return self.cache[block][slot]

    def write(self, sequence, position, value):
        block, slot = self.place(sequence, position)
        assert block, "the trash block is nobody's"
        assert self.pool.holders(block) == 1, f"{sequence} writes to a block that others hold"
        assert block not in self.pool._name_of, f"{sequence} writes to a block that others may find"
        self.cache[block][slot] = value


def step(scheduler, model):
    """One step, checked. -> the sequences that have finished by it."""
    chunks = scheduler.plan()
    check_plan(scheduler, chunks)
    finished = scheduler.done(chunks, model.run(chunks))
    scheduler.check()
    return finished


def check_plan(scheduler, chunks):
    """What is true of every plan."""
    scheduler.check()
    assert sum(chunk.count for chunk in chunks) <= scheduler.max_batch_tokens
    assert len({chunk.sequence for chunk in chunks}) == len(chunks) <= len(scheduler.running) <= scheduler.max_running
    assert [chunk.count > 1 for chunk in chunks] == sorted(chunk.count > 1 for chunk in chunks)
    served = {chunk.sequence for chunk in chunks}
    for chunk in chunks:
        assert chunk.start == chunk.sequence.computed
        assert 1 <= chunk.count <= chunk.sequence.missing
        assert len(chunk.sequence.blocks) >= scheduler.pool.blocks_for(chunk.start + chunk.count)
    for sequence in scheduler.running:
        assert sequence in served or sequence.missing > 1, f"{sequence} decodes, and has got no token"
    if scheduler.running or scheduler.waiting:
        assert chunks, "something waits, and nothing runs"


def shuffle(pool, random):
    """From here on blocks are handed out in a random order."""
    blocks = pool.take(pool.free - pool.cached)
    random.shuffle(blocks)
    pool.release(blocks)


class World:
    """A scheduler, its model, and all sequences that were added."""

    def __init__(self, blocks=65, **options):
        self.pool = BlockPool(blocks)
        self.scheduler = Scheduler(self.pool, **{"max_batch_tokens": 64, "max_running": 8, "max_model_tokens": 10_000, **options})
        self.model = PagedModel(self.pool)
        self.sequences = []

    def add(self, prompt, max_tokens=10, **options):
        ticket = len(self.sequences) + 1
        prompt = [ticket % 7] * prompt if isinstance(prompt, int) else prompt
        sequence = Sequence(ticket, prompt, max_tokens=max_tokens, **{"arrival_ns": ticket, **options})
        self.scheduler.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def step(self, count=1):
        return [finished for _ in range(count) for finished in step(self.scheduler, self.model)]

    def finish(self):
        """Runs until nothing is left; every output is as if its sequence had been alone. -> in the order in which they finish."""
        finished, bound = [], 20_000
        while self.scheduler.running or self.scheduler.waiting:
            finished += self.step()
            bound -= 1
            assert bound, "it does not end"
        for sequence in self.sequences:
            if sequence.finish_reason in ("stop", "length"):
                ends = sequence.stop_ids | (set() if sequence.ignore_eos else self.scheduler._eos_ids)
                assert (sequence.generated, sequence.finish_reason) == alone(sequence.prompt, sequence.max_tokens, ends)
        assert self.pool.free == self.pool.usable
        return finished

    @property
    def preemptions(self):
        return self.scheduler.stats().preemptions

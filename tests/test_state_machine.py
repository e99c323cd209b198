"""Random lives of a ring: clients and owners that are told step by step what to do, killed, stopped and replaced, against a plain model of it.

Every actor is a process of its own. A command is over before the next is given, so the model knows exactly what each call has to return and what every
slot's word has to be. GPUWORKER_STATE_MACHINE_EXAMPLES=1000 looks longer.
"""

import dataclasses
import errno
import os
import random
import signal

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from gpuworker._native import ffi, lib
from gpuworker.segment import Segment
from tests.actors import CAPACITY, PLACES, QUOTA, ClientActor, OwnerActor, start

EXAMPLES = int(os.environ.get("GPUWORKER_STATE_MACHINE_EXAMPLES", "25"))
FREE, CLAIMED, READY, RUNNING, DONE, ABANDONED = range(6)  # native/layout.h
SLOT_BYTES = 192
MAX_ATTEMPTS = 2
MAX_BATCHES = lib.GW_MAX_DEPTH
STALE = -errno.ESTALE


@dataclasses.dataclass
class Life:
    """One request, from its claim on: all that a model has to know of it."""

    ticket: int
    client: "Client"
    phase: int = CLAIMED
    number: int = 0
    is_overdue: bool = False
    attempts: int = 0
    answer: tuple = ()
    is_waited_for: bool = False

    @property
    def slot(self):
        return self.ticket & 0xFFF


@dataclasses.dataclass
class Client:
    actor: object
    place: int
    is_paused: bool = False
    is_gone: bool = False
    held: int = 0  # slots that count against its quota
    lives: list = dataclasses.field(default_factory=list)


def action(when, weight=1, **drawn):
    """What may happen next, if `when`, and how often compared with others. It is given what is drawn for it, and as `data` the means to draw itself.

    Not one rule each: hypothesis leaves rules out at random, and then hardly a request would get from its claim to its answer.
    """

    def mark(method):
        method.when, method.weight, method.drawn = when, weight, drawn
        return method

    return mark


class Ring(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.name = f"t-{os.getpid()}-{random.SystemRandom().getrandbits(32):x}"
        self.slots = [None] * CAPACITY  # the life that each is in, once it has had one; FREE lives stay
        self.places = {}  # place -> client, until it is reaped
        self.clients, self.number = [], 0
        self.owner, self.owner_is_paused = None, False
        self.queue = []  # READY, in the order of their publication
        self.backlog, self.taken = [], []  # the owner's own
        self.batches = []  # those on their way: the first life of each, and whether it is a suspect
        self.segment = None

    # Helpers.

    def pick(self, data, what):
        return data.draw(st.sampled_from(what))

    def _active(self):
        return [client for client in self.clients if not client.is_paused and not client.is_gone]

    def _lives(self, *phases, waited=False):
        """Of clients that can act; those a thread waits for are left to that thread."""
        return [life for client in self._active() for life in client.lives if life.phase in phases and life.is_waited_for == waited]

    def _free(self, life):
        life.phase = FREE

    def _give_up(self, life):
        """What cancelling does."""
        if life in self.queue:
            self.queue.remove(life)
        life.phase = ABANDONED if life.phase == RUNNING else FREE

    def _answered(self, life, *answer):
        life.phase, life.answer = DONE, answer

    def _owner_acts(self):
        return self.owner is not None and not self.owner_is_paused

    # The owner.

    @initialize()
    def first_owner(self):
        self.owner = start(OwnerActor, self.name, MAX_ATTEMPTS)
        self.segment = Segment.attach(self.name, read_only=True)
        for _ in range(2):
            self.join()

    @action(lambda self: self._owner_acts())
    def collect(self):
        assert self.owner("collect") == [life.ticket for life in self.queue]
        self.backlog = list(self.queue)

    @action(lambda self: self._owner_acts() and (self.backlog or self.queue), weight=4, count=st.integers(1, 3))
    def take(self, count):
        if not self.backlog:
            self.collect()
        expected = []
        runs_alone = bool(self.batches) and self.batches[-1][1]
        while self.backlog and len(expected) < count and not runs_alone:
            life = self.backlog[0]
            is_suspect = self.slots[life.slot].attempts > 0  # ran when an owner died: a batch of its own, and no other is on its way
            if is_suspect and (expected or self.batches):
                break
            del self.backlog[0]
            if life.phase != READY:
                continue
            self.queue.remove(life)
            if life.is_overdue:
                self._answered(life, lib.GW_KIND_EXPIRED)
                continue
            life.phase = RUNNING
            expected.append(life)
            if is_suspect:
                break
        assert self.owner("take", count) == [(life.ticket, life.number) for life in expected]
        self.taken += expected
        if expected:
            self.batches = [*self.batches[-MAX_BATCHES + 1 :], (expected[0], expected[0].attempts > 0)]

    @action(lambda self: self._owner_acts() and self.taken, weight=4, data=None)
    def finish(self, data):
        part = data.draw(st.lists(st.sampled_from(self.taken), min_size=1, unique_by=id))
        assert self.owner("finish", [life.ticket for life in part]) == sum(life.phase == ABANDONED for life in part)
        for k, (first, _) in enumerate(self.batches):
            if first is part[0]:
                self.batches = self.batches[k + 1 :]
                break
        for life in part:
            self.taken.remove(life)
            self._free(life) if life.phase == ABANDONED else self._answered(life, lib.GW_KIND_BYTES, life.number)

    @action(lambda self: self._owner_acts() and self.queue, data=None)
    def refuse(self, data):
        life = self.pick(data, self.queue)
        assert self.owner("refuse", life.ticket) == 0
        self.queue.remove(life)
        self._answered(life, lib.GW_KIND_DRAINING)

    @action(lambda self: self._owner_acts())
    def expire(self):
        late = [life for life in self.queue if life.is_overdue]
        assert self.owner("expire") == len(late)
        for life in late:
            self.queue.remove(life)
            self._answered(life, lib.GW_KIND_EXPIRED)

    @action(lambda self: self._owner_acts(), weight=2)
    def reap(self):
        gone = {place: client for place, client in self.places.items() if client.is_gone}
        assert self.owner("reap") == sorted(gone)
        for place, client in gone.items():
            del self.places[place]
            for life in client.lives:
                if life.phase not in (FREE, ABANDONED):
                    self._give_up(life)

    @action(lambda self: self.owner is not None, weight=2)
    def kill_owner(self):
        self.owner.kill()
        self.owner, self.owner_is_paused = None, False
        self.backlog = []

    @action(lambda self: self.owner is None, weight=4)
    def next_owner(self):
        again = 0
        self.taken, self.batches = [], []
        for life in self.slots:
            if life is None or life.phase not in (RUNNING, ABANDONED):
                continue
            life.attempts += life.phase == RUNNING
            if life.phase == ABANDONED:
                self._free(life)
            elif life.attempts >= MAX_ATTEMPTS:
                self._answered(life, lib.GW_KIND_DIED)
            else:
                life.phase = READY
                self.queue.append(life)
                again += 1
        self.queue.sort(key=lambda life: life.number)
        self.owner = start(OwnerActor, self.name, MAX_ATTEMPTS)
        assert self.owner.greeting == again

    @action(lambda self: self._owner_acts())
    def pause_owner(self):
        self.owner.signal(signal.SIGSTOP)
        self.owner_is_paused = True

    @action(lambda self: self.owner is not None and self.owner_is_paused, weight=3)
    def resume_owner(self):
        self.owner.signal(signal.SIGCONT)
        self.owner_is_paused = False

    # Clients.

    @action(lambda self: len(self.places) < PLACES, weight=2)
    def join(self):
        actor = start(ClientActor, self.name)
        place = min(set(range(1, PLACES + 1)) - set(self.places))
        assert actor.greeting == place
        client = Client(actor, place)
        self.clients.append(client)
        self.places[place] = client

    def _claimed(self, client, ticket):
        """Checks the outcome of a claim. -> the new life, or None."""
        free = [i for i, life in enumerate(self.slots) if life is None or life.phase == FREE]
        if client.held >= QUOTA:
            assert ticket == -errno.EDQUOT
            return None
        if not free:
            assert ticket == -errno.EAGAIN
            return None
        slot = ticket & 0xFFF
        assert slot in free
        assert ticket >> 12 == (self.slots[slot].ticket >> 12 if self.slots[slot] else 0) + 1
        life = Life(ticket, client)
        self.slots[slot] = life
        client.lives.append(life)
        client.held += 1
        return life

    def _publish(self, life):
        life.phase = READY
        self.queue.append(life)

    @action(lambda self: self._active(), data=None)
    def claim(self, data):
        client = self.pick(data, self._active())
        self._claimed(client, client.actor("claim"))

    @action(lambda self: self._lives(CLAIMED), weight=2, data=None, is_overdue=st.booleans())
    def publish(self, data, is_overdue):
        life = self.pick(data, self._lives(CLAIMED))
        self.number += 1
        life.number, life.is_overdue = self.number, is_overdue
        assert life.client.actor("publish", life.ticket, life.number, is_overdue) == 0
        self._publish(life)

    @action(lambda self: self._active(), weight=5, data=None, is_overdue=st.sampled_from((False, False, True)))
    def submit(self, data, is_overdue):
        client = self.pick(data, self._active())
        self.number += 1
        life = self._claimed(client, client.actor("submit", self.number, is_overdue))
        if life is not None:
            life.number, life.is_overdue = self.number, is_overdue
            self._publish(life)

    @action(lambda self: self._lives(*range(6)), data=None)
    def poll(self, data):
        life = self.pick(data, self._lives(*range(6)))
        expected = life.answer if life.phase == DONE else STALE if life.phase in (FREE, ABANDONED) else -errno.EINPROGRESS
        assert life.client.actor("poll", life.ticket) == expected

    @action(lambda self: self._lives(*range(6)), data=None)
    def try_to_wait(self, data):
        life = self.pick(data, self._lives(*range(6)))
        expected = life.answer if life.phase == DONE else STALE if life.phase in (FREE, ABANDONED) else -errno.ETIMEDOUT
        assert life.client.actor("wait", life.ticket, 0.0) == expected

    @action(lambda self: self._lives(READY, RUNNING), weight=3, data=None)
    def begin_to_wait(self, data):
        life = self.pick(data, self._lives(READY, RUNNING))
        life.client.actor("begin_to_wait", life.ticket)
        life.is_waited_for = True

    @action(lambda self: self._lives(DONE, FREE, ABANDONED, waited=True), weight=4, data=None)
    def end_of_wait(self, data):
        life = self.pick(data, self._lives(DONE, FREE, ABANDONED, waited=True))
        result, was_woken = life.client.actor("end_of_wait", life.ticket)
        assert result == (life.answer if life.phase == DONE else STALE)
        assert was_woken, "it slept to the end of its slice"
        life.is_waited_for = False

    @action(lambda self: self._lives(*range(6)), weight=4, data=None)
    def release(self, data):
        life = self.pick(data, self._lives(*range(6)))
        assert life.client.actor("release", life.ticket) == (0 if life.phase == DONE else STALE)
        if life.phase == DONE:
            self._free(life)
            life.client.held -= 1

    @action(lambda self: self._lives(*range(6)) + self._lives(*range(6), waited=True), weight=2, data=None)
    def cancel(self, data):
        life = self.pick(data, self._lives(*range(6)) + self._lives(*range(6), waited=True))
        expected = {FREE: STALE, ABANDONED: STALE, DONE: 2, RUNNING: 1}.get(life.phase, 0)
        assert life.client.actor("cancel", life.ticket) == expected
        if expected in (0, 1):
            self._give_up(life)
            life.client.held -= 1

    @action(lambda self: self._lives(FREE, ABANDONED, READY, RUNNING, DONE), data=None)
    def publish_again(self, data):
        life = self.pick(data, self._lives(FREE, ABANDONED, READY, RUNNING, DONE))
        assert life.client.actor("publish", life.ticket, 0, False) == STALE

    @action(lambda self: self._lives(*range(6)) and len(self._active()) > 1, data=None)
    def touch_anothers(self, data):
        life = self.pick(data, self._lives(*range(6)))
        other = self.pick(data, [client for client in self._active() if client is not life.client])
        for call in ("poll", "release", "cancel"):
            assert other.actor(call, life.ticket) == STALE

    @action(lambda self: self._active(), data=None)
    def close(self, data):
        client = self.pick(data, self._active())
        client.actor("close")
        for life in client.lives:
            if life.phase in (READY, RUNNING):
                self._give_up(life)
        client.is_gone = True

    @action(lambda self: any(not client.is_gone for client in self.clients), data=None)
    def kill_client(self, data):
        client = self.pick(data, [client for client in self.clients if not client.is_gone])
        client.actor.kill()
        client.is_gone = True

    @action(lambda self: self._active(), data=None)
    def pause_client(self, data):
        client = self.pick(data, self._active())
        client.actor.signal(signal.SIGSTOP)
        client.is_paused = True

    @action(lambda self: any(client.is_paused and not client.is_gone for client in self.clients), weight=2, data=None)
    def resume_client(self, data):
        client = self.pick(data, [client for client in self.clients if client.is_paused and not client.is_gone])
        client.actor.signal(signal.SIGCONT)
        client.is_paused = False

    @rule(data=st.data())
    def step(self, data):
        possible = [method for method in ACTIONS for _ in range(method.weight) if method.when(self)]
        name = data.draw(st.sampled_from([method.__name__ for method in possible]), "action")
        chosen = getattr(self, name)
        chosen(**{key: data if strategy is None else data.draw(strategy, key) for key, strategy in chosen.drawn.items()})

    # What is true at all times.

    @invariant()
    def every_slot_is_where_the_model_says(self):
        if self.segment is None:
            return
        words = ffi.cast("uint64_t *", self.segment.port.areas - SLOT_BYTES * CAPACITY)
        for i, life in enumerate(self.slots):
            word = words[i * SLOT_BYTES // 8]
            if life is None or life.phase == FREE:
                assert word == (life.ticket >> 12 << 16 if life else 0), f"slot {i}: {word:x}, {life}"
            else:
                assert word == life.ticket >> 12 << 16 | life.client.place << 3 | life.phase, f"slot {i}: {word:x}, {life}"

    def teardown(self):
        try:
            if self.segment is not None:
                self._all_comes_back()
        finally:
            for actor in [client.actor for client in self.clients] + [self.owner] * (self.owner is not None):
                actor.kill()
            Segment.discard(self.name)

    def _all_comes_back(self):
        """When everybody is gone, an owner gets all of it back."""
        for client in self.clients:
            client.actor.kill()
            client.is_gone = True
        if self.owner is not None and self.owner_is_paused:
            self.resume_owner()
        if self.owner is None:
            self.next_owner()
        self.reap()
        assert self.owner("finish", [life.ticket for life in self.taken]) == len(self.taken)
        for life in self.taken:
            self._free(life)
        self.every_slot_is_where_the_model_says()
        assert self.segment.overview().in_use == 0
        assert lib.gw_next_participant(self.segment.port, 0) == 0


ACTIONS = [method for method in vars(Ring).values() if hasattr(method, "when")]


def test_the_ring_does_what_the_model_says():
    lenient = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(Ring, settings=settings(max_examples=EXAMPLES, stateful_step_count=80, deadline=None, suppress_health_check=lenient))

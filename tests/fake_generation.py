"""An owner that generates what it is told, one native call at a time, in the process of the test; and what tests of its clients share."""

import contextlib
import json
import threading
import time

import pytest

import gpuworker
from gpuworker._native import ffi, lib
from gpuworker.generating import FINISH, GenerationRequest, entry_bytes
from gpuworker.payload import decode, encode_error
from gpuworker.segment import Geometry, Segment, State
from gpuworker.segment.wire import KIND_SHIFT, META_MASK, META_SHIFT, SLOT_MASK, TOTAL_MASK
from tests.byte_tokenizer import END, byte_level

GEOMETRY = Geometry(capacity=8, max_request_bytes=4096, max_response_bytes=4096, max_participants=4)
VOCABULARY = 400
BYTES = byte_level()
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EMOJI = "\U0001f469\u200d\U0001f467 中文 \U0001f389"


class FakeOwner:
    """Serves `name`, as far as the test drives it."""

    def __init__(self, name, directory="/nowhere", geometry=GEOMETRY, on_full=lib.GW_REJECT, quota=None, **generation):
        self.segment = Segment.own(name, geometry)
        self.generation = {"directory": str(directory), "eos_ids": [0], "vocabulary": VOCABULARY, "max_model_tokens": 512} | generation
        self._open(self.segment)
        quota = quota or geometry.capacity
        lib.gw_set_policy(self.port, on_full, lib.GW_PARK, quota, quota, 0, 8)
        self.declare({"contract": {"generation": self.generation, "uses_lengths": False}})
        lib.gw_set_state(self.port, State.SERVING)

    def _open(self, segment):
        self._mapping, self.port = segment, segment.port
        assert lib.gw_open_backlog(self.port) == 0
        self._taken = ffi.new("uint64_t[]", 2 * segment.capacity)

    def declare(self, info):
        blob = json.dumps(info).encode()
        assert lib.gw_set_info(self.port, blob, len(blob)) == 0

    def succeed(self, max_attempts=3):
        """The owner has died, whatever it was at; another one goes on, with a mapping and a port of its own."""
        self._open(Segment.attach(self.segment.name))
        return lib.gw_recover(self.port, max_attempts, lib.GW_KIND_DIED)

    def admit(self, wait_s=0.0):
        """-> the requests that have come, taken."""
        count = lib.gw_collect(self.port, time.monotonic_ns() + int(wait_s * 1e9))
        n = lib.gw_admit(self.port, max(count, 0), self._taken)
        pairs = ffi.unpack(self._taken, 2 * n) if n else []
        lib.gw_begin_step(self.port, ffi.new("uint64_t[]", pairs[::2] or 1), n)  # from here on an owner's death is theirs
        return [Answer(self, ticket, described) for ticket, described in zip(pairs[::2], pairs[1::2], strict=True)]

    def admit_one(self, wait_s=0.0):
        (answer,) = self.admit(wait_s)
        return answer

    @property
    def in_use(self):
        """Slots."""
        return self.segment.overview().in_use

    def close(self):
        lib.gw_set_state(self.segment.port, State.STOPPED)
        self.segment.retire()
        self.segment.close()
        if self._mapping is not self.segment:
            self._mapping.close()


class Answer:
    """A request that was taken."""

    def __init__(self, owner, ticket, described):
        self.owner, self.port, self.ticket = owner, owner.port, ticket
        self.area = owner._mapping.responses[ticket & SLOT_MASK]
        request = owner._mapping.requests[ticket & SLOT_MASK]
        payload = decode(described >> KIND_SHIFT, described >> META_SHIFT & META_MASK, described & TOTAL_MASK, request, True)
        self.request = GenerationRequest.from_payload(payload)
        self.entry = self.request.entry
        self.written = lib.gw_stream_open(self.port, ticket, self.request.max_tokens, self.entry.itemsize)
        assert self.written >= 0

    @property
    def header(self):
        return ffi.cast("gw_stream *", ffi.from_buffer(self.area))

    @property
    def is_gone(self):
        """Nobody waits for it any more."""
        gone = ffi.new("int[1]")
        return lib.gw_stream_gone(self.port, [self.ticket], 1, gone) == 1

    def send(self, *tokens, logprob=None, top=None):
        """-> whether somebody waits for it still."""
        gone = ffi.new("int[1]")
        left = 0
        for token in tokens:
            entry = entry_bytes(self.entry, token, logprob, top)
            left += lib.gw_stream_append(self.port, [self.ticket], [self.written], entry, 1, len(entry), gone)
            self.written += 1
        return not left

    def write_uncounted(self, token):
        """As an owner that is killed after it has copied an entry, and before it has counted it."""
        at = lib.GW_LINE + self.written * self.entry.itemsize
        self.area[at : at + self.entry.itemsize] = entry_bytes(self.entry, token, 0.0, None)

    def end(self, finish="length", error=None, counts=None):
        blob = encode_error(error, lib.GW_STREAM_ERROR) if error is not None else b""
        counts = counts or (len(self.request.ids), self.written, 0)
        lib.gw_stream_end(self.port, self.ticket, FINISH.index(finish), counts, blob, len(blob))
        return self.finish()

    def respond(self, kind, data=b""):
        """Another answer than a stream."""
        assert lib.gw_respond(self.port, self.ticket, kind, b"", 0, data, len(data)) == 0
        return self.finish()

    def finish(self):
        """-> whether it had been abandoned."""
        return lib.gw_finish(self.port, ffi.new("uint64_t[2]", [self.ticket, 0]), 1) == 1


def serve(owner, tokens_of, until, order=None):
    """Generates for whoever asks, a token for each in turn, as `tokens_of(request)` says, until `until()`. order: called with the list of answers each time."""
    live = []
    while not until() or live:
        live += [(answer, iter(tokens_of(answer.request))) for answer in owner.admit(0.001 if not live else 0.0)]
        if order is not None:
            order(live)
        for one in list(live):
            answer, tokens = one
            token = next(tokens, None) if answer.written < answer.request.max_tokens else None
            is_last = token is None or token in stops_of(owner, answer.request)
            if token is not None and not answer.send(token):
                answer.finish()
                live.remove(one)
            elif is_last:
                answer.end("length" if token is None else "stop")
                live.remove(one)


def stops_of(owner, request):
    return {*request.stop_ids, *(() if request.ignore_eos else owner.generation["eos_ids"])}


@contextlib.contextmanager
def fake_owner(*arguments, **options):
    owner = FakeOwner(*arguments, **options)
    try:
        yield owner
    finally:
        owner.close()


@pytest.fixture(name="directory")
def directory_fixture(tmp_path):
    BYTES.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": None, "chat_template": TEMPLATE})
    )
    return tmp_path


@pytest.fixture(name="owner")
def owner_fixture(name, directory):
    with fake_owner(name, directory) as owner:
        yield owner


@pytest.fixture(name="client")
def client_fixture(owner):
    with gpuworker.connect(owner.segment.name) as client:
        yield client


def ids_of(text):
    return BYTES.encode(text).ids


@contextlib.contextmanager
def served(owner, tokens_of):
    """Within the block a thread generates `tokens_of(request)`."""
    over = threading.Event()
    thread = threading.Thread(target=serve, args=(owner, tokens_of, over.is_set))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60)


def echo(request):
    """The prompt, from its second token on, and then the end."""
    return [*request.ids[1:], END]

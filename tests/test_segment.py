"""Creating, owning, attaching, and every way that can be refused."""

import os

import pytest

import gpuworker
from gpuworker._native import lib
from gpuworker.segment import Geometry, Segment, State
from gpuworker.segment.names import BESIDE, shm_name, shm_path, temporary_name, worker_names
from gpuworker.segment.segment import identify
from gpuworker.worker.options import WorkerOptions

SMALL = Geometry(capacity=4, max_request_bytes=64, max_response_bytes=64, max_participants=4)


@pytest.fixture
def owned(name):
    segment = Segment.own(name, SMALL)
    lib.gw_set_policy(segment.port, lib.GW_REJECT, lib.GW_PARK, 4, 4, 0, 4)
    yield segment
    if segment.fd >= 0:
        segment.unlink()
        segment.close()


def test_the_default_segment_fits_dockers_64_megabytes():
    assert WorkerOptions().geometry.segment_bytes < 48 << 20


def test_a_segment_is_private_whatever_the_umask(name):
    before = os.umask(0)
    try:
        segment = Segment.own(name, SMALL)
    finally:
        os.umask(before)
    path = shm_path(shm_name(name))
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(path).st_blocks * 512 >= SMALL.segment_bytes, "memory is reserved, not only promised"
    segment.unlink()
    segment.close()
    assert not os.path.exists(path)


def test_a_live_owner_is_refused_with_its_pid(name, owned):
    with pytest.raises(gpuworker.WorkerAlreadyRunning, match=str(os.getpid())) as caught:
        Segment.own(name, SMALL)
    assert caught.value.pid == os.getpid()


def test_a_dead_owners_segment_is_taken_over_as_it_is(name, owned):
    client = Segment.attach(name)
    client.join()
    ticket = lib.gw_submit(client.port, 0, b"", 0, b"survives", 8, 0, 0)
    owned.close()  # what the kernel does at its death
    again = Segment.own(name, SMALL)
    lib.gw_recover(again.port, 2, lib.GW_KIND_DIED)
    assert again.is_current()
    assert client.is_current(), "the same file: attached frontends go on"
    assert lib.gw_phase(again.port, ticket) == lib.GW_READY
    again.unlink()
    again.close()


def test_half_made_segments_are_told_by_the_names_they_are_given(name):
    match = BESIDE.fullmatch(temporary_name(name)[1:])
    assert match
    assert match.groups() == (name, str(os.getpid()))


def test_another_geometry_supersedes_a_dead_owners_segment(name, owned):
    client = Segment.attach(name)
    owned.close()
    other = Segment.own(name, SMALL._replace(capacity=8))
    assert client.overview().state == State.SUPERSEDED
    assert not client.is_current()
    assert Segment.attach(name).capacity == 8
    other.unlink()
    other.close()


def test_frontends_that_only_attach_never_remove_it(name, owned):
    for _ in range(20):
        Segment.attach(name).close()
    assert name in worker_names()


def test_no_segment(name):
    with pytest.raises(gpuworker.WorkerNotFound):
        Segment.attach(name)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\0" * 20000, b"MAGIC" * 10000])
def test_a_foreign_file_is_refused_and_left_alone(name, content):
    path = shm_path(shm_name(name))
    with open(path, "wb", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
        file.write(content)
    try:
        for attempt in (lambda: Segment.attach(name), lambda: Segment.own(name, SMALL)):
            with pytest.raises(gpuworker.SegmentError, match="not a gpuworker segment"):
                attempt()
        assert os.path.getsize(path) == len(content)
    finally:
        os.unlink(path)


def test_a_truncated_segment_is_refused(name, owned):
    os.truncate(shm_path(shm_name(name)), SMALL.segment_bytes - 1)
    with pytest.raises(gpuworker.SegmentError, match="cut short"):
        Segment.attach(name)


def test_another_version_is_refused_by_name(name, owned):
    with open(shm_path(shm_name(name)), "r+b") as file:
        file.seek(8)
        file.write(b"\xff\0\0\0")
    with pytest.raises(gpuworker.SegmentError, match="another version"):
        Segment.attach(name)


def test_a_segment_that_others_could_read_is_refused(name, owned):
    os.chmod(shm_path(shm_name(name)), 0o644)
    with pytest.raises(gpuworker.SegmentError, match="0644"):
        Segment.attach(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_segment_is_refused(name, owned):
    os.chown(shm_path(shm_name(name)), 12345, -1)
    with pytest.raises(gpuworker.SegmentError, match="user id 12345"):
        Segment.attach(name)


def test_a_symlink_in_the_way_is_refused(name, tmp_path):
    path = shm_path(shm_name(name))
    os.symlink(tmp_path / "elsewhere", path)
    try:
        with pytest.raises(gpuworker.SegmentError):
            Segment.attach(name)
    finally:
        os.unlink(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_something_else_in_the_way_is_refused_at_once(name, make):
    path = shm_path(shm_name(name))
    make(path)
    try:
        for attempt in (lambda: Segment.attach(name), lambda: Segment.own(name, SMALL)):
            with pytest.raises(gpuworker.SegmentError, match="something else than a file"):
                attempt()
    finally:
        (os.rmdir if make is os.mkdir else os.unlink)(path)


def test_a_segment_that_does_not_fit_says_what_it_needs_and_what_there_is(name):
    with pytest.raises(gpuworker.SegmentError, match=r"bytes of shared memory needed, .* free in /dev/shm: shrink capacity"):
        Segment.own(name, SMALL._replace(max_request_bytes=1 << 34, capacity=4096))
    assert name not in worker_names()
    assert not [file for file in os.listdir("/dev/shm") if name in file]


@pytest.mark.parametrize("bad", ["", "a/b", "../x", "a b", "-x", "x" * 101, ".hidden", 7, None, "a.spill-1-1-q"])
def test_bad_names(bad):
    with pytest.raises(ValueError, match="worker name"):
        Segment.attach(bad)


def test_the_lock_says_what_the_pid_cannot(owned):
    assert lib.gw_is_locked(owned.fd, 0) == 1
    assert lib.gw_is_locked(owned.fd, 1) == 0
    assert owned.owner() == identify()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_batch_size": True}, "max_batch_size"),
        ({"capacity": 5000}, "capacity"),
        ({"max_wait_ms": -1}, "max_wait_ms"),
        ({"max_wait_ms": float("inf")}, "max_wait_ms"),
        ({"max_wait_ms": "5"}, "max_wait_ms"),
        ({"on_full": "fallback"}, "client's choice"),
        ({"on_full": "drop"}, "on_full"),
        ({"wake": "never"}, "wake"),
        ({"client_quota": 0}, "client_quota"),
        ({"max_request_bytes": 1}, "max_request_bytes"),
        ({"allow_pickle": "no"}, "allow_pickle"),
        ({"isolate_errors": 1}, "isolate_errors"),
        ({"drain_timeout_s": 1e300}, "drain_timeout_s"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        WorkerOptions.of(options)


def test_an_unknown_option_is_refused_with_the_nearest_right_one():
    with pytest.raises(TypeError, match="did you mean 'max_batch_size'"):
        WorkerOptions.of({"max_batchsize": 8})


def version_1(path):
    """The first lines of a segment as the first version made them, shorter than a header of today."""
    with open(path, "wb", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
        file.write((0x676B72777570676B).to_bytes(8, "little") + (1).to_bytes(4, "little") + bytes(4084))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (version_1, "another version of gpuworker; use the same version on both sides"),
        (lambda path: os.symlink("/dev/null", path), "a symbolic link bears its name; remove it"),
        (os.mkfifo, "something else than a file bears its name; remove it"),
        (os.mkdir, "something else than a file bears its name; remove it"),
    ],
)
def test_what_is_in_the_way_is_its_own_error_to_clients_and_to_workers(name, make, message):
    path = shm_path(shm_name(name))
    make(path)
    try:
        for attempt in (lambda: Segment.attach(name), gpuworker.Worker(lambda requests: requests, name=name, in_process=True).start):
            with pytest.raises(gpuworker.SegmentError, match=message):
                attempt()
    finally:
        (os.rmdir if make is os.mkdir else os.unlink)(path)


def test_a_segment_shorter_than_its_own_header_is_refused(name, owned):
    os.truncate(shm_path(shm_name(name)), 4096)
    for attempt in (lambda: Segment.attach(name), gpuworker.Worker(lambda requests: requests, name=name, in_process=True).start):
        with pytest.raises(gpuworker.SegmentError, match="cut short; stop its worker"):
            attempt()

"""A worker that a Unix group shares, between real users."""

import asyncio
import os
import signal
import socket

import numpy as np
import pytest

import gpuworker
from gpuworker.segment import Segment, names
from gpuworker.segment.liveness import Watch
from tests.conftest import eventually, shm_files
from tests.test_fork import in_child, succeeded

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")

GROUP, GID, OTHER_GID = "users", 100, 101
OWNER, MEMBER, STRANGER = 12001, 12002, 12003
OPTIONS = {"in_process": True, "capacity": 16, "max_request_bytes": 4096, "max_response_bytes": 4096, "group": GROUP}
BIG = bytes(range(256)) * 400


def become(uid, *gids):
    os.setgroups(gids)
    os.setgid(uid)
    os.setuid(uid)


def as_user(uid, gids, call):
    def body():
        become(uid, *gids)
        return call()

    return in_child(body)


@pytest.fixture
def worker(name):
    """A worker of user OWNER, in a child; -> (name, a call that ends it)."""
    ours, its = socket.socketpair()

    def serve():
        ours.close()
        with gpuworker.Worker(lambda requests: requests, name=name, **OPTIONS):
            its.send(b"!")
            its.recv(1)
        return True

    child = as_user(OWNER, [GID], serve)
    its.close()
    assert ours.recv(1) == b"!"
    yield name
    ours.close()
    assert succeeded([child])
    left = [file for file in shm_files() if name in file]
    for file in left:
        os.unlink(f"/dev/shm/{file}")
    assert left == [] or all(".spill-" in file for file in left)


def client(name, **options):
    return gpuworker.connect(name, **{"connect_timeout_s": 5, "group": GROUP, **options})


def test_the_segment_is_the_groups_and_nobody_elses(worker):
    status = os.stat(names.shm_path(names.shm_name(worker)))
    assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o660, OWNER, GID)


def test_a_member_of_the_group_is_served_small_and_large(worker):
    def call():
        with client(worker) as member:
            assert [member.submit(i) for i in range(50)] == list(range(50))
            for _ in range(5):
                assert member.submit(BIG) == BIG
            array = np.arange(50_000.0)
            assert (member.submit(array) == array).all()
        return True

    assert succeeded([as_user(MEMBER, [GID], call)])
    eventually(lambda: not any(os.stat(f"/dev/shm/{file}").st_size for file in shm_files() if worker in file and ".spill-" in file))


def test_who_may_not(worker):
    def refused(match, **options):
        with pytest.raises(gpuworker.SegmentError, match=match):
            client(worker, **options).submit(1)
        return True

    assert succeeded([as_user(MEMBER, [GID], lambda: refused("share the worker with a group", group=None))])
    assert succeeded([as_user(STRANGER, [], lambda: refused("another user, or to a group that this process is not in"))])
    path = names.shm_path(names.shm_name(worker))

    for change in (lambda: os.chmod(path, 0o666), lambda: os.chmod(path, 0o2660), lambda: os.chown(path, -1, OTHER_GID)):
        change()
        assert succeeded([as_user(MEMBER, [GID, OTHER_GID], lambda: refused("must be 0660|the group to trust is"))])
        os.chown(path, -1, GID)
        os.chmod(path, 0o660)


def test_a_killed_member_gives_its_slots_back_and_its_payloads_memory(worker):
    segment = Segment.attach(worker, gid=GID)

    def killed():
        member = client(worker)
        member.submit(1)
        with member.reserve(100_000, "u1") as array:
            array[:] = 1
            os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(as_user(MEMBER, [GID], killed), 0)
    eventually(lambda: segment.overview().in_use == 0 and segment.overview().alive == 0)
    eventually(lambda: not any(os.stat(f"/dev/shm/{file}").st_size for file in shm_files() if worker in file and ".spill-" in file))

    def sweeps():
        with client(worker) as member:
            assert member.submit(BIG) == BIG
        return True

    assert succeeded([as_user(MEMBER, [GID], sweeps)])
    assert not [file for file in shm_files() if worker in file and file.endswith("-q")], "the name went with the next client of that user"


def test_a_stopped_owner_of_another_user_is_not_dead(worker):
    segment = Segment.attach(worker, gid=GID)
    pid = segment.owner().pid
    os.kill(pid, signal.SIGSTOP)
    try:
        assert succeeded([as_user(MEMBER, [GID], lambda: not Segment.attach(worker, gid=GID).is_dead())])
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_process_that_proc_hides_is_not_taken_for_dead(worker, monkeypatch):
    """As with hidepid=2 on /proc: other users' processes have no entry there."""
    segment = Segment.attach(worker, gid=GID)
    owner = segment.owner()

    def hidden(pid=None):
        raise ProcessLookupError(pid)

    monkeypatch.setattr("gpuworker.segment.liveness.start_ticks", hidden)
    assert not Watch(owner, segment.fd, 0).is_dead()
    assert Watch(owner._replace(pid=4_000_000), segment.fd, 5).is_dead()


def test_without_membership_it_cannot_be_shared(name):
    def refused():
        with pytest.raises(gpuworker.SegmentError, match=f"group id {GID}: this process is not a member"):
            gpuworker.Worker(lambda requests: requests, name=name, **OPTIONS).start()
        return True

    assert succeeded([as_user(OWNER, [], refused)])
    assert not [file for file in shm_files() if name in file]


def test_another_group_makes_a_new_segment(name):
    geometry = gpuworker.WorkerOptions(capacity=4, group=GROUP).geometry
    Segment.own(name, geometry).close()
    plain = Segment.own(name, geometry._replace(gid=-1))
    assert os.fstat(plain.fd).st_mode & 0o777 == 0o600
    plain.unlink()
    plain.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"group": "no-such-group"}, "no Unix group"), ({"group": 100}, "no Unix group"), ({"group": GROUP, "allow_pickle": True}, "pickle")],
)
def test_options(options, message):
    with pytest.raises(ValueError, match=message):
        gpuworker.WorkerOptions.of(options)


def test_a_member_may_watch_it(worker):
    from gpuworker.frontends import health, page

    def watch():
        metrics = gpuworker.render_metrics([worker], GROUP).decode()
        assert f'gpuworker_up{{worker="{worker}"}} 1' in metrics, metrics
        assert page.snapshot([worker], GROUP)["workers"][0]["state"] == "serving"
        assert health.check(worker, 5, 30, GROUP)["status"] == "ok"
        without = gpuworker.render_metrics([worker]).decode()
        assert f'gpuworker_up{{worker="{worker}"}} 0' in without, "who does not name the group does not trust it"
        return True

    assert succeeded([as_user(MEMBER, [GID], watch)])


def test_an_event_loop_of_a_member_is_woken_by_the_other_users_owner(worker, monkeypatch):
    from gpuworker.client.async_watch import Watch

    async def calls():
        async with gpuworker.AsyncClient(worker, connect_timeout_s=5, group=GROUP) as member:
            assert await asyncio.wait_for(asyncio.gather(*(member.submit(i) for i in range(10))), 30) == list(range(10))
            (fifo,) = [file for file in shm_files() if f"{worker}.chime" in file]
            status = os.stat(f"/dev/shm/{fifo}")
            assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o660, MEMBER, GID)
        return True

    monkeypatch.setattr(Watch, "start_ticking", lambda self: None)  # or it would look by itself
    assert succeeded([as_user(MEMBER, [GID], lambda: asyncio.run(calls()))])


def test_a_member_of_the_group_sees_figures_and_a_stranger_does_not(worker):
    from gpuworker.frontends import metrics, page
    from gpuworker.frontends.wsgi import make_app

    def call():
        app = make_app(gpuworker.connect(worker, group=GROUP))
        (body,) = app({"REQUEST_METHOD": "GET", "PATH_INFO": "/metrics"}, lambda status, headers: None)
        (mounted,) = metrics.make_metrics_app([worker], GROUP)({"REQUEST_METHOD": "GET"}, lambda status, headers: None)
        states = [page.snapshot([worker], group)["workers"][0]["state"] for group in (GROUP, None, "no such group")]
        up = [f'gpuworker_up{{worker="{worker}"}} {n}\n'.encode() for n in (0, 1)]
        return up[1] in body and up[1] in mounted and up[0] in gpuworker.render_metrics([worker]) and states == ["serving", "unusable", "unusable"]

    def strangers():
        return f'gpuworker_up{{worker="{worker}"}} 0\n'.encode() in gpuworker.render_metrics([worker], GROUP)

    assert succeeded([as_user(MEMBER, [GID], call), as_user(STRANGER, [OTHER_GID], strangers)])

"""The looks that `gpuworker doctor` takes. Those named after a resource read it and judge it in a function of their own, which is pure."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gpuworker
from gpuworker import _native
from gpuworker.cli.doctor import Check
from gpuworker.cli.leftovers import leftovers
from gpuworker.cli.text import count, size, span
from gpuworker.segment import names
from gpuworker.worker import Worker, WorkerOptions

MIN_KERNEL, MIN_GLIBC = (5, 3), (2, 28)
DOCKER_SHM_BYTES = 64 << 20
TORCH_TIMEOUT_S = 60.0
SELF_TEST_REQUESTS = 200
PROBE_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps({"built_for": torch.version.cuda, "devices": [torch.cuda.get_device_name(i) for i in range(count)]}))
"""


def everything() -> list[Check]:
    """All checks; one that breaks is a failure of its own and hides none of the others."""
    found: list[Check] = []
    for look in (kernel, glibc, python, native, shared_memory, self_test, cores, quota, torch, leftovers):
        try:
            result = look()
            found += [result] if isinstance(result, Check) else result
        except Exception as error:
            found.append(Check(look.__name__.replace("_", "-"), "FAIL", f"{type(error).__name__}: {error}"))
    return found


def kernel() -> Check:
    """Version, and whether pidfds are allowed (a container's seccomp profile may forbid them)."""
    found = judge_version("kernel", "Linux", os.uname().release, MIN_KERNEL, "pidfd_open", "use a newer kernel")
    if found.level == "OK":
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            return Check("kernel", "FAIL", f"{found.found}: pidfd_open fails: {error.strerror}", "use a seccomp profile that allows it")
    return found


def glibc() -> Check:
    """The C library that this interpreter runs with."""
    library, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    if library != "glibc":
        return Check("C library", "FAIL", "not glibc", "use a base image that has it: Debian, Ubuntu or RHEL, not Alpine")
    return judge_version("C library", library, version, MIN_GLIBC, "a wheel of numpy", "use a newer base image")


def judge_version(what: str, name: str, version: str, least: tuple[int, int], needed_for: str, advice: str) -> Check:
    """Whether a version is new enough."""
    have = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    needs = f"{least[0]}.{least[1]}"
    if have >= least:
        return Check(what, "OK", f"{name} {version}")
    return Check(what, "FAIL", f"{name} {version}: {needed_for} needs {needs}", advice)


def python() -> Check:
    """The interpreter."""
    return Check("Python", "OK", f"{platform.python_implementation()} {platform.python_version()}, gpuworker {gpuworker.__version__}")


def native() -> Check:
    """The C part; it has loaded, or this program would not have started."""
    return Check("native part", "OK", f"{Path(_native.__file__).name} has loaded ({platform.machine()})")


def shared_memory() -> Check:
    """/dev/shm: size, room, how it is mounted."""
    try:
        disk = os.statvfs(names.SHM_DIR)
    except OSError as error:
        return Check(names.SHM_DIR, "FAIL", error.strerror or str(error), "mount a tmpfs there")
    kind, options = mount_of(names.SHM_DIR, Path("/proc/self/mounts").read_text())
    writable = os.access(names.SHM_DIR, os.W_OK | os.X_OK)
    return judge_shm(disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize, kind, options, writable, WorkerOptions().geometry.segment_bytes)


def mount_of(path: str, mounts: str) -> tuple[str, str]:
    """(file system type, options) of what is mounted at this very path, by /proc/self/mounts; ("", "") for nothing. The last mount counts."""
    found = ("", "")
    for line in mounts.splitlines():
        _, point, kind, options = line.split(" ")[:4]
        if point == path:
            found = (kind, options)
    return found


def judge_shm(size_bytes: int, free_bytes: int, kind: str, options: str, writable: bool, needed_bytes: int) -> Check:
    """Whether a worker of default size fits, and what may go wrong later."""
    found = f"{size(size_bytes)}, {size(free_bytes)} free, {kind or 'not a mount of its own'}{f' ({options})' if options else ''}"
    found += f"; a worker with default options takes {size(needed_bytes)}"
    if not writable or "ro" in options.split(","):
        return Check(names.SHM_DIR, "FAIL", found + "; it is not writable", "mount it writable; its mode should be 1777")
    if free_bytes < needed_bytes:
        return Check(
            names.SHM_DIR, "FAIL", found, "enlarge it (docker run --shm-size=1g), remove leftovers (doctor --clean), or use smaller capacity and max_*_bytes"
        )  # fmt: skip
    if kind != "tmpfs":
        return Check(names.SHM_DIR, "WARN", found, "not a tmpfs: requests may be written to a disk")
    if size_bytes <= DOCKER_SHM_BYTES:
        return Check(
            names.SHM_DIR, "WARN", found,
            "this is Docker's default size: one worker fits, a second one or large payloads may not; use docker run --shm-size=1g",
        )  # fmt: skip
    return Check(names.SHM_DIR, "OK", found)


def self_test() -> Check:
    """A small worker in this process answers some requests."""
    options = {"capacity": 8, "max_request_bytes": 4096, "max_response_bytes": 4096, "max_clients": 2, "wake": "park"}
    took_s = []
    with Worker(echo, name=f"doctor-{os.getpid()}", in_process=True, **options) as worker, worker.connect() as client:
        for _ in range(SELF_TEST_REQUESTS):
            started = time.perf_counter()
            client.submit(b"ping", timeout=10)
            took_s.append(time.perf_counter() - started)
    return Check("self-test", "OK", f"{SELF_TEST_REQUESTS} requests to a worker in this process took {span(statistics.median(took_s))} each (median)")


def echo(requests: list[bytes]) -> list[bytes]:
    """The handler of the self-test."""
    return requests


def cores() -> Check:
    """Cores, and how many of them this process may use."""
    return judge_cores(os.cpu_count() or 1, len(os.sched_getaffinity(0)))


def judge_cores(there: int, usable: int) -> Check:
    """One core for the owner and one for its clients is the least that makes sense."""
    found = f"{count(there, 'core')}, {usable} usable by this process"
    return Check("cores", "WARN", found, "owner and clients share a core: use wake='park'") if usable < 2 else Check("cores", "OK", found)


def quota() -> Check:
    """The CPU limit of the control group."""
    limits = list(cpu_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text()))
    return judge_quota(min(limits, default=None), len(os.sched_getaffinity(0)))


def cpu_limits(root: Path, own_groups: str) -> Iterator[float]:
    """The limits in cores, of this process's control group and all above it; own_groups: the text of /proc/self/cgroup."""
    for line in own_groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "cpu" if controllers else root
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):
                if controllers:
                    allowed, period = (folder / "cpu.cfs_quota_us").read_text(), (folder / "cpu.cfs_period_us").read_text()
                else:
                    allowed, period = (folder / "cpu.max").read_text().split()
                if float(allowed) > 0:
                    yield float(allowed) / float(period)
            if folder == base:
                break


def judge_quota(limit_cores: float | None, usable: int) -> Check:
    """A spinning process burns the quota of the others, and then all of them stand still until the next period."""
    if limit_cores is None:
        return Check("CPU quota", "OK", "none")
    found = f"{limit_cores:g} cores"
    if limit_cores < min(2, usable):
        return Check("CPU quota", "WARN", found, "less than owner and one client can use at once: use wake='park', or raise the limit")
    return Check("CPU quota", "OK", found)


def torch(probe: Callable[[], tuple[int, str, str]] | None = None) -> Check:
    """Whether torch is installed and sees a GPU; asked in another process, for torch takes seconds to import and never leaves again."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check("torch", "OK", "not installed; only handlers that import it need it")
    try:
        code, out, err = (probe or probe_torch)()
    except subprocess.TimeoutExpired:
        return Check("torch", "WARN", f"{version} did not say within {span(TORCH_TIMEOUT_S)} whether it sees a GPU", "is the GPU driver stuck?")
    return judge_torch(version, code, out, err, os.path.exists("/dev/nvidiactl"))


def probe_torch() -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of asking torch for its devices."""
    done = subprocess.run([sys.executable, "-c", PROBE_TORCH], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S)
    return done.returncode, done.stdout, done.stderr


def judge_torch(version: str, code: int, out: str, err: str, driver_there: bool) -> Check:
    """No GPU is fine (everything runs on the CPU), unless there is one that torch cannot use."""
    said = (err.strip().splitlines() or [""])[-1]
    if code:
        return Check("torch", "WARN", f"{version} cannot be used: {said or f'exit code {code}'}", "handlers that need it will fail to load")
    answer = json.loads(out.strip().splitlines()[-1])
    if answer["devices"]:
        return Check("torch", "OK", f"{version}, CUDA {answer['built_for']}: {', '.join(answer['devices'])}")
    if driver_there:
        why = said or ("it is built without CUDA" if answer["built_for"] is None else "torch says no more")
        return Check("torch", "WARN", f"{version} sees no GPU, though there is an NVIDIA driver: {why}", "install a torch that fits it (nvidia-smi)")
    return Check("torch", "OK", f"{version}, no GPU: handlers run on the CPU")

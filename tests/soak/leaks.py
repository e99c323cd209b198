"""What a worker's processes and files are at one moment, to compare with later."""

import os
import time

import psutil

RSS_SLACK_BYTES = 16 << 20


def shm_files(name):
    """Files in /dev/shm that belong to a worker."""
    return sorted(file for file in os.listdir("/dev/shm") if file == f"gpuworker-{name}" or file.startswith(f"gpuworker-{name}."))


def owners_of(supervisor_pid):
    """The owner processes under a supervisor, also the one that only waits for its turn."""
    try:
        return [child for child in psutil.Process(supervisor_pid).children() if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def zombies():
    """Dead processes under this one that nobody has waited for."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except psutil.NoSuchProcess:
            pass
    return found


def settled(value, is_good, within_s=15.0):
    """`value()`, once it is good or the time is over."""
    give_up_s = time.monotonic() + within_s
    while not is_good(found := value()) and time.monotonic() < give_up_s:
        time.sleep(0.02)
    return found


class Footprint:
    """Descriptors, threads and memory of owner and supervisor."""

    def __init__(self, worker):
        self.parts = {"owner": self._of(worker.pid), "supervisor": self._of(worker.supervisor_pid)}

    @staticmethod
    def _of(pid):
        process = psutil.Process(pid)
        return {"fds": process.num_fds(), "threads": process.num_threads(), "rss_bytes": process.memory_info().rss}

    def growth(self, before):
        """In words, what has grown since."""
        found = []
        for who, now in self.parts.items():
            then = before.parts[who]
            found += [f"{who}: {then[what]} {what}, now {now[what]}" for what in ("fds", "threads") if now[what] > then[what]]
            if now["rss_bytes"] > then["rss_bytes"] + RSS_SLACK_BYTES:
                found.append(f"{who}: {then['rss_bytes'] >> 20} MiB, now {now['rss_bytes'] >> 20} MiB")
        return found

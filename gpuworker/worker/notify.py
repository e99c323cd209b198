"""What systemd wants to know of a service (sd_notify(3)): datagrams to the socket that $NOTIFY_SOCKET names. Where there is none, nothing is sent."""

from __future__ import annotations

import contextlib
import os
import socket
import time

FEEDINGS = 3
"""Of the watchdog in its time, so that one that comes late is no death."""


class Notifier:
    """Made once, by the process that systemd has started: it takes the variables out of the environment, as they are not for the processes started from here.

    watchdog_s: how long systemd waits for a sign of life (WatchdogSec=); None: for ever.
    """

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        microseconds, pid = os.environ.pop("WATCHDOG_USEC", ""), os.environ.pop("WATCHDOG_PID", "")
        is_ours = bool(self._address) and microseconds.isdecimal() and int(microseconds) > 0 and pid in ("", str(os.getpid()))
        self.watchdog_s = int(microseconds) / 1e6 if is_ours else None
        self._status = ""
        self._fed_s = -1e9

    @property
    def longest_wait_s(self) -> float:
        """How long its user may go without calling `feed`."""
        return self.watchdog_s / (2 * FEEDINGS) if self.watchdog_s is not None else float("inf")

    def ready(self) -> None:
        """The service does what it is there for (READY=1)."""
        self._send("READY=1")

    def stopping(self) -> None:
        """It has begun to stop (STOPPING=1)."""
        self._send("STOPPING=1")

    def status(self, words: str) -> None:
        """One line for `systemctl status`; sent when it is another than before."""
        if words != self._status:
            self._status = words
            self._send(f"STATUS={words}")

    def feed(self, heartbeat_age_s: float) -> None:
        """A sign of life (WATCHDOG=1), unless the last heartbeat of the process that does the work is older than half the watchdog's time."""
        if self.watchdog_s is None or heartbeat_age_s > self.watchdog_s / 2:
            return
        now_s = time.monotonic()
        if now_s - self._fed_s >= self.watchdog_s / FEEDINGS:
            self._fed_s = now_s
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address  # "@": of the abstract namespace
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            sender.sendto(message.encode(), address)

"""Who may call: bearer tokens from a file, one a line. Empty lines and those that begin with # say nothing."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat

MOST_BYTES = 1 << 20
log = logging.getLogger("gpuworker.http")


class ApiKeys:
    """The keys in a file, which is read again when it changes. One that cannot be read any more lets nobody in.

    Raises OSError or ValueError for a file that has none to begin with.
    """

    def __init__(self, file: str) -> None:
        self._file = os.path.abspath(file)
        self._version: tuple[int, int, int] | None = None
        self._digests: list[bytes] = []
        self._version, self._digests = _version(self._file), _read(self._file)

    def admits(self, authorization: bytes | None) -> bool:
        """Whether a request with this Authorization header may pass. What is compared are digests, all of them, so the time tells nothing of the keys."""
        self._refresh()
        scheme, _, token = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found and scheme.lower() == b"bearer"

    def _refresh(self) -> None:
        try:
            version = _version(self._file)
            if version != self._version:
                self._digests = _read(self._file)
                self._version = version
        except (OSError, ValueError) as error:
            if self._digests:
                log.error("nobody is let in any more: %s", error)
            self._version, self._digests = None, []


def _version(file: str) -> tuple[int, int, int]:
    status = os.stat(file)
    return status.st_ino, status.st_mtime_ns, status.st_size


def _read(file: str) -> list[bytes]:
    """Only of a regular file, and not of a pipe: whoever opens that waits, and everybody else with him."""
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            raise ValueError(f"{file}: it is not a regular file of at most {MOST_BYTES >> 20} MiB")
        if found.st_mode & stat.S_IROTH:
            log.warning("%s: every user of this machine can read these keys; chmod o= it", file)
        lines = [line.strip() for line in opened.read().removeprefix(b"\xef\xbb\xbf").splitlines()]
    keys = [line for line in lines if line and not line.startswith(b"#")]
    if not keys:
        raise ValueError(f"{file}: there is no key in it; write one a line")
    return [hashlib.sha256(key).digest() for key in keys]

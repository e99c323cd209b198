"""The kind of lock that clients use."""

from __future__ import annotations

import sys
import threading

_monkey = sys.modules.get("gevent.monkey")
Lock = _monkey.get_original("_thread", "allocate_lock") if _monkey else threading.Lock
"""The interpreter's own, also where gevent has put its own in its place, which loses wake-ups between the threads of gevent's pool. It must not be held
across anything that gevent switches greenlets in."""

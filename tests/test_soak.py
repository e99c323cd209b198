"""A short soak: everything at random, for a few seconds."""

import subprocess
import sys


def test_nothing_is_wrong_lost_or_leaked_in_eight_seconds_of_faults():
    soak = subprocess.run([sys.executable, "-m", "tests.soak", "--seconds", "8"], capture_output=True, text=True, timeout=110, check=False)
    assert soak.returncode == 0, soak.stdout + soak.stderr
    for zero in ("wrong", "lost", "leaked", "needless errors", "processes that ended oddly"):
        assert [line.split()[-1] for line in soak.stdout.splitlines() if line.startswith(f"{zero} ")] == ["0"]
    assert "owners killed" in soak.stdout
    assert "frontends killed" in soak.stdout

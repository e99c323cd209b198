"""`python -m tests.soak --seconds 600 [--seed N] [--frontends 8]`: exit status 0 when nothing was wrong, lost or leaked."""

import argparse
import os
import platform
import random
import sys
import time

import psutil

import gpuworker
from tests.soak.driver import Driver


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--frontends", type=int, default=8)
    options = parser.parse_args()
    os.environ.setdefault("GPUWORKER_LOG", "CRITICAL")  # batches that raise are part of the plan
    print(f"gpuworker {gpuworker.__version__} soak: {options.seconds:g} s, seed {options.seed}, {options.frontends} frontends")
    print(
        f"{os.cpu_count()} cores, {psutil.virtual_memory().total >> 30} GiB, load {os.getloadavg()[0]:.1f}, {platform.machine()}, "
        f"Linux {platform.release()}, Python {platform.python_version()}; {time.strftime('%Y-%m-%d %H:%M:%S')}",
        flush=True,
    )
    return Driver(options.frontends, options.seed).run(options.seconds)


if __name__ == "__main__":
    sys.exit(main())

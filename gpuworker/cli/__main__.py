"""`python -m gpuworker.cli` is `gpuworker`."""

import sys

from gpuworker.cli import main

sys.exit(main())

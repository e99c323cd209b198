import sys

try:
    from .demo import main
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}. The demo needs its packages: make demo-llm installs them")

sys.exit(main())

import sys

try:
    from .demo import main
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}. The demo needs its packages: pip install -e '.[demo]'")

sys.exit(main())

"""``python -m speccascade`` is the same as ``speccascade``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())

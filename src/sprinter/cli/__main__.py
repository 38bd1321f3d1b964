"""Entry point of ``python -m sprinter.cli``, the same as ``sprinter``."""

from __future__ import annotations

import sys

from sprinter.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""Entry point of ``python -m sprinter.cli.demo``, the same as ``sprinter demo``."""

from __future__ import annotations

import sys

from sprinter.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))

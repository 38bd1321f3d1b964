"""``python -m sprinter.cli.demo`` is ``sprinter demo``. No module imports this one, as it starts the command line."""

from __future__ import annotations

import sys

from sprinter.cli import main

if __name__ == "__main__":
    sys.exit(main(["demo", *sys.argv[1:]]))

"""Print one line if this interpreter cannot run the project. Works on any version of Python."""

import sys

NEEDED = (3, 11)


def complaint():
    """What is wrong with this interpreter, in one line; None if nothing is."""
    if sys.version_info < NEEDED:
        return "sprinter needs Python %d.%d or newer; this is %d.%d (%s). Try: make PYTHON=python3.12 ..." % (
            NEEDED + tuple(sys.version_info[:2]) + (sys.executable,)
        )
    for module in ("venv", "ensurepip"):
        try:
            __import__(module)
        except ImportError:
            return (
                "%s cannot make virtual environments, its module '%s' is missing. On Debian: apt install python3-venv"
                % (sys.executable, module)
            )
    return None


if __name__ == "__main__":
    sys.exit(complaint())

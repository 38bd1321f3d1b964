"""``python -m sprinter.doors.vllm DRAFT``: the arguments of ``vllm serve`` that open the door, on one line."""

from __future__ import annotations

import argparse
import json
import sys

from sprinter.doors.vllm import engine_args


def serve_flags(args: dict[str, object]) -> list[str]:
    """Arguments of the engine as flags, whose values hold no blanks."""
    words = []
    for name, value in args.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [
                f"--{flag}",
                value if isinstance(value, str) else json.dumps(value, separators=(",", ":")),
            ]
    return words


def main() -> None:
    """Print them."""
    parser = argparse.ArgumentParser(prog="python -m sprinter.doors.vllm", description=engine_args.__doc__)
    parser.add_argument("draft", nargs="?")
    parser.add_argument("--gate")
    parser.add_argument("--method", default="speculative")
    parser.add_argument("--longest", type=int, default=20)
    parser.add_argument("--runner", type=int, default=1)
    sys.stdout.write(" ".join(serve_flags(engine_args(**vars(parser.parse_args())))) + "\n")


if __name__ == "__main__":
    main()

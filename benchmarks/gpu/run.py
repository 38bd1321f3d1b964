"""One command for an NVIDIA GPU: train a mid-size pair, run the arms on it, hold passes against the roofline.

    python benchmarks/gpu/run.py --text FILE... --out DIR [--minutes 9] [--stages train,arms,real,latency,roofline]
                                 [--pair TARGET [DRAFT]] [--gate DIR] [--heads DIR] [--preset large|stories]

train     a 344 M target, a 30 M draft distilled from it and a gate, on the given text (.txt or .jsonl, plain or gzip);
          they stay in DIR, so that later calls may leave this stage out; --preset stories: 15 M and 1 M, for write.py's
arms      our methods and transformers' own on held-out text, temperatures 1 and 0, meter complete
real      a real pair (--pair; else the built-in one): laws of captured passes against float32, then arms, and rows
latency   random weights of GPT-2 and Llama sizes, acceptance and trust set to given rates
roofline  share of the copy's bandwidth that passes and steps reach

The time is a hard limit: what comes late asks fewer prompts or is left out. gpu.json and gpu.md are written after every
stage, page.md (for docs/results) at the end; the last line on stdout is the JSON. With --device cpu --smoke sizes are
tiny and text is made up, for tests.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()  # before the slow imports: they count

import argparse
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from transformers.utils import logging

from benchmarks.common import ROOT, command
from benchmarks.gpu.stage import PRESETS, SHARES, TINY, Clock, Run, TimeUp, first_line
from benchmarks.gpu.tables import markdown, page
from benchmarks.smoke import SMOKE, made_up_text, scratch
from sprinter.bench.environment import environment
from sprinter.errors import UserError
from sprinter.files import write_atomic


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[], metavar="FILE", help=".txt or .jsonl, also .gz"
    )
    parser.add_argument(
        "--pair",
        nargs="+",
        default=[],
        metavar="MODEL",
        help="target and draft of the stage real: folders or GGUF files",
    )
    parser.add_argument("--gate", help="of that pair's draft")
    parser.add_argument("--heads", help="on that pair's target")
    parser.add_argument("--out", type=Path, help="folder for the pair and the rows (some GB)")
    parser.add_argument("--results", type=Path, help="folder for gpu.json and gpu.md; --out if left out")
    parser.add_argument("--minutes", type=float, default=9.0, help="hard limit of the whole command")
    parser.add_argument("--stages", default=",".join(SHARES), help="with commas")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--preset", choices=PRESETS, default="large", help="sizes of what is trained")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    parser.add_argument("--commit", help="to record, where there is no git")
    args = parser.parse_args(argv)
    if args.out is None and not SMOKE:
        parser.error("the following arguments are required: --out")
    args.out = args.out or scratch("gpu")
    return args


def check(args: argparse.Namespace) -> list[str]:
    """The stages in order, after everything that the user could have got wrong was looked at."""
    if args.device == "cpu" and not args.smoke:
        raise UserError("--device cpu takes hours at full size: add --smoke")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("there is no NVIDIA GPU here that torch can use: run this where there is one")
    wanted = [name.strip() for name in args.stages.split(",")]
    if unknown := [name for name in wanted if name not in SHARES]:
        raise UserError(f"there is no stage '{unknown[0]}': choose from {', '.join(SHARES)}")
    reading = [name for name in wanted if name in ("train", "real")]
    if reading and SMOKE and not args.text:
        args.text = [made_up_text(scratch("text") / "text.txt")]
    if reading and not args.text:
        raise UserError(f"the stage {reading[0]} needs text: give --text FILE..., or --stages without it")
    if len(args.pair) > 2:
        raise UserError(f"--pair takes a target and a draft, and {len(args.pair)} models were given")
    if missing := [file for file in args.text if not file.is_file()]:
        raise UserError(f"there is no file '{missing[0]}': check --text")
    if args.minutes <= 0:
        raise UserError(f"--minutes {args.minutes:g} is no time: give a positive number")
    return [name for name in SHARES if name in wanted]


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """Where the numbers are made."""
    told = environment(ROOT)
    if args.commit:
        told["commit"] = args.commit
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        told["gpu_memory_bytes"], told["multiprocessors"] = card.total_memory, card.multi_processor_count
    if shutil.which("nvidia-smi"):
        fields = "driver_version,power.limit,clocks.max.sm,clocks.max.memory"
        line = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"],
            capture_output=True, text=True, check=False, timeout=20,
        )  # fmt: skip
        told["nvidia_smi"] = dict(zip(fields.split(","), line.stdout.strip().split(", "), strict=False))
    return told


def run_stage(run: Run, name: str, files: list[Path], pair: list[str]) -> None:
    """One stage; its module is imported here, so that a mistake is reported before the slow imports."""
    deadline = run.clock.deadline(name)
    run.say(f"stage {name}, until {deadline - run.clock.began:.0f} s")
    if name == "train":
        from benchmarks.gpu import train

        train.run_stage(run, files, deadline)
    elif name == "arms":
        from benchmarks.gpu import arms

        arms.run_stage(run, deadline)
    elif name == "real":
        from benchmarks.gpu import real

        real.run_stage(run, pair, files, deadline)
    elif name == "latency":
        from benchmarks.gpu import latency

        latency.run_stage(run, deadline)
    else:
        from benchmarks.gpu import roofline

        roofline.run_stage(run, deadline)


def run_all(run: Run, stages: list[str], files: list[Path], pair: list[str]) -> list[str]:
    """All stages; one that fails is reported and the next begins. Returns the names of those that failed."""
    failed: list[str] = []
    for name in stages:
        began = time.monotonic()
        try:
            run_stage(run, name, files, pair)
        except Exception as error:  # a lent device is dear: the other stages are still worth having
            first = name == stages[0]
            if (run.smoke and not isinstance(error, TimeUp)) or (first and isinstance(error, UserError)):
                raise
            why = "out of time" if isinstance(error, TimeUp) else first_line(error)
            failed.append(name)
            run.say(f"stage {name} failed: {why}")
            run.keep(name, error=why)
        else:
            run.keep(name, stage_seconds=round(time.monotonic() - began, 1))
    return failed


def interrupted(*_: object) -> None:
    """SIGTERM ends the run like Ctrl-C: what is finished is on the disk."""
    raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    """Exit status: 0 done, 2 the user's mistake, 1 a stage failed, 130 interrupted."""
    args = parse(argv)
    before = signal.signal(signal.SIGTERM, interrupted)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        stages = check(args)
        results = args.results or args.out
        for folder in (args.out, results):
            folder.mkdir(parents=True, exist_ok=True)
        clock = Clock(BEGAN, 60 * args.minutes, stages)
        device, sizes = torch.device(args.device), TINY if args.smoke else PRESETS[args.preset]
        compiles = args.device == "cuda" and not args.no_compile
        run = Run(args.out, results, device, sizes, args.smoke, compiles, clock, markdown)
        run.more = {"gate": args.gate} if args.gate else {}
        run.more |= {"heads": [args.heads]} if args.heads else {}
        head = {"benchmark": "gpu", "command": command(["benchmarks/gpu/run.py", *argv])}
        head |= {"smoke": True} if args.smoke else {}
        run.told = {**head, "environment": machine(args), "stages": {}}
        failed = run_all(run, stages, args.text, args.pair)
        write_atomic(results / "page.md", page(run.told) + "\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was finished is in gpu.json", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    print(markdown(run.told), file=sys.stderr)
    print(json.dumps(run.told))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

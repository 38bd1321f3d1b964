"""Drafters for a real target trained on a GPU: texts in waves, then several trainings at the same time.

    python benchmarks/gpu/drafts.py --target TARGET --prompts prompts.jsonl --out OUT [--minutes 8]

The prompts are those of ``benchmarks/real/gate_prompts.py`` and more that the target asks itself: given its chat
template up to a user's words it writes some (Xu et al. 2024, arXiv 2406.08464). All trainings read the same texts.
What comes out, a folder for each drafter without texts and checkpoints, is what ``benchmarks/real/drafts.py`` measures
on a CPU; a draft model leaves out its embeddings, which are the target's (``--join`` puts them back).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from safetensors.torch import load_file, save_file

import sprinter
from benchmarks.common import command, environment, grid
from benchmarks.real.gate_prompts import records
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.engine.pair import Pair
from sprinter.files import write_atomic
from sprinter.training.drafts.data import TextsProgress, write_texts
from sprinter.training.drafts.settings import TextSettings
from sprinter.training.drafts.waves import WaveWriter

NAME = "gpu/drafts"
EMBEDDING = "model.embed_tokens.weight"
WORDS = sized(8192, 512)
"""Tokens that a draft can write, where its target has more."""
RECIPES: dict[str, tuple[str, ...]] = {
    "eagle3": ("train", "--kind", "eagle3", "--heads", "6", "--no-keep-states"),
    "eagle": ("train", "--kind", "eagle", "--heads", "3", "--no-keep-states"),
    "peagle": ("train", "--kind", "peagle", "--heads", "6", "--blocks", sized("4", "2"), "--no-keep-states"),
    "dflash": (
        "train",
        "--kind",
        "dflash",
        "--heads",
        "6",
        "--no-keep-states",
        "--tokens",
        sized("4096", "256"),
    ),
    "glide": ("train", "--kind", "glide", "--no-keep-states"),
    "medusa": ("train", "--kind", "medusa", "--share-output", "--no-keep-states"),
    "draft": ("distill", "--layers", "2", "--freeze-embeddings"),
    "pard": ("distill", "--layers", "2", "--freeze-embeddings", "--parallel", "6"),
}
"""Drafter -> command of ``sprinter draft`` and its options, which replace common ones."""
WITH_WORDS = ("eagle3", "peagle", "draft", "pard")
"""Drafters whose vocabulary is cut."""
KEPT = (
    "model.safetensors", "medusa_lm_head.safetensors", "config.json", "generation_config.json", "draft.json",
    "README.md", "losses.png",
)  # fmt: skip


class Enough(Exception):
    """The time for texts is over."""


def asked_prompts(pair: Pair, count: int, seed: int = 0) -> list[str]:
    """Different user's words that the target writes behind its own chat template, each of 10 to 900 characters."""
    speaker = pair.tokenizer
    assert speaker is not None
    shown = str(speaker.apply_chat_template([{"role": "user", "content": "SPLIT"}], tokenize=False))
    start = speaker.encode(shown.partition("SPLIT")[0], add_special_tokens=False)
    rows = min(count, sized(2048, 8))
    waves = WaveWriter(
        pair.models.target, pair.models.vocab_size, rows=rows, prompt_tokens=len(start),
        new_tokens=sized(160, 8), temperature=1.0, top=1,
    )  # fmt: skip
    found: dict[str, None] = {}
    for wave in range(-(-count // rows)):
        for answer in waves.write([start] * rows, range(seed + wave * rows, seed + (wave + 1) * rows)):
            ended = int(answer.ids[-1]) in pair.models.target.eos_ids
            text = str(speaker.decode(answer.ids[:-1].tolist(), skip_special_tokens=True)).strip()
            if ended and 10 <= len(text) <= 900:
                found[text] = None
    return [*found]


def write_all(pair: Pair, prompts: Path, folder: Path, settings: TextSettings, seconds: float) -> int:
    """Texts until the time is over; returns the number of prompts that were answered."""
    began, done = time.perf_counter(), 0

    def note(progress: TextsProgress) -> None:
        nonlocal done
        written = len(
            [*folder.glob("texts-*.safetensors")]
        )  # several at a time, before the first is reported
        done = min(progress.wanted, settings.shard * written)
        say(f"texts {progress.done}/{progress.wanted}, {progress.tokens / progress.seconds:,.0f} tokens/s")
        if time.perf_counter() - began > seconds:
            raise Enough

    with suppress(Enough):
        write_texts(pair, [prompts], folder, settings, note)
    return done


def train_all(
    kinds: Sequence[str], texts: Path, out: Path, common: Sequence[str], words_of: Sequence[str], minutes: float,
    at_once: int,
) -> dict[str, Any]:  # fmt: skip
    """All trainings, each a process, some at the same time; returns exit status and seconds of each."""
    told: dict[str, Any] = {}
    for at in range(0, len(kinds), at_once):
        running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        try:
            for kind in kinds[at : at + at_once]:
                folder = out / kind
                folder.mkdir(parents=True, exist_ok=True)
                if not (folder / "texts").exists():
                    shutil.copytree(texts, folder / "texts", copy_function=os.link)
                command, *own = RECIPES[kind]
                words = [
                    sys.executable,
                    "-m",
                    "sprinter",
                    "draft",
                    command,
                    "--out",
                    str(folder),
                    *common,
                    *own,
                ]
                words += words_of if kind in WITH_WORDS else ()
                words += ["--minutes", f"{minutes:g}"]
                say(shlex.join(words[2:]))
                with (out / f"{kind}.log").open("w") as log:
                    running[kind] = (subprocess.Popen(words, stdout=log, stderr=log), time.perf_counter())
            for kind, (process, began) in running.items():
                told[kind] = {"status": process.wait(), "seconds": round(time.perf_counter() - began, 1)}
                if process.returncode:
                    say(f"{kind} failed: {(out / f'{kind}.log').read_text()[-2000:]}")
        finally:  # trainings that outlive this one would slow whatever comes next
            for process, _ in running.values():
                process.terminate()
    return told


def table(results: dict[str, Any]) -> str:
    """What was made, in Markdown."""
    marks, prompts = results["marks"], results["prompts"]
    rows = []
    for kind, facts in results["drafters"].items():
        if facts is None:
            rows.append(f"{kind} | failed" + " | –" * 7)
            continue
        own, made, last = facts["training"], facts["texts"], facts["training"]["history"][-1]
        calls = facts["tasks"]["all"]
        rows.append(
            f"{kind} | {made['train_tokens']:,} | {own['steps']:,} | {own['tokens']:,} | "
            f"{own['seconds']:.0f} | {1 - last['train']['tv']:.3f} | {1 - last['held_out']['tv']:.3f} | "
            f"{calls.get('chain_tokens_per_call', calls.get('tokens_per_call', 0)):.2f} | "
            + (f"{calls['tree_tokens_per_call']:.2f}" if "tree_tokens_per_call" in calls else "–")
        )
    head = "drafter | tokens of texts | steps | positions | seconds | β in training | β held out"
    head += " | tokens a call, chain | tree"
    return "\n".join(
        [
            f"{prompts['given']:,} prompts given, {prompts['asked']:,} that the target asked itself in "
            f"{marks['asked'] - marks['loaded']:.0f} s; {prompts['answered']:,} answered in "
            f"{marks['written'] - marks['asked']:.0f} s. β at temperature 1 on the 64 most probable tokens.",
            *([results["remark"]] if "remark" in results else []),
            "",
            *grid(head, rows),
        ]
    )


def packed(folder: Path, out: Path) -> None:
    """Copy what a drafter consists of, without the embeddings of a draft model."""
    out.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        if (folder / name).is_file():
            shutil.copy(folder / name, out / name)
    weights = out / "model.safetensors"
    if weights.is_file() and EMBEDDING in (held := load_file(weights)):
        save_file(
            {name: value for name, value in held.items() if name != EMBEDDING}, weights, {"format": "pt"}
        )


def join(folder: Path, target: str) -> None:
    """Put the target's embeddings and tokenizer into a draft that came without."""
    pair = sprinter.load_pair(target, device="cpu", dtype="float32", runner="torch")
    weights = load_file(folder / "model.safetensors")
    model = pair.models.target.module(NAME)
    table = model.get_input_embeddings().weight.detach().bfloat16().clone()  # type: ignore[no-untyped-call]
    save_file({**weights, EMBEDDING: table}, folder / "model.safetensors", {"format": "pt"})
    assert pair.tokenizer is not None
    pair.tokenizer.save_pretrained(folder)


def say(line: str) -> None:
    """Progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Ask, write, train, pack."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, help="folder of texts and trainings; default: in --out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=RECIPES,
        default=sized(["eagle3", "peagle", "dflash", "draft", "pard"], ["peagle", "dflash", "pard"]),
    )
    parser.add_argument(
        "--ask", type=int, default=sized(24_000, 8), help="prompts that the target asks itself"
    )
    parser.add_argument("--text-seconds", type=float, default=100.0)
    parser.add_argument("--minutes", type=float, default=sized(3.0, 0.02), help="of training")
    parser.add_argument("--at-once", type=int, default=2, help="trainings at the same time")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, default=sized(16_384, 256), help="of a training step")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the built-in target and a CPU")
    parser.add_argument("--join", type=Path, help="only complete the draft in this folder")
    chosen = parser.parse_args()
    if chosen.join:
        join(chosen.join, chosen.target)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    chosen.out = chosen.out or scratch("drafts")
    began = time.perf_counter()
    marks: dict[str, float] = {}
    work = chosen.work or chosen.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    device = "cpu" if SMOKE else chosen.device
    dtype = "float32" if device == "cpu" else "bfloat16"
    source = chosen.target or str(sprinter.models.pair.builtin_paths()["target"])
    pair = sprinter.load_pair(source, device=device, dtype=dtype, **({} if SMOKE else {"runner": "torch"}))
    marks["loaded"] = time.perf_counter() - began
    given = (
        [] if chosen.prompts is None else [one["messages"][0]["content"] for one in records(chosen.prompts)]
    )
    has_chat = pair.tokenizer is not None and bool(pair.tokenizer.chat_template)
    asked = asked_prompts(pair, chosen.ask) if has_chat else []
    if not given and not asked:
        asked = [f"What is {i} plus {i}?" for i in range(12)]
    marks["asked"] = time.perf_counter() - began
    say(f"{len(given)} prompts given, {len(asked)} asked, {marks['asked']:.0f} s")
    order = torch.randperm(len(given) + len(asked), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [
        *({"kind": "given", "prompt": text} for text in given),
        *({"kind": "asked", "prompt": text} for text in asked),
    ]
    prompts = work / "prompts.jsonl"
    write_atomic(prompts, "".join(json.dumps(rows[i]) + "\n" for i in order))
    lengths = sized({"new_tokens": 256, "prompt_tokens": 320}, {"new_tokens": 12, "prompt_tokens": 40})
    settings = TextSettings(temperature=chosen.temperature, chat=has_chat, held_out=0.02, **lengths)
    done = write_all(pair, prompts, work / "texts", settings, chosen.text_seconds)
    marks["written"] = time.perf_counter() - began
    say(f"{done} prompts answered, {marks['written']:.0f} s")
    vocabulary = pair.models.vocab_size
    del pair
    if device == "cuda":
        torch.cuda.empty_cache()
    common = [
        "--target", source, "--device", device, "--dtype", dtype, "--data", str(prompts), "--limit", str(done),
        "-t", f"{chosen.temperature:g}", "--loss-temperature", "1", "--held-out", "0.02",
        "--tokens", str(chosen.tokens),
        "--max-new-tokens", str(settings.new_tokens), "--prompt-tokens", str(settings.prompt_tokens),
        "--precision", dtype, "--epochs", sized("6", "1"),
        "--checkpoint", sized("200", "5"),
    ]  # fmt: skip
    common += (["--chat"] if has_chat else []) + ([] if SMOKE else ["--runner", "torch"])
    cut = ("--vocabulary", str(WORDS)) if vocabulary > WORDS else ()
    trained = train_all(chosen.kinds, work / "texts", work, common, cut, chosen.minutes, chosen.at_once)
    marks["trained"] = time.perf_counter() - began
    facts: dict[str, Any] = {}
    for kind in chosen.kinds:
        packed(work / kind, chosen.out / kind)
        told = chosen.out / kind / "draft.json"
        facts[kind] = json.loads(told.read_text(encoding="utf-8")) if told.is_file() else None
    results = {
        "benchmark": NAME, "command": command(), **({"smoke": True} if SMOKE else {}), "environment": environment(),
        "seconds": round(time.perf_counter() - began, 1),
        "marks": {name: round(value, 1) for name, value in marks.items()},
        "prompts": {"given": len(given), "asked": len(asked), "answered": done},
        "trainings": trained, "drafters": facts,
    }  # fmt: skip
    write_atomic(chosen.out / "drafts.json", json.dumps(results, indent=1) + "\n")
    write_atomic(chosen.out / "drafts.md", table(results) + "\n")
    say(table(results))
    print(json.dumps(results))
    sys.exit(any(one["status"] for one in trained.values()))


if __name__ == "__main__":
    main()

"""Texts for a small pair, written by an instruct model on a GPU: stories, plain facts, answers to simple questions.

    python benchmarks/gpu/write.py --target MODEL --out OUT [--minutes 8] [--rows 2048] [--temperature 0.8]

All rows take each step of a captured pass together. A row that has ended begins the next prompt, whose tokens it reads
one a step in place of drawn ones; what all prompts begin with is in the caches from the start. OUT gets
texts-*.jsonl.gz (``text``, ``kind``), samples.txt, and write.json with what was dropped and why. The laws are the
model's behind temperature and min-p; no text is the one that its seed gives elsewhere.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from transformers import PreTrainedTokenizerBase

import sprinter
from benchmarks.common import command, environment
from benchmarks.gpu.asks import Ask, asks
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.errors import UserError
from sprinter.files import write_atomic
from sprinter.models.capture.trace import RowPass
from sprinter.models.fused_trial import fused
from sprinter.models.pair import LoadedModel

NAME = "gpu/write"
EVERY = sized(8, 2)
"""Steps between looks at which rows have ended."""
AHEAD = sized(16_384, 16)
"""Prompts that are encoded at once."""
SHARDS, SHOWN, ENOUGH = sized(4, 1), 24, sized(1 << 30, 6)  # files, texts
SHORTEST, LONGEST = sized(40, 1), 2000  # characters
TALK = re.compile(
    r"(?i)\b(as an ai|language model|sure[,!]|certainly!|here is|here's|this story|the moral|encyclop\w*|"
    r"(first|next|last) sentence)\b"
)
PLAIN = re.compile(r"[\x20-\x7e\n]*")
ASCII = {
    "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": " - ", "\u2013": "-", "\u2026": "..."
}  # fmt: skip
MARKED = re.compile(r"(?m)^\s*(?:[-*#>]|\d+[.)])|\*\*|```|https?:")


class Speech(NamedTuple):
    """A chat template around what a user says, as tokens."""

    tokenizer: Any
    before: list[int]
    behind: list[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Speech:
        """Templates that do not depend on the words; without one, the words alone, behind an end of text."""
        backend = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        if not tokenizer.chat_template:
            return cls(backend, [int(tokenizer.eos_token_id)], [])  # type: ignore[arg-type]
        shown = str(tokenizer.apply_chat_template(
            [{"role": "user", "content": "SPLIT"}], tokenize=False, add_generation_prompt=True
        ))  # fmt: skip
        before, _, behind = shown.partition("SPLIT")
        return cls(
            backend, *(backend.encode(part, add_special_tokens=False).ids for part in (before, behind))
        )

    def prompts(self, given: Iterator[Ask]) -> Iterator[tuple[Ask, list[int]]]:
        """Asks with their tokens, encoded many at a time."""
        while part := list(islice(given, AHEAD)):
            words = self.tokenizer.encode_batch_fast([one.words for one in part], add_special_tokens=False)
            yield from zip(part, ([*self.before, *one.ids, *self.behind] for one in words), strict=True)


class Rows:
    """Texts that are written side by side.

    Args:
        model: full attention in all layers. before: tokens that all prompts begin with.
        rows, room: of the caches. temperature: 0 takes the most probable token. min_p: least share of the largest
            probability. ends: tokens that end a text.
    """

    def __init__(
        self, model: LoadedModel, before: list[int], rows: int, room: int, temperature: float, min_p: float,
        ends: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.model, self._room, self._before = model.module(NAME), room, len(before)
        self._temperature, self._least = temperature, math.log(min_p)
        config: Any = self.model.config.get_text_config(decoder=True)
        device, heads = self.model.device, config.num_key_value_heads
        d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = rows, heads, room + 1, d
        self.buffers = [
            torch.zeros(shape, dtype=self.model.dtype, device=device)
            for _ in range(2 * config.num_hidden_layers)
        ]
        self.run = RowPass(self.model, {"": None})
        whole: dict[str, Any] = {"dtype": torch.long, "device": device}
        self._numbers, self._keys = torch.arange(rows, **whole), torch.arange(room, **whole)
        self._ends = torch.tensor(ends, **whole)
        self.text = torch.zeros(rows, room, **whole)
        # behind what all begin with: rows that wait write there too
        self.place, self.given = (torch.full((rows,), len(before), **whole) for _ in range(2))
        self.ended = torch.ones(rows, dtype=torch.bool, device=device)
        first = torch.tensor([before], **whole)
        with (
            torch.inference_mode()
        ):  # the first row reads what all begin with; the others get its keys and values
            self.run(
                first, self._keys[None, : len(before)], self._keys[None, : len(before)], self._numbers[:1],
                self._keys[: len(before)], [one[:1] for one in self.buffers],
            )  # fmt: skip
            for one in self.buffers:
                one[:, :, : len(before)] = one[:1, :, : len(before)]

    def begin(self, rows: list[int], prompts: list[list[int]]) -> None:
        """Rows that have ended begin other prompts."""
        most = max(map(len, prompts))
        device = self.text.device
        padded = torch.tensor([[*ids, *[0] * (most - len(ids))] for ids in prompts])
        where = torch.tensor(rows, device=device)
        self.text[where, :most] = padded.to(device)
        self.given[where] = torch.tensor([len(ids) for ids in prompts], device=device)
        self.place[where] = self._before
        self.ended[where] = False

    def step(self) -> None:
        """Each row reads the token at its place and writes the next, unless that is given or the row has ended."""
        read, following = self.place[:, None], self.place[:, None] + 1
        logits = self.run(
            self.text.gather(1, read), read, read, self._numbers, self._keys, self.buffers
        )[0][:, 0].float()  # fmt: skip
        if self._temperature:
            logits /= self._temperature
            unlikely = logits < logits.amax(-1, keepdim=True) + self._least
            logits -= torch.empty_like(logits).exponential_().log_()
            logits.masked_fill_(unlikely, -math.inf)
        drawn, old = logits.argmax(-1, keepdim=True), self.text.gather(1, following)
        own = (following[:, 0] >= self.given) & ~self.ended
        self.text.scatter_(1, following, torch.where(own[:, None], drawn, old))
        full = following[:, 0] == self._room - 1
        self.ended |= own & ((drawn == self._ends).any(-1) | full)
        self.place += (~self.ended).long()

    def take(self, rows: list[int]) -> list[list[int]]:
        """What rows that have ended wrote behind their prompts; one that was cut short has no end token."""
        where = torch.tensor(rows, device=self.text.device)
        text, given, place = (one[where].tolist() for one in (self.text, self.given, self.place))
        return [own[start : at + 2] for own, start, at in zip(text, given, place, strict=True)]


def captured(rows: Rows, stack: ExitStack) -> tuple[Any, bool]:
    """``rows.step``, as a CUDA graph where there is a GPU; and whether the kernels run its layers."""
    if rows.text.device.type != "cuda":
        return rows.step, False
    applies = stack.enter_context(fused(rows.run, rows.buffers))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            rows.step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        rows.step()
    return graph.replay, applies


def fault(text: str, ended: bool) -> str | None:
    """Why a text is dropped."""
    sentences = [one for one in re.split(r"(?<=[.!?])\s+", text) if len(one) > 12]
    checks = {
        "cut short": not (ended or SMOKE),
        "too short": len(text) < SHORTEST,
        "too long": len(text) > LONGEST,
        "not plain": not PLAIN.fullmatch(text),
        "marked up": MARKED.search(text) is not None,
        "talks of itself": TALK.search(text) is not None,
        "no end of a sentence": text[-1:] not in '.!?"' and not SMOKE,
        "repeats itself": len(set(sentences)) < len(sentences) and not SMOKE,
    }
    return next((why for why, found in checks.items() if found), None)


def cleaned(text: str) -> str:
    """Quotes and dashes as ASCII has them, and no empty lines."""
    for found, instead in ASCII.items():
        text = text.replace(found, instead)
    return re.sub(r"\s*\n\s*", "\n", re.sub(" {2,}", " ", text.strip()))


def write_all(
    rows: Rows, speech: Speech, seconds: float, seed: int
) -> tuple[list[tuple[Ask, list[int]]], dict[str, Any]]:
    """Texts until the time is over, and how it went."""
    torch.manual_seed(seed)
    source, made, steps = speech.prompts(asks(seed)), [], 0
    room, count = rows.text.shape[1], len(rows.text)
    asked: list[Ask] = [Ask("", "")] * count
    with ExitStack() as stack, torch.inference_mode():
        step, applies = captured(rows, stack)
        began = time.perf_counter()
        while (spent := time.perf_counter() - began) < seconds and len(made) < ENOUGH:
            if free := rows.ended.nonzero()[:, 0].tolist():
                if steps:
                    made += zip([asked[row] for row in free], rows.take(free), strict=True)
                new = list(islice((one for one in source if len(one[1]) < room - EVERY), len(free)))
                rows.begin(free, [ids for _, ids in new])
                for row, (ask, _) in zip(free, new, strict=True):
                    asked[row] = ask
            for _ in range(EVERY):
                step()
            steps += EVERY
            if steps % (EVERY * 128) == 0:
                say(f"{spent:.0f} s, {steps * count / spent:,.0f} tokens/s, {len(made):,} texts")
    written = sum(len(ids) for _, ids in made)
    return made, {
        "seconds": round(spent, 1), "steps": steps, "step_ms": 1000 * spent / max(steps, 1), "fused": applies,
        "answers": len(made), "tokens": written, "tokens_per_s": written / spent,
    }  # fmt: skip


def say(line: str) -> None:
    """Progress on standard error."""
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Write, drop, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="an instruct model; default: the built-in target, which is none")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default=sized("cuda", "cpu"))
    parser.add_argument("--minutes", type=float, default=sized(8.0, 1.0))
    parser.add_argument("--rows", type=int, default=sized(2048, 4))
    parser.add_argument(
        "--room", type=int, default=sized(384, 64), help="most tokens of a prompt and its text"
    )
    parser.add_argument("-t", "--temperature", type=float, default=0.8)
    parser.add_argument("--min-p", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU")
    chosen = parser.parse_args()
    if not 0 < chosen.min_p <= 1 or chosen.temperature < 0:
        sys.exit("error: --min-p lies in 0 to 1, 0 excluded, and --temperature is 0 or more")
    out = chosen.out or scratch("write")
    source = chosen.target or str(sprinter.models.pair.builtin_paths()["target"])
    dtype = "float32" if chosen.device == "cpu" else "bfloat16"
    try:
        models = sprinter.load_pair(source, device=chosen.device, dtype=dtype, runner="torch").models
    except UserError as error:
        sys.exit(f"error: {error}")
    assert models.tokenizer is not None
    speech, target = Speech.of(models.tokenizer), models.target
    rows = Rows(
        target, speech.before, chosen.rows, chosen.room, chosen.temperature, chosen.min_p, target.eos_ids
    )
    made, facts = write_all(rows, speech, 60 * chosen.minutes, chosen.seed)
    texts = speech.tokenizer.decode_batch([ids for _, ids in made], skip_special_tokens=True)
    kept: dict[str, str] = {}
    dropped: Counter[str] = Counter()
    for (ask, ids), text in zip(made, map(cleaned, texts), strict=True):
        why = fault(text, ids[-1] in target.eos_ids) or ("seen before" if ask.before + text in kept else None)
        if why:
            dropped[why] += 1
        else:
            kept[ask.before + text] = ask.kind
    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"text": text, "kind": kind}) + "\n" for text, kind in kept.items()]
    for shard in range(SHARDS):
        content = gzip.compress("".join(lines[shard::SHARDS]).encode(), 6, mtime=0)
        write_atomic(out / f"texts-{shard:02d}.jsonl.gz", content)
    write_atomic(out / "samples.txt", "\n\n---\n\n".join(islice(kept, SHOWN)) + "\n")
    results = {
        "benchmark": NAME, "command": command(), **({"smoke": True} if SMOKE else {}), "environment": environment(),
        **facts, "kept": dict(Counter(kept.values())), "characters": sum(map(len, kept)), "dropped": dict(dropped),
    }  # fmt: skip
    write_atomic(out / "write.json", json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()

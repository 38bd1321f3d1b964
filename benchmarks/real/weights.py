"""Weights of 4 and 8 bits on a CPU against bfloat16 and llama.cpp, one text at a time: laws, forward passes, texts.

    python benchmarks/real/weights.py --data DIR [--parts law passes texts dial] [--positions 2000] [--prompts 10]

All read the same GGUF files. ``law``: KL(p‖p') and TV of each dtype's laws against those of the same weights in
float32, along prompts of HumanEval and GSM8K; and one token's law in a pass of its own against that in a long one.
``passes``: seconds of a forward pass over n tokens after 256, medians, kinds interleaved, and which share of the
bandwidth a pass over one token reaches: the bytes of its weights against those of a sum or product over as large a
buffer. ``texts``: texts of both suites, 64 tokens, plain and exact speculative decoding, llama.cpp and our kernels
interleaved prompt by prompt. "Q8_0" is the same file as llama.cpp itself rounds it to 8 bits; both engines read it.
``dial``: plain, exact and budgeted methods on the file's own blocks, by suite and temperature. ``loads``: seconds,
of them those of imports, and peak memory of loading the pair in new processes, packed weights kept in a file and not,
in turn. ``rows``: passes of the target over rows of different lengths, in one line and padded, in turn, and whether
they give the same bits.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

import sprinter
from benchmarks.common import (
    Arm,
    cells,
    grid,
    interleave,
    method_arm,
    note_run,
    option_parser,
    peer_arm,
    speed_ratio,
    write_results,
)  # fmt: skip
from benchmarks.engine.passes import limit_s, weight_bytes
from benchmarks.real.arms import DRAFT, TARGET
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.suites import load_suite, turn_ids
from sprinter.laws import kl_divergence, tv_distance
from sprinter.models.choose import make_runner
from sprinter.models.quantised.layers import QuantisedLinear
from sprinter.models.quantised.packed import ASKED
from sprinter.models.runners.row import RowRunner
from sprinter.models.source import find

NAME = "real/weights"
PARTS = ["law", "passes", "texts", "dial", "loads", "rows"]
EIGHT = "Q8_0"
KINDS: Mapping[str, Mapping[str, Any]] = sized(
    {
        "llama.cpp": {"runner": "llamacpp"},
        "bfloat16": {"runner": "torch", "dtype": "bfloat16", "compile": False},
        "bfloat16, compiled": {"runner": "torch", "dtype": "bfloat16", "compile": True},
        "int8": {"dtype": "int8", "compile": True},
        "gguf": {"dtype": "gguf", "compile": True},
        f"llama.cpp, {EIGHT}": {"runner": "llamacpp"},
        f"gguf, {EIGHT}": {"dtype": "gguf", "compile": True},
    },
    {"bfloat16": {"dtype": "bfloat16", "compile": False}, "int8": {"dtype": "int8"}},
)
"""Kinds of weights, as ``load_pair`` is asked for them; those of ``EIGHT`` read the files that are rounded to it."""
SPEEDS: Mapping[str, str] = sized(
    {
        "llama.cpp": "llama.cpp", "gguf": "llama.cpp",
        f"llama.cpp, {EIGHT}": f"llama.cpp, {EIGHT}", f"gguf, {EIGHT}": f"llama.cpp, {EIGHT}",
    },
    dict.fromkeys(KINDS, next(iter(KINDS))),
)  # fmt: skip
"""Kinds whose texts are timed, and the one whose plain decoding is their base: llama.cpp's of the same file."""
OWN = KINDS[sized("gguf", "int8")]
"""What the dial is turned on."""
REFERENCE = sized(
    {"runner": "torch", "dtype": "float32", "compile": False}, {"dtype": "float32", "compile": False}
)
LENGTHS = sized((1, 2, 4, 6, 8, 12, 16), (1, 4))
METHODS = sized(
    ("autoregressive", "speculative(gamma=3)", "speculative(gamma=5)", "svip", "lookup", "hybrid", "auto"),
    ("autoregressive", "speculative(gamma=5)"),
)
PEERS = ("transformers:plain", "transformers:assisted(tokens=5)", "transformers:lookup")
PEER, PEERS_WEIGHTS = "transformers, bfloat16", "bfloat16"
"""Name of the peers, which are compared with the first base, and the kind whose weights they read, dequantised."""
SUITES = sized(("humaneval", "gsm8k"), ("gsm8k",))
DIAL = sized(
    {
        "plain": ("autoregressive",),
        "exact": ("speculative(gamma=3)", "speculative(gamma=5)", "svip"),
        "budgeted": ("certain(budget=0.05)", "sprinter(budget=0.05)"),
    },
    {"plain": ("autoregressive",), "exact": ("svip",), "budgeted": ("certain(budget=0.05)",)},
)
TEMPERATURES = sized((0.0, 0.7), (0.0,))
COUNTS = {
    "one of 12, others of 1": [1] * 15 + [12],
    "1 to 3": [2, 1, 3, 1] * 4,
    "1 and 6": [1, 6] * 8,
}
"""Tokens of each of 16 rows in a pass."""
LOADING = """
import json, resource, sys, time
began = time.perf_counter()
import sprinter.engine.pair
print(time.perf_counter() - began)
sprinter.load_pair(*json.loads(sys.argv[1]), **json.loads(sys.argv[2]))
print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def prompts_of(
    pair: sprinter.Pair, data: Path, count: int, suites: Sequence[str] = SUITES
) -> list[list[int]]:
    """Token ids of the first turns, suite by suite in turn."""
    found = []
    for suite in suites:
        chat = bool(pair.tokenizer is not None and pair.tokenizer.chat_template)
        loaded = load_suite(suite, data, limit=max(1, count // len(suites)), chat=chat)
        found.append([turn_ids(pair, sample, 0, [], chat=loaded.chat) for sample in loaded.samples])
    return [one for group in zip(*found, strict=True) for one in group]


@torch.inference_mode()
def law(models: list[Path | str | None], data: Path, positions: int) -> list[dict[str, Any]]:
    """How far each dtype's laws are from those of the same weights in float32."""
    rows = []
    for which, model in zip(("target", "draft"), models, strict=True):
        wanted: list[torch.Tensor] = []
        texts: list[torch.Tensor] = []
        for kind, options in {"float32": REFERENCE, **KINDS}.items():
            if "llama.cpp" in kind or EIGHT in kind:
                continue
            source = model if model is not None else sprinter.models.pair.builtin_paths()[which]
            pair = sprinter.load_pair(source, **options)
            module = pair.models.target.module("a benchmark")
            if not texts:
                ids = prompts_of(pair, data, max(1, positions // 40))
                texts = [torch.tensor([one[:256]]) for one in ids]
                while sum(text.shape[1] for text in texts[:-1]) >= positions:
                    texts.pop()
            laws = [module(text).logits[0].float().softmax(-1) for text in texts]
            if not wanted:
                wanted = laws
                continue
            kl = torch.cat([kl_divergence(p, q) for p, q in zip(wanted, laws, strict=True)])
            tv = torch.cat([tv_distance(p, q) for p, q in zip(wanted, laws, strict=True)])
            first = [(p.argmax(-1) == q.argmax(-1)).float() for p, q in zip(wanted, laws, strict=True)]
            in_place = options.get("compile") and not pair.models.target.quantised
            name = f"{pair.models.target.weights}{', compiled' if in_place else ''}"
            rows.append(
                {
                    "model": which, "weights": name, "positions": len(kl),
                    "kl_mean": float(kl.mean()), "kl_most": float(kl.max()), "tv_mean": float(tv.mean()),
                    "same_first_choice": float(torch.cat(first).mean()),
                    "one_token_pass": _one_token(pair, texts[0]),
                }
            )  # fmt: skip
            del pair, module, laws
    return rows


def _one_token(pair: sprinter.Pair, text: torch.Tensor) -> float:
    """Largest TV between the law of a token in a pass of its own and in a pass of nine."""
    runner, n = make_runner(pair.models.target.model, max_len=text.shape[1] + 9, compile=False), text.shape[1]
    runner.extend(text[:, : n - 9], logits=False)
    long = runner.extend(text[:, n - 9 :]).logits
    runner.rewind([n - 9])
    short = [runner.extend(text[:, i : i + 1]).logits for i in range(n - 9, n)]
    assert long is not None
    alone = torch.cat([one for one in short if one is not None], 1)
    return float(tv_distance(long.float().softmax(-1), alone.float().softmax(-1)).max())


@torch.inference_mode()
def passes(pairs: dict[str, sprinter.Pair], repeats: int) -> list[dict[str, Any]]:
    """Median seconds of a forward pass by model, kind and number of tokens."""
    rows, context = [], sized(256, 16)
    for which in ("target", "draft"):
        runners = {}
        for kind, pair in pairs.items():
            model = getattr(pair.models, which).model
            runners[kind] = make_runner(model, max_len=context + max(LENGTHS), compile=False)
            runners[kind].extend(torch.arange(context)[None] % 500 + 5, logits=False)
        seconds: dict[tuple[str, int], list[float]] = {}
        for repeat in range(repeats + 1):
            for n in LENGTHS:
                for kind, runner in runners.items():
                    tokens = (torch.arange(n)[None] + 7 * repeat) % 500 + 5
                    began = time.perf_counter()
                    runner.extend(tokens)
                    if repeat:  # the first is a warm-up
                        seconds.setdefault((kind, n), []).append(time.perf_counter() - began)
                    runner.rewind([context])
        for kind in runners:
            medians = {n: statistics.median(seconds[kind, n]) for n in LENGTHS}
            row = {"model": which, "kind": kind, "seconds": {str(n): s for n, s in medians.items()}}
            if "llama.cpp" not in kind:
                size = read_bytes(getattr(pairs[kind].models, which).module("a benchmark"))
                row |= {"bytes": size, "share_of_bandwidth": limit_s(size) / medians[1]}
            rows.append(row)
    return rows


def read_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights that a pass over one token reads: of an input embedding that is not the output's, a row."""
    matrices = {part._matrix for part in model.modules() if isinstance(part, QuantisedLinear)}
    if not matrices:
        return weight_bytes(model)  # type: ignore[arg-type]
    return sum(matrix.packed.numel() for matrix in matrices)


def rounded(path: Path, folder: Path) -> Path:
    """The file in 8 bits, as llama.cpp rounds it."""
    import llama_cpp

    state = path.stat()
    made = folder / f"{path.stem}-{state.st_size}-{state.st_mtime_ns}-{EIGHT}.gguf"
    if not made.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        wanted = llama_cpp.llama_model_quantize_default_params()
        wanted.ftype, wanted.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True
        part = made.with_suffix(".part")
        if llama_cpp.llama_model_quantize(str(path).encode(), str(part).encode(), wanted):
            sys.exit(f"error: llama.cpp cannot round {path} to {EIGHT}")
        part.replace(made)
    return made


def texts(
    pairs: dict[str, sprinter.Pair], data: Path, prompts: int, temperature: float
) -> list[dict[str, Any]]:
    """Speeds over llama.cpp's plain decoding of the same file, and whether exact texts are the plain ones."""
    ids, arms = prompts_of(next(iter(pairs.values())), data, prompts), dict[tuple[str, str], Arm]()
    for kind in SPEEDS:
        pair = pairs[kind]
        for method in METHODS:
            name = f"{kind}, {method}"
            arms[kind, method] = method_arm(pair, method, temperature, name, new_tokens=sized(64, 8))
    bases = {**SPEEDS, PEER: next(iter(SPEEDS.values()))}
    for spec in PEERS:
        arms[PEER, spec] = peer_arm(pairs[PEERS_WEIGHTS], spec, temperature, new_tokens=sized(64, 8))
    interleave([*arms.values()], ids, note=f"texts T={temperature:g}")
    rows = []
    for (kind, method), arm in arms.items():
        plain = arms[kind, PEERS[0] if kind == PEER else METHODS[0]]
        base = arms[bases[kind], METHODS[0]]
        same = [one.text == other.text for one, other in zip(arm.outs, plain.outs, strict=True)]
        rows.append(
            {
                "temperature": temperature, "kind": kind, "method": method,
                "tokens_per_s": float(arm.tokens.sum() / arm.busy_s.sum()),
                "over_base": speed_ratio(arm, base), "over_own_plain": speed_ratio(arm, plain),
                "target_calls_per_token": float(arm.calls.sum() / arm.tokens.sum()),
                "same_as_plain": sum(same), "texts": len(same),
            }
        )  # fmt: skip
    return rows


def loads(chosen: Any, repeats: int) -> list[dict[str, Any]]:
    """Seconds and peak memory of loads, each in a process of its own; the first is not counted, as it may pack."""
    names = [] if SMOKE else [chosen.target, chosen.draft]
    rows: dict[tuple[str, str], list[list[float]]] = {}
    for repeat in range(repeats + 1):
        for dtype in sized(("gguf", "int8"), ("int8",)):
            for kept in ("on", "off"):
                line = [sys.executable, "-c", LOADING, json.dumps(names), json.dumps({"dtype": dtype})]
                told = subprocess.run(
                    line, check=True, capture_output=True, text=True, env={**os.environ, ASKED: kept}
                )
                if repeat:
                    rows.setdefault((dtype, kept), []).append([*map(float, told.stdout.split())])
    return [
        {
            "dtype": dtype, "kept": kept, "import_s": [one[0] for one in made], "seconds": [one[1] for one in made],
            "peak_gb": max(one[2] for one in made) / 1e6,
        }
        for (dtype, kept), made in rows.items()
    ]  # fmt: skip


@torch.inference_mode()
def ragged(pair: sprinter.Pair, repeats: int) -> list[dict[str, Any]]:
    """Least seconds of a pass over 16 rows of different lengths after 100 tokens each."""
    model, context, rows = pair.models.target.model, sized(100, 8), []
    runners = [make_runner(model, batch=16, max_len=context + 16, compile=False) for _ in range(2)]
    line, padded = runners
    assert isinstance(line, RowRunner) and isinstance(padded, RowRunner) and line._takes_flat
    padded._takes_flat = False  # as it was before
    for runner in runners:
        runner.extend(torch.arange(16 * context).view(16, context) % 500 + 5, logits=False)
    for name, counts in COUNTS.items():
        tokens, found = torch.arange(16 * max(counts)).view(16, -1) % 400 + 7, []
        seconds: list[list[float]] = [[], []]
        for _ in range(repeats + 1):
            found = []
            for at, runner in enumerate(runners):
                began = time.perf_counter()
                found.append(runner.extend(tokens, counts).logits)
                seconds[at].append(time.perf_counter() - began)
                runner.rewind([context] * 16)
        one, other = found
        assert one is not None and other is not None
        same = all(torch.equal(one[row, :n], other[row, :n]) for row, n in enumerate(counts))
        rows.append({"tokens": name, "line_s": min(seconds[0]), "padded_s": min(seconds[1]), "same": same})
    return rows


def dial(pair: sprinter.Pair, data: Path, prompts: int) -> list[dict[str, Any]]:
    """Speeds over plain decoding and over the fastest exact method, and drifts, by suite and temperature."""
    rows: list[dict[str, Any]] = []
    for suite in SUITES:
        ids = prompts_of(pair, data, prompts, [suite])
        for temperature in TEMPERATURES:
            arms = {
                method: method_arm(pair, method, temperature, new_tokens=sized(96, 8))
                for methods in DIAL.values()
                for method in methods
            }
            interleave([*arms.values()], ids, note=f"dial {suite} T={temperature}")
            best = max(
                (arms[one] for one in DIAL["exact"]), key=lambda arm: arm.tokens.sum() / arm.busy_s.sum()
            )
            for method, arm in arms.items():
                tokens = float(arm.tokens.sum())
                rows.append(
                    {
                        "suite": suite, "temperature": temperature, "method": method,
                        "tokens_per_s": tokens / float(arm.busy_s.sum()),
                        "over_plain": speed_ratio(arm, arms[DIAL["plain"][0]]), "over_exact": speed_ratio(arm, best),
                        "best_exact": best.name, "target_calls_per_token": float(arm.calls.sum()) / tokens,
                        "drift": float(arm.drift.sum()) / tokens,
                    }
                )  # fmt: skip
    return rows


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines: list[str] = []
    if found := results.get("law"):
        shown = [
            f"{row['model']} | {row['weights']} | {row['positions']:,} | {row['kl_mean']:.5f} | {row['kl_most']:.3f} | "
            f"{row['tv_mean']:.4f} | {row['same_first_choice']:.3f} | {row['one_token_pass']:.1e}"
            for row in found
        ]
        head = (
            "model | weights | positions | KL mean | largest | TV mean | same first choice | token alone, TV"
        )
        lines += [
            "Against the law of the same file's weights in float32; KL in nats.",
            "",
            *grid(head, shown),
            "",
        ]
    for capability, found in results.get("passes", {}).items():
        shown = []
        for row in found:
            seconds = {int(n): s for n, s in row["seconds"].items()}
            values = " | ".join(f"{1e3 * s:.0f}" for s in seconds.values())
            eight = seconds.get(8, seconds[max(seconds)]) / seconds[1]
            share = row.get("share_of_bandwidth")
            reads = "– | –" if share is None else f"{row['bytes'] / 1e9:.2f} | {share:.2f}"
            shown.append(f"{row['model']} | {row['kind']} | {values} | {eight:.2f} | {reads}")
        each = " | ".join(f"{n}" for n in LENGTHS)
        head = f"model | kind | {each} | 8 ÷ 1 | GB of weights read | share of the bandwidth at 1"
        lines += [
            f"Milliseconds of a forward pass over n tokens after 256, on a processor with {capability}.",
            "",
            *grid(head, shown),
            "",
        ]
    if found := [row for row in results.get("texts", []) if "temperature" in row]:
        shown = [
            f"{row['temperature']:g} | {row['kind']} | `{row['method']}` | {row['tokens_per_s']:.1f} | "
            f"{cells(row['over_base'])} | {cells(row['over_own_plain'])} | {row['target_calls_per_token']:.3f} | "
            + (f"{row['same_as_plain']} of {row['texts']}" if row["temperature"] == 0 else "–")
            for row in found
        ]
        base = "÷ plain llama.cpp of the same file"
        head = f"T | kind | method | tokens/s | {base} | ÷ own plain | target calls/token | text as plain"
        lines += ["With prefill.", "", *grid(head, shown), ""]
    if found := results.get("dial"):
        shown = [
            f"{row['suite']} | {row['temperature']:g} | `{row['method']}` | {row['tokens_per_s']:.1f} | "
            f"{cells(row['over_plain'])} | {cells(row['over_exact'])} | {row['target_calls_per_token']:.3f} | "
            f"{row['drift']:.3f}"
            for row in found
        ]
        head = "suite | T | method | tokens/s | ÷ plain | ÷ best exact | target calls/token | drift"
        lines += ["The file's own blocks, with prefill.", "", *grid(head, shown), ""]
    if found := results.get("loads"):
        shown = [
            f"{row['dtype']} | {row['kept']} | {listed(row['seconds'])} | {listed(row['import_s'])} | "
            f"{row['peak_gb']:.2f}"
            for row in found
        ]
        head = "dtype | packed weights kept | seconds | of them imports | peak memory, GB"
        lines += ["Loading the pair, each time in a new process.", "", *grid(head, shown), ""]
    if found := results.get("rows"):
        shown = [
            f"{row['tokens']} | {1e3 * row['line_s']:.0f} | {1e3 * row['padded_s']:.0f} | "
            f"{'yes' if row['same'] else 'no'}"
            for row in found
        ]
        head = "tokens of 16 rows | in one line, ms | padded, ms | same bits"
        lines += ["Passes of the target over rows of different lengths.", "", *grid(head, shown)]
    return "\n".join(lines).strip()


def listed(numbers: Sequence[float]) -> str:
    """Numbers with one digit."""
    return ", ".join(f"{number:.1f}" for number in numbers)


def main() -> None:
    """Measure the parts; write."""
    parser = option_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--gate", help="directory of a gate for the draft")
    parser.add_argument("--threads", type=int, help="default: one a core")
    parser.add_argument("--positions", type=int, default=sized(2000, 20))
    parser.add_argument("--repeats", type=int, default=sized(7, 1))
    parser.add_argument("--prompts", type=int, default=sized(10, 1))
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0], help="of the texts")
    parser.add_argument("--target", default=sized(TARGET, None))
    parser.add_argument("--draft", default=sized(DRAFT, None))
    chosen, began = parser.parse_args(), time.time()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)  # llama.cpp follows
    results = {"benchmark": NAME}
    if "law" in chosen.parts:
        results["law"] = law([chosen.target, chosen.draft], chosen.data, chosen.positions)
        note_run(results, "law", began)
        write_results(NAME, results, table(results))
    if {"passes", "texts"} & set(chosen.parts):
        kinds = (
            KINDS if "passes" in chosen.parts else {kind: KINDS[kind] for kind in (*SPEEDS, PEERS_WEIGHTS)}
        )
        pairs = {kind: _load(chosen, options, EIGHT in kind) for kind, options in kinds.items()}
        if "passes" in chosen.parts:
            began = time.time()
            capability = torch.backends.cpu.get_cpu_capability()  # type: ignore[no-untyped-call]
            results.setdefault("passes", {})[capability] = passes(pairs, chosen.repeats)
            note_run(results, f"passes, {capability}", began)
            write_results(NAME, results, table(results))
        if "texts" in chosen.parts:
            for temperature in chosen.temperatures:
                began = time.time()
                known = [row for row in results.get("texts", []) if "temperature" in row]
                kept = [row for row in known if row["temperature"] != temperature]
                results["texts"] = kept + texts(pairs, chosen.data, chosen.prompts, temperature)
                note_run(results, f"texts, temperature {temperature:g}", began)
                write_results(NAME, results, table(results))
        del pairs
    if "dial" in chosen.parts:
        began = time.time()
        pair = _load(chosen, {**OWN, **({"gate": chosen.gate} if chosen.gate else {})})
        results["dial"] = dial(pair, chosen.data, chosen.prompts)
        note_run(results, "dial", began)
    if "loads" in chosen.parts:
        began = time.time()
        results["loads"] = loads(chosen, sized(3, 1))
        note_run(results, "loads", began)
    if "rows" in chosen.parts:
        began = time.time()
        results["rows"] = ragged(_load(chosen, OWN), sized(5, 1))
        note_run(results, "rows", began)
    write_results(NAME, results, table(results))


def _load(chosen: Any, options: Mapping[str, Any], eight: bool = False) -> sprinter.Pair:
    if SMOKE:
        return sprinter.load_pair(**options)
    names = [chosen.target, chosen.draft]
    if eight:
        names = [rounded(Path(str(find(name, "model").gguf)), Path(".work/eight")) for name in names]
    return sprinter.load_pair(*names, **options)


if __name__ == "__main__":
    main()

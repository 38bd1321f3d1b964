"""Weights of 4 and 8 bits on a CPU against bfloat16 and llama.cpp: laws and forward passes.

    python benchmarks/real/weights.py --data DIR [--parts law passes] [--positions 2000]

All read the same GGUF files. ``law``: KL(p‖p') and TV of each dtype's laws against those of the same weights in
float32, along prompts of HumanEval and GSM8K; and one token's law in a pass of its own against that in a long one.
``passes``: seconds of a forward pass over n tokens after 256, medians, kinds interleaved, and which share of the
bandwidth a pass over one token reaches: the bytes of its weights against those of a sum or product over as large a
buffer. "Q8_0" is the same file as llama.cpp itself rounds it to 8 bits; both engines read it. Speeds of texts are runs
of ``sprinter bench``.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch

import sprinter
from benchmarks.common import grid, note_run, option_parser, write_results
from benchmarks.real.arms import DRAFT, TARGET
from benchmarks.smoke import SMOKE, sized
from sprinter.bench.suites import load_suite, turn_ids
from sprinter.laws import kl_divergence, tv_distance
from sprinter.models.choose import make_runner
from sprinter.models.source import find

NAME = "real/weights"
PARTS = ["law", "passes"]
SUITES = sized(("humaneval", "gsm8k"), ("gsm8k",))
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
REFERENCE = sized(
    {"runner": "torch", "dtype": "float32", "compile": False}, {"dtype": "float32", "compile": False}
)
LENGTHS = sized((1, 2, 4, 6, 8, 12, 16), (1, 4))


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
    from sprinter_kernels.layers import QuantisedLinear  # others take this file's prompts without the kernels

    matrices = {part._matrix for part in model.modules() if isinstance(part, QuantisedLinear)}
    if matrices:
        return sum(matrix.packed.numel() for matrix in matrices)
    head, inputs = model.get_output_embeddings().weight, model.get_input_embeddings().weight  # type: ignore[operator]
    total = sum(weights.numel() * weights.element_size() for weights in model.parameters())
    return total if head is inputs else total - inputs.numel() * inputs.element_size()


def limit_s(n_bytes: int) -> float:
    """Seconds to read so many bytes, by the faster of two ways; the lower quartile."""
    buffer, taken = torch.ones(n_bytes // 4), []
    for read in (buffer.sum, lambda: buffer.dot(buffer)):
        seconds = []
        for _ in range(23):
            began = time.perf_counter()
            read()
            seconds.append(time.perf_counter() - began)
        taken.append(statistics.quantiles(seconds[3:], n=4)[0])
    return min(taken)


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
    return "\n".join(lines).strip()


def main() -> None:
    """Measure the parts; write."""
    parser = option_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--threads", type=int, help="default: one a core")
    parser.add_argument("--positions", type=int, default=sized(2000, 20))
    parser.add_argument("--repeats", type=int, default=sized(7, 1))
    parser.add_argument("--target", default=sized(TARGET, None))
    parser.add_argument("--draft", default=sized(DRAFT, None))
    chosen, began = parser.parse_args(), time.time()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)  # llama.cpp follows
    results: dict[str, Any] = {"benchmark": NAME}
    if "law" in chosen.parts:
        results["law"] = law([chosen.target, chosen.draft], chosen.data, chosen.positions)
        note_run(results, "law", began)
        write_results(NAME, results, table(results))
    if "passes" in chosen.parts:
        began = time.time()
        pairs = {kind: _load(chosen, options, EIGHT in kind) for kind, options in KINDS.items()}
        capability = torch.backends.cpu.get_cpu_capability()  # type: ignore[no-untyped-call]
        results["passes"] = {capability: passes(pairs, chosen.repeats)}
        note_run(results, f"passes, {capability}", began)
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

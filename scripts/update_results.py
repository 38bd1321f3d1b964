"""Write the measured numbers into README.md, docs/results.md and docs/results/ from benchmarks/results/.

python scripts/update_results.py           write
python scripts/update_results.py --check   exit 1 if a file differs from what would be written
python scripts/update_results.py --dirty   list the commands whose results were made on uncommitted changes

A page of docs/results/ holds the tables of one topic between two marks; the text outside them is written by hand.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from readme_results import RESULTS, ROOT, load, readme_block, where

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


@dataclass(frozen=True)
class Topic:
    """One page of results.

    Attributes:
        about: what is measured, for the index.
        titles: result file -> heading.
        headline: one sentence of numbers from these files.
    """

    about: str
    titles: dict[str, str]
    headline: Callable[[], str]


def equal_trust(results: dict[str, Any]) -> list[str]:
    """Sprinter's drift and the coin's at the same trusted share, interpolated between the coin's measured points."""
    lines = [
        "",
        "Drift at equal trusted share (the coin's is interpolated between its own points and the origin):",
        "",
    ]
    lines += ["| T | arm | trusted | sprinter's drift | coin's drift there | ratio |", "| --- " * 6 + "|"]
    for temperature in sorted({row["temperature"] for row in results["rows"]}):
        rows = [row for row in results["rows"] if row["temperature"] == temperature]
        coins = sorted(
            (row["trusted_share"], row["mean_drift"][0]) for row in rows if row["arm"].startswith("coin")
        )
        points = [(0.0, 0.0), *coins]
        for row in rows:
            share, drift = row["trusted_share"], row["mean_drift"][0]
            if not row["arm"].startswith("sprinter"):
                continue
            for (x0, y0), (x1, y1) in pairwise(points):
                if x0 <= share <= x1:
                    coin = y0 + (y1 - y0) * (share - x0) / (x1 - x0)
                    cells = f"{share:.2f} | {drift:.3f} | {coin:.3f} | {drift / coin:.2f}"
                    lines.append(f"| {temperature} | `{row['method']}` | {cells} |")
                    break
    return lines


def methods_headline() -> str:
    """The main job at temperature 1 and the middle drift."""
    row = next(
        r
        for r in need("methods/main_job")["rows"]
        if r["temperature"] == 1.0 and r["arm"] == "sprinter @ 0.10"
    )
    speed, drift = row["speed_over_autoregressive"][0], row["mean_drift"][0]
    return f"`sprinter` is {speed:.2f} times as fast as plain decoding at a mean drift of {drift:.3f} (temperature 1)."


def bench_headline() -> str:
    """How often the interval of two equal arms holds 1."""
    noise = need("bench/noise")
    return f"The same arm twice differs by less than its 95 % interval in {noise['hold_1']} of {noise['runs']} runs."


def engine_headline() -> str:
    """Plain decoding relative to transformers, and the dial on the more expensive target."""
    results = need("engine/decoding")
    plain = results["builtin"]["1"]["plain_over_transformers"]["float32"][0]
    dial = results["enlarged"]["1"]["sprinter_over_exact"]["float32"]["over_exact"][0]
    return (
        f"Compiled plain decoding is {plain:.1f} times as fast as transformers' `generate`; with a target that costs "
        f"as much as a 17 M one, `sprinter` within drift 0.15 is {dial:.2f} times as fast as exact speculation."
    )


def gpu_headline() -> str:
    """Share of the bandwidth, and plain decoding relative to transformers."""
    cases = {case["case"]: case for case in need("gpu/h100")["stages"]["latency"]["cases"]}
    large, small = cases["llama-8b by llama-1b"], cases["qwen-1.5b by qwen-0.5b"]
    shares = [
        row["fraction"]["large"] for row in large["models"]["target"]["passes"] if row["kind"] == "captured"
    ]
    plain = {row["arm"]: row for row in small["summary"]}["captured autoregressive"]
    return (
        f"Captured passes of an 8 B target over 1 to 32 tokens reach {min(shares):.2f} to {max(shares):.2f} of a "
        f"copy's bandwidth; plain decoding of a 1.5 B one is {plain['speed_over']['transformers:plain'][0]:.1f} times "
        "as fast as transformers' (random weights)."
    )


def llamacpp_headline() -> str:
    """Our plain decoding over llama-cpp-python's."""
    parts = need("llamacpp/speed")["results"].values()
    plain = [
        next(r for r in part["rows"] if r["arm"] == "autoregressive")["over_own_loop"][0] for part in parts
    ]
    return (
        f"Our plain decoding runs at {min(plain):.2f} to {max(plain):.2f} of the speed of llama-cpp-python's."
    )


def gate_headline() -> str:
    """Target calls per token that features of the draft's law save."""
    found = need("gate/study_builtin")["curves"]["1.0"]["read_off"]["overlap, hidden and law"]["0.10"]
    return (
        f"A gate that also sees the draft's law saves {found['gain_over_paper'][0]:.0%} of the target calls of the "
        "paper's gate at drift 0.10 (temperature 1)."
    )


def theory_headline() -> str:
    """Median relative errors."""
    found = need("theory/predict")["summary"]
    calls, drift = found["tokens_per_call"], found["drift"]
    return (
        f"Median error of the prediction: {calls['median']:.1%} for tokens a target call ({calls['arms']} methods), "
        f"{drift['median']:.1%} for drift ({drift['arms']})."
    )


def papers_headline() -> str:
    """How many claims hold."""
    names = TOPICS["papers"].titles
    counts = Counter(verdict for name in names for verdict in need(name)["verdicts"].values())
    return (
        f"Of {counts.total()} claims {counts['holds']} hold, {counts['holds in part']} hold in part, "
        f"{counts['does not hold']} do not hold, {counts['undecided']} are undecided."
    )


def real_headline() -> str:
    """The draft's own certainty against trained gates."""
    found = need("real/gates")
    calls, areas = found["calls_at"]["all"], found["auc"]["overlap above median"]
    entropy, gate = (calls[name]["0.05"][0] for name in ("certain, entropy", "mlp"))
    return (
        f"On a pair of instruct models the draft's entropy knows where the laws agree (AUC {areas['entropy'][0]:.3f}): "
        f"`certain` needs {entropy:.3f} target calls a token at drift 0.05, the best trained gate {gate:.3f}."
    )


def serve_headline() -> str:
    """Log-likelihoods; failures, fairness and memory under load."""
    scored = need("serve/evaluate")["rows"][0]
    told = (
        f"{scored['equal']} of {scored['items']} log-likelihoods through lm-evaluation-harness are transformers' "
        f"(largest difference {scored['largest_difference']:.0e} nats)."
    )
    if (latency := load("serve/latency")) is not None:
        told += f" {_latency_headline(latency)}"
    under_load = load("serve/load")
    if under_load is None:
        return told
    runs = list(under_load["load"].values())
    failed = sum(count for run in runs for how, count in run["ended"].items() if how not in ("done", "left"))
    ratio = max(run["tokens_of_clients"]["ratio"] for run in runs)
    growth = max(run["rss_growth"] for run in runs)
    return (
        f"{told} {sum(run['texts'] for run in runs):,} streamed texts of {max(run['streams'] for run in runs)} "
        f"clients: {failed} failed; most over least tokens of a client {ratio:.2f}; memory grew by {growth:.1%}."
    )


def _latency_headline(latency: dict[str, Any]) -> str:
    """Plain decoding's tokens/s over those of the other servers."""
    speed = {(row["server"], row["at_once"]): row["tokens_per_s"] for row in latency["rows"]}
    streams = sorted({count for _, count in speed})
    own = "sprinter, own kernels"
    ratios = [
        f"{name}'s {', '.join(f'{speed[own, n] / speed[arm, n]:.1f}' for n in streams)}"
        for arm, name in (("vllm, bfloat16", "vLLM"), ("llama.cpp, file", "llama.cpp"))
    ]
    return (
        f"Plain decoding on a GGUF file's blocks with {', '.join(map(str, streams))} streams: tokens/s over "
        f"{' and over '.join(ratios)}."
    )


TOPICS = {
    "real": Topic(
        "a pair of instruct models: accuracy, drift, speed beside other engines, gates",
        {
            "real/probe": "Overlap and signals by kind of text",
            "real/gates": "Gates against the draft's own certainty",
            "real/quality": "Accuracy and drift in batches",
            "real/named": "Six named arms on more prompts and suites",
            "real/precision": "Accuracy with weights of 16, 8 and 4 bits",
            "real/sampled": "Drift of lossy modes at temperature 1, in batches",
            "real/speed": "Speed, one text at a time, beside other engines",
            "real/rows": "Many rows at once, beside vLLM",
            "real/weights": "Weights of 4 and 8 bits against bfloat16 and llama.cpp",
            "real/equality": "Greedy texts of lossless methods against plain decoding",
            "real/overlap": "Drafting during the target's pass",
            "real/drafts": "Drafters made for SmolLM2-135M-Instruct",
            "real/drafts_gpu": "Drafters that were trained on a GPU",
            "real/drafts_avx512": "A head of EAGLE with AVX-512",
            "real/drafts_builtin": "Drafters made for the built-in target",
            "real/elsewhere": "An EAGLE-3 head of ours in speculators' own model",
            "real/heads_in_vllm": "An EAGLE-3 head of ours in vLLM",
        },
        real_headline,
    ),
    "methods": Topic(
        "every method on the built-in pair, and counts against transformers'",
        {
            "methods/main_job": "The main job: speed, target calls and drift at three drifts",
            "methods/every_method": "Every method",
            "methods/tuner": "The tuner against an exhaustive grid",
            "methods/crosscheck": "Against transformers' assisted decoding",
            "methods/trees": "Trees against chains",
            "methods/blocks": "Block verification against exact acceptance",
            "methods/never_slower": "Never slower than plain decoding",
            "methods/budgets": "Budgets on drift",
            "methods/mixed": "Mixed traffic",
        },
        methods_headline,
    ),
    "bench": Topic(
        "`sprinter bench` on three suites, and how far its verdicts can be trusted",
        {
            "bench/table": "Every method and transformers' own generation on three suites",
            "bench/noise": "The same arm twice, and an arm made slower",
        },
        bench_headline,
    ),
    "engine": Topic(
        "captured forward passes against transformers and vLLM, many rows at once",
        {
            "engine/decoding": "Captured passes: decoding",
            "engine/compiled": "The first text, and the ways to compile",
            "engine/passes": "Captured passes: one pass, one step",
            "engine/prefix_pair": "Prefix cache on Qwen2.5-Coder 1.5B and 0.5B",
            "engine/batch": "Many rows at once",
            "engine/revisions": "Before and after drafts became trees",
        },
        engine_headline,
    ),
    "gpu": Topic(
        "an H100: passes against a copy's bandwidth, plain and speculative decoding beside transformers; drafters "
        "trained on an H200",
        {
            "gpu/h100": "Real sizes with random weights, and a pair trained on the way",
            "gpu/h100_builtin": "Laws of captured passes",
            "gpu/drafts": "Drafters trained for SmolLM2-135M-Instruct",
        },
        gpu_headline,
    ),
    "serve": Topic(
        "the server beside vLLM's and llama.cpp's, under load, and its log-likelihoods against transformers'",
        {
            "serve/latency": "Latency beside vLLM's and llama.cpp's servers",
            "serve/load": "Many streams for minutes",
            "serve/evaluate": "lm-evaluation-harness through the server",
            "serve/crowd": "One seed alone and in a crowd",
            "serve/schema": "Requests made from the description",
        },
        serve_headline,
    ),
    "llamacpp": Topic(
        "GGUF models against llama-cpp-python's own loop",
        {
            "llamacpp/speed": "llama.cpp as a runner",
            "llamacpp/agreement": "One GGUF file through llama.cpp and through PyTorch",
            "llamacpp/tokenizers": "Tokenizers of GGUF files",
        },
        llamacpp_headline,
    ),
    "gate": Topic(
        "which signal to learn, transfer to other text, labelling speed",
        {
            "gate/study_builtin": "Gates: which signal is worth learning (built-in pair)",
            "gate/study_other": "Gates: which signal is worth learning (another pair)",
            "gate/transfer": "Gates: one kind of text to another",
            "gate/labelling": "Labelling speed",
        },
        gate_headline,
    ),
    "theory": Topic(
        "predicted against measured speed and drift",
        {"theory/predict": "Predicted against measured"},
        theory_headline,
    ),
    "papers": Topic(
        "tables of four papers, re-run on the built-in pair",
        {
            "papers/sprinter": "SPRINTER's tables in kind",
            "papers/svip": "SVIP's tables in kind",
            "papers/fsd": "Fuzzy speculative decoding's tables in kind",
            "papers/fsd_laws": "Fuzzy speculative decoding: divergences in kind",
            "papers/theory": "OPT against UNO, target against draft, in kind",
        },
        papers_headline,
    ),
}


def need(name: str) -> dict[str, Any]:
    """Contents of one result file; exits if it is missing."""
    results = load(name)
    if results is None:
        sys.exit(f"error: benchmarks/results/{name}.json is missing: run benchmarks/{name}.py")
    return results


def index_page() -> str:
    """docs/results.md."""
    lines = [
        "# Results",
        "",
        "Measured on the built-in pair unless a page says otherwise. Speeds are ratios within one run, arms",
        "interleaved prompt by prompt, with 95 % bootstrap intervals over prompts; the meter is complete. Every table",
        "stands with the command that prints it and the commit that it was made on; `+` after a commit: tracked files",
        "had uncommitted changes. How to repeat a number: [CONTRIBUTING](../CONTRIBUTING.md#reproducing-a-number).",
        "",
        "| topic | what is measured | headline |",
        "| --- | --- | --- |",
    ]
    for name, topic in TOPICS.items():
        heading = page(name).read_text(encoding="utf-8").splitlines()[0].removeprefix("# Results: ")
        lines.append(f"| [{heading}](results/{name}.md) | {topic.about} | {topic.headline()} |")
    lines += ["", "Written by `scripts/update_results.py` from `benchmarks/results/`; do not edit by hand."]
    return "\n".join(lines) + "\n"


def page(topic: str) -> Path:
    """The page of a topic."""
    return ROOT / "docs" / "results" / f"{topic}.md"


def tables(topic: Topic) -> str:
    """The tables of a topic, each with its command, machine and commit."""
    parts = [
        "Numbers by `scripts/update_results.py` from `benchmarks/results/`; back to the [index](../results.md)."
    ]
    for name, title in topic.titles.items():
        results = load(name)
        if results is not None:
            table = (RESULTS / f"{name}.md").read_text(encoding="utf-8").strip()
            parts += ["", f"## {title}", "", where(results), "", table]
            parts += equal_trust(results) if name == "methods/main_job" else []
    return "\n".join(parts)


def between_marks(path: Path, text: str) -> str:
    """The file with ``text`` between its marks."""
    head, rest = path.read_text(encoding="utf-8").split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{text}\n{END}{tail}"


def dirty() -> list[tuple[float, str, str]]:
    """(seconds, command, commit) of every run that was made on uncommitted changes, shortest first."""

    def runs(value: Any, above: dict[str, Any]) -> Iterator[tuple[float, str, str]]:
        if not isinstance(value, dict):
            for one in value if isinstance(value, list) else ():
                yield from runs(one, above)
            return
        facts = above | {key: value[key] for key in ("command", "seconds") if key in value}
        commit = value.get("environment", {}).get("commit") or ""
        if commit.endswith("+"):
            command = facts["command"].strip()
            if isinstance(value.get("arms"), list) and "command" not in value:
                command = f"{command} --again {shlex.join(value['arms'])}"
            yield float(facts.get("seconds") or 0), command, commit
        for one in value.values():
            yield from runs(one, facts)

    found = set()
    for path in RESULTS.rglob("*.json"):
        script = (
            path.relative_to(RESULTS).with_suffix("").as_posix().replace("theory/measured", "theory/predict")
        )
        results = json.loads(path.read_text(encoding="utf-8"))
        command = f"python benchmarks/{script}.py" + (" --measured-only" if path.stem == "measured" else "")
        found |= set(runs(results, {"command": command}))
    return sorted(found)


def main() -> int:
    """Write the documents, or with --check compare them, or with --dirty list commands."""
    if "--dirty" in sys.argv:
        for seconds, command, commit in dirty():
            print(f"{seconds:8.0f} s  {commit:9}  {command} --data DIR")
        return 0
    readme = ROOT / "README.md"
    wanted = {
        readme: between_marks(readme, readme_block()),
        ROOT / "docs" / "results.md": index_page(),
        **{page(name): between_marks(page(name), tables(topic)) for name, topic in TOPICS.items()},
    }
    stale = [
        path
        for path, text in wanted.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv:
        for path in stale:
            print(
                f"{path.relative_to(ROOT)} does not match benchmarks/results: run python scripts/update_results.py"
            )
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

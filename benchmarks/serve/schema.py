"""schemathesis against the server: requests made from its OpenAPI description, of which none may end with status 5xx.

    python benchmarks/serve/schema.py [--examples 1200] [--seed 1]

The built-in pair with a chat template, four rows. ``SPRINTER_SCHEMATHESIS_PYTHON`` names a Python that has
schemathesis, if this one has not. All of its checks but two: what is valid by the description may be refused all the
same ("positive_data_acceptance"), and a POST without JSON is refused before its path is looked at ("unsupported_method"
asks for 405). No stateful phase: no request makes anything that another one uses. The answers with status 5xx are
counted by the server itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import httpx2

import sprinter
from benchmarks.common import command, environment, grid, option_parser, write_results
from benchmarks.serve.servers import free_port, sprinter_server, started
from benchmarks.smoke import scratch, sized
from sprinter.errors import UserError

NAME = "serve/schema"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
LEFT_OUT = ("positive_data_acceptance", "unsupported_method")


def tokenizer_with_template(folder: Path) -> Path:
    """The built-in pair's tokenizer with a chat template."""
    tokenizer = sprinter.load_pair(compile=False).tokenizer
    assert tokenizer is not None
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def schemathesis(url: str, folder: Path, examples: int, seed: int) -> dict[str, Any]:
    """Run it; its own report."""
    python = os.environ.get("SPRINTER_SCHEMATHESIS_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import schemathesis"], capture_output=True, check=False).returncode:
        raise UserError(
            "schemathesis is not at hand: set SPRINTER_SCHEMATHESIS_PYTHON to a Python that has it"
        )
    report = folder / "report.json"
    line = [
        python, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--checks", "all", "--exclude-checks",
        ",".join(LEFT_OUT), "--max-examples", str(examples), "--seed", str(seed), "--continue-on-failure",
        "--request-timeout", "300", "--generation-database", "none", "--no-color", "--no-shrink",
        "--suppress-health-check", "all", "--phases", "examples,coverage,fuzzing", "--workers", "4",
        "--max-response-time", "300", "--report", "json", "--report-json-path", str(report),
    ]  # fmt: skip
    hooks = {
        "SCHEMATHESIS_HOOKS": "schema_hooks",
        "PYTHONPATH": str(Path(__file__).resolve().parent),
        "NO_PROXY": "*",
    }
    with (folder / "out.txt").open("w", encoding="utf-8") as out:
        ended = subprocess.run(
            line, env=os.environ | hooks, stdout=out, stderr=subprocess.STDOUT, check=False
        )
    told = (folder / "out.txt").read_text(encoding="utf-8")
    if ended.returncode not in (0, 1) or not report.is_file():  # 1: a check has failed
        raise UserError(f"schemathesis failed: {told[-2000:]}")
    if ended.returncode:
        print(told, file=sys.stderr)
    found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return found


def answers(url: str) -> dict[str, Counter[int]]:
    """Numbers of answers by path and status, as the server has counted them."""
    metrics = httpx2.get(f"{url}/metrics", timeout=60, trust_env=False).text
    found: dict[str, Counter[int]] = {}
    counted = r'^sprinter_requests_total\{path="([^"]+)",status="(\d+)"\} ([\d.e+]+)$'
    for path, status, count in re.findall(counted, metrics, flags=re.MULTILINE):
        found.setdefault(path, Counter())[int(status)] += round(float(count))
    return found


def main() -> None:
    """Start the server, run schemathesis, count."""
    parser = option_parser(__doc__, data=False)
    parser.add_argument("--examples", type=int, default=sized(1200, 2), help="an operation, at most")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    began = time.time()
    folder = scratch("schema").resolve()
    options = [
        "--rows",
        "4",
        "--max-len",
        "256",
        "--tokenizer",
        str(tokenizer_with_template(folder / "tokenizer")),
    ]
    port = free_port()
    with started("sprinter", sprinter_server(port, *options), port, folder / "log") as server:
        before = answers(server.url)
        told = schemathesis(server.url, folder, args.examples, args.seed)
        counts = {
            path: dict(sorted((found - before.get(path, Counter())).items()))
            for path, found in sorted(answers(server.url).items())
        }
    failures = [
        {key: one[key] for key in ("type", "title", "count", "operations")} for one in told["failures"]
    ]
    results = {
        "benchmark": NAME,
        "command": command(),
        "environment": environment(),
        "schemathesis": told["schemathesis_version"],
        "seed": args.seed,
        "left_out": list(LEFT_OUT),
        "cases": told["test_cases"]["generated"],
        "operations": told["operations"]["tested"],
        "errors": told["errors"],
        "failures": failures,
        "server_errors": sum(n for found in counts.values() for status, n in found.items() if status >= 500),
        "answers": counts,
        "seconds": round(time.time() - began, 1),
    }
    write_results(NAME, results, table(results))


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    kinds = ("2xx", "4xx", "5xx")
    rows = []
    for path, found in results["answers"].items():
        by_kind = Counter[str]()
        for status, count in found.items():
            by_kind[f"{status // 100}xx"] += count
        rows.append(f"`{path}` | " + " | ".join(str(by_kind[kind]) for kind in kinds))
    failed = ", ".join(f"{one['title']}: {one['count']}" for one in results["failures"]) or "none"
    return "\n".join(
        [
            *grid("path | " + " | ".join(kinds), rows),
            "",
            f"schemathesis {results['schemathesis']}: {results['cases']:,} cases on {results['operations']} "
            f"operations, {results['server_errors']} answers with status 5xx; failed checks: {failed}.",
        ]
    )


if __name__ == "__main__":
    main()

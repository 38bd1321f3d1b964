"""The same GGUF file through llama.cpp and through PyTorch: how far apart the laws are, and what loading costs.

Both runners read one text, llama.cpp with the weights as stored, PyTorch with weights dequantised to float32. On a CPU,
llama.cpp rounds activations to eight bits before it multiplies them with quantised weights, so that the laws differ.
"float32 file" checks everything else: the dequantised weights written as a float32 file, which llama.cpp does not round
(Llamas of up to 200 M parameters; models of more than 1 G are only loaded). |Δ log p| is over all tokens of the
vocabulary, likely or not; drift is the total variation distance. Peak memory is what loading adds to that of the
process, mapped pages of the file included.

Run: python benchmarks/llamacpp/agreement.py --data DIR [--tokens 200] [--models FILE ...]
     (the files: by default those of SPRINTER_MODELS)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.common import command, grid, heldout_prompts, option_parser, write_results
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.bench.environment import environment
from sprinter.models.choose import make_runner
from sprinter.models.convert import convert_gguf
from sprinter.models.gguf.dequantise import dequantised
from sprinter.models.gguf.load import GgufModel
from sprinter.models.gguf.tokenizer import gguf_tokenizer
from sprinter.models.gguf.write import write_gguf
from sprinter.models.pair import builtin_paths
from sprinter.models.progress import set_bars
from sprinter.models.source import models_folder

NAME = "llamacpp/agreement"
WRITTEN = 200_000_000  # parameters of the largest model that is written in float32
COMPARED = 1_000_000_000  # and of the largest that is run in float32


def compare(path: Path, text: str, count: int) -> dict[str, Any]:
    """One row of the table; runs in a process of its own, whose peak memory is that of loading."""
    set_bars(weights=False, downloads=False)
    before, began = _peak_bytes(), time.perf_counter()
    half = dequantised(path, torch.bfloat16)
    load_s, peak_bytes = time.perf_counter() - began, _peak_bytes() - before
    weight_bytes = sum(values.nbytes for values in half.model.parameters())
    row: dict[str, Any] = {
        "file": path.name,
        "stored": half.stored,
        "bfloat16": {"load_s": load_s, "weight_bytes": weight_bytes, "peak_bytes": peak_bytes},
    }
    if half.model.num_parameters() > COMPARED:
        return row
    del half
    model = dequantised(path, torch.float32)
    tokens = torch.tensor([gguf_tokenizer(path)(text)["input_ids"][:count]])
    ours = laws(model.model, tokens)
    row |= {"tokens": tokens.shape[1], "as_stored": distance(ours, laws(GgufModel(path, "cpu"), tokens))}
    if model.model.num_parameters() <= WRITTEN and model.model.config.model_type == "llama":
        with TemporaryDirectory() as folder:
            row["float32_file"] = distance(ours, laws(_in_float32(model.model, path, Path(folder)), tokens))
    return row


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text("utf-8")  # getrusage would count the parent's memory
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _in_float32(model: Any, path: Path, folder: Path) -> GgufModel:
    """The model in a float32 file, with the built-in pair's tokenizer: it is asked for token ids alone."""
    tokenizer = AutoTokenizer.from_pretrained(builtin_paths()["draft"])
    write_gguf(
        model, tokenizer, folder / "f32.gguf", "f32", name=path.stem, vocab_size=model.config.vocab_size, eos_ids=[0],
        fingerprint="", tell=lambda done, wanted: None,
    )  # fmt: skip
    return GgufModel(folder / "f32.gguf", "cpu")


def laws(model: Any, tokens: Tensor) -> Tensor:
    """log p ``[n, vocab]`` after each token."""
    logits = make_runner(model, max_len=tokens.shape[1] + 1).extend(tokens).logits
    assert logits is not None
    return logits[0].double().log_softmax(-1)


def distance(ours: Tensor, theirs: Tensor) -> dict[str, float]:
    """How far two runners' laws are apart."""
    apart, drifts = (ours - theirs).abs(), (ours.exp() - theirs.exp()).abs().sum(-1) / 2
    return {
        "max_log_p": apart.max().item(),
        "mean_log_p": apart.mean().item(),
        "mean_drift": drifts.mean().item(),
        "max_drift": drifts.max().item(),
        "same_first": (ours.argmax(-1) == theirs.argmax(-1)).double().mean().item(),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    head = (
        "file | llama.cpp reads | max \\|Δ log p\\| | mean | mean drift | max drift | same first choice | "
        "bfloat16: load in s | weights | peak memory"
    )
    lines = []
    for row in rows:
        load = row["bfloat16"]
        sizes = [f"{load[key] / 2**30:.2f} GiB" for key in ("weight_bytes", "peak_bytes")]
        costs = [f"{load['load_s']:.1f}", *sizes]
        if "as_stored" not in row:
            lines.append(" | ".join([row["file"], row["stored"], *("–" * 5), *costs]))
        for key, name in (("as_stored", row["stored"]), ("float32_file", "float32 file")):
            if found := row.get(key):
                apart = [
                    f"{found[each]:.2g}" for each in ("max_log_p", "mean_log_p", "mean_drift", "max_drift")
                ]
                cells = [row["file"], name, *apart, f"{found['same_first']:.1%}", *costs]
                lines.append(" | ".join(cells))
                costs = ["", "", ""]
    return "\n".join(grid(head, lines))


def real_files() -> list[Path]:
    """The GGUF files of ``SPRINTER_MODELS``; with ``--smoke`` a file of the built-in draft."""
    if SMOKE:
        return [convert_gguf(builtin_paths()["draft"], scratch("models") / "draft.gguf", "q8_0")]
    return sorted(models_folder().glob("*.gguf"))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=sized(200, 12))
    parser.add_argument("--models", type=Path, nargs="+", metavar="FILE")
    args = parser.parse_args()
    text = " ".join(heldout_prompts(args.data, sized(24, 4)))
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        rows = [
            pool.submit(compare, path, text, args.tokens).result() for path in args.models or real_files()
        ]
    results = {"benchmark": NAME, "command": command(), "environment": environment(), "rows": rows}
    write_results(NAME, results, table(rows))


if __name__ == "__main__":
    main()

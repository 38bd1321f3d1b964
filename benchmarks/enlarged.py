"""A model of the same law at a greater cost: the built-in target made as large as wanted, without training.

New layers write nothing (their output projections are zero) and new units of an MLP reach nothing (their columns of the
down projection are zero), so every logit stays, while a pass reads and multiplies all weights of the larger model. What
is measured with it is what the built-in pair would do if its target cost as much as a model of that size; its texts,
drifts and accepted shares are the built-in pair's own. It is not a better model.

Run: python benchmarks/enlarged.py OUT [--model DIR] [--layers 16] [--intermediate 2496]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # find `benchmarks`; no file of this folder hides a package
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

from benchmarks.common import option_parser, print_written
from benchmarks.smoke import SMOKE, scratch, sized
from sprinter.models.pair import builtin_paths, load_models

LAYERS, INTERMEDIATE = 16, 2496
"""Of the built-in target these make a model of 16.8 M parameters in place of 2.95 M."""


def enlarge(model: PreTrainedModel, layers: int, intermediate: int) -> LlamaForCausalLM:
    """The same law with more layers and wider MLPs; the model that is given is left alone.

    Args:
        model: a Llama.
        layers: in all, at least as many as it has.
        intermediate: width of every MLP, at least its own.

    Raises:
        ValueError: another architecture, or a size that would make it smaller.
    """
    config: Any = model.config
    if config.model_type != "llama":
        raise ValueError(f"only a Llama can be enlarged, not {config.model_type}")
    old_layers, old_width = config.num_hidden_layers, config.intermediate_size
    if layers < old_layers or intermediate < old_width:
        raise ValueError(
            f"layers={layers} and intermediate={intermediate} must be at least {old_layers} and {old_width}"
        )
    new = type(config)(
        **(config.to_dict() | {"num_hidden_layers": layers, "intermediate_size": intermediate})
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        larger = LlamaForCausalLM(new).to(device=model.device, dtype=model.dtype).eval()
    ours, theirs = dict(larger.named_parameters()), dict(model.named_parameters())
    with torch.no_grad():
        for name, weights in ours.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "o_proj.bias", "down_proj.bias")):
                weights.zero_()  # what is new says nothing; the rest of it is random, as numbers of any model
            if name in theirs:
                given = theirs[name]
                weights[tuple(slice(size) for size in given.shape)] = given
    larger.generation_config = model.generation_config
    return larger


def write_enlarged(
    source: str | Path, out: Path, layers: int = LAYERS, intermediate: int = INTERMEDIATE
) -> int:
    """The enlarged model of a directory as another directory, float32, with its tokenizer; its parameters."""
    model = load_models(source, device="cpu", dtype="float32").target.module("enlarging")
    larger = enlarge(model, layers, intermediate)
    larger.save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)
    return sum(weights.numel() for weights in larger.parameters())


def main() -> None:
    parser = option_parser(__doc__, data=False)
    parser.add_argument(
        "out",
        type=Path,
        help="the new directory",
        nargs="?" if SMOKE else None,
        default=scratch("enlarged") if SMOKE else None,
    )
    parser.add_argument("--model", type=Path, default=builtin_paths()["target"])
    parser.add_argument("--layers", type=int, default=sized(LAYERS, 13))
    parser.add_argument("--intermediate", type=int, default=sized(INTERMEDIATE, 512))
    args = parser.parse_args()
    size = write_enlarged(args.model, args.out, args.layers, args.intermediate)
    print(
        f"{args.out}: {size / 1e6:.1f} M parameters, {args.layers} layers, MLPs of {args.intermediate}",
        file=sys.stderr,
    )
    print_written("enlarged", args.out)


if __name__ == "__main__":
    main()

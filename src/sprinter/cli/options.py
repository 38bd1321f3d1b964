"""Command-line options for loading models; ``Loading`` adds them to every command that loads models."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

__all__ = [
    "CompileOption",
    "DeviceMapOption",
    "DeviceOption",
    "DraftDtypeOption",
    "DraftOption",
    "DraftRevisionOption",
    "DraftRunnerOption",
    "DraftVocabularyOption",
    "DtypeOption",
    "GateOption",
    "HeadsOption",
    "ProfileOption",
    "RevisionOption",
    "RunnerOption",
    "TargetOption",
    "TokenizerOption",
    "TrustRemoteCodeOption",
]

TargetOption = Annotated[
    str | None,
    typer.Option(help="Directory, hub id or GGUF file of the target.", show_default="built-in pair"),
]
DraftOption = Annotated[
    str | None,
    typer.Option(help="Directory, hub id or GGUF file of the draft."),
]
GateOption = Annotated[
    str | None,
    typer.Option(help="Directory or hub id of a gate made for this draft."),
]
HeadsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Directory or hub id of a head for specdec++, disco, judge or diversed, or of heads that draft; "
        "may be repeated.",
        show_default=False,
    ),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        help="Profile of this pair by 'sprinter tune': the fastest setting within --budget, or exact."
    ),
]
TokenizerOption = Annotated[str | None, typer.Option(help="Tokenizer, if not the target's own.")]
RevisionOption = Annotated[
    str | None,
    typer.Option(help="Branch, tag or commit of the target on the hub."),
]
DraftRevisionOption = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of the draft on the hub.")
]
DraftVocabularyOption = Annotated[
    str | None,
    typer.Option(
        help="Tokens that the draft, or heads, may write: a number, or a file by 'sprinter draft vocabulary'.",
        show_default="all",
    ),
]
TrustRemoteCodeOption = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run model code that comes with a checkpoint."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, mps, ...", show_default="the best there is"),
]
DeviceMapOption = Annotated[
    str | None,
    typer.Option(
        help="auto, balanced, ...: spread large models over devices (accelerate), instead of --device."
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16, ...; int8; on a CPU int4 or gguf; with --runner llamacpp float32, float16 or q8_0.",
        show_default="by device",
    ),
]
DraftDtypeOption = Annotated[
    str | None,
    typer.Option(help="Of the draft, where it is to differ.", show_default="as --dtype"),
]
CompileOption = Annotated[
    bool | None,
    typer.Option(
        "--compile/--no-compile",
        help="Have our kernels run forward passes on a CPU (seconds to compile, once), CUDA graphs on a GPU.",
        show_default="where it is free",
    ),
]
RunnerOption = Annotated[
    Literal["auto", "torch", "llamacpp"],
    typer.Option(
        help="auto: for GGUF files what 'doctor --probe' found to be fastest here, else our kernels on a CPU, else "
        "llama.cpp. torch: PyTorch, GGUF files are dequantised. llamacpp: other models are converted once, and cached."
    ),
]
DraftRunnerOption = Annotated[
    Literal["auto", "torch", "llamacpp"] | None,
    typer.Option(help="Of the draft, where it is to differ.", show_default="as --runner"),
]

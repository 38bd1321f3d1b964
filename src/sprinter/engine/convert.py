"""One model from a directory or the hub into a GGUF file that its gates still know."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sprinter.errors import UserError
from sprinter.heads.head import weights_fingerprint
from sprinter.models.gguf_write import write_gguf
from sprinter.models.pair import load_models

__all__ = ["convert_gguf"]


def convert_gguf(
    source: str | Path,
    out: str | Path,
    dtype: str = "f16",
    tell: Callable[[int, int], None] = lambda done, wanted: None,
) -> Path:
    """Write a Llama-architecture model with a byte-level BPE tokenizer as one GGUF file.

    Args:
        source: directory or hub id.
        out: the file, named ``*.gguf``; one that is there is replaced when the new one is whole.
        dtype: of the matrices: "f32", "f16" or "q8_0".
        tell: called with (tensors written, tensors in all).

    Raises:
        UserError: another architecture or tokenizer, a wrong name, the package ``gguf`` missing, ...
    """
    path = Path(out).expanduser()
    if path.suffix != ".gguf":
        raise UserError(f"the new file {out} must end in .gguf, as it is told by its name: rename it")
    models = load_models(source, device="cpu", dtype="float32")
    model = models.target.module("a conversion")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder '{path.parent}' ({error.strerror}): give another") from error
    write_gguf(models, path, dtype, weights_fingerprint(model), tell)
    return path

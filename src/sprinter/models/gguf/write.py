"""Writes a Llama-architecture model as a GGUF file that llama.cpp and this package can read.

As the GGUF specification demands, rows of Q and K are stored in pairs (x_0, x_d/2), (x_1, x_d/2+1), ..., because the
rotary embedding of llama.cpp rotates neighbours where that of transformers rotates halves. Norms and biases stay
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sprinter.errors import UserError
from sprinter.models.gguf.config import llama3_factors
from sprinter.models.gguf.library import gguf_package
from sprinter.models.gguf.load import EOS_KEY, FINGERPRINT_KEY
from sprinter.models.gguf.vocabulary import add_vocabulary
from sprinter.models.reduced_vocab import CUT_TYPE

__all__ = ["DTYPES", "write_gguf"]

DTYPES = ("f32", "f16", "q8_0")

_BLOCK = 32  # numbers in a block of Q8_0


def write_gguf(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    path: Path,
    dtype: str,
    *,
    name: str,
    vocab_size: int,
    eos_ids: Sequence[int],
    fingerprint: str,
    tell: Callable[[int, int], None],
) -> None:
    """Write a model and its tokenizer as one file, atomically.

    Args:
        model: a loaded Llama in float32.
        tokenizer: a byte-level BPE.
        path: the new file, in an existing folder.
        dtype: storage type of the matrices, one of ``DTYPES``. With "q8_0" a matrix whose row length is not a multiple
            of 32 is stored as "f16".
        name: directory or hub id of the model; its last part is the model's name in the file.
        vocab_size: last axis of its logits.
        eos_ids: token ids that end a text.
        fingerprint: ``weights_fingerprint`` of the model, stored in the file so that its gates fit.
        tell: progress callback, called with (tensors stored, number of tensors).

    Raises:
        UserError: an unsupported architecture or tokenizer, or a full disk.
    """
    config: Any = model.config
    if why := _why_not(config):
        raise UserError(f"{name} cannot be written as GGUF: {why}")
    gguf = gguf_package()
    if dtype not in DTYPES:
        raise UserError(f"there is no dtype {dtype!r} for a GGUF file: use {', '.join(DTYPES)}")
    part = path.with_name(path.name + ".part")
    writer = gguf.GGUFWriter(part, "llama")
    try:
        _add_sizes(gguf, writer, config, dtype)
        writer.add_name(Path(name).name)
        writer.add_string(FINGERPRINT_KEY, fingerprint)
        writer.add_string(EOS_KEY, ",".join(map(str, eos_ids)))
        add_vocabulary(writer, tokenizer, name, vocab_size)
        _add_tensors(gguf, writer, model, dtype, tell)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        part.replace(path)
    except OSError as error:
        raise UserError(f"cannot write '{path}' ({error.strerror}): free it or give another") from error
    finally:
        with suppress(OSError):  # of an incomplete file
            writer.close()
        part.unlink(missing_ok=True)


def _why_not(config: Any) -> str | None:
    if config.model_type == CUT_TYPE:
        return "its vocabulary is cut, which GGUF has no map for; distil it without --vocabulary"
    if config.model_type != "llama":
        return f"its architecture is {config.model_type}, and only llama can be converted; use llama.cpp's converter"
    if (kind := config.rope_parameters.get("rope_type", "default")) not in ("default", "linear", "llama3"):
        return f"its positions are scaled by {kind}, which is not supported here; use llama.cpp's converter"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, and llama.cpp's llama knows silu alone"
    return None


def _add_sizes(gguf: Any, writer: Any, config: Any, dtype: str) -> None:
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    types = gguf.LlamaFileType
    writer.add_file_type({"f32": types.ALL_F32, "f16": types.MOSTLY_F16, "q8_0": types.MOSTLY_Q8_0}[dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])


def _add_tensors(gguf: Any, writer: Any, model: Any, dtype: str, tell: Callable[[int, int], None]) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    tensors = list(_tensors(model, names))
    for i, (name, tensor) in enumerate(tensors):
        kind, numbers = _kind(gguf, tensor, dtype), tensor.float().contiguous().numpy()
        writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        tell(i + 1, len(tensors))


def _tensors(model: Any, names: Any) -> Iterator[tuple[str, Tensor]]:
    """All weights under GGUF's names, with Q and K permuted. Tied embeddings appear once."""
    config = model.config
    for name, values in model.named_parameters():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise UserError(f"its weight {name} has no place in a llama GGUF file: use llama.cpp's converter")
        tensor = values.detach()
        if ".q_proj." in name:
            tensor = _in_pairs(tensor, config.num_attention_heads)
        elif ".k_proj." in name:
            tensor = _in_pairs(tensor, config.num_key_value_heads)
        yield found, tensor
    if config.rope_parameters.get("rope_type") == "llama3":
        head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        yield "rope_freqs.weight", llama3_factors(config.rope_parameters, head_dim)


def _in_pairs(rows: Tensor, heads: int) -> Tensor:
    """Permute the rows of each head from (first halves, second halves) to (first, second), (first, second), ..."""
    paired: Tensor = rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
    return paired


def _kind(gguf: Any, tensor: Tensor, dtype: str) -> Any:
    kinds = gguf.GGMLQuantizationType
    if tensor.dim() < 2 or dtype == "f32":
        return kinds.F32
    return kinds.Q8_0 if dtype == "q8_0" and tensor.shape[-1] % _BLOCK == 0 else kinds.F16

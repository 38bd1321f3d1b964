"""How the products of a layer are split among the programs of a kernel: by the shape of the matrix alone.

A plan must not depend on the number of tokens, or a token's sums would. One size of block serves all matrices; it was
found by a trial on an H100 that is not kept.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

__all__ = [
    "CHUNK",
    "COLUMNS",
    "LARGEST",
    "MOST",
    "QUERIES",
    "ROWS",
    "WARPS",
    "DeviceFacts",
    "Plan",
    "attention_chunks",
    "device_facts",
    "product_plan",
    "stages",
    "tokens_block",
]

MOST = 64
"""Maximum number of tokens of a forward pass, rows times tokens, whose products are the kernels' own."""
LARGEST = 2048
"""Maximum number of tokens of a forward pass that the kernels serve; attention keeps a result of each for each chunk of
the keys."""
ROWS, COLUMNS, WARPS = 64, 128, 4
"""Of a matrix, in a block of a product, and the warps of a program."""
QUERIES = 16
"""Queries in a program of attention."""
CHUNK = 128
"""Keys in a program of attention."""
_LEAST = 384  # columns in a part of a product
_MOST_SPLITS, _MOST_STAGES = 8, 5


class DeviceFacts(NamedTuple):
    """Multiprocessors of a GPU, and the shared memory that a program can have, in bytes."""

    processors: int
    memory: int


@lru_cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Of a device; where kernels are interpreted, as on a small GPU."""
    if device.type != "cuda":
        return DeviceFacts(8, 99 << 10)
    facts: Any = torch.cuda.get_device_properties(device)
    memory = getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_block)
    return DeviceFacts(facts.multi_processor_count, memory)


def tokens_block(tokens: int) -> int:
    """Tokens of a product's block; 16 is the smallest that tensor cores take."""
    return max(16, 1 << (tokens - 1).bit_length())


def attention_chunks(keys: int) -> int:
    """Number of programs that share the keys."""
    return -(-keys // CHUNK)


class Plan(NamedTuple):
    """Number of parts that the columns of a product are split into, and columns of a part."""

    splits: int
    each: int


@lru_cache
def product_plan(rows: int, columns: int, processors: int) -> Plan:
    """For a matrix ``[rows, columns]``: one program for each multiprocessor, as far as parts are not too small."""
    programs, splits = -(-rows // ROWS), 1
    while (
        2 * programs * splits <= processors and columns >= 2 * splits * _LEAST and 2 * splits <= _MOST_SPLITS
    ):
        splits *= 2
    each = -(-columns // (splits * COLUMNS)) * COLUMNS
    return Plan(-(-columns // each), each)


def stages(tokens: int, weight_bytes: int, state_bytes: int, memory: int) -> int:
    """Blocks of a product that are on their way at once: as many as shared memory holds. It changes no result."""
    block = COLUMNS * (ROWS * weight_bytes + tokens_block(tokens) * state_bytes)
    return max(1, min(_MOST_STAGES, memory * 9 // 10 // block))

"""The prefix cache over llama.cpp's rows."""

from pathlib import Path
from typing import Any

import pytest
from tests.engine.test_prefix import BLOCK, DEFAULT, OFF, SYSTEM, PrefixCache, chat, facts
from tests.models.gguf_files import NO_GGUF, NO_LLAMA, converted, saved_llama

import sprinter
from sprinter.engine import pool, prefix

pytest.importorskip("gguf", reason=NO_GGUF)
pytest.importorskip("llama_cpp", reason=NO_LLAMA)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "BLOCK", BLOCK)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("llamas")
    saved_llama(root / "target", 1)
    saved_llama(root / "draft", 2, num_hidden_layers=1)
    return converted(root / "target"), converted(root / "draft")


def pair_of(paths: tuple[Path, Path], cache: PrefixCache) -> sprinter.Pair:
    return sprinter.load_pair(
        paths[0], draft=paths[1], prefix_cache_bytes=cache.max_bytes, prefix_reuse=cache.reuse
    )


@pytest.mark.parametrize("grain", [8, 256])
def test_texts_of_a_conversation_are_the_same_to_the_bit(
    paths: tuple[Path, Path], grain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where every turn needs a longer context than the one before."""
    monkeypatch.setattr(pool, "_GRAIN", grain)
    here, fresh = pair_of(paths, DEFAULT), pair_of(paths, OFF)
    for method in ("autoregressive", "speculative(gamma=3)", "lookup(n=2, gamma=4)"):
        made = list(chat(here, method))
        assert list(map(facts, made)) == list(map(facts, chat(fresh, method))), method
        reused = [out.stats.cached_tokens for out in made[1:]]
        assert reused == [(out.prompt_tokens - 1) // BLOCK * BLOCK for out in made[:-1]], method
        here.clear_prefix_cache()


def test_a_conversation_that_branches_keeps_both_ends(paths: tuple[Path, Path]) -> None:
    here, fresh = pair_of(paths, DEFAULT), pair_of(paths, OFF)
    prompts = [[*SYSTEM, *([end] * 6)] for end in (3, 4)]
    reused = []
    for prompt in (*prompts, *prompts):
        out = here.generate(prompt, max_new_tokens=4)
        assert facts(out) == facts(fresh.generate(prompt, max_new_tokens=4))
        reused.append(out.stats.cached_tokens)
    assert reused == [0, 8, 16, 16]


def test_a_batch_reads_a_common_prefix_once(paths: tuple[Path, Path]) -> None:
    here, fresh = pair_of(paths, DEFAULT), pair_of(paths, OFF)
    prompts = [[*SYSTEM, *SYSTEM, end] for end in range(3, 9)]
    options: dict[str, Any] = {"method": "speculative(gamma=3)", "max_new_tokens": 8, "temperature": 0.0}
    wanted = [out.text for out in fresh.generate_batch(prompts, **options)]
    for least in (0, 20):  # the second batch finds the rows of the first
        outs = here.generate_batch(prompts, **options)
        assert [out.text for out in outs] == wanted
        reused = sorted(out.stats.cached_tokens for out in outs)
        assert reused[0] == least and reused[1] >= 20


def test_rows_are_clean_after_a_cancelled_request(paths: tuple[Path, Path]) -> None:
    """A text that is closed before its first target call: nobody has seen whether its cells hold NaN."""
    here, fresh = pair_of(paths, DEFAULT), pair_of(paths, OFF)
    with here.stream(SYSTEM, max_new_tokens=9, method="draft-only") as stream:
        stream._step(), stream._step()
    out = here.generate(SYSTEM, max_new_tokens=9)
    assert facts(out) == facts(fresh.generate(SYSTEM, max_new_tokens=9))
    assert not here._runtime.targets._free[0].may_hold_nan

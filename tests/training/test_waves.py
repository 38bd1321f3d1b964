"""Texts that are written in waves, as on a GPU; here on the CPU."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sprinter
from sprinter.cli import main
from sprinter.errors import SprinterError
from sprinter.training.drafts import data as texts_of
from sprinter.training.drafts.settings import TextSettings
from sprinter.training.drafts.waves import WaveWriter

PROMPTS = [[5], [9, 4, 31, 7], [44, 12], [3, 3, 3, 8, 21, 6], [17, 30, 2]]


def writer(pair: sprinter.Pair, **settings: object) -> WaveWriter:
    own = {"rows": 3, "prompt_tokens": 8, "new_tokens": 12, "temperature": 0.0, "top": 5} | settings
    return WaveWriter(pair.models.target, pair.models.vocab_size, **own)  # type: ignore[arg-type]


def law_after(pair: sprinter.Pair, ids: Tensor) -> Tensor:
    model = pair.models.target.module("a test")
    with torch.no_grad():
        found: Tensor = model(ids[None]).logits[0, :, : pair.models.vocab_size].softmax(-1)
    return found


def test_waves_write_what_plain_decoding_writes(pair: sprinter.Pair) -> None:
    """Two waves, the second one smaller, and texts that end."""
    plain = pair.generate_batch(PROMPTS, method="autoregressive", max_new_tokens=12, temperature=0.0)
    wanted = [[token.id for token in one.tokens] for one in plain]
    end = wanted[1][4]
    found = writer(pair).write(PROMPTS, range(5))
    assert [one.ids.tolist() for one in found] == wanted
    for prompt, one in zip(PROMPTS, found, strict=True):
        law = law_after(pair, torch.tensor([*prompt, *one.ids.tolist()]))[len(prompt) - 1 : -1]
        assert one.top_ids.shape == one.top_probs.shape == (len(one.ids), 5)
        torch.testing.assert_close(one.top_probs, law.topk(5).values, atol=1e-3, rtol=1e-3)
        assert torch.equal(one.top_ids[:, 0], one.ids), "greedy tokens lead their laws"
    short = [
        one.ids.tolist()
        for one in writer(pair, ends=[*pair.models.target.eos_ids, end]).write(PROMPTS, range(5))
    ]
    assert short == [ids[: ids.index(end) + 1] if end in ids else ids for ids in wanted]
    assert len(short[1]) < 12


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_text_is_the_one_of_its_seed(temperature: float, pair: sprinter.Pair) -> None:
    seeds = [11, 3, 3, 8, 700]
    plain = pair.generate_batch(
        PROMPTS, method="autoregressive", max_new_tokens=12, temperature=temperature, seed=seeds
    )
    for rows in (1, 3, 8):
        found = writer(pair, rows=rows, temperature=temperature).write(PROMPTS, seeds)
        assert [one.ids.tolist() for one in found] == [[token.id for token in one.tokens] for one in plain]


def test_waves_draw_from_the_law_at_a_temperature(pair: sprinter.Pair) -> None:
    """The first token of 3,000 texts: chi-square with the ten most probable tokens as cells, bound at 1e-4."""
    prompt = [9, 4, 31, 7]
    count, temperature = 3000, 0.7
    made = writer(pair, rows=500, new_tokens=1, temperature=temperature).write([prompt] * count, range(count))
    seen = Counter(int(one.ids[0]) for one in made)
    law = law_after(pair, torch.tensor(prompt))[-1].log().div(temperature).softmax(-1)
    top = law.topk(10)
    cells = [*((float(p), seen[int(i)]) for p, i in zip(top.values, top.indices, strict=True))]
    cells.append((1 - sum(p for p, _ in cells), count - sum(n for _, n in cells)))
    value = sum((n - count * p) ** 2 / (count * p) for p, n in cells if p > 1e-4)
    assert value < 35.6, value  # of chi-square with 10 degrees of freedom


def test_a_target_that_gives_nan_is_refused(pair: sprinter.Pair) -> None:
    made = writer(pair)
    with torch.no_grad():
        model = copy.deepcopy(pair.models.target.module("a test"))
        model.get_output_embeddings().weight[3] = torch.nan  # type: ignore[no-untyped-call]
    broken = WaveWriter(
        replace(pair.models.target, model=model), pair.models.vocab_size, rows=3, prompt_tokens=8, new_tokens=4,
        temperature=1.0, top=5,
    )  # fmt: skip
    with pytest.raises(SprinterError, match="the target model's logits are NaN at position 0"):
        broken.write(PROMPTS, range(5))
    assert len(made.write(PROMPTS, range(5))) == 5


def test_shards_that_are_written_together_are_those_of_single_ones(
    pair: sprinter.Pair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: three shards in one go; a shard that is damaged is written again, alone, and the others are read."""
    monkeypatch.setattr(texts_of, "_WAVE", 21)

    class OnGpu(texts_of._Writer):
        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            self._on_gpu, self.shards = True, texts_of._WAVE // 7

    settings = TextSettings(new_tokens=10, prompt_tokens=16, shard=7, held_out=0.2, top=24)
    alone = texts_of.write_texts(pair, [data], tmp_path / "alone", settings)
    monkeypatch.setattr(texts_of, "_Writer", OnGpu)
    tokens: list[int] = []
    together = texts_of.write_texts(
        pair, [data], tmp_path / "waves", settings, lambda p: tokens.append(p.tokens)
    )
    assert [one.ids.tolist() for one in together.texts] == [one.ids.tolist() for one in alone.texts]
    assert tokens[0] == tokens[2] < tokens[3] == tokens[4], "three shards, then the last two"
    path = tmp_path / "waves" / "texts-00001.safetensors"
    path.write_bytes(b"half")
    tokens.clear()
    again = texts_of.write_texts(
        pair, [data], tmp_path / "waves", settings, lambda p: tokens.append(p.tokens)
    )
    assert tokens[0] == 0 < tokens[1] == tokens[-1] and again.info["hash"] == together.info["hash"]
    # a folder of one device is read on another
    monkeypatch.undo()
    tokens.clear()
    texts_of.write_texts(pair, [data], tmp_path / "waves", settings, lambda p: tokens.append(p.tokens))
    assert tokens[-1] == 0


@pytest.mark.gpu
def test_texts_of_a_gpu_resume(target: Path, data: Path, tmp_path: Path) -> None:
    """Texts have the target's laws, in captured passes; a damaged shard is drawn again, the others are read."""
    cuda_pair = sprinter.load_pair(target, device="cuda", dtype="float32")
    settings = TextSettings(new_tokens=10, prompt_tokens=16, shard=12, held_out=0.2, top=24)
    tokens: list[int] = []
    written = texts_of.write_texts(cuda_pair, [data], tmp_path, settings)
    for one in written.texts[:4]:
        law = law_after(cuda_pair, one.ids.cuda())[one.prompt - 1 : -1].cpu()
        torch.testing.assert_close(one.top_probs, law.topk(24).values, atol=3e-3, rtol=3e-3)
    (tmp_path / "texts-00001.safetensors").write_bytes(b"half")
    again = texts_of.write_texts(cuda_pair, [data], tmp_path, settings, lambda p: tokens.append(p.tokens))
    assert tokens[0] == 0 < tokens[1] == tokens[-1]
    for one, other in zip(again.texts[:12], written.texts[:12], strict=True):
        assert torch.equal(one.ids, other.ids)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "glide", "draft"])
def test_drafters_are_trained_on_a_gpu(kind: str, target: Path, data: Path, tmp_path: Path) -> None:
    """By the command, beside a target in bfloat16; losses fall, and the folder loads beside a target on the CPU."""
    out = tmp_path / "made"
    words = ["distill", "--layers", "1"] if kind == "draft" else ["train", "--kind", kind, "--no-keep-states"]
    words += ["--target", str(target), "--device", "cuda", "--dtype", "bfloat16", "--data", str(data)]
    words += [
        "--max-new-tokens",
        "10",
        "--prompt-tokens",
        "16",
        "--steps",
        "30",
        "--tokens",
        "512",
        "--precision",
        "bfloat16",
    ]
    assert main(["draft", *words, "--checkpoint", "10", "--out", str(out)]) == 0
    history = json.loads((out / "draft.json").read_text())["training"]["history"]
    assert history[-1]["held_out"]["kl"] < history[0]["held_out"]["kl"], "of a batch it goes up and down"
    parts = {"draft": out} if kind == "draft" else {"heads": [out]}
    pair = sprinter.load_pair(target, device="cpu", dtype="float32", **parts)  # type: ignore[arg-type]
    method = "speculative(gamma=2)" if kind == "draft" else "heads(gamma=2)"
    text = pair.generate("the thing 3", method=method, max_new_tokens=12, temperature=0.0)
    plain = pair.generate("the thing 3", method="autoregressive", max_new_tokens=12, temperature=0.0)
    assert [one.id for one in text.tokens] == [one.id for one in plain.tokens]

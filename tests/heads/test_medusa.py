"""Medusa's heads: the law of each, their files, the published layout, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import VOCAB, tiny, word_tokenizer

import sprinter
from sprinter.errors import UserError
from sprinter.fingerprint import weights_fingerprint
from sprinter.heads.drafting import save_heads
from sprinter.heads.load import load_any_head
from sprinter.heads.medusa import WEIGHTS, MedusaHeads

SIZE = 32


def medusa(
    seed: int = 0,
    *,
    hidden: int = SIZE,
    vocab: int = VOCAB,
    count: int = 3,
    blocks: int = 1,
    shared: bool = False,
    **more: object,
) -> MedusaHeads:
    """Random heads on the tiny models."""
    heads = MedusaHeads(hidden, vocab, count, blocks, shared, **more)
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in heads.parameters():
            value.copy_(torch.randn(value.shape, generator=chance) * 0.3)
    return heads


@pytest.mark.parametrize("shared", [False, True])
def test_a_head_is_residual_blocks_and_an_output_layer(shared: bool) -> None:
    heads, target = medusa(blocks=2, shared=shared), tiny("llama")
    heads.attach(target, "target", SIZE, VOCAB)
    state = torch.randn(1, SIZE)
    for number, own in enumerate(heads.heads):
        x = state
        for block in own[:2]:  # type: ignore[index]
            y = x @ block.linear.weight.T + block.linear.bias
            x = x + y / (1 + (-y).exp())
        output = target.get_output_embeddings().weight if shared else own[2].weight  # type: ignore[index, operator]
        torch.testing.assert_close(heads.head_logits(number, state), x @ output.T)
    text = heads.begin()
    text.read([5, 6, 7], {-1: torch.cat([torch.zeros(1, SIZE), state])})
    found = text.logits([(3, 4), (3, 5)])
    assert found is not None and torch.equal(found, heads.head_logits(2, state)), (
        "the last state, the third head"
    )
    assert text.logits([(1, 2, 3)]) is None and text.steps == text.tokens == 1
    assert heads.flops == 2 * (2 * SIZE * SIZE + SIZE * VOCAB)


def test_files(tmp_path: Path) -> None:
    heads = medusa(
        target_id="org/target", target_fingerprint="f", accuracies=((0.5, 0.25), (0.25, 0.1), (0.1, 0.1))
    )
    save_heads(heads, tmp_path, "the card", {"more": 1})
    assert set(load_file(tmp_path / WEIGHTS)) == {
        *(f"{i}.0.linear.{name}" for i in range(3) for name in ("weight", "bias")), *(f"{i}.1.weight" for i in range(3))
    }  # fmt: skip
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 1)
    assert config["base_model_name_or_path"] == "org/target"
    again = load_any_head(tmp_path)
    assert isinstance(again, MedusaHeads) and again.accuracies == heads.accuracies and config["more"] == 1
    assert (again.target_id, again.target_fingerprint, again.id) == ("org/target", "f", str(tmp_path))
    for own, other in zip(heads.parameters(), again.parameters(), strict=True):
        assert torch.equal(own.bfloat16().float(), other)
    assert again.fingerprint != heads.fingerprint == medusa().fingerprint, "of the weights alone"


def published(folder: Path, heads: MedusaHeads, name: str = WEIGHTS) -> Path:
    """Files as the authors of Medusa lay them out."""
    folder.mkdir()
    config = {"medusa_num_heads": heads.count, "medusa_num_layers": 1, "base_model_name_or_path": "org/base"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"medusa_head.{key}": value for key, value in heads.heads.state_dict().items()}, folder / name)
    return folder


def test_the_published_layout_is_read(tmp_path: Path) -> None:
    heads = medusa()
    target = tiny("llama")
    for number, name in enumerate((WEIGHTS, "model.safetensors")):
        folder = published(tmp_path / str(number), heads, name)
        pair = sprinter.load_pair(target, tokenizer=word_tokenizer(), heads=[folder], compile=False)
        assert pair.drafting is not None and pair.drafting.target_id == "org/base"
        assert "medusa" in repr(pair)
        out = pair.generate([3, 1, 4], max_new_tokens=8, temperature=0)
        assert out.method == "heads(gamma=4)" and out.stats.drafted > 0
        assert out.models["heads"] == [{"kind": "medusa", "id": str(folder), "revision": None}]


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    folder = published(tmp_path / "heads", medusa())
    (folder / WEIGHTS).unlink()
    (folder / "medusa_lm_head.pt").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(UserError, match=r"is a pickle.*convert it once with python -c .*s\.save_file"):
        load_any_head(folder)
    (folder / "medusa_lm_head.pt").unlink()
    with pytest.raises(UserError, match=r"has no weights: it needs medusa_lm_head.safetensors"):
        load_any_head(folder)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = published(tmp_path / "heads", medusa())
    state = load_file(folder / WEIGHTS)
    save_file({name: value for name, value in state.items() if "1.0" not in name}, folder / WEIGHTS)
    with pytest.raises(UserError, match=r"lack or misfit '1\.0\.linear\.bias'"):
        load_any_head(folder)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:200])
    with pytest.raises(UserError, match=r"cannot read .*copy or make the heads again"):
        load_any_head(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        load_any_head(folder)
    with pytest.raises(UserError, match="there is no"):
        load_any_head(tmp_path / "none")


def test_heads_of_another_target_are_refused() -> None:
    target = tiny("llama")

    def pair(*heads: MedusaHeads) -> sprinter.Pair:
        return sprinter.load_pair(target, tokenizer=word_tokenizer(), heads=heads, compile=False)

    pair(medusa(target_fingerprint=weights_fingerprint(target)))
    with pytest.raises(UserError, match=r"trained on another target \('b'\)"):
        pair(medusa(target_id="b", target_fingerprint="other"))
    with pytest.raises(UserError, match="for a target of hidden size 16"):
        pair(MedusaHeads(16, VOCAB))
    with pytest.raises(UserError, match="for a target of vocabulary 50"):
        pair(MedusaHeads(SIZE, 50))
    with pytest.raises(UserError, match="two sets of heads"):
        pair(medusa(), medusa())
    with pytest.raises(UserError, match="count=0 of Medusa's heads"):
        MedusaHeads(SIZE, VOCAB, 0)
    with pytest.raises(
        UserError, match="drafts with heads on the target, and this pair has none: give heads="
    ):
        pair().generate([1, 2], method="heads", max_new_tokens=2)
    with pytest.raises(
        UserError, match="tree=recorded is a tree that the accuracies of heads that draft choose"
    ):
        pair(medusa()).generate([1, 2], method="medusa", max_new_tokens=2)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("sprinter.heads.files.write_atomic", full)
    with pytest.raises(UserError, match=r"No space left on device.*run the same command again"):
        save_heads(medusa(), tmp_path, "")
    assert not (tmp_path / "config.json").exists()

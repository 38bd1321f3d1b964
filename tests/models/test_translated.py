"""Drafts whose vocabulary is not the target's: what they read, their laws, and exact methods with them."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.engine.joint_laws import distance, law_of_texts
from tests.engine.table_backend import TableModel
from tests.models.refused import refusal
from tests.models.tiny import fresh, save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import sprinter
from sprinter.cli import doctor, main
from sprinter.decode.enumerate import EnumeratedDraws
from sprinter.decode.spec import parse_method
from sprinter.engine import request
from sprinter.engine.executor import Executor
from sprinter.models.choose import make_runner
from sprinter.models.common_tokens import CommonTokens, words_of
from sprinter.models.translated import TranslatedModel
from sprinter.theory import recording

TARGET = {0: (False, b"a"), 1: (False, b"b"), 2: (False, b"ba")}  # no token of the draft is "ba"
DRAFT = {0: (False, b"c"), 1: (False, b"b"), 2: (False, b"x"), 3: (False, b"a")}
METHODS = (
    "speculative(gamma=3)", "svip(h=0.4)", "block(gamma=2)", "lookup(n=2, gamma=3)",
    "tree(expand=2, depth=2, nodes=3)", "specinfer(drafts=2, gamma=2)", "traversal(widths=2x1)",
)  # fmt: skip


def translated(context: int = 4096) -> TranslatedModel:
    inner = TableModel(4, 2)
    inner.context = context
    return TranslatedModel(
        inner, "toy", CommonTokens(TARGET, DRAFT), eos_ids=(), vocab_size=3, context=context, hidden_size=1,
        compile=False, weights="float64", size=16,
    )  # fmt: skip


def restricted(model: TranslatedModel, text: tuple[int, ...]) -> torch.Tensor:
    """Its law after a text, in the target's ids, from the table alone."""
    read = [own for token in text for own in {0: [3], 1: [1], 2: [1, 3]}[token]]
    inner = model.inner
    assert isinstance(inner, TableModel)
    law = torch.softmax(inner.logits(read), -1)[[3, 1]]
    return torch.cat([law / law.sum(), torch.zeros(1, dtype=law.dtype)])


def test_its_law_is_that_of_the_common_tokens() -> None:
    model = translated()
    runner = make_runner(model, max_len=16)
    text = (0, 2, 1, 2, 2, 0)
    step = runner.extend(torch.tensor([text[:4]]))
    assert step.logits is not None
    for at in range(4):
        wanted = restricted(model, text[: at + 1])
        assert torch.allclose(torch.softmax(step.logits[0, at], -1), wanted, atol=1e-12)
    runner.rewind([2])
    step = runner.extend(torch.tensor([[2, 0]]))
    assert step.logits is not None
    assert torch.allclose(torch.softmax(step.logits[0, 1], -1), restricted(model, (0, 2, 2, 0)), atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_exact_methods_keep_the_targets_law(name: str) -> None:
    """Every draw enumerated; each of the two would write tokens that the other lacks."""
    target, draft = TableModel(3, 1), translated()
    runners = [make_runner(model, max_len=24, leaves=4) for model in (target, draft)]
    found = law_of_texts(Executor(runners[0], runners[1], 3), {}, parse_method(name), 3, 2, EnumeratedDraws())
    wanted = Counter[tuple[int, ...]]()
    for made in product(range(3), repeat=3):
        text, chance = (0, 1, 0, 1, 0), 1.0
        for token in made:
            chance *= float(torch.softmax(target.logits(text), -1)[token])
            text = (*text, token)
        wanted[made] += chance
    assert distance(found, dict(wanted)) < 1e-9


def test_trees_of_any_tokens_are_read_along_their_paths() -> None:
    model = translated()
    runner = make_runner(model, max_len=32, leaves=4)
    runner.extend(torch.tensor([[0, 2]]))
    step = runner.extend(torch.tensor([[2, 1, 0, 2]]), parents=[[1, 1, 2, 3]])
    paths = [(0, 2, 2), (0, 2, 1), (0, 2, 2, 0), (0, 2, 1, 2)]
    assert step.logits is not None
    for at, path in enumerate(paths):
        assert torch.allclose(torch.softmax(step.logits[0, at], -1), restricted(model, path), atol=1e-12)
    runner.commit_path(0, [3, 5])
    assert runner.lengths == [4]
    step = runner.extend(torch.tensor([[0]]))
    assert step.logits is not None
    assert torch.allclose(
        torch.softmax(step.logits[0, 0], -1), restricted(model, (0, 2, 1, 2, 0)), atol=1e-12
    )
    runner.rewind([3])
    step = runner.extend(torch.tensor([[1]]))
    assert step.logits is not None
    assert torch.allclose(torch.softmax(step.logits[0, 0], -1), restricted(model, (0, 2, 1, 1)), atol=1e-12)


@pytest.mark.parametrize("target", [(), (0,)])
def test_the_draft_reads_its_own_beginning_of_a_text(target: tuple[int, ...]) -> None:
    model = translated()
    model.tokens.join_firsts(target, (2,))
    runner, inner = make_runner(model, max_len=16), model.inner
    assert isinstance(inner, TableModel)

    def wanted(*own: int) -> torch.Tensor:
        law = torch.softmax(inner.logits(own), -1)[[3, 1]]
        return torch.cat([law / law.sum(), torch.zeros(1, dtype=law.dtype)])

    begun = (2,) if target else (2, 3)  # the target's own beginning is the draft's, or nothing stands for it
    for length in (2, 0, 1):  # after rewinds too
        step = runner.extend(torch.tensor([[0, 1, 2][runner.lengths[0] :]]))
        assert step.logits is not None
        assert torch.allclose(torch.softmax(step.logits[0, -1], -1), wanted(*begun, 1, 1, 3), atol=1e-12)
        runner.rewind([length])


def test_beyond_its_context_the_draft_is_uniform_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    model = translated(context=6)
    runner = make_runner(model, max_len=6)
    step = runner.extend(torch.tensor([[2, 2, 1, 2, 0, 0]]))  # 2 + 2 + 1, then 2 more than there is room for
    assert step.logits is not None
    laws = torch.softmax(step.logits[0], -1)
    assert torch.allclose(laws[2], restricted(model, (2, 2, 1)), atol=1e-12)
    half = torch.tensor([0.5, 0.5, 0], dtype=laws.dtype)
    assert all(torch.allclose(law, half) for law in laws[3:])
    runner.rewind([3])
    step = runner.extend(torch.tensor([[0]]))
    assert step.logits is not None
    assert torch.allclose(torch.softmax(step.logits[0, 0], -1), restricted(model, (2, 2, 1, 0)), atol=1e-12)
    assert "longer than the context of the draft" in caplog.text


def test_rows_are_copied_and_adopted() -> None:
    model = translated()
    one, two = make_runner(model, max_len=16), make_runner(model, batch=2, max_len=16)
    one.extend(torch.tensor([[0, 2, 1]]))
    assert two.adopt(one, 2)
    two.copy(0, [1])
    step = two.extend(torch.tensor([[1], [2]]))
    assert step.logits is not None
    for row, token in enumerate((1, 2)):
        law = torch.softmax(step.logits[row, 0], -1)
        assert torch.allclose(law, restricted(model, (0, 2, token)), atol=1e-12)


# --- tokenizers -------------------------------------------------------------------------------------------------------
def byte_level(*merged: str, end: str = "<end>") -> PreTrainedTokenizerFast:
    """Bytes, and words of them; special tokens first, so that all ids differ."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {end: 0} | {letter: 1 + i for i, letter in enumerate(letters)}
    merges = []
    for word in merged:
        for stop in range(2, len(word) + 1):
            if word[:stop] not in vocabulary:
                vocabulary[word[:stop]] = len(vocabulary)
                merges.append((word[: stop - 1], word[stop - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(end, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def test_words_of_byte_level_and_sentencepiece_tokenizers() -> None:
    ours = byte_level("Ġthe", "ing")
    words = words_of(ours)
    assert words is not None
    text = " the thing é"
    ids = ours.encode(text)
    assert b"".join(words[one][1] for one in ids) == text.encode()
    assert words[0] == (True, b"<end>")
    pieces = Tokenizer(
        models.BPE(vocab={"<unk>": 0, "▁the": 1, "<0xC3>": 2, "▁": 3}, merges=[], byte_fallback=True)
    )
    pieces.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    found = words_of(PreTrainedTokenizerFast(tokenizer_object=pieces))
    assert found == {0: (False, b"<unk>"), 1: (False, b" the"), 2: (False, b"\xc3"), 3: (False, b" ")}
    common = CommonTokens(words, found)
    assert common.ids == {ours.convert_tokens_to_ids("Ġthe"): 1, ours.convert_tokens_to_ids("Ã"): 2,
                          ours.convert_tokens_to_ids("Ġ"): 3}  # fmt: skip
    plain = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    assert words_of(PreTrainedTokenizerFast(tokenizer_object=plain)) is None


def test_tokens_that_the_draft_lacks_are_read_as_its_longest_ones() -> None:
    ours, theirs = byte_level("Ġthere", "é"), byte_level("Ġthe", "re", end="<stop>")
    words, others = words_of(ours), words_of(theirs)
    assert words is not None and others is not None
    common = CommonTokens(words, others)
    token = ours.convert_tokens_to_ids("Ġthere")
    assert theirs.decode(common.read_as(token)) == " there"
    assert [others[one][1] for one in common.read_as(token)] == [b" the", b"re"]
    assert token not in common.ids and 0 not in common.ids
    common.join_ends((0,), (0,))
    assert common.ids[0] == 0 and common.read_as(0) == (0,)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("foreign")
    both = byte_level("Ġthe", "Ġlong"), byte_level("ing", "Ġth", "at", end="<stop>")
    made = []
    for name, tokenizer in zip(("target", "draft"), both, strict=True):
        model = fresh("llama")
        model.resize_token_embeddings(len(tokenizer))
        model.config.eos_token_id = model.generation_config.eos_token_id = 0
        made.append(save(root / name, model, tokenizer))
    return made[0], made[1]


def test_a_pair_of_two_vocabularies(folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    pair = sprinter.load_pair(*folders, device="cpu", dtype="float32")
    assert "different vocabularies: 258 tokens in common" in caplog.text
    prompts = [f"the thing that is {number} long" for number in range(6)]
    plain = pair.generate_batch(prompts, method="autoregressive", temperature=0.0, max_new_tokens=24)
    for method in ("speculative(gamma=3)", "svip", "tree(nodes=6)"):
        made = pair.generate_batch(prompts, method=method, temperature=0.0, max_new_tokens=24)
        assert [one.text for one in made] == [one.text for one in plain]
    lossy = pair.generate(
        "the thing", method="certain(threshold=9, tail=2)", budget=0.2, seed=1, max_new_tokens=24
    )
    assert lossy.stats.drift_coverage == 1.0 and lossy.stats.drafted > 0


def test_the_doctor_says_what_it_costs(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--target", str(folders[0]), "--draft", str(folders[1]), "--json"]
    main(["doctor", *where])
    told = next(one for one in json.loads(capsys.readouterr().out)["checks"] if one["name"] == "tokens")
    found = re.fullmatch(
        r"different: 259 tokens in common, of a text's (\d+)% in prose, 99% in code, 99% in a question; expected "
        r"acceptance (0\.\d\d) on .* reads (1\.\d\d) of its tokens .* a step takes ([\d.]+) ms, of which translating "
        r"([\d.]+)",
        told["detail"],
    )
    assert told["status"] == "ok" and found is not None, told
    share, beta, longer, step, translating = map(float, found.groups())
    assert 90 <= share < 100 and 0 < beta < 1 and longer > 1 and 0 <= translating < step
    texts = tmp_path / "texts.txt"
    texts.write_text("now the the the")
    main(["doctor", *where, "--probe", str(texts)])
    told = json.loads(capsys.readouterr().out)["probe"]
    assert told["in_common"] == pytest.approx(2 / 5), "o and w; the draft lacks ' the'"


def test_the_doctor_begins_its_texts_as_the_target_does(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = sprinter.load_pair(*folders, device="cpu", dtype="float32")
    tokenizer = pair.models.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    tokenizer.bos_token = "<end>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", 0)]
    )
    prompts, read = list[tuple[int, ...]](), recording.read_passages

    def spy(pair: sprinter.Pair, passages: list[recording.Passage]) -> recording.Recording:
        prompts.extend(one.prompt for one in passages)
        return read(pair, passages)

    monkeypatch.setattr(recording, "read_passages", spy)
    assert doctor._vocabulary(pair)[0] == "ok"
    assert len(prompts) == 3 and all(len(one) == 2 and one[0] == 0 for one in prompts)


def test_the_command_line_takes_a_draft_of_another_vocabulary(
    folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    where = ["--target", str(folders[0]), "--draft", str(folders[1]), "--json"]
    texts = dict[str, str]()
    for method in ("autoregressive", "speculative(gamma=3)"):
        asked = ["the thing", "--method", method, "--temperature", "0", "--max-new-tokens", "12"]
        main(["generate", *asked, *where])
        made = json.loads(capsys.readouterr().out)
        assert (made["stats"]["draft_steps"] > 0) == (method != "autoregressive")
        texts[method] = made["text"]
    assert "tokens in common" in caplog.text and len(set(texts.values())) == 1


def test_vocabularies_with_little_in_common_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    few = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    )
    model = fresh("llama")
    line = refusal(folders[0], save(tmp_path / "few", model, few))
    assert "the two vocabularies differ" in line and "own family" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("threshold=0.6", True),
        ("divergence=kl,threshold=0.6", True),
        ("divergence=js,threshold=0.6", False),
        ("divergence=tv,threshold=0.9", False),
        ("divergence=kl,threshold=9,top_k=1", False),
    ],
)
def test_a_divergence_that_keeps_nothing_is_told(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, options: str, said: bool
) -> None:
    pair = sprinter.load_pair(str(folders[0]), str(folders[1]))
    request._say_none_kept.cache_clear()
    method = f"drafter=model,stop=fixed(gamma=3),accept=fuzzy({options})"
    done = pair.generate([0, 1], method=method, max_new_tokens=8, seed=1)
    assert ("divergence=js" in caplog.text) == said
    assert (done.stats.accepted == 0) == said

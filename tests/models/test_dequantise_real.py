"""Real GGUF files through both runners: logits, hidden states, windows, texts and gates."""

from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.models.gguf_files import byte_tokenizer
from tests.real import needs_gguf, needs_llama, real_file
from torch import Tensor

from sprinter.engine.pair import Pair
from sprinter.fingerprint import weights_fingerprint
from sprinter.models.choose import make_runner, runner_kind
from sprinter.models.gguf.dequantise import dequantised
from sprinter.models.gguf.load import GgufModel
from sprinter.models.gguf.write import write_gguf
from sprinter.models.pair import load_models

pytestmark = [pytest.mark.real, pytest.mark.slow, needs_gguf, needs_llama]

TEXT = (
    "The river rises in the mountains and flows through wide valleys before it reaches the sea. Farmers along its "
    "banks have grown wheat, barley and grapes for two thousand years, and the towns that they built still hold "
    "markets on Saturdays. In 1845 a railway engineer called Martin Hale drew a line from the harbour to the "
    "quarries, 37 kilometres of track, and nobody believed that it could be paid for. "
)
LOSSLESS = (
    "speculative(gamma=3)",
    "lookup(n=2)",
    "svip(h=0.4)",
    "specinfer(drafts=2, gamma=2)",
)


@cache
def torch_model(name: str) -> torch.nn.Module:
    """A model in float32; the tests leave it unchanged."""
    return dequantised(real_file(name), torch.float32).model


@cache
def tokens(name: str, count: int) -> Tensor:
    """The first tokens of the text, repeated, ``[1, count]``."""
    tokenizer = load_models(real_file(name)).tokenizer
    assert tokenizer is not None
    return torch.tensor([tokenizer(TEXT * 20)["input_ids"][:count]])


def laws(model: object, text: Tensor) -> tuple[Tensor, Tensor]:
    """log p ``[n, vocab]`` and hidden states ``[n, d]`` of a text."""
    step = make_runner(model, max_len=text.shape[1] + 1).extend(text)  # type: ignore[arg-type]
    assert step.logits is not None
    return step.logits[0].double().log_softmax(-1), step.hidden[0]


@pytest.mark.parametrize(
    ("name", "drift", "agree"), [("smollm2", 0.03, 0.95), ("qwen-draft", 0.02, 0.95), ("gemma", 0.03, 0.95)]
)
def test_both_runners_agree_up_to_rounded_activations(name: str, drift: float, agree: float) -> None:
    text = tokens(name, 200)
    (ours, _), (theirs, _) = laws(torch_model(name), text), laws(GgufModel(real_file(name), "cpu"), text)
    assert 0 < ((ours.exp() - theirs.exp()).abs().sum(-1) / 2).mean() < drift
    assert (ours.argmax(-1) == theirs.argmax(-1)).double().mean() >= agree


def test_without_rounding_they_agree_to_float32(tmp_path: Path) -> None:
    model, path, text = torch_model("smollm2"), tmp_path / "f32.gguf", tokens("smollm2", 200)
    write_gguf(
        model, byte_tokenizer(), path, "f32", name="smollm2", vocab_size=model.config.vocab_size, eos_ids=[2],
        fingerprint="", tell=lambda done, wanted: None,
    )  # fmt: skip
    (ours, hidden), (theirs, states) = laws(model, text), laws(GgufModel(path, "cpu"), text)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
    torch.testing.assert_close(hidden, states, rtol=0, atol=1e-3)  # after the final norm, in both
    assert (ours - theirs).abs().mean() < 1e-4
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_tokens_ends_and_fingerprint_are_the_same_under_both(name: str) -> None:
    here, there = load_models(real_file(name), dequantise=True), load_models(real_file(name))
    assert here.target.eos_ids == there.target.eos_ids
    assert here.tokenizer("  Où est le 木?\n").input_ids == there.tokenizer("  Où est le 木?\n").input_ids  # type: ignore[misc]
    assert here.tokenizer.chat_template == there.tokenizer.chat_template  # type: ignore[union-attr]
    assert weights_fingerprint(here.target.model) == there.target.model.fingerprint


def test_gemma_beyond_its_window_and_rewound_across_it() -> None:
    model, text = torch_model("gemma"), tokens("gemma", 640)
    assert runner_kind(model) == ("row", "attention over a sliding window")
    assert model.config.sliding_window == 512
    with torch.inference_mode():
        wanted = model(input_ids=text, use_cache=False).logits[0]
    runner = make_runner(model, max_len=650)  # type: ignore[arg-type]
    runner.extend(text[:, :500], logits=False)
    for reread in (500, 470):
        runner.rewind([reread])
        step = runner.extend(text[:, reread:])
        assert step.logits is not None
        torch.testing.assert_close(step.logits[0], wanted[reread:], rtol=0, atol=1e-3)


def noised(model: torch.nn.Module) -> torch.nn.Module:
    """A draft that often disagrees with its original."""
    draft = deepcopy(model)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        for values in draft.parameters():
            values += 0.15 * values.std() * torch.randn_like(values)
    return draft


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_lossless_methods_write_the_text_of_plain_decoding(name: str) -> None:
    models = load_models(
        real_file(name), noised(torch_model(name)), dtype="float32", device="cpu", compile=False, dequantise=True
    )  # fmt: skip
    pair, options = Pair(models), {"temperature": 0.0, "max_new_tokens": 24}
    for prompt in (TEXT, "def add(a, b):\n"):
        plain = pair.generate(prompt, method="autoregressive", **options)
        for method in LOSSLESS:
            out = pair.generate(prompt, method=method, **options)
            assert [token.id for token in out.tokens] == [token.id for token in plain.tokens], method
            assert out.stats.lossless

"""The choice of a runner, its reasons and its refusals."""

from collections.abc import Callable

import pytest
from tests.models.tiny import WINDOW, fresh, tiny
from transformers import T5Config, T5ForConditionalGeneration, ViTConfig, ViTModel

from sprinter.errors import UserError
from sprinter.models import choose
from sprinter.models.choose import make_runner, runner_kind
from sprinter.models.runners.row import RowRunner


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama-eager", "qwen2", "gpt_neox"])
def test_full_attention_gets_the_row_runner(kind: str) -> None:
    assert runner_kind(tiny(kind)) == ("row", "attention over the whole past")
    assert make_runner(tiny(kind), max_len=8).name == "row"


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "mistral", "qwen2-sliding"])
def test_sliding_attention_gets_the_row_runner(kind: str) -> None:
    assert runner_kind(tiny(kind)) == ("row", "attention over a sliding window")


def test_gpt_neo_gets_the_crop_runner_and_says_why() -> None:
    assert runner_kind(tiny("gpt_neo")) == ("crop", "its local layers build their own mask")
    assert make_runner(tiny("gpt_neo"), max_len=8).name == "crop"


def test_a_type_without_tests_is_tried() -> None:
    assert runner_kind(tiny("opt")) == ("row", "attention over the whole past; tried on a few tokens")


def test_a_type_on_which_the_row_runner_goes_wrong_gets_the_crop_runner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "_OWN_MASKS", {})
    kind, reason = runner_kind(fresh("gpt_neo"))
    assert kind == "crop" and reason in caplog.text and "which is slower" in caplog.text
    assert reason.startswith("tried on a few tokens, the row runner ")


def test_a_type_on_which_both_runners_go_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> str:
        return "gives nonsense"

    monkeypatch.setattr(choose, "_why_wrong", wrong)
    with pytest.raises(UserError, match=r"cannot be served: .*gives nonsense"):
        runner_kind(fresh("opt"))


def test_the_trial_tells_wrong_logits_from_right_ones() -> None:
    model = fresh("mistral")
    assert choose._why_wrong(lambda: RowRunner(model, 2, 16, {"": WINDOW}), model) is None
    wrong = choose._why_wrong(lambda: RowRunner(model, 2, 16, {"": 2}), model)
    assert wrong is not None
    assert wrong.startswith("differs from the uncached pass")


def test_the_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("llama")
    first = runner_kind(model)
    monkeypatch.setattr(choose, "_decide", None)
    assert runner_kind(model) == first


def test_recurrent_state_is_refused() -> None:
    with pytest.raises(UserError, match=r"MambaForCausalLM cannot be served: it holds a recurrent state"):
        make_runner(tiny("mamba"), max_len=8)


def test_layers_that_are_no_attention_are_refused() -> None:
    model = fresh("qwen2")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UserError, match="layers of type linear_attention"):
        runner_kind(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda config: setattr(config, "layer_types", ["full_attention", "chunked_attention"]), "in chunks"),
        (lambda config: setattr(config, "alibi", True), "ALiBi"),
        (lambda config: setattr(config, "_attn_implementation_internal", "flex_attention"), "takes no mask"),
    ],
)
def test_masks_that_cannot_be_given_from_outside(change: Callable[[object], None], reason: str) -> None:
    model = fresh("llama")
    change(model.config)
    assert reason in (choose._why_not_row(model, model.config) or "")


def test_a_sliding_model_of_unknown_make_gets_the_crop_runner() -> None:
    model = fresh("llama")
    model.config.sliding_window = 5
    assert runner_kind(model) == ("crop", "it does not say which of its layers slide")


def test_encoder_decoder_models_are_refused() -> None:
    config = T5Config(vocab_size=11, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(UserError, match="encoder-decoder"):
        runner_kind(T5ForConditionalGeneration(config))


def test_a_model_without_output_embedding_is_refused() -> None:
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8
    )
    with pytest.raises(UserError, match="ViTModel cannot be served"):
        runner_kind(ViTModel(config))


def test_several_rows_of_a_model_that_runs_one_are_refused() -> None:
    assert make_runner(tiny("gpt_neo"), max_len=8).name == "crop"
    with pytest.raises(UserError, match=r"one row at a time \(its local layers .*: use batch=1"):
        make_runner(tiny("gpt_neo"), batch=2, max_len=8)

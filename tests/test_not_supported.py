"""The list of what is not supported (docs/engine.md), each line against the code that refuses it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.models.tiny import fresh, word_tokenizer
from transformers import BertConfig, MambaConfig, T5Config

import sprinter
from sprinter.engine.chat import render_chat
from sprinter.errors import UserError
from sprinter.models.checks import check_config
from sprinter.models.choose import capture_kind, runner_kind
from sprinter.models.pair import load_models
from sprinter.models.source import find
from sprinter.models.vocabulary import check_same_vocabulary

LISTED = re.findall(
    r"^- \*\*(.+?)\.?\*\*",
    re.split(r"^## ", (Path(__file__).parents[1] / "docs/engine.md").read_text(), flags=re.M)[-1],
    flags=re.M,
)


def _folder(path: Path, *names: str) -> Path:
    for name in names:
        (path / name).write_text("{}")
    return path


def adapters(path: Path) -> None:
    with pytest.raises(UserError, match="PEFT adapter"):
        find(_folder(path, "config.json", "model.safetensors", "adapter_config.json"), "target")


def kinds(path: Path) -> None:
    for config in (BertConfig(), MambaConfig(), T5Config()):
        with pytest.raises(UserError, match="give a decoder with attention in all layers"):
            check_config(config, "the target")


def pickles(path: Path) -> None:
    with pytest.raises(UserError, match="pickled weights only, which are never loaded"):
        find(_folder(path, "config.json", "pytorch_model.bin"), "target")


def vocabularies(path: Path) -> None:
    with pytest.raises(UserError, match="the two vocabularies differ"):
        check_same_vocabulary({"a": 0}, {"b": 0}, "target", "draft")


def one_gpu(path: Path) -> None:
    """Layers on several devices run, uncaptured; nothing splits a layer."""
    model = fresh("llama")
    runner_kind(model)
    model.lm_head.to("meta")
    assert capture_kind(model) == ("none", "it lies on several devices")
    with pytest.raises(TypeError, match="tp_plan"):
        load_models(fresh("llama"), tp_plan="auto")  # type: ignore[call-arg]


def images(path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(UserError, match="a part of type 'image_url', and the models read text alone"):
        render_chat([{"role": "user", "content": [image]}], load_models(fresh("llama"), tokenizer=tokenizer))


def beams(path: Path) -> None:
    with pytest.raises(TypeError, match="num_beams"):
        sprinter.GenerationOptions(num_beams=4)  # type: ignore[call-arg]


CHECKS: dict[str, Callable[[Path], None]] = {
    "Adapters as models": adapters,
    "Other kinds of models": kinds,
    "Pickled weights": pickles,
    "A draft with hardly any tokens in common": vocabularies,
    "A model over several GPUs at full speed": one_gpu,
    "Images and sound": images,
    "Beam search": beams,
}


def test_the_list_and_the_checks_are_the_same() -> None:
    assert list(CHECKS) == LISTED


@pytest.mark.parametrize("name", CHECKS)
def test_what_is_listed_is_refused(name: str, tmp_path: Path) -> None:
    CHECKS[name](tmp_path)

"""Every command that loads models takes the same options, and gives each of them to ``load_pair``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.tiny import Places, Run
from typer.main import get_command

import sprinter
from sprinter.cli.app import app
from sprinter.errors import UserError

LOADING = {
    "--target": "t", "--draft": "d", "--gate": "g", "--head": "h", "--tokenizer": "k", "--revision": "r",
    "--draft-revision": "s", "--draft-vocabulary": "v", "--trust-remote-code": None, "--device": "cpu",
    "--dtype": "float32", "--runner": "torch", "--compile": None, "--profile": "f",
    "--suffix-cache": "c", "--template": "{file}",
}  # fmt: skip
GIVEN = {
    "draft": "d", "gate": "g", "heads": ["h"], "tokenizer": "k", "revision": "r", "draft_revision": "s",
    "draft_vocabulary": "v", "trust_remote_code": True, "device": "cpu", "dtype": "float32",
    "runner": "torch", "compile": True, "profile": "f",
    "suffix_cache": "c",
}  # fmt: skip
COMMANDS: dict[str, tuple[str, ...]] = {
    "chat": ("chat",),
    "generate": ("generate", "x"),
    "serve": ("serve", "--port", "0"),
    "doctor": ("doctor", "--json"),
    "demo": ("demo",),
    "bench": ("bench", "--suite", "{file}", "--arm", "speculative", "--out", "{folder}"),
    "gate label": ("gate", "label", "--data", "{file}", "--out", "{folder}"),
    "gate mine": ("gate", "mine", "--data", "{file}", "--out", "{folder}"),
    "draft distill": ("draft", "distill", "--data", "{file}", "--out", "{folder}"),
    "draft sizes": ("draft", "sizes", "--data", "{file}", "--out", "{folder}"),
    "draft train": ("draft", "train", "--data", "{file}", "--out", "{folder}"),
    "draft vocabulary": ("draft", "vocabulary", "--data", "{file}", "--out", "{file}.json"),
    "theory predict": ("theory", "predict"),
    "theory pareto": ("theory", "pareto"),
    "theory flops": ("theory", "flops", "-m", "speculative"),
    "theory fleet": ("theory", "fleet"),
    "eval": ("eval", "--tasks", "gsm8k"),
    "reproduce": ("reproduce", "yin", "--out", "{file}.d"),
    "tune": ("tune", "--data", "{file}", "--no-figures", "--out", "{file}.json"),
}
OWN = {
    "chat": {"prefix_reuse": "all"},
    "reproduce": {"prefix_cache_bytes": 0},
}  # beside the options of loading
_SUFFIXES = {"--suffix-cache", "--template"}
_PROFILE = {"--profile", *_SUFFIXES}
_HEADS = {"--gate", "--head", "--compile", *_PROFILE}
_LABELS = {*_HEADS, "--draft-vocabulary"}
_DRAFTS = {*_HEADS, "--draft", "--draft-revision", "--draft-vocabulary"}
UNUSED = {  # what a command has no use for
    "gate label": _LABELS, "gate mine": _LABELS, "doctor": {"--profile", "--suffix-cache"},
    "demo": _PROFILE, "theory predict": _PROFILE,
    "theory pareto": _PROFILE, "theory flops": _PROFILE, "tune": _PROFILE, "eval": _PROFILE, "draft distill": _DRAFTS,
    "draft sizes": _DRAFTS, "draft train": _DRAFTS, "draft vocabulary": _DRAFTS,
    "theory fleet": _PROFILE, "reproduce": _PROFILE, "bench": _SUFFIXES,
}  # fmt: skip


def leaves(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(name, command) of all commands; a group that does something itself is one, too."""
    children = getattr(command, "commands", {})
    if name and (not children or any("--target" in option.opts for option in command.params)):
        yield name, command
    for word, child in children.items():
        yield from leaves(child, f"{name} {word}".strip())


def test_every_command_that_loads_models_has_all_the_options() -> None:
    found = {}
    for name, command in leaves(get_command(app)):
        options = {word for option in command.params for word in option.opts}
        if "--target" in options or "--draft" in options:
            found[name] = ({*LOADING, "--device-map"} - UNUSED.get(name, set())) - options
    assert found == {name: set() for name in COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_reaches_the_loader(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked: list[tuple[Any, dict[str, Any]]] = []

    def load_pair(target: Any, **options: Any) -> Any:
        asked.append((target, options))
        raise UserError("that is all")

    monkeypatch.setattr(sprinter, "load_pair", load_pair)
    monkeypatch.setattr("sprinter.cli.eval.find_spec", lambda name: object())
    harness = SimpleNamespace(
        evaluate=None, find_tasks=lambda *tasks: None
    )  # which is not a dependency of the tests
    monkeypatch.setitem(sys.modules, "sprinter.doors.lm_eval", harness)
    file, unused = tmp_path / "texts.txt", UNUSED.get(name, set())
    file.write_text("a few words\n")
    words = [word.format(file=file, folder=tmp_path / "out") for word in COMMANDS[name]]
    for option, value in LOADING.items():
        words += [] if option in unused else [option] if value is None else [option, value.format(file=file)]
    status, out, err = run(*words)
    assert "that is all" in out + err and status in (1, 2)
    left_out = {option.removeprefix("--").replace("-", "_") for option in unused}
    expected = {key: value for key, value in GIVEN.items() if key.rstrip("s") not in left_out}
    if "gate" in left_out:
        expected |= {"gate": None, "heads": ()}
    if "draft" in left_out:
        expected |= {"draft": None}
    expected |= OWN.get(name, {})
    assert asked == [("t", expected)]
    at_defaults = [word.format(file=file, folder=tmp_path / "out") for word in COMMANDS[name]]
    drafted = () if "draft" in left_out else ("--draft", "d")
    run(*at_defaults, "--target", "t", *drafted, "--device-map", "auto")
    extra = {"dtype": "float32"} if name == "doctor" else OWN.get(name, {})
    plain = {"draft": drafted[1] if drafted else None, "gate": None, "heads": (), "device_map": "auto"}
    assert asked[1:] in ([], [("t", plain | extra)])
    assert len(asked) == 2 or name == "generate"


def test_a_template_takes_the_place_of_the_tokenizers_own(
    run: Run, places: Places, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ``generate``, and of each pair of ``serve``."""
    found: list[Any] = []
    monkeypatch.setattr("sprinter.serve.run.serve", lambda *given: found.append(given))
    status, out, _ = run(
        "generate", "Hi", "--chat", *places.pair, "--template", template, "-n", "4", "--json"
    )
    assert status == 0 and json.loads(out)["messages"] == [{"role": "user", "content": "Hi"}]
    named = f"a=target={places.target},template={template}"
    assert run("serve", "--pair", named, "--pair", f"b=target={places.target}").status == 0
    written = [source.load().tokenizer.chat_template for source in found[0][1]]
    assert written == [Path(template).read_text(), None]
    assert run("serve").status == 0 and found[-1][1][0].name == "builtin"
    status, _, err = run("serve", *places.pair, "--template", "nowhere")
    assert status == 2 and "cannot read --template nowhere" in err


@pytest.mark.parametrize(("args", "word"), [
    (("--device", "cpu", "--device-map", "auto", "--target", "t"), "--device-map takes the place of --device"),
    (("--trust-remote-code",), "--trust-remote-code is for models that bring code"),
    (("--revision", "main"), "--revision main is of a target on the hub: give --target too"),
    (("--draft-revision", "x", "--target", "t"), "--draft-revision x is of a draft on the hub"),
    (("--revision", "main", "--target", "{target}"), "is a directory: leave it out"),
])  # fmt: skip
def test_options_that_would_be_ignored_are_refused(
    run: Run, places: Places, args: tuple[str, ...], word: str
) -> None:
    status, out, err = run("generate", "x", *(arg.format(target=places.target) for arg in args))
    assert status == 2 and out == "" and err.count("\n") == 1 and word in err


def test_counting_flops_by_name_loads_nothing(run: Run) -> None:
    status, _, err = run("theory", "flops", "--target", "gpt2-xl", "--draft", "gpt2", "--dtype", "float16")
    assert status == 2 and "--dtype is for models that are loaded: give --method too" in err


def test_workers_that_load_models_themselves_are_not_given_half(run: Run, tmp_path: Path) -> None:
    args = ("gate", "label", "--data", "x", "--out", str(tmp_path / "out"), "--engine", "ray")
    status, _, err = run(*args, "--target", "t", "--draft", "d", "--trust-remote-code")
    assert status == 2 and "without --trust-remote-code: use --engine local" in err

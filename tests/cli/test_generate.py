"""``sprinter generate``: the JSON contract, plain text, the terminal's page, stop strings, Ctrl-C."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.tiny import Places, Run

from sprinter.cli import main
from sprinter.cli.pages import JsonPage, Page, TerminalPage
from sprinter.decode.draft import Stats
from sprinter.heads.artifact import save_head
from sprinter.heads.head import Head, HeadConfig
from sprinter.heads.load import load_gate

# The contract of DESIGN.md: scripts outside the project rely on these.
KEYS = {"text", "token_ids", "origins", "method", "lossless", "stats"}
STATS = {
    "new_tokens", "target_calls", "draft_steps", "rounds", "trusted", "accepted", "mean_drift", "drift_coverage",
    "tokens_per_target_call", "wall_s", "tokens_per_s", "flops",
}  # fmt: skip
METHODS = ("autoregressive", "speculative(gamma=3)", "sprinter(tau=0.5)", "coin(rate=0.5)", "draft-only")
SGR = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    """Standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def generated(run: Run, *args: str) -> dict[str, Any]:
    status, out, err = run("generate", *args, "--json")
    assert (status, err) == (0, "")
    assert out.count("\n") == 1
    value = json.loads(out)
    assert isinstance(value, dict)
    return value


def on_terminal(monkeypatch: pytest.MonkeyPatch, *args: str, **environment: str) -> str:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "TERM": "xterm-256color",
        "COLORTERM": "truecolor",
        "COLUMNS": "80",
        **environment,
    }.items():
        monkeypatch.setenv(name, value)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["generate", *args]) == 0
    return terminal.getvalue()


@pytest.mark.parametrize("method", METHODS)
def test_json_keeps_the_contract(run: Run, places: Places, method: str) -> None:
    value = generated(run, "The hedgehog", *places.gated, "-m", method, "-n", "12", "--seed", "5")
    assert value.keys() >= KEYS
    stats = value["stats"]
    assert stats.keys() >= STATS
    assert stats["flops"].keys() == {"passes", "tokens"}
    assert stats["new_tokens"] == len(value["token_ids"]) == len(value["origins"]) == 12
    assert set(value["origins"]) <= {"trusted", "accepted", "replacement", "bonus", "target"}
    assert value["method"].startswith(method.partition("(")[0])
    assert value["lossless"] is (method.partition("(")[0] in ("autoregressive", "speculative"))
    assert (stats["tokens_per_target_call"] is None) == (method == "draft-only")


def test_options_reach_the_engine(run: Run, places: Places) -> None:
    usual = generated(run, "x", *places.pair, "-n", "24")["token_ids"]
    for options in (["--seed", "3"], ["-t", "0"], ["--top-k", "2"], ["--top-p", "0.3"], ["--min-p", "0.5"]):
        once, again = (generated(run, "x", *places.pair, "-n", "24", *options)["token_ids"] for _ in range(2))
        assert once == again != usual
    value = generated(run, "x", *places.gated, "-n", "24", "-m", "sprinter(tau=0)", "--meter", "complete")
    assert value["stats"]["drift_coverage"] == 1.0


def test_the_method_is_chosen_by_what_the_pair_has(run: Run, places: Places) -> None:
    for models, name in (
        (places.gated, "auto"), (places.pair, "auto"), (places.pair[:2], "autoregressive"),
    ):  # fmt: skip
        assert generated(run, "x", *models, "-n", "2")["method"].startswith(name)


@pytest.mark.parametrize("stop", [[], ["a"], ["e", "zz"]])
def test_piped_text_is_the_text_and_nothing_else(run: Run, places: Places, stop: list[str]) -> None:
    args = [
        "The hedgehog",
        *places.gated,
        "-m",
        "sprinter",
        "-n",
        "40",
        *(word for s in stop for word in ("--stop", s)),
    ]
    value = generated(run, *args)
    status, out, err = run("generate", *args)
    assert (status, out) == (0, value["text"] + "\n")
    assert not any(word in value["text"] for word in stop)
    assert err.count("\n") == 1
    assert re.fullmatch(
        r"\d+ tokens?, \d+\.\d/s( \(est\. \d+\.\dx plain\))?, \d\.\d\d target calls/token, "
        r"(drift \d\.\d{3} \(coverage \d+%\)|drift not measured), "
        r"lossy\n",
        err,
    )


def test_standard_input_is_read_as_utf8_without_its_last_line_break(run: Run, places: Places) -> None:
    expected = generated(run, "Größe ☃\n", *places.pair, "-n", "5")
    status, out, err = run("generate", "-", *places.pair, "-n", "5", "--json", stdin="Größe ☃\n\n".encode())
    value = json.loads(out)
    assert (status, err, value["token_ids"]) == (0, "", expected["token_ids"])
    assert value["prompt_tokens"] == len("Größe ☃\n".encode())


def test_a_terminal_shows_origins_in_colour_and_attribute(
    places: Places, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["Hello [bold]world[/]", *places.gated, "-m", "coin(rate=0.5)", "-n", "60"]
    shown = on_terminal(monkeypatch, *args)
    lines = SGR.sub("", shown).splitlines()
    assert lines[0] == "tokens: trusted (unchecked), accepted, replacement, bonus, target"
    assert lines[1].startswith("Hello [bold]world[/]")
    assert "\x1b[4;38;2;230;159;0m" in shown  # trusted: underlined and orange
    assert "\x1b[7;38;2;213;94;0m" in shown  # replacement: reversed and vermilion
    assert capsys.readouterr().err.endswith("lossy\n")
    plain = on_terminal(monkeypatch, *args, NO_COLOR="1")
    assert "38;2" not in plain and "\x1b[4m" in plain and "\x1b[7m" in plain
    assert SGR.sub("", plain) == SGR.sub("", shown)


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "dumb")
    TerminalPage().begin("a\x1b[2Jb\x07c\td")
    shown = terminal.getvalue()
    assert "\x1b[2J" not in shown and "\x07" not in shown and "a\ufffd[2Jb\ufffdc" in shown


@pytest.mark.parametrize("page", [Page, JsonPage])
def test_ctrl_c_keeps_what_is_there(
    run: Run, places: Places, monkeypatch: pytest.MonkeyPatch, page: type[Page]
) -> None:
    real, seen = page.add, []

    def add(self: Any, token: Any) -> None:
        real(self, token)
        seen.append(token.text)
        if len(seen) == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(page, "add", add)
    json_wanted = page is JsonPage
    status, out, err = run("generate", "x", *places.pair, "-n", "500", *(["--json"] if json_wanted else []))
    assert status == 130
    if json_wanted:
        value = json.loads(out)
        assert value["finish_reason"] == "cancelled" and 7 <= value["stats"]["new_tokens"] < 20 and err == ""
    else:
        assert out.startswith("".join(seen)) and out.endswith("\n")
        assert err.startswith("stopped early: ") and err.count("\n") == 1


def test_stop_tokens_are_given_by_option(run: Run, places: Places) -> None:
    plain = generated(run, "ab", *places.pair, "-n", "12")["token_ids"]
    ends = [plain[4], plain[7]]
    value = generated(run, "ab", *places.pair, "-n", "12", *(f"--stop-token-id={id}" for id in ends))
    assert value["token_ids"] == plain[: min(map(plain.index, ends)) + 1]
    assert (value["finish_reason"], len(value["text"])) == ("stop", len(value["token_ids"]) - 1)
    status, _, err = run("generate", "ab", *places.pair, "--stop-token-id", "999")
    assert status == 2 and "stop token id 999 is out of range" in err


def test_logits_processors_and_log_probabilities_are_options(run: Run, places: Places) -> None:
    plain = generated(run, "ab", *places.pair, "-n", "12")
    assert plain["logprobs"] is None
    first = plain["token_ids"][0]
    for given, key, value in (
        (
            ["--logit-bias", f"{first}=-100", "--logit-bias", "1=1.5"],
            "logit_bias",
            sorted([[first, -100.0], [1, 1.5]]),
        ),
        (["--repetition-penalty", "9", "--presence-penalty", "2"], "repetition_penalty", 9.0),
        (["--frequency-penalty", "2", "--logprobs", "2"], "logprobs", 2),
        (["--bad-word", plain["text"][0], "--bad-word", "ab"], "bad_words", [plain["text"][0], "ab"]),
    ):
        found = generated(run, "ab", *places.pair, "-n", "12", *given)
        assert found["request"][key] == value and found["token_ids"] != plain["token_ids"]
        if key == "logprobs":
            assert [len(one["top"]) for one in found["logprobs"]] == [2] * 12


def test_statistics_fit_a_line_of_a_terminal() -> None:
    stats = Stats(
        lossless=True, new_tokens=900, target_calls=414, mean_drift=0.0, drift_coverage=1.0, wall_s=9.0
    )
    line = stats.summary
    assert line == "900 tokens, 100.0/s, 0.46 target calls/token, drift 0.000 (coverage 100%), lossless"
    assert "drift not measured, lossy" in Stats(new_tokens=1, wall_s=1.0).summary
    assert Stats().summary.startswith("0 tokens, 0.0/s")


def test_a_trained_stop_head_is_given_by_option(places: Places, run: Run, tmp_path: Path) -> None:
    """Without it one line says how to give it; with it the method runs."""
    config = load_gate(places.gate).config
    features = HeadConfig(
        config.hidden_size, config.draft_id, config.target_id, draft_fingerprint=config.draft_fingerprint,
        kind="disco", architecture="ffn", features=("entropy", "position"),
    )  # fmt: skip
    save_head(Head(features, features.network()), tmp_path / "head", "card")
    asked = ("x", *places.pair, "-m", "disco", "-n", "6")
    status, out, err = run("generate", *asked, "--json")
    assert (status, out) == (2, "")
    assert "--head" in err
    assert err.count("\n") == 1
    value = generated(run, *asked, "--head", str(tmp_path / "head"))
    assert value["stats"]["new_tokens"] == 6
    assert value["lossless"] is True


def test_compile_is_asked_for_refused_and_left_out(
    run: Run, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = generated(run, "ab", *places.pair, "-n", "4")
    assert generated(run, "ab", *places.pair, "-n", "4", "--no-compile")["text"] == plain["text"]
    monkeypatch.setattr("sprinter.models.choose.capture_kind", lambda model: ("none", "it is quantised"))
    status, out, err = run("generate", "ab", *places.pair, "-n", "4", "--compile")
    assert (status, out) == (2, "")
    assert "cannot be compiled: it is quantised; use --no-compile" in err

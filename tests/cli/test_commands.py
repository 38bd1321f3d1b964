"""``sprinter methods``, ``doctor``, ``demo``, ``--help`` and ``--version``."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cli.tiny import Places, Run
from typer.main import get_command

import sprinter
from sprinter.cli import signature
from sprinter.cli.app import app
from sprinter.decode.registry import ACCEPT, DRAFTER, STOP, TRUST
from sprinter.errors import UserError, install_line

PARTS = {"drafter": DRAFTER, "trust": TRUST, "stop": STOP, "accept": ACCEPT}
CHECKS = [
    "versions", "devices", "threads", "cpu", "kernels", "cache", "pair", "target", "draft", "passes", "gate",
    "self-test",
]  # fmt: skip


def test_help_and_version(run: Run) -> None:
    assert run("--version") == (0, f"sprinter {sprinter.__version__}\n", "")
    for args in ((), ("--help",), ("-h",)):
        status, out, err = run(*args)
        assert (status, err) == (0, "")
        assert [name for name in ("generate", "methods", "doctor", "demo") if name not in out] == []
    status, out, _ = run("generate", "--help")
    assert status == 0 and "--max-new-tokens" in out


def test_methods_table_and_json(run: Run) -> None:
    status, out, err = run("methods", "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    rows, others = json.loads(out)["methods"], json.loads(out)["other_rules"]
    assert rows == sprinter.methods()
    assert "accept=greedy" in others
    shown = {spec.partition("(")[0] for spec in others}
    shown |= {f"{part}={row[part]}".partition("(")[0] for row in rows for part in PARTS if row[part]}
    assert shown == {f"{part}={name}" for part, registry in PARTS.items() for name in registry.names()}
    assert all(row.keys() >= {"name", "trust", "stop", "accept", "lossless", "paper"} for row in rows)
    status, table, err = run("methods")
    assert (status, err) == (0, "")
    assert f"to compose with: {', '.join(others)}." in " ".join(table.split())
    lines = table.splitlines()
    assert lines == [line.rstrip(" ") for line in lines]
    for row in rows:
        assert any(line.strip().startswith(row["spec"]) and row["paper"] in line for line in lines)


def test_help_shows_the_bounds_of_a_number_in_the_unit_of_its_option(run: Run) -> None:
    _, out, _ = run("serve", "--help-all")
    text = " ".join(out.split())
    assert "Texts generated at the same time (>= 1)." in text
    assert "Largest request (>= 1)." in text, "4 MiB, in bytes"
    assert "0: any free port (in [0, 65535])." in text


def test_what_serve_needs_is_one_install_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever package of its own or of theirs is not there."""
    monkeypatch.delitem(sys.modules, "sprinter.serve.run", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    status, out, err = run("serve")
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "the server needs FastAPI, Uvicorn and prometheus-client (" in err
    assert err.endswith(f"): {install_line('serve')}\n")


def test_doctor_looks_at_everything(run: Run, places: Places) -> None:
    status, out, err = run("doctor", *places.gated, "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    report = json.loads(out)
    details = {check["name"]: check["detail"] for check in report["checks"]}
    assert report["ok"] is True and list(details) == CHECKS
    assert {check["status"] for check in report["checks"]} <= {"ok", "warn"}
    assert f"sprinter {sprinter.__version__}" in details["versions"]
    assert "row runner (" in details["target"] and "row runner (" in details["draft"]
    assert details["passes"] == "eager: --compile has our kernels run its layers"
    assert details["kernels"].startswith(("sprinter-kernels ", "slower on a CPU: "))
    assert "speculative equals autoregressive" in details["self-test"]
    status, text, err = run("doctor", *places.pair)
    assert (status, err) == (0, "")
    assert [line.split()[1] for line in text.splitlines()] == CHECKS
    assert "warn  gate" in text
    status, text, _ = run("doctor", "--target", str(places.target))
    assert status == 0 and "with the target alone" in text


def test_doctor_looks_at_pairs_as_serve_names_them(run: Run, places: Places) -> None:
    """General checks once, those of a pair for each; one that fails does not end the others."""
    broken = f"bad=target={places.root / 'corrupt'}"
    status, out, err = run("doctor", "--pair", "own=", "--pair", broken, "--json")
    checks = json.loads(out)["checks"]
    assert status == 1 and err == ""
    assert [check["name"] for check in checks if "pair" not in check].count("versions") == 1
    assert [check["status"] for check in checks if check.get("pair") == "bad"] == ["fail"]
    assert {check["status"] for check in checks if check.get("pair") == "own"} <= {"ok", "warn"}
    assert "self-test" in [check["name"] for check in checks if check.get("pair") == "own"]
    _, text, _ = run("doctor", "--pair", broken)
    assert "bad: " in text
    for given, message in (
        (["--pair", "a=drfat=x"], "--pair a: 'drfat=x' is no option of loading"),
        (["--pair", "a=", "--target", "x"], "--target x is of one pair: write it into --pair NAME=target="),
        (["--pair", "a=", "--pair", "a="], "--pair a= was given twice"),
        (
            ["--pair", "a=", "--pair", "b=", "--probe", "x"],
            "--probe reads texts for one pair: give one --pair",
        ),
    ):
        status, _, err = run("doctor", *given)
        assert status == 2 and message in err and err.count("\n") == 1


def test_doctor_fails_with_status_1(run: Run, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, err = run("doctor", "--target", str(places.root / "corrupt"))
    assert (status, err) == (1, "")
    assert "fail  pair" in out and "corrupt" in out
    monkeypatch.setattr("sprinter.models.choose.runner_kind", lambda model: 1 / 0)
    status, out, err = run("doctor", *places.pair, "--json")
    assert (status, err) == (1, "")
    report = json.loads(out)
    failed = {check["name"] for check in report["checks"] if check["status"] == "fail"}
    assert report["ok"] is False and failed == {"target", "draft"}


def test_doctor_warns_of_a_cache_that_cannot_be_written(
    run: Run, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/proc/nowhere/hub")
    status, out, _ = run("doctor", *places.pair, "--json")
    cache = next(check for check in json.loads(out)["checks"] if check["name"] == "cache")
    assert status == 0 and cache["status"] == "warn" and "set HF_HOME" in cache["detail"]


def test_demo_prints_a_text_and_one_table(run: Run, places: Places) -> None:
    status, out, err = run("demo", *places.gated, "-n", "8")
    assert (status, err) == (0, "")
    assert "A text by sprinter(tau=" in out and "Once upon a time, there was a little" in out
    rows = [
        line.split()
        for line in out.splitlines()
        if line.strip().startswith(("autoreg", "specul", "sprinter"))
    ]
    assert len(rows) == 3
    assert [row[-1] for row in rows] == ["yes", "yes", "no"]
    assert [row[-2] for row in rows] == ["100%"] * 3
    assert "6 prompts, up to 8 tokens each" in out


def test_demo_as_json(run: Run, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sprinter.cli.demo._SECONDS", 0.0)  # as on a slow machine: the shortest texts
    status, out, err = run("demo", *places.gated, "--json")
    assert (status, err, out.count("\n")) == (0, "", 1)
    value = json.loads(out)
    assert value["settings"]["meter"] == "complete" and value["settings"]["max_new_tokens"] == 16
    assert [row["name"] for row in value["rows"]] == ["autoregressive", "speculative", "sprinter"]
    plain, exact, lossy = value["rows"]
    assert plain["target_calls_per_token"] == 1.0 and plain["lossless"] and exact["lossless"]
    assert plain["mean_drift"] == exact["mean_drift"] == 0.0 and not lossy["lossless"]
    assert lossy["mean_drift"] <= value["settings"]["max_drift"] == 0.1 and lossy["spec"].startswith(
        "sprinter(tau="
    )
    assert all(row["drift_coverage"] == 1.0 and row["tokens_per_s"] > 0 for row in value["rows"])


def test_demo_needs_a_gate(run: Run, places: Places) -> None:
    status, _, err = run("demo", *places.pair)
    assert status == 2 and "needs a gate" in err and err.count("\n") == 1


def _leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from _leaves(child, (*path, name))


COMMANDS = dict(_leaves(get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_fits_into_80_columns_and_names_every_option(
    run: Run, path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once where there are few, else ten of them, and all with --help-all."""
    monkeypatch.setenv("COLUMNS", "80")
    options = [one for one in COMMANDS[path].params if one.param_type_name == "option" and not one.hidden]
    pages = ["--help"] + ["--help-all"] * any("--help-all" in one.opts for one in options)
    outs = [run(*path, page).out for page in pages]
    for out in outs:
        assert max(map(len, out.splitlines())) <= 80 and "…" not in out
        assert "..." not in out.partition("Commands:")[2]
    names = {name for one in options for name in (*one.opts, *one.secondary_opts)}
    assert names - set(outs[-1].replace(",", " ").split()) == set()
    rows = " ".join(re.findall(r"^  (-.*?)(?:  |$)", outs[0], re.M)).replace(",", " ").split()
    listed = sum(one.opts[0] in rows for one in options)
    assert len(pages) == 1 or listed == 11, "ten, and --help-all"
    assert len(pages) == 2 or len(options) < 16


def test_the_list_of_commands_says_what_each_says_itself() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert commands.abouts == {name: one.get_short_help_str(500) for name, one in commands.items()}
    assert "nothing" not in commands


def test_one_option_has_one_name_in_all_commands() -> None:
    names = {name for command in COMMANDS.values() for one in command.params for name in one.opts}
    assert "--max-new-tokens" in names and "--new-tokens" not in names


@pytest.mark.parametrize("line", [
    "x --stop --target --target a --stop --target",  # values of another option
    "-- --target --target",
    "x -n 4 --temperature 0 --temperature 1 --target a",
    "x --head a --head b",
])  # fmt: skip
def test_only_what_names_one_thing_may_not_be_given_twice(line: str) -> None:
    command: Any = COMMANDS["generate",]
    context = command.context_class(command)
    signature._refuse_repeated(command, context, line.split())
    twice = f"--draft a --device cpu --draft a {line}".split()
    with pytest.raises(UserError, match="--draft was given twice: give it once"):
        signature._refuse_repeated(command, context, twice)

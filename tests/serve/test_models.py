"""Several models in one server: loaded when they are asked for, closed for others, each with its own errors."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import save_file
from tests.engine.conftest import double, tiny_llama
from tests.serve.server import Running, held, running, until
from tests.serve.test_fair_share import as_, keys_of

import sprinter
from sprinter.cli import main
from sprinter.errors import UserError
from sprinter.models.pair import LoadedPair
from sprinter.serve import registry
from sprinter.serve.registry import Models, NamedSource
from sprinter.serve.settings import ServeSettings

TEXT = "/v1/completions"
PROMPT = [1, 2, 3]


def pair_of(seed: int) -> sprinter.Pair:
    return sprinter.Pair(LoadedPair(double(tiny_llama(seed, layers=2)), double(tiny_llama(seed + 9)), None))


def body(model: str | None, new: int = 6, **fields: Any) -> dict[str, Any]:
    named = {} if model is None else {"model": model}
    return {**named, "prompt": PROMPT, "max_tokens": new, "seed": 1, "sprinter": {"tokens": True}, **fields}


def ids(answer: Any) -> list[int]:
    assert answer.status_code == 200, answer.text
    return [token["id"] for token in answer.json()["choices"][0]["sprinter"]["tokens"]]


@contextmanager
def several(
    *sources: NamedSource, aliases: dict[str, str] | None = None, **settings: Any
) -> Iterator[tuple[Running, Models]]:
    given = {"port": 0, "rows": 2, "max_len": 64, "never_slower": False, **settings}
    models = Models(ServeSettings(**given), sources, aliases)
    try:
        with running(models) as server:
            yield server, models
    finally:
        gc.unfreeze()


def loads(log: list[str], name: str, seed: int) -> NamedSource:
    """A pair that notes when it is loaded."""

    def load() -> sprinter.Pair:
        log.append(name)
        return pair_of(seed)

    return NamedSource(name, load)


@contextmanager
def at_once(*calls: Callable[[], Any]) -> Iterator[list[Any]]:
    found: list[Any] = []
    threads = [threading.Thread(target=lambda call=call: found.append(call())) for call in calls]
    for thread in threads:
        thread.start()
    yield found
    for thread in threads:
        thread.join(30)


def adapter(folder: Path, scale: float = 0.5) -> Path:
    """A folder as PEFT writes it, for the small Llamas."""
    folder.mkdir()
    made = torch.Generator().manual_seed(5)
    key = "base_model.model.lm_head.lora_"
    shapes = {"A": (2, 16), "B": (24, 2)}
    tensors = {f"{key}{one}.weight": torch.randn(*shape, generator=made) for one, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(f'{{"peft_type": "LORA", "r": 2, "lora_alpha": {2 * scale}}}')
    return folder


# --- names ------------------------------------------------------------------------------------------------------------
def test_two_pairs_answer_by_name() -> None:
    log: list[str] = []
    with (
        several(loads(log, "a", 1), loads(log, "b", 2), aliases={"gpt": "b"}) as (server, _),
        server.http() as http,
    ):
        assert http.get("/ready").status_code == http.get("/health").status_code == 200 and log == []
        listed = {one["id"]: one for one in http.get("/v1/models").json()["data"]}
        assert [*listed] == ["a", "b", "gpt"] and not any(
            one["sprinter"]["loaded"] for one in listed.values()
        )
        expected = {
            name: pair_of(seed).generate(PROMPT, max_new_tokens=6, seed=1)
            for name, seed in (("a", 1), ("b", 2))
        }
        texts = {name: [token.id for token in out.tokens] for name, out in expected.items()}
        assert texts["a"] != texts["b"]
        assert ids(server.post(TEXT, body("b"))) == texts["b"] and log == ["b"]
        assert ids(server.post(TEXT, body(None))) == texts["a"] and log == ["b", "a"]
        answer = server.post(TEXT, body("gpt"))
        assert ids(answer) == texts["b"] and answer.json()["model"] == "gpt"
        assert (
            http.get("/v1/models/gpt").json()["sprinter"]["loaded"]
            and http.get("/v1/models/gpt").json()["max_model_len"]
        )
        wrong = server.post(TEXT, body("c"))
        assert wrong.status_code == 404 and wrong.json()["error"]["message"].endswith(
            "ask for 'a', 'b', 'gpt'"
        )
        assert log == ["b", "a"]


def test_nothing_is_loaded_for_a_wrong_request() -> None:
    log: list[str] = []
    with several(loads(log, "a", 1), loads(log, "b", 2)) as (server, _):
        assert server.post(TEXT, body("b", sprinter={"method": "nothing"})).status_code == 400 and log == []


def test_metrics_have_the_models_name() -> None:
    log: list[str] = []
    with several(loads(log, "a", 1), loads(log, "b", 2)) as (server, _):
        for name, method in (("a", "speculative(gamma=2)"), ("b", "autoregressive")):
            server.post(TEXT, body(name, 12, sprinter={"method": method}))
        with server.http() as http:
            text = http.get("/metrics").text
    values = {
        key: float(value)
        for key, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    }
    drafted, kept = (
        values[f'vllm:spec_decode_num_{what}_tokens_total{{engine="0",model_name="a"}}']
        for what in ("draft", "accepted")
    )
    assert drafted > 0 and values['sprinter_draft_acceptance_rate{model_name="a"}'] == kept / drafted
    assert values['sprinter_texts_total{finish_reason="length",method="autoregressive",model_name="b"}'] == 1
    assert 'sprinter_draft_acceptance_rate{model_name="b"}' not in values
    assert [values[f'sprinter_model_loaded{{model_name="{name}"}}'] for name in "ab"] == [1, 1]
    assert values["sprinter_rows"] == 4 and values["sprinter_ready"] == 1


def test_rates_of_an_owner_are_of_the_server(tmp_path: Path) -> None:
    with several(loads([], "a", 1), loads([], "b", 2), rate_limit=2) as (server, _):
        assert [server.post(TEXT, body(name)).status_code for name in ("a", "b", "a", "b")] == [
            200,
            200,
            429,
            429,
        ]


# --- room -------------------------------------------------------------------------------------------------------------
def test_the_one_that_was_asked_longest_ago_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sprinter.serve")
    log: list[str] = []
    sources = [loads(log, name, seed) for seed, name in enumerate("abc")]
    with several(*sources) as (server, models):
        for name in "ab":
            ids(server.post(TEXT, body(name)))
        sizes = {name: models.find(name).size for name in "ab"}
        assert sizes["a"] == sizes["b"] > 1000
    log.clear()
    with several(*sources, models_bytes=2 * sizes["a"] + 100) as (server, models):
        for name in ("a", "b", "a", "c"):
            ids(server.post(TEXT, body(name)))
        assert log == ["a", "b", "c"] and [models.find(name).service is None for name in "abc"] == [
            False,
            True,
            False,
        ]
        ids(server.post(TEXT, body("b")))  # known now: room is made before
        assert log == ["a", "b", "c", "b"] and models.find("a").service is None
    closed = [record.fields["model"] for record in caplog.records if record.getMessage() == "closed"]  # type: ignore[attr-defined]
    assert closed == ["b", "a"]


def test_what_is_closed_is_freed() -> None:
    log: list[str] = []
    with several(loads(log, "a", 1), loads(log, "b", 2)) as (server, models):
        ids(server.post(TEXT, body("a")))
        service = models.find("a").service
        assert service is not None
        model = weakref.ref(service.pair.models.target.model)
        object.__setattr__(models.settings, "models_bytes", models.find("a").size + 100)
        del service
        ids(server.post(TEXT, body("b")))
        until(lambda: model() is None)


def test_a_text_that_is_written_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sprinter.serve.registry._DRAIN_S", 0.2)
    log: list[str] = []
    with several(loads(log, "a", 1), loads(log, "b", 2)) as (server, models):
        expected = ids(server.post(TEXT, body("a", 30)))
        object.__setattr__(models.settings, "models_bytes", models.find("a").size + 100)
        with (
            held(models.find("a").service) as go,
            at_once(lambda: server.post(TEXT, body("a", 30))) as answers,
        ):
            until(lambda: models.find("a").service.engine.unfinished == 1)  # type: ignore[union-attr]
            refused = server.post(TEXT, body("b"))
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_memory"
            assert (
                "no room" in refused.json()["error"]["message"]
                and "(a)" in refused.json()["error"]["message"]
            )
            assert int(refused.headers["retry-after"]) >= 1
            go.set()
        assert ids(answers[0]) == expected
        ids(server.post(TEXT, body("b")))
        assert models.find("a").service is None
        too_large = models.find("a").size
        object.__setattr__(models.settings, "models_bytes", too_large - 1)
        refused = server.post(TEXT, body("a"))
        assert refused.status_code == 503 and "retry-after" not in refused.headers


def test_a_model_takes_no_texts_before_it_is_known_to_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is known when it is loaded, and it may have to be closed again."""
    monkeypatch.setattr("sprinter.serve.registry._DRAIN_S", 3.0)
    with several(loads([], "a", 1), loads([], "b", 2)) as (server, models):
        ids(server.post(TEXT, body("a")))
        object.__setattr__(models.settings, "models_bytes", models.find("a").size + 100)
        one, service, statuses = models.find("b"), models.find("a").service, list[int]()
        assert service is not None
        with held(service):
            calls = [
                threading.Thread(
                    target=lambda name=name: statuses.append(server.post(TEXT, body(name)).status_code)
                )
                for name in "abb"
            ]
            calls[0].start()
            until(lambda: models.find("a").users == 1)
            calls[1].start()
            until(lambda: one.service is not None)
            calls[2].start()
            for call in calls[1:]:
                call.join(30)
            assert statuses == [503, 503]
        calls[0].join(30)
        assert statuses == [503, 503, 200]


def test_owners_take_turns_in_having_models_loaded(tmp_path: Path) -> None:
    """Alice has asked for four when Bob asks for the last of them, and for a fifth one."""
    go, log = threading.Event(), list[str]()

    def source(name: str) -> NamedSource:
        def load() -> sprinter.Pair:
            log.append(name)
            assert go.wait(60)
            return pair_of(1)

        return NamedSource(name, load)

    asked: dict[str, Any] = {"sprinter": {"tokens": True, "method": "speculative(gamma=2)"}}
    with several(*map(source, "abcdef"), api_keys=keys_of(tmp_path)) as (server, models):
        order = [("alice", one) for one in "abcd"] + [("bob", "d"), ("bob", "e")]
        calls: list[threading.Thread] = []
        for count, (who, name) in enumerate(order, 1):
            call = partial(server.post, TEXT, body(name, 2, **asked), **as_(who))
            calls += [threading.Thread(target=call)]
            calls[-1].start()
            until(lambda count=count: sum(one.users for one in models._models) == count)  # type: ignore[misc]
        go.set()
        for thread in calls:
            thread.join(60)
    assert log == [*"abdce"]


def test_who_always_asks_for_a_model_keeps_no_other_out(tmp_path: Path) -> None:
    """Alice's next requests wait until Bob's model has been loaded in place of hers."""
    asked: dict[str, Any] = {"sprinter": {"tokens": True, "method": "speculative(gamma=2)"}}
    log, ended, answers = list[str](), threading.Event(), list[int]()
    with several(loads(log, "a", 1), loads(log, "b", 2), api_keys=keys_of(tmp_path)) as (server, models):
        ids(server.post(TEXT, body("a", **asked), **as_("alice")))
        object.__setattr__(models.settings, "models_bytes", models.find("a").size + 100)

        def ask() -> None:
            while not ended.is_set():
                answers.append(server.post(TEXT, body("a", 30, **asked), **as_("alice")).status_code)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: models.find("a").users >= 2)
        found = server.post(TEXT, body("b", **asked), **as_("bob"))
        ended.set()
        for thread in threads:
            thread.join(60)
        assert found.status_code == 200 and log[:2] == ["a", "b"] and set(answers) == {200}
        assert all(one.leaving is None for one in models._models)


def test_requests_wait_for_a_model_and_not_for_ever() -> None:
    go = threading.Event()

    def load() -> sprinter.Pair:
        assert go.wait(30)
        return pair_of(2)

    with several(loads([], "a", 1), NamedSource("b", load), queue_timeout_s=0.3) as (server, models):
        late = server.post(TEXT, body("b"))
        assert late.status_code == 503 and late.json()["error"]["code"] == "loading"
        assert int(late.headers["retry-after"]) >= 1
        go.set()
        until(lambda: models.find("b").service is not None)
        ids(server.post(TEXT, body("b")))
    go.clear()
    with several(loads([], "a", 1), NamedSource("b", load)) as (server, models):
        with at_once(*[lambda: server.post(TEXT, body("b"))] * 2) as answers:
            until(lambda: models.find("b").users == 2)
            go.set()
        assert ids(answers[0]) == ids(answers[1])


# --- failures ---------------------------------------------------------------------------------------------------------
def test_a_pair_that_cannot_be_loaded_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def load() -> sprinter.Pair:
        tries.append(1)
        if len(tries) < 2:
            raise UserError("the target directory /nothing/here does not exist: check the path")
        return pair_of(2)

    with several(loads([], "a", 1), NamedSource("b", load)) as (server, _), server.http() as http:
        for _try in range(2):
            answer = server.post(TEXT, body("b"))
            error = answer.json()["error"]
            assert answer.status_code == 503 and error["code"] == "load_failed" and tries == [1]
            assert error["message"] == (
                "the model 'b' cannot be loaded: the target directory here does not exist: check the path"
            )
            assert 1 <= int(answer.headers["retry-after"]) <= 30
        assert http.get("/ready").status_code == 200 and len(ids(server.post(TEXT, body("a")))) == 6
        monkeypatch.setattr(registry, "_RETRY_S", 0.0)
        assert len(ids(server.post(TEXT, body("b")))) == 6 and tries == [1, 1]


def test_an_engine_that_dies_is_made_again_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    with several(loads(log, "a", 1), loads(log, "b", 2)) as (server, models), server.http() as http:
        expected = [ids(server.post(TEXT, body(name))) for name in "ab"]

        def broken() -> Any:
            raise RuntimeError("the device is gone")

        models.find("a").service.engine._engine.step = broken  # type: ignore[union-attr,method-assign]
        for code in ("engine_failed", "engine_failed"):
            answer = server.post(TEXT, body("a"))
            assert answer.status_code == 503 and answer.json()["error"]["code"] == code
        assert http.get("/health").status_code == 200 and ids(server.post(TEXT, body("b"))) == expected[1]
        monkeypatch.setattr(registry, "_RETRY_S", 0.0)
        assert ids(server.post(TEXT, body("a"))) == expected[0] and log == ["a", "b", "a"]


def test_the_only_pair_ends_the_server() -> None:
    def load() -> sprinter.Pair:
        raise UserError("no such model")

    with pytest.raises(UserError, match="no such model"), several(NamedSource("a", load)):
        pass


# --- adapters ---------------------------------------------------------------------------------------------------------
def test_an_adapter_is_a_model_of_its_own(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "sql")
    sources = [NamedSource("a", lambda: pair_of(1)), NamedSource("sql", pair="a", adapter=folder)]
    with several(*sources) as (server, models), server.http() as http:
        until(lambda: http.get("/ready").status_code == 200)
        texts = [ids(server.post(TEXT, body(name, 20, sprinter={"method": "speculative(gamma=3)", "tokens": True})))
                 for name in ("a", "sql")]  # fmt: skip
        assert texts[0] != texts[1]
        merged = pair_of(1).with_lora(folder)
        out = merged.generate(PROMPT, max_new_tokens=20, seed=1, method="speculative(gamma=3)")
        assert texts[1] == [token.id for token in out.tokens]
        listed = {one["id"]: one for one in http.get("/v1/models").json()["data"]}
        assert listed["sql"]["parent"] == "a" and listed["sql"]["sprinter"]["adapter"] == "sql"
        assert 'sprinter_draft_acceptance_rate{model_name="sql"}' in http.get("/metrics").text
        base, own = models.find("a"), models.find("sql")
        matrix = 24 * 16 * 8  # the one that changes
        assert own.size == base.size - _weights_of(base) + matrix


def _weights_of(model: Any) -> int:
    return sum(registry._weights(model.service).values())


def test_adapters_of_several_pairs_keep_their_pair(tmp_path: Path) -> None:
    log: list[str] = []
    sources = [
        loads(log, "a", 1),
        loads(log, "b", 2),
        NamedSource("sql", pair="b", adapter=adapter(tmp_path / "sql")),
    ]
    with several(*sources) as (server, models):
        ids(server.post(TEXT, body("sql")))
        assert log == ["b"] and models.find("b").users == 1
        room = models.find("b").size + models.find("sql").size
        object.__setattr__(models.settings, "models_bytes", room + 100)
        ids(server.post(TEXT, body("a")))  # the adapter goes first, then there is room
        assert models.find("sql").service is None and models.find("b").users == 0
        a, b, sql = map(models.find, ("a", "b", "sql"))
        sql.parent, sql.loading = a, Mock()  # it waits for its turn, and so its pair is not waited for
        assert a.service is not None and not asyncio.run(models._drain(b, [a], time.monotonic() + 60))
        sql.parent, sql.loading = b, None


def test_an_adapter_of_another_model_fails_alone(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "sql")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 2, "use_dora": true}')
    sources = [NamedSource("a", lambda: pair_of(1)), NamedSource("sql", pair="a", adapter=folder)]
    with several(*sources) as (server, models):
        until(lambda: models.state == "ready")
        answer = server.post(TEXT, body("sql"))
        assert (
            answer.status_code == 503
            and "use_dora=True, which is not supported" in answer.json()["error"]["message"]
        )
        assert len(ids(server.post(TEXT, body("a")))) == 6


# --- the command line -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pair", "a"], "--pair a is not NAME=target=...: write --pair NAME=target=..."),
        (["--pair", "=target=x"], "--pair =target=x is not NAME="),
        (["--pair", "a=target=x,drfat=y"], "--pair a: 'drfat=y' is no option of loading: give cache_dtype, compile,"),
        (["--pair", "a=target=x,target=y"], "target was given twice"),
        (["--pair", "a=target=x,compile=yes"], "--pair a=compile=yes is unknown: give true or false"),
        (["--pair", "a=target=x,runner=vllm"], "--pair a=runner=vllm is unknown: give auto or llamacpp or torch"),
        (["--pair", "a=", "--target", "x"], "--target x is of one pair: write it into --pair NAME=target="),
        (["--pair", "a=", "--model-name", "x"], "--model-name x is of one pair"),
        (["--pair", "a=", "--pair", "a="], "two models have the name 'a'"),
        (["--pair", "a=", "--alias", "gpt"], "--alias gpt names none of the pairs: write NAME@PAIR"),
        (["--pair", "a=", "--pair", "b=", "--alias", "a@b"], "two models have the name 'a'"),
        (["--lora", "x"], "--lora x is not NAME=FOLDER"),
        (["--lora", "x=/nothing"], "/nothing has no adapter_config.json"),
        (["--pair", "a=", "--pair", "b=", "--lora", "x=/no"], "none of the pairs: write --lora NAME@PAIR=FOLDER"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_mistakes_are_one_line(options: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "0", *options]) == 2
    error = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("{")]
    assert len(error) == 1 and message in error[0]


def test_options_of_a_pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[Any] = []
    monkeypatch.setattr("sprinter.serve.run.serve", lambda *given: found.append(given))
    (tmp_path / "m.gguf").write_bytes(b"x" * 10)
    folder = adapter(tmp_path / "sql")
    spec = f"b=target={tmp_path}/m.gguf,draft=https://one/v1,https://two/v1,head=h,head=i,compile=false,draft-dtype=int8"
    line = [
        "--pair",
        "a=",
        "--pair",
        spec,
        "--dtype",
        "int8",
        "--lora",
        f"sql@b={folder}",
        "--alias",
        "gpt@b",
    ]
    assert main(["serve", *line]) == 0
    settings, sources, aliases = found[0]
    assert (
        [one.name for one in sources] == ["a", "b", "sql"]
        and aliases == {"gpt": "b"}
        and settings.aliases == ()
    )
    first, second = (one.load.args[0].given() for one in sources[:2])
    assert first == {"dtype": "int8"}
    assert second == {
        "target": f"{tmp_path}/m.gguf", "draft": "https://one/v1,https://two/v1", "head": ["h", "i"],
        "dtype": "int8", "compile": False, "draft_dtype": "int8",
    }  # fmt: skip
    assert sources[1].size == 10 and (sources[2].pair, sources[2].adapter) == ("b", folder)

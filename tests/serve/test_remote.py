"""A target on a server: laws and texts are those of the same pair in one process; what fails is one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx2
import pytest
import torch
from tests.doors.server import in_both
from tests.engine.joint_laws import PROMPT, law_of_texts
from tests.engine.table_backend import TableModel
from tests.engine.test_runner_laws import Draws, Pair
from tests.models.tiny import word_tokenizer
from tests.serve.server import Running, builtin_pair, serving

import sprinter
from sprinter.decode.enumerate import target_joint_law
from sprinter.decode.spec import parse_method
from sprinter.engine.executor import Executor
from sprinter.errors import EngineError, UserError
from sprinter.fingerprint import words_fingerprint
from sprinter.models.choose import make_runner
from sprinter.models.remote import KEY, RemoteModel
from sprinter.models.remote import _seconds as seconds

METHODS = ("speculative(gamma=4)", "svip", "block(gamma=3)", "lookup", "autoregressive", "auto")
TEXTS = ("The river rises in the mountains and", "Once upon a time", "A small town")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(builtin_pair()) as found:
        yield found


@pytest.fixture(scope="module")
def remote(server: Running) -> sprinter.Pair:
    paths = sprinter.builtin_paths()
    return sprinter.load_pair(f"{server.url}/v1#builtin", paths["draft"], gate=paths["gate"])


@pytest.mark.parametrize("method", METHODS)
def test_greedy_texts_are_the_servers_own(server: Running, remote: sprinter.Pair, method: str) -> None:
    texts = remote.generate_batch(list(TEXTS), method=method, temperature=0, max_new_tokens=24)
    for prompt, text in zip(TEXTS, texts, strict=True):
        body = {"model": "builtin", "prompt": prompt, "max_tokens": 24, "temperature": 0}
        own = server.post("/v1/completions", {**body, "sprinter": {"method": "autoregressive"}})
        assert text.text == own.json()["choices"][0]["text"]
        assert text.stats.mean_drift == pytest.approx(0, abs=1e-6)


def test_drift_and_tokens_are_those_of_one_process(remote: sprinter.Pair) -> None:
    for mine, theirs in in_both(remote, TEXTS[0]):
        assert theirs.stats.target_calls == mine.stats.target_calls


def test_a_round_trip_a_call_and_new_tokens_alone_are_answered(remote: sprinter.Pair) -> None:
    target = remote.models.target.model
    assert isinstance(target, RemoteModel)
    before = target.usage.round_trips, target.usage.laws
    text = remote.generate(TEXTS[0], method="speculative(gamma=4)", max_new_tokens=20, seed=1)
    assert target.usage.round_trips - before[0] == text.stats.target_calls + text.stats.closing_passes
    assert target.usage.laws - before[1] == text.stats.drafted + text.stats.target_calls
    asked = text.stats.remote
    assert asked["round_trips"] == target.usage.round_trips - before[0]
    assert asked["received_bytes"] == 4 * target.vocab_size * (target.usage.laws - before[1])
    assert asked["paid_tokens"] >= text.prompt_tokens + len(text.tokens) - 1 and asked["sent_bytes"] > 0
    assert (
        text.to_dict()["stats"]["remote"] == asked
        and f"{asked['paid_tokens']} tokens paid" in text.stats.summary
    )


def test_an_answer_may_be_larger_than_what_a_socket_takes(server: Running) -> None:
    """Much of it is still to be sent when all of it has been made."""
    target = RemoteModel(f"{server.url}/v1")
    texts = [[3 + (i * step) % 90 for i in range(240)] for step in range(1, 5)]
    laws = target.laws([(ids, 0) for ids in texts])
    last = target.laws([(ids, 239) for ids in texts])
    assert target.usage.received_bytes > 10_000_000 and target.usage.round_trips == 3
    assert all(torch.allclose(own[-1], one[0], atol=1e-5) for own, one in zip(laws, last, strict=True))


def test_what_was_read_is_not_read_again(server: Running) -> None:
    """A text that grows costs its new tokens; an owner's rows are bounded, and other texts take turns in them."""
    engine, pair = server.service.engine, server.service.pair
    read: list[int] = []
    model = pair.models.target.model
    handle = model.register_forward_pre_hook(
        lambda *call: read.append((call[2].get("input_ids") if call[2] else None).shape[1]), with_kwargs=True
    )
    try:
        ids = list(range(5, 65))
        address = RemoteModel(f"{server.url}/v1")
        address.laws([(ids[:40], 39)])
        read.clear()
        first = address.laws([(ids[:45], 39)])[0]
        assert sum(read) == 6
        for other in range(12):  # more texts than rows are held
            address.laws([([200 + other, 5, 6], 2)])
        again = address.laws([(ids[:45], 39)])[0]
    finally:
        handle.remove()
    assert torch.allclose(first, again, atol=1e-4) and len(engine._scorer._held) == 8


def test_what_is_read_is_charged(server: Running) -> None:
    """A prompt once, then what is new; of another owner, who holds nothing here, all again."""
    engine, ids = server.service.engine, list(range(300, 350))
    owner = next(one.owner for one in engine._scorer._held)
    assert engine.unread(ids, 49, owner) == 50
    RemoteModel(f"{server.url}/v1").laws([(ids, 49)])
    assert engine.unread([*ids, 7, 8], 50, owner) == 2 and engine.unread(ids, 49, owner) == 1
    assert engine.unread([*ids, 7, 8], 50, "another") == 52


# --- exactness, with no server --------------------------------------------------------------------------------------
def transport(models: Any, seen: list[Any] | None = None, **change: Any) -> httpx2.MockTransport:
    """A server that answers from a model's uncached laws."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            about = {
                "model": "m", "fingerprint": "f", "vocabulary": "v", "vocab_size": models.vocab, "context": 64,
                "eos_ids": [], "parameters": 1, "weights": "float64",
            }  # fmt: skip
            return httpx2.Response(200, json={**about, **change})
        body = json.loads(request.content)
        if seen is not None:
            seen.append(body)
        laws = [
            torch.log(models.p(tuple(one["ids"][: at + 1]))).float()
            for one in body["texts"]
            for at in range(one["start"], len(one["ids"]))
        ]
        return httpx2.Response(200, content=torch.stack(laws).numpy().tobytes())

    return httpx2.MockTransport(answer)


@pytest.mark.parametrize(
    "name", ["speculative(gamma=2)", "block(gamma=2)", "svip", "sprinter(tau=0.5, cap=2)"]
)
def test_the_joint_law_by_enumeration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draw of texts whose target answers over a transport: exact methods write its own law."""
    pair, method = Pair(2), parse_method(name)
    target = RemoteModel("http://host/v1", transport=transport(pair))
    runners = [make_runner(one, batch=1, max_len=len(PROMPT) + 7) for one in (target, pair.models[1])]
    found = law_of_texts(Executor(runners[0], runners[1], pair.vocab), pair.heads, method, 3, 1, Draws())
    assert sum(found.values()) == pytest.approx(1, abs=1e-6)
    if method.lossless():
        wanted = target_joint_law(pair, 3, prompt=PROMPT)
        assert max(abs(found[text] - chance) for text, chance in wanted.items()) < 1e-6


# --- what fails -----------------------------------------------------------------------------------------------------
class Failing:
    """Answers as told, then as a table model."""

    vocab = 61

    def __init__(self, *answers: Any) -> None:
        self.table, self.answers, self.waits = TableModel(61, 1), list(answers), list[float]()
        self.inner = transport(self, vocabulary=words_fingerprint(word_tokenizer().get_vocab()))
        self.model = RemoteModel("http://host/v1", transport=httpx2.MockTransport(self.answer))
        self.model._sleep = self.waits.append

    def p(self, text: tuple[int, ...]) -> torch.Tensor:
        return torch.softmax(self.table.logits(text), -1)

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        told = self.answers.pop(0) if request.method == "POST" and self.answers else None
        if isinstance(told, Exception):
            raise told
        return self.inner.handler(request) if told is None else told  # type: ignore[return-value]


def error(status: int, **headers: str) -> httpx2.Response:
    return httpx2.Response(status, json={"error": {"message": "not now"}}, headers=headers)


def test_a_busy_server_is_asked_again_with_the_same_draws() -> None:
    answers = [error(429, **{"Retry-After": "3"}), httpx2.ConnectError("gone"), error(503), None, error(500)]
    failing = Failing(*answers)
    prompt = [5, 6, 7]
    plain = Failing().model
    texts = []
    for model in (failing.model, plain):
        pair = sprinter.load_pair(model, TableModel(61, 2), tokenizer=word_tokenizer())
        texts.append(pair.generate(prompt, method="speculative(gamma=3)", max_new_tokens=12, seed=4))
    assert [one.id for one in texts[0].tokens] == [one.id for one in texts[1].tokens]
    assert failing.waits[0] == 3 and len(failing.waits) == 4 and not failing.answers


@pytest.mark.parametrize(("answers", "line"), [
    ([httpx2.ConnectError("gone")] * 4, "cannot be reached"),
    ([httpx2.ReadTimeout("late")] * 4, "did not answer in time"),
    ([error(429, **{"Retry-After": "900"})], "answered 429, not now: wait, or ask for a higher limit"),
    ([error(409)], "load the pair again"),
    ([error(401)], KEY),
    ([httpx2.Response(200, content=b"1234")], "not 1 laws"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_a_server_that_fails_ends_a_text_in_one_line(answers: list[Any], line: str) -> None:
    failing = Failing(None, None, *answers)
    pair = sprinter.load_pair(failing.model, TableModel(61, 2), tokenizer=word_tokenizer())
    stream = pair.stream([5, 6, 7], method="autoregressive", max_new_tokens=12)
    with pytest.raises((EngineError, UserError), match=line) as told:
        list(stream)
    assert "\n" not in str(told.value)
    assert len(stream.generation.tokens) == 2 and stream.generation.finish_reason == "error"
    whole = pair.generate([5, 6, 7], method="autoregressive", max_new_tokens=4)  # others go on
    assert len(whole.tokens) == 4


def test_addresses_that_are_refused(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = sprinter.builtin_paths()["draft"]
    with pytest.raises(UserError, match="serves 'builtin', not 'other'"):
        sprinter.load_pair(f"{server.url}/v1#other", draft)
    with pytest.raises(UserError, match="answered 404"):
        sprinter.load_pair(f"{server.url}/v2", draft)
    monkeypatch.setattr("sprinter.models.remote._TRIES", 1)
    with pytest.raises(UserError, match="cannot be reached"):
        sprinter.load_pair("http://127.0.0.1:9/v1", draft)
    with pytest.raises(UserError, match="round trip a token"):
        sprinter.load_pair(draft, f"{server.url}/v1")
    with pytest.raises(UserError, match="is not that of the server"):
        sprinter.load_pair(f"{server.url}/v1", tokenizer=word_tokenizer())
    pair = sprinter.load_pair(f"{server.url}/v1", draft)
    with pytest.raises(UserError, match="tree"):
        pair.generate("A", method="tree", max_new_tokens=4)


def test_a_server_with_keys(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-long-secret-of-tests\n")
    with serving(builtin_pair(), api_keys=keys) as server:
        draft = sprinter.builtin_paths()["draft"]
        with pytest.raises(UserError, match=KEY):
            sprinter.load_pair(f"{server.url}/v1", draft)
        monkeypatch.setenv(KEY, "a-long-secret-of-tests")
        pair = sprinter.load_pair(f"{server.url}/v1", draft)
        assert len(pair.generate("A", max_new_tokens=3).tokens) == 3


@pytest.mark.parametrize(("body", "status"), [
    ({"texts": [{"ids": [1, 2], "start": 2}]}, 400), ({"texts": [{"ids": [1, 99999], "start": 0}]}, 400),
    ({"texts": []}, 400), ({"texts": [{"ids": [], "start": 0}]}, 400), ({"texts": [{"ids": [1], "start": -1}]}, 400),
    ({"texts": [{"ids": [1] * 9000, "start": 0}]}, 400), ({"texts": [{"ids": [1], "start": 0}], "model": "x"}, 404),
    ({"texts": [{"ids": [1], "start": 0}], "fingerprint": "x"}, 409), ({"texts": [{"ids": [1], "start": 0}]}, 200),
    ({"texts": [{"ids": [1] * 200, "start": 0}] * 64}, 400),
])  # fmt: skip
def test_what_the_server_is_asked(server: Running, body: dict[str, Any], status: int) -> None:
    answer = server.post("/v1/score", body)
    assert answer.status_code == status
    assert (
        (len(answer.content) == 4 * server.service.pair.models.vocab_size)
        if status == 200
        else answer.json()["error"]
    )


def test_half_as_many_bytes(server: Running) -> None:
    whole, half = (RemoteModel(f"{server.url}/v1", dtype=dtype) for dtype in ("float32", "float16"))
    laws = [one.laws([([5, 6, 7], 0)])[0] for one in (whole, half)]
    assert half.usage.received_bytes < 0.6 * whole.usage.received_bytes
    assert float((laws[0].exp() - laws[1].exp()).abs().sum(-1).max()) / 2 < 2e-3


def test_how_long_a_server_asks_to_wait() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert [seconds(header, 0.5) for header in (None, "7", "soon")] == [0.5, 7, 0.5]
    assert 25 < seconds(later, 0.5) <= 30


# --- several servers ------------------------------------------------------------------------------------------------
def replicas(down: dict[str, Any], asked: list[str], **other: Any) -> sprinter.Pair:
    """A target on the hosts a and b; those in ``down`` fail so."""
    words = word_tokenizer()
    same = Failing()
    told = {"vocabulary": words_fingerprint(words.get_vocab())}
    inner = {"a": same.inner, "b": transport(same, **{**told, **other})}

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.host)
        fault = down.get(request.url.host)
        if isinstance(fault, Exception):
            raise fault
        return fault or inner[request.url.host].handler(request)  # type: ignore[return-value]

    model = RemoteModel("http://a/v1#m,http://b/v1", transport=httpx2.MockTransport(answer))
    model._sleep = lambda seconds: None
    return sprinter.load_pair(model, TableModel(61, 2), tokenizer=words)


@pytest.mark.parametrize(
    "fault",
    [httpx2.ConnectError("gone"), httpx2.ReadTimeout("late"), error(429, **{"Retry-After": "900"}), error(409)],
    ids=["killed", "slow", "busy", "changed"],
)  # fmt: skip
def test_a_text_goes_on_at_another_server(fault: Any, caplog: pytest.LogCaptureFixture) -> None:
    down, asked = dict[str, Any](), list[str]()
    pair = replicas(down, asked)
    options: dict[str, Any] = {"method": "speculative(gamma=3)", "max_new_tokens": 12, "seed": 4}
    whole = pair.generate([5, 6, 7], **options)
    stayed = {*asked[2:]}
    assert len(stayed) == 1  # a text stays with its server
    stream, (home,), tokens = pair.stream([5, 6, 7], **options), stayed, []
    for token in stream:
        tokens.append(token.id)
        down |= {home: fault}
    assert tokens == [token.id for token in whole.tokens] and caplog.text.count("another server") == 1
    assert f"http://{home}/v1" in caplog.text
    down["b" if home == "a" else "a"] = httpx2.ConnectError("gone")
    with pytest.raises((EngineError, UserError)):
        pair.generate([5, 6, 7], **options)


def test_rows_are_spread_over_servers(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[str] = []
    pair = replicas({}, asked)
    prompts = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]
    texts = pair.generate_batch(prompts, method="speculative(gamma=3)", max_new_tokens=8, seed=4)
    assert {*asked[2:]} == {"a", "b"} and len(texts) == 3
    usage = pair.models.target.model.usage
    assert usage.paid_tokens == sum(text.stats.remote["paid_tokens"] for text in texts)


def test_servers_that_are_down_or_differ_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    assert len(replicas({"a": error(503)}, []).generate([5, 6, 7], max_new_tokens=3).tokens) == 3
    assert caplog.text.count("another server") == 1 and "http://a/v1" in caplog.text
    with pytest.raises(UserError, match="serve different models"):
        replicas({}, [], fingerprint="other")
    with pytest.raises(UserError, match="cannot be reached"):
        replicas(dict.fromkeys("ab", httpx2.ConnectError("gone")), [])


def test_answers_that_are_not_read_hold_places(server: Running) -> None:
    """Clients that do not read would fill the memory."""
    owners, body = server.service.owners, {"texts": [{"ids": [1], "start": 0}]}
    free = owners._laws.free
    leave = owners.hold_laws("127.0.0.1", free)
    assert server.post("/v1/score", body).status_code == 503
    leave()
    assert server.post("/v1/score", body).status_code == 200
    assert server.post("/v1/score", {"texts": [{"ids": [1], "start": 3}]}).status_code == 400
    assert owners._laws.free == free

"""The Ray engine: the local engine's records, also if a worker dies, and its error messages."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.tiny import save_tiny
from tests.training.labelling import same_records, words

import sprinter
from sprinter.errors import SprinterError, UserError
from sprinter.training import ray_pool
from sprinter.training.drafts import states
from sprinter.training.drafts.folder import Judging
from sprinter.training.drafts.heads import train_heads
from sprinter.training.drafts.settings import HeadSettings, TextSettings, TrainingSettings
from sprinter.training.label_run import LabelProgress, LabelReport, label
from sprinter.training.label_settings import LabelSettings
from sprinter.training.records import read_records

SETTINGS = LabelSettings(new_tokens=5, prompt_tokens=16, batch_size=4)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> sprinter.Pair:
    root = tmp_path_factory.mktemp("pair")
    save_tiny(root / "target", seed=1)
    save_tiny(root / "draft", seed=2, layers=1)
    return sprinter.load_pair(root / "target", draft=root / "draft")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "texts.txt"
    file.write_text("".join(words(30, seed) + "\n" for seed in range(22)))
    return file


# --- a stand-in for ray, which runs in this process -------------------------------------------------------------------


class FakeHandle:
    """Stands in for an actor, or for its method ``run``: what goes in and out is pickled."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def remote(self, *given: Any) -> Any:
        return self._call(*pickle.loads(pickle.dumps(given)))

    @property
    def run(self) -> FakeHandle:
        return FakeHandle(self._call)


class FakePool:
    """Stands in for Ray's ActorPool: three actors, the first of which does it all, out of order."""

    def __init__(self, actors: Sequence[Any]) -> None:
        assert len(actors) == 3
        self.actor = actors[0]

    def map_unordered(self, call: Callable[[Any, Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
        for task in reversed(tasks):
            yield pickle.loads(pickle.dumps(call(self.actor, task)))


def fake_ray(initialized: bool = False, fails: Exception | None = None) -> Any:
    """A module with the functions that the engine calls."""
    calls: list[str] = []

    def init(**options: Any) -> None:
        calls.append("init")
        if fails is not None:
            raise fails

    def remote(**options: Any) -> Callable[[type], FakeHandle]:
        assert options["max_restarts"] == options["max_task_retries"] == -1, (
            "an actor that dies loses nothing"
        )
        return lambda kind: FakeHandle(lambda *given: FakeHandle(kind(*given).run))

    return types.SimpleNamespace(
        calls=calls, init=init, is_initialized=lambda: initialized, shutdown=lambda: calls.append("shutdown"),
        remote=remote, util=types.SimpleNamespace(ActorPool=FakePool),
    )  # fmt: skip


def use(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.util", fake.util)


def with_ray(pair: sprinter.Pair, data: Path, out: Path, **options: Any) -> LabelReport:
    return label(pair, [data], out, SETTINGS, engine="ray", **options)


@pytest.mark.parametrize("initialized", [False, True])
def test_steps_travel_and_shards_come_back(
    pair: sprinter.Pair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, initialized: bool
) -> None:
    fake = fake_ray(initialized)
    use(fake, monkeypatch)
    told: list[LabelProgress] = []
    report = with_ray(pair, data, tmp_path / "ray", workers=3, progress=told.append)
    assert report.info == label(pair, [data], tmp_path / "local", SETTINGS).info
    assert fake.calls == ([] if initialized else ["init", "shutdown"]), (
        "a cluster of the user's own is left running"
    )
    assert [round(done.share * 6) for done in told] == [1, 2, 3, 4, 5, 6]
    fake.calls.clear()
    assert with_ray(pair, data, tmp_path / "ray", workers=3).resumed == 6
    assert fake.calls == [], "with nothing to do no cluster is started"


def test_files_that_workers_cannot_load_are_refused(
    pair: sprinter.Pair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = replace(pair.models.target, id="some/model.gguf")
    monkeypatch.setattr(pair, "models", replace(pair.models, target=target))
    with pytest.raises(UserError, match="workers of engine=ray load no GGUF files: give engine=local"):
        with_ray(pair, data, tmp_path / "out")


def test_clusters_that_cannot_be_used(
    pair: sprinter.Pair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(fake_ray(fails=ConnectionError("refused\nat length")), monkeypatch)
    with pytest.raises(
        UserError, match=r"cannot use the cluster at 'ray:1' \(refused\): check --ray-address"
    ):
        with_ray(pair, data, tmp_path / "out", ray_address="ray:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        UserError, match=r"engine=ray needs Ray: pip install '.\[ray\]' in .*pip install 'ray"
    ):
        with_ray(pair, data, tmp_path / "out")


def test_another_model_on_a_worker_is_refused(
    pair: sprinter.Pair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(fake_ray(), monkeypatch)
    monkeypatch.setattr(ray_pool, "weights_fingerprint", lambda model: "0" * 64)
    with pytest.raises(UserError, match="is another model on a worker: put the same on all nodes"):
        with_ray(pair, data, tmp_path / "out", workers=3)


HEADS: dict[str, Any] = {
    "texts": TextSettings(new_tokens=6, prompt_tokens=12, shard=8, held_out=0.2),
    "shape": HeadSettings("eagle3", heads=3),
    "training": TrainingSettings(steps=2, checkpoint=2, tokens=256),
    "judging": Judging(prompts=1, new_tokens=4),
}


def heads_states(pair: sprinter.Pair, data: Path, out: Path, **options: Any) -> dict[str, bytes]:
    """Files of the states that heads were trained on."""
    train_heads(pair, pair.models.target.module("a test"), [data], out, **HEADS, **options)
    return {path.name: path.read_bytes() for path in sorted((out / "states").glob("*.safetensors"))}


def test_states_of_the_target_come_back_from_workers(
    pair: sprinter.Pair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and heads are those of a training without Ray; what is there is not asked for again."""
    monkeypatch.setattr(states, "_SHARD", 8)
    local = heads_states(pair, data, tmp_path / "local")
    fake = fake_ray()
    use(fake, monkeypatch)
    seen: list[tuple[int, int]] = []
    options = {"engine": "ray", "workers": 3, "on_states": lambda *both: seen.append(both)}
    assert heads_states(pair, data, tmp_path / "ray", **options) == local
    assert fake.calls == ["init", "shutdown"] and len(seen) == 3 and len(local) % 3 == 0
    assert seen == [(6, 22), (14, 22), (22, 22)], "the last shard, which is smaller, comes first"
    heads = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("local", "ray")]
    assert heads[0] == heads[1]
    min((tmp_path / "ray" / "states").glob("*.safetensors")).write_bytes(b"half")
    assert heads_states(pair, data, tmp_path / "ray", **options) == local
    assert heads_states(pair, data, tmp_path / "ray", **options) == local
    assert fake.calls == ["init", "shutdown"] * 2


def test_workers_for_states_are_refused_where_they_cannot_be_used(
    pair: sprinter.Pair, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(fake_ray(), monkeypatch)
    for options, why in (
        ({"workers": 2}, "workers=2 is of the ray engine"),
        ({"engine": "spark"}, "there is no engine 'spark'"),
        ({"engine": "ray", "shape": HeadSettings("eagle3", keep_states=False)}, "give keep_states"),
    ):
        with pytest.raises(UserError, match=why):
            train_heads(
                pair, pair.models.target.module("a test"), [data], tmp_path / "out", **(HEADS | options)
            )
    monkeypatch.setattr(ray_pool, "weights_fingerprint", lambda model: os.urandom(8).hex())
    with pytest.raises(UserError, match="is another model on a worker: put the same on all nodes"):
        heads_states(pair, data, tmp_path / "out", engine="ray", workers=3)


def test_our_own_error_is_dug_out_of_rays() -> None:
    def raised(error: BaseException, causes: Iterable[BaseException]) -> BaseException:
        at = error
        for cause in causes:
            at.__cause__ = cause
            at = cause
        return ray_pool._plain(error)

    assert (
        str(raised(RuntimeError("task failed"), [KeyError(1), UserError("fix this\n at line 3")]))
        == "fix this"
    )
    wrapped = RuntimeError("ray::task()")
    wrapped.cause = SprinterError("NaN")  # type: ignore[attr-defined]
    assert str(raised(RuntimeError("outer"), [wrapped])) == "NaN"
    other = RuntimeError("other")
    assert raised(other, []) is other


# --- a real cluster on this machine -----------------------------------------------------------------------------------


def worker_pids() -> list[int]:
    """Processes of the actors that label."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::") and b"_Actor" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_workers_make_the_local_engines_records(pair: sprinter.Pair, data: Path, tmp_path: Path) -> None:
    local = label(pair, [data], tmp_path / "local", SETTINGS)
    report = with_ray(pair, data, tmp_path / "ray")
    assert same_records(read_records(tmp_path / "local"), read_records(tmp_path / "ray"), 1e-6)
    assert (report.info.positions, report.info.settings_hash) == (
        local.info.positions,
        local.info.settings_hash,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="finds the workers in /proc")
def test_a_worker_that_is_killed_loses_nothing(pair: sprinter.Pair, data: Path, tmp_path: Path) -> None:
    data.write_text("".join(words(60, seed) + "\n" for seed in range(400)))
    killed: list[int] = []

    def kill(done: LabelProgress) -> None:
        if not killed and done.share > 0.1:
            killed.append(worker_pids()[0])
            os.kill(killed[0], signal.SIGKILL)

    report = with_ray(pair, data, tmp_path / "ray", progress=kill)
    label(pair, [data], tmp_path / "local", SETTINGS)
    assert len(killed) == 1 and report.info.shards == 100
    assert same_records(read_records(tmp_path / "local"), read_records(tmp_path / "ray"), 1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_workers_compute_the_states_of_one(pair: sprinter.Pair, data: Path, tmp_path: Path) -> None:
    data.write_text("".join(words(30, seed) + "\n" for seed in range(90)))
    local = heads_states(pair, data, tmp_path / "local")
    assert heads_states(pair, data, tmp_path / "ray", engine="ray") == local

"""The tiny pair, good and broken, and ways to run the command line."""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.cli.chats import TEMPLATE
from tests.cli.tiny import HIDDEN, Ended, Places, Run, save_tiny

from sprinter.cli import main
from sprinter.fingerprint import weights_fingerprint
from sprinter.heads.artifact import save_head
from sprinter.heads.head import Head, HeadConfig
from sprinter.heads.networks import Linear

SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    root = tmp_path_factory.mktemp("models")
    found = Places(root / "target", root / "draft", root / "gate", root)
    save_tiny(found.target, seed=1)
    draft = save_tiny(found.draft, seed=2, layers=1)
    for directory, fingerprint in ((found.gate, weights_fingerprint(draft)), (root / "other-gate", "0" * 64)):
        config = HeadConfig(HIDDEN, str(found.draft), str(found.target), None, fingerprint)
        gate = Head(config, Linear.of(torch.randn(1, HIDDEN), torch.zeros(1)))
        save_head(gate, directory, "# A random gate\n")
    save_tiny(root / "nan", seed=4, layers=1, broken=True)
    corrupt = shutil.copytree(found.target, root / "corrupt") / "model.safetensors"
    corrupt.write_bytes(corrupt.read_bytes()[: corrupt.stat().st_size // 2])
    pickled = shutil.copytree(found.target, root / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    (root / "empty").mkdir()
    (root / "texts.txt").write_text("a few words\n")
    return found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run the command line in this process, on one thread: the models are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def call(*args: str, stdin: bytes = b"") -> Ended:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        status = main(args)
        return Ended(status, *capsys.readouterr())

    yield call
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """For real processes: one thread, no colours asked for, this checkout's package."""
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("SPRINTER_", "TRANSFORMERS_"))
    }
    return kept | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@pytest.fixture
def template(tmp_path: Path) -> str:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    return str(file)

"""``sprinter serve``: an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sprinter.cli.loading import Loading, load, loads
from sprinter.cli.pairs import named_pairs, split_name
from sprinter.cli.signature import option, takes
from sprinter.errors import UserError, first_line, install_line
from sprinter.serve.settings import ServeSettings

if TYPE_CHECKING:
    from sprinter.serve.registry import NamedSource

__all__ = ["serve"]

_PANELS = {
    "Several models": "models_bytes",
    "Limits": "rows max_len memory_bytes step_tokens max_waiting max_prompt_tokens max_new_tokens max_draft "
    "max_body_bytes queue_timeout_s request_timeout_s drain_timeout_s rate_limit token_limit",
    "Access": "api_keys allow_anonymous allowed_hosts tls_cert tls_key log_prompts",
}
_KEPT = (
    "max_choices",
    "max_logprobs",
    "header_timeout_s",
    "body_timeout_s",
    "max_connections",
    "min_free_bytes",
)
"""Settings that no command line changes."""

_several = partial(option, panel="Several models", default=False)


@loads()
@takes("settings", ServeSettings, without=_KEPT, panels=_PANELS)
def serve(
    loading: Loading = Loading(),
    settings: Any = None,
    pair: Annotated[
        list[str] | None,
        _several(
            "A pair by name, loaded when it is asked for, with the options that load one: "
            "NAME=target=org/big,draft=org/small,dtype=int8; may be repeated."
        ),
    ] = None,
    lora: Annotated[
        list[str] | None,
        _several(
            "A LoRA adapter of a target by name, loaded when it is asked for: NAME=FOLDER, with several pairs "
            "NAME@PAIR=FOLDER; may be repeated."
        ),
    ] = None,
) -> int:
    """Serve the pair over HTTP, with OpenAI's interface: completions, chat completions, models.

    Logs are JSON lines on standard error. SIGTERM ends the server when its open requests have ended.
    """
    try:
        from sprinter.serve.logs import logs_to
        from sprinter.serve.run import serve as run
    except ImportError as error:
        raise UserError(
            f"the server needs FastAPI, Uvicorn and prometheus-client ({first_line(error)}): {install_line('serve')}"
        ) from None
    sources, aliases = _pairs(pair or (), loading, settings)
    sources += [_adapter(one, sources, several=bool(pair)) for one in lora or ()]
    with logs_to():
        run(replace(settings, aliases=()) if pair else settings, sources, aliases)
    return 0


def _pairs(given: Sequence[str], loading: Loading, settings: Any) -> tuple[list[NamedSource], dict[str, str]]:
    """The pairs of a server, and further names of several."""
    from sprinter.serve.registry import NamedSource

    if not given:
        name = settings.model_name or (None if loading.target else "builtin")
        return [NamedSource(name, partial(load, loading))], {}
    named = named_pairs(given, loading)
    if settings.model_name is not None:
        raise UserError(
            f"model_name={settings.model_name} is of one pair: write it as the name of --pair NAME=..."
        )
    sources = []
    for name, chosen in named:
        files = [chosen.target, chosen.draft]
        sources.append(NamedSource(name, partial(load, chosen), size=sum(map(_size, filter(None, files)))))
    aliases = {}
    for alias in settings.aliases:
        new, _, name = alias.rpartition("@")
        if not new or name not in [one.name for one in sources]:
            raise UserError(f"--alias {alias} names none of the pairs: write NAME@PAIR")
        aliases[new] = name
    return sources, aliases


def _adapter(given: str, sources: Sequence[NamedSource], several: bool) -> NamedSource:
    from sprinter.serve.registry import NamedSource

    what = "NAME@PAIR=FOLDER" if several and len(sources) > 1 else "NAME=FOLDER"
    name, folder = split_name(given, "--lora", what)
    name, _, pair = name.partition("@")
    names = [one.name for one in sources]
    if (pair or len(names) > 1) and pair not in names:
        raise UserError(f"--lora {given} names none of the pairs: write --lora {what}")
    place = Path(folder).expanduser()
    if not (place / "adapter_config.json").is_file():
        raise UserError(
            f"--lora {given}: {folder} has no adapter_config.json: give a folder that PEFT has saved"
        )
    return NamedSource(name, pair=pair or names[0], adapter=place, size=_size(folder))


def _size(given: str) -> int:
    """Bytes of a model's files; 0: they are not on this machine, or not yet."""
    place = Path(given).expanduser()
    files = place.glob("*.safetensors") if place.is_dir() else [place] if place.is_file() else []
    return sum(file.stat().st_size for file in files)

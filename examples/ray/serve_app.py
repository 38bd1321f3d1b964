"""Our server in Ray Serve: replicas of a pair, autoscaling on the requests in each, a session's replica found again.

    pip install 'ray[serve]'
    serve run examples.ray.serve_app:app                         # the built-in pair
    serve run examples.ray.serve_app:app target=org/large draft=org/small replicas=4 num_gpus=1

A client that sends a header `serve_multiplexed_model_id: SESSION` reaches the replica that has served the session,
whose prefix cache holds its text; without it, the replica with the fewest requests.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from sprinter import load_pair
from sprinter.serve.app import make_app
from sprinter.serve.service import Service
from sprinter.serve.settings import ServeSettings

SESSIONS = 1024
"""Sessions whose replica is remembered."""


def app(args: dict[str, str]) -> Any:
    """The application; ``args`` are those of ``serve run``: target, draft, gate, replicas, rows, num_cpus, num_gpus."""
    models = {name: args[name] for name in ("target", "draft", "gate") if name in args}
    rows, replicas = int(args.get("rows", 8)), int(args.get("replicas", 2))

    def server() -> Any:
        pair = load_pair(**models)  # before Ray counts the replica as ready
        # keys and TLS are for what stands before Ray's proxy, and so are names of hosts
        name = args.get("model_name", None if "target" in args else "builtin")
        settings = ServeSettings(rows=rows, model_name=name, allowed_hosts=("*",))
        return make_app(Service(settings, lambda: pair))

    @serve.deployment(
        ray_actor_options={"num_cpus": float(args.get("num_cpus", 1)), "num_gpus": float(args.get("num_gpus", 0))},
        max_ongoing_requests=4 * rows,
        autoscaling_config={"min_replicas": 1, "max_replicas": replicas, "initial_replicas": replicas,
                            "target_ongoing_requests": rows},
    )  # fmt: skip
    @serve.ingress(server)
    class Sprinter:
        @serve.multiplexed(max_num_models_per_replica=SESSIONS)
        async def session(self, name: str) -> str:
            return name

    return Sprinter.bind()

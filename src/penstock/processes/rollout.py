"""The process of a rollout server: our own engine, or the manager of a foreign engine, which never imports torch."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from penstock.config import load_config
from penstock.runtime.lasting_imports import lasting_imports
from penstock.supervisor.child import Child


def serve(child: Child) -> Coroutine[Any, Any, None]:
    config = load_config(child.run_dir / "config.yaml")
    if config.rollout.engine == "penstock" and not config.rollout.urls:
        with lasting_imports():
            from penstock.processes import slot_server

        return slot_server.serve(child, config)
    from penstock.processes import foreign_server

    return foreign_server.serve(child, config)

"""Settings of `env.name: atropos`, where environments are programs of their own and play by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, ValidationError

from penstock.config.section import Section

if TYPE_CHECKING:
    from penstock.config.schema import Config

ATROPOS = "atropos"


class AtroposOptions(Section):
    """`env.options` of it."""

    port: int = Field(8000, ge=0, le=65535)
    """Of trajectory API and inference, on loopback; the one that environments look at unless told otherwise. 0 lets the
    system choose: `atropos.json` in the run's directory says which."""


def check_atropos(config: Config) -> None:
    """Raises ValueError for what such environments cannot do."""
    if config.env.mixture or config.validation.mixture:
        raise ValueError(
            "env.name atropos is for a run of its own: remove env.mixture and validation.mixture, or play the other "
            "environments in another run"
        )
    try:
        AtroposOptions.model_validate(config.env.options)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise ValueError(
            f"env.options of env.name atropos are {', '.join(AtroposOptions.model_fields)}; {wrong}"
        ) from None
    needed = {
        "data.source": (config.data.source, "seeds", "such environments choose their own tasks"),
        "data.eval_tasks": (config.data.eval_tasks, 0, "such environments evaluate by themselves"),
        "validation.tasks": (config.validation_tasks, 0, "such environments evaluate by themselves"),
        "env.workers": (config.env.workers, 1, "all such environments push to one address"),
        "env.redundancy": (config.env.redundancy, 0, "such environments play whole groups"),
        "model.warm_start.steps": (config.model.warm_start.steps, 0, "such environments show no demonstrations"),
        "scheduler.segment_length": (config.scheduler.segment_length, None, "what such environments play is never cut"),
    }
    for name, (value, only, why) in needed.items():
        if value != only:
            shown = "null" if only is None else only
            raise ValueError(f"{name} is {value}, and with env.name atropos it must be {shown}: {why}")
    if config.scheduler.dispatch.policy == "probe":
        raise ValueError(
            "scheduler.dispatch.policy probe plays single members first, and Atropos environments whole groups"
        )
    if config.scheduler.mode == "colocated":
        raise ValueError("scheduler.mode colocated takes the servers away from Atropos environments: use another mode")

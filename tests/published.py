"""Published weights, as a trainer with one rank writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from penstock.types import WeightsHandle
from penstock.weights.publication import WeightsPublisher
from penstock.weights.shared_memory import layout


def publish(named: Mapping[str, Tensor], *, directory: Path, policy_version: int) -> WeightsHandle:
    return publish_next(WeightsPublisher(directory), named, policy_version)


def publish_next(publisher: WeightsPublisher, named: Mapping[str, Tensor], policy_version: int) -> WeightsHandle:
    with publisher.open(layout(named), policy_version) as opened:
        return opened.write_whole(named.items(), policy_version)

"""Low-rank adapters that a server adds to weights which it has: the base.

The base is the mapped file that the trainer published once, so servers of one machine share its memory. Only the
weights with adapters are computed for each version, in memory of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from penstock.model.low_rank import change_of, merged, names_of
from penstock.types import AdaptersForm, WeightsHandle
from penstock.weights.shared_memory import Layout, WeightsMismatch


def layout_of_adapters(form: AdaptersForm, base: Layout) -> Layout:
    """Return the layout of a file of adapters for weights of layout `base`.

    Raises `WeightsMismatch` if the weights have no such adapters.
    """
    if form.base is None:
        raise WeightsMismatch("the adapters belong to weights that were not published: this server needs these first")
    if form.base.adapters is not None:
        raise WeightsMismatch("the base of adapters must have whole weights, but it has adapters itself")
    if form.rank < 1 or form.alpha < 1 or not form.targets:
        raise WeightsMismatch("adapters need a rank and an alpha of at least 1, and at least one weight")
    expected = {}
    for target in form.targets:
        if target not in base:
            raise WeightsMismatch(f"adapters are for parameter {target}, which is unknown to the model")
        shape = base[target][0]
        if len(shape) != 2:
            raise WeightsMismatch(f"adapters are for parameter {target}, which has shape {shape} and is no matrix")
        a, b = names_of(target)
        expected[a] = ((form.rank, shape[1]), torch.float32)
        expected[b] = ((shape[0], form.rank), torch.float32)
    return expected


class MergingReceiver:
    """A callable that returns the whole weights of any handle. It keeps the base of adapters mapped."""

    def __init__(self, receive: Callable[[WeightsHandle], Mapping[str, Tensor]], device: torch.device) -> None:
        """`receive`: returns the tensors of a handle, of which nothing is added. `device`: computes the sums."""
        self._receive, self._device = receive, device
        self._base: Mapping[str, Tensor] = {}
        self._base_fingerprint: str | None = None

    @torch.no_grad()
    def __call__(self, handle: WeightsHandle) -> Mapping[str, Tensor]:
        """Return the weights by name: of adapters, the sums on the device, and other weights where the base lies.

        Raises `WeightsMismatch` if the adapters do not belong to weights that this server has or can get. Other errors:
        as of `receive`.
        """
        form = handle.adapters
        if form is None:
            self._base, self._base_fingerprint = {}, None
            return {name: tensor.to(self._device) for name, tensor in self._receive(handle).items()}
        if form.base is not None:  # else the adapters are refused
            self._obtain_base(form.base, handle.policy_version)
        adapters = self._receive(handle)
        sums = {}
        for target in form.targets:
            a, b = (adapters[name].to(self._device) for name in names_of(target))
            sums[target] = merged(self._base[target].to(self._device), change_of(a, b, alpha=form.alpha))
        return {**self._base, **sums}

    def _obtain_base(self, handle: WeightsHandle, policy_version: int) -> None:
        wanted = handle.fingerprint
        if wanted == self._base_fingerprint:
            return
        try:
            base = self._receive(handle)
        except WeightsMismatch as error:
            held = "none" if self._base_fingerprint is None else self._base_fingerprint
            raise WeightsMismatch(
                f"the adapters of policy_version {policy_version} belong to base {wanted}, and this server has {held}: "
                f"{error}"
            ) from error
        self._base, self._base_fingerprint = base, wanted

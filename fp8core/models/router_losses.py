"""Losses of routers, added to the objective: an even load of the experts, and small logits.

With the router logits z_t of a token t and p_t = softmax(z_t) over all E experts, in each sparse layer:

    f_s     = the share of each expert in the k choices of each token of sequence s     without gradient
    balance = mean over sequences s of  E <f_s, mean over its tokens of p_t>            1 where the load is even
    z       = mean over tokens of  logsumexp(z_t)^2

The balance is that of Switch (arXiv 2101.03961, eq. 4), by sequence as in DeepSeek-V3 (arXiv 2412.19437, eq. 17); z is
ST-MoE's (arXiv 2202.08906, eq. 5). All tokens of the rows in the loss's denominator count, prompts too, and no padding;
the means are over an update. So the gradients depend on no other row, whichever rows share a pass:

    d balance / dz_t = E / (sequences * tokens of s) * p_t * (f_s - <f_s, p_t>)
    d z / dz_t       = 2 / tokens * logsumexp(z_t) * p_t

Both in FP64, rounded once to FP32. The losses of all sparse layers are added."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8core.config.loss import RouterLossConfig


@dataclass(frozen=True)
class RouterObjective:
    """The losses of an update. `of_balance`, `of_z`: FP64 [rows], what a token of a row has of each mean."""

    settings: RouterLossConfig
    of_balance: Tensor
    of_z: Tensor

    @classmethod
    def of(cls, settings: RouterLossConfig, valid: Tensor, loss_mask: Tensor) -> "RouterObjective":
        """`valid`: bool [rows, T], False on padding. `loss_mask`: bool [rows, C], the loss's denominator."""
        active = loss_mask.any(dim=1).double()
        lengths = valid.sum(-1)
        sequences, tokens = active.sum().clamp_min(1), (active * lengths).sum().clamp_min(1)
        return cls(settings, active / (sequences * lengths), active / tokens)

    def part(self, rows: slice, counts: bool = True) -> "RouterLosses":
        """Of the pass of some rows; one that does not count adds nothing."""
        return RouterLosses(self.settings, self.of_balance[rows] * counts, self.of_z[rows] * counts)


@dataclass
class RouterLosses:
    """Those of one pass, layer by layer.

    Until `place`, a pass has no tokens. `total` adds a tensor over the processes that share the pass."""

    settings: RouterLossConfig
    of_balance: Tensor
    of_z: Tensor
    total: Callable[[Tensor], Tensor] = field(default=lambda own: own)
    _rows: Tensor = field(init=False)
    _layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def place(self, rows: Tensor, total: Callable[[Tensor], Tensor] | None = None) -> None:
        """`rows`: int64 [tokens], the row of each token of this process, -1 of padding."""
        self._rows = rows
        self.total = total or self.total
        # Padding has the last place, which the index -1 names.
        self.of_balance, self.of_z = (F.pad(each, (0, 1)).to(rows.device) for each in (self.of_balance, self.of_z))

    def gradient(self, logits: Tensor, choice: Tensor) -> Tensor:
        """By the logits, FP32 [tokens, experts] like them. `choice`: integers [tokens, k]. Called once per layer."""
        rows, (tokens, experts) = self._rows, logits.shape
        assert rows.shape == (tokens,), "the rows of other tokens"
        logits = logits.detach().double()
        z = logits.logsumexp(-1, keepdim=True)
        p = (logits - z).exp()
        # Flat, as torch's deterministic mode adds rows seven times slower.
        pairs = (rows[:, None] % len(self.of_z) * experts + choice).flatten()
        own = torch.zeros(len(self.of_z) * experts, dtype=torch.int64, device=logits.device)
        load = self.total(own.scatter_add_(0, pairs, torch.ones_like(pairs))).view(-1, experts)
        f = (load / load.sum(-1, keepdim=True).clamp_min(1).double())[rows]
        mean = (f * p).sum(-1, keepdim=True)
        of_balance, of_z = experts * self.of_balance[rows, None], self.of_z[rows, None]
        means = torch.stack(((of_balance * mean).sum(), (of_z * z.square()).sum()))
        self._layers.append((means, (load * (self.of_z > 0)[:, None]).sum(0)))
        weight = self.settings
        of_logits = weight.load_balancing * of_balance * p * (f - mean) + weight.z * 2 * of_z * z * p
        return of_logits.float()

    def statistics(self) -> Tensor:
        """After the backward: FP64 [sparse layers, 2 + experts]. A layer has its shares of balance and z, without their
        weights, and the tokens of each expert. Those of passes add."""
        if not self._layers:
            return torch.zeros(0, 2, dtype=torch.float64)
        means, loads = (torch.stack(each) for each in zip(*self._layers, strict=True))
        return torch.cat((self.total(means), loads.double()), dim=1).cpu()


def router_metrics(statistics: Tensor) -> dict[str, float]:
    """Of all passes of an update: means over sparse layers, and the worst load; none of a dense model."""
    if not len(statistics):
        return {}
    load = statistics[:, 2:]
    balance, z = statistics[:, :2].mean(0).tolist()
    worst = (load.amax(-1) / load.mean(-1).clamp_min(1e-9)).max()
    return {"router_load": float(worst), "router_load_balancing": balance, "router_z": z}


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, *ctx.saved_tensors, None


def with_gradient(value: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
    """`value`, made of the logits, whose gradient then has `gradient` added."""
    result: Tensor = _WithGradient.apply(value, logits, gradient)  # type: ignore[no-untyped-call]
    return result

"""Makes the known links: VARCO, Sylvie, PipeGCN, BNS and SANCUS."""

from __future__ import annotations

import torch

from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs import (
    Cast,
    ColumnMask,
    DegreeBits,
    Plain,
    Quantise,
    RowSample,
)
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.halo.schedule import Adaptive, Linear, Schedule
from pyg_distcomm.halo.staleness import Drift

_PICKS = {"random": "epoch", "prefix": "prefix"}


def VARCO(
    epochs: int,
    c_max: float = 128.0,
    c_min: float = 1.0,
    slope: float = 5.0,
    mask: str = "random",
    *,
    scaled: bool = False,
    schedule: Schedule | None = None,
    exact_last: bool = True,
    exact_eval: bool = True,
    seed: int = 0,
) -> LinkPolicy:
    """Returns a link that sends a growing share of the columns ([Cervino24]).

    The defaults are one setting for all graphs; `docs/papers/varco.md` says how it was found.
    The authors' scripts have the same slope, and end at c_min=1.5.

    Args:
        epochs: the number of epochs: `link.step()` once each.
        c_max, c_min: the first and the last compression ratio.
        slope: how often the ramp would fit in all epochs; the ratio reaches c_min after
            1/slope of them. 5 saves a fifth of the columns; 1 saves more than three
            quarters, and loses accuracy on some graphs.
        mask: "random" columns as in the paper, or the "prefix" of columns as in its scripts.
        scaled: scales received columns, which makes them unbiased.
        schedule: another schedule than the paper's, which is linear in c; it has bounds of
            its own, so leave out c_max, c_min and slope.
        exact_last, exact_eval, seed: see `LinkPolicy`.
    """
    if schedule is not None and (c_max, c_min, slope) != (128.0, 1.0, 5.0):
        raise ValueError(
            f"{schedule!r} has ratios of its own; give c_max, c_min and slope to it, not to "
            f"VARCO as well, which got {c_max}, {c_min} and {slope}"
        )
    if mask not in _PICKS:
        raise ValueError(f"mask must be one of {', '.join(_PICKS)}, got {mask!r}")
    if schedule is None:
        schedule = Linear(epochs, c_max, c_min, slope)
    return LinkPolicy(
        ColumnMask(c_max, _PICKS[mask], scaled=scaled),
        schedule,
        exact_last=exact_last,
        exact_eval=exact_eval,
        seed=seed,
    )


def Sylvie(
    bits: int = 1,
    late: int = 1,
    sync_every: int | None = None,
    adaptive: bool | Adaptive = False,
    *,
    by_degree: bool = False,
    late_gradients: int | None = None,
    warmup: int = 1,
    exact_last: bool = True,
    exact_eval: bool = True,
    seed: int = 0,
) -> LinkPolicy:
    """Returns a link that sends a few bits per number, one epoch late ([Zhang23]).

    Args:
        bits: 1, 2, 4 or 8; 16 is bf16, and 32 sends numbers unchanged.
        late: 1 is Sylvie-A, 0 is Sylvie-S.
        sync_every: the period of synchronous epochs: its staleness adaptor.
        adaptive: sets bits and timing by the loss, as the later Sylvie; give the loss to
            `link.step(loss)`.
        by_degree: gives rows of nodes with more in-edges more bits, from `bits` to 8, as
            the later Sylvie; see `DegreeBits`.
        late_gradients: 0 sends gradients promptly; None is as late as rows.
        warmup: how many epochs are synchronous at first.
        exact_last, exact_eval, seed: see `LinkPolicy`.
    """
    wide: dict[int, Codec] = {16: Cast(torch.bfloat16), 32: Plain()}
    few = DegreeBits(bits) if by_degree else wide.get(bits)
    return LinkPolicy(
        few or Quantise(bits, "stochastic"),
        late=late,
        late_gradients=late_gradients,
        sync_every=sync_every,
        warmup=warmup,
        adaptive=adaptive,
        exact_last=exact_last,
        exact_eval=exact_eval,
        seed=seed,
    )


def PipeGCN(
    smooth: float | None = None,
    smooth_gradients: float | None = None,
    *,
    late_gradients: int = 1,
    warmup: int = 1,
    exact_last: bool = True,
    exact_eval: bool = True,
) -> LinkPolicy:
    """Returns a link that sends unchanged rows, one epoch late ([Wan22a]).

    Args:
        smooth: the momentum of a moving average of late rows; 0.95 in the paper.
        smooth_gradients: that of late gradients; None is that of rows, 0 is none.
        late_gradients: 0 sends gradients promptly.
        warmup: how many epochs are synchronous at first.
        exact_last, exact_eval: see `LinkPolicy`.
    """
    return LinkPolicy(
        Plain(),
        late=1,
        late_gradients=late_gradients,
        smooth=smooth,
        smooth_gradients=smooth_gradients,
        warmup=warmup,
        exact_last=exact_last,
        exact_eval=exact_eval,
    )


def BNS(
    p: float,
    *,
    scaled: bool = True,
    exact_last: bool = True,
    exact_eval: bool = True,
    seed: int = 0,
) -> LinkPolicy:
    """Returns a link that samples rows of the boundary in each epoch ([Wan22]).

    Args:
        p: the share of rows that is sent, in (0, 1].
        scaled: scales received rows, which makes sums unbiased.
        exact_last, exact_eval, seed: see `LinkPolicy`.
    """
    if not 0.0 < p <= 1.0:
        raise ValueError(f"p is a share in (0, 1], got {p!r}")
    return LinkPolicy(
        RowSample(1 / p, scaled),
        exact_last=exact_last,
        exact_eval=exact_eval,
        seed=seed,
    )


def SANCUS(
    bound: float = 0.1,
    most: int = 4,
    bits: int = 32,
    *,
    gradients: float | None = None,
    exact_last: bool = True,
    exact_eval: bool = True,
    seed: int = 0,
) -> LinkPolicy:
    """Returns a link that sends rows again once they have drifted ([Peng22]).

    Args:
        bound, most, gradients: the drift that is not sent, how many epochs old rows may
            get, and the bound of gradients; see `Drift`.
        bits: 32 sends numbers unchanged; fewer as in `Sylvie`, as SANCUS-q does.
        exact_last, exact_eval, seed: see `LinkPolicy`.
    """
    codec = Plain() if bits == 32 else Quantise(bits, "stochastic")
    return LinkPolicy(
        codec,
        skip=Drift(bound, most, gradients),
        exact_last=exact_last,
        exact_eval=exact_eval,
        seed=seed,
    )

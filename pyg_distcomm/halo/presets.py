"""Links as users know them: VARCO, Sylvie, PipeGCN, BNS."""

from __future__ import annotations

import torch

from pyg_distcomm.halo.adaptive import Adaptive
from pyg_distcomm.halo.codec import Codec
from pyg_distcomm.halo.codecs.mask import ColumnMask, RowSample
from pyg_distcomm.halo.codecs.quantise import Cast, Plain, Quantise
from pyg_distcomm.halo.policy import LinkPolicy
from pyg_distcomm.halo.schedule import Linear, Schedule

_PICKS = {"random": "epoch", "prefix": "prefix", "block": "block"}


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
    """Columns of rows, ever more of them ([Cervino24]).

    Args:
        epochs: how many there will be: `link.step()` once each.
        c_max, c_min: the compression ratio at first, and in the end.
        slope: how often the ramp would fit in all epochs.
        mask: "random" columns as in the paper, the "prefix" of columns as in its scripts,
            or random for each "block" of rows.
        scaled: whether what arrives is scaled up, which makes it unbiased.
        schedule: another schedule than the paper's, which is linear in c; it has its own
            bounds, so c_max, c_min and slope are left out.
        exact_last, exact_eval, seed: see `LinkPolicy`.
    """
    if schedule is not None and (c_max, c_min, slope) != (128.0, 1.0, 5.0):
        raise ValueError(
            f"{schedule!r} has ratios of its own; give c_max, c_min and slope to it, not to "
            f"VARCO as well, which got {c_max}, {c_min} and {slope}"
        )
    if mask not in _PICKS:
        raise ValueError(f"mask must be one of {', '.join(_PICKS)}, got {mask!r}")
    pace = schedule if schedule is not None else Linear(epochs, c_max, c_min, slope)
    return LinkPolicy(
        ColumnMask(c_max, _PICKS[mask], scaled=scaled),
        pace,
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
    exact_last: bool = True,
    exact_eval: bool = True,
    seed: int = 0,
) -> LinkPolicy:
    """A few bits a number, one epoch late ([Zhang23]).

    Args:
        bits: 1, 2, 4 or 8; 16 is bf16, and 32 sends numbers as they are.
        late: 1 is Sylvie-A, 0 is Sylvie-S.
        sync_every: every so many epochs are synchronous: its staleness adaptor.
        adaptive: bits and timing by how the loss falls, as in the later Sylvie; give the
            loss to `link.step(loss)`.
        exact_last, exact_eval, seed: see `LinkPolicy`.
    """
    wide: dict[int, Codec] = {16: Cast(torch.bfloat16), 32: Plain()}
    return LinkPolicy(
        wide[bits] if bits in wide else Quantise(bits, "stochastic"),
        late=late,
        sync_every=sync_every,
        adaptive=adaptive,
        exact_last=exact_last,
        exact_eval=exact_eval,
        seed=seed,
    )


def PipeGCN(
    smooth: float | None = None,
    *,
    exact_last: bool = True,
    exact_eval: bool = True,
) -> LinkPolicy:
    """Rows as they are, one epoch late ([Wan22a]).

    Args:
        smooth: the momentum of a moving average of late rows and gradients; theirs is
            0.95.
        exact_last, exact_eval: see `LinkPolicy`.
    """
    return LinkPolicy(
        Plain(), late=1, smooth=smooth, exact_last=exact_last, exact_eval=exact_eval
    )


def BNS(
    p: float,
    *,
    scaled: bool = True,
    exact_last: bool = True,
    exact_eval: bool = True,
    seed: int = 0,
) -> LinkPolicy:
    """A share of the boundary's rows, other ones each epoch ([Wan22]).

    Args:
        p: the share that travels, in (0, 1].
        scaled: whether what arrives is scaled up, which makes sums unbiased.
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

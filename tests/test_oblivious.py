"""CAGNET's own algorithms, as benchmarks run them: exact, and as many bytes as printed."""

import itertools
import sys
from pathlib import Path

import pytest
import tiers
import torch
import torch.nn.functional as F
import worlds

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import oblivious


def problem(n, e, widths):
    g = torch.Generator().manual_seed(3)
    row, col = torch.randint(0, n, (2, e), generator=g)
    value = torch.randn(e, generator=g, dtype=torch.float64)
    x = torch.randn(n, widths[0], generator=g, dtype=torch.float64)
    y = torch.randint(0, widths[-1], (n,), generator=g)
    weights = [
        torch.randn(a, b, generator=g, dtype=torch.float64)
        for a, b in itertools.pairwise(widths)
    ]
    return (row, col, value), x, y, weights


def dense(coo, x, y, weights):
    """Output, gradients of x and of the weights, by dense autograd."""
    a = torch.zeros(len(x), len(x), dtype=torch.float64)
    a.index_put_((coo[0], coo[1]), coo[2], accumulate=True)
    leaves = [t.clone().requires_grad_() for t in (x, *weights)]
    h = leaves[0]
    for k, w in enumerate(leaves[1:]):
        h = a @ h @ w
        h = h.relu() if k + 2 < len(leaves) else h
    F.cross_entropy(h, y).backward()
    return a, h.detach(), [t.grad for t in leaves]


def runs(name, size, c, n, widths):
    coo, x, y, weights = problem(n, 6 * n, widths)
    matrix, want, gradients = dense(coo, x, y, weights)
    mesh = worlds.mesh(grid=oblivious.side_of(name, size, c))
    kind = oblivious.OneD if name in ("1d", "1.5d") else oblivious.Summa
    own = kind(mesh, coo, n)
    close = {"rtol": 1e-9, "atol": 1e-9}
    block = own.mine(x)
    for back in (False, True):
        mesh.ledger.reset()
        found = own.multiply(block, widths[0], back)
        whole = (matrix.t() if back else matrix) @ x
        torch.testing.assert_close(found, own.mine(whole), **close)
    product = mesh.ledger.bytes() - mesh.ledger.bytes("plan")
    h = block.clone().requires_grad_()
    leaves = [w.clone().requires_grad_() for w in weights]
    mesh.ledger.reset()
    out = oblivious.epoch(own, h, y, leaves)
    torch.testing.assert_close(out, want[slice(*own.rows)], **close)
    torch.testing.assert_close(h.grad, own.mine(gradients[0]), **close)
    for leaf, g in zip(leaves, gradients[1:], strict=True):
        torch.testing.assert_close(leaf.grad, g, **close)
    loss = out.numel() - own.mine(torch.empty(n, widths[-1])).numel()
    spent = mesh.ledger.bytes() - mesh.ledger.bytes("plan") - 8 * loss
    return product, spent


@tiers.parametrize(
    ("name", "size", "c", "n", "widths"),
    [
        ("1d", 4, 1, 24, (8, 4, 12)),
        ("1.5d", 4, 2, 24, (8, 4, 12)),
        ("2d", 4, 1, 24, (8, 4, 12)),
        ("3d", 8, 1, 24, (8, 4, 12)),
        ("2d", 4, 2, 23, (7, 3, 5)),  # where nothing divides, formulas are none
        ("1d", 3, 1, 24, (6, 3)),
        ("1.5d", 8, 2, 48, (6, 4, 2)),
        ("2d", 9, 1, 36, (9, 3, 6)),
        ("3d", 8, 2, 29, (5, 1, 3)),
        ("1.5d", 4, 2, 23, (7, 3, 5)),
    ],
    slice(1, 3),
)
def test_baselines_are_exact_and_receive_what_is_printed(name, size, c, n, widths):
    found = worlds.run(runs, size, name, size, c, n, widths)
    if n % 2:
        return
    product, spent = map(sum, zip(*found, strict=True))
    m = 6 * n
    words = oblivious.product_words(name, n, m, widths[0], size, c, entry=3)
    assert product == round(8 * size * words)
    pairs = itertools.pairwise(widths)
    words = sum(oblivious.layer_words(name, n, m, a, b, size, c, 3) for a, b in pairs)
    assert spent == round(8 * size * words)


def test_ranks_that_fit_no_grid_are_refused():
    for name, size in (("2d", 8), ("3d", 4), ("1.5d", 6)):
        with pytest.raises(ValueError, match="needs"):
            oblivious.side_of(name, size)

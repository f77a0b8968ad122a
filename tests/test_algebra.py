"""The operators of matrix-based sampling: products, draws, extraction."""

import itertools

import definitions
import pytest
import tiers
import torch
from chances import likely, subsets, successive

from pyg_distcomm.comm.random import fold
from pyg_distcomm.kernels import matrix_cpu, matrix_ops
from pyg_distcomm.ops import CSR, Pattern
from pyg_distcomm.ops.csr import spgemm
from pyg_distcomm.sampling import BulkMatrix, BulkNodes, Ladies, algebra

pytestmark = pytest.mark.usefixtures("place")

TWINS = matrix_cpu, definitions.of(matrix_ops)
LONG, REAL = torch.int64, torch.float64


def generator(seed):
    return torch.Generator().manual_seed(seed)


def keys(count, seed=0):
    return torch.tensor([fold(seed, i) for i in range(count)], dtype=LONG)


def entries(m, n, nnz, dtype=None, seed=0, most=9):
    """A random CSR: empty rows, equal columns, zeros."""
    g = generator(seed)
    row = torch.randint(max(m, 1), (nnz,), generator=g).sort().values
    rowptr = torch.zeros(m + 1, dtype=LONG)
    rowptr[1:] = torch.bincount(row, minlength=m).cumsum(0)
    value = None
    if dtype == LONG:
        value = torch.randint(most, (nnz,), generator=g)
    if dtype == REAL:
        value = torch.rand(nnz, generator=g, dtype=REAL).round(decimals=1)
    return rowptr, torch.randint(max(n, 1), (nnz,), generator=g), value


def stacked(m, n, nnz, dtype=None, seed=0, most=9, batches=1):
    rowptr, col, value = entries(m, n, nnz, dtype, seed, most)
    row = torch.repeat_interleave(rowptr.diff())
    p = BulkMatrix.from_edges(row, col, value, (m, n))
    return BulkMatrix(
        p.rowptr, p.col, p.value, n, torch.arange(batches + 1) * m // batches
    )


def copies(weights, count):
    """The same row many times, each of a minibatch of its own."""
    n, ptr = len(weights), torch.arange(count + 1)
    col, value = torch.arange(n).repeat(count), weights.repeat(count)
    return BulkMatrix(n * ptr, col, value, n, ptr)


def row_of(weights):
    return copies(torch.as_tensor(weights), 1)


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


# ------------------------------------------------------------------ kernels


KINDS, EITHER = [None, LONG, REAL], [False, True]


@tiers.parametrize(
    ("left", "right", "diagonal", "dense"),
    itertools.product(KINDS, KINDS, EITHER, EITHER),
    slice(0, None, 3),
)
def test_products_have_one_definition(left, right, diagonal, dense, monkeypatch):
    monkeypatch.setattr(matrix_cpu, "DENSE_COLUMNS", 200 if dense else 0)
    q, a = entries(7, 20, 90, left), entries(20, 200, 600, right, seed=1)
    extra = (torch.arange(20) % 7 * 30, torch.arange(20) % 3) if diagonal else None
    same(*(twin.spgemm(q, a, 200, extra) for twin in TWINS))


def test_product_of_long_rows(monkeypatch):
    # beyond the first size of a table, and what is sorted by comparing
    q, a = entries(3, 200, 500, LONG), entries(200, 1 << 40, 9000, LONG, seed=1)
    found = [twin.spgemm(q, a, 1 << 40) for twin in TWINS]
    assert int(found[0][0].diff().min()) > 2048
    same(*found)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_extraction_has_one_definition(pairs, own):
    rowptr, col, _ = entries(20, 30, 100)
    if pairs:  # as the samplers keep edges: source and id side by side, in int32
        col = torch.stack([col, torch.arange(100)], 1).int().view(-1)[::2]
    g = generator(2)
    rows = torch.randint(-1, 20, (15,), generator=g), torch.tensor([0, 4, 4, 15])
    parts = [torch.randperm(30, generator=g)[:size] for size in (9, 20, 3)]
    cols = torch.cat(parts), torch.tensor([0, 9, 29, 32])
    loops = torch.arange(20) + 5 if own else None
    same(*(twin.extract((rowptr, col), rows, cols, loops) for twin in TWINS))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("most", [2, 9, 1 << 50])
@tiers.parametrize("s", [1, 4, 100], [1, 100])
def test_draws_have_one_definition(s, most, replace):
    rowptr, _, value = entries(30, 50, 300, LONG, most=most)
    row = torch.repeat_interleave(rowptr.diff())
    count = torch.bincount(row[value > 0], minlength=30)
    each = torch.where(count > 0, s, 0) if replace else count.clamp(max=s)
    ptr = torch.cat([torch.zeros(1, dtype=LONG), each.cumsum(0)])
    shared = torch.arange(31) * (s if replace else min(s, int((value > 0).sum())))
    found = []
    for twin in TWINS:
        urn, drawn = twin.weighted_sampler(value), twin.draw
        drawn = drawn(rowptr, value, count, keys(30), ptr, replace)
        found.append([twin.count_positive(rowptr, value), *drawn])
        for seed in (0, 1):  # the second finds the tree as it was
            found[-1] += urn(keys(30, seed), shared, replace)
    same(*found)
    assert torch.equal(found[0][0], count)


def test_bad_values_are_found_by_both():
    rowptr = torch.tensor([0, 2, 3, 5, 8, 8])
    value = torch.tensor([1, -1, 2, 1 << 61, 1 << 61, 1 << 62, 1, -3])
    wanted = torch.tensor([-1, 1, -2, -1, 0])
    for twin in TWINS:
        same([twin.count_positive(rowptr, value)], [wanted])


# ------------------------------------------------------------------ products


def csr(m, n, nnz, dtype=None, seed=0):
    rowptr, col, value = entries(m, n, nnz, dtype, seed)
    pattern, edge = Pattern.build(torch.repeat_interleave(rowptr.diff()), col, (m, n))
    return CSR(pattern, None if value is None else value[edge.long()] + 1)


def written_out(a, dtype):
    p = a.pattern
    value = torch.ones(p.nnz) if a.value is None else a.value
    out = torch.zeros(p.shape, dtype=dtype)
    row = torch.repeat_interleave(p.rowptr.diff().long())
    return out.index_put_((row, p.col.long()), value.to(dtype), accumulate=True)


@pytest.mark.parametrize("right", [None, LONG, torch.float32, REAL])
@pytest.mark.parametrize("left", [None, LONG, torch.float32, REAL])
def test_products_are_those_of_dense_matrices(left, right):
    def typed(block, dtype):
        value = block.value
        return CSR(block.pattern, value if dtype is None else value.to(dtype))

    real = {torch.float32: REAL}
    q = typed(csr(9, 20, 50, real.get(left, left)), left)
    a = typed(csr(20, 30, 90, real.get(right, right), seed=1), right)
    c = spgemm(q, a)
    floats = [t for t in (left, right) if t in (torch.float32, REAL)]
    dtype = max(floats, key=lambda t: t.itemsize) if floats else LONG
    assert c.value.dtype == dtype
    assert c.pattern.shape == (9, 30)
    wanted = written_out(q, REAL) @ written_out(a, REAL)
    torch.testing.assert_close(written_out(c, dtype), wanted.to(dtype))
    ones = [written_out(CSR(block.pattern), LONG) for block in (q, a)]
    touched = ones[0] @ ones[1] > 0
    assert c.pattern.rowptr.diff().tolist() == touched.sum(1).tolist()
    assert c.pattern.col.tolist() == touched.nonzero()[:, 1].tolist()


def single(*values):
    one = Pattern(torch.tensor([0, 1]), torch.tensor([0]), 1)
    return [CSR(one, torch.tensor([v])) for v in values]


def test_products_of_integers_are_exact():
    assert int(spgemm(*single((1 << 60) + 1, 3)).value) == 3 * ((1 << 60) + 1)
    # cancelling, through sums that float64 cannot hold
    wide = CSR(Pattern(torch.tensor([0, 3]), torch.arange(3), 3))
    tall = Pattern(torch.arange(4), torch.zeros(3, dtype=LONG), 1)
    tall = CSR(tall, torch.tensor([(1 << 53) - 1, 2, -(1 << 53) + 1]))
    assert int(spgemm(wide, tall).value) == 2
    with pytest.raises(ValueError, match="Q has 5 columns, but A has 4 rows"):
        spgemm(csr(2, 5, 3), csr(4, 5, 3))


@pytest.mark.parametrize("bad", [[12, 1], [-3]])
def test_rows_of_nodes_that_are_not_there(bad):
    nodes = BulkNodes.of([torch.tensor(bad)])
    for make in (BulkMatrix.row_per_node, BulkMatrix.row_per_batch, Ladies().query):
        with pytest.raises(ValueError, match=r"but there are 10 \(0 \.\. 9\)"):
            make(nodes, 10)


def test_product_of_stacked_rows_keeps_minibatches():
    q, a = stacked(6, 20, 30, batches=3), stacked(20, 9, 60, LONG)
    p = algebra.product(q, a)
    assert torch.equal(p.dense(), q.dense() @ a.dense())
    assert torch.equal(p.batch_ptr, torch.tensor([0, 2, 4, 6]))
    assert bool((p.col.diff()[p.row.diff() == 0] > 0).all())


def test_add_merges_columns_exactly():
    parts = [stacked(6, 20, 30, LONG, seed, 1 << 59) for seed in range(5)]
    total = algebra.add(parts)
    assert torch.equal(total.dense(), sum(p.dense() for p in parts))
    assert torch.equal(total.dense(), algebra.add(parts[::-1]).dense())
    assert torch.equal(algebra.add(parts[:1]).dense(), parts[0].dense())
    assert bool((total.col.diff()[total.row.diff() == 0] > 0).all())
    with pytest.raises(ValueError, match=r"one shape are wanted, got \[\(5, 20\)"):
        algebra.add([parts[0], stacked(5, 20, 3, LONG)])


def test_norm():
    p = stacked(8, 9, 20, REAL, seed=5)
    dense, total = p.dense(), p.dense().sum(1, keepdim=True)
    assert bool((total == 0).any())
    wanted = torch.where(total > 0, dense / total, 0)
    torch.testing.assert_close(algebra.norm(p).dense(), wanted)
    ones = p.with_value(None)
    assert algebra.norm(ones).value.dtype == REAL


# ------------------------------------------------------------------ extraction


def test_extraction_is_a_restriction_of_each_minibatch():
    g = generator(3)
    a = stacked(40, 50, 600, LONG)
    rows = BulkNodes.of([torch.randint(40, (size,), generator=g) for size in (5, 0, 9)])
    cols = BulkNodes.of(
        [torch.randperm(50, generator=g)[:size].sort().values for size in (20, 7, 0)]
    )
    found = algebra.extract(a, rows, cols)
    wanted = torch.block_diag(
        *(a.dense()[r][:, c] for r, c in zip(rows.split(), cols.split(), strict=True))
    )
    assert torch.equal(found.dense(), wanted)
    assert torch.equal(found.batch_ptr, rows.ptr)
    assert bool((found.col.diff()[found.row.diff() == 0] > 0).all())


def test_extraction_errors():
    a, one = stacked(4, 5, 9), BulkNodes.of([torch.tensor([3])])
    with pytest.raises(ValueError, match=r"rows span 4 \.\. 4, but there are 4 \(0"):
        algebra.extract(a, BulkNodes.of([torch.tensor([4])]), one)
    with pytest.raises(ValueError, match=r"columns span -1 \.\. 0"):
        algebra.extract(a, one, BulkNodes.of([torch.tensor([-1, 0])]))
    with pytest.raises(ValueError, match="rows of 1 minibatches, but columns of 2"):
        algebra.extract(a, one, BulkNodes.of([torch.tensor([0])] * 2))


# ------------------------------------------------------------------ draws


DRAWS = 20_000
WEIGHT = torch.tensor([0, 4, 8, 2, 16, 1])


@pytest.mark.parametrize("s", [1, 2, 3, 4])
def test_all_subsets(s):
    drawn = algebra.sample(copies(WEIGHT, DRAWS), s, keys(DRAWS, s))
    likely(subsets(drawn.matrix.col.view(-1, s), 6), successive(WEIGHT, s))


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_orders_of_draw(shared, replace):
    p = row_of(WEIGHT) if shared else copies(WEIGHT, DRAWS)
    drawn = algebra.sample(p, 2, keys(DRAWS, 7), replace)
    first, second = (drawn.drawn % 6).view(-1, 2).T
    w = WEIGHT.double()
    chance = torch.outer(w, w)
    if not replace:
        chance /= (w.sum() - w)[:, None]
        chance.fill_diagonal_(0)
    likely(torch.bincount(first * 6 + second, minlength=36), chance)
    if replace:
        assert int(drawn.matrix.value.sum()) == 2 * DRAWS
        assert not bool(drawn.complete.any())
        again = torch.bincount(drawn.matrix.col, drawn.matrix.value.double(), 6)
        assert torch.equal(again, torch.bincount(drawn.drawn % 6, minlength=6).double())


def test_floats_are_rounded_once():
    weight = torch.tensor([0.3, 0.0, 1e-30, 0.1])
    fixed = algebra.fixed_point(row_of(weight))
    assert fixed.tolist() == [
        1 << 40,
        0,
        1,
        round(float(weight[3]) / float(weight[0]) * 2**40),
    ]
    wide = row_of(torch.ones(1 << 21))
    assert int(algebra.fixed_point(wide).double().sum()) < 1 << 62
    assert int(algebra.fixed_point(wide)[0]) == 1 << 39
    drawn = algebra.sample(copies(WEIGHT / 7, DRAWS), 2, keys(DRAWS))
    likely(subsets(drawn.matrix.col.view(-1, 2), 6), successive(WEIGHT, 2))


def test_rows_that_give_all_they_have():
    p = copies(torch.tensor([0, 3, 0, 5, 2]), 3)
    for s, complete in ((2, False), (3, True), (9, True)):
        drawn = algebra.sample(p, s, keys(3))
        assert drawn.complete.tolist() == [complete] * 3
        ends = torch.arange(1, 4) * min(s, 3)
        assert drawn.matrix.rowptr.tolist() == [0, *ends.tolist()]
        if complete:
            assert drawn.matrix.col.tolist() == [1, 3, 4] * 3
    assert algebra.sample(p, 0, keys(3)).matrix.nnz == 0
    none = copies(torch.zeros(4, dtype=LONG), 2)
    for replace in (False, True):
        assert algebra.sample(none, 3, keys(2), replace).matrix.nnz == 0


def test_a_shared_row_is_the_row_repeated():
    weight = torch.randint(1 << 40, (300,), generator=generator(4))
    for s in (7, 300):
        one = algebra.sample(row_of(weight), s, keys(9))
        many = algebra.sample(copies(weight, 9), s, keys(9))
        assert torch.equal(one.matrix.col, many.matrix.col)
        assert torch.equal(one.matrix.rowptr, many.matrix.rowptr)
        assert torch.equal(one.drawn, many.drawn % 300)
        assert torch.equal(one.place, many.place % 300)
        assert torch.equal(one.left, many.left)
        assert torch.equal(one.complete, many.complete)
    row = algebra.SharedRow(row_of(weight))
    assert torch.equal(row.sample(7, keys(9)).drawn, row.sample(7, keys(9)).drawn)


def test_draw_errors():
    p = row_of(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        algebra.sample(p, -1, keys(1))
    with pytest.raises(ValueError, match=r"must be whole, .* got 1\.5"):
        algebra.sample(p, 1.5, keys(1))
    with pytest.raises(ValueError, match=r"each of the 3 rows is wanted, got \[2\]"):
        algebra.sample(copies(torch.tensor([1]), 3), 1, keys(2))
    for value, why in ((-1, "is negative"), (1 << 62, "makes the sum reach 2\\^62")):
        with pytest.raises(ValueError, match=f"in row 0 of P {why}"):
            algebra.sample(row_of(torch.tensor([1, value])), 1, keys(1))
    for value in (-0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"P holds {value} in column 1"):
            algebra.sample(row_of(torch.tensor([1.0, value])), 1, keys(1))

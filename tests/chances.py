"""Compares what was drawn with its chances."""

from itertools import combinations, permutations

import torch


def likely(observed, expected=None):
    """Checks counts by the chi-square test, with p above 1e-4; by default all are alike."""
    from scipy.stats import chisquare  # which takes half a second to import

    observed = observed.double().flatten()
    if expected is None:
        expected = torch.ones_like(observed)
    expected = torch.as_tensor(expected).double().flatten()
    possible = expected > 1e-12
    assert not observed[~possible].any()
    expected = expected[possible] / expected[possible].sum() * observed.sum()
    assert float(expected.min()) > 5  # below, chi-square does not hold
    assert chisquare(observed[possible].numpy(), expected.numpy()).pvalue > 1e-4


def successive(weight, s):
    """Returns the chance of each subset, entries drawn one after the other by weight."""
    weight, chance = [float(w) for w in weight], []
    for subset in combinations(range(len(weight)), s):
        total = 0.0
        for order in permutations(subset):
            left, p = sum(weight), 1.0
            for e in order:
                p, left = p * weight[e] / left if weight[e] else 0.0, left - weight[e]
            total += p
        chance.append(total)
    return torch.tensor(chance)


def subsets(rows, n):
    """Counts the subsets of range(n) that ascending rows are, in order of `combinations`."""
    code = {c: i for i, c in enumerate(combinations(range(n), rows.size(1)))}
    found = [code[tuple(row)] for row in rows.tolist()]
    return torch.bincount(torch.tensor(found), minlength=len(code))

"""The templates of docs/how-to/extend.md hold what the page says, on several ranks."""

import alike
import pytest
import tiers
import torch
import torch.nn.functional as F
import worlds
from test_docs import DOCS, blocks

import pyg_distcomm as pdc

pytestmark = pytest.mark.usefixtures("place")


def templates():
    """Runs the blocks of the page, and returns what they define."""
    names = {"__name__": "__main__"}
    for _, code in blocks((DOCS / "how-to/extend.md").read_text()):
        exec(compile(code, "extend.md", "exec"), names)
    return names


@tiers.parametrize("size", [2, 3], [])
@worlds.on()
def test_codec_schedule_and_layer_train_on_several_ranks(size):
    made, mesh, found = templates(), worlds.mesh(), []
    whole, owner = made["whole"], torch.arange(made["whole"].num_nodes) % size
    for data in (pdc.partition(whole, mesh, owner), whole):
        torch.manual_seed(0)
        conv = made["GatedConv"](whole.num_features, 8)
        found.append(alike.learnt(conv, data.x, data.edge_index))
    alike.same(*found, rtol=1e-3, atol=1e-3)
    signs, halving = made["Signs"](), (made["ColumnMask"](1), made["Halving"](8, 1))
    for codec, schedule in ((signs, None), halving):
        link, moved = pdc.LinkPolicy(codec, schedule=schedule, exact_last=False), []
        share = pdc.partition(whole, mesh, owner, link=link)
        torch.manual_seed(0)
        model = pdc.nn.GCN(32, 16, 2, 8)
        for _ in range(4):
            mesh.ledger.reset()
            out = model(share.x, share.edge_index)
            loss = F.cross_entropy(out[share.train_mask], share.y[share.train_mask])
            loss.backward()
            link.step()
            moved.append(mesh.ledger.bytes(axis="row"))
            assert loss.isfinite()
        # of 4 * f bytes stay 4 + f / 8; ratios 2 and 1, as A X travels before, and is kept
        assert moved[3] < moved[0] if schedule is None else moved[2] < moved[3]


def test_the_codec_is_exact_about_its_length():
    made = templates()
    codec = made["Signs"]()
    for rows, width in ((0, 5), (3, 0), (1, 1), (7, 8), (5, 13)):
        x = torch.randn(rows, width)
        message = codec.encode(x)
        assert len(message) == codec.wire_bytes(rows, width)
        arrived = codec.decode(message, torch.empty(rows, width))
        want = x.abs().mean(1, keepdim=True) * torch.where(x >= 0, 1.0, -1.0)
        torch.testing.assert_close(arrived, want if width else x)
        index = torch.arange(rows).flip(0)
        room = torch.empty(len(message) + 3, dtype=torch.uint8)
        other = codec.encode(x, index=index, out=room)
        assert torch.equal(
            codec.decode(other, torch.empty(rows, width)), arrived.flip(0)
        )


def test_rule_and_cutter_do_what_they_say():
    made = templates()
    whole = made["whole"]
    assert made["batch"].num_nodes > 32
    owner = made["by_feature"](whole.edge_index, whole.num_nodes, 4)
    assert owner.bincount().tolist() == [250] * 4
    means = [float(whole.x[owner == part, 0].mean()) for part in range(4)]
    assert means == sorted(means)

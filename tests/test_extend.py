"""The templates of docs/how-to/extend.md hold what the page says, on several ranks."""

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


def _trained():
    """On each rank: what the templates of a codec, a schedule and a layer do in training."""
    made = templates()
    mesh, whole, found = worlds.mesh(), made["whole"], {}
    owner = torch.arange(whole.num_nodes) % mesh.size
    halving = pdc.LinkPolicy(
        made["ColumnMask"](1), schedule=made["Halving"](8, 1), exact_last=False
    )
    signs = pdc.LinkPolicy(made["Signs"](), exact_last=False)
    for name, link in (("codec", signs), ("schedule", halving)):
        share = pdc.partition(whole, mesh, owner, link=link)
        torch.manual_seed(0)
        model = pdc.convert(
            made["torch"].nn.ModuleList([pdc.nn.GCNConv(32, 16), pdc.nn.GCNConv(16, 8)])
        )
        losses, moved = [], []
        for _ in range(4):
            mesh.ledger.reset()
            hidden = model[0](share.x, share.edge_index).relu()
            out = model[1](hidden, share.edge_index)
            loss = F.cross_entropy(out[share.train_mask], share.y[share.train_mask])
            loss.backward()
            link.step()
            losses.append(float(loss.detach()))
            moved.append(mesh.ledger.bytes(axis="row"))
        found[name] = losses, moved
    share = pdc.partition(whole, mesh, owner)
    torch.manual_seed(0)
    conv = made["GatedConv"](whole.num_features, 8)
    out = conv(share.x, share.edge_index)
    out.square().sum().backward()
    found["layer"] = out.full_tensor().detach(), [p.grad for p in conv.parameters()]
    return found


@tiers.rare
@pytest.mark.parametrize("ranks", [2, 3])
def test_codec_schedule_and_layer_train_on_several_ranks(ranks):
    made = templates()
    whole = made["whole"]
    torch.manual_seed(0)
    conv = made["GatedConv"](whole.num_features, 8)
    out = conv(whole.x, whole.edge_index)
    out.square().sum().backward()
    for found in worlds.run(_trained, ranks):
        got, gradients = found["layer"]
        torch.testing.assert_close(got, out.detach(), rtol=1e-4, atol=1e-4)
        for mine, p in zip(gradients, conv.parameters(), strict=True):
            torch.testing.assert_close(mine, p.grad, rtol=1e-3, atol=1e-3)
        losses, moved = found["codec"]
        assert all(torch.isfinite(torch.tensor(losses)))
        # a row of 16 numbers and one of 8, both ways: of 4 * f bytes stay 4 + f / 8
        assert moved[3] < moved[0]
        _, moved = found["schedule"]
        assert moved[2] < moved[3]  # ratios 2 and 1; A X travels before, and is kept


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

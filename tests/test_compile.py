"""A compiled model trains as it does without: on ranks, on minibatches, on one graph."""

import alike
import tiers
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
import worlds
from problems import GRAPHS

import pyg_distcomm as pdc

KINDS = {
    "products": (pyg.GCNConv, pyg.SAGEConv, pyg.GCNConv),
    "halos": (pyg.GATConv, pyg.TransformerConv, pyg.GraphConv),
    "maxima": (lambda a, b: pyg.SAGEConv(a, b, aggr="max"), pyg.GATv2Conv, pyg.LEConv),
}


class Net(torch.nn.Module):
    """Layers, and between them the code of a script on row-sharded tensors."""

    def __init__(self, kinds, p):
        super().__init__()
        first, second, third = KINDS[kinds]
        self.conv1, self.norm = first(7, 8), torch.nn.BatchNorm1d(8)
        self.conv2, self.conv3, self.p = second(8, 8), third(8, 4), p

    def forward(self, x, edge_index):
        h = self.norm(self.conv1(x, edge_index)).relu()
        h = F.dropout(h, self.p, self.training) * 1.5
        h = h + F.elu(self.conv2(h, edge_index)) - h.mean(0)
        scale = 1 + h.square().sum(-1, keepdim=True).clamp(min=1e-9).sqrt()
        return F.log_softmax(self.conv3(h / scale, edge_index), -1)


def train(model, batches):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for data, mask in batches:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.nll_loss(out[mask], data.y[mask])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        model.eval()
        out = model(data.x, data.edge_index)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [torch.tensor(losses), out, *grads]


@tiers.parametrize(
    ("kinds", "size", "grid", "backend", "p"),
    [
        ("products", 1, None, "eager", 0.0),
        ("products", 2, None, "aot_eager", 0.5),
        ("halos", 2, None, "eager", 0.5),
        ("maxima", 3, None, "eager", 0.0),
        ("products", 4, (1, 2, 2), "eager", 0.5),
        ("halos", 2, None, "inductor", 0.0),
    ],
    slice(1, 2),
)
@worlds.on()
def test_full_graph(kinds, size, grid, backend, p):
    torch._dynamo.reset()
    found = []
    for chosen in (None, backend):
        _, share = alike.share_of("undirected", "random", grid)
        torch.manual_seed(0)
        model = pdc.convert(Net(kinds, p).double())
        if chosen is not None:
            model = torch.compile(model, backend=chosen)
        masks = share.train_mask, ~share.train_mask, share.y > 1
        found.append(train(model, [(share, mask) for mask in (*masks, masks[0])]))
    alike.same(*reversed(found))


def test_torch_func_on_ordinary_tensors_is_compiled_as_without_this_package():
    def function(x):
        return torch.func.grad(lambda y: (y.sin() * y).sum())(x)

    assert pdc.init is not None  # which has imported all
    x = torch.rand(5)
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), function(x))


def test_layers_on_ordinary_tensors_break_no_graph():
    data = GRAPHS["directed"]()
    for model in (pdc.nn.GCN(7, 8, 2, add_self_loops=False), pdc.nn.GraphSAGE(7, 8, 2)):
        found = torch._dynamo.explain(model)(data.x.float(), data.edge_index)
        assert found.graph_break_count == 0, found.break_reasons

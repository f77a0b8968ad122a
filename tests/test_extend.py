"""The templates of docs/how-to/extend.md hold what the page says, on several ranks."""

import pytest
import torch
from test_docs import DOCS, blocks

pytestmark = pytest.mark.usefixtures("place")


def templates():
    """Runs the blocks of the page, and returns what they define."""
    names = {"__name__": "__main__"}
    for _, code in blocks((DOCS / "how-to/extend.md").read_text()):
        exec(compile(code, "extend.md", "exec"), names)
    return names


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

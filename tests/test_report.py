"""The page of a run: what is on it, and how it looks in a browser, light and dark."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from statistics import median

import pytest
import torch
import worlds

import pyg_distcomm as pdc
from pyg_distcomm.cli import main
from pyg_distcomm.comm.mesh import alone
from pyg_distcomm.datasets import generated
from pyg_distcomm.nn import GCNConv
from pyg_distcomm.watch.drawing import as_bytes, as_seconds, ticks

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
SECTIONS = (
    "Accuracy against bytes",
    "Bytes by epoch and operation",
    "Waits by rank",
    "Phases",
    "Loss by epoch",
    "Partition",
    "Timeline",
    "Figures",
)


def recorded(folder):
    """Runs on a rank: trains a little, and records it with a timeline."""
    mesh = worlds.mesh()
    data = pdc.partition(generated(300), mesh, "block")
    torch.manual_seed(0)
    convs = torch.nn.ModuleList([GCNConv(data.num_features, 8), GCNConv(8, 8)])
    run = pdc.metrics(folder, mesh, data=data)
    for epoch in range(4):
        if epoch == 2:
            with run.trace(), run.phase("train"):
                loss = once(convs, data)
        else:
            with run.phase("train"):
                loss = once(convs, data)
        run.epoch(epoch, loss=loss, accuracy=1 - 0.5 ** (epoch + 1))


def once(convs, data):
    out = convs[1](convs[0](data.x, data.edge_index).relu(), data.edge_index)
    loss = out.square().mean()
    loss.backward()
    return float(loss.detach())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "gcn <1>"
    worlds.run(recorded, 3, str(folder))
    return folder


@pytest.fixture(scope="module")
def page(run):
    out = run.parent / "report.html"
    assert main(["report", str(run), "-o", str(out)]) == 0
    return out


class Parts(HTMLParser):
    """Collects headings and links of a page, and checks that what opens is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.headings, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(text)


def charts(text):
    return [ET.fromstring(one) for one in re.findall(r"<svg.*?</svg>", text, re.S)]


def test_the_page_is_whole_and_by_itself(page):
    text, parts = page.read_text(), Parts()
    parts.feed(text)
    assert parts.open == []
    assert parts.headings[0] == "gcn <1>"
    assert [name for name in SECTIONS if name not in parts.headings] == []
    assert parts.links == []  # no other file, no network
    assert "http" not in text
    assert "<script" not in text
    assert len(charts(text)) >= 12


def test_charts_show_what_was_recorded(run, page):
    rows = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    tips = [one.text for svg in charts(page.read_text()) for one in svg.iter("title")]
    halo = rows[-1]["bytes"]["halo row"]
    assert f"epoch 3, halo row: {as_bytes(halo)}" in tips
    total = sum(row["bytes"]["total"] for row in rows)
    assert f"accuracy: 0.9375 at {as_bytes(total)}" in tips
    about = json.loads((run / "run.json").read_text())
    assert f"rank 0 to rank 1: {about['rows'][0][1]:,} rows" in tips
    assert f"rank 1, Nodes owned: {about['partition']['nodes'][1]}" in tips
    waits = as_seconds(median(row["by_rank"]["waits"][2] for row in rows[1:]))
    assert f"rank 2, waits {waits}, waiting: {waits}" in tips
    assert any(re.match(r"halo row, [\d,]+ bytes: ", tip) for tip in tips)  # in flight


def test_what_there_is_is_drawn(tmp_path, run, capsys):
    out = tmp_path / "page.html"
    flags = ("-o", str(out), "--json")
    assert main(["report", str(run / "trace.json.gz"), *flags]) == 0
    assert "Timeline" in out.read_text()
    parts = tmp_path / "parts"
    cut = ("partition", "generated-90", str(parts), "--parts", "3", "--method", "block")
    assert main([*cut]) == 0
    assert main(["report", str(parts), *flags]) == 0
    assert "Partition" in out.read_text()
    assert "rows sent from each rank to each other" in out.read_text()
    empty = tmp_path / "empty"
    pdc.metrics(empty, alone((1, 1, 1), 0, torch.device("cpu")))
    capsys.readouterr()
    assert main(["report", str(empty), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["epochs"] == 0
    assert "Nothing recorded yet" in out.read_text()


def test_what_is_no_run_is_told(tmp_path, run, capsys):
    (tmp_path / "x.json").write_text("{}")
    for name, words in (
        ("nowhere", "does not exist"),
        ("", "is no folder of pdc.metrics"),
        ("x.json", "is not what pdc.trace has written"),
    ):
        assert main(["report", str(tmp_path / name), "-o", str(tmp_path / "p")]) == 2
        assert words in capsys.readouterr().err
    assert main(["report", str(run), "-o", str(tmp_path)]) == 2
    assert "is a folder; give a file" in capsys.readouterr().err
    assert not (tmp_path / "p").exists()


def test_ticks_are_round_and_inside():
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(3, 97, 5) == [20, 40, 60, 80]
    assert ticks(5, 5) == [5]
    assert [as_bytes(n) for n in (0, 999, 1500, 2e6)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2 MB",
    ]
    assert [as_seconds(s) for s in (0, 2.5, 0.0125)] == ["0 s", "2.5 s", "12.5 ms"]


# In a browser -------------------------------------------------------------------------

# counts texts of a chart that lie on each other, or out of it, and what the page has too wide
LOOK = """
<script>
addEventListener("load", () => {
  let over = [], out = [];
  for (const svg of document.querySelectorAll("svg")) {
    const whole = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(t => [t, t.getBoundingClientRect()]);
    texts.forEach(([t, a], i) => {
      if (a.left < whole.left - 1 || a.right > whole.right + 1 ||
          a.top < whole.top - 1 || a.bottom > whole.bottom + 1) out.push(t.textContent);
      for (const [u, b] of texts.slice(i + 1))
        if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1 &&
            Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 3)
          over.push(t.textContent + " / " + u.textContent);
    });
  }
  const page = document.documentElement;
  document.title = JSON.stringify({over, out, wide: page.scrollWidth - page.clientWidth,
    dark: matchMedia("(prefers-color-scheme: dark)").matches});
});
</script></body>
"""


def browse(page, scheme, width, *flags):
    words = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
    ]
    words += [f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"]
    words += [f"--window-size={width},3000", "--virtual-time-budget=2000", *flags]
    done = subprocess.run(
        [*words, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.subprocess
@pytest.mark.skipif(BROWSER is None, reason="no chromium here to open the page in")
@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1240), ("dark", 1240), ("light", 620)]
)
def test_the_page_can_be_read_in_a_browser(page, tmp_path, scheme, width):
    looked = tmp_path / "look.html"
    looked.write_text(page.read_text().replace("</body>", LOOK))
    title = re.search(
        r"<title>(.*?)</title>", browse(looked, scheme, width, "--dump-dom")
    )
    found = json.loads(title.group(1).replace("&lt;", "<").replace("&gt;", ">"))
    assert found == {"over": [], "out": [], "wide": 0, "dark": scheme == "dark"}

    image = pytest.importorskip("PIL.Image")
    shot = tmp_path / f"{scheme}.png"
    browse(page, scheme, width, f"--screenshot={shot}")
    with image.open(shot) as picture:
        pixels = picture.convert("RGB")
        corner, colours = pixels.getpixel((2, 2)), pixels.getcolors(1 << 24)
    assert (max(corner) < 60) == (scheme == "dark")
    # the colours of the series are there, so that charts were drawn
    style = page.read_text()
    sets = re.findall(r"--c0:(#\w+);--c1:(#\w+);--c2:(#\w+)", style.replace("\n", ""))
    seen = {f"#{r:02x}{g:02x}{b:02x}" for _, (r, g, b) in colours}
    assert set(sets[scheme == "dark"]) <= seen


def resumed(folder, epochs):
    """Runs on a rank: records some epochs, of a run that may have been begun before."""
    mesh = worlds.mesh()
    data = pdc.partition(generated(60), mesh, "block")
    run = pdc.metrics(folder, mesh, data=data)
    for epoch in epochs:
        run.epoch(epoch, loss=1 / (1 + epoch))


def test_a_restart_is_marked_where_the_run_went_on(tmp_path):
    folder, out = tmp_path / "run", tmp_path / "page.html"
    worlds.run(resumed, 3, str(folder), range(5))
    worlds.run(resumed, 2, str(folder), range(3, 6))  # from the checkpoint of epoch 2
    assert main(["report", str(folder), "-o", str(out)]) == 0
    text = out.read_text()
    tips = [one.text for svg in charts(text) for one in svg.iter("title")]
    assert tips.count("restarted after epoch 2, on 2 ranks") == 1  # no bytes were sent
    assert "A broken line is a restart." in text
    assert "<b>3 → 2</b>" in text
    # of waits, phases and the partition
    assert text.count("<summary>An earlier start, on 3 ranks</summary>") == 3
    assert "rank 2" in text
    assert text.count("60 nodes and") == 2
    (table,) = re.findall(r"<h2>Starts</h2>.*?<table>(.*?)</table>", text, re.S)
    lines = [re.findall(r"<td>(.*?)</td>", line) for line in table.split("<tr>")]
    assert [[line[1], *line[3:5]] for line in lines if line] == [
        ["3", "0 to 2", "2"],
        ["2", "3 to 5", "0"],
    ]

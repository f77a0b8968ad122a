"""Puts one fault at a time into a copy of the package, and tells whether tests find it.

    python tools/mutations.py --report benchmarks/reports/mutations.md

A fault is one changed line. The package and its tests are copied into a temporary folder,
the working tree is left alone. There the tests named with each fault first have to pass; with
the fault one of them has to fail. Tests that do not come to an end have found nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "pyg_distcomm"
LIMIT = 300.0  # seconds that the tests of one fault may take
FAILED = re.compile(r"^(?:FAILED|ERROR) tests/(.+?)(?: - .*)?$", re.M)


@dataclass(frozen=True)
class Mutation:
    """One fault, and the tests that should find it."""

    name: str  # what is wrong with it
    kind: str  # what part of the package it is in
    old: str  # a text that occurs once in the package
    new: str  # what takes its place
    files: str  # tests of the default tier
    words: str = ""  # select some of them, as pytest's -k does; nothing selects all


# The tests that should find some faults, and below them each fault: its kind and what is
# wrong with it, then a text that occurs once in the package, with {{what is there => what
# takes its place}}. Lines behind its first are indented as in their file.
FAULTS = """
test_parity.py -k test_step_equals_pyg
    halo: a rank sends its rows in another order than they are awaited
        rows = kernels.gather_rows(x.flatten(1), self.send_slot{{ => .roll(1)}})
    halo: sums are added to other rows than they were computed for
        kernels.scatter_add_rows(flat, self.send_slot{{ => .roll(1)}}, sums)
    adjoint: the gradient of a product has the other sign
        gx, *found = OverlappedSpMM(mirror, {{g => -g}}.to(ctx.sent), ctx.sent).run()
    reduction: SAGEConv sums where it should take means
        OperatorKind(), None, self.lin_l, {{self.aggr == "mean" => False}}
    degrees: degrees leave out the self-loops
        weight.{{new_zeros(here.num_own) => new_full((here.num_own,), -fill * add_self_loops)}}
test_messages.py -k test_rows_of_others
    halo: rows that a rank does not hold are sent as others
        if {{not known.all() => False}}:
test_products.py -k test_contract_on_every_grid and 4
    adjoint: the transpose of a grid matrix keeps its exchanges
        GridMatrix(self.tile.transposed, self.links{{.mirrored => }}, self.fiber)
test_products.py -k test_contract_on_every_grid and 2
    price: the ledger counts four bytes per word, whatever the type
        bytes=received * width * {{x.element_size() => 4}},
test_products.py -k test_dense_halo_costs_the_formula
    price: the words of a dense halo count the fiber once
        (1 - 1 / s) / (r * p) + {{2 * (1 - 1 / p) => (1 - 1 / p)}} / size
test_pipeline.py -k as_defined and gcn-surrogate
    adjoint: a chunk pulls gradients through the matrix, not its transpose
        operator.own{{.transposed => }}.matmul(self.gradients, out, own.start)
    staleness: the history of a chunk is one epoch older
        self.history[rows] = {{fresh => self.mix[rows].clone()}}
test_pipeline.py -k as_defined and gcnii-scaled
    staleness: gradients of an epoch are kept in the next one
        if self.gradients {{is not => is}} None:
test_products.py -k test_learnt_weights
    adjoint: the gradient of an edge's value takes row and column the wrong way round
        block.value_gradient({{rows, cols => cols, rows}})
test_link.py -k transpose
    adjoint: gradients of kept rows are masked by another key
        return codec, rows.key{{ =>  + 1}}, random.fold
test_averaging.py -k test_gradients_are_those_of_one_process
    gradient: the gradient of a parameter is that of this rank's rows
        total = {{collectives.all_reduce(flat, mesh.world) => flat}}
    gradient: what torch accumulates is not what is summed at the end of a pass
        total: Any = PartialSum(part{{ => .clone()}}, x.mesh)
test_averaging.py -k test_a_pass_sums_all_gradients
    price: an all-reduce costs half of what a ring moves
        return -(-{{2 * numel => numel}} * (size - 1) // size)
test_tensor.py -k test_modules_learn
    reduction: the running variance of batch norm is biased
        var.mul_(1 - momentum).add_(spread * n / {{(n - 1) => n}}, alpha=momentum)
test_tensor.py -k test_what_needs_all_rows
    whole: an op without a rule returns what it wrote to
        return written[0] if len({{aliased => written}}) == 1 else out
test_tensor.py -k test_losses_are_global_means
    loss: a mean loss is over the rows of this rank
        {{over_ranks(torch.stack([out, weight]), rows.mesh) => torch.stack([out, weight])}}
test_layers.py -k test_arguments_of_the_matrix_layers
    degrees: the loops of an improved GCN count once
        fill = {{2.0 if kind.improved else 1.0 => 1.0}}
test_share.py test_ordering.py -k test_cached_operators or test_ranks_compare_changes
    cache: an operator with weights is kept when they change
        if same{{ and seen_version == version => }}:
test_ordering.py -k test_a_kept_product_follows_its_inputs
    cache: a product is kept when its input changes in place
        key, now = _key(kind, weight), ({{_version(x) => 0}}, _version(weight))
test_ordering.py -k test_a_change_is_noticed
    error: ranks may change weights in place on some of them alone
        if self._last_changed < int(number) {{<= => <}} self._places:
test_pipeline_ranks.py -k test_bytes_are_those
    price: a price counts four bytes per word, whatever the type
        return self.words * {{itemsize => 4}}
test_pipeline_ranks.py -k test_history_of_other_chunks
    checkpoint: history is taken whatever nodes it is of
        digest.update({{plan.gid.numpy().tobytes() => bytes(8)}})
test_feature_store.py -k test_the_ledger_says_what_the_price_says
    price: an exchange's price counts what a rank keeps
        words={{(sum(recv_counts) - recv_counts[rank]) => sum(recv_counts)}} * width,
test_feature_store.py -k hot_rows
    weights: the rows of the lowest scores are cached
        best = torch.sort(score.double(), descending={{True => False}}, stable=True)
test_feature_store.py -k found_in_a_block
    index: an id just behind a block is found in it
        here = (place >= 0) & (place {{< => <=}} len(self.gid))
test_feature_store.py -k test_the_cache_is_the_same or test_putting
    cache: the cache keeps the rows of an attribute that was replaced
        if len(row_group.cached_gid){{ =>  and not name}}:
                    self._fill_cache(row_group, [name])
test_feature_store.py -k test_the_cache_is_the_same or test_traffic_falls
    cache: rows of the cache are laid out as if they came from others
        order = torch.cat([own_ids, {{cached, uncached => uncached, cached}}])
test_feature_store.py -k test_mistakes_are_told_to_all_ranks
    error: a problem is raised on the rank that has it alone
        found = {{all_gather_object(note, axis) => [note]}}
test_pipeline_parts.py -k test_prices_are_those_of_the_paper
    price: stages over several ranks average their weights for half the price
        rows + {{2 * (ways - 1) => (ways - 1)}} * weights
test_link_bytes.py -k test_bytes_are_those_foretold
    price: ranks agree on the modes of a link's calls for nothing
        return {{times * collectives.ring_words(1, nodes.mesh.size) => 0}}
test_codec.py -k test_shapes_bytes_and_out and float64 and Quantise
    price: quantised float64 rows are priced as float32
        size = {{dtype.itemsize => 4}}
                return codec_ops.message_bytes(
test_codec.py -k test_quantised_rows_lie_within_half_a_step
    codec: the zero of a quantised row is rounded up
        bits += {{0xFFFF => 0}}  # a negative number falls
    codec: the step of a quantised row is too short
        d = bf16_up((most - low[k]) / {{top => (top + 1)}})
test_codec.py -k test_unbiased_both_ways
    codec: random rounding favours the lower level
        np.int32(noise[np.uint64(c)]{{ =>  >> np.uint16(1)}})
test_codec.py -k scaled_mask
    codec: a mask is scaled by its rate, not by what it keeps
        return {{width / self.kept(width) => self.rate}} if self.scaled and width else 1.0
test_codec.py -k test_rows_are_scaled
    codec: rows that travel are not scaled
        few.mul_({{rows / count => 1.0}})
test_codec.py -k Chain or chain
    codec: a chain picks the rows of a message twice
        {{x, index = stage.narrow(x, draw, index), None => x = stage.narrow(x, draw, index)}}
test_codec.py -k test_quantised_rows_that_are_no_numbers
    codec: rows that are no numbers are refused by codecs that may send them
        if {{self.strict => not self.strict}}:
                    context.refuse(x, index, bad)
test_sample_device.py test_loader.py -k device_equals_cpu or batches_follow_the_rule
    sampler: a row that is small gives all it has, with replacement too
        if fan_out < 0 or {{(choices < fan_out and not replace) => choices < fan_out}}:
test_sampling_statistics.py -k all_subsets or draws_with_replacement
    sampler: the last edge of a row is never drawn first
        pick = np.int64(uniform(generator, k) * {{top => (top - 1)}})
                    if replace:
test_loader_life.py -k test_nothing_later or test_seeds_take_the_time
    sampler: an edge as late as its seed is left out
        if time[timed] {{<= => <}} limit:
test_layer_sampler.py -k test_probabilities_are_those_of_the_formula
    weights: LADIES draws by the weights, not by their squares
        return {{SQUARED => PLAIN}} if self.definition == "code" else COUNTED
test_layer_sampler.py -k by_hand or test_unbiased_estimates
    weights: debiased weights count the draw itself among those to come
        chance = drawn.left.double() / value.double() + (s - nth{{ - 1 => }})
test_layer_sampler.py -k by_hand
    weights: importance weights are not divided by the number of draws
        found.index_add_(0, place, chance{{ / s => }})
test_layer_sampler.py -k by_hand
    mask: nodes of the batch are weighted, the others count once
        found.masked_fill_({{kept => ~kept}}, 1.0)
test_algebra.py -k test_rows_that_give_all_they_have
    weights: a row with as many entries as draws is taken for an estimate
        return offsets(count.clamp(max=s)), count {{<= => <}} s
test_emulated_ranks.py -k sync or every
    staleness: late rows are one epoch newer than they should be
        due = self.messages[max(len(self.messages) - {{1 - late => late}}, 0)]
    staleness: synchronous epochs come one too late
        return every is not None and {{(epoch + 1) => epoch}} % every == 0
test_emulated_ranks.py -k smooth
    staleness: a moving average takes the two shares the wrong way round
        mul_({{smooth).add_(rows, alpha=1 - smooth) => 1 - smooth).add_(rows, alpha=smooth)}}
    staleness: late gradients are averaged as rows are
        own = {{self.smooth_gradients if backward else None => None}}
test_emulated_ranks.py -k skipped
    compressed: rows that are skipped get an epoch less old than they may
        if exchange.epoch - buffer.messages[-1].epoch {{> => >=}} rule.most:
    compressed: the bound of a drift is taken of its square
        return bool(change <= rule.bound_of(backward){{ ** 2 => }} * norm)
test_codec.py -k greater_degree
    graded: rows of nodes with few in-edges get the most bits
        order = torch.argsort({{context.key.degree => -context.key.degree}}, stable=True)
test_codec.py -k test_no_other_bits
    graded: a budget of bits is never used up
        taken = (cost.cumsum(0) {{<= => <}} spare).long()
test_shutdown.py -k test_a_backward_pass_stands_under_the_deadline
    error: a wait goes on past its deadline
        if seconds > {{self.deadline => 10 * self.deadline}}:
test_failure.py -k test_a_wait_raises
    error: a wait does not look whether another rank has failed
        {{self.raise_reported() => pass}}
                if seconds > self.deadline:
    error: a rank reads another's failure as its own
        if note["rank"] {{!= => ==}} self.rank:
test_failure.py -k test_ranks_at_one_place
    error: a rank tells where the others were when it asked before
        if number{{ >= wait.question > 0 => }}:
test_first_errors.py -k test_ranks_that_select_differently
    error: ranks compare an operation once, also if they differed
        given = [x for x in operands if isinstance(x, Tensor)]{{ => ; known.add(call)}}
test_attribute_order.py -k test_a_share_lists
    index: a copy of a share lists attributes as PyG does
        return {{listed_in_order(super().__copy__()) => super().__copy__()}}
test_saving.py -k test_a_flipped_bit_of_a_checkpoint
    checkpoint: a saved file may be altered
        if {{sha256(path) != sums[path.name] => False}}:
test_link_resume.py -k test_rows_of_another_partition
    checkpoint: late rows are taken whatever partition they are of
        "owners": {{digest => None}},
test_cutters.py -k test_digest_tells_partitions_apart
    checkpoint: a partition's digest leaves out the owners
        state.update({{self.owner.contiguous().numpy().data => bytes(8)}})
test_cutters.py -k test_no_part_exceeds_its_capacity and ldg
    cutter: parts may be larger than the balance says
        max(capacity[0], math.{{floor(mean[0] * balance) => ceil(mean[0] * balance * 1.05)}})
test_cutters.py -k test_block_is_consecutive_and_even
    cutter: the first parts of a block cut are all the larger ones
        num_nodes // num_parts + (parts {{< => >=}} num_nodes % num_parts))
test_cutters.py -k ldg or cliques
    cutter: LDG keeps its last cut, not its best
        best, best_cut = owner{{.copy() => }}, size
test_checkpoint.py -k test_an_optimizer_of_another_model
    checkpoint: an optimizer of another model is taken
        unknown = [p for p in group["params"] if id(p) {{not in own_ids => in ()}}]
test_plan.py -k test_bytes_are_those_of_the_ledger
    planner: the planner forgets the sums of a product
        for link, back in {{(*ways, (links.sums, True)) => ways}}
    planner: the planner gives sums the counts of rows
        come, go = ends{{[::-1] if back else ends => }}
test_out_of_core.py -k test_layers_in_chunks_are_pygs
    chunks: a source gets the gradient of its last chunk alone
        total.{{index_add_ => index_copy_}}(0, where, part)
    chunks: a parameter gets the gradient of the last chunk alone
        total{{ += part => .copy_(part)}}
            elif isinstance(where, slice)
test_out_of_core.py -k test_training_is_that_without_a_cap
    chunks: each chunk draws a mask by a key of its own
        {{mesh.drawn = 0 => pass}}
                takes:
test_out_of_core.py -k test_layers_of_a_script
    chunks: a layer that counts its messages runs in chunks
        if {{not said and not all(map(has_known_steps, layer.modules())) => False}}:
test_out_of_core.py -k test_chunks_are_computed_again
    chunks: a chunk is computed again in another type than before
        cast = torch.autocast(kind, dtype) if {{enabled => False}} else contextlib.nullcontext()
test_cuda_kernels.py -k test_quantised_rows
    triton: Triton cuts numbers off where it should round
        code = {{rounded(t) => t}}.to(tl.int64)
    triton: Triton's noise is that of the column before
        hashes(tl.load(key), v, c // 4) >> (16 * ({{c % 4 => 3 - c % 4}}))
    triton: Triton lets numbers near the greatest become infinite
        total = {{tl.where(total > limit, limit, total) => total}}.to(out.dtype.element_ty)
test_subgraph_loaders.py -k saint
    subgraphs: an edge's norm counts its target
        of_source[ids] = drawn[self.{{source => target}}]
    subgraphs: walks go on from where there is no way out
        node = {{torch.where(degree > 0, ends, node) => ends}}
    subgraphs: edges are drawn by the degrees of their own ends
        return ({{into[self.source] + out => out[self.source] + into}}[self.target]).double()
test_subgraph_loaders.py -k test_hgt_draws_by_the_square
    subgraphs: HGT draws by budgets, not by their squares
        budget{{.square() => }}, count
    subgraphs: edges give the same budget whatever their target has
        share = ({{1.0 / count.double() => count.double() * 0 + 1}})[target]
    subgraphs: HGT draws a node again
        left = {{~torch.isin(node, self.node[name]) => node >= 0}}
test_sampling_statistics.py -k all_subsets or beside_each_other or by_labor
    sampler: nodes of a hop draw their sources by numbers of their own
        generator = stream(keys[batch], {{0 => i}}, source)
    sampler: edges beside each other have one draw
        clock = uniform(generator, {{edges[slot] => 0}})
    sampler: a light edge is drawn before a heavy one
        clock = -math.log(clock + 0.5 * UNIT) {{/ => *}} weight[e]
test_partitioned_loader.py -k test_batches_are_those_of_the_whole_graph
    sampler: the owner of a node draws by the rule for each node
        about = r, relation, hop, {{labor => False}}
test_step.py -k gat
    attention: a target is scored as a source
        F.linear(target, _folded(of_target.weight, conv.{{att_dst => att_src}})),
test_step.py -k test_dropout_of_attention
    attention: dropout of attention is left in the order of the given edges
        return share{{ if edges is None else edges.in_order(share) => }}
test_step.py -k attention
    attention: attention over edges with features leaves them out
        scores{{ if terms is None else scores + terms => }}
"""


def read(faults: str) -> Iterator[Mutation]:
    """Yields the faults of a text that is written as `FAULTS` is."""
    for group in re.split(r"^(?=test_)", faults, flags=re.M)[1:]:
        tests, _, group = group.partition("\n")
        files, _, words = tests.partition(" -k ")
        for fault in re.split(r"^    (?=\w)", group, flags=re.M)[1:]:
            head, _, code = fault.partition("\n")
            kind, _, name = head.partition(": ")
            code = re.sub(r"^ {8}", "", code.rstrip(), flags=re.M)
            old, new = (re.sub(CHANGED, rf"\{k}", code, flags=re.S) for k in (1, 2))
            yield Mutation(name, kind, old, new, files, words)


CHANGED = r"\{\{(.*?) => (.*?)\}\}"
MUTATIONS = tuple(read(FAULTS))


def texts(root: Path = ROOT) -> dict[Path, str]:
    """Returns the text of each file of the package below a root."""
    return {p: p.read_text() for p in sorted((root / PACKAGE).rglob("*.py"))}


def find(mutation: Mutation, known: dict[Path, str]) -> Path:
    """Returns the only file whose text a fault changes, of `texts`.

    Raises:
        LookupError: if there is no such text, or more than one.
    """
    counts = {path: text.count(mutation.old) for path, text in known.items()}
    places = [path for path, count in counts.items() if count]
    if sum(counts.values()) != 1:
        raise LookupError(
            f"the old text of {mutation.name!r} must occur once in {PACKAGE}, but occurs "
            f"{sum(counts.values())} times (in {places}): {mutation.old!r}"
        )
    return places[0]


class Workshop:
    """A copy of the package and its tests, in which faults are put one at a time."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.root, self.limit = folder, limit
        skip = shutil.ignore_patterns("*.pyc")  # compiled loops come along
        for name in (PACKAGE, "tests", "tools", "benchmarks", "examples"):
            shutil.copytree(ROOT / name, folder / name, ignore=skip)
        shutil.copy2(ROOT / "pyproject.toml", folder)

    def pytest(self, mutation: Mutation, **more: str) -> tuple[int | None, str]:
        """Runs the tests of a fault; returns pytest's exit code, None if it was stopped."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += [f"tests/{name}" for name in mutation.files.split()]
        own = {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", **more}
        process = subprocess.Popen(
            [*command, "-k", mutation.words],
            cwd=self.root,
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=self.limit)
            return process.returncode, text
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with suppress(ProcessLookupError):  # the ranks that it has left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def judge(self, mutation: Mutation) -> str:
        """Runs the tests of a fault with it; returns the first that failed, or what was."""
        path = find(mutation, texts(self.root))
        text, about = path.read_text(), path.stat()
        path.write_text(text.replace(mutation.old, mutation.new))
        try:
            with tempfile.TemporaryDirectory() as compiled:
                apart = {"NUMBA_CACHE_DIR": compiled} if "@jit" in text else {}
                code, said = self.pytest(mutation, **apart)
        finally:
            path.write_text(text)
            os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
        failed = FAILED.search(said)
        if code == 1 and failed:
            return failed[1]
        if code:
            print(said[-3000:])
        return {None: "timeout", 0: "NOT caught"}.get(code, "broken")

    def check_unmutated(self, mutations: Sequence[Mutation]) -> None:
        """Runs the tests of faults without any.

        Raises:
            RuntimeError: with what pytest said, unless they pass.
        """
        for mutation in {(m.files, m.words): m for m in mutations}.values():
            code, said = self.pytest(mutation)
            if code != 0:
                told = f"{mutation.files} -k {mutation.words!r} fails without a fault"
                raise RuntimeError(f"{told}:\n{said[-5000:]}")


def campaign(
    mutations: Sequence[Mutation], jobs: int, limit: float
) -> Iterator[tuple[Mutation, str]]:
    """Judges faults, some at a time; yields what came of each in turn, and prints it."""
    known = texts()
    for mutation in mutations:
        find(mutation, known)
    shops: Queue[Workshop] = Queue()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for number in range(jobs):
            shops.put(Workshop(Path(folder) / str(number), limit))

        def judge(mutation: Mutation) -> str:
            shop = shops.get()
            try:
                return shop.judge(mutation)
            finally:
                shops.put(shop)

        shop = shops.get()
        shop.check_unmutated(mutations)
        shops.put(shop)
        pool = ThreadPoolExecutor(jobs)
        try:
            for mutation, by in zip(mutations, pool.map(judge, mutations), strict=True):
                print(f"{mutation.name}: {by}", flush=True)
                yield mutation, by
        finally:  # interrupted, it ends with the faults that are being judged
            pool.shutdown(cancel_futures=True)


def report(found: Sequence[tuple[Mutation, str]]) -> str:
    """Returns the report of a whole run: faults by kind, and those missed."""
    missed = [mutation for mutation, by in found if "::" not in by]
    every, left = (Counter(m.kind for m in some) for some in (dict(found), missed))
    told = f"{len(found) - len(missed)} of {len(found)} faults are caught."
    counts = [f"| {every[k] - left[k]} of {every[k]} | {k} |" for k in sorted(every)]
    told = [HEAD.format(told), *counts, "", *(f"- Missed: {m.name}" for m in missed)]
    return "\n".join(told).rstrip() + "\n"


HEAD = """# Faults that the tests find

**{}**

    python tools/mutations.py --report benchmarks/reports/mutations.md

A fault is a line that was changed in a copy of the package. It is caught if one of the \
tests that `tools/mutations.py` names for it fails, while all of them pass without it.

| caught | kind of fault |
|---|---|"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 if all faults were caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--report", type=Path, help="a Markdown file")
    add("-k", dest="words", default="", help="a pattern to be found in names or kinds")
    add("--jobs", type=int, default=1, help="faults at a time")
    add("--limit", type=float, default=LIMIT, help="seconds for the tests of a fault")
    given = parser.parse_args(arguments)
    chosen = [m for m in MUTATIONS if re.search(given.words, f"{m.kind}: {m.name}")]
    found = list(campaign(chosen, given.jobs, given.limit))
    told = report(found)
    if given.report is not None:
        given.report.write_text(told)
    print(told.splitlines()[2].strip("*"))
    return int("Missed" in told)


if __name__ == "__main__":
    sys.exit(main())

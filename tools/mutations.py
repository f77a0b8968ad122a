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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "pyg_distcomm"
LIMIT = 300.0  # seconds that the tests of one fault may take
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.M)


@dataclass(frozen=True)
class Mutation:
    """One fault, and the tests that should find it.

    Args:
        name: what is wrong with it.
        kind: what part of the package it is in.
        old, new: a text that occurs once in the package, and what takes its place.
        files: tests of the default tier.
        words: selects some of them, as pytest's -k does; nothing selects all.
    """

    name: str
    kind: str
    old: str
    new: str
    files: str
    words: str = ""


MUTATIONS = (
    # what travels
    Mutation(
        "a rank sends its rows in another order than they are awaited",
        "halo",
        "rows = kernels.gather_rows(x.flatten(1), self.send_slot)",
        "rows = kernels.gather_rows(x.flatten(1), self.send_slot.roll(1))",
        "test_parity.py",
        "test_step_equals_pyg",
    ),
    Mutation(
        "sums are added to other rows than they were computed for",
        "halo",
        "kernels.scatter_add_rows(flat, self.send_slot, sums)",
        "kernels.scatter_add_rows(flat, self.send_slot.roll(1), sums)",
        "test_parity.py",
        "test_step_equals_pyg",
    ),
    Mutation(
        "rows that a rank does not hold are sent as others",
        "halo",
        "if not known.all():",
        "if False:",
        "test_messages.py",
        "test_rows_of_others",
    ),
    # what goes back
    Mutation(
        "the gradient of a product has the other sign",
        "adjoint",
        "gx, *found = OverlappedSpMM(mirror, g.to(ctx.sent), ctx.sent).run()",
        "gx, *found = OverlappedSpMM(mirror, -g.to(ctx.sent), ctx.sent).run()",
        "test_parity.py",
        "test_step_equals_pyg",
    ),
    Mutation(
        "the transpose of a grid matrix keeps its exchanges",
        "adjoint",
        "GridMatrix(self.tile.transposed, self.links.mirrored, self.fiber)",
        "GridMatrix(self.tile.transposed, self.links, self.fiber)",
        "test_products.py",
        "test_contract_on_every_grid and 4",
    ),
    Mutation(
        "a chunk pulls gradients through the matrix, not its transpose",
        "adjoint",
        "operator.own.transposed.matmul(self.gradients, out, own.start)",
        "operator.own.matmul(self.gradients, out, own.start)",
        "test_pipeline.py",
        "constant_history and gcn-True-1",
    ),
    Mutation(
        "the gradient of an edge's value takes row and column the wrong way round",
        "adjoint",
        "block.value_gradient(rows, cols)",
        "block.value_gradient(cols, rows)",
        "test_cover.py",
        "test_learnt_weights",
    ),
    Mutation(
        "gradients of kept rows are masked by another key",
        "adjoint",
        "return codec, rows.key, random.fold",
        "return codec, rows.key + 1, random.fold",
        "test_link.py",
        "transpose",
    ),
    # gradients, losses and reductions
    Mutation(
        "the gradient of a parameter is that of this rank's rows",
        "gradient",
        "total = collectives.all_reduce(flat, mesh.world)",
        "total = flat",
        "test_averaging.py",
        "test_gradients_are_those_of_one_process",
    ),
    Mutation(
        "what torch accumulates is not what is summed at the end of a pass",
        "gradient",
        "total: Any = PartialSum(part, x.mesh)",
        "total: Any = PartialSum(part.clone(), x.mesh)",
        "test_averaging.py",
        "test_gradients_are_those_of_one_process",
    ),
    Mutation(
        "the running variance of batch norm is biased",
        "reduction",
        "var.mul_(1 - momentum).add_(square / (n - 1), alpha=momentum)",
        "var.mul_(1 - momentum).add_(square / n, alpha=momentum)",
        "test_sharded.py",
    ),
    Mutation(
        "an op without a rule returns what it wrote to",
        "whole",
        "return written[0] if len(aliased) == 1 else out",
        "return written[0] if len(written) == 1 else out",
        "test_tensor.py",
        "test_what_needs_all_rows",
    ),
    Mutation(
        "a mean loss is over the rows of this rank",
        "loss",
        "both = over_ranks(torch.stack([out, weight]), rows.mesh)",
        "both = torch.stack([out, weight])",
        "test_tensor.py",
        "test_losses_are_global_means",
    ),
    Mutation(
        "SAGEConv sums where it should take means",
        "reduction",
        'OperatorKind(), None, self.lin_l, self.aggr == "mean"',
        "OperatorKind(), None, self.lin_l, False",
        "test_parity.py",
        "test_step_equals_pyg",
    ),
    # degrees
    Mutation(
        "degrees leave out the self-loops",
        "degrees",
        "degree = weight.new_zeros(here.num_own).index_add(0, edge_index[1], weight)",
        "degree = weight.new_full((here.num_own,), -fill * add_self_loops).index_add(0, "
        "edge_index[1], weight)",
        "test_parity.py",
        "test_step_equals_pyg",
    ),
    Mutation(
        "the loops of an improved GCN count once",
        "degrees",
        "fill = 2.0 if improved else 1.0",
        "fill = 1.0",
        "test_layers.py",
        "test_arguments_of_the_matrix_layers",
    ),
    Mutation(
        "an operator with weights is kept when they change",
        "cache",
        "if same and seen_version == version:",
        "if same:",
        "test_share.py test_ordering.py",
        "test_cached_operators or test_ranks_compare_changes",
    ),
    Mutation(
        "a product is kept when its input changes in place",
        "cache",
        "key, now = _key(kind, weight), (_version(x), _version(weight))",
        "key, now = _key(kind, weight), (0, _version(weight))",
        "test_ordering.py",
        "test_a_kept_product_follows_its_inputs",
    ),
    # prices
    Mutation(
        "a price counts four bytes per word, whatever the type",
        "price",
        "return self.words * itemsize",
        "return self.words * 4",
        "test_pipeline_ranks.py",
        "test_bytes_are_those",
    ),
    Mutation(
        "an exchange's price counts what a rank keeps",
        "price",
        "words=(sum(recv_counts) - recv_counts[rank]) * width,",
        "words=sum(recv_counts) * width,",
        "test_feature_store.py",
        "test_the_ledger_says_what_the_price_says",
    ),
    Mutation(
        "an all-reduce costs half of what a ring moves",
        "price",
        "return -(-2 * numel * (size - 1) // size)",
        "return -(-numel * (size - 1) // size)",
        "test_averaging.py",
        "test_a_pass_sums_all_gradients",
    ),
    Mutation(
        "the ledger counts four bytes per word, whatever the type",
        "price",
        "bytes=received * width * x.element_size(),",
        "bytes=received * width * 4,",
        "test_products.py",
        "test_contract_on_every_grid and 2",
    ),
    Mutation(
        "the words of a dense halo count the fiber once",
        "price",
        "(1 - 1 / s) / (r * p) + 2 * (1 - 1 / p) / size",
        "(1 - 1 / s) / (r * p) + (1 - 1 / p) / size",
        "test_products.py",
        "test_dense_halo_costs_the_formula",
    ),
    Mutation(
        "stages over several ranks average their weights for half the price",
        "price",
        "return stage_words(n, d, stages, shared) + rows + 2 * (ways - 1) * weights",
        "return stage_words(n, d, stages, shared) + rows + (ways - 1) * weights",
        "test_pipeline_parts.py",
        "test_prices_are_those_of_the_paper",
    ),
    Mutation(
        "ranks agree on the modes of a link's calls for nothing",
        "price",
        "return times * collectives.ring_words(1, self.size)",
        "return 0",
        "test_link_bytes.py",
        "test_bytes_are_those_foretold",
    ),
    Mutation(
        "quantised float64 rows are priced as float32",
        "price",
        "size = dtype.itemsize\n        return codec_ops.message_bytes(",
        "size = 4\n        return codec_ops.message_bytes(",
        "test_codec.py",
        "test_shapes_bytes_and_out and float64 and Quantise",
    ),
    # codecs
    Mutation(
        "the zero of a quantised row is rounded up",
        "codec",
        "bits += 0xFFFF  # a negative number falls as its bits grow",
        "bits += 0",
        "test_codec.py",
        "test_quantised_rows_lie_within_half_a_step",
    ),
    Mutation(
        "the step of a quantised row is too short",
        "codec",
        "d = bf16_up((most - low[k]) / top, number, number_bits)",
        "d = bf16_up((most - low[k]) / (top + 1), number, number_bits)",
        "test_codec.py",
        "test_quantised_rows_lie_within_half_a_step",
    ),
    Mutation(
        "random rounding favours the lower level",
        "codec",
        "np.int32(np.rint(t * scale)) + np.int32(noise[np.uint64(c)])",
        "np.int32(np.rint(t * scale)) + np.int32(noise[np.uint64(c)] >> np.uint16(1))",
        "test_codec.py",
        "test_unbiased_both_ways",
    ),
    Mutation(
        "a mask is scaled by its rate, not by what it keeps",
        "codec",
        "return width / self.kept(width) if self.scaled and width else 1.0",
        "return self.rate if self.scaled and width else 1.0",
        "test_codec.py",
        "scaled_mask",
    ),
    # samplers
    Mutation(
        "a row that is small gives all it has, with replacement too",
        "sampler",
        "if fan_out < 0 or (choices < fan_out and not replace):",
        "if fan_out < 0 or choices < fan_out:",
        "test_sample_kernels.py test_loader.py",
        "test_compiled_equals_reference or test_batches_follow_the_rule",
    ),
    Mutation(
        "the last edge of a row is never drawn first",
        "sampler",
        "pick = np.int64(uniform(generator, k) * top)\n            if replace:",
        "pick = np.int64(uniform(generator, k) * (top - 1))\n            if replace:",
        "test_sampling_statistics.py",
        "test_all_subsets_are_equally_likely or test_draws_with_replacement",
    ),
    Mutation(
        "an edge as late as its seed is left out",
        "sampler",
        "if time[timed] <= limit:",
        "if time[timed] < limit:",
        "test_loader_life.py",
        "test_nothing_later or test_seeds_take_the_time",
    ),
    Mutation(
        "LADIES draws by the weights, not by their squares",
        "weights",
        'return SQUARED if self.definition == "code" else COUNTED',
        'return PLAIN if self.definition == "code" else COUNTED',
        "test_layer_sampler.py",
        "test_probabilities_are_those_of_the_formula",
    ),
    Mutation(
        "debiased weights count the draw itself among those to come",
        "weights",
        "chance = drawn.left.double() / value.double() + (s - nth - 1)",
        "chance = drawn.left.double() / value.double() + (s - nth)",
        "test_layer_sampler.py",
        "test_debiased_weights_by_hand or test_unbiased_estimates",
    ),
    Mutation(
        "importance weights are not divided by the number of draws",
        "weights",
        "found.index_add_(0, place, chance / s)",
        "found.index_add_(0, place, chance)",
        "test_layer_sampler.py",
        "test_importance_weights_by_hand",
    ),
    Mutation(
        "nodes of the batch are weighted, the others count once",
        "mask",
        "found.masked_fill_(kept, 1.0)",
        "found.masked_fill_(~kept, 1.0)",
        "test_layer_sampler.py",
        "by_hand",
    ),
    Mutation(
        "a row with as many entries as draws is taken for an estimate",
        "weights",
        "return offsets(count.clamp(max=s)), count <= s",
        "return offsets(count.clamp(max=s)), count < s",
        "test_algebra.py",
        "test_rows_that_give_all_they_have",
    ),
    Mutation(
        "the rows of the lowest scores are cached",
        "weights",
        "best = torch.sort(score.double(), descending=True, stable=True)",
        "best = torch.sort(score.double(), descending=False, stable=True)",
        "test_feature_store.py",
        "hot_rows",
    ),
    # indices
    Mutation(
        "an id just behind a block is found in it",
        "index",
        "here = (place >= 0) & (place < len(self.gid))",
        "here = (place >= 0) & (place <= len(self.gid))",
        "test_feature_store.py",
        "found_in_a_block",
    ),
    # late rows
    Mutation(
        "late rows are one epoch newer than they should be",
        "staleness",
        "return self.messages[max(len(self.messages) - 1 - late, 0)]",
        "return self.messages[max(len(self.messages) - late, 0)]",
        "test_link_late.py",
        "test_synchronous_epochs",
    ),
    Mutation(
        "synchronous epochs come one too late",
        "staleness",
        "return every is not None and (epoch + 1) % every == 0",
        "return every is not None and epoch % every == 0",
        "test_link_late.py",
        "test_synchronous_epochs",
    ),
    Mutation(
        "a moving average takes the two shares the wrong way round",
        "staleness",
        "self.mean.mul_(smooth).add_(rows, alpha=1 - smooth)",
        "self.mean.mul_(1 - smooth).add_(rows, alpha=smooth)",
        "test_link_late.py",
        "test_smooth",
    ),
    Mutation(
        "late gradients are averaged as rows are",
        "staleness",
        "own = self.smooth_gradients if backward else None",
        "own = None",
        "test_emulated_ranks.py",
        "smooth",
    ),
    Mutation(
        "rows that are skipped get an epoch less old than they may",
        "compressed",
        "if exchange.epoch - buffer.messages[-1].epoch > rule.most:",
        "if exchange.epoch - buffer.messages[-1].epoch >= rule.most:",
        "test_link_late.py",
        "test_rows_get_no_older",
    ),
    Mutation(
        "the bound of a drift is taken of its square",
        "compressed",
        "return bool(change <= rule.bound_of(backward) ** 2 * norm)",
        "return bool(change <= rule.bound_of(backward) * norm)",
        "test_emulated_ranks.py",
        "skipped",
    ),
    Mutation(
        "rows of nodes with few in-edges get the most bits",
        "graded",
        "order, begin = torch.argsort(degree, stable=True), 0",
        "order, begin = torch.argsort(-degree, stable=True), 0",
        "test_graded.py",
        "greater_degree",
    ),
    Mutation(
        "the history of a chunk is one epoch older",
        "staleness",
        "self.history[rows] = fresh",
        "self.history[rows] = self.mix[rows].clone()",
        "test_pipeline.py",
        "constant_history and gcn-True",
    ),
    Mutation(
        "gradients of an epoch are kept in the next one",
        "staleness",
        "if self.gradients is not None:",
        "if self.gradients is None:",
        "test_pipeline.py",
        "test_gradients_between_chunks",
    ),
    # the rows of a feature store
    Mutation(
        "the cache keeps the rows of an attribute that was replaced",
        "cache",
        "if len(row_group.cached_gid):\n            self._fill_cache(row_group, [name])",
        "if len(row_group.cached_gid) and name not in row_group.cached_rows:\n"
        "            self._fill_cache(row_group, [name])",
        "test_feature_store.py",
        "test_the_cache_is_the_same or test_putting",
    ),
    Mutation(
        "rows of the cache are laid out as if they came from others",
        "cache",
        "order = torch.cat([own_ids, cached, uncached])",
        "order = torch.cat([own_ids, uncached, cached])",
        "test_feature_store.py",
        "test_the_cache_is_the_same or test_traffic_falls",
    ),
    # what goes wrong
    Mutation(
        "a problem is raised on the rank that has it alone",
        "error",
        "found = all_gather_object(note, axis)",
        "found = [note]",
        "test_feature_store.py",
        "test_mistakes_are_told_to_all_ranks",
    ),
    Mutation(
        "a wait goes on past its deadline",
        "error",
        "if seconds > self.deadline:",
        "if seconds > 10 * self.deadline:",
        "test_shutdown.py",
        "test_a_backward_pass_stands_under_the_deadline",
    ),
    Mutation(
        "a wait does not look whether another rank has failed",
        "error",
        "self.raise_reported()\n        if seconds > self.deadline:",
        "if seconds > self.deadline:",
        "test_failure.py",
        "test_a_wait_raises",
    ),
    Mutation(
        "a rank reads another's failure as its own",
        "error",
        'if note["rank"] != self.rank:',
        'if note["rank"] == self.rank:',
        "test_failure.py",
        "test_a_wait_raises",
    ),
    Mutation(
        "a rank tells where the others were when it asked before",
        "error",
        "if number >= wait.question > 0:",
        "if number:",
        "test_whereabouts.py",
        "test_ranks_at_one_place",
    ),
    Mutation(
        "ranks compare an operation once, also if they differed",
        "error",
        """    given = [x for x in operands if isinstance(x, Tensor)]
""",
        """    known.add(call)
    given = [x for x in operands if isinstance(x, Tensor)]
""",
        "test_first_errors.py",
        "test_ranks_that_select_differently",
    ),
    Mutation(
        "a copy of a share lists attributes as PyG does",
        "index",
        "return listed_in_order(super().__copy__())",
        "return super().__copy__()",
        "test_attribute_order.py",
        "test_a_share_lists",
    ),
    Mutation(
        "ranks may change weights in place on some of them alone",
        "error",
        "if self._last_changed < int(number) <= self._places:",
        "if self._last_changed < int(number) < self._places:",
        "test_ordering.py",
        "test_a_change_is_noticed",
    ),
    # checkpoints
    Mutation(
        "a saved file may be altered",
        "checkpoint",
        "if sha256(path) != sums[path.name]:",
        "if not sums[path.name]:",
        "test_saving.py",
        "test_a_flipped_bit_of_a_checkpoint",
    ),
    Mutation(
        "history is taken whatever nodes it is of",
        "checkpoint",
        "digest.update(plan.gid.numpy().tobytes())",
        "digest.update(bytes(8))",
        "test_pipeline_ranks.py",
        "test_history_of_other_chunks",
    ),
    Mutation(
        "late rows are taken whatever partition they are of",
        "checkpoint",
        '"owners": digest,',
        '"owners": None,',
        "test_link_resume.py",
        "test_rows_of_another_partition",
    ),
    Mutation(
        "a partition's digest leaves out the owners",
        "checkpoint",
        "state.update(self.owner.contiguous().numpy().data)",
        "state.update(bytes(8))",
        "test_cutters.py",
        "test_digest_tells_partitions_apart",
    ),
    Mutation(
        "an optimizer of another model is taken",
        "checkpoint",
        'unknown = [p for p in group["params"] if id(p) not in own_ids]',
        'unknown = [p for p in group["params"] if id(p) in ()]',
        "test_checkpoint.py",
        "test_an_optimizer_of_another_model",
    ),
    # cutters
    Mutation(
        "parts may be larger than the balance says",
        "cutter",
        "capacity[0] = max(capacity[0], math.floor(mean[0] * balance))",
        "capacity[0] = max(capacity[0], math.ceil(mean[0] * balance * 1.05))",
        "test_cutters.py",
        "test_ldg_never_exceeds_its_capacity",
    ),
    Mutation(
        "the first parts of a block cut are all the larger ones",
        "cutter",
        "sizes[:rest] += 1",
        "sizes[-1] += rest",
        "test_cutters.py",
        "test_block_is_consecutive_and_even",
    ),
    Mutation(
        "LDG keeps its last cut, not its best",
        "cutter",
        "best, best_cut = owner.copy(), size",
        "best, best_cut = owner, size",
        "test_cutters.py",
        "ldg or cliques",
    ),
    # the planner
    Mutation(
        "the planner forgets the sums of a product",
        "planner",
        "for link, back in (*ways, (links.sums, True))",
        "for link, back in ways",
        "test_plan.py",
        "test_bytes_are_those_of_the_ledger",
    ),
    Mutation(
        "the planner gives sums the counts of rows",
        "planner",
        "come, go = ends[::-1] if back else ends",
        "come, go = ends",
        "test_plan.py",
        "test_bytes_are_those_of_the_ledger",
    ),
    # products of sparse matrices of edges
    # pools
    # chunks of nodes, within a memory cap
    Mutation(
        "a source gets the gradient of its last chunk alone",
        "chunks",
        "total.index_add_(0, where, part)",
        "total.index_copy_(0, where, part)",
        "test_out_of_core.py",
        "test_layers_in_chunks_are_pygs",
    ),
    Mutation(
        "a parameter gets the gradient of the last chunk alone",
        "chunks",
        "total += part\n    elif isinstance(where, slice)",
        "total.copy_(part)\n    elif isinstance(where, slice)",
        "test_out_of_core.py",
        "test_layers_in_chunks_are_pygs",
    ),
    Mutation(
        "each chunk draws a mask by a key of its own",
        "chunks",
        "mesh.drawn = 0\n        takes: ",
        "takes: ",
        "test_out_of_core.py",
        "test_training_is_that_without_a_cap",
    ),
    Mutation(
        "a layer that counts its messages runs in chunks",
        "chunks",
        "if not said and not all(map(has_known_steps, layer.modules())):",
        "if False:",
        "test_out_of_core.py",
        "test_layers_of_a_script",
    ),
    Mutation(
        "a chunk is computed again in another type than before",
        "chunks",
        "if enabled:\n                stack.enter_context(torch.autocast(kind, dtype))",
        "if enabled:\n                pass",
        "test_out_of_core.py",
        "test_chunks_are_computed_again",
    ),
    # functions of torch that are made of others
    # sizes
    # a memory of nodes
    # codecs
    Mutation(
        "a budget of bits is never used up",
        "graded",
        "taken = (cost.cumsum(0) <= spare).long()",
        "taken = (cost.cumsum(0) < spare).long()",
        "test_graded.py",
        "test_no_other_bits",
    ),
    Mutation(
        "rows that travel are not scaled",
        "codec",
        "few.mul_(rows / count)",
        "few.mul_(1.0)",
        "test_codec.py",
        "test_rows_are_scaled",
    ),
    Mutation(
        "a chain picks the rows of a message twice",
        "codec",
        "x, index = stage.narrow(x, draw, index), None",
        "x = stage.narrow(x, draw, index)",
        "test_codec.py",
        "Chain or chain",
    ),
    Mutation(
        "rows that are no numbers are refused by codecs that may send them",
        "codec",
        "if self.strict:\n            context.refuse(x, index, bad)",
        "if not self.strict:\n            context.refuse(x, index, bad)",
        "test_codec.py",
        "test_quantised_rows_that_are_no_numbers",
    ),
    # the same in Triton
    Mutation(
        "Triton cuts numbers off where it should round",
        "triton",
        "code = rounded(t).to(tl.int64)",
        "code = t.to(tl.int64)",
        "test_cuda_codecs.py",
        "test_quantised_rows",
    ),
    Mutation(
        "Triton's noise is that of the column before",
        "triton",
        "hashes(tl.load(key), v, c // 4) >> (16 * (c % 4))",
        "hashes(tl.load(key), v, c // 4) >> (16 * (3 - c % 4))",
        "test_cuda_codecs.py",
        "test_quantised_rows",
    ),
    Mutation(
        "Triton lets numbers near the greatest become infinite",
        "triton",
        "total = tl.where(total > limit, limit, total).to(out.dtype.element_ty)",
        "total = total.to(out.dtype.element_ty)",
        "test_cuda_codecs.py",
        "test_quantised_rows",
    ),
    # subgraphs
    Mutation(
        "an edge's norm counts its target",
        "subgraphs",
        "of_source[self._edge_ids] = drawn[self.source]",
        "of_source[self._edge_ids] = drawn[self.target]",
        "test_subgraph_loaders.py",
        "saint",
    ),
    Mutation(
        "walks go on from where there is no way out",
        "subgraphs",
        "node = torch.where(degree > 0, ends, node)",
        "node = ends",
        "test_subgraph_loaders.py",
        "saint",
    ),
    Mutation(
        "edges are drawn by the degrees of their own ends",
        "subgraphs",
        "return (into[self.source] + out[self.target]).double()",
        "return (out[self.source] + into[self.target]).double()",
        "test_subgraph_loaders.py",
        "saint",
    ),
    Mutation(
        "HGT draws by budgets, not by their squares",
        "subgraphs",
        "budget.square(), count",
        "budget, count",
        "test_subgraph_loaders.py",
        "test_hgt_draws_by_the_square or test_hgt_on_ranks",
    ),
    Mutation(
        "edges give the same budget whatever their target has",
        "subgraphs",
        "share = (1.0 / count.double())[target]",
        "share = (count.double() * 0 + 1)[target]",
        "test_subgraph_loaders.py",
        "test_hgt_draws_by_the_square or test_hgt_on_ranks",
    ),
    Mutation(
        "HGT draws a node again",
        "subgraphs",
        "left = ~torch.isin(node, self.node[name])",
        "left = node >= 0",
        "test_subgraph_loaders.py",
        "test_hgt_draws_by_the_square or test_hgt_on_ranks",
    ),
    # LABOR
    Mutation(
        "nodes of a hop draw their sources by numbers of their own",
        "sampler",
        "generator = stream(keys[batch], 0, source)",
        "generator = stream(keys[batch], i, source)",
        "test_labor.py",
    ),
    Mutation(
        "edges beside each other have one draw",
        "sampler",
        "clock = uniform(generator, edges[slot])",
        "clock = uniform(generator, 0)",
        "test_labor.py",
    ),
    Mutation(
        "a light edge is drawn before a heavy one",
        "sampler",
        "clock = -math.log(clock + 0.5 * UNIT) / weight[e]",
        "clock = -math.log(clock + 0.5 * UNIT) * weight[e]",
        "test_labor.py",
    ),
    Mutation(
        "the owner of a node draws by the rule for each node",
        "sampler",
        "about = r, relation, hop, labor",
        "about = r, relation, hop, False",
        "test_partitioned_loader.py",
        "test_batches_are_those_of_the_whole_graph",
    ),
    # attention by products
    Mutation(
        "a target is scored as a source",
        "attention",
        "F.linear(target, _folded(of_target.weight, conv.att_dst)),",
        "F.linear(target, _folded(of_target.weight, conv.att_src)),",
        "test_step.py",
        "gat",
    ),
    Mutation(
        "dropout of attention is left in the order of the given edges",
        "attention",
        "return share if edges.order is None else edges.in_order(share)",
        "return share",
        "test_step.py",
        "test_dropout_of_attention",
    ),
    Mutation(
        "attention over edges with features leaves them out",
        "attention",
        "scores if terms is None else scores + terms",
        "scores",
        "test_step.py",
        "attention",
    ),
)


def texts(root: Path = ROOT) -> dict[Path, str]:
    """Returns the text of each file of the package below a root."""
    return {p: p.read_text() for p in sorted((root / PACKAGE).rglob("*.py"))}


def find(
    mutation: Mutation, root: Path = ROOT, known: dict[Path, str] | None = None
) -> Path:
    """Returns the only file below a root whose text a fault changes.

    ``known`` are the `texts` below that root, read anew by default.

    Raises:
        LookupError: if there is no such text, or more than one.
    """
    known = known or texts(root)
    counts = {path: text.count(mutation.old) for path, text in known.items()}
    places = [str(p.relative_to(root)) for p, count in counts.items() if count]
    if sum(counts.values()) != 1:
        raise LookupError(
            f"the old text of {mutation.name!r} must occur once in {PACKAGE}, but occurs "
            f"{sum(counts.values())} times (in {places}): {mutation.old!r}"
        )
    return root / places[0]


@dataclass(frozen=True)
class Outcome:
    """What became of the tests of one fault.

    Args:
        mutation: the fault.
        file: where it was.
        verdict: "caught", "NOT caught", "timeout", or "broken" where tests could not be run.
        by: the first test that failed.
        seconds: that the tests took.
    """

    mutation: Mutation
    file: str
    verdict: str
    by: str
    seconds: float


class Workshop:
    """A copy of the package and its tests, in which faults are put one at a time."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.root, self.limit = folder, limit
        skip = shutil.ignore_patterns("*.pyc")  # compiled loops come along
        for name in (PACKAGE, "tests", "tools", "benchmarks", "examples"):
            shutil.copytree(ROOT / name, folder / name, ignore=skip)
        shutil.copy2(ROOT / "pyproject.toml", folder)

    def pytest(self, arguments: Sequence[str]) -> tuple[int | None, str, float]:
        """Runs pytest; returns its exit code, None if it was stopped, output and seconds."""
        place = {"PYTHONPATH": str(self.root)}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        begin = time.monotonic()
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=self.root,
            env={**os.environ, **place},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=self.limit)
            code: int | None = process.returncode
        except subprocess.TimeoutExpired:
            code, text = None, ""
        finally:
            self._end(process)
        return code, text, time.monotonic() - begin

    def _end(self, process: subprocess.Popen[str]) -> None:
        """Ends a run, and the ranks that it has left."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[Path]:
        """Has a fault in a block, and yields its file."""
        path = find(mutation, self.root)
        text, about = path.read_text(), path.stat()
        apart = self._compiled_of(path) if "@jit" in text else []
        self._write(path, text.replace(mutation.old, mutation.new))
        try:
            with self._compiled_anew(apart):
                yield path.relative_to(self.root)
        finally:
            self._write(path, text)
            os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # byte code is known by seconds and sizes, which may be the same
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            stale.unlink()

    def _compiled_of(self, path: Path) -> list[str]:
        """Returns the names of modules whose compiled loops have those of one inside."""
        sources = {p.stem: p.read_text() for p in (self.root / PACKAGE).rglob("*.py")}
        names, before = {path.stem}, 0
        while len(names) > before:
            before = len(names)
            uses = re.compile(rf"^(?:from|import) .*\b({'|'.join(names)})\b", re.M)
            names |= {stem for stem, text in sources.items() if uses.search(text)}
        return sorted(names)

    @contextmanager
    def _compiled_anew(self, names: Sequence[str]) -> Iterator[None]:
        """Lays compiled loops of some modules aside in a block, and drops its own."""

        def loops() -> list[Path]:
            every = (self.root / PACKAGE).rglob("__pycache__/*.nb?")
            return [path for path in every if path.name.split(".")[0] in names]

        aside = {path: path.read_bytes() for path in loops()}
        for path in aside:
            path.unlink()
        try:
            yield
        finally:
            for path in loops():
                path.unlink()
            for path, data in aside.items():
                path.write_bytes(data)

    def judge(self, mutation: Mutation) -> Outcome:
        """Runs the tests of a fault with it."""
        with self.mutated(mutation) as path:
            code, text, seconds = self.pytest(["-x", *selection(mutation)])
        failed = FAILED.search(text)
        by = failed[1].removeprefix("tests/") if failed else ""
        verdict = {None: "timeout", 0: "NOT caught", 1: "caught"}.get(code, "broken")
        if verdict == "caught" and not failed:
            verdict = "broken"
        if verdict == "broken":
            print(text[-3000:])
        return Outcome(mutation, str(path), verdict, by, seconds)

    def check_unmutated(self, mutations: Sequence[Mutation]) -> None:
        """Runs the tests of faults without any, file by file.

        Raises:
            RuntimeError: with what pytest said, unless they pass.
        """
        for files in dict.fromkeys(m.files for m in mutations):
            words = dict.fromkeys(m.words for m in mutations if m.files == files)
            either = "" if "" in words else " or ".join(f"({one})" for one in words)
            both = Mutation("", "", "", "", files, either)
            code, text, _ = self.pytest(selection(both))
            said = (text.splitlines() or [""])[-1]
            print(f"without a fault, {files}: {said}", flush=True)
            if code != 0:
                raise RuntimeError(
                    f"{files} does not pass without a fault:\n{text[-5000:]}"
                )


def selection(mutation: Mutation) -> list[str]:
    """Returns the arguments of pytest that select the tests of a fault."""
    files = [f"tests/{name}" for name in mutation.files.split()]
    return [*files, *(["-k", mutation.words] if mutation.words else [])]


def campaign(
    mutations: Sequence[Mutation], jobs: int, limit: float, check: bool
) -> Iterator[Outcome]:
    """Judges faults, some at a time; yields each outcome in turn, and prints it."""
    for mutation in mutations:
        find(mutation)
    shops: Queue[Workshop] = Queue()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        for number in range(jobs):
            shops.put(Workshop(Path(folder) / str(number), limit))

        def judge(mutation: Mutation) -> Outcome:
            shop = shops.get()
            try:
                return shop.judge(mutation)
            finally:
                shops.put(shop)

        if check:
            shop = shops.get()
            shop.check_unmutated(mutations)
            shops.put(shop)
        pool = ThreadPoolExecutor(jobs)
        try:
            for one in pool.map(judge, mutations):
                line = f"{one.verdict:>10}  {one.seconds:5.0f} s  {one.mutation.name}"
                print(f"{line}  {one.by}", flush=True)
                yield one
        finally:  # interrupted, it ends with the faults that are being judged
            pool.shutdown(cancel_futures=True)


def rows_of(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Returns the line of a table for each fault, by name."""
    rows = {}
    for outcome in outcomes:
        mutation = outcome.mutation
        by = f"`{outcome.by}`" if outcome.verdict == "caught" else outcome.verdict
        file = outcome.file.removeprefix(f"{PACKAGE}/")
        cells = mutation.name, mutation.kind, f"`{file}`", by, f"{outcome.seconds:.0f}"
        line = " | ".join(cell.replace("|", "&#124;") for cell in cells)
        rows[mutation.name] = f"| {line} |"
    return rows


def cases(outcomes: Sequence[Outcome], before: str) -> str:
    """Returns a table in Markdown, a line for each fault.

    Args:
        outcomes: of this run.
        before: an earlier table, from which the lines of other faults are taken.
    """
    lines = re.findall(r"^\| (.+?) \| .+ \| +\d+ \|$", before, re.M)
    kept = re.findall(r"^\| .+ \| +\d+ \|$", before, re.M)
    known = dict(zip(lines, kept, strict=True)) | rows_of(outcomes)
    rows = [known[m.name] for m in MUTATIONS if m.name in known]
    return "\n".join([*COLUMNS, *rows, ""])


def report(table: str) -> str:
    """Returns the short report of a table of `cases`: faults by kind, and those missed."""
    cells = [row.split(" | ") for row in re.findall(r"^\| .+ \| +\d+ \|$", table, re.M)]
    caught = [row for row in cells if "::" in row[3]]
    told = f"{len(caught)} of {len(cells)} faults are caught."
    if len(cells) < len(MUTATIONS):
        told += (
            f" {len(MUTATIONS) - len(cells)} more of the list have not been tried here."
        )
    kinds = Counter(row[1] for row in cells)
    found = Counter(row[1] for row in caught)
    counts = [f"| {found[kind]} of {kinds[kind]} | {kind} |" for kind in sorted(kinds)]
    missed = [f"- Missed: {row[0][2:]}" for row in cells if row not in caught]
    head = [
        HEAD[0],
        "",
        f"**{told}**",
        *HEAD[1:],
        "| caught | kind of fault |",
        "|---|---|",
    ]
    return "\n".join([*head, *counts, "", *missed]).rstrip() + "\n"


HEAD = (
    "# Faults that the tests find",
    "",
    "    python tools/mutations.py --report benchmarks/reports/mutations.md",
    "",
    "A fault is a line that was changed in a copy of the package. It is caught if one of the "
    "tests that `tools/mutations.py` names for it fails, while all of them pass without it. "
    "`runs/mutations.md`, which is not under version control, says which test caught which.",
    "",
)
COLUMNS = ("| fault | kind | file | caught by | seconds |", "|---|---|---|---|---:|")
CASES = ROOT / "runs" / "mutations.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0 if all faults were caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--report", type=Path, help="a Markdown file; with -k, other faults stay in it")
    add("-k", dest="words", default="", help="a pattern to be found in names or kinds")
    add("--jobs", type=int, default=1, help="faults at a time")
    add("--limit", type=float, default=LIMIT, help="seconds for the tests of a fault")
    add(
        "--unchecked",
        action="store_true",
        help="tests are known to pass without faults",
    )
    add("--list", action="store_true", help="name the faults, and do nothing")
    given = parser.parse_args(arguments)
    chosen = [m for m in MUTATIONS if re.search(given.words, f"{m.kind}: {m.name}")]
    if given.list:
        for mutation in chosen:
            print(
                f"{mutation.kind}: {mutation.name} ({find(mutation).relative_to(ROOT)})"
            )
        return 0
    known = given.report is not None and given.words and CASES.exists()
    before = CASES.read_text() if known else ""
    outcomes = []
    for outcome in campaign(chosen, given.jobs, given.limit, not given.unchecked):
        outcomes.append(outcome)
        if given.report is not None:  # as far as it has come
            table = cases(outcomes, before)
            CASES.parent.mkdir(exist_ok=True)
            CASES.write_text(table)
            given.report.write_text(report(table))
    missed = [outcome for outcome in outcomes if outcome.verdict != "caught"]
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} caught")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

"""The campaign of faults: cases in processes of their own, under hard deadlines, in a table.

    python tools/faults.py --report benchmarks/reports/faults.md [-k WORDS] [--jobs 2]

The report counts cases by kind, and lists those that fell short; --verbose prints what their
ranks said.

A case passes if all its ranks end in time, none by a signal that is not the fault's own, each
with the right result or an error that says what happened, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import misused
import torch
from faulty import INJECTED, TIMEOUT, WORKLOADS
from ranks import Nursery

LATE = 10.0  # seconds past its timeout at which nothing may be there any more
HARD = 60.0  # seconds after which a case is ended
HOWS = ("kill", "raise", "stop", "term", "leave", "slow")
PLACES = (0.1, 0.5, 0.95)  # of a workload's exchanges
# an early fault, and a late one, of what a fault's place matters little to
FEW = {"slow": (0.5,), "term": (0.1, 0.95), "leave": (0.5, 0.95)}


@dataclasses.dataclass
class Outcome:
    """What came of a case: of each rank its exit code, words and end; what is wrong."""

    name: str
    codes: list
    said: list
    seconds: float
    left: list
    wrong: list


def run_ranks(nursery, case, ranks, resume=(), hard=HARD):
    """Runs the ranks of a case; returns how they ended, and what is left behind."""
    memory = set(os.listdir("/dev/shm"))
    with (
        tempfile.TemporaryDirectory(prefix="faults-") as folder,
        tempfile.TemporaryDirectory(prefix="faults-out-") as outs,
    ):
        ended = nursery.run(case, ranks, folder, Path(outs), hard, resume=resume)
        left = [f"process in the group of rank {rank}" for rank in ended.alive]
        new = set(os.listdir("/dev/shm")) - memory
        left += [f"/dev/shm/{name}" for name in new if "torch" in name or "pyg" in name]
        left += sorted(os.listdir(folder))
    pairs = zip(ended.printed, ended.said, strict=True)
    return ended.codes, ["\n".join(pair) for pair in pairs], ended.times, left


# Faults of workloads ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault that strikes a rank of a workload, at a share of its exchanges."""

    workload: str
    how: str
    place: float
    rank: int = 1

    @property
    def name(self):
        return f"{self.workload}, rank {self.rank}: {self.how} at {self.place:.0%}"


def faults():
    """Returns all faults, in the order of the table."""
    found = []
    for number, workload in enumerate(WORKLOADS):
        for how in HOWS:
            for place in FEW.get(how, PLACES):
                found.append(Fault(workload, how, place, WORKLOADS[workload].rank))
        if WORKLOADS[workload].rank:  # rank 0 is no exception
            found.append(Fault(workload, HOWS[number % 3], 0.5, 0))
    return found


@dataclasses.dataclass(frozen=True)
class Misuse:
    """What ranks do that they must not; see `misused.py`."""

    case: str

    @property
    def name(self):
        return self.case.replace("_", " ")


def cases():
    """Returns all cases, in the order of the table."""
    return [*faults(), *map(Misuse, misused.CASES)]


class Campaign:
    """Runs cases beside what each workload does undisturbed."""

    def __init__(self):
        self.nursery, self.undisturbed = Nursery("faulty"), {}
        self.lock = threading.Lock()

    def plain(self, workload):
        """Returns the results of a workload's ranks, and how many exchanges each begins."""
        with self.lock:
            if workload not in self.undisturbed:
                ranks = WORKLOADS[workload].ranks
                case = {"workload": workload, "how": "none", "rank": -1, "at": 0}
                codes, texts, _, _ = run_ranks(self.nursery, case, ranks, hard=2 * HARD)
                assert codes == [0] * ranks, "\n".join(texts)
                results = list(map(result_of, texts))
                counts = [int(re.search(r"^COUNT (\d+)$", t, re.M)[1]) for t in texts]
                self.undisturbed[workload] = results, counts
            return self.undisturbed[workload]

    def run(self, case):
        """Runs a case, and says what came of it."""
        return self._misuse(case) if isinstance(case, Misuse) else self._fault(case)

    def _misuse(self, misuse):
        case = misused.CASES[misuse.case]
        begin = time.time()
        told = {"misuse": misuse.case}
        codes, texts, ends, left = run_ranks(self.nursery, told, case.ranks)
        seconds = max([e for e in ends if e] or [begin + HARD]) - begin
        wrong = [f"left behind: {name}" for name in left if name not in case.files]
        wrong += _late(codes, seconds, 3.5 * TIMEOUT + LATE)
        wanted = list(case.codes or [int(case.says is not None)] * case.ranks)
        if codes != wanted:
            wrong.append(f"exit codes {codes}, not {wanted}")
        for rank, text in enumerate(texts):
            said = last_line(text)
            if case.says and not re.search(case.says, said) and codes[rank] == 1:
                wrong.append(f"rank {rank} says something else: {said}")
            if "terminate called" in text:
                wrong.append(f"rank {rank} reached terminate")
            if "CLEANED" not in text:
                wrong.append(f"rank {rank} ended without atexit")
        results = {result_of(text) for text in texts}
        if case.says is None and len(results) > 1:
            wrong.append(f"results differ: {results}")
        return Outcome(misuse.name, codes, texts, seconds, left, wrong)

    def _fault(self, fault):
        results, counts = self.plain(fault.workload)
        workload, rank = WORKLOADS[fault.workload], fault.rank
        at = max(1, round(fault.place * counts[rank]))
        case = {"workload": fault.workload, "how": fault.how, "rank": rank, "at": at}
        resume = (rank,) if fault.how == "stop" else ()
        found = run_ranks(self.nursery, case, workload.ranks, resume)
        codes, texts, ends, left = found
        left = [name for name in left if name not in workload.files]
        struck = re.search(r"^STRUCK (.*)$", texts[rank], re.M)
        if struck is None:
            wrong = ["the fault did not strike"]
            return Outcome(fault.name, codes, texts, 0.0, left, wrong)
        begin = float(struck[1])
        last = [e for r, e in enumerate(ends) if e and r not in resume]
        seconds = max(last) - begin if last else HARD
        wrong = [f"left behind: {name}" for name in left]
        wrong += _late(codes, seconds, TIMEOUT + LATE if fault.how != "slow" else HARD)
        for r, ended in enumerate(zip(codes, texts, results, strict=True)):
            wrong += [f"rank {r}: {w}" for w in _wrong(fault, r, *ended)]
        return Outcome(fault.name, codes, texts, seconds, left, wrong)


def result_of(text):
    """The result that a rank has printed, None if there is none."""
    told = re.search(r"^RESULT (.*)$", text, re.M)
    return told and told[1]


def _late(codes, seconds, limit):
    if None in codes:
        return ["hangs"]
    return [f"ends after {seconds:.0f} s"] if seconds > limit else []


def _wrong(fault, rank, code, text, result):
    """Says what is wrong with how a rank ended."""
    mine = rank == fault.rank
    if code is None:
        return ["was still there"]
    if code < 0 and not (mine and fault.how == "kill"):
        return [f"ended by signal {-code}"]
    if "terminate called" in text:
        return ["reached terminate"]
    if code == 0:
        if mine and fault.how == "leave":
            return []
        if result_of(text) is None:
            return ["ended well, with no result"]
        return [] if result_of(text) == result else ["another result"]
    if fault.how == "slow":
        return ["failed, though rank 1 was only slow"]
    if mine:
        own = {"raise": 1, "term": 143}.get(fault.how)
        silent = fault.how == "raise" and INJECTED not in text
        said = ["no traceback"] * silent
        return [f"exit code {code}"] * (own not in (None, code)) + said
    return [] if _says(fault, text) else [f"says something else: {last_line(text)}"]


def _says(fault, text):
    """Says whether a survivor tells the truth about a fault."""
    lost = (
        f"lost another rank|waited {TIMEOUT:.0f} s|rank {fault.rank} |did not come"
        "|could not connect"
    )
    words = {
        "raise": rf"rank {fault.rank} failed with ValueError: {INJECTED}|{INJECTED}",
        "stop": f"waited {TIMEOUT:.0f} s|waited|did not come|could not connect",
        "term": f"SIGTERM|{lost}",
    }
    return re.search(words.get(fault.how, lost), text) is not None


def last_line(text):
    """Returns the line in which a rank says what it ends with."""
    text = text.partition("\nnanobind: ")[0]  # Triton tells of its own ends
    text = text.replace("CLEANED", "")  # as all ranks say
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in text.splitlines()]
    ends = [line for line in lines if re.match(r"[\w.]*(Error|Exit|Exception)\b", line)]
    return (ends or lines or [""])[-1][:300]


KINDS = {  # of a case's name: what is done to a rank, or what ranks do
    r"rank \d+: kill at ": "a rank is killed",
    r"rank \d+: raise at ": "a rank raises an exception",
    r"rank \d+: stop at ": "a rank is stopped (SIGSTOP)",
    r"rank \d+: term at ": "a rank gets SIGTERM",
    r"rank \d+: leave at ": "a rank ends its script early",
    r"rank \d+: slow at ": "a rank is slow, within the deadline",
    "": "misuse: ranks disagree, or ask for what cannot be",
}


def report(outcomes, machine):
    """Returns the short report: cases by kind, and those that fell short."""
    by_kind = {}
    for one in outcomes:
        kind = next(kind for words, kind in KINDS.items() if re.search(words, one.name))
        by_kind.setdefault(kind, []).append(one)
    well = sum(not one.wrong for one in outcomes)
    rows = [
        "# Killed, stopped and misused ranks",
        "",
        f"**{well} of {len(outcomes)} cases end well.**",
        "",
        "    python tools/faults.py --report benchmarks/reports/faults.md",
        "",
        f"{machine}. Each case starts its own ranks, with a timeout of {TIMEOUT:g} s. It ends "
        "well if every rank ends in time with the right result or an error that says what "
        "happened, no rank dies of a signal other than the one sent to it, and nothing is left "
        "behind. Faults strike a workload at 10, 50 and 95 % of its exchanges.",
        "",
        "| end well | cases | fault | median s | slowest s |",
        "|---:|---:|---|---:|---:|",
    ]
    for kind in [kind for kind in KINDS.values() if kind in by_kind]:
        some = by_kind[kind]
        took = [one.seconds for one in some]
        well = sum(not one.wrong for one in some)
        times = f"{median(took):.1f} | {max(took):.1f}"
        rows.append(f"| {well} | {len(some)} | {kind} | {times} |")
    bad = [one for one in outcomes if one.wrong]
    faults = [one.name for one in outcomes if re.search(r"rank \d+: ", one.name)]
    workloads = len({name.split(",")[0] for name in faults})
    told = f"{len(outcomes)} cases of {workloads} workloads"
    rows += ["", f"{told}. " + ("All end well." if not bad else "What fell short:"), ""]
    rows += [f"- {one.name}: {'; '.join(one.wrong)[:300]}" for one in bad]
    return "\n".join(rows).rstrip()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--report", help="a file for cases by kind, and what fell short")
    add("-k", default="", help="cases whose names hold this")
    add("--jobs", type=int, default=2)
    add("--verbose", action="store_true", help="print what ranks said")
    asked = parser.parse_args()
    campaign = Campaign()
    chosen = [case for case in cases() if re.search(asked.k, case.name)]

    def judged(case):
        try:
            one = campaign.run(case)
        except AssertionError as error:
            one = Outcome(case.name, [], [], 0.0, [], [str(error)[-2000:]])
        print(f"{one.seconds:5.1f} s  {one.name}: {'; '.join(one.wrong) or 'well'}")
        if asked.verbose and one.wrong:
            print(*(f"--- rank {r}\n{t}" for r, t in enumerate(one.said)), sep="\n")
        sys.stdout.flush()
        return one

    with ThreadPoolExecutor(asked.jobs) as pool:
        outcomes = list(pool.map(judged, chosen))
    campaign.nursery.close()
    bad = [one for one in outcomes if one.wrong]
    if asked.report:
        machine = f"torch {torch.__version__}, {os.cpu_count()} cores"
        Path(asked.report).write_text(report(outcomes, machine) + "\n")
    print(f"{len(outcomes)} cases, {len(bad)} end badly")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

"""Runs a function on several ranks of this machine, and saves a run before a signal ends it.

[Note: ranks end with their launcher] Whatever ends the launcher, its ranks must not go on.
Each rank watches the launcher's process. When that ends, the rank gets SIGTERM, as from
torchrun, and is killed if that does not end it. The fork server that starts ranks on Linux,
which Python keeps for the next launch, ends with the launcher and the last rank.

[Note: start method] A process that a fork server started starts its own by a fork server, too:
each worker of a DataLoader would then import torch and the script anew in every epoch, for
seconds, and get the dataset by pickle. So ranks take back the start method of the launcher,
and `num_workers` does what it does in a script of torchrun's.

[Note: no fork with CUDA] Importing PyG asks torch for its configuration, and with it CUDA's
driver, which no process can use that was forked afterwards. Where there is a GPU, each rank
starts as a new process, and imports by itself what the fork server else imports once.

[Note: preemption] Signals come to ranks at different moments, or to one of them alone, and a
checkpoint needs all ranks at the same step. So a signal is only recorded, and ranks compare
records once per step, where the script chooses: if any rank got one, all save and end.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from pyg_distcomm.comm import collectives
from pyg_distcomm.comm.axis import drain_at_exit
from pyg_distcomm.comm.mesh import Mesh, latest_mesh
from pyg_distcomm.comm.store import RankError

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_REPEAT_AFTER = 1.0  # seconds within which the same signal counts as the same request
_GRACE = 5.0  # seconds the other ranks have to report their own errors
# seconds ranks have to save, and to end, after SIGTERM; as torchrun's have
_SAVE_TIMEOUT = 30.0


def launch(
    fn: Callable[..., Any],
    nprocs: int,
    *args: Any,
    timeout: float | None = None,
    threads: int | None = None,
) -> list[Any]:
    """Runs `fn(*args)` on `nprocs` new processes and returns what each returned.

    Inside `fn`, `pdc.init()` joins the run, as it would under torchrun.

    Args:
        fn: a function that can be imported by name (from a module or a script).
        nprocs: how many ranks.
        args: arguments, picklable.
        timeout: seconds after which the run is stopped with a RankError. Ranks also end
            with this process, whatever ends it.
        threads: torch threads per rank; the machine's cores are shared out if None.

    Raises:
        ValueError: if a number is out of range.
        TypeError: if an argument has another type, or `fn` cannot be sent to another
            process (a notebook's own function, a lambda); the message says what to do.
        Exception: the first rank's error, of its own kind, with rank and traceback.
    """
    _check(fn, nprocs, timeout, threads)
    _check_importable(fn, args)
    context = context_of_ranks("pyg_distcomm.api")
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
    )
    share = threads or max(1, (os.cpu_count() or 1) // nprocs)
    method = multiprocessing.get_start_method(allow_none=True)
    ranks: list[Any] = []
    pipes: list[Connection] = []
    try:
        for rank in range(nprocs):
            mine, theirs = context.Pipe(duplex=False)
            job = (fn, args, rank, nprocs, store.port, share, method, theirs)
            # no daemon: a rank may start processes of its own, to load data
            process = context.Process(target=_rank_main, args=job)
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(mine)
        results = _collect_results(pipes, ranks, timeout)
    except (KeyboardInterrupt, SystemExit):
        _terminate(ranks, _SAVE_TIMEOUT)
        raise
    finally:
        _terminate(ranks, _GRACE)
    return results


def context_of_ranks(preloaded: str) -> Any:
    """Returns what starts processes; see [Note: no fork with CUDA].

    Args:
        preloaded: a module that a fork server imports once, not once per rank.
    """
    if sys.platform != "linux" or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([preloaded])
    return context


def _check(fn: Any, nprocs: Any, timeout: Any, threads: Any) -> None:
    if not callable(fn):
        raise TypeError(f"launch takes a function, got {fn!r}; call launch(fn, nprocs)")
    counts = {"nprocs": nprocs, **({} if threads is None else {"threads": threads})}
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if timeout is not None and not number:
        raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
    if number and not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, got {timeout}")


def _check_importable(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    main = sys.modules["__main__"]
    in_notebook = getattr(fn, "__module__", "") == "__main__" and not hasattr(
        main, "__file__"
    )
    try:
        pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        reason = str(error)
    else:
        reason = "it is defined in the notebook" if in_notebook else ""
    if reason:
        raise TypeError(
            f"launch cannot send {getattr(fn, '__qualname__', fn)!r} and its arguments "
            f"to new processes ({reason}). Put the function at the top level of a .py "
            "file (in a notebook: begin its cell with %%writefile train.py) and import it."
        )


def _rank_main(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    size: int,
    port: int,
    threads: int,
    method: str | None,
    pipe: Connection,
) -> None:
    # the launcher's, or the system's if it chose none: see [Note: start method]
    multiprocessing.set_start_method(method, force=True)  # type: ignore[arg-type]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the parent holds the store
    )
    torch.set_num_threads(threads)
    threading.Thread(target=_exit_with_launcher, daemon=True).start()
    try:
        _send(pipe, (True, fn(*args)))
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        trace_text = "".join(traceback.format_exception(error))
        told = type(error).__name__, _picklable_or_none(error), trace_text
        _send(pipe, (False, told))
    finally:
        pipe.close()
        drain_at_exit()  # the process ends without atexit
        if dist.is_initialized():
            dist.destroy_process_group()


def _send(pipe: Connection, value: Any) -> None:
    """Sends bytes: a tensor in shared memory would be lost if this rank ended first."""
    pipe.send_bytes(pickle.dumps(value))


def _exit_with_launcher() -> None:
    """Exits this rank when its launcher exits; see [Note: ranks end with their launcher]."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    wait([launcher.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SAVE_TIMEOUT)
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def _picklable_or_none(error: BaseException) -> BaseException | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _collect_results(
    pipes: list[Connection], ranks: list[Any], timeout: float | None
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, Any] = {}
    stop = None if timeout is None else time.monotonic() + timeout
    open_pipes = dict(enumerate(pipes))
    while open_pipes:
        left = None if stop is None else max(0.0, stop - time.monotonic())
        # a pipe alone would tell late of a rank's end: its workers hold the other end, too
        ends = {rank: (pipe, ranks[rank].sentinel) for rank, pipe in open_pipes.items()}
        ready = wait([end for pair in ends.values() for end in pair], left)
        for rank in [r for r, pair in ends.items() if any(e in ready for e in pair)]:
            done, value = _receive_result(open_pipes.pop(rank), ranks[rank])
            (results if done else failures)[rank] = value
        if failures and (stop is None or stop > time.monotonic() + _GRACE):
            stop = time.monotonic() + _GRACE
        if not ready and open_pipes:
            if not failures:
                raise RankError(f"ranks {sorted(open_pipes)} ran past {timeout} s")
            break
    if failures:
        raise _first_cause(failures)
    return [results[rank] for rank in range(len(pipes))]


def _receive_result(pipe: Connection, process: Any) -> tuple[bool, Any]:
    try:
        sent = pipe.recv_bytes() if pipe.poll() else b""
    except (EOFError, OSError):
        sent = b""
    if not sent:
        process.join(_GRACE)
        how = _describe_exit(process.exitcode)
        text = f"the process ended without an error message ({how})"
        return False, ("RankError", RankError(text), text)
    done, value = pickle.loads(sent)
    return done, value


def _describe_exit(code: int | None) -> str:
    if code is None or code >= 0:
        return f"exit code {code}"
    killed = "; by hand, or for want of memory" if code == -9 else ""
    return f"signal {-code}{killed}"


def _first_cause(failures: dict[int, Any]) -> BaseException:
    # errors that follow from another failure name another rank, or come from a collective of
    # the script's own that lost a rank; failures are in order of arrival
    heard = ("failed with", "lost another rank", "waited")
    messages = {r: str(error) for r, (_, error, _) in failures.items()}
    own = [
        r
        for r, text in messages.items()
        if not (text.startswith("rank ") and any(word in text for word in heard))
    ]
    first = [r for r in own if not _LOST.search(messages[r])]
    rank = (first or own or sorted(failures))[0]
    kind, error, trace_text = failures[rank]
    text = f"rank {rank} failed with {kind}\n--- traceback of rank {rank} ---\n{trace_text}"
    if error is None:
        return RankError(text)
    error.__cause__ = RankError(text)
    return error


_LOST = re.compile(r"gloo|Connection (closed|reset) by peer|NCCL|waiting for a store")


def _terminate(ranks: list[Any], patience: float) -> None:
    """Ends ranks: those still running after a moment by SIGTERM, then by SIGKILL."""
    _join(ranks, 0.5)
    for process in ranks:
        if process.is_alive():
            process.terminate()
    _join(ranks, patience)
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()


def _join(ranks: list[Any], patience: float) -> None:
    stop = time.monotonic() + patience
    for process in ranks:
        process.join(max(0.0, stop - time.monotonic()))


class on_preempt:
    """Saves a run before SIGTERM or SIGINT (Ctrl-C) ends it.

    Call what this returns once per step, on all ranks:

        preempted = pdc.on_preempt(lambda: pdc.save_checkpoint("last", mesh, model, opt))
        for epoch in range(200):
            train(...)
            preempted()

    From here on these signals do not end a process: at the next `preempted()` after any rank
    has got one, all ranks call `save`, and raise SystemExit with 128 and the signal's number
    (143 for SIGTERM), so that `finally`, `with` (a trace) and `atexit` run. That one rank
    alone got it makes no difference. The same signal a second time, over a second later,
    ends a rank at once, without a checkpoint. A step and the save have to fit in the time
    that a scheduler leaves (torchrun 30 s); a rank that is stopped is waited for until the
    deadline (`timeout` of `pdc.init`).

    Args:
        save: writes the checkpoint; called on all ranks. What it raises is raised.
        mesh: the ranks; those of the last `pdc.init` if None.

    Raises:
        ValueError: outside of the main thread, where Python takes no signals.

    Price: an all-reduce of one word per call.
    """

    def __init__(self, save: Callable[[], Any], mesh: Mesh | None = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "pdc.on_preempt was called in another thread than the main one, and Python "
                "takes signals in the main thread alone: call it there"
            )
        self._save, self._mesh = save, mesh
        self._signal, self._signal_time, self._process = 0, 0.0, os.getpid()
        self._previous_handlers = {n: signal.getsignal(n) for n in SIGNALS}
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def __call__(self) -> None:
        """Returns, or saves and exits if any rank got a signal; the same on all ranks."""
        mesh = latest_mesh() if self._mesh is None else self._mesh
        got = self._signal
        if mesh is not None:
            mark = torch.tensor([got])
            got = int(collectives.all_reduce(mark, mesh.everyone, "max").item())
        if got:
            self._save()
            self.close()
            raise SystemExit(128 + got)

    def close(self) -> None:
        """Restores the previous signal handlers."""
        for number, handler in self._previous_handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        late = time.monotonic() > self._signal_time + _REPEAT_AFTER
        again = number == self._signal and late
        if again or os.getpid() != self._process:  # a fork: not one of the ranks
            self.close()
            signal.raise_signal(number)
        elif not self._signal:
            self._signal, self._signal_time = number, time.monotonic()
            name = signal.Signals(number).name
            print(
                f"{name}: saving at the end of this step; {name} again ends at once",
                file=sys.stderr,
            )

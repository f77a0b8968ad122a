"""The doctor's findings, on this machine and on worse ones."""

from __future__ import annotations

import socket

import pytest
import torch

from pyg_distcomm.cli import doctor, main
from pyg_distcomm.cli.doctor import Finding


def test_this_machine_can_run(capsys):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("\nready\n")
    assert "wrong" not in shown
    for what in ("python", "torch_geometric", "gloo", "nccl", "CPU cores"):
        assert f" {what} " in shown
    assert " agree\n" in shown


def test_a_needed_thing_that_is_missing_is_told_and_exits_with_1(monkeypatch, capsys):
    findings = [
        Finding("a", "fine"),
        Finding("b", "missing", "get it"),
        Finding("c", "missing", "get it", wrong=True),
    ]
    monkeypatch.setattr(doctor, "examine", lambda: iter(findings))
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown if line] == [
        "ok",
        "note",
        "->",
        "wrong",
        "->",
        "not",
    ]
    assert shown[-1] == "not ready: c"


@pytest.mark.parametrize("name", ["torch", "torch_geometric", "numba"])
def test_missing_and_old_packages(monkeypatch, name):
    assert not doctor.required(name, doctor.REQUIRED[name]).wrong
    too_new = doctor.required(name, (999, 1))
    assert too_new.wrong
    assert too_new.advice == f"pip install '{name}>=999.1'"
    assert "older than 999.1" in too_new.found
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    assert doctor.required(name, (2, 6)).found == "missing"


@pytest.mark.parametrize("name", doctor.TESTED)
def test_releases_on_which_no_tests_ran_are_noted(monkeypatch, name):
    tested = doctor.TESTED[name]
    for version in (*tested, f"{tested[-1]}.post1", f"{tested[0]}+cu130"):
        monkeypatch.setattr(doctor, "_version", lambda _, v=version: v)
        assert str(doctor.required(name, doctor.REQUIRED[name])).startswith("ok")
    for version in ("99.1.0", "99.1.0a0+git"):
        monkeypatch.setattr(doctor, "_version", lambda _, v=version: v)
        found = doctor.required(name, doctor.REQUIRED[name])
        assert str(found).startswith("note")
        assert f"{version}, with which this package was not" in found.found
        assert all(one in found.advice for one in tested)
    monkeypatch.setattr(doctor, "_version", lambda _: "2.6.0")
    found = doctor.required(name, doctor.REQUIRED[name])
    assert found.wrong
    assert "older than" in found.found


def test_back_ends(monkeypatch):
    assert doctor.back_end("gloo", False).wrong
    assert not doctor.back_end("gloo", True).wrong
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.back_end("nccl", False).advice
    assert not doctor.back_end("nccl", False).wrong


def test_more_threads_than_cores(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert "OMP_NUM_THREADS" in doctor.cores().advice


def test_ranks_that_cannot_meet_and_a_kernel_that_is_wrong(monkeypatch):
    def lost(*_, **__):
        raise RuntimeError("no route to host\nmore")

    monkeypatch.setattr(doctor, "launch", lost)
    monkeypatch.setattr(socket, "getaddrinfo", lost)
    monkeypatch.setattr(doctor.kernels, "spmm", lambda *_: torch.zeros(3, 2))
    found = {one.what: one for one in doctor.examine()}
    assert found["2 ranks, gloo"].found == "fail: no route to host"
    assert "wrong here" in found["kernels"].found
    assert "GLOO_SOCKET_IFNAME" in found["host name"].advice
    assert [name for name, one in found.items() if one.wrong] == [
        "kernels",
        "2 ranks, gloo",
    ]
    monkeypatch.setattr(doctor, "launch", lambda *_, **__: [3.0, 4.0])
    assert [*doctor.examine()][-1].wrong

"""Run a test's work in several real processes that can talk over gloo."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LIMIT = 120.0  # seconds; a deadlock would last for ever


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def together(work: Callable[[int], Any], folder: Path, size: int = 2) -> list[Any]:
    """Run ``work(rank)`` in processes of its own and return what each gave; fails on an error and on a deadlock.

    Rank 0 serves the store through which groups find each other: whoever is done first waits for the others, or they
    would meet a closed connection. Each process holds one end of a pipe for writing until it is done or has died.
    """
    port, ids = free_port(), []
    others, working = os.pipe()
    for rank in range(size):
        process = os.fork()
        if process:
            ids.append(process)
            continue
        code = 1
        try:
            os.environ.update(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                GROUP_RANK="0",
                WORLD_SIZE=str(size),
                LOCAL_WORLD_SIZE=str(size),
                TORCHELASTIC_RUN_ID="test",
            )
            torch.save(work(rank), folder / f"rank{rank}.pt")
            os.close(working)
            os.read(others, 1)  # nobody writes: this returns when the last one has closed its end
            code = 0
        except BaseException:
            (folder / f"rank{rank}.txt").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    os.close(working)
    os.close(others)
    deadline, codes = time.monotonic() + LIMIT, dict.fromkeys(ids)
    while None in codes.values() and time.monotonic() < deadline:
        for process in [p for p, code in codes.items() if code is None]:
            done, status = os.waitpid(process, os.WNOHANG)
            codes[process] = status if done else None
        time.sleep(0.01)
    for process in [p for p, code in codes.items() if code is None]:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    errors = "\n".join(file.read_text() for file in sorted(folder.glob("rank*.txt")))
    assert None not in codes.values(), f"deadlock\n{errors}"
    assert not any(codes.values()), errors or f"died: {codes}"
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(size)]

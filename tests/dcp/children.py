"""Runs a function in a child process made for it, by fork or by spawn."""

from __future__ import annotations

import faulthandler
import multiprocessing
import pickle
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["ChildDiedError", "in_a_child"]


class ChildDiedError(AssertionError):
    """The child ended without an answer, or did not end in time."""


def in_a_child(
    method: str, function: Callable[..., Any], *arguments: Any, deadline: float = 200.0
) -> Any:
    """What ``function(*arguments)`` returns in a process started by ``fork`` or ``spawn``.

    Raises:
        AssertionError: If it raises there.
        ChildDiedError: If the child dies, or is busy after ``deadline`` seconds; it is killed then.
    """
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, function, arguments))
    with warnings.catch_warnings():
        # newer Pythons warn of fork in a process with threads, which is what is tried here
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    try:
        if not ours.poll(deadline):
            raise ChildDiedError(f"the child is busy after {deadline} s")
        try:
            ok, answer = pickle.loads(ours.recv_bytes())
        except EOFError:
            process.join(10)
            raise ChildDiedError(f"the child died, exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if not ok:
        raise AssertionError(answer)
    return answer


def _run(pipe: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    faulthandler.disable()  # a child that crashes is the parent's to report
    torch.set_num_threads(1)  # torch's own thread pool (OpenMP) does not survive a fork
    try:
        answer = pickle.dumps((True, function(*arguments)))
    except BaseException:  # noqa: BLE001 - told to the parent
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)

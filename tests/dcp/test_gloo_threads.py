"""An interpreter that ends right after a collective does not abort."""

import subprocess
import sys

import pytest

_ENDS = """
import pathlib, sys, time, weakref
import torch, torch.distributed as dist
import cloudckpt.dcp.meeting

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
tasks = pathlib.Path("/proc/self/task")
while sum("pt_gloo" in one.read_text() for one in tasks.glob("*/comm")) < 2:
    time.sleep(0.01)  # they have begun
sys.setswitchinterval(10)  # the thread of gloo gets the GIL only when this one waits

def work(_):
    sys.setswitchinterval(0.001)
    until = time.monotonic() + 1.5  # as if it got the CPU late
    while time.monotonic() < until:
        pass

tensor = torch.ones(1)
kept = weakref.ref(tensor, work)
task = dist.all_reduce(tensor, async_op=True)
del tensor, task
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are asked for by /proc")
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python ends no thread there")
def test_a_thread_of_gloo_that_still_needs_the_interpreter_is_waited_for():
    ended = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, timeout=250)
    assert ended.returncode == 0, ended.stderr

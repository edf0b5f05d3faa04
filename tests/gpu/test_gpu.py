"""The script for a GPU, with the device replaced by a CPU."""

import contextlib
import io

import cloudckpt
import gpu
from support.forks import child

CPU = ["--device", "cpu", "--mib", "1"]


def _run(arguments: list[str]) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = gpu.main(arguments)
    return code, printed.getvalue()


def test_the_script_finds_all_values_equal_to_the_bit(tmp_path):
    with child(_run, patience=250.0, arguments=[*CPU, "--folder", str(tmp_path)]) as running:
        _, (code, printed) = running.wait()
    assert code == 0, printed
    rows = "each dtype and layout", "AdamW", "DTensors", "stall of async_save", "beside a save"
    for row in rows:
        assert row in printed
    assert "DIFFER" not in printed


def test_the_script_fails_where_a_value_differs(tmp_path, monkeypatch, capsys):
    """A load that leaves the tensors as they were."""
    monkeypatch.setattr(cloudckpt, "load", lambda *_, **__: None)
    monkeypatch.setattr(gpu, "alone", lambda device: contextlib.nullcontext())
    for needs_processes in ("distributed", "stalls", "steps"):
        monkeypatch.setattr(gpu, needs_processes, lambda *_: None)
    assert gpu.main([*CPU, "--folder", str(tmp_path)]) == 1
    assert "DIFFER" in capsys.readouterr().out

from __future__ import annotations


def test_verify_tells_whole_ones_and_damaged_ones_apart(cli, capsys, run):
    assert cli("verify", str(run / "step-5")) == 0
    assert "all of it is as it was written (2 items" in capsys.readouterr().out
    [data] = (run / "step-5").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[2000] ^= 1
    data.write_bytes(content)
    assert cli("verify", str(run / "step-5"), "--quiet") == 4
    assert "do not match their checksum" in capsys.readouterr().err
    assert cli("verify", str(run / "step-2")) == 3

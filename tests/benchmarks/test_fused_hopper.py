import json
import sys

from benchmarks import fused_hopper


def test_every_form_of_every_function_runs_and_has_a_row(tmp_path, monkeypatch):
    out = tmp_path / "fused.json"
    sizes = ["--tokens", "5", "--hidden", "256", "--intermediate", "256"]
    monkeypatch.setattr(sys, "argv", ["fused_hopper", "--out", str(out), "--device", "cpu", *sizes])
    fused_hopper.main()
    rows = json.loads(out.read_text())
    assert {row["function"] for row in rows} == set(fused_hopper.PREDICTED)
    forms = {"fused", "torch"}, {"fused", "two kernels", "torch"}
    for name in fused_hopper.PREDICTED:
        of_function = [row for row in rows if row["function"] == name]
        assert {row["form"] for row in of_function} == forms[" " in name]
    assert all(row["kind"] == "fused" and row["timed"] == "wall" and row["microseconds"] > 0 for row in rows)

"""The benchmark that says how good the tuner is: its metric on cases done by hand, and what it makes of bad traces."""

import json
import subprocess
import sys
from pathlib import Path

import cadence
import cadence_score as scoring
import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def trace(folder: Path, *values: object, head: str = cadence.COLUMN, name: str = "some.csv") -> Path:
    path = folder / name
    path.write_text("\n".join([head, *map(str, values)]) + "\n")
    return path


def test_what_is_kept_is_what_was_saved_and_restorable_at_each_failure() -> None:
    setting = scoring.Setting(mtbf=1000.0, stall=10.0, restart=5.0, durable=30.0)
    # Boundaries at 105, 215, 325; restorable 30 s later.
    for gap, saves in ((134.9, 0), (135.0, 1), (244.9, 1), (245.0, 2), (355.0, 3)):
        kept = scoring.goodput_fixed(np.array([gap]), setting, np.array([100.0]))[0] * gap
        assert kept == pytest.approx(100.0 * saves)
    assert scoring.one_fixed(np.array([135.0, 10.0, 245.0]), setting, 100.0) == pytest.approx(300.0 / 390.0)


def test_the_tuner_is_scored_as_the_same_intervals_would_be_by_hand() -> None:
    """Asked after every single save instead of when it wants to be asked, it keeps the same."""
    gaps = scoring.weibull(np.random.default_rng(3), 30, 36_000.0, 0.7)
    setting = scoring.Setting.of(36_000.0, 1e-2)
    subject = scoring.Tuner(
        scoring.FailureRate(scoring.Prior(failures_per_second=10.0 / setting.mtbf)),
        limits=scoring.Limits(durable_overhead_max=None),
        memory=False,
    )
    subject.saved("durable", stall_seconds=setting.stall, durable_seconds=setting.durable)
    kept = began = 0.0
    for gap in gaps:
        now = setting.restart
        while True:
            subject.decide(began + now)
            decision = subject.current("durable")
            assert decision is not None
            now += decision.interval_seconds
            if now + setting.durable > gap:
                break
            now += setting.stall
            kept += decision.interval_seconds
        began += gap
        subject.failed(began, cause="signal", domain="process")
    assert scoring.goodput_tuner(gaps, setting, 10.0) == pytest.approx(kept / gaps.sum())


def test_made_up_series_have_the_rates_that_they_say() -> None:
    rng = np.random.default_rng(0)
    assert scoring.exponential(rng, 20_000, 7.0).mean() == pytest.approx(7.0, rel=0.03)
    assert scoring.weibull(rng, 20_000, 7.0, 0.7).mean() == pytest.approx(7.0, rel=0.05)
    stepped = scoring.step(rng, 20_000, 7.0, 8.0)
    assert stepped[:10_000].mean() / stepped[10_000:].mean() == pytest.approx(8.0, rel=0.05)
    assert scoring.modulated(rng, 50_000, 7.0).mean() == pytest.approx(7.0 * (1.7 + 2 * 0.17) / 3, rel=0.1)


def test_a_folder_of_traces_is_scored_one_object_for_each_trace_and_stall(tmp_path: Path) -> None:
    gaps = np.random.default_rng(0).exponential(3600.0, 40)
    trace(tmp_path, *gaps, name="b.csv")
    trace(tmp_path, *gaps[:30], "", name="a.csv")
    for command in (["-m", "tests.benchmarks.cadence"], ["tests/benchmarks/cadence.py"]):
        done = subprocess.run(
            [sys.executable, *command, "--traces", str(tmp_path), "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        rows = json.loads(done.stdout)
        assert [(row["trace"], row["n"], row["stall_over_mtbf"]) for row in rows] == [
            (name, n, stall) for name, n in (("a", 30), ("b", 40)) for stall in cadence.STALLS
        ]
        for row in rows:
            for scored in (row, *row["rivals"].values()):
                assert 0.0 <= scored["ratio_to_hindsight"] < 1.1
                assert scored["excess_waste"] > -0.5
            assert row["rivals"]["young_clairvoyant"]["excess_waste"] == 0.0


@pytest.mark.parametrize("value", ["-3.5", "0", "nan", "inf", "twelve", "1,2"])
def test_a_bad_value_is_named_with_file_and_line(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trace(tmp_path, 100, value, 200)
    monkeypatch.setattr(sys, "argv", ["cadence.py", "--traces", str(tmp_path)])
    assert cadence.main() == 2
    assert f"{path}, line 3: '{value}'" in capsys.readouterr().err


def test_a_file_without_its_head_or_without_failures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(cadence.BadTrace, match=r"some.csv, line 1: 'seconds'"):
        cadence.read_trace(trace(tmp_path, 100, head="seconds"))
    with pytest.raises(cadence.BadTrace, match=r"some.csv, line 1: no failures"):
        cadence.read_trace(trace(tmp_path))
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(cadence.BadTrace, match=r"empty.csv, line 1: ''"):
        cadence.read_trace(tmp_path / "empty.csv")


def test_a_folder_that_is_not_there_or_has_no_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(cadence.BadTrace, match="no such folder"):
        cadence.trace_rows(tmp_path / "none")
    with pytest.raises(cadence.BadTrace, match=r"no \*\.csv"):
        cadence.trace_rows(tmp_path)


def test_a_short_trace_has_no_goal_and_a_long_one_has(tmp_path: Path) -> None:
    gaps = np.random.default_rng(0).exponential(3600.0, 250)
    trace(tmp_path, *gaps, name="long.csv")
    trace(tmp_path, *gaps[:249], name="short.csv")
    rows = cadence.trace_rows(tmp_path)
    assert [row["goal"] for row in rows] == [0.999, 0.999, 0.996, None, None, None]
    assert all(row["met"] is None for row in rows[3:])
    assert all(row["met"] == (row["ratio_to_hindsight"] >= row["goal"]) for row in rows[:3])

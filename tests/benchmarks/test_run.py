"""The runner of all measurements: order, shares of GPUs, what fails, what is stopped and gone on with, rows."""

import json
import time

import pytest

from benchmarks._rows import RESULTS, SUFFIX, add_rows, load, read_rows, write_rows
from benchmarks.run import Job, Runner, all_jobs, collect

WRITE = "from{space}pathlib{space}import{space}Path;Path(r'{out}/ran').write_text('1')"


def runner(jobs, folder, gpus=("0", "1"), **more):
    return Runner(jobs, folder, gpus, {"space": " "}, **more)


def test_jobs_follow_what_they_need_and_a_failure_stops_only_those_after_it(tmp_path, capsys) -> None:
    jobs = [Job("late", "-c " + WRITE, after=("early",)), Job("early", "-c " + WRITE), Job("bad", "-c 1/0"),
            Job("never", "-c " + WRITE, after=("bad",))]
    runner(jobs, tmp_path).run()
    state = json.loads((tmp_path / "jobs.json").read_text())
    assert {name: s["code"] for name, s in state.items()} == {"late": 0, "early": 0, "bad": 1}
    assert list(state).index("early") < list(state).index("late")
    assert (tmp_path / "late" / "ran").is_file() and not (tmp_path / "never").exists()
    assert "ZeroDivisionError" in (tmp_path / "bad.log").read_text()
    assert "bad: failed (1)" in capsys.readouterr().out
    (tmp_path / "late" / "ran").unlink()
    runner(jobs, tmp_path).run()  # all have ended: nothing runs again
    assert not (tmp_path / "late" / "ran").exists()


def test_a_gpu_is_shared_only_by_jobs_that_leave_room(tmp_path) -> None:
    jobs = [Job("whole", "-c pass"), Job("half", "-c pass", 0.5), Job("third", "-c pass", 1 / 3)]
    one = runner(jobs, tmp_path, ("0",))
    one.running["half"] = None, "0", 0.0
    assert one.free("0") == pytest.approx(0.5)
    one.running["third"] = None, "0", 0.0
    assert one.free("0") == pytest.approx(1 / 6)
    one.running = {"whole": (None, "0", 0.0)}
    assert one.free("0") == 0


def test_what_runs_when_time_is_up_is_stopped_and_runs_the_next_time(tmp_path) -> None:
    slow = Job("slow", "-c import{space}time;time.sleep(60)")
    began = time.monotonic()
    first = runner([slow], tmp_path, until=began + 1)
    first.run()
    assert time.monotonic() - began < 30 and not first.running and "slow" not in first.state
    second = runner([Job("slow", "-c pass")], tmp_path)
    second.run()
    assert second.state["slow"]["code"] == 0


def test_rows_take_the_place_of_those_they_repeat(tmp_path) -> None:
    def found(method, value, machine="a GPU"):
        return {"case": "c", "method": method, "metric": "us", "value": value, "machine": machine, "command": "x",
                "commit": "y"}

    results = tmp_path / "results"
    add_rows("decode", [found("a", 1.0), found("b", 2.0), found("a", 9.0, "a CPU"), {**found("a", 5.0), "case": "d"}],
             results)
    write_rows("decode", [found("a", 3.0), found("new", 4.0)], tmp_path / "jobs" / "decode-1")
    (tmp_path / "jobs" / "decode-1" / "config.json").write_text('{"no": "rows"}')
    collect(tmp_path / "jobs", results)
    rows = load("decode", results)
    assert [(r["case"], r["method"], r["value"]) for r in rows] == [
        ("c", "a", 3.0), ("c", "b", 2.0), ("c", "a", 9.0), ("c", "new", 4.0), ("d", "a", 5.0)]
    assert sorted(f.name for f in results.glob("[!.]*")) == ["decode.jsonl.gz"]


def test_every_job_names_a_file_that_is_there_and_jobs_that_are() -> None:
    jobs = all_jobs()
    names = {j.name for j in jobs}
    assert len(names) == len(jobs)
    for job in jobs:
        assert set(job.after) <= names and 0 < job.share <= 1
        script = job.command.split()[0]
        assert script == "-m" or (RESULTS.parents[1] / script).is_file()
        if script != "-m":
            given = [word for word in job.command.split() if word.startswith("--")]
            assert all(f'"{word}"' in (RESULTS.parents[1] / script).read_text(encoding="utf-8") for word in given), job


def test_rows_are_read_as_they_were_written(tmp_path) -> None:
    for file in sorted(RESULTS.glob(f"*{SUFFIX}")):
        rows = read_rows(file)
        assert rows and all({"case", "method", "metric", "value", "machine", "command", "commit"} <= set(r)
                            for r in rows), file
        assert write_rows(file.name.removesuffix(SUFFIX), rows, tmp_path).read_bytes() == file.read_bytes()
    assert load("none", tmp_path) == []
    (tmp_path / "plain.json").write_text(json.dumps([{"case": "c"}]))
    assert read_rows(tmp_path / "plain.json") == [{"case": "c"}]


def test_rows_take_little_room() -> None:
    assert sum(f.stat().st_size for f in RESULTS.iterdir()) < 3e6

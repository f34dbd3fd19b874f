"""The comparison of losses: its jobs are wanma's, and each way stands beside whole gradients of its seed."""

from benchmarks.convergence import run as convergence

from wanma.job.file.loading import load_job


def test_every_way_has_a_job_that_differs_in_it_alone(tmp_path):
    path = tmp_path / "job.toml"
    setting = convergence.Setting(2000, 4, 64)
    for method in convergence.METHODS:
        path.write_text(setting.job(method, 3))
        job = load_job(path)
        assert (job.train.seed, job.train.steps, job.parallel.dp_replicate) == (3, 2000, 2)
        named = {job.parallel.compression, job.parallel.synchronize} - {"none", "every_step"}
        kind = {"streaming": "diloco", "stale": "delayed"}.get(method, method.removesuffix("_at_once"))
        assert named == ({kind} if method != convergence.WHOLE else set())


def test_the_report_sets_each_seed_beside_whole_gradients_of_the_same_job():
    setting = convergence.Setting(2000, 4, 64)

    def run(method, seed, loss, setting=setting):
        facts = {"first": 5.6, "step": 2000, "date": "2026-01-01", "commit": "abc", "machine": "a machine"}
        return {"method": method, "seed": seed, "validation": loss, **facts, "job": setting.job(method, seed)}

    other = convergence.Setting(100, 4, 64)
    runs = [run("none", 1, 2.0), run("none", 2, 4.0), run("int8", 1, 2.02), run("int8", 2, 4.0)]
    text = convergence.report([*runs, run("topk", 1, 9.0, other)])
    assert "| `int8`: rounded to int8, error feedback | 2.0200, 4.0000 | 3.0100 | +0.33% | +1.00% |" in text
    assert "has fallen from 5.60 to 3.00" in text
    assert "topk" not in text, "nothing of its own job to set it beside"
    assert convergence.report([]) == "Nothing has been measured yet.\n"

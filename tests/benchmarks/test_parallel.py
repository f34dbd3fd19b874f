"""The comparison by axes: its jobs are wanma's, its cuts torchtitan's, its bubbles those of the theory."""

import importlib
import sys
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
from benchmarks.parallel.bubble_runs import bubble_fraction

from wanma.job.file.loading import load_job


def module(name):
    return importlib.import_module(f"benchmarks.parallel.{name}")


# Worked out by hand from torchtitan's generate_llm_fqn_per_model_part, both ends weighing one block.
@pytest.mark.parametrize(
    ("layers", "stages", "cuts"),
    [
        (6, 2, (3,)),  # embedding and 3 blocks; 3 blocks, norm and head
        (6, 4, (1, 3, 5)),
        (6, 8, (0, 1, 2, 3, 4, 5, 6)),  # the ends are stages of their own
        (4, 4, (1, 3, 4)),  # six units: two, two, one, one
        (32, 4, (8, 17, 25)),  # 34 units: nine, nine, eight, eight
    ],
)
def test_cuts_by_count_are_torchtitans(layers, stages, cuts):
    assert module("axes").even_cuts(layers, stages) == cuts


def test_more_stages_than_blocks_and_ends_are_refused():
    with pytest.raises(ValueError, match="4 blocks cannot be cut into 8 stages"):
        module("axes").even_cuts(4, 8)


def test_every_axis_has_a_job_that_says_its_layout(tmp_path):
    contenders, axes = module("contenders"), module("axes").AXES
    seen = {}
    for axis, ranks in product(axes, (2, 4)):
        setting = contenders.default_setting(axis, ranks, "fp32")
        path = tmp_path / "job.toml"
        path.write_text(setting.job())
        job = load_job(path)
        sizes = {k: getattr(job.parallel, k) for k in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")}
        seen[axis] = {name for name, size in sizes.items() if size == ranks}
        assert job.train.global_batch * job.data.sequence_length == 2048
        samples = job.parallel.micro_batch * setting.micro_batches
        assert samples * (ranks if axes[axis].splits_samples else 1) == job.train.global_batch
    assert seen == {
        "dp": {"dp_replicate"},
        "zero2": {"dp_shard"},
        "zero3": {"dp_shard"},
        "tp": {"tp"},
        "tp-sequence": {"tp"},
        "pp-1f1b": {"pp"},
        "pp-interleaved": {"pp"},
        "pp-zbv": {"pp"},
        "ep": {"dp_shard", "ep"},
        "cp-ring": {"cp"},
        "cp-all-to-all": {"cp"},
    }


def test_the_same_stages_are_the_recipes(tmp_path):
    contenders = module("contenders")
    setting = replace(contenders.default_setting("pp-zbv", 2, "fp32"), cuts="same")
    path = tmp_path / "job.toml"
    path.write_text(setting.job())
    assert load_job(path).parallel.stage_cuts == [1, 3, 5]


def test_the_recipe_has_wanmas_allocator_and_threads():
    contenders = module("contenders")
    command = contenders.peer_command(contenders.default_setting("zero3", 4, "fp32"))
    assert command.arguments[:3] == ("torchrun", "--standalone", "--nproc-per-node=4")
    assert "--batch=2" in command.arguments
    assert command.environment["OMP_NUM_THREADS"] == str(max(contenders.usable_cores() // 4, 1))
    assert "mmap_threshold" in command.environment["GLIBC_TUNABLES"]


def test_bf16_is_compared_only_where_the_recipe_has_it(monkeypatch, capsys):
    run = module("run")
    monkeypatch.setattr(sys, "argv", ["run.py", "--precision", "bf16", "--axis", *module("axes").AXES])
    chosen = {setting.axis for setting in run.settings(run.parse())}
    assert chosen == {"dp", "zero2", "zero3", "ep", "cp-ring", "cp-all-to-all"}
    assert "no bf16" in capsys.readouterr().out


def test_options_replace_the_usual_sizes_of_comparisons_and_pipelines(monkeypatch):
    run = module("run")
    options = [
        "--preset",
        "gpt-1m",
        "--sequence",
        "64",
        "--steps",
        "1",
        "--micro-batches",
        "4",
        "--batch",
        "4",
    ]
    monkeypatch.setattr(
        sys, "argv", ["run.py", *options, "--axis", "tp", "pp-zbv", "bubble", "--schedule", "zbv"]
    )
    parsed = run.parse()
    settings = {setting.axis: setting for setting in run.settings(parsed)}
    assert (settings["tp"].preset, settings["tp"].heads, settings["tp"].micro_batches) == ("gpt-1m", 0, 1)
    assert (settings["pp-zbv"].sequence, settings["pp-zbv"].micro_batches) == (64, 4)
    (pipeline,) = run.bubbles(parsed)
    assert (pipeline.bubble, pipeline.preset, pipeline.steps, pipeline.micro_batches) == (
        "zbv",
        "gpt-1m",
        1,
        4,
    )


@pytest.mark.full
@pytest.mark.parametrize("axis", ["zero3", "tp-sequence", "pp-1f1b", "ep"])
def test_a_recipe_has_wanmas_losses(axis, tmp_path):
    contenders = module("contenders")
    setting = replace(
        contenders.default_setting(axis, 2, "fp32"),
        preset="gpt-moe-43m" if axis == "ep" else "gpt-1m",
        heads=0,
        vocabulary=320,
        sequence=32,
        steps=2,
    )
    losses = []
    for is_wanma in (True, False):
        folder = tmp_path / str(is_wanma)
        folder.mkdir()
        losses.append(contenders.measure(setting, is_wanma, Path(sys.prefix), folder)["losses"])
    # Of the model after one step: a token near the border of two experts may change between them later.
    assert losses[1][:2] == pytest.approx(losses[0][:2], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


# ---------------------------------------------------------------- context


@pytest.mark.parametrize(("axis", "ranks"), list(product(("cp-ring", "cp-all-to-all"), (2, 4))))
def test_the_traffic_in_attention_is_that_of_the_textbook(axis, ranks):
    contenders = module("contenders")
    traffic = module("context").Traffic.of(contenders.default_setting(axis, ranks, "fp32"))
    whole = 2048 * 384 * 4  # bytes of one of query, key, value, for all ranks
    if axis == "cp-ring":
        forward = 6 * (ranks - 1) * 2 * whole / ranks
        expected = 2 * forward + 6 * ranks * 2 * whole / ranks
    else:
        expected = 6 * 2 * 4 * whole / ranks
    assert traffic.bytes_in_attention == expected


def test_the_ring_passes_as_many_messages_as_its_operators_say():
    from wanma.models.config.presets import DECODER_PRESETS

    contenders = module("contenders")
    traffic = module("context").Traffic.of(contenders.default_setting("cp-ring", 4, "fp32"))
    layers = DECODER_PRESETS["gpt-17m"].layers
    assert (traffic.ring_passes, traffic.ring_gradient_passes) == (layers * 6, layers * 4)


def test_all_messages_one_after_the_other_take_their_sum():
    context = module("context")
    traffic = context.Traffic(1, 1, 1, 1, ring_passes=3, ring_gradient_passes=2, exchanges=5)
    link = {"ring": 1.0, "ring_gradients": 10.0, "exchange": 100.0, "reduce": 1000.0}
    assert traffic.seconds(link) == 3 + 20 + 500 + 1000


# ---------------------------------------------------------------- bubbles


def one_step(orders, cost):
    """Operations of a schedule that is given as each rank's list of (kind, stage, micro-batch)."""
    bubble = module("bubble")
    step = []
    for order in orders:
        operations, now = [], 0.0
        for kind, stage, number in order:
            seconds = cost[kind]
            operations.append(bubble.Operation(kind, stage, number, now, now + seconds, seconds))
            now += seconds
        step.append(operations)
    return step


def one_forward_one_backward(ranks, micro_batches):
    """1F1B of Narayanan et al. 2021, one stage per rank."""
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - rank - 1, micro_batches)
        forwards, backwards = iter(range(micro_batches)), iter(range(micro_batches))
        order = [("forward", rank, next(forwards)) for _ in range(ahead)]
        for number in forwards:
            order.append(("forward", rank, number))
            if rank == ranks - 1:
                order.append(("loss", rank, number))
            order.append(("backward", rank, next(backwards)))
        order += [("backward", rank, number) for number in backwards]
        orders.append(order)
    return orders


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 8), (4, 8), (4, 4)])
def test_a_replay_of_even_stages_waits_as_the_theory_says(ranks, micro_batches):
    step = one_step(
        one_forward_one_backward(ranks, micro_batches), {"forward": 1.0, "loss": 0.0, "backward": 2.0}
    )
    expected = bubble_fraction("1f1b", ranks, 1, micro_batches)
    assert module("bubble").replayed_share(step, stages=ranks) == pytest.approx(expected)


def test_a_backward_taken_apart_lets_the_stage_before_begin_earlier():
    kinds = [["forward", "loss", "input_backward", "weight_backward"], ["forward", "loss", "backward"]]
    shares = []
    for last in kinds:
        orders = [[("forward", 0, 0), ("backward", 0, 0)], [(kind, 1, 0) for kind in last]]
        cost = {"forward": 1.0, "loss": 0.0, "backward": 2.0, "input_backward": 1.0, "weight_backward": 1.0}
        shares.append(module("bubble").replayed_share(one_step(orders, cost), stages=2))
    assert shares == [pytest.approx(1 - 6 / (2 * 5)), pytest.approx(1 - 6 / (2 * 6))]


def test_an_order_that_waits_for_itself_is_told():
    orders = [
        [("backward", 0, 0), ("forward", 0, 0)],
        [("forward", 1, 0), ("loss", 1, 0), ("backward", 1, 0)],
    ]
    step = one_step(orders, {"forward": 1.0, "loss": 0.0, "backward": 2.0})
    with pytest.raises(ValueError, match="wait for each other"):
        module("bubble").replayed_share(step, stages=2)


def test_waiting_by_the_clock_is_what_is_not_computed_between_first_and_last():
    bubble = module("bubble")
    step = [
        [
            bubble.Operation("forward", 0, 0, 10.0, 12.0, 1.9),
            bubble.Operation("backward", 0, 0, 16.0, 20.0, 4.0),
        ],
        [bubble.Operation("forward", 1, 0, 13.0, 15.0, 2.0)],
    ]
    assert bubble.measured_share(step) == pytest.approx(1 - 8 / 20)
    assert bubble.unevenness(step) == pytest.approx(5.9 / 3.95)


# ---------------------------------------------------------------- report


def piece(settings, **more):
    pair = {"date": "2026-01-01T00:00:00+00:00", "commit": "abc"}
    return {
        "settings": settings,
        "environment": {"machine": "a machine", "versions": {"torch": "2"}},
        "commands": {"wanma": "wanma train job.toml"},
        "job": "[model]\n",
        "pairs": [
            {**pair, **{who: {"disturbed": False, **sample} for who, sample in more.pop("samples").items()}}
        ]
        * 7,
        **more,
    }


def test_the_report_says_which_axes_meet_the_goal_and_which_are_not_the_same_training():
    contenders = module("contenders")
    pieces = []
    for axis, speed, loss in (("dp", 980.0, 5.0), ("tp", 900.0, 5.1)):
        samples = {
            "wanma": {"tokens_per_second": speed, "losses": [6.0, loss]},
            "peer": {"tokens_per_second": 1000.0, "losses": [6.0, 5.0]},
        }
        settings = asdict(contenders.default_setting(axis, 2, "fp32"))
        pieces.append(piece(settings, samples=samples))
    text = module("report").report(pieces)
    assert (
        "| replicas | `gpt-17m`, 8 heads | 980 | 1,000 | 0.98 (0.98–0.98) | slower | yes | 7 | 0.0e+00 |"
        in text
    )
    assert "0.90 (0.90–0.90) | slower | no | 7 | 2.0e-02 NOT THE SAME TRAINING |" in text
    assert "apply_ddp" in text
    del pieces[0]["pairs"][2:]
    assert "| 0.98 | cannot tell | too few pairs | 2 |" in module("report").report(pieces)


def test_the_report_sets_context_parallel_beside_its_theory_and_bubbles_beside_theirs():
    contenders, runs = module("contenders"), module("bubble_runs")
    samples = {
        "wanma": {"tokens_per_second": 1800.0, "losses": [5.0]},
        "peer": {"tokens_per_second": 2048.0, "losses": [5.0]},
    }
    link = {"ring": 0.0, "ring_gradients": 0.0, "exchange": 0.0, "reduce": 0.25}
    settings = asdict(contenders.default_setting("cp-ring", 2, "fp32"))
    waiting = {"theory": 0.111, "replayed": 0.12, "measured": None, "unevenness": 1.05}
    text = module("report").report(
        [
            piece(settings, samples=samples, link=link),
            piece(asdict(runs.Bubble("1f1b", 2)), samples={"wanma": waiting}),
        ]
    )
    assert "| 0.88 (0.88–0.88) | 0.80–1 |" in text
    assert "| 1f1b | 2 | 8 | 11.1% | 12.0% | – | 1.05 | 7 |" in text

"""The batch ramp: step, samples and batch size as functions of each other."""

from hypothesis import given
from hypothesis import strategies as st

from wanma.data.sampling.batch_size_schedule import global_batch_size, samples_consumed_before, step_of_sample
from wanma.job.sections.train import TrainSection

ramps = st.builds(
    lambda batch, steps, batches: TrainSection(
        global_batch=batch, batch_ramp=list(zip(sorted(steps), batches, strict=False))
    ),
    st.integers(1, 64),
    st.sets(st.integers(0, 50), max_size=5),
    st.lists(st.integers(1, 100), min_size=5, max_size=5),
)


@given(train=ramps, step=st.integers(0, 80))
def test_samples_before_is_the_sum_of_the_batches_before(train: TrainSection, step: int) -> None:
    assert samples_consumed_before(train, step) == sum(
        global_batch_size(train, earlier) for earlier in range(step)
    )


@given(train=ramps, step=st.integers(0, 80))
def test_step_of_inverts_samples_before(train: TrainSection, step: int) -> None:
    first = samples_consumed_before(train, step)
    assert step_of_sample(train, first) == step
    assert step_of_sample(train, first + global_batch_size(train, step) - 1) == step


def test_the_ramp_takes_over_at_its_steps() -> None:
    train = TrainSection(global_batch=8, batch_ramp=[(2, 16), (4, 32)])
    assert [global_batch_size(train, step) for step in range(6)] == [8, 8, 16, 16, 32, 32]
    assert samples_consumed_before(train, 5) == 8 + 8 + 16 + 16 + 32


def test_a_far_step_costs_nothing() -> None:
    train = TrainSection(global_batch=8, batch_ramp=[(10**9, 16)])
    assert samples_consumed_before(train, 10**12) == 8 * 10**9 + 16 * (10**12 - 10**9)

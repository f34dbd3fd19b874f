"""Random numbers of one's own forward and loss are a sample's own on every layout, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.utils.checkpoint import checkpoint

import wanma
from support.compare import one_process, same_numbers, spread_over
from support.own import Numbers, Plain, seeded
from support.own_loop import session_job, started_by_launch
from support.ranks import Outcome, run_job, run_ranks
from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.models.keyed_random.dropout import replace_dropout
from wanma.models.keyed_random.forward_draws import RandomDraws

Draw = Callable[[Tensor], Tensor]

KEYED: dict[str, Draw] = {
    "F.dropout": lambda h: F.dropout(h, 0.3),
    "F.dropout with a small p": lambda h: F.dropout(h, 0.004),
    "F.alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "F.dropout1d": lambda h: F.dropout1d(h.unsqueeze(-1), 0.3).squeeze(-1),
    "F.rrelu": lambda h: F.rrelu(h, training=True),
    "F.gumbel_softmax": F.gumbel_softmax,
    "attention's dropout": lambda h: attend(h.view(-1, 2, 2, 2)).flatten(1),
    "randn_like": lambda h: h + torch.randn_like(h),
    "rand of rows": lambda h: h * torch.rand(len(h), 1),
    "one number": lambda h: h * torch.rand([]),
    "one number with a dim": lambda h: h * torch.rand(1),
    "layer drop": lambda h: h if torch.rand([]).item() < 0.5 else 2 * h,
    "randint": lambda h: h * torch.randint(0, 10, (len(h),)).unsqueeze(1),
    "bernoulli": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "stochastic depth": lambda h: h * h.new_empty((len(h), 1)).bernoulli_(0.7),
    "multinomial": lambda h: h * torch.multinomial(h.detach().softmax(-1), 3).sum(-1, keepdim=True),
    "a normal distribution": lambda h: Normal(h, h.exp()).rsample(),
    "a categorical one": lambda h: h * Categorical(logits=h.detach()).sample().unsqueeze(-1),
    "checkpointed": lambda h: F.dropout(checkpoint(noisy, h, use_reentrant=False), 0.5),
    "checkpointed twice": lambda h: checkpoint(
        noisy, checkpoint(noisy, h, use_reentrant=True), use_reentrant=True
    ),
    "weights from a seed that was drawn": lambda h: h * weights_of_step(h.shape[1]),
}
REFUSED: dict[str, tuple[Draw, str]] = {
    "weights": (lambda h: h * torch.rand(h.shape[1]), r"of shape \(8,\) in a micro-batch of 4 samples"),
    "own generator": (
        lambda h: h + torch.randn(h.shape, generator=torch.Generator()),
        "a separate generator",
    ),
    "own seed": (lambda h: h + seeded_rows(len(h)), "a fixed seed"),
    "gamma": (lambda h: h * torch.distributions.Gamma(h.exp(), 1.0).sample(), "_standard_gamma"),
    "permutation": (lambda h: h[torch.randperm(len(h))], r"randperm[\s\S]*test_random_draws.py"),
}


def attend(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)


def noisy(h: Tensor) -> Tensor:
    return F.dropout(h.tanh(), 0.5) * torch.rand([])


def weights_of_step(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    return torch.rand(size, generator=generator)


def seeded_rows(rows: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.randn(rows, 1)


class Drawing(nn.Module):
    def __init__(self, draw: Draw) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self.linear(x))


def trained(model: nn.Module, x: Tensor, sizes: tuple[int, ...], step: int = 3) -> list[Tensor]:
    """Outputs and gradients of one step in micro-batches of `sizes`."""
    replace_dropout(model)
    model.zero_grad()
    draws, outputs, first = RandomDraws(7), [], 0
    draws.step = step
    for size in sizes:
        rows = slice(first, first + size)
        with draws.forward(model, torch.arange(100 + first, 100 + first + size)) as forward:
            output = model(x[rows])
            forward.end_forward()
            output.square().sum().backward()
        outputs.append(output.detach())
        first += size
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [torch.cat(outputs), *gradients]


@pytest.mark.parametrize("name", KEYED)
def test_a_draw_is_the_same_in_any_micro_batch(name: str) -> None:
    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(1))
    model = Drawing(KEYED[name])
    state = torch.get_rng_state()
    expected = trained(model, x, (7,))
    torch.testing.assert_close(trained(model, x, (4, 3)), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(trained(model, x, (4, 2, 1)), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(8, 4, 2, dropout=0.4, batch_first=True),
        lambda: nn.GRU(8, 4, 2, dropout=0.4, batch_first=True),
        lambda: nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
    ],
)
def test_modules_of_torch_that_draw_by_themselves_are_keyed(make: Callable[[], nn.Module]) -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = make()

        def forward(self, x: Tensor) -> Tensor:
            output = self.inner(*[x] * (3 if isinstance(self.inner, nn.MultiheadAttention) else 1))
            return output[0] if isinstance(output, tuple) else output

    x = torch.randn(6, 5, 8, generator=torch.Generator().manual_seed(1))
    expected = trained(First(), x, (6,))
    torch.testing.assert_close(trained(First(), x, (4, 2)), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_a_draw_of_neither_samples_nor_a_step_is_refused_with_its_line(name: str) -> None:
    draw, message = REFUSED[name]
    with pytest.raises(WanmaError, match=message):
        trained(Drawing(draw), torch.randn(4, 8), (4,))


def test_keyed_numbers_are_distributed_as_torchs_own() -> None:
    draws: dict[Draw, tuple[float, float]] = {
        torch.rand_like: (0.5, 12**-0.5),
        torch.randn_like: (0.0, 1.0),
        lambda h: torch.empty_like(h).exponential_(2.0): (0.5, 0.5),
        lambda h: F.dropout(torch.ones_like(h), 0.2): (1.0, 0.5),
        lambda h: torch.randint_like(h, 3, 9): (5.5, (35 / 12) ** 0.5),
        lambda h: torch.multinomial(h[:, :3] * 0 + torch.tensor([1.0, 2.0, 1.0]), 8192, True).float(): (
            1.0,
            0.5**0.5,
        ),
    }
    for draw, (mean, deviation) in draws.items():
        with RandomDraws(0).forward(nn.Identity(), torch.arange(16)):
            drawn = draw(torch.ones(16, 8192))
        error = 6 * deviation / drawn.numel() ** 0.5
        assert float(drawn.mean()) == pytest.approx(mean, abs=error)
        assert float(drawn.std()) == pytest.approx(deviation, abs=3 * error)


class Checkpointed(nn.Module):
    """Calls one dropout three times, each time in a part that backward runs again."""

    def __init__(self, preserves: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.dropout, self.preserves = nn.Linear(8, 8), nn.Dropout(0.5), preserves

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = (
                self.part(x)
                if self.preserves is None
                else checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=self.preserves)
            )
        return x

    def part(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(self.linear(x).tanh())
        return dropped


def test_dropout_under_the_users_own_checkpoints_drops_the_same_again() -> None:
    x = torch.randn(6, 8)
    expected = trained(Checkpointed(None), x, (4, 2))
    torch.testing.assert_close(trained(Checkpointed(True), x, (4, 2)), expected, rtol=0, atol=0)
    with pytest.raises(WanmaError, match=r"3 times in[\s\S]*preserve_rng_state"):
        trained(Checkpointed(False), x, (4, 2))


def test_a_draw_that_comes_late_is_noticed() -> None:
    model, draws = Drawing(lambda h: h), RandomDraws(0)
    for late in (False, True):
        with draws.forward(model, torch.arange(4)) as forward:
            output = model(torch.ones(4, 8))
            if late:
                F.dropout(output, 0.5)
                with pytest.raises(WanmaError, match="earlier forwards drew none"):
                    forward.end_forward()
            else:
                forward.end_forward()


class Noisy(Plain):
    """Draws in its forward by rows and for all, in a part that is run again."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(super().forward, x, use_reentrant=False)
        noise: Tensor = F.dropout(hidden, 0.5) * torch.rand([]) + torch.randn_like(hidden)
        return noise


def noisy_loss(output: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(output, targets, reduction="none", ignore_index=-100)
    return losses * torch.rand(len(losses))


def job(**train: Any) -> dict[str, Any]:
    return session_job(train={"deterministic": True, **train}, data={"cache": "/nowhere"})


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp_shard=2, shard="parameters", micro_batch=2, recompute="full"),
        Plan(dp_replicate=2, micro_batch=2, recompute="selective"),
    ],
)
def test_a_forward_and_a_loss_that_draw_follow_one_process(plan: Plan, tmp_path: Path) -> None:
    objects = {"model": seeded(Noisy), "data": Numbers(), "loss": noisy_loss}
    one = one_process(tmp_path / "one", job(), 7, objects=objects)
    same_numbers(one, spread_over(tmp_path / "more", job(), plan, objects=objects))
    assert len(set(one.losses)) == len(one.losses)


def drawing_loop(worker: Any, run_directory: Path) -> None:
    """A loop of one's own that draws beside the model: before the forward, and in the losses."""
    split = {"micro_batch": 4 if worker.world_size == 1 else 2, "dp_replicate": worker.world_size}
    with started_by_launch(worker, run_directory), wanma.session({**job(), "parallel": split}) as session:
        model = session.prepare(seeded(Plain))
        for batch in session.batches(Numbers()):
            (x,) = batch.inputs
            losses = F.cross_entropy(
                model(x + torch.randn_like(x)), batch.targets, reduction="none", ignore_index=-100
            )
            session.step(losses)
            torch.randn(3)  # not training's


def test_a_loop_of_ones_own_that_draws_follows_one_process(tmp_path: Path) -> None:
    outcomes = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        run_ranks(drawing_loop, ranks, (folder,))
        outcomes.append(Outcome(folder))
    same_numbers(*outcomes)


def test_draws_that_a_plan_hides_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.LSTM(8, 4, 2, dropout=0.4), nn.Identity())
    with pytest.raises(AssertionError, match=r"0 draws random[\s\S]*parallel.pp = 2"):
        run_job(tmp_path, job(), Plan(pp=2, micro_batch=2), {"model": model, "data": Numbers()})

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wanma.job.errors import WanmaError
from wanma.models.architectures.decoder import Decoder
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.keyed_random.dropout import (
    KeyedDropout,
    bind_samples,
    find_unkeyed_random_modules,
    recompute_context_fn,
    replace_dropout,
)
from wanma.models.structure.parameter_initialization import stable_hash


def dropped(
    module: KeyedDropout,
    shape: tuple[int, ...],
    seed: int,
    samples: list[int],
    positions: Tensor | None = None,
) -> Tensor:
    with bind_samples(module, seed, torch.tensor(samples), positions):
        return module(torch.ones(shape))


@given(
    st.lists(st.integers(0, 2**62), min_size=1, max_size=6, unique=True),
    st.data(),
    st.sampled_from([(5,), (3, 7), (4, 3, 3)]),
)
@settings(max_examples=40, deadline=None)
def test_a_samples_mask_does_not_depend_on_who_shares_its_batch(
    samples: list[int], data: st.DataObject, shape: tuple[int, ...]
) -> None:
    module = KeyedDropout(0.4, "layer")
    whole = dropped(module, (len(samples), *shape), 3, samples)
    some = data.draw(st.permutations(range(len(samples))))
    some = some[: data.draw(st.integers(1, len(samples)))]
    part = dropped(module, (len(some), *shape), 3, [samples[index] for index in some])
    assert torch.equal(part, whole[some])


def test_masks_differ_by_seed_sample_layer_and_position() -> None:
    shape = (1, 16, 64)
    masks = [
        dropped(KeyedDropout(0.5, name), shape, seed, [sample])
        for seed, sample, name in itertools.product((0, 1), (0, 1), ("a", "b"))
    ]
    masks += [dropped(KeyedDropout(0.5, "a"), shape, 0, [0], torch.arange(16) + 16)]
    for first, second in itertools.combinations(masks, 2):
        # Independent masks agree in half of 1,024 places; six deviations are 96.
        assert abs(int((first == second).sum()) - 512) < 96
    rows = masks[0][0]
    assert len({tuple(row.tolist()) for row in rows}) == 16


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_share_dropped_is_p_and_the_mean_stays(p: float, dtype: torch.dtype) -> None:
    module = KeyedDropout(p, "layer")
    x = torch.ones(8, 128, 512, dtype=dtype)
    with bind_samples(module, 0, torch.arange(8)):
        y = module(x)
    share = float((y == 0).double().mean())
    deviation = (p * (1 - p) / x.numel()) ** 0.5
    assert abs(share - p) < 6 * deviation + 2**-16
    assert y.dtype == dtype
    assert float(y.max()) == pytest.approx(1 / (1 - p), rel=2**-8 if dtype == torch.bfloat16 else 1e-4)
    # The 16-bit lanes of one hash are as independent as different hashes.
    lanes = (y == 0).double().view(-1, 4)
    assert float((torch.corrcoef(lanes.T) - torch.eye(4)).abs().max()) < 6 / lanes.shape[0] ** 0.5


def test_the_mask_is_that_of_the_hash_written_out_in_integers() -> None:
    name, seed, samples, shape = "layers.0.dropout", 1, (0, 10**12), (2, 2, 7)
    mask64, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:  # SplitMix64's finaliser
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask64
        return x ^ (x >> 31)

    def kept(sample: int, column: int, feature: int) -> bool:
        key = mix(sample ^ mix(seed ^ stable_hash(name)))
        key = mix((key + column * golden) & mask64)
        quad = mix((key + feature // 4 * golden) & mask64)
        lane = quad >> (16 * (feature % 4)) & 0xFFFF
        return (lane ^ 0x8000) >= 0x8000  # lanes are signed

    module = KeyedDropout(0.5, name)
    expected = [[[kept(sample, c, f) for f in range(7)] for c in range(2)] for sample in samples]
    assert (dropped(module, shape, seed, list(samples)) != 0).tolist() == expected


def test_a_rank_that_holds_a_part_of_dim_1_says_which() -> None:
    module = KeyedDropout(0.5, "layer")
    whole = dropped(module, (2, 12, 8), 5, [3, 4])
    positions = torch.tensor([10, 11, 0, 1])
    assert torch.equal(dropped(module, (2, 4, 8), 5, [3, 4], positions), whole[:, positions])


def test_channel_dropout_zeroes_whole_channels() -> None:
    y = dropped(KeyedDropout(0.5, "layer", drops_channels=True), (4, 32, 3, 3), 0, [0, 1, 2, 3])
    by_channel = y.flatten(2)
    assert torch.equal(by_channel, by_channel[..., :1].expand_as(by_channel))
    assert 30 < int((by_channel[..., 0] == 0).sum()) < 98


def test_evaluation_and_zero_probability_change_nothing_and_probability_one_drops_all() -> None:
    x = torch.randn(2, 3)
    assert KeyedDropout(0.5, "a").eval()(x) is x
    assert KeyedDropout(0.0, "a")(x) is x
    assert torch.equal(dropped(KeyedDropout(1.0, "a"), (2, 3), 0, [0, 1]), torch.zeros(2, 3))


def test_training_without_samples_or_with_other_rows_is_refused() -> None:
    module = KeyedDropout(0.5, "layers.0.dropout")
    with pytest.raises(WanmaError, match=r"'layers.0.dropout'[\s\S]*bind_samples"):
        module(torch.ones(2, 3))
    with pytest.raises(WanmaError, match="receives 4 rows for 2 samples"):
        dropped(module, (4, 3), 0, [0, 1])
    with pytest.raises(
        WanmaError, match="no sample context is bound"
    ):  # the samples ended with their forward
        module(torch.ones(2, 3))


def test_a_module_called_twice_in_a_forward_draws_twice_and_alike_in_the_next() -> None:
    module, x = KeyedDropout(0.5, "layer"), torch.ones(2, 256)
    forwards = []
    for _ in range(2):
        with bind_samples(module, 0, torch.tensor([3, 4])):
            forwards.append((module(x), module(x)))
    assert abs(int((forwards[0][0] == forwards[0][1]).sum()) - 256) < 70
    assert torch.equal(torch.stack(forwards[0]), torch.stack(forwards[1]))


class Block(nn.Module):
    """Calls one dropout twice, as users' blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.linear(self.drop(x)).tanh())


def test_recomputation_in_backward_draws_the_masks_of_its_own_micro_batch() -> None:
    torch.manual_seed(0)
    block = Block()
    replace_dropout(block)
    batches = {0: torch.randn(2, 16), 100: torch.randn(2, 16)}

    def gradients(recompute: bool) -> Tensor:
        block.zero_grad()
        outputs = []
        for first, x in batches.items():
            with bind_samples(block, 7, torch.arange(first, first + 2)):
                # As in a pipeline: all forwards first, then the backwards in any order.
                if recompute:
                    y = checkpoint(block, x, use_reentrant=False, context_fn=recompute_context_fn(block))
                else:
                    y = block(x)
                outputs.append(y)
        for y in outputs:
            y.square().sum().backward()
        assert block.linear.weight.grad is not None
        return block.linear.weight.grad.clone()

    assert torch.equal(gradients(recompute=True), gradients(recompute=False))


def test_a_recomputing_block_without_dropout_needs_no_samples() -> None:
    linear = nn.Linear(4, 4)
    y = checkpoint(linear, torch.ones(1, 4), use_reentrant=False, context_fn=recompute_context_fn(linear))
    y.sum().backward()
    assert torch.equal(linear.weight.grad, torch.ones(4, 4))


def test_a_users_dropout_is_replaced_by_keyed_ones_named_after_their_place() -> None:
    model = nn.Sequential(Block(), nn.Dropout(0.0), nn.Dropout2d(0.2), Block())
    assert replace_dropout(model) == 3
    assert [(name, module.layer_name, module.p, module.drops_channels)
            for name, module in model.named_modules() if isinstance(module, KeyedDropout)] == [
        ("0.drop", "0.drop", 0.5, False), ("2", "2", 0.2, True), ("3.drop", "3.drop", 0.5, False),
    ]  # fmt: skip
    assert type(model[1]) is nn.Dropout
    assert replace_dropout(model) == 0


def test_a_dropout_with_several_names_is_replaced_under_each() -> None:
    shared = nn.Dropout(0.5)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared, shared)})
    assert replace_dropout(model) == 3
    assert all(isinstance(module, KeyedDropout) for module in (*model["a"], *model["b"]))


def test_randomness_that_cannot_be_keyed_is_named() -> None:
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(8, 2, dropout=0.1),
            "quiet": nn.MultiheadAttention(8, 2),
            "recurrent": nn.LSTM(4, 4, num_layers=2, dropout=0.2),
            "alpha": nn.AlphaDropout(0.3),
            "plain": nn.Dropout(0.1),
        }
    )
    replace_dropout(model)
    assert find_unkeyed_random_modules(model) == ["attention", "recurrent", "alpha"]


def test_a_decoders_dropout_gives_each_sample_the_same_logits_in_any_micro_batch() -> None:
    model = Decoder(DecoderConfig(2, 16, 2, 2, 32, 32, dropout=0.3)).double()
    tokens, samples = torch.randint(0, 32, (4, 6)), torch.tensor([40, 41, 42, 43])
    with bind_samples(model, 1, samples):
        whole = model(tokens)
    with bind_samples(model, 1, samples[2:]):
        part = model(tokens[2:])
    torch.testing.assert_close(part, whole[2:], rtol=1e-12, atol=1e-12)
    with bind_samples(model, 1, samples + 4):
        assert not torch.allclose(model(tokens), whole)


@pytest.mark.gpu
def test_masks_are_the_same_on_a_gpu() -> None:
    module, samples = KeyedDropout(0.3, "layer"), torch.arange(4) * 12345
    on_cpu = dropped(module, (4, 33, 65), 9, samples.tolist())
    with bind_samples(module, 9, samples.cuda()):
        on_gpu = module(torch.ones(4, 33, 65, device="cuda"))
    assert torch.equal(on_cpu, on_gpu.cpu())


@pytest.mark.slow
def test_compiled_masks_are_those_of_eager_mode_and_new_samples_compile_nothing() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = Decoder(DecoderConfig(3, 16, 2, 2, 32, 32, dropout=0.3)).double()
    tokens = torch.randint(0, 32, (4, 6))

    def logits(first: int) -> Tensor:
        with bind_samples(model, 1, torch.arange(first, first + 4)):
            return model(tokens)

    expected = [logits(0), logits(8)]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.compile(fullgraph=True, backend=counter)
    for compiled, eager in zip((logits(0), logits(8)), expected, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-10, atol=1e-12)
    assert counter.frame_count == 1


class Doubled(nn.Dropout):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_replaced_dropout_keeps_its_hooks_attributes_and_forward() -> None:
    calls: list[str] = []
    model = nn.Sequential(nn.Dropout(0.5), Doubled(0.5), nn.Dropout(0.5, inplace=True))
    model[0].note = "kept"
    model[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    model[1].register_forward_hook(lambda *_: calls.append("after"))
    assert replace_dropout(model) == 3
    assert model[0].note == "kept"
    assert isinstance(model[1], Doubled)
    given = torch.ones(4, 64)
    with bind_samples(model, 0, torch.arange(4)):
        first, second = model[0](given), model[1](given)
        assert model[2](given) is given
    assert calls == ["before", "after"]
    assert sorted(first.unique().tolist()) == sorted(given.unique().tolist()) == [0, 2]
    assert sorted(second.unique().tolist()) == [0, 4]
    assert isinstance(pickle.loads(pickle.dumps(copy.deepcopy(model[2]))), KeyedDropout)

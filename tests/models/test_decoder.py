import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.text import text_spec
from wanma.models.architectures.decoder import Decoder
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.layers.rms_norm import RMSNorm
from wanma.models.layers.rotary_embedding import apply_rotary_embedding, compute_rotary_frequencies
from wanma.models.model_spec import build_model

SMALL = DecoderConfig(layers=3, hidden=32, heads=4, kv_heads=2, feed_forward=96, vocabulary=64)


def decoder(**keys: object) -> nn.Module:
    sizes = {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "vocabulary": 64}
    spec = text_spec({"family": "decoder", **sizes, **keys}, None, None)
    return build_model(spec, seed=1, dtype=torch.float64)


def tokens(rows: int = 2, sequence: int = 12) -> Tensor:
    return torch.randint(0, 64, (rows, sequence), generator=torch.Generator().manual_seed(0))


def reference(model: Decoder, ids: Tensor) -> Tensor:
    """The same decoder written out with explicit loops and scores (Touvron et al. 2023)."""
    dimensions = model.config
    width, sequence = dimensions.head_dim, ids.shape[1]
    frequencies = dimensions.rope_theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + dimensions.norm_epsilon).sqrt() * weight

    def turn(x: Tensor) -> Tensor:  # (rows, sequence, width)
        angles = torch.arange(sequence, dtype=torch.float64)[:, None] * frequencies
        even, odd = x[..., 0::2], x[..., 1::2]
        result = torch.empty_like(x)
        result[..., 0::2] = even * angles.cos() - odd * angles.sin()
        result[..., 1::2] = even * angles.sin() + odd * angles.cos()
        return result

    x = model.embedding.weight[ids]
    for block in model.layers.values():
        attention, y = block.attention, norm(x, block.attention_norm.weight)
        query, key, value = (y @ p.weight.T for p in (attention.query, attention.key, attention.value))
        heads = []
        for head in range(dimensions.heads):
            shared = head // (dimensions.heads // dimensions.kv_heads)
            q = turn(query[..., head * width : (head + 1) * width])
            k = turn(key[..., shared * width : (shared + 1) * width])
            v = value[..., shared * width : (shared + 1) * width]
            scores = q @ k.transpose(1, 2) / width**0.5
            scores = scores.masked_fill(torch.ones(sequence, sequence).triu(1).bool(), float("-inf"))
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ attention.output.weight.T
        y, feed = norm(x, block.feed_forward_norm.weight), block.feed_forward
        up = y @ feed.up.weight.T
        if dimensions.activation_function == "gelu":
            # Radford et al. 2019, `gelu` of their code.
            inner = 0.5 * up * (1 + torch.tanh((2 / math.pi) ** 0.5 * (up + 0.044715 * up**3)))
        else:
            inner = F.silu(y @ feed.gate.weight.T) * up
        x = x + inner @ feed.down.weight.T
    return norm(x, model.norm.weight) @ model.head.weight.T


@pytest.mark.parametrize(
    "keys", [{}, {"kv_heads": 4}, {"kv_heads": 1}, {"tie_embeddings": True}, {"activation_function": "gelu"}]
)
def test_logits_equal_those_of_a_decoder_written_out(keys: dict) -> None:
    model = decoder(**keys)
    torch.testing.assert_close(model(tokens()), reference(model, tokens()), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
def test_small_integers_are_tokens_like_others(dtype: torch.dtype) -> None:
    model = decoder()
    assert torch.equal(model(tokens().to(dtype)), model(tokens()))


def test_a_later_token_changes_no_earlier_logits() -> None:
    model, first = decoder(), tokens()
    second = first.clone()
    second[:, 8] = (second[:, 8] + 1) % 64
    a, b = model(first), model(second)
    assert torch.equal(a[:, :8], b[:, :8])
    assert not torch.allclose(a[:, 8:], b[:, 8:])


def test_documents_packed_into_a_row_give_the_logits_they_give_alone() -> None:
    model, first, second = decoder(), tokens(1, 5), tokens(1, 7) + 0
    packed = torch.cat([first, second], dim=1)
    documents = torch.tensor([[0] * 5 + [1] * 7])
    positions = torch.tensor([[*range(5), *range(7)]])
    logits = model(packed, documents=documents, positions=positions)
    torch.testing.assert_close(logits[:, :5], model(first), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(logits[:, 5:], model(second), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(logits[:, 5:], model(packed)[:, 5:])


def test_a_pipeline_of_stages_gives_the_logits_of_the_whole_under_the_same_names() -> None:
    whole = decoder(layers=4)
    first, last = copy.deepcopy(whole), copy.deepcopy(whole)
    first.norm = first.head = None
    last.embedding = None
    for name in ("2", "3"):
        del first.layers[name]
    for name in ("0", "1"):
        del last.layers[name]
    documents = torch.zeros_like(tokens())
    hidden = first(tokens(), documents)
    assert hidden.shape == (2, 12, 32)
    assert torch.equal(last(hidden, documents), whole(tokens(), documents))
    names = [name for stage in (first, last) for name, _ in stage.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())


def test_half_of_the_heads_on_each_of_two_ranks_add_up_to_the_whole_attention() -> None:
    whole = decoder().layers["0"].attention
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    rotary = compute_rotary_frequencies(torch.arange(5), 8, 10_000.0, torch.float64)
    parts = []
    for rank in range(2):
        part = copy.deepcopy(whole)
        for name in ("query", "key", "value"):
            projection = getattr(part, name)
            projection.weight = nn.Parameter(projection.weight.chunk(2, dim=0)[rank])
        part.output.weight = nn.Parameter(part.output.weight.chunk(2, dim=1)[rank])
        parts.append(part(x, rotary, None))
    torch.testing.assert_close(parts[0] + parts[1], whole(x, rotary, None), rtol=1e-10, atol=1e-12)


def test_it_is_built_on_the_meta_device_with_nothing_in_buffers() -> None:
    with torch.device("meta"):
        model = Decoder(SMALL)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert list(model.buffers()) == []


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_names_are_these(tied: bool) -> None:
    model = decoder(layers=1, tie_embeddings=tied)
    block = "layers.0."
    assert [name for name, _ in model.named_parameters()] == [
        "embedding.weight",
        f"{block}attention_norm.weight",
        *(f"{block}attention.{name}.weight" for name in ("query", "key", "value", "output")),
        f"{block}feed_forward_norm.weight",
        *(f"{block}feed_forward.{name}.weight" for name in ("gate", "up", "down")),
        "norm.weight",
        *([] if tied else ["head.weight"]),
    ]


def test_tied_embeddings_that_came_apart_are_noticed() -> None:
    model = decoder(tie_embeddings=True)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(RuntimeError, match="tie_parameters"):
        model(tokens())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_it_computes_in_the_precision_of_its_weights(dtype: torch.dtype) -> None:
    model = decoder()
    expected = model(tokens())
    logits = copy.deepcopy(model).to(dtype)(tokens())
    assert logits.dtype == dtype
    tolerance = {torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 0}[dtype]
    assert float(((logits.double() - expected).norm() / expected.norm()).detach()) <= tolerance


def test_angles_keep_their_precision_at_far_positions_in_bf16() -> None:
    rotary = compute_rotary_frequencies(torch.tensor([100_001]), 8, 10_000.0, torch.bfloat16)
    exact = compute_rotary_frequencies(torch.tensor([100_001]), 8, 10_000.0, torch.float64)
    assert rotary.complex_factors.dtype == torch.complex64
    assert float((rotary.complex_factors - exact.complex_factors).abs().max()) < 0.01


def test_rotation_depends_on_the_distance_of_positions_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).unbind(0)

    def score(query_at: int, key_at: int) -> Tensor:
        turned = [
            apply_rotary_embedding(
                x, compute_rotary_frequencies(torch.tensor([at]), 16, 10_000.0, torch.float64)
            )
            for x, at in ((q, query_at), (k, key_at))
        ]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(107, 103), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(score(7, 3), score(7, 4))


@pytest.mark.parametrize("head_norm", [False, True])
def test_head_norm_makes_attention_independent_of_the_queries_scale(head_norm: bool) -> None:
    model = Decoder(DecoderConfig(1, 32, 4, 2, 96, 64, explicit_head_dim=16, qk_norm=head_norm)).double()
    # With identity the scores double; with normalized heads nothing but epsilon changes.
    before = model(tokens())
    with torch.no_grad():
        model.layers["0"].attention.query.weight.mul_(2)
    assert torch.allclose(model(tokens()), before, rtol=1e-4, atol=1e-4) == head_norm


@pytest.mark.slow
def test_every_block_compiles_as_one_graph_and_all_share_it() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = decoder(layers=4, dropout=0.1).eval()
    expected = model(tokens())
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.compile(fullgraph=True, backend=counter)
    torch.testing.assert_close(model(tokens()), expected, rtol=1e-10, atol=1e-12)
    assert counter.frame_count == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_equals_torchs_own_forward_and_backward(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 48, dtype=torch.float64) * 3
    ours, theirs = RMSNorm(48, eps=1e-5).to(dtype), nn.RMSNorm(48, eps=1e-5, dtype=torch.float64)
    with torch.no_grad():
        ours.weight.copy_(torch.randn(48))
        theirs.weight.copy_(ours.weight)
    outputs = []
    for module, kind in ((ours, dtype), (theirs, torch.float64)):
        leaf = x.to(dtype).to(kind).requires_grad_()
        y = module(leaf)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(dtype).to(kind))
        outputs.append((y.detach(), leaf.grad, module.weight.grad))
    assert outputs[0][0].dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-3}[dtype]
    for mine, exact in zip(*outputs, strict=True):
        assert float((mine.double() - exact).norm() / exact.norm()) <= tolerance


def test_gradients_of_rms_norm_pass_the_numerical_check() -> None:
    norm = RMSNorm(6, eps=1e-5).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, (x,)), (x, weight)
    )

"""FLOPs of a decoder's training by the conventions of published tables, from its one workload.

Tables of TFLOP/s and MFU differ in what they count: the half of the attention scores that a causal model
needs or all of them, parameters that are only looked up, and work that is done again. Quotients of the same
step by two conventions differ by up to a third, so a figure says nothing without its convention.

| key | FLOPs of a token, N parameters that it uses, L layers, H heads of width Q, T tokens | used by |
| --- | --- | --- |
| mfu | products, causal attention: 6 LHQT | wanma, Megatron-Bridge since 25.09 |
| mfu_full_attention | products, full attention: 12 LHQT | Megatron-LM, NeMo, nanotron, torchtitan today |
| mfu_palm | 6 N + 12 LHQT, N with the embedding | PaLM, nanoGPT, llm-foundry, torchtitan in 2024, picotron |
| mfu_6nd | 6 N | Kaplan et al. 2020, Hoffmann et al. 2022 |
| hfu | as mfu_full_attention, and all that is recomputed | Megatron-LM 2021, DeepSpeed |

With tied embeddings `mfu_palm` and `mfu_full_attention` are the same but for normalizations and biases.
"""

from __future__ import annotations

from wanma.job.sections.parallel import Recompute
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.workload.model_workload import compute_decoder_workload
from wanma.models.workload.sublayer_cost import attention_cost, feed_forward_cost

OWN = "mfu"
"""Convention of wanma's own MFU."""


def training_flops(
    config: DecoderConfig, sequence_length: int, recompute: Recompute = "none", recompute_share: float = 1.0
) -> dict[str, float]:
    """Return the FLOPs of forward and backward of one sample, all parameters trained, by convention.

    Args:
        config: the decoder.
        sequence_length: tokens of a sample.
        recompute: policy, which counts for `hfu` alone; "selective" is wanma's own, of every second product.
        recompute_share: share of the blocks that recompute, 0 .. 1.
    """
    causal = compute_decoder_workload(config, sequence_length)
    full = compute_decoder_workload(config, sequence_length, causal=False)
    attention = 2 * (full.flops_per_sample - causal.flops_per_sample)
    parameters = 6.0 * causal.active_parameters * sequence_length
    recomputed = 0.0
    if recompute == "full":
        recomputed = sum(layer.count * layer.flops_per_sample for layer in full.layers if layer.is_block)
    elif recompute == "selective":
        dense = config.dense_layers if config.experts else config.layers
        recomputed = sequence_length * (
            dense * _second_products(config, has_experts=False)
            + (config.layers - dense) * _second_products(config, has_experts=True)
        )
    return {
        "mfu": causal.flops_per_sample,
        "mfu_full_attention": full.flops_per_sample,
        "mfu_palm": parameters + attention,
        "mfu_6nd": parameters,
        "hfu": full.flops_per_sample + recompute_share * recomputed,
    }


def _second_products(config: DecoderConfig, *, has_experts: bool) -> float:
    """Return the forward FLOPs of a token in the products of a block that selective recompute repeats."""
    sublayers = (attention_cost(config), feed_forward_cost(config, has_experts=has_experts))
    products = [product for sublayer in sublayers for product in sublayer.product_multiply_adds]
    return 2.0 * sum(products[1::2])

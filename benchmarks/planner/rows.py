"""Rows of `published.csv` as inputs of the planner: dimensions, plan, hardware, and habits of the program.

Where a source is silent, one rule holds for all its rows.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.planner.machines import machine
from wanma.hardware.catalogue.lookup import find_by_name
from wanma.job.plan.plan import Plan
from wanma.job.sections.parallel import Schedule
from wanma.models.config.dimensions import DecoderConfig
from wanma.planner.cost.decoder_layers import FrameworkTraits
from wanma.planner.hardware_model.model import HardwareModel

Record = dict[str, str]

TABLES = Path(__file__).parent
"""Folder of `published.csv`."""


@dataclass(frozen=True)
class Case:
    """Published measurement with its dimensions, plan, hardware and program."""

    source: str
    name: str
    dimensions: DecoderConfig
    sequence: int
    plan: Plan
    global_batch: int
    machine: HardwareModel
    software: FrameworkTraits
    in_flight: int | None
    measured_seconds: float
    """Measured seconds of a step; NaN if a row has only memory."""
    is_fitted: bool
    """True if constants may be fitted to it; the others only check them."""
    is_recalled: bool
    """True if the source, or an input that matters, is cited from memory."""
    is_derived: bool
    """True if the step time was computed from another figure of the source."""


class UnusableRowError(Exception):
    """Row that cannot be forecast; the message gives the reason."""


def read_cases(path: Path) -> tuple[list[Case], list[str]]:
    """Return the rows with a step time, and a reason for each of the others."""
    cases, refused = [], []
    with path.open(newline="") as file:
        for number, record in enumerate(csv.DictReader(file), start=2):
            try:
                cases.append(_case(record))
            except UnusableRowError as error:
                refused.append(f"line {number}, {record['source']}, {record['model']}: {error}")
    return cases, refused


def is_fitted(record: Record) -> bool:
    """Return True for half of the rows, by a hash of their content: no choice, and stable."""
    text = "|".join(record[key] for key in sorted(record) if key not in ("notes", "provenance"))
    return hashlib.sha256(text.encode()).digest()[0] % 2 == 0


def _case(record: Record) -> Case:
    if not record["step_time_s"]:
        raise UnusableRowError("no step time, only memory")
    return case_of(record)


def case_of(record: Record) -> Case:
    """Return the case of a row, with a step time or only with memory.

    Raises:
        UnusableRowError: it cannot be forecast.
    """
    if not record["layers"]:
        raise UnusableRowError("an architecture that is not a plain decoder's (state-space layers)")
    habits = next((habits for prefix, habits in _HABITS if record["source"].startswith(prefix)), None)
    if habits is None:
        raise UnusableRowError("different devices in one run, which this forecast does not take")
    case = _plain_case(record)
    case = habits(record, case)
    if case.software.architecture == "gpt":
        case = replace(case, dimensions=replace(case.dimensions, activation_function="gelu"))
    return case


def _plain_case(record: Record) -> Case:
    def number(key: str, default: int = 1) -> int:
        text = record[key]
        return int(float(text)) if text and text.replace(".", "").isdigit() else default

    pp, tp, cp, dp = number("pp"), number("tp"), number("cp"), number("dp")
    zero = number("zero_stage", 0)
    precision = record["precision"].lower()
    virtual = number("interleave")
    schedule: Schedule = "1f1b" if virtual == 1 else "interleaved_1f1b"
    sharded = zero > 0
    plan = Plan(
        pp=pp,
        dp_replicate=1 if sharded else dp,
        dp_shard=dp if sharded else 1,
        cp=cp,
        tp=tp,
        ep=number("ep"),
        shard=("none", "optimizer", "gradients", "parameters")[zero],
        sequence_parallel=tp > 1 and record["sequence_parallel"] != "0",
        micro_batch=number("micro_batch", 0) or 1,
        schedule=schedule,
        virtual_stages=virtual,
        recompute=record["recompute"] if record["recompute"] in ("full", "selective") else "none",  # type: ignore[arg-type]
        precision="fp16" if precision == "fp16" else "bf16",
        fp8=precision in ("fp8", "mxfp8"),
        device="cuda",
    )
    return Case(
        source=record["source"],
        name=_name(record),
        dimensions=_dimensions(record),
        sequence=number("seq"),
        plan=plan,
        global_batch=number("global_batch"),
        machine=_machine(record),
        software=FrameworkTraits(
            matmul_precision="nvfp4" if precision == "nvfp4" else None,
            splits_experts=number("ep") * tp
            <= plan.ranks_per_pipeline_rank,  # else there are no ranks to hold the parts
        ),
        in_flight=None,
        measured_seconds=float(record["step_time_s"] or "nan"),
        is_fitted=is_fitted(record),
        is_recalled="recalled" in record["provenance"] + record["notes"],
        is_derived="derived" in record["notes"],
    )


def _name(record: Record) -> str:
    axes = " ".join(
        f"{axis}{record[axis]}" for axis in ("dp", "tp", "pp", "cp", "ep") if record[axis] not in ("", "1")
    )
    batch = f"{record['micro_batch'] or '?'}/{record['global_batch']}"
    devices = f"{record['gpu']}×{record['n_gpus']}"
    return f"{record['model']} s{record['seq']} {devices} {axes} b{batch} {record['precision']}"


def _dimensions(record: Record) -> DecoderConfig:
    layers, hidden, heads, kv_heads, wide, vocabulary = (
        int(record[key]) for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    )
    model = record["model"].lower()
    plain = DecoderConfig(layers, hidden, heads, kv_heads, wide, vocabulary)
    # Of the published configurations, what the table has no column for.
    if "deepseek" in model:
        latent = replace(
            plain,
            query_rank=1536,
            key_value_rank=512,
            explicit_head_dim=128,
            explicit_rope_head_dim=64,
            explicit_value_head_dim=128,
        )
        three = "v3" in model
        return replace(
            latent,
            experts=256 if three else 160,
            experts_per_token=8 if three else 6,
            shared_experts=1 if three else 2,
            expert_feed_forward=2048 if three else 1536,
            # Models cut to a few layers keep one (SimuMax's launcher; their memory says so too).
            dense_layers=3 if three and layers > 10 else 1,
        )
    if "qwen3_" in model:
        return replace(
            plain,
            explicit_head_dim=128,
            qk_norm=True,
            experts=128,
            experts_per_token=8,
            expert_feed_forward=wide,
        )
    if "gpt oss" in model:
        return replace(
            plain, explicit_head_dim=64, experts=128, experts_per_token=4, expert_feed_forward=wide
        )
    return plain


def _machine(record: Record) -> HardwareModel:
    if find_by_name(record["gpu"]) is None:
        raise UnusableRowError("different devices in one run, which this forecast does not take")
    network = 800.0 if "800 Gb/s per node" in record["notes"] else None
    return machine(record["gpu"], int(record["n_gpus"]), network)


MEGATRON_2021 = FrameworkTraits(
    architecture="gpt",
    attention="scores",
    selective_recompute="attention",
    data_overlap=False,
    gradient_bytes=2,
    weight_storage="copies",
    accumulation_bytes=2,
    blocking_sends=True,
)
# Since 2022 products add their gradients up themselves (--no-gradient-accumulation-fusion turns that off).
MEGATRON_2022 = replace(MEGATRON_2021, fuses_gradient_accumulation=True)


def _megatron_2021(_: Record, case: Case) -> Case:
    return replace(case, software=MEGATRON_2021)


def _megatron(_: Record, case: Case) -> Case:
    return replace(case, software=MEGATRON_2022)


_SC21 = {
    # examples/sc21/run_table_1.sh of the same repository: micro-batch and stages per rank.
    "GPT 1.7B": (16, 1),
    "GPT 3.6B": (16, 1),
    "GPT 7.5B": (16, 1),
    "GPT 18.4B": (8, 1),
    "GPT 39.1B": (4, 1),
    "GPT 76.1B": (2, 3),
    "GPT 145.6B": (2, 2),
    "GPT 310.1B": (1, 2),
    "GPT 529.6B": (1, 3),
    "GPT 1008B": (1, 1),
}


def _sc21(record: Record, case: Case) -> Case:
    micro_batch, virtual = _SC21[record["model"]]
    schedule: Schedule = "1f1b" if virtual == 1 else "interleaved_1f1b"
    plan = replace(case.plan, micro_batch=micro_batch, virtual_stages=virtual, schedule=schedule)
    return replace(case, plan=plan, software=MEGATRON_2021)


def _zero_bubble(record: Record, case: Case) -> Case:
    kind = record["notes"].partition(";")[0]
    plan, pp = case.plan, case.plan.pp
    layers = case.dimensions.layers
    # The paper's models have one block less in the first and in the last stage (section 4).
    if kind == "1F1B-I":
        virtual = (layers + 2) // pp
        plan = replace(plan, schedule="interleaved_1f1b", virtual_stages=virtual)
    elif kind != "1F1B":
        plan = replace(plan, schedule="interleaved_zero_bubble")
    in_flight = 2 * pp if kind == "ZB-2p" else None
    return replace(case, plan=plan, software=MEGATRON_2022, in_flight=in_flight)


# Rates of older kernels next to the measured ones: FlashAttention's first version by `sustain`, its second on
# an H100, whose own instructions neither uses, after Shah et al. 2024 (section 1: 35 % of the peak).
_FLASH_1 = {"A100": 0.78, "H100": 0.42}
_FLASH_2_ON_HOPPER = 0.6


def _foundry(record: Record, case: Case) -> Case:
    # Composer's FSDP in bf16 throughout, eager PyTorch; FlashAttention in Triton (its first version).
    software = FrameworkTraits(
        architecture="gpt", attention_efficiency=_FLASH_1[record["gpu"][:4]], gradient_bytes=2
    )
    return replace(case, software=software)


def _titan(record: Record, case: Case) -> Case:
    compiled = "compile" in record["notes"] or "4D" in record["notes"]
    # The local batch is cut into as many micro-batches as there are stages (its default).
    plan = replace(case.plan, micro_batch=max(case.plan.micro_batch // case.plan.pp, 1))
    return replace(
        case,
        plan=plan,
        software=FrameworkTraits(
            fuses_pointwise=compiled, gradient_bytes=4, attention_efficiency=_FLASH_2_ON_HOPPER
        ),
    )


def _megascale(_: Record, case: Case) -> Case:
    # Megatron of autumn 2023 in bf16, whose gradients are in 32 bits; with fused attention unless the row
    # says that scores are computed again: they would not fit into memory.
    software = replace(MEGATRON_2022, gradient_bytes=4, accumulation_bytes=4)
    if case.plan.recompute != "selective":
        software = replace(software, attention="fused", attention_efficiency=_FLASH_1["A100"])
    return replace(case, software=software)


def _nemo(_: Record, case: Case) -> Case:
    # Transformer Engine's fused operators; tensor parallel's exchanges overlap with products by its user
    # buffers; attention by cuDNN; gradients and parameters overlap (the performance guide's defaults).
    is_gpt = case.dimensions.feed_forward == 4 * case.dimensions.hidden
    software = replace(
        case.software,
        architecture="gpt" if is_gpt else "llama",
        fuses_pointwise=True,
        selective_recompute="attention",
        tensor_overlap=0.7,
        gradient_bytes=4,
        weight_storage="copies",
        fuses_gradient_accumulation=True,
    )
    return replace(case, software=software)


def _bridge(record: Record, case: Case) -> Case:
    """Return a case as `_nemo` does; of mixtures, by the same repository's recipes.

    They are in scripts/performance/configs. In MXFP8 those of the newer release have all experts in one
    kernel, replay whole steps and exchange tokens beside compute, but not where servers of eight hold a
    pipeline. There, tokens are exchanged by a plain all-to-all; elsewhere each is sent to a rank only once.
    Gradients are reduced in 16 bits.
    """
    rack = record["gpu"].startswith("GB")
    plain = not rack and case.plan.pp > 1
    newest = "26.06" in record["source"] and record["precision"] == "MXFP8"
    whole = case.dimensions.experts > 0 and newest and not plain
    software = replace(
        case.software,
        fuses_pointwise=True,
        cuda_graphs=whole,
        selective_recompute="attention",
        tensor_overlap=0.7,
        gradient_bytes=2,
        weight_storage="copies",
        accumulation_bytes=2,
        fuses_gradient_accumulation=True,
        fuses_experts=whole,
        expert_overlap=whole,
        deduplicates_dispatch=not plain,
        frozen_base_weights="LoRA" in record["source"],
    )
    return replace(case, software=software)


def _simumax(_: Record, case: Case) -> Case:
    software = FrameworkTraits(
        fuses_pointwise=True,
        data_overlap=False,
        gradient_bytes=4,
        fuses_experts=False,
        weight_storage="copies",
        fuses_gradient_accumulation=True,
    )
    return replace(case, software=software)


_HABITS: tuple[tuple[str, Callable[[Record, Case], Case]], ...] = (
    ("Megatron-LM SC21", _sc21),
    ("Megatron-LM README", _megatron_2021),
    ("Korthikanti", _megatron),
    ("vTrain", _megatron),
    ("Zero-Bubble", _zero_bubble),
    ("MosaicML", _foundry),
    ("torchtitan", _titan),
    ("MegaScale", _megascale),
    # NVIDIA's submissions run NeMo and Megatron with Transformer Engine.
    ("MLPerf", _nemo),
    ("NVIDIA NeMo", _nemo),
    ("NVIDIA Megatron-Bridge", _bridge),
    ("SimuMax", _simumax),
)

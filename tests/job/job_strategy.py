"""Any valid job, generated from the sections' own types and bounds."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from wanma.job.sections.base import Section
from wanma.job.sections.checkpoint import CheckpointSection
from wanma.job.sections.cluster import ClusterSection
from wanma.job.sections.data import DataSection
from wanma.job.sections.data_sources import ColumnsSection, SourceSection
from wanma.job.sections.engines import RaySection, SlurmSection, SshSection
from wanma.job.sections.images import ImageTransformSection
from wanma.job.sections.job import Job
from wanma.job.sections.kubernetes import KubernetesSection
from wanma.job.sections.model import ModelSection
from wanma.job.sections.observe import ObserveSection, invalid_run_name_reason
from wanma.job.sections.parallel import ParallelSection, ServersSection, TableSharding
from wanma.job.sections.recommender import InteractionsSection, RecommenderSection
from wanma.job.sections.train import TrainSection

text = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
one_line = text.filter(lambda value: not set(value) & set("\n\r"))
plain = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), text),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=3)),
    max_leaves=6,
)
below_one = st.floats(0, 1, exclude_max=True)

RULES: dict[type[Section], dict[str, st.SearchStrategy[Any]]] = {
    TrainSection: {
        "optimizer_factory": st.none(),
        "schedule_factory": st.none(),
        "validate_every_steps": st.integers(1, 99),  # as stop_patience needs
        "betas": st.tuples(below_one, below_one),
        "batch_ramp": st.dictionaries(st.integers(0, 99), st.integers(1, 99)).map(
            lambda ramp: sorted(ramp.items())
        ),
    },
    SourceSection: {
        "weight": st.one_of(
            st.floats(0, 1e12, exclude_min=True),
            st.dictionaries(st.integers(1, 2**62), st.floats(1e-9, 1e12), max_size=2).map(
                lambda stages: [(0, 1.0), *sorted(stages.items())]
            ),
        )
    },
    DataSection: {
        "bad_data": st.sampled_from([None, "refuse", "skip"]),  # a substitute is for images only
    },
    ColumnsSection: {
        "user": st.just("who"),
        "item": st.sampled_from([None, "item", "what"]),
        "rating": st.sampled_from([None, "stars"]),
        "time": st.sampled_from([None, "meta.time"]),
        "sparse": st.lists(st.sampled_from(["tags", "place"]), max_size=2, unique=True),
    },
    ImageTransformSection: {
        "augment": st.lists(st.just("horizontal_flip"), max_size=1),
        "mean": st.sampled_from([[], [0.5], [0.1, 0.2, 0.3]]),
        "std": st.sampled_from([[], [0.5], [0.1, 0.2, 0.3]]),
    },
    InteractionsSection: {
        "target": st.just("click"),
        "fold": st.integers(0, 1),
        "hash_rows": st.dictionaries(st.just("*"), st.integers(1, 1 << 40), max_size=1),
        "admit_rows": st.just({}),  # hash_rows exclude it
        "admit_count": st.just(1),
        "shared_rows": st.just(100),
        "evict_after_runs": st.none(),
        "log_dense": st.just(False),  # as missing_dense, it needs data.columns.dense
        "missing_dense": st.none(),
    },
    CheckpointSection: {"start_from": one_line},
    RecommenderSection: {
        "tables": st.dictionaries(text, st.integers(1, 1 << 40), max_size=2),
        **dict.fromkeys(("bottom", "top", "towers"), st.lists(st.integers(1, 10_000_000), max_size=3)),
    },
    ParallelSection: {
        "embedding_tables": st.dictionaries(text, st.sampled_from(get_args(TableSharding)), max_size=2),
        "batch_share_schedule": st.lists(
            st.tuples(st.integers(), st.lists(st.integers(1, 99), max_size=3)), max_size=2
        ),
    },
    ServersSection: {"count": st.integers(2, 1_024), "staleness": st.none()},
    ClusterSection: {
        "engine": st.sampled_from(("local", "ssh", "slurm")),  # kubernetes excludes `environment`
        "node_rank": st.just(0),
        "min_nodes": st.sampled_from([None, 1]),
        "rendezvous": st.sampled_from([None, "host:1", "[::1]:65535"]),
    },
    SlurmSection: {
        **dict.fromkeys(("container", "container_runtime"), st.none()),
        "time": st.sampled_from([None, "90", "2-00:00:00"]),
        **dict.fromkeys(
            (
                "partition",
                "account",
                "qos",
                "reservation",
                "constraint",
                "prefer",
                "gres",
                "nodelist",
                "exclude",
            ),
            st.one_of(st.none(), one_line),
        ),
        "components": st.just([]),
        "folder": one_line,
        "options": st.lists(one_line.filter(lambda option: not option.startswith("-a")), max_size=3),
    },
    RaySection: {
        "address": st.sampled_from(["auto", "head:6379", "[::1]:6379"]),
        "resources": st.dictionaries(text, st.floats(1e-9, 1e9), max_size=2),
    },
    KubernetesSection: {
        "python": st.just("python"),
        "mount_path": st.just("/data/runs"),
        "tolerations": st.lists(st.just("gpu=a:NoSchedule"), max_size=2),
        "host_paths": st.lists(st.just("/var/cache/wanma"), max_size=2),
        "secret_environment": st.just({"KEY": "secret/key"}),
        "store": st.just("s3://bucket/runs"),
        **dict.fromkeys(("cpu", "memory", "shared_memory"), st.sampled_from([None, "16", "2.5Gi"])),
        **dict.fromkeys(
            ("namespace", "queue", "priority_class", "volume", "service_account"),
            st.sampled_from([None, "team-a"]),
        ),
    },
    SshSection: {
        "inventory": st.one_of(st.none(), one_line),
        "python": one_line.filter(bool),
        "folder": one_line,
        **dict.fromkeys(("hosts", "options"), st.lists(one_line, max_size=3)),
    },
    ObserveSection: {
        "name": st.one_of(st.none(), text.filter(lambda name: invalid_run_name_reason(name) is None)),
        **dict.fromkeys(
            ("metrics_token", "alert_webhook"), st.one_of(st.just(""), text.map(lambda name: f"env:{name}"))
        ),
    },
}
"""Limits of values beyond their types."""

ONE_OF: dict[type[Section], tuple[str, ...]] = {
    ModelSection: ("preset", "family", "factory", "huggingface"),
    DataSection: ("path", "text", "sources", "images", "factory"),
    SourceSection: ("path", "text", "images", "factory"),
    KubernetesSection: ("volume", "store"),
    ColumnsSection: ("text", "tokens", "messages", "image", "features", "user"),
}


def jobs() -> st.SearchStrategy[Job]:
    hints = get_type_hints(Job)
    return st.builds(Job, **{name: sections(hints[name]) for name in Job.model_fields})


def sections(section: type[Section]) -> st.SearchStrategy[Section]:
    hints = get_type_hints(section)
    rules = RULES.get(section, {})
    fields = {
        name: rules[name] if name in rules else values(hints[name], field)
        for name, field in section.model_fields.items()
    }
    names = ONE_OF.get(section, ())

    def one_kept(given: tuple[dict[str, Any], str]) -> Section:
        drawn, kept = given
        drawn = {name: value for name, value in drawn.items() if name not in names or name == kept}
        if names and drawn[kept] is None:
            drawn[kept] = "decoder" if kept == "family" else "x"
        if section is SlurmSection and drawn["prefer"] is not None:
            drawn["constraint"] = None  # `prefer` must hold it
        if section is SourceSection:
            drawn = source_keys(drawn, kept)
        if section is ColumnsSection:
            drawn[kept] = drawn[kept] or ([] if kept == "features" else "x")
            drawn["target"] = "y" if kept in ("image", "features") else None
            drawn["target_type"] = drawn["target_type"] if drawn.get("features") else None
            if kept != "user":
                drawn |= {"item": None, "rating": None, "time": None, "sparse": [], "dense": []}
        if section in (DataSection, SourceSection):
            columns, has_entries = drawn["columns"], kept in ("path", "text", "images") and drawn[kept]
            if kept == "sources" or (kept != "path" and columns.kind not in (kept, None)):
                drawn["columns"] = columns = ColumnsSection()
            fitting = columns.kind if kept == "path" else kept
            drawn["kind"] = drawn["kind"] if has_entries and drawn["kind"] == fitting else None
            drawn["format"] = (drawn["format"] or None) if has_entries else None
            own = section is SourceSection and kept == "path"
            drawn |= {"class_names": []} if own else {}
        if section is DataSection and (kept not in ("text", "images") or not drawn[kept]):
            drawn["placement"] = "shared"  # only entries lie in parts
        if drawn.get("block_samples") == "file" and (kept != "images" or drawn["placement"] == "parts"):
            drawn["block_samples"] = 7  # only images in shared files are read file by file
        if "sources" in drawn:
            mixed = [source for source in drawn["sources"] if source.content != "interactions"]
            named = list({source.name: source for source in mixed}.values())
            drawn["sources"] = [source for source in named if source_kind(source) == source_kind(named[0])]
        return section(**drawn)

    return st.tuples(st.fixed_dictionaries(fields), st.sampled_from(names or ("",))).map(one_kept)


def source_kind(source: SourceSection) -> tuple[bool, bool]:
    return source.content == "images", source.content in ("factory", "table")


def source_keys(drawn: dict[str, Any], kept: str) -> dict[str, Any]:
    """Keys of a source of the kind that is kept."""
    own = {
        "images": ("class_names",),
        "factory": ("arguments",),
    }
    others = {name for kind, names in own.items() if kind != kept for name in names}
    fitting = {name: value for name, value in drawn.items() if name not in others}
    fitting[kept] = fitting[kept] or ("x" if kept == "factory" else ["x"])
    if "class_names" in fitting:
        fitting["class_names"] = list(dict.fromkeys(fitting["class_names"]))
    return fitting


def values(hint: Any, field: FieldInfo) -> st.SearchStrategy[Any]:
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [FieldInfo.from_annotation(one) for one in get_args(field.annotation)]
        if any(get_origin(kind.annotation) is Literal for kind in kinds) and type(None) not in get_args(hint):
            return st.one_of(*(values(kind.annotation, kind) for kind in kinds))
        (inner,) = (inner for inner in get_args(hint) if inner is not type(None))
        return st.one_of(st.none(), values(inner, field))
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is dict:
        return st.dictionaries(text, text if get_args(hint)[1] is str else plain, max_size=3)
    if get_origin(hint) is list:
        inner = get_args(hint)[0]
        few = max((m.min_length for m in field.metadata if isinstance(m, annotated_types.MinLen)), default=0)
        items = {str: text, int: st.integers(1, 999)}.get(inner)
        if get_origin(inner) is Literal:
            items = st.sampled_from(get_args(inner))
        return st.lists(sections(inner) if items is None else items, min_size=few, max_size=3)
    if isinstance(hint, type) and issubclass(hint, Section):
        return sections(hint)
    if hint is bool:
        return st.booleans()
    if hint is str:
        return text
    low = next((m.gt for m in field.metadata if isinstance(m, annotated_types.Gt)), None)
    least = next((m.ge for m in field.metadata if isinstance(m, annotated_types.Ge)), low)
    high = next((m.lt for m in field.metadata if isinstance(m, annotated_types.Lt)), None)
    most = next((m.le for m in field.metadata if isinstance(m, annotated_types.Le)), high)
    if hint is int:
        return st.integers(least + 1 if low is not None else least, most)
    return st.floats(
        least,
        most,
        exclude_min=low is not None,
        exclude_max=high is not None,
        allow_nan=False,
        allow_infinity=False,
    )

"""Optional dependencies: without one, an error names the package and the extra that installs it."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.registry import _registry, registry
from torch import nn

from support.data_files import one_group
from support.huggingface import FAMILIES
from wanma.checkpoint.remote.remote_storage import check_url
from wanma.cli.observe import dashboard
from wanma.cli.parser import build_parser, parse
from wanma.data.chat.template import import_jinja
from wanma.data.documents.text_files import list_documents
from wanma.data.formats.arrow_tables import Parquet
from wanma.data.formats.json_records import JsonLines
from wanma.data.images.transform import import_pillow
from wanma.data.tools.images import write_png
from wanma.engines.kubernetes.client import KubernetesClient
from wanma.engines.ray.client import RayClient
from wanma.job.errors import WanmaError
from wanma.job.file.loading import load_job
from wanma.job.plan.plan import Plan
from wanma.job.sections.model import ModelSection
from wanma.models.config.huggingface_config import read_section_config
from wanma.observe.endpoint import MetricsEndpoint
from wanma.observe.metrics.gpu import GpuSampler
from wanma.observe.sinks.tensorboard import TensorBoardSink
from wanma.observe.trackers.tracker import check_trackers
from wanma.parallel.precision.float8 import apply_float8

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def _read_yaml(folder: Path) -> None:
    (folder / "job.yaml").write_text("train: {steps: 1}\n")
    load_job(folder / "job.yaml")


def _read_transformers_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(FAMILIES["llama"]))
    read_section_config(ModelSection(huggingface=str(folder)))


def _compute_in_fp8(folder: Path) -> None:
    apply_float8([nn.Linear(16, 16)], Plan(), emulate=True)


def _scan_parquet(folder: Path) -> None:
    (folder / "a.parquet").write_bytes(b"PAR1" + bytes(20))
    Parquet().scan(one_group(folder / "a.parquet"))


def _scan_zstd(folder: Path) -> None:
    (folder / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    JsonLines().scan(one_group(folder / "a.jsonl.zst"))


def _show_dashboard(folder: Path) -> None:
    dashboard.run(parse(build_parser(), ["dashboard", "--runs", str(folder)]))


def _serve_metrics(_: Path) -> None:
    MetricsEndpoint("127.0.0.1", 0, "", list, {})


USES: dict[str, list[tuple[str, str, Callable[[Path], object]]]] = {
    "tensorboard": [("tensorboard", "tensorboard", lambda _: TensorBoardSink())],
    "gpu": [("pynvml", "nvidia-ml-py", lambda _: GpuSampler("0"))],
    "yaml": [("yaml", "pyyaml", _read_yaml)],
    "fp8": [("torchao", "torchao", _compute_in_fp8)],
    "huggingface": [
        ("transformers", "transformers", _read_transformers_config),
        ("huggingface_hub", "huggingface_hub", lambda _: list_documents(["hf://datasets/a/b"])),
    ],
    "s3": [
        ("s3fs", "s3fs", lambda _: check_url("s3://bucket/run", "checkpoint.upload")),
        ("s3fs", "s3fs", lambda _: list_documents(["s3://bucket/text"])),
    ],
    "gcs": [
        ("gcsfs", "gcsfs", lambda _: check_url("gs://bucket/run", "checkpoint.upload")),
        ("gcsfs", "gcsfs", lambda _: list_documents(["gs://bucket/text"])),
    ],
    "azure": [
        ("adlfs", "adlfs", lambda _: check_url("abfs://box/run", "checkpoint.upload")),
        ("adlfs", "adlfs", lambda _: list_documents(["abfs://box/text"])),
    ],
    "http": [("aiohttp", "aiohttp", lambda _: list_documents(["http://127.0.0.1:9/text"]))],
    "hdfs": [
        ("requests", "requests", lambda _: list_documents(["webhdfs://127.0.0.1:9/text"])),
        ("pyarrow", "pyarrow", lambda _: list_documents(["hdfs://127.0.0.1:9/text"])),
    ],
    "images": [
        ("PIL", "pillow", lambda _: import_pillow()),
        ("PIL", "pillow", lambda folder: write_png(b"", folder / "a.png")),
    ],
    "chat": [("jinja2", "jinja2", lambda _: import_jinja())],
    "prometheus": [("prometheus_client", "prometheus-client", _serve_metrics)],
    "ray": [("ray", "ray", lambda _: RayClient("auto").ask("nodes"))],
    "mlflow": [("mlflow", "mlflow-skinny", lambda _: check_trackers(["mlflow"]))],
    "wandb": [("wandb", "wandb", lambda _: check_trackers(["wandb"]))],
    "dashboard": [("uvicorn", "uvicorn", _show_dashboard)],
    "kubernetes": [("kubernetes", "kubernetes", lambda _: KubernetesClient())],
    "data": [("pyarrow", "pyarrow", _scan_parquet), ("pyarrow", "pyarrow", _scan_zstd)],
}
"""Extra -> (its module, its package, a use of it)."""
_FSSPEC_MODULES = {"aiohttp": "http", "requests": "webhdfs", "pyarrow": "arrow"}
"""Package -> module of fsspec's that needs it."""
_OF_DEVELOPERS = {"dev", "docs", "peers", "tensorflow", "jax", "hadoop", "wheel"}


@pytest.mark.parametrize(
    ("extra", "module", "package", "use"),
    [
        pytest.param(extra, *use, id=f"{extra} {number}")
        for extra, uses in USES.items()
        for number, use in enumerate(uses)
    ],
)
def test_a_missing_package_is_one_sentence_that_names_its_extra(
    extra: str,
    module: str,
    package: str,
    use: Callable[[Path], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = [name for name in sys.modules if name.startswith(f"{module}.")]
    for name in (module, *loaded):
        monkeypatch.setitem(sys.modules, name, None)
    implementation = f"fsspec.implementations.{_FSSPEC_MODULES.get(module)}"
    monkeypatch.delitem(sys.modules, implementation, raising=False)
    for protocol, kind in list(registry.items()):  # fsspec keeps what it has imported
        if kind.__module__.startswith(f"{module}.") or kind.__module__ == implementation:
            monkeypatch.delitem(_registry, protocol)
    with pytest.raises(WanmaError, match=f"the package `{package}`") as raised:
        use(tmp_path)
    assert raised.value.hint == f"pip install 'wanma[{extra}]'"
    assert "\n" not in raised.value.message


def test_every_extra_is_tried() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    assert USES.keys() == extras.keys() - _OF_DEVELOPERS


def test_the_page_of_the_installation_names_every_extra() -> None:
    page = (PROJECT.parent / "docs" / "start" / "install.md").read_text()
    _, _, section = page.partition("## Optional packages")
    cells = [line.split(" | ")[0] for line in section.partition("## Check")[0].splitlines() if "`" in line]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert named == USES.keys()

"""Versions of transformers: refusal of what one does not match, and plans completed as newer ones do."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from support.huggingface import FAMILIES, write_config
from wanma.job.errors import JobError, WanmaError
from wanma.job.sections.model import ModelSection
from wanma.models.config.huggingface_config import read_section_config
from wanma.models.huggingface import installed_transformers
from wanma.models.huggingface.installed_transformers import published_tp_plan, require_family, version_tuple


def test_a_family_that_a_version_lays_out_otherwise_is_refused_with_the_version_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installed_transformers, "VERSION", "5.3.0")
    with pytest.raises(JobError, match=r"gpt2 of transformers 5\.3\.0") as raised:
        require_family("gpt2")
    assert raised.value.hint.startswith("pip install 'transformers>=5.4'")
    require_family("llama")
    monkeypatch.setattr(installed_transformers, "VERSION", "5.10.4")
    require_family("gpt2")


def test_the_major_version_before_is_one_sentence_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"transformers": "4.57.6"}.__getitem__)
    with pytest.raises(WanmaError, match=r"transformers 5\.0 .* 4\.57\.6") as raised:
        read_section_config(ModelSection(huggingface=str(write_config(tmp_path, "llama"))))
    assert raised.value.hint.startswith("pip install --upgrade 'wanma[huggingface]'")


def test_versions_are_compared_by_number() -> None:
    assert version_tuple("5.10.4") == (5, 10) > version_tuple("5.4.0.dev0")


@pytest.mark.parametrize(
    ("family", "norms"), [("llama", set()), ("qwen3", {"self_attn.q_norm", "self_attn.k_norm"})]
)
def test_a_plan_of_the_base_model_alone_is_completed(family: str, norms: set[str]) -> None:
    model = built(family)
    everything = published_tp_plan(model)
    # As versions before 5.3 have it.
    model._tp_plan = {
        path: style
        for path, style in everything.items()
        if ".layers." in path and not path.endswith(("q_norm", "k_norm"))
    }
    assert published_tp_plan(model) == everything
    assert everything["model.embed_tokens"] == "embedding_rowwise"
    assert everything["lm_head"] in ("colwise_gather_output", "colwise_rep")
    named = {path.removeprefix("model.layers.*.") for path in everything if path.endswith("norm")}
    assert named == norms


def test_a_model_without_a_plan_gets_none() -> None:
    model = built("llama")
    model._tp_plan = {}
    assert published_tp_plan(model) == {}


def built(family: str) -> Any:
    config = CONFIG_MAPPING[family].from_dict(FAMILIES[family])
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_its_import_prints_no_warnings_of_libraries_that_it_tries(tmp_path: Path) -> None:
    package = tmp_path / "transformers"
    package.mkdir()
    (package / "__init__.py").write_text("import logging, warnings\nwarnings.warn('old')\n")
    (package / "modeling_utils.py").write_text("import logging\nlogging.getLogger('ao').warning('no')\n")
    check = "import logging, wanma.models.huggingface; logging.getLogger('wanma').warning('heard')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", check], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == "heard\n"

"""Console of a submitted run, from its records."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from wanma.api.engines.attachment import OutputFollower
from wanma.engines.engine_record import EngineRecord


def test_the_output_of_a_script_that_another_host_resumed_is_shown_from_its_beginning(tmp_path: Path) -> None:
    output, shown = tmp_path / "output-0.log", list[str]()
    engine: Any = SimpleNamespace(log_files=lambda _: [output])
    follower = OutputFollower(EngineRecord("ssh", {}, {"run_directory": str(tmp_path)}, 0.0), engine)
    texts = ["an earlier start\n", "an earlier start\nits end\n", "newest\npart", "newest\npart of a line\n"]
    for text in texts:
        output.write_text(text)
        shown += [event["text"] for event in follower.read()]
    assert shown == ["an earlier start", "its end", "newest", "part of a line"]

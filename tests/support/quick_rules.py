"""`wanma`, whose alert rules have a twentieth of their times: python -m support.quick_rules train …"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

NAME = "wanma.observe.alerts.rules"
FASTER = 20.0


def quicken() -> None:
    """Load the rules with other lengths of a minute and an hour, and read metrics as much more often."""
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.origin is not None
    before = "MINUTE, HOUR = 60.0, 3600.0"
    source = Path(spec.origin).read_text()
    assert before in source
    module = ModuleType(NAME)
    sys.modules[NAME] = module
    after = f"MINUTE, HOUR = {60 / FASTER}, {3600 / FASTER}"
    exec(compile(source.replace(before, after), spec.origin, "exec"), module.__dict__)
    from wanma.elastic.supervisor import usage_recorder

    usage_recorder.SAMPLE_INTERVAL_SECONDS /= FASTER  # type: ignore[misc]


if __name__ == "__main__":
    quicken()
    from wanma.cli.main import main

    sys.exit(main(sys.argv[1:]))

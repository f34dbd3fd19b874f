"""Rule from the workers' numbers to one update."""

from __future__ import annotations

import pytest

from wanma.job.errors import WanmaError
from wanma.parameter_server.update_rule import UpdateRule


def test_a_step_without_a_target_is_told_as_such_or_skipped() -> None:
    headers = [{"worker": 1, "loss_sum": 0.0, "target_count": 0.0, "loss_multiplier": 1.0}]
    with pytest.raises(WanmaError, match=r"step 3: no sample .*target") as raised:
        UpdateRule(1.0, stops_if_not_finite=True).decide(3, headers, 0.0)
    assert "train.non_finite" in raised.value.hint
    assert UpdateRule(1.0, stops_if_not_finite=False).decide(3, headers, 0.0).is_skipped

"""What `lockstep prove` makes of recordings, without a training."""

from lockstep.script import findings
from tests.script.test_gate import recorded


def test_a_first_gradient_that_is_summed_is_told_however_rounding_grows_later():
    alone, floor = (recorded(rows=["1", "2"] * 2, **more) for more in ({}, {"last_scale": 1.3}))
    verdict = findings.against_one(recorded(ranks=2, scale=2.0), alone, floor)
    assert verdict.floor > 0.2
    assert "summed" in {finding.kind for finding in verdict.findings}
    untold = findings.against_one(recorded(ranks=2, last_scale=1.2), alone, floor)
    assert untold.floor > 0.2
    assert "summed" not in {finding.kind for finding in untold.findings}
    assert "two runs as one process differ by" in untold.findings[-1].says

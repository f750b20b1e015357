"""The page of `lockstep prove`."""

from lockstep.script import findings, page

STEP = {"step": 1, "samples": [16, 15], "loss": None, "loss_alone": 0.5, "gradient": None, "rate": 0.1}
PARAMETER = {"name": "layer.<b>", "ratio": None, "distance": 0.0, "floor": 0.0, "differs": False}


def verdict(answer: str, *found: findings.Finding) -> findings.Verdict:
    table = [STEP | {"distance": 0.0, "floor": 0.0}]
    return findings.Verdict(answer, "a reason", list(found), 0.0, 0.0, table, 1, [PARAMETER])


def test_the_page_has_all_that_was_found_in_both_languages_and_runs_nothing_of_the_script_s():
    finding = findings.Finding("odd", findings.CAUTION, "it has <script>alert(1)</script>", "<i>", "train.py:3", 2)
    written = page.page(verdict(findings.DIFFERENT, finding), "python '<x>.py'", gpus=2)
    assert "it has &lt;script&gt;alert(1)&lt;/script&gt;" in written
    assert "train.py:3" in written
    assert "layer.&lt;b&gt;" in written
    assert "16 + 15" in written
    assert "不是应有的那个模型" in written
    assert "know times, memory of kernels" in written


def test_every_answer_and_level_has_its_words():
    for answer in (findings.EQUAL, findings.DIFFERENT, findings.UNTOLD):
        for level in (findings.DIFFERENT, findings.CAUTION, findings.NOTE):
            assert level in page.page(verdict(answer, findings.Finding("kind", level, f"says {level}")), "run", gpus=0)
    assert "Nothing." in page.page(findings.Verdict(findings.UNTOLD, "it failed", []), "run", gpus=0)

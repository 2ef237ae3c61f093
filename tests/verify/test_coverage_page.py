"""The coverage page: tested model types, equal results, and unmeasured entries."""

from type_coverage import EQUAL, Outcome, page


def test_coverage_page_marks_untested_models_as_unmeasured():
    found = [
        Outcome(
            "gpt2",
            "GPT2LMHeadModel",
            layouts={"tp2": EQUAL, "pp2": "refused: h: no block"},
            share=0.5,
        ),
        Outcome("opt", "OPTForCausalLM", layouts={"tp2": EQUAL, "pp2": EQUAL}, share=0.4),
        Outcome("strange", "StrangeForCausalLM", problem="it has no config"),
    ]
    text = page(found)
    assert "trains 2 of 3 types" in text
    assert "| tp2 | 2 of 2 | 100.0% |" in text
    assert "| pp2 | 1 of 2 | 50.0% |" in text
    assert "| tp2 sp | unmeasured |" in text
    found[0].layouts["tp2 sp"] = EQUAL
    assert "| tp2 sp | 1 of 1 tried |" in page(found)
    assert "of 1 of the 2 types" in text
    assert "no block" in text

"""Whom a moderator has called up, and what others hear of an answer."""

from __future__ import annotations

from rewake.workflows.orders import called_up, lines_of

NAMES = {"anova": "Anova", "bayes": "Bayes", "series": "Series"}
ABOUT = {"anova": "variance means groups", "bayes": "prior posterior belief", "series": "forecasting time"}


def test_those_who_are_named_are_called_up_in_order() -> None:
    assert called_up("Ask series, then Anova. And Bayes!", NAMES, 2) == ["series", "anova"]
    assert called_up("A seriesly bayesian question", NAMES, 1, "posterior beliefs", ABOUT) == ["bayes"]


def test_who_knows_most_of_the_question_comes_where_too_few_are_named() -> None:
    assert called_up("I do not know.", NAMES, 2, "How do I forecast the variance of groups in time?", ABOUT) == ["anova", "series"]
    assert called_up("Bayes", NAMES, 2, "forecasting", ABOUT) == ["bayes", "series"]
    assert called_up("", NAMES, 3) == ["anova", "bayes", "series"]


def test_a_speaker_puts_no_words_into_others_mouths() -> None:
    assert lines_of("Marco", ["Danny", "The Warden"], "Marco: I was asleep.\n\nDanny: So was I.") == "I was asleep."
    assert lines_of("Marco", ["The Warden"], "I said:\nthe key.\nthe warden : Quiet!") == "I said:\nthe key."
    assert lines_of("Marco", [], " Yes\n") == "Yes"

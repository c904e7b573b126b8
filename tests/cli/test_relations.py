"""`dcl run relations`: its smoke form and page, its estimate, and one line for invalid arguments."""

import json
import re

import pytest

QUICK = (
    "--smoke", "--data", "excerpt", "--device", "cpu", "--models", "narrow,low-rank,summed,A2,power-0", "--set",
    "sizes=100", "--set", "rates=0.05", "--out", "r",
)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "tasks=summ"), "there is no task 'summ'; did you mean sum?"),
        (("--set", "sizes=6000,70000"), "sizes has 70,000, more than the 60,000 images of the set"),
        (("--models", "DCL-A2"), "give --models narrow,low-rank,summed,A2"),
        (("--models", "A2,lowrank"), "there is no model 'lowrank'; did you mean low-rank?"),
        (("--seeds", "1000000000"), "seeds must be at least 1 and at most 1,000, not 1,000,000,000"),
    ],
)
def test_invalid_arguments_are_one_line_with_the_remedy(dcl, folder, words, said):
    output = " ".join(dcl("run", "relations", *words, code=2).split())
    assert said in output
    assert "Traceback" not in output
    assert not (folder / "runs").exists()


def test_the_estimate_counts_trainings_of_equal_length(dcl):
    output = " ".join(dcl("run", "relations", "--dry-run", "--device", "cpu", "--data", "excerpt").split())
    trainings = 3 * 3 * 7 * (8 * 2 + 20)
    assert (
        f"number, order, sum with 6,000, 20,000, 60,000 images, 7 columns; {trainings:,} trainings of equal" in output
    )
    assert f"{trainings * 60_000 * 24:,} to train on" in output
    assert "Nothing was run or written" in output


def test_the_smoke_form_leaves_a_result_a_figure_and_a_page(dcl, folder):
    output = dcl("run", "relations", *QUICK)
    assert "Relations of two digits (a trial, not the protocol)" in output
    said = " ".join(output.split())
    assert "where the label is a relation of the digits" in said
    assert "1. Relations. DCL-A2 errs less than every control" in said
    assert {"relations.json", "relations.svg"} <= {path.name for path in (folder / "r").iterdir()}
    dcl("report", "r", "-o", "page.html")
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "<title>Relations of two digits (a trial, not the protocol)</title>" in page
    for head in (
        "Hypotheses",
        "Errors",
        "Images needed for the error that DCL-A2 reaches",
        "Where the exponent of the power mean goes",
    ):
        assert head in page
    assert page.count("<svg") >= 2
    assert (
        len(re.findall(r"<th scope=.row.>sum mod 10</th>", page)) == 5 + 1 + 1 + 5 + 1
    )  # the last: a median, since networks fail
    # The file alone gives the same page, without the settings that only the folder has.
    dcl("report", "r/relations.json", "-o", "file.html")
    alone = (folder / "file.html").read_text(encoding="utf-8")
    assert alone.partition("<h2>Environment")[0].partition("<h1>")[2] in page
    assert "Last start" in alone
    assert "The recipe" not in alone
    stored = json.loads((folder / "r/relations.json").read_text())
    (folder / "r/other.json").write_text(json.dumps({**stored, "environment": None}))
    assert "other.json lacks environment" in dcl("report", "r/other.json", code=1)
    (folder / "r/other.json").write_text(json.dumps({**stored, "cells": [{"task": "sum"}]}))
    assert "other.json cannot be drawn" in dcl("report", "r/other.json", code=1)


def test_a_run_that_has_not_ended_is_reported_with_the_cells_that_are_done(dcl, folder):
    dcl("run", "relations", *QUICK, "--seeds", "2")
    for file in ("relations.json", "result.txt"):  # which the end of a run writes
        (folder / "r" / file).unlink()
    outcomes = folder / "r/outcomes.jsonl"
    lines = outcomes.read_text().splitlines(keepends=True)
    fleets = 5  # of trials, and then as many of seeds
    assert len(lines) == 2 * fleets
    for done, answer in (
        (9, "errs significantly less than every control"),
        (7, "No task has DCL-A2 and all of its controls"),
    ):
        outcomes.write_text("".join(lines[:done]))
        dcl("report", "r", "-o", "so-far.html")
        page = (folder / "so-far.html").read_text()
        trainings = fleets + (done - fleets) * 2  # a trial of each column, and two seeds of those that are done
        assert f"Not at its end: {trainings} of {3 * fleets} trainings." in page
        assert answer in page
    outcomes.write_text("".join(lines[:fleets]))
    assert "has no results yet" in dcl("report", "r", code=2)

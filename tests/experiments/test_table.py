"""The file of the table: read, checked, written again; and the table as text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_dcl.experiments import as_rich, as_text, findings, load, save, verdict
from torch_dcl.experiments.paper_numbers import COLUMNS, SETS, TABLE1
from torch_dcl.experiments.table import CONTROLS, Cell, Table, TableError, parse, run_facts
from torch_dcl.fleet.run_folder import RunFolder
from torch_dcl.report import as_markdown


@pytest.fixture
def table(content):
    return parse(content)


def test_a_table_is_read_as_it_was_written(content, tmp_path):
    path = tmp_path / "table1.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    table = load(path)
    assert table.cell("MNIST-II-01", "A2").errors == (1.4, 1.5, 1.63)
    assert table.cell("MNIST-II-01", "B3D") is None
    assert table.sets == ("MNIST-II-01", "MNIST-III-10")
    assert table.columns == (*COLUMNS, "low-rank")
    assert table.protocol["batch"] == "100"
    save(table, tmp_path / "again.json")
    assert load(tmp_path / "again.json") == table


names = st.text(max_size=12)
some_cells = st.lists(
    st.builds(
        lambda name, column, runs, weights, fitted: Cell(
            name, column, tuple(runs.values()), tuple(runs), weights, stopped=tuple(list(runs)[:1]), fitted=fitted
        ),
        st.sampled_from(SETS),
        st.sampled_from((*COLUMNS, *CONTROLS)),
        st.dictionaries(st.integers(0, 99), st.floats(0, 100), min_size=1, max_size=4),
        st.integers(1, 10**8),
        st.booleans(),
    ),
    max_size=8,
    unique_by=lambda cell: (cell.set, cell.column),
)


@settings(max_examples=20)
@given(some_cells, names, st.dictionaries(names, names, max_size=3))
def test_any_table_survives_the_file_and_can_be_printed(tmp_path_factory, cells, title, protocol):
    table = Table(title, tuple(cells), protocol, deviations=(title,))
    path = tmp_path_factory.mktemp("table") / "t.json"
    save(table, path)
    assert load(path) == table
    assert verdict(table)
    assert as_text(table)
    assert as_markdown(table)


def spoil(**changes):
    def change(content):
        content["cells"][1].update(changes)

    return change


def without(key):
    return lambda content: content["cells"][1].pop(key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("cells"), "cells is missing; give a list of cells"),
        (lambda c: c.update(cells={}), "cells is {}; give a list of cells"),
        (lambda c: c.update(title=3), "title is 3; give text"),
        (lambda c: c["cells"].append(7), r"cells\[12\]: an object with names is needed, not 7"),
        (lambda c: c["cells"].append(c["cells"][0]), r"cells\[12\] is a second baseline on MNIST-II-01"),
        (lambda c: c.update(minutes={"data": "two"}), "minutes is {'data': 'two'}; give phases and numbers"),
        (lambda c: c.update(deviations="none"), "deviations is 'none'; give a list of texts"),
        (spoil(set="MNIST-II-1"), "set 'MNIST-II-1' is unknown; did you mean 'MNIST-II-01'"),
        (spoil(column="lowrank"), "column 'lowrank' is unknown; did you mean 'low-rank'"),
        (spoil(errors=[1.0]), r"\(MNIST-II-01, A2\): 1 errors and 3 seeds"),
        (spoil(errors=[]), r"errors is \[\]; give at least one number"),
        (spoil(errors=[1.0, 2.0, float("nan")]), "each from 0 to 100"),
        (spoil(errors=[1.0, 2.0, 101]), "each from 0 to 100"),
        (spoil(errors="1.0"), "each from 0 to 100"),
        (spoil(seeds=[0, 0, 1]), r"seeds \[0, 0, 1\] names one twice"),
        (spoil(seeds=[0, 1, 2.5]), "a list of whole numbers"),
        (spoil(weights=0), "weights is 0; give a whole number above 0"),
        (spoil(weights=True), "weights is True"),
        (without("weights"), "weights is missing"),
        (spoil(train_loss=[0.1]), r"train_loss is \[0.1\]; give one number per seed \(3\)"),
        (spoil(test_loss="low"), "test_loss is 'low'"),
        (spoil(paper=1.75), "paper is 1.75 with 0.03, but the paper has"),
        (spoil(paper="1.76"), "paper is '1.76'; give a number or null"),
        (spoil(stopped=[None]), "stopped is"),
        (spoil(fitted="yes"), "fitted is 'yes'; give true or false"),
    ],
)
def test_a_malformed_table_is_refused_with_place_value_and_remedy(content, change, message):
    change(content)
    with pytest.raises(TableError, match=message) as caught:
        parse(content, "table1.json")
    assert str(caught.value).startswith("table1.json")


def test_a_control_has_no_number_in_the_paper(content):
    content["cells"][5]["paper"] = 1.7
    with pytest.raises(TableError, match="but the paper has no such column"):
        parse(content)


def test_files_that_are_no_tables(tmp_path):
    path = tmp_path / "t.json"
    with pytest.raises(FileNotFoundError):
        load(path)
    for text in ("{", "\x00", '"cells"', "[]"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(TableError, match=r"t\.json"):
            load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TableError, match="is not JSON"):
        load(path)


def test_a_table_that_could_not_be_read_is_not_written(tmp_path):
    bad = Table("t", (Cell("MNIST-II-01", "A2", (1.0,), (1, 2), 5),))
    with pytest.raises(TableError, match="1 errors and 2 seeds"):
        save(bad, tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


def test_losses_are_taken_from_the_seeds_that_all_columns_have(content):
    content["cells"][7].update(seeds=[2, 5, 1])
    table = parse(content)
    losses = table.losses("MNIST-III-10")
    assert losses["baseline"].train == [0.11, 0.12]
    assert losses["A2"].train == [0.12, 0.1]
    assert table.losses("MNIST-II-02") == {}


def test_the_best_is_bold_with_its_equals(content):
    content["cells"][1]["errors"] = [1.3, 1.4, 1.529]
    assert parse(content).best("MNIST-II-01") == ("A2", "A3S")


def test_the_terminal_shows_both_numbers_and_what_is_absent(table):
    text = as_text(table)
    row = next(line for line in text.splitlines() if line.strip().startswith("II-01"))
    assert "2.01(12)*" in row
    assert "1.51(12)▾" in row
    assert "2.41(12)▴" in row
    assert "not run" in row
    below = text.splitlines()[text.splitlines().index(row) + 1]
    assert "1.96(03)" in below
    assert row.index("2.01(12)") == below.index("1.96(03)")
    assert "fitted to the paper's number" in text
    assert "\x1b[1m" in as_text(table, styled=True)
    assert as_rich(table).row_count == 15


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_no_number_is_cut_off_in_a_narrow_terminal(table, width):
    text = as_text(table, width=width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for name in table.sets:
        for row in TABLE1[name]:
            cell = table.cell(name, row)
            assert cell is None or (cell.ours in text and cell.theirs in text)


def test_markdown_has_a_row_a_set_and_leaves_names_alone(table):
    text = as_markdown(table)
    assert text.startswith("# Table 1 &#60;made up&#62; & small\n")
    rows = [line for line in text.splitlines() if line.startswith("| MNIST-")]
    assert len(rows) == 15
    assert {line.count("|") for line in rows} == {11}
    assert "**1.41(12)**▾<br>1.73(04)" in rows[0]
    assert r"since figure 2 \| is a picture" in text
    assert table.command in text


def test_the_verdict_counts_wins_losses_and_reservations(table):
    text = " ".join(verdict(table))
    errors = {(cell.set, cell.column): sum(cell.errors) / len(cell.errors) for cell in table.cells}
    for column, reference, named, lower in (
        ("A2", "baseline", "the baseline", 2), ("B2", "baseline", "the baseline", 0), ("A2", "low-rank", "low-rank", 2),
    ):  # fmt: skip
        two, three = (errors[name, column] - errors[name, reference] for name in table.sets)
        shown = f"{column} minus {named}: {two:+.2f} points on 1 set of two digits, {three:+.2f} points on 1 set of "
        assert shown.replace("-0", "−0").replace("-1", "−1") + f"three digits; lower on {lower} of 2" in text
    assert "fitted to the paper's number in the column baseline" in text
    assert "cells were not run" in text


def test_a_diverged_run_is_told(content):
    content["cells"][3].update(stopped=[2], errors=[1.5, 1.6, 99.9])
    table = parse(content)
    assert "1 run diverged, in A3D." in verdict(table)
    assert "†" in as_text(table)


def test_a_claim_without_numbers_in_the_paper_stands_alone(table):
    alone = [ours.claim for theirs, ours in findings(table) if theirs is None]
    assert len(alone) == 2
    both = [(theirs, ours) for theirs, ours in findings(table) if theirs]
    assert all(theirs.claim == ours.claim for theirs, ours in both)


def test_a_run_that_was_resumed_elsewhere_has_the_versions_and_machines_of_all_starts(tmp_path):
    first = {"versions": {"torch": "2.11", "numpy": "2"}, "gpu": "A100", "cpus": 8, "command": "dcl run table1"}
    second = {"versions": {"torch": "2.15", "numpy": "2"}, "gpu": None, "cpus": 2, "command": "dcl run x --resume"}
    folder = RunFolder(tmp_path, {})
    folder.append("environment", first, second)
    assert run_facts(folder) == {
        "hardware": "A100; CPU, 2 cores", "versions": {"torch": "2.11; 2.15", "numpy": "2"},
        "command": "dcl run table1",
    }  # fmt: skip

"""The claims of the paper's section 4.1, each as a function that judges a table.

A claim is judged on the sets that a table has, and its evidence says how many it lacks. The verdict goes by mean
errors, as the paper's own reading does. The evidence has the mean difference over the sets ± its standard error over
them; where single cells are compared seed by seed, the difference with its 95 % interval.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch_dcl.experiments.paper_numbers import DCL_COLUMNS, TABLE1, THREE_DIGITS, TWO_DIGITS
from torch_dcl.experiments.stats import (
    Comparison,
    Errors,
    ErrorTable,
    Losses,
    centre,
    compare,
    difference,
    is_complete,
    mean,
    mean_std_n,
    signed,
)

if TYPE_CHECKING:
    from torch_dcl.experiments.table import Table

__all__ = [
    "Finding", "Verdict", "best_is_near_oracle", "branches_complement", "difficulty_rises", "fewer_weights", "findings",
    "first_layer_improves", "further_findings", "judge", "large_banks_help_little", "loss_gap_shrinks",
    "more_filters_help", "oracle_beats_baseline", "oracle_is_lowest", "second_layer_is_unstable",
    "stochastic_beats_deterministic", "three_branches_beat_two", "three_branches_matter_less_on_two_digits",
]  # fmt: skip

Verdict: TypeAlias = Literal["holds", "does not hold", "not decidable"]

FIRST = ("A2", "A3S", "A3D")
SECOND = ("B2", "B3S", "B3D")


@dataclass(frozen=True)
class Finding:
    """What a table says about a claim.

    Attributes:
        claim: The claim, in one sentence.
        section: Where the paper makes it.
        criterion: What has to be true for it to hold.
        verdict: ``holds``, ``does not hold`` or ``not decidable``.
        evidence: The counts behind the verdict, in one sentence.
    """

    claim: str
    section: str
    criterion: str
    verdict: Verdict
    evidence: str


def judge(table: ErrorTable) -> tuple[Finding, ...]:
    """Every claim that a table of errors can answer, in the paper's order."""
    return (
        difficulty_rises(table),
        oracle_beats_baseline(table),
        oracle_is_lowest(table),
        first_layer_improves(table),
        best_is_near_oracle(table),
        second_layer_is_unstable(table),
        *(three_branches_beat_two(table, column) for column in ("A3S", "A3D", "B3S", "B3D")),
        *(three_branches_matter_less_on_two_digits(table, column) for column in ("A3S", "A3D")),
        *(stochastic_beats_deterministic(table, layer) for layer in "AB"),
    )


Pair = tuple[Finding | None, Finding]


def findings(table: "Table", further: Sequence[Finding] = ()) -> list[Pair]:
    """Every claim with what the paper's own table says of it, and what this one says.

    The first is None where the paper prints no numbers to judge by. ``further`` are findings about this table's
    networks from other data, such as `claims.large_banks_help_little`.
    """
    pairs: list[Pair] = list(zip(judge(TABLE1), judge(table.errors()), strict=True))
    alone = [fewer_weights(table.weights()), loss_gap_shrinks(table.losses("MNIST-III-10")), *further]
    return pairs + [(None, finding) for finding in alone]


def summary(table: "Table", further: Sequence[Finding] = ()) -> str:
    """How many claims hold, here and in the paper's own table; ``further`` as in `findings`."""
    pairs = findings(table, further)
    here = Counter(ours.verdict for _, ours in pairs)
    paper = Counter(theirs.verdict for theirs, _ in pairs if theirs)
    return (
        f"Section 4.1 of the paper, split into {len(pairs)} claims: {_are(here['holds'], 'holds', 'hold')} here, "
        f"{_are(here['does not hold'], 'does', 'do')} not, and {here['not decidable']} cannot be decided. "
        f"By the paper's own table, {paper['holds']} of {paper.total()} hold."
    )


def _are(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def difficulty_rises(table: ErrorTable) -> Finding:
    """A set with a larger number is more difficult."""
    rises, steps = 0, 0
    for group in (TWO_DIGITS, THREE_DIGITS):
        errors = [centre(table[name]["baseline"]) for name in group if "baseline" in table.get(name, {})]
        rises += sum(b > a for a, b in itertools.pairwise(errors))
        steps += max(len(errors) - 1, 0)
    return Finding(
        "A set with a larger number is more difficult.",
        "4.1.1",
        "the baseline's mean error rises from each set to the next, separately for two and for three digits",
        _decide(rises == steps, decidable=steps > 0),
        f"The baseline's error rises at {rises} of {steps} steps.",
    )


def oracle_beats_baseline(table: ErrorTable) -> Finding:
    """The oracle is much more accurate than the baseline."""
    return _everywhere(
        "The oracle is more accurate than the baseline.",
        "4.1.2",
        "lower mean error on every set",
        [compare(table, "oracle", "baseline")],
    )


def oracle_is_lowest(table: ErrorTable) -> Finding:
    """The oracle bounds the accuracy from above: no other column has a lower error."""
    comparisons = [compare(table, column, "oracle") for column in ("baseline", *DCL_COLUMNS)]
    lower = [f"{c.column} on {name}" for c in comparisons for name in c.better]
    equal = [f"{c.column} on {name}" for c in comparisons for name in c.equal]
    cells = sum(c.compared for c in comparisons)
    evidence = f"Of {cells} errors beside an oracle's, {len(lower)} are lower{_naming(lower)}"
    evidence += f" and {len(equal)} equal{_naming(equal)}."
    return Finding(
        "The oracle's error is the lowest everywhere.",
        "4.1.2",
        "no baseline and no DCL model has a lower mean error than the oracle on any set; equal is allowed",
        _decide(not lower, decidable=bool(lower) or all(c.compared for c in comparisons)),
        evidence,
    )


def first_layer_improves(table: ErrorTable) -> Finding:
    """DCL on the first fully-connected layer always improves on the baseline."""
    return _everywhere(
        "DCL on the first fully-connected layer (A2, A3S, A3D) improves on the baseline on every set.",
        "4.1.2, 4.1.3",
        "lower mean error of all three models on every set",
        [compare(table, column, "baseline") for column in FIRST],
    )


def best_is_near_oracle(table: ErrorTable) -> Finding:
    """On MNIST-III-05 the best DCL model is comparable to the oracle: at most a quarter of the gap remains."""
    name = "MNIST-III-05"
    row = {column: centre(errors) for column, errors in table.get(name, {}).items()}
    models = [column for column in DCL_COLUMNS if column in row]
    claim = f"On {name} the best DCL model is comparable to the oracle."
    criterion = (
        "at most 25 % of the gap between baseline and oracle remains; "
        "the best of the models is chosen by its test error, as in the paper"
    )
    if not models or "oracle" not in row or "baseline" not in row:
        evidence = f"{name} lacks the baseline, the oracle or every DCL model."
        return Finding(claim, "4.1.2", criterion, "not decidable", evidence)
    best = min(models, key=row.__getitem__)
    left, gap = row[best] - row["oracle"], row["baseline"] - row["oracle"]
    evidence = f"{best} is best of {len(models)} with {row[best]:.2f}; oracle {row['oracle']:.2f}, "
    evidence += f"baseline {row['baseline']:.2f}"
    if gap > 0:
        evidence += f": {100 * left / gap:.0f} % of the gap remains."
        return Finding(claim, "4.1.2", criterion, _decide(left <= gap / 4), evidence)
    evidence += ", which is no gap to measure by."
    return Finding(claim, "4.1.2", criterion, _decide(True, decidable=left <= 0), evidence)


def second_layer_is_unstable(table: ErrorTable) -> Finding:
    """DCL on the second fully-connected layer is better on some sets and worse on others."""
    comparisons = [compare(table, column, "baseline") for column in SECOND]
    better = sum(len(c.beyond) for c in comparisons)
    worse = sum(len(compare(table, "baseline", column).beyond) for column in SECOND)
    cells = sum(c.compared for c in comparisons)
    evidence = f"Of {cells} errors of B2, B3S and B3D, {better} are lower than the baseline's by more than the larger "
    evidence += f"deviation and {worse} higher by more"
    return Finding(
        "DCL on the second fully-connected layer is unstable: better on some sets, worse than the baseline on others.",
        "4.1.3",
        "at least one error lower and one higher than the baseline's, each by more than the larger standard deviation",
        _decide(better > 0 and worse > 0, decidable=cells > 0),
        evidence + ".",
    )


def three_branches_beat_two(table: ErrorTable, column: str) -> Finding:
    """A model with three branches (A3S, A3D, B3S or B3D) is better than that with two on all three-digit sets."""
    return _everywhere(
        f"On all three-digit sets three branches are better than two: {column} against {column[0]}2.",
        "4.1.3",
        "lower mean error on every three-digit set",
        [compare(table, column, f"{column[0]}2", THREE_DIGITS)],
    )


def three_branches_matter_less_on_two_digits(table: ErrorTable, column: str) -> Finding:
    """The advantage of a model with three branches over that with two is much smaller on two digits."""
    two = f"{column[0]}2"
    gains = []
    for group in (TWO_DIGITS, THREE_DIGITS):
        rows = [table[name] for name in group if {two, column} <= table.get(name, {}).keys()]
        pairs = [(centre(row[two]), centre(row[column])) for row in rows]
        gains.append([100 * (a - b) / a for a, b in pairs if a > 0])
    claim = f"The advantage of three branches over two is much smaller on two digits: {column} against {two}."
    criterion = "there is an advantage on three digits, and the mean relative one on two digits is less than half of it"
    if not all(gains):
        evidence = f"{column} and {two} are not there for both kinds of sets."
        return Finding(claim, "4.1.3", criterion, "not decidable", evidence)
    small, large = map(mean, gains)
    evidence = f"{column} changes {two}'s error by {signed(-large, 1)} % on {len(gains[1])} three-digit sets"
    evidence += f" and by {signed(-small, 1)} % on {len(gains[0])} two-digit sets, on average."
    return Finding(claim, "4.1.3", criterion, _decide(large > 0 and small < large / 2), evidence)


def stochastic_beats_deterministic(table: ErrorTable, layer: str) -> Finding:
    """The stochastic strategy is often better than the deterministic one, in layer A (the first) or B."""
    comparison = compare(table, f"{layer}3S", f"{layer}3D")
    return Finding(
        f"The stochastic strategy is often better than the deterministic one: {layer}3S against {layer}3D.",
        "4.1.3",
        "lower mean error on more than half of the sets",
        _decide(2 * len(comparison.better) > comparison.compared, decidable=comparison.compared > 0),
        f"{comparison}.",
    )


def fewer_weights(weights: Mapping[str, Mapping[str, int]]) -> Finding:
    """The DCL models have fewer weights than the baseline; ``weights`` are by set and column."""
    parts, more = [], 0
    for column in DCL_COLUMNS:
        rows = [row for row in weights.values() if column in row and "baseline" in row]
        larger = sum(row[column] >= row["baseline"] for row in rows)
        more += larger
        if rows:
            parts.append(f"{column} on {len(rows) - larger} of {len(rows)} sets")
    return Finding(
        "DCL reduces the number of weights.",
        "4.1.3",
        "fewer weights than the baseline in every DCL model on every set",
        _decide(not more, decidable=bool(parts)),
        f"Fewer weights than the baseline: {', '.join(parts)}." if parts else "No weights are given.",
    )


def loss_gap_shrinks(losses: Mapping[str, Losses], name: str = "MNIST-III-10") -> Finding:
    """DCL alleviates over-fitting: the gap between training and test loss is smaller; losses by column, on a set."""
    models = [column for column in FIRST if column in losses]
    claim = f"On {name} DCL largely alleviates over-fitting."
    criterion = "the mean gap between test and training loss is smaller than the baseline's in A2, A3S and A3D"
    if not models or "baseline" not in losses:
        evidence = "The losses of the baseline, or of every DCL model, are absent."
        return Finding(claim, "4.1.3", criterion, "not decidable", evidence)
    reference = losses["baseline"].gaps
    smaller, parts = [], []
    for column in models:
        gaps = losses[column].gaps
        smaller.append(mean(gaps) < mean(reference))
        parts.append(f"{column} {_minus(mean(gaps))}{_apart(gaps, reference)}")
    evidence = f"Test loss minus training loss: baseline {_minus(mean(reference))}, {', '.join(parts)}."
    decidable = len(models) == len(FIRST) or not all(smaller)
    return Finding(claim, "4.1.3", criterion, _decide(all(smaller), decidable=decidable), evidence)


def more_filters_help(points: Sequence[tuple[int, Sequence[float]]]) -> Finding:
    """The accuracy goes up with the number of filters in a branch; ``points`` are filters and errors by seed."""
    ordered = sorted(points, key=lambda point: point[0])
    errors = [mean(runs) for _, runs in ordered]
    falls = sum(b < a for a, b in itertools.pairwise(errors))
    evidence = "Fewer than two numbers of filters are given."
    if len(errors) > 1:
        (few, first), (many, last) = ordered[0], ordered[-1]
        evidence = f"The error goes from {errors[0]:.2f} with {few} filters to {errors[-1]:.2f} with {many}"
        evidence += f"{_apart(last, first)}, and falls at {falls} of {len(errors) - 1} steps."
    return Finding(
        "The accuracy goes up with the number of filters in a branch.",
        "4.1.3",
        "lower mean error with the most filters than with the fewest, and at more than half of the steps between",
        _decide(len(errors) > 1 and errors[-1] < errors[0] and 2 * falls > len(errors) - 1, decidable=len(errors) > 1),
        evidence,
    )


def large_banks_help_little(points: Sequence[tuple[int, Sequence[float]]]) -> Finding:
    """A large filter bank does not help much; ``points`` are filters and errors by seed.

    A bank is large from the middle number of the list on.
    """
    ordered = sorted(points, key=lambda point: point[0])
    claim = "A large filter bank does not help much."
    criterion = "from the middle to the most filters the error falls by at most half of what it falls up to the middle"
    if len(ordered) < 3:
        evidence = "There are no three numbers of filters, one of them between the others."
        return Finding(claim, "4.1.3", criterion, "not decidable", evidence)
    low, mid, high = ordered[0], ordered[len(ordered) // 2], ordered[-1]
    before, after = mean(low[1]) - mean(mid[1]), mean(mid[1]) - mean(high[1])
    evidence = f"From {low[0]} to {mid[0]} filters the error changes by {signed(-before)}{_apart(mid[1], low[1])}, "
    evidence += f"from {mid[0]} to {high[0]} by {signed(-after)}{_apart(high[1], mid[1])}."
    return Finding(claim, "4.1.3", criterion, _decide(after <= max(before / 2, 0.0)), evidence)


def further_findings(parts: Mapping[str, Any], *, with_curves: bool = True) -> list[Finding]:
    """What the data of figures says of the claims that a table cannot answer, or may have answered by its losses."""
    findings = []
    if (filters := parts.get("filters")) is not None:
        points = [(point["filters"], point["errors"]) for point in filters["points"]]
        findings += [more_filters_help(points), large_banks_help_little(points)]
    curves = parts.get("curves") if with_curves else None
    if curves is not None:
        runs = [run for kinds in curves["series"].values() for of in kinds.values() for run in of]
        if all(map(is_complete, runs)):
            losses = {
                name: Losses([run[-1] for run in kinds["train_loss"]], [run[-1] for run in kinds["test_loss"]])
                for name, kinds in curves["series"].items()
            }
            findings.append(loss_gap_shrinks(losses, curves["set"]))
    if (counted := parts.get("shares")) is not None:
        findings.append(branches_complement(counted["columns"]))
    return findings


def branches_complement(columns: Mapping[str, Sequence[Mapping[str, float]]]) -> Finding:
    """Branches know parts of a class that none knows alone; ``columns`` are shares by seed, of DCL-A2 and summed."""
    claim = "Branches learn complementary parts of a class, which their product joins."
    criterion = "the share of filters whose branches know their class together, and none alone, is higher than summed"
    ours, control = ([100 * one["complementary"] for one in columns[name]] for name in ("A2", "summed"))
    apart = difference(ours, control)
    decidable = apart is not None and bool(apart.clear)
    evidence = f"{mean_std_n(ours)} % of the filters in DCL-A2, {mean_std_n(control)} % where branches are summed"
    evidence += f"{_apart(ours, control)}."
    return Finding(claim, "4.1.4", criterion, _decide(mean(ours) > mean(control), decidable=decidable), evidence)


def _decide(true: bool, *, decidable: bool = True) -> Verdict:
    if not decidable:
        return "not decidable"
    return "holds" if true else "does not hold"


def _everywhere(claim: str, section: str, criterion: str, comparisons: Sequence[Comparison]) -> Finding:
    """A claim that one exception refutes, and that needs every column to hold."""
    refuted = any(c.equal or c.worse for c in comparisons)
    decidable = refuted or all(c.compared for c in comparisons)
    evidence = "; ".join(map(str, comparisons)) + "."
    return Finding(claim, section, criterion, _decide(not refuted, decidable=decidable), evidence)


def _minus(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def _naming(places: Sequence[str]) -> str:
    """The first three places in brackets."""
    if not places:
        return ""
    return f" ({', '.join(places[:3])}{', …' if len(places) > 3 else ''})"


def _apart(values: Errors, reference: Errors) -> str:
    """The difference of two lists over the same seeds with its 95 % interval; nothing where they cannot be paired."""
    pair = difference(values, reference) if len(values) == len(reference) else None
    return "" if pair is None else f" (difference {pair})"

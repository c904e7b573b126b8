"""The idea in two minutes on a laptop: three networks on two-digit numbers, a verdict, the plan of a network.

The digits are the excerpt of MNIST that comes with the package. So the errors are those of few images and few epochs.
They show how the tool is used, not what the paper claims.

The learning rates are chosen for these epochs on the excerpt's training digits alone: `choose_rates` trains every
network at every rate of `TRIED` and takes the lowest error, with seeds that the demo does not use. ``python -m
torch_dcl.experiments.recipes.demo`` does it again.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_dcl.experiments.columns import weights
from torch_dcl.experiments.complementary import as_plain, complementary
from torch_dcl.experiments.digits import DigitConfig, DigitRecipe, Digits, classes_of, read_mnist
from torch_dcl.experiments.protocol import Job, Outcome, RunFolder, Shown, Trained
from torch_dcl.experiments.runner import outcomes_of
from torch_dcl.experiments.settings import setting
from torch_dcl.experiments.stats import mean, mean_std_n, paired, signed
from torch_dcl.experiments.table import Grid, Line

__all__ = ["CAVEAT", "COLUMNS", "PLANNED", "RATES", "SET", "TRIED", "Demo", "DemoConfig", "choose_rates", "verdict"]

SET = "MNIST-II-01"
COLUMNS = {"baseline": "plain", "A2": "DCL-A2", "low-rank": "low-rank"}
WORDS = {
    "baseline": "LeNet as it is",
    "A2": "fc1 as two multiplied branches",
    "low-rank": "fc1 as one branch of equal weights",
}
CAVEAT = "A small excerpt and few epochs: this shows the tool, and neither confirms nor refutes the paper."
EPOCHS, IMAGES, CLIP = 6, 5000, (("clip", 1.0),)
TRIED = (0.1, 0.2, 0.3)
RATES = {"baseline": 0.3, "A2": 0.2, "low-rank": 0.2}
"""What `choose_rates` chose."""
PLANNED = "alexnet"
"""The network of torchvision whose plan is shown."""


@dataclasses.dataclass(frozen=True)
class DemoConfig(DigitConfig):
    """The settings of the demo: less than two minutes on one core, so that two cores need not be idle."""

    seeds: int = setting(3, "networks of each kind", smoke=1, least=1, most=1000)
    epochs: int = setting(EPOCHS, "passes over the images", smoke=1, least=1, most=1_000_000)
    train_images: int = setting(IMAGES, "images to train on", smoke=100, least=100, most=60_000)
    test_images: int = setting(1000, "images to test with", smoke=50, least=1, most=10_000)
    batch: int = setting(50, "images of a step", least=1, most=100_000)
    warmup: int = setting(60, "steps until the learning rate is reached", least=0, most=1_000_000_000)
    data: str = setting("excerpt", "the digits inside the package; or a folder with MNIST", machine=True)
    device: str = setting("cpu", 'cpu, cuda, or "auto"', machine=True)


class Demo(DigitRecipe[DemoConfig]):
    """A plain network, DCL-A2 and a low-rank network of DCL's weights, each with every seed."""

    name = "demo"
    unit = "networks"
    config_type = DemoConfig
    stacked = False  # on a CPU networks run faster one by one

    def jobs(self, outcomes: Mapping[Job, Outcome]) -> list[Job]:
        """None depends on another."""
        seeds = range(self.config.seeds)
        return [Job(column, SET, seed, RATES[column], options=CLIP) for column in COLUMNS for seed in seeds]

    def describe(self, fleets: Sequence[Sequence[Job]]) -> str:
        return COLUMNS[fleets[0][0].network]

    def outcomes(self, jobs: Sequence[Job], trained: Trained) -> list[Outcome]:
        """Errors, and what a filter of the first DCL network responds to."""
        outcomes = super().outcomes(jobs, trained)
        if jobs[0].network == "A2" and jobs[0].seed == 0:
            images, labels = self.sets_of(jobs).judge[SET]
            try:
                response = complementary(trained.fleet.network(0), "fc1", None, images[:, None].cpu() / 255, labels)
                extra: dict[str, Any] = as_plain(response, f"DCL-A2 on {SET}, the network of seed 0")
            except ValueError as error:
                extra = {"reason": str(error)}
            outcomes[0] = dataclasses.replace(outcomes[0], extra={"knowledge": extra})
        return outcomes

    def result(self, folder: RunFolder) -> dict[str, Any]:
        """Errors, weights and time of each network, a filter, and the plan of a common network, as JSON."""
        known = outcomes_of(folder)
        groups = {column: [known[job] for job in self.jobs({}) if job.network == column] for column in COLUMNS}
        rows = [
            {"column": column, "weights": weights(column, classes_of(group[0].job)),
             "errors": [outcome.error for outcome in group], "seconds": sum(outcome.seconds for outcome in group)}
            for column, group in groups.items()
        ]  # fmt: skip
        content = {
            "set": SET, "networks": rows, "verdict": verdict(rows), "knowledge": groups["A2"][0].extra["knowledge"],
            "planned": plan_of_a_network(),
        }  # fmt: skip
        folder.write_json("demo", content)
        return content

    def shown(self, result: dict[str, Any], width: int) -> Shown:
        from rich.text import Text

        *sentences, caveat = result["verdict"]
        plan = Text(f"\nWhich layers of {PLANNED} pay, by dcl plan {PLANNED}:", style="bold")
        return [
            demo_grid(result["networks"]).as_rich(width),
            *sentences,
            filter_in_words(result["knowledge"]),
            caveat,
            plan,
            Text(result["planned"], no_wrap=True),
        ]


def demo_grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """The networks as a grid."""
    lines = []
    for row in rows:
        each = " ".join(f"{error:.1f}" for error in row["errors"])
        texts = (f"{row['weights']:,}", mean_std_n(row["errors"]), each, f"{row['seconds']:.0f} s")
        lines.append(Line((COLUMNS[row["column"]], WORDS[row["column"]], *texts)))
    heads = ("<network", "<", "weights", "test error %, mean ± std (n)", "every seed", "time")
    return Grid(heads, lines, ("", "every seed", "time"))


def verdict(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the errors and weights of the networks say, and no more."""
    by_column = {row["column"]: row for row in rows}
    ours = by_column["A2"]
    fewer = 100 * (1 - ours["weights"] / by_column["baseline"]["weights"])
    sentences = [f"DCL-A2 has {fewer:.0f} % fewer weights than the plain network."]
    for column in ("baseline", "low-rank"):
        errors, rival = by_column[column]["errors"], COLUMNS[column]
        if len(ours["errors"]) < 2:
            gap = signed(mean(ours["errors"]) - mean(errors))
            sentences.append(f"Against the {rival} one its error differs by {gap} points; one seed cannot say more.")
            continue
        gap_of = paired(ours["errors"], errors)
        interval = (
            f"{signed(gap_of.mean)} points, 95 % interval {signed(gap_of.low)} to {signed(gap_of.high)}, n = {gap_of.n}"
        )
        if gap_of.clear:
            sentences.append(
                f"It errs {'less' if gap_of.clear < 0 else 'more'} often than the {rival} one ({interval})."
            )
        else:
            sentences.append(f"Its errors cannot be told from those of the {rival} one ({interval}).")
    return [*sentences, CAVEAT]


def filter_in_words(response: Mapping[str, Any]) -> str:
    """What a filter of the DCL layer and its branches respond to."""
    if "reason" in response:
        return f"No filter can be shown: {response['reason']}."
    own = "; ".join(
        f"branch {t} to tens {tens} and units {units}" for t, (tens, units) in enumerate(response["own"], 1)
    )
    number = response["names"][response["highest"]]
    words = f"Filter {response['filter']} of the DCL layer responds most to the number {number}"
    return f"{words}. By themselves its branches respond most: {own}."


def plan_of_a_network() -> str:
    """The plan of `PLANNED` as its table: which layers of a common network pay."""
    import torchvision

    from torch_dcl.convert import plan

    return str(plan(torchvision.models.get_model(PLANNED), (3, 224, 224)))


class _Choosing(Demo):
    purpose = "choose"


def choose_rates(
    digits: Digits, *, rates: Sequence[float] = TRIED, images: int = IMAGES, epochs: int = EPOCHS,
    seeds: Sequence[int] = (100, 101), report: Callable[[str], None] = print,
) -> dict[str, float]:  # fmt: skip
    """The learning rate of every network with the lowest error on held-out training digits."""
    recipe = _Choosing(DemoConfig(train_images=images, epochs=epochs))
    recipe.digits = digits
    chosen = {}
    for column in COLUMNS:
        errors = {}
        for lr in rates:
            jobs = [Job(column, SET, seed, lr, options=CLIP) for seed in seeds]
            fleet = recipe.fleet(jobs)
            fleet.train()
            errors[lr] = mean(fleet.evaluate(recipe.judge(jobs)).errors.tolist())
            report(f"{column} at {lr:g}: {errors[lr]:.2f} %")
        chosen[column] = min(errors, key=lambda lr: errors[lr])
    return chosen


if __name__ == "__main__":
    print(choose_rates(read_mnist(None)))
